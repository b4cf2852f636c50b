"""The policy of HTTP requests: where they go, with which credentials, how much, how often.

*Where to.* Rule R2, `blobstore.io.http.web_addresses`. Redirects are followed here and not by the
library.

*As whom.* A token is for one origin (scheme, host, port; RFC 9110 section 4.3.1). It is sent in the
clear only in a private network. The same holds for a body with credentials, whose redirect to
another origin is refused. Cookies are not
kept, and the challenge of a 401 is left to the caller. TLS certificates and names are always
checked. The environment is not read, neither netrc nor proxies: the caller gives proxies.

*How much.* Replies are asked for as they are (``Accept-Encoding: identity``) and refused when
coded. What a request takes is counted at the socket (`RequestLimits`): after the last allowed byte
nothing more is read, whatever a server says. The kernel may have received more by then, as much as
its socket buffer holds.

*How often.* After 429, 500, 502, 503, 504 and broken connections it is tried again, five times in
all, with waits that double and vary; ``Retry-After`` is obeyed up to 30 seconds, and is an error
beyond. Weights get eight attempts, and 330 seconds: the Hub's windows have 300. A request has a
deadline in addition to the limit of silence. Only the lookup of a name has no other limit than the
resolver's own.

*What comes back.* Rule R1, `blobstore.io.http.client`, of lines that
`blobstore.io.http.connections` has checked.
"""
