"""The corpus's hostile registries, as they are pulled from: case by case, by id."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable
from itertools import chain, repeat

from support.hostile_registry import IMPATIENT, TOKEN, Scene
from support.servers import WAIT, Asked, head, part, redirect, reply
from support.small_registry import Change, digest_of, unsized

_ZEROS = bytes(64 * 2**10)
_INDEX = "application/vnd.oci.image.index.v1+json"
_TIMES = 10_000


def is_manifest(asked: Asked) -> bool:
    """Return True for a request for a manifest."""
    return "/manifests/" in asked.target


def is_blob(asked: Asked, digest: str) -> bool:
    """Return True for a request for the bytes of a blob."""
    return asked.target.endswith(f"/blobs/{digest}") and asked.method == "GET"


def for_blob(digest: str, answer: Callable[[Asked], Iterable[bytes]]) -> Change:
    """Return the change of one blob's replies."""
    return lambda asked: answer(asked) if is_blob(asked, digest) else None


def _manifest_digest_header_wrong(scene: Scene) -> None:
    wrong = f"Docker-Content-Digest: {digest_of(b'another')}"
    scene.change(lambda asked: reply(200, wrong, body=scene.raw) if is_manifest(asked) else None)


def _manifest_5mib(scene: Scene) -> None:
    scene.manifest_limit = 4 * 2**20
    long = scene.raw.ljust(5 * 2**20)
    pieces = [long[at : at + len(_ZEROS)] for at in range(0, len(long), len(_ZEROS))]
    scene.change(lambda asked: chain([unsized(200)], pieces) if is_manifest(asked) else None)


def _manifest_index(scene: Scene) -> None:
    entry = {"mediaType": scene.document["mediaType"], "size": 1, "digest": digest_of(b"x")}
    scene.put({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [entry]})


def _manifest_bad_digest_layer(scene: Scene) -> None:
    document = scene.document
    document["layers"][0]["digest"] = "sha256:../../x"
    scene.put(document)


def _layer_size_lie_small(scene: Scene) -> None:
    _lie(scene, 10)
    endless = chain([unsized(200)], repeat(_ZEROS, _TIMES))
    scene.change(for_blob(scene.big, lambda _: endless))


def _layer_size_lie_big(scene: Scene) -> None:
    _lie(scene, 10**9)
    scene.change(for_blob(scene.big, lambda _: reply(200, body=b"0123456789")))


def _lie(scene: Scene, size: int) -> None:
    document = scene.document
    (layer,) = (layer for layer in document["layers"] if layer["digest"] == scene.big)
    layer["size"] = scene.declared[scene.big] = size
    scene.put(document)


