"""Another user's links, FIFOs, folders and devices at every path that a command touches.

Before a command runs, one path that it is known to touch is taken by something else. It succeeds or
ends with a typed error, never hangs, and writes nothing outside the store: what links lead to is as
it was. Every model that the intruder's file is no part of stays whole. The command runs as an
ordinary user, and as root.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from pathlib import Path

from faults.lab.cases import Case, Figures, Task, store_cases
from faults.lab.checker import look
from faults.lab.command import Done
from faults.lab.commands import READERS, as_it_is
from pydantic import TypeAdapter
from support.mounts import NotShownError

from blobstore.store.local import locks as lock

_NOBODY = 65534
TypeAdapter(int)  # loads what typer's checks need: the other user can't read Python's own folder
_RANDOM = re.compile(r"/(new|[0-9]+)-[0-9a-f]{16}(/|$)|\.[0-9a-f]{16}$", re.ASCII)
_MAY_BE_LINKS = ("blobs", "manifests", ".")
"""Folders of the store that may be links to folders (docs/design.md, "On disk")."""
_ZERO = ("written outside", "hangs", "foreign errors", "models hurt", "unclear")


def experiment(task: Task) -> Figures:
    """Return what so many intruders could do, evenly spread over commands, paths and kinds.

    All of them in the long form.
    """
    if os.geteuid() != 0:
        raise NotShownError("being another user needs root")
    figures = Figures(
        "intruders", "commands", "paths", "kinds", "refused", "done all the same", zero=_ZERO
    )
    kinds = _possible(task.folder / "kinds")
    cases = [
        *store_cases(task.folder.parent / "cases"),
        *(Case(command, task.folder) for command in READERS[:2]),
    ]
    tries = [
        (case, path, kind, user)
        for case in cases
        for path in _paths(case)
        for kind in kinds
        for user in (0, _NOBODY)
    ]
    figures.most("commands", len(cases))
    figures.most("kinds", len(kinds))
    figures.most("paths", len(tries) // len(kinds) // 2)
    for case, path, kind, user in task.pick(tries):
        if not (path in _MAY_BE_LINKS and kind == "link to a folder"):
            intrude(case, path, kind, user, figures)
    if "link to a folder" in kinds:
        control(next(case for case in cases if case.command.name == "import quantized"), figures)
    return figures


def _possible(folder: Path) -> list[str]:
    """Return the kinds that the file system can hold: exFAT has neither links nor FIFOs."""
    folder.mkdir()
    possible = []
    for number, (kind, make) in enumerate(KINDS.items()):
        with suppress(OSError):
            make(folder / str(number), folder)
            possible.append(kind)
    return possible


def control(case: Case, figures: Figures) -> None:
    """Lay a link in the way of an import that does not look for links."""
    found = Figures(zero=_ZERO, quiet=True)
    careless = copy(case)
    careless.command = replace(case.command, before=_follow_links)
    intrude(careless, ".blobstore/tmp", "link to a folder", 0, found)
    figures.control(found)


def _follow_links() -> None:
    as_it_is()
    lock._refuse_links = lambda folder: None  # noqa: ARG005  # the real one names it so


def _paths(case: Case) -> list[str]:
    """Return the paths in the store that a command touches, but for those with random names."""
    names = {
        os.path.relpath(path, case.watched)
        for call in case.calls
        for path in call.paths
        if f"{case.watched}/" in path
    }
    return sorted(
        name for name in names if not name.startswith("..") and not _RANDOM.search(f"/{name}")
    )


def _fifo(path: Path, outside: Path) -> None:
    os.mkfifo(path)
    path.chmod(0o666)


def _folder(path: Path, outside: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"something")


def _device(path: Path, outside: Path) -> None:
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero: it has no end


def _socket(path: Path, outside: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the path of a socket is at most 107 bytes long
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


def _unreadable(path: Path, outside: Path) -> None:
    path.write_bytes(b"unreadable")
    path.chmod(0)


KINDS: Mapping[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    "link to a folder": lambda path, outside: path.symlink_to(outside / "folder"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "FIFO": _fifo,
    "folder": _folder,
    "device": _device,
    "socket": _socket,
    "unreadable file": _unreadable,
}


def intrude(case: Case, name: str, kind: str, user: int, figures: Figures) -> None:
    """Put something at one path of a store, run the command, and check the store and outside."""
    root, outside = case.copy(), case.work / "outside"
    _make_outside(outside)
    path = root / name
    try:
        if path.is_mount():
            return  # the root of a store on a mount of its own can't be anything else
        path.parent.mkdir(parents=True, exist_ok=True)
        _own(root, user)
        if os.path.lexists(path):
            shutil.move(path, case.work / "aside")  # on an overlay of its own that is another mount
        KINDS[kind](path, outside)
        before, whole = _snapshot(outside), _whole(root)
        done = case.run(root, before=lambda: _be(user))
        at = f"{case.command.name} as {user}, {kind} at {name}: {done.code} {done.err.strip()}"
        figures.add("intruders")
        figures.add("refused" if done.code else "done all the same")
        _check_answer(done, figures, at)
        figures.expect(_snapshot(outside) == before, "written outside", at)
        hurt = (
            set(whole.items())
            - set(_whole(root).items())
            - set(case.start.models.items() - case.end.models.items())
        )
        figures.expect(not hurt, "models hurt", f"{at}: {hurt}")
    finally:
        case.remove(root)
        for made in (root, outside, case.work / "aside"):
            _remove(made)


def _check_answer(done: Done, figures: Figures, at: str) -> None:
    figures.expect(not done.hung, "hangs", at)
    figures.expect("Traceback" not in done.err, "foreign errors", at)
    if done.code != 0:  # 2 is what mv says when there is a model of the new name
        is_clear = (
            done.code in (1, 2, 3) and done.err.startswith("Error: ") and done.err.count("\n") <= 2
        )
        figures.expect(is_clear, "unclear", at)


def _make_outside(outside: Path) -> None:
    """Make a file and a folder of another user, which everybody may write to.

    The folder contains what a command searches for, at any depth of a store.
    """
    folder = outside / "folder"
    tree = ("registry.ollama.ai", "library", "old", "latest")
    blob = f"sha256-{'0' * 64}"
    names = [f"{'/'.join(tree[start:])}/{'0' * 64}" for start in range(len(tree) + 1)]
    names += [blob, f"{blob}-9", f"1-{'0' * 16}/{blob}", f"{'0' * 16}/{blob}-9"]
    for path in (outside / "file", *(folder / name.lstrip("/") for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"another's")
    for path in (outside, *outside.rglob("*")):
        path.chmod(0o777)


def _snapshot(outside: Path) -> list[tuple[str, int, int, bytes]]:
    """Return names, modes, times and bytes of all files outside."""
    return [
        (path.name, path.lstat().st_mode, path.lstat().st_mtime_ns, _bytes_of(path))
        for path in sorted((outside, *outside.rglob("*")))
    ]


def _bytes_of(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _whole(root: Path) -> dict[str, str]:
    """Return the models whose manifests and blobs are all there and right."""
    if root.is_symlink() or not root.is_dir():
        return {}
    found = look(root)
    return {name: digest for name, digest in found.models.items() if name not in found.broken}


def _own(root: Path, user: int) -> None:
    if root.exists():
        for path in (root, *root.rglob("*")):
            try:
                os.chown(path, user, user, follow_symlinks=False)
            except PermissionError as error:
                raise NotShownError("the file system knows no owners") from error


def _remove(path: Path) -> None:
    if os.path.lexists(path):
        shutil.rmtree(path) if stat.S_ISDIR(path.lstat().st_mode) else path.unlink()


def _be(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
