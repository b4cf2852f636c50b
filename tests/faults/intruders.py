"""Another user's links, FIFOs, folders and devices at every path that a command touches.

Before a command runs, one path that it is known to touch is taken by something else. It succeeds or
ends with a typed error, never hangs, and writes nothing outside the store: what links lead to is as
it was. Every model that the intruder's file is no part of stays whole. The command runs as an
ordinary user, and as root.
"""

import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

from faults.lab.cases import Case, Figures, Task
from faults.lab.checker import look
from faults.lab.commands import FILE_COMMANDS, READERS
from faults.mounts import NotShownError
from pydantic import TypeAdapter

_NOBODY = 65534
TypeAdapter(int)  # loads what typer's checks need: the other user can't read Python's own folder
_RANDOM = re.compile(r"/(new|[0-9]+)-[0-9a-f]{16}(/|$)|\.[0-9a-f]{16}$", re.ASCII)
_MAY_BE_LINKS = ("blobs", "manifests", ".")
"""Folders of the store that may be links to folders (docs/design.md, "On disk")."""
_LINK = "link to a folder"


def experiment(task: Task) -> Figures:
    """Return what so many intruders could do, evenly spread; all of them in the long form."""
    if os.geteuid() != 0:
        raise NotShownError("being another user needs root")
    figures = Figures()
    changing = [case for case in task.cases() if case.command not in FILE_COMMANDS]
    tries = [
        (case, path, kind, user)
        for case in (*changing, *(Case(command, task.folder) for command in READERS[:2]))
        for path in _paths(case)
        for kind in KINDS
        for user in (0, _NOBODY)
        if not (path in _MAY_BE_LINKS and kind == _LINK)
    ]
    for one in task.pick(tries):
        _intrude(*one, figures)
    found = Figures(is_quiet=True)
    _intrude(task.cases()[0], "blobs", _LINK, 0, found)  # which is allowed: it writes outside
    figures.control(found)
    return figures


def _paths(case: Case) -> list[str]:
    """Return the paths in the store that a command touches, but for those with random names."""
    paths = {
        os.path.relpath(path, case.watched)
        for call in case.calls
        for path in call.paths
        if f"{case.watched}/" in path
    }
    return sorted(
        path for path in paths if not path.startswith("..") and not _RANDOM.search(f"/{path}")
    )


def _folder(path: Path, _outside: Path) -> None:
    path.mkdir()
    (path / "something").write_bytes(b"something")


def _unreadable(path: Path, _outside: Path) -> None:
    path.write_bytes(b"unreadable")
    path.chmod(0)


KINDS: Mapping[str, Callable[[Path, Path], None]] = {
    "link to a file": lambda path, outside: path.symlink_to(outside / "file"),
    _LINK: lambda path, outside: path.symlink_to(outside / "folder"),
    "link to nothing": lambda path, outside: path.symlink_to(outside / "nothing"),
    "FIFO": lambda path, _outside: os.mkfifo(path),
    "folder": _folder,
    # /dev/zero: it has no end
    "device": lambda path, _outside: os.mknod(path, stat.S_IFCHR | 0o644, os.makedev(1, 5)),
    "unreadable file": _unreadable,
}


def _intrude(case: Case, name: str, kind: str, user: int, figures: Figures) -> None:
    """Put something at one path of a store, run the command, and check the store and outside."""
    root, outside = case.copy(), case.work / "outside"
    path = root / name
    try:
        _make_outside(outside)
        path.parent.mkdir(parents=True, exist_ok=True)
        for owned in (root, *root.rglob("*")):
            os.chown(owned, user, user, follow_symlinks=False)
        if os.path.lexists(path):
            path.rename(case.work / "aside")
        KINDS[kind](path, outside)
        before, whole = _snapshot(outside), _whole(root)
        done = case.run(root, before=lambda: _be(user))
        what = f"as {user}, {kind} at {name}"
        at = f"{case.command.name} {what}: {done}"
        figures.counts["refused" if done.code else "done all the same"] += 1
        figures.expect(not done.hung, "hangs", at)
        if done.code != 0:
            case.check_refused(done, figures, what)
        figures.expect(_snapshot(outside) == before, "written outside", at)
        may_go = set(case.start.models.items() - case.end.models.items())
        hurt = set(whole.items()) - set(_whole(root).items()) - may_go
        figures.expect(not hurt, "models hurt", f"{at}: {hurt}")
    finally:
        for made in (root, outside, case.work / "aside"):
            if os.path.lexists(made):
                shutil.rmtree(made) if stat.S_ISDIR(made.lstat().st_mode) else made.unlink()


def _make_outside(outside: Path) -> None:
    """Make a file and a folder that everybody may write to, with all that commands search for."""
    folder = outside / "folder"
    tree = ("registry.ollama.ai", "library", "old", "latest")
    blob = f"sha256-{'0' * 64}"
    names = ["/".join((*tree[start:], "0" * 64)) for start in range(len(tree) + 1)]
    names += [blob, f"{blob}-9", f"1-{'0' * 16}/{blob}", f"{'0' * 16}/{blob}-9"]
    for path in (outside / "file", *(folder / name for name in names)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"another's")
    for path in (outside, *outside.rglob("*")):
        path.chmod(0o777)


def _snapshot(outside: Path) -> list[tuple[str, int, int, bytes]]:
    """Return names, modes, times and bytes of all files outside."""
    found = []
    for path in sorted((outside, *outside.rglob("*"))):
        status, data = path.lstat(), path.read_bytes() if path.is_file() else b""
        found.append((path.name, status.st_mode, status.st_mtime_ns, data))
    return found


def _whole(root: Path) -> dict[str, str]:
    if root.is_symlink() or not root.is_dir():
        return {}
    found = look(root)
    return {name: digest for name, digest in found.models.items() if name not in found.broken}


def _be(user: int) -> None:
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
