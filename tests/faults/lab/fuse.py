"""A folder of two files, served by this process: a recorded disk, and marks beside it.

The kernel's protocol itself (linux/fuse.h, version 7.31), as much as a loop device and a text file
need. ``disk`` holds the bytes of an image; what is written to ``marks`` comes to stand between the
writes that came before and those that come after. Requests are answered one after the other: what
was written before a flush is on the "disk" when the flush is answered.
"""

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from faults.mounts import NotShownError

WRITE, FLUSH, MARK = 1, 2, 3
RECORD = struct.Struct("=BQI")
"""What a record starts with: its kind, the offset on the disk, how many bytes follow."""

_HEAD = struct.Struct("=IIQQIIII")
_ANSWER = struct.Struct("=IiQ")
_ATTRIBUTES = struct.Struct("=QQQQQQIIIIIIIIII")
_ROOT, _DISK, _MARKS = 1, 2, 3
_NAMES = {b"disk": _DISK, b"marks": _MARKS}
_MOST = 2**20
_LOOKUP, _GETATTR, _SETATTR, _OPEN, _READ, _WRITE, _FSYNC, _INIT = 1, 3, 4, 14, 15, 16, 20, 26
_ZEROS = {17: 80, 18: 0, 25: 0, 27: 16, 29: 0}
"""Bytes of the answers of zeros: STATFS, RELEASE, FLUSH, OPENDIR, RELEASEDIR."""
_UNANSWERED = frozenset({2, 36, 42})  # FORGET, INTERRUPT, BATCH_FORGET
_BIG_WRITES, _MAX_PAGES = 1 << 5, 1 << 22
_FRESH = 1  # FOPEN_DIRECT_IO
_NO_SUID_NO_DEVICES = 2 | 4


class RecordedDisk:
    def __init__(self, image: bytes, log: BinaryIO) -> None:
        """Start with the bytes of ``image``; records go to ``log``."""
        self._data = bytearray(image)
        self._log = log
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            _INIT: self._init,
            _LOOKUP: self._lookup,
            _GETATTR: self._getattr,
            _SETATTR: self._getattr,
            _OPEN: self._open,
            _READ: self._read,
            _WRITE: self._write,
            _FSYNC: self._fsync,
            **{operation: partial(_zeros, nbytes) for operation, nbytes in _ZEROS.items()},
        }

    def serve(self, fd: int) -> None:
        """Answer until the folder is unmounted."""
        while True:
            try:
                request = os.read(fd, _MOST + 2**16)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR):  # the one who asked has gone
                    continue
                raise
            _, operation, unique, node, *_ = _HEAD.unpack_from(request)
            if operation in _UNANSWERED:
                continue
            answer = self._answers.get(operation)
            try:
                body = answer(node, request[_HEAD.size :]) if answer is not None else None
            except FileNotFoundError:
                self._send(fd, unique, b"", errno.ENOENT)
            else:
                self._send(fd, unique, body or b"", 0 if body is not None else errno.ENOSYS)

    def _send(self, fd: int, unique: int, body: bytes, error: int) -> None:
        try:
            os.write(fd, _ANSWER.pack(_ANSWER.size + len(body), -error, unique) + body)
        except FileNotFoundError:
            return  # it was interrupted

    def _init(self, _node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("=IIII", body)[3] & (_BIG_WRITES | _MAX_PAGES)
        return struct.pack(
            "=IIIIHHIIHH32x", 7, 31, _MOST, flags, 16, 12, _MOST, 1, _MOST // 4096, 0
        )

    def _attributes(self, node: int) -> bytes:
        size = len(self._data) if node == _DISK else 0
        mode = stat.S_IFDIR | 0o755 if node == _ROOT else stat.S_IFREG | 0o600
        return _ATTRIBUTES.pack(
            node, size, size // 512, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, 4096, 0
        )

    def _lookup(self, _node: int, body: bytes) -> bytes:
        found = _NAMES.get(body.rstrip(b"\0"))
        if found is None:
            raise FileNotFoundError
        return struct.pack("=QQQQII", found, 0, 60, 60, 0, 0) + self._attributes(found)

    def _getattr(self, node: int, _body: bytes) -> bytes:
        return struct.pack("=QII", 60, 0, 0) + self._attributes(node)

    def _open(self, node: int, _body: bytes) -> bytes:
        return struct.pack("=QII", 0, _FRESH if node == _MARKS else 0, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        return bytes(self._data[offset : offset + size]) if node == _DISK else b""

    def _write(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("=QQI", body)
        data = body[40 : 40 + size]
        if node == _DISK:
            self._data[offset : offset + size] = data
        self._note(WRITE if node == _DISK else MARK, offset, data)
        return struct.pack("=II", size, 0)

    def _fsync(self, _node: int, _body: bytes) -> bytes:
        self._note(FLUSH, 0, b"")
        return b""

    def _note(self, kind: int, offset: int, data: bytes) -> None:
        self._log.write(RECORD.pack(kind, offset, len(data)) + data)


def _zeros(nbytes: int, _node: int, _body: bytes) -> bytes:
    return bytes(nbytes)


def serve(image: bytes, log: Path, folder: Path) -> int:
    """Serve two files in a process until unmounted; return its id. Raises: NotShownError."""
    try:
        fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotShownError(f"a recorded disk needs FUSE: {error}") from error
    try:
        library = ctypes.CDLL(None, use_errno=True)
        data = f"fd={fd},rootmode=40000,user_id=0,group_id=0".encode()
        if library.mount(b"lab", os.fsencode(folder), b"fuse", _NO_SUID_NO_DEVICES, data) != 0:
            raise NotShownError(f"can't mount FUSE: {os.strerror(ctypes.get_errno())}")
        pid = os.fork()
        if pid == 0:
            _be_the_server(fd, image, log)
        return pid
    finally:
        os.close(fd)


def _be_the_server(fd: int, image: bytes, log: Path) -> None:
    code = 1
    try:
        # A reader of the experiment's output waits for its end, and not for this process, which a
        # busy disk outlives.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        with log.open("wb") as file:
            RecordedDisk(image, file).serve(fd)
        code = 0
    finally:
        os._exit(code)
