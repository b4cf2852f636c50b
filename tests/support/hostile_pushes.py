"""The corpus's hostile registries, as they are pushed to: case by case, by id."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

from support.hostile_registry import Scene
from support.servers import Asked, reply
from support.small_registry import digest_of

_UPLOAD = re.compile(r"/v2/library/tiny/blobs/uploads/\d+\?.*")


def begins(asked: Asked) -> bool:
    """Return True for a request that begins an upload."""
    return asked.method == "POST"


def sends(asked: Asked) -> bool:
    """Return True for a request with bytes of a blob."""
    return asked.method in ("PATCH", "PUT") and _UPLOAD.fullmatch(asked.target) is not None


def _goes_on_at(scene: Scene, location: str) -> None:
    scene.elsewhere(lambda _: reply(201))
    scene.change(
        lambda asked: reply(202, f"Location: {location}", "Range: 0-0") if begins(asked) else None
    )


def _location_other_host(scene: Scene) -> None:
    _goes_on_at(scene, scene.there.at("v2/library/tiny/blobs/uploads/1"))


def _location_file(scene: Scene) -> None:
    _goes_on_at(scene, "file:///etc/passwd")


def _location_relative(_scene: Scene) -> None:
    """Change nothing: the small registry's locations are relative, with a query."""


def _wrong_digest(scene: Scene) -> None:
    line = f"Docker-Content-Digest: {digest_of(b'another')}"
    scene.change(
        lambda asked: reply(201, line) if sends(asked) and "digest=" in asked.target else None
    )


def _lost_session(scene: Scene) -> None:
    lost: list[str] = []

    def lose(asked: Asked) -> Iterable[bytes] | None:
        if not sends(asked) or lost:
            return None
        lost.append(asked.target)
        scene.registry.uploads.clear()
        return reply(404, body=b'{"errors":[{"code":"BLOB_UPLOAD_UNKNOWN"}]}')

    scene.change(lose)


def _mount_202(scene: Scene) -> None:
    # Another repository has all blobs, so that a client which knows it tries to mount them.
    scene.registry.put("library/other", "int4", scene.raw, scene.blobs)
    scene.change(
        lambda asked: scene.registry(_without_query(asked)) if "mount=" in asked.target else None
    )

    def push() -> None:
        home = scene.home()
        home.manifests.read(home.find(f"{scene.host}/library/other:int4"))
        from blobstore import transfer

        transfer({"tiny:int4": scene.name}, scene.store, home)

    scene.run = push


def _without_query(asked: Asked) -> Asked:
    from dataclasses import replace

    return replace(asked, target=asked.target.partition("?")[0])


def _source_changes(scene: Scene) -> None:
    path = scene.store.root / "blobs" / scene.big.replace(":", "-")

    def alter(asked: Asked) -> None:
        if begins(asked):
            with path.open("r+b") as file:
                file.seek(-100, os.SEEK_END)
                file.write(bytes(100))

    scene.change(alter)


PUSHES: dict[str, Callable[[Scene], None]] = {
    "registry-upload-location-other-host": _location_other_host,
    "registry-upload-location-relative": _location_relative,
    "registry-upload-location-file": _location_file,
    "registry-upload-201-wrong-digest": _wrong_digest,
    "registry-upload-lost-session": _lost_session,
    "registry-upload-mount-202": _mount_202,
    "registry-upload-source-changes": _source_changes,
}
