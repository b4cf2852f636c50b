"""The files of a tar, found by reading its headers from one to the next.

Python's tarfile is not used. It accepts what rule A1 refuses (links, devices, sparse files, a file
that is cut after its last header), ends quietly at a damaged header, keeps a dictionary for each of
100,000 members, and can't begin in the middle of frames.
"""

from __future__ import annotations

from collections.abc import Mapping

from blobstore.errors import CorruptDataError, LimitExceededError
from blobstore.formats.tar import (
    BLOCK,
    MAX_EXTENSION,
    Member,
    TarHeader,
    extended,
    in_blocks,
    parse_block,
    parse_extension,
    path_of,
)
from blobstore.store.archive.tar_contents import Contents

MAX_MEMBERS = 400_000
"""Headers of an archive: of files, of folders, and of extensions before them."""
_MAX_EXTENSIONS = 2**24
"""Bytes of all PAX records and long paths; paths of over 100 bytes have some."""
MAX_PATHS = 2**27
"""Bytes of all paths, which are held in memory: a compressed archive has room for gigabytes."""
_MAX_PADDING = 2**20
"""Zeros after the end: tar fills its last record, of 10 KiB unless another size is asked for."""
_READ_AT_ONCE = 2**16


class Members:
    """The files of a tar by path, each found when it is needed. Not safe between threads."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._what = contents.name
        self._found: dict[str, Member] = {}
        self._path_bytes = 0
        self._extension_bytes = 0
        self._headers = 0
        self._at = 0
        self._is_complete = False
        self._block = memoryview(bytearray(BLOCK))

    def find(self, path: str) -> Member | None:
        """Return a file; None if the archive has no file of that path.

        Headers are read until it is found. Raises: as `all`.
        """
        while path not in self._found and not self._is_complete:
            self._next()
        return self._found.get(path)

    def all(self) -> Mapping[str, Member]:
        """Return all files, and check the archive's end.

        Raises: CorruptDataError (rule A1) for a header that is not valid, a path twice, a missing
        end, data after the end; LimitExceededError for more than 400,000 headers, 128 MiB of
        paths, or 16 MiB of extensions; StorageError.
        """
        while not self._is_complete:
            self._next()
        return self._found

    def _next(self) -> None:
        header = self._header()
        if header is None:
            self._check_end()
            self._is_complete = True
            return
        path = path_of(header, self._what)
        member = Member(path or "", self._at, header.size)
        if self._contents.size is not None and member.offset + member.size > self._contents.size:
            raise self._invalid(f"{path!r} has {header.size:,} bytes, more than are left")
        if path is not None:
            self._add(member)
        self._at = member.end

    def _add(self, member: Member) -> None:
        if member.path in self._found:
            raise self._invalid(f"{member.path!r} appears twice")
        self._path_bytes += len(member.path.encode())
        if self._path_bytes > MAX_PATHS:
            raise self._too_much(f"{MAX_PATHS:,} bytes of paths")
        self._found[member.path] = member

    def _header(self) -> TarHeader | None:
        """Return the next file's header, extensions included; None at the end."""
        path: str | None = None
        size: int | None = None
        is_extended = False
        while (header := self._block_at()) is not None and header.extends:
            if header.size > MAX_EXTENSION:
                raise self._invalid("a path or PAX records of more than 1 MiB")
            self._extension_bytes += header.size
            if self._extension_bytes > _MAX_EXTENSIONS:
                raise self._too_much(f"{_MAX_EXTENSIONS:,} bytes of PAX records and long paths")
            data = memoryview(bytearray(header.size))
            if self._contents.read_at(self._at, data) < len(data):
                raise self._invalid("it ends early")
            self._at += in_blocks(header.size)
            said_path, said_size = parse_extension(header, bytes(data), self._what)
            path, size = said_path or path, size if said_size is None else said_size
            is_extended = is_extended or header.kind != b"g"
        if header is None and is_extended:
            raise self._invalid("it ends after an extension")
        return header and extended(header, (path, size), self._what)

    def _block_at(self) -> TarHeader | None:
        if self._contents.read_at(self._at, self._block) < BLOCK:
            raise self._invalid("it ends early")
        self._at += BLOCK
        self._headers += 1
        if self._headers > MAX_MEMBERS:
            raise self._too_much(f"{MAX_MEMBERS:,} headers of files, folders and extensions")
        return parse_block(bytes(self._block), self._what)

    def _check_end(self) -> None:
        """Raise CorruptDataError unless another block of zeros follows, and only zeros."""
        end = self._at
        buffer = memoryview(bytearray(_READ_AT_ONCE))
        while nbytes := self._contents.read_at(self._at, buffer):
            self._at += nbytes
            if any(buffer[:nbytes]) or self._at - end > _MAX_PADDING:
                raise self._invalid("data follow its end")
        if self._at - end < BLOCK:
            raise self._invalid("it ends early")

    def _too_much(self, limit: str) -> LimitExceededError:
        message = f"limit exceeded: {self._what} has more than {limit}"
        return LimitExceededError(message, rule="A1", path=self._what)

    def _invalid(self, reason: str) -> CorruptDataError:
        message = f"{self._what}: not a valid archive: {reason} (rule A1)"
        return CorruptDataError(message, rule="A1", path=self._what)