def _blob_truncated_chunked(scene: Scene) -> None:
    data = max(scene.blobs, key=len)[:100_000]
    cut = head(200, "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(data), data)
    scene.change(for_blob(scene.big, lambda _: [cut]))


def _blob_wrong_but_same_size(scene: Scene) -> None:
    other = bytes(len(max(scene.blobs, key=len)))
    scene.change(for_blob(scene.big, lambda _: reply(200, body=other)))


def _blob_gzip_encoded(scene: Scene) -> None:
    coded = gzip.compress(max(scene.blobs, key=len))
    answer = reply(200, "Content-Encoding: gzip", body=coded)
    scene.change(for_blob(scene.big, lambda _: answer))


def _half(scene: Scene, *lines: str) -> Callable[[Asked], Iterable[bytes]]:
    """Return a reply that ends in the middle of the largest blob."""
    data = max(scene.blobs, key=len)
    begin = head(200, f"Content-Length: {len(data)}", *lines) + data[: len(data) // 2]
    return lambda _: [begin]


def _then(scene: Scene, *lines: str, answer: Callable[[Asked], Iterable[bytes]]) -> None:
    """Let the first reply of the largest blob break off, and the others be ``answer``."""
    asked_before: list[Asked] = []

    def change(asked: Asked) -> Iterable[bytes]:
        asked_before.append(asked)
        return _half(scene, *lines)(asked) if len(asked_before) == 1 else answer(asked)

    scene.change(for_blob(scene.big, change))


def _blob_resume_200(scene: Scene) -> None:
    _then(scene, answer=lambda _: reply(200, body=max(scene.blobs, key=len)))


def _blob_resume_wrong_range(scene: Scene) -> None:
    data = max(scene.blobs, key=len)
    line = f"Content-Range: bytes 7-{len(data) - 1}/{len(data)}"
    _then(scene, answer=lambda _: reply(206, line, body=data[7:]))


def _blob_resume_etag_changed(scene: Scene) -> None:
    whole = reply(200, 'ETag: "b"', body=max(scene.blobs, key=len))
    _then(scene, 'ETag: "a"', answer=lambda _: whole)


def _blob_416_complete(scene: Scene) -> None:
    data = max(scene.blobs, key=len)
    framed = head(200, "Transfer-Encoding: chunked") + b"%x\r\n%b\r\n" % (len(data), data)
    scene.change(
        for_blob(
            scene.big, lambda asked: part(asked, data) if "range" in asked.fields else [framed]
        )
    )


def _first(change: Change) -> Change:
    done: list[Asked] = []

    def once(asked: Asked) -> Iterable[bytes] | None:
        if done or (changed := change(asked)) is None:
            return None
        done.append(asked)
        return changed

    return once


def _blob_stall(scene: Scene) -> None:
    scene.policy = IMPATIENT
    scene.change(for_blob(scene.big, lambda asked: chain(_half(scene)(asked), repeat(WAIT, 3000))))


def _blob_flaky(scene: Scene) -> None:
    scene.change(lambda asked: reply(503) if asked.number % 2 else None)


def _redirected(scene: Scene, location: str) -> None:
    scene.change(for_blob(scene.big, lambda _: redirect(location, 307)))


def _redirect_cdn_401(scene: Scene) -> None:
    realm = f'WWW-Authenticate: Bearer realm="{scene.there.at("token")}",service="cdn"'
    scene.elsewhere(
        lambda asked: (
            reply(200, body=b'{"token":"x"}')
            if asked.target.startswith("/token")
            else reply(401, realm)
        )
    )
    _redirected(scene, scene.there.at("blob"))


def _redirect_http_downgrade(scene: Scene) -> None:
    scene.elsewhere(lambda _: reply(200, body=max(scene.blobs, key=len)))
    _redirected(scene, scene.there.at("blob"))


def _redirect_loopback(scene: Scene) -> None:
    scene.is_public = lambda address: address == scene.here.host
    _redirect_http_downgrade(scene)


def _redirect_metadata(scene: Scene) -> None:
    scene.is_public = lambda address: address == scene.here.host
    _redirected(scene, "http://169.254.169.254/latest/meta-data/")


def _redirect_file(scene: Scene) -> None:
    _redirected(scene, "file:///etc/passwd")


def _redirect_loop(scene: Scene) -> None:
    back = scene.here.at(f"v2/library/tiny/blobs/{scene.big}")
    scene.elsewhere(lambda _: redirect(back, 307))
    _redirected(scene, scene.there.at("blob"))


def _challenged(scene: Scene, challenge: str, *, for_ever: bool = False) -> None:
    """Let the registry answer 401 to whatever comes without a token, and give tokens away."""

    def change(asked: Asked) -> Iterable[bytes] | None:
        if asked.target.startswith("/token"):
            return reply(200, body=json.dumps({"token": TOKEN}).encode())
        if for_ever or asked.fields.get("authorization") != f"Bearer {TOKEN}":
            return reply(401, f"WWW-Authenticate: {challenge}")
        return None

    scene.change(change)


def _bearer(realm: str, scope: str = "repository:library/tiny:pull") -> str:
    return f'Bearer realm="{realm}",service="registry",scope="{scope}"'


def _auth_realm_other_host(scene: Scene) -> None:
    scene.elsewhere(lambda _: reply(200, body=b'{"token":"x"}'))
    _challenged(scene, _bearer(scene.there.at("token")))


def _auth_realm_http(scene: Scene) -> None:
    _challenged(scene, _bearer(f"http://{scene.host}/token"))


def _auth_realm_ip_literal(scene: Scene) -> None:
    _challenged(scene, _bearer("http://169.254.169.254/token"))


def _auth_realm_file(scene: Scene) -> None:
    _challenged(scene, _bearer("file:///etc/passwd"))


def _auth_realm_garbage(scene: Scene) -> None:
    _challenged(scene, 'Bearer realm="x')


def _auth_401_loop(scene: Scene) -> None:
    _challenged(scene, _bearer(scene.here.at("token")), for_ever=True)


def _auth_token_100mb(scene: Scene) -> None:
    _challenged(scene, _bearer(scene.here.at("token")))
    endless = chain([unsized(200), b'{"token":"'], repeat(b"t" * len(_ZEROS), 1600))
    scene.change(lambda asked: endless if asked.target.startswith("/token") else None)


def _auth_token_empty(scene: Scene) -> None:
    _challenged(scene, _bearer(scene.here.at("token")))
    empty = reply(200, body=b'{"token":""}')
    scene.change(lambda asked: empty if asked.target.startswith("/token") else None)


def _auth_scope_widened(scene: Scene) -> None:
    _challenged(scene, _bearer(scene.here.at("token"), "repository:*:*"))


def _rate_429_date(scene: Scene) -> None:
    from email.utils import formatdate
    from time import time

    scene.change(
        _first(lambda _: reply(429, f"Retry-After: {formatdate(time() + 1.5, usegmt=True)}"))
    )


def _rate_429_1e9(scene: Scene) -> None:
    scene.change(lambda _: reply(429, "Retry-After: 1000000000"))


def _nothing(_scene: Scene) -> None:
    """Change nothing: the registry's certificate is what is wrong."""


def _catalog_endless_link(scene: Scene) -> None:
    def page(asked: Asked) -> Iterable[bytes] | None:
        if not asked.target.startswith("/v2/_catalog"):
            return None
        link = 'Link: </v2/_catalog?n=1000&last=a>; rel="next"'
        return reply(200, link, body=b'{"repositories":["library/tiny"]}')

    scene.change(page)
    scene.run = scene.names


PULLS: dict[str, Callable[[Scene], None]] = {
    "registry-manifest-digest-header-wrong": _manifest_digest_header_wrong,
    "registry-manifest-5MiB": _manifest_5mib,
    "registry-manifest-index": _manifest_index,
    "registry-manifest-bad-digest-layer": _manifest_bad_digest_layer,
    "registry-manifest-layer-size-lie-small": _layer_size_lie_small,
    "registry-manifest-layer-size-lie-big": _layer_size_lie_big,
    "registry-blob-truncated-chunked": _blob_truncated_chunked,
    "registry-blob-wrong-but-same-size": _blob_wrong_but_same_size,
    "registry-blob-gzip-encoded": _blob_gzip_encoded,
    "registry-blob-resume-200": _blob_resume_200,
    "registry-blob-resume-wrong-range": _blob_resume_wrong_range,
    "registry-blob-resume-etag-changed": _blob_resume_etag_changed,
    "registry-blob-416-complete": _blob_416_complete,
    "registry-blob-stall": _blob_stall,
    "registry-blob-flaky-50pct": _blob_flaky,
    "registry-redirect-cdn-401": _redirect_cdn_401,
    "registry-redirect-http-downgrade": _redirect_http_downgrade,
    "registry-redirect-loopback": _redirect_loopback,
    "registry-redirect-metadata": _redirect_metadata,
    "registry-redirect-file": _redirect_file,
    "registry-redirect-loop": _redirect_loop,
    "registry-auth-realm-other-host": _auth_realm_other_host,
    "registry-auth-realm-http": _auth_realm_http,
    "registry-auth-realm-ip-literal": _auth_realm_ip_literal,
    "registry-auth-realm-file": _auth_realm_file,
    "registry-auth-realm-unquoted-garbage": _auth_realm_garbage,
    "registry-auth-401-loop": _auth_401_loop,
    "registry-auth-token-100MB": _auth_token_100mb,
    "registry-auth-token-empty": _auth_token_empty,
    "registry-auth-scope-widened": _auth_scope_widened,
    "registry-rate-429-retry-after-date": _rate_429_date,
    "registry-rate-429-1e9": _rate_429_1e9,
    "registry-tls-expired": _nothing,
    "registry-tls-wrong-host": _nothing,
    "registry-catalog-endless-link": _catalog_endless_link,
}
CERTIFICATES = {
    "registry-redirect-http-downgrade": "certificate",
    "registry-auth-realm-http": "certificate",
    "registry-tls-expired": "expired",
    "registry-tls-wrong-host": "other-host",
}
"""Cases whose registry has TLS, and its certificate."""
