"""One HTTP request: where it may go, what it may take, when it is made again.

The policy of all that is read remotely.

*Where to.* http and https only. Redirects are followed here and not by the library: at most 5,
never from https to http. Behind a public server only public addresses are connected to, so that no
server out there makes this machine ask the services of its own network (169.254.169.254, a router,
a neighbour) for something; what a person names may be private. Addresses are judged after the name
was resolved, and the judged address is the one that is connected to.

*As whom.* A token is for one origin (scheme, host, port; RFC 9110 section 4.3.1), and stays behind
when a redirect leads to another, for good. It is sent in the clear only in a private network. There
are no cookies, and what a 401 says of realms is not read. TLS certificates and names are always
checked. The environment is not read: no netrc, and no proxies, because behind a proxy the address
that is connected to is unknown.

*How much.* Replies are asked for as they are (``Accept-Encoding: identity``) and refused when
coded. What an errand takes is counted at the socket (`allowance`): after the last allowed byte
nothing more is read, whatever a server says. The kernel may have received more by then, as much as
its socket buffer holds.

*How often.* After 429, 500, 502, 503, 504 and broken connections it is tried again, five times in
all, with waits that double and vary; ``Retry-After`` is obeyed up to 30 seconds, and what asks for
more is an error. An errand has a deadline beside the limit of silence. Only the lookup of a name
has no other limit than the resolver's own.
"""
