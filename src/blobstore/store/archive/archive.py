"""An archive that is read: the models of a file or of a pipe, without unpacking them.

The index, the manifests and the headers of all files are read and checked when a file is opened.
Blobs are read in place. A plain file's can be mapped, so its weights are not copied.

A plain file is read at any place. Frames with a seek table are decompressed one by one. Everything
else (a pipe, a compressed file without a seek table, or with frames of more than 64 MiB) is read
once, to its end, and kept plain in a temporary file.

Memory is bounded: no more than a frame, or a window of 128 MiB, is decompressed at once. The
temporary file is bounded, too: 4 GiB and 200 times the compressed bytes. Weights compress to half
of their size at best.

Python's tarfile is not used. It accepts what rule A1 refuses (links, devices, sparse files, a file
that is cut after its last header), ends quietly at a damaged header, keeps a dictionary for each of
100,000 members, and can't begin in the middle of frames.
"""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import IO, BinaryIO

from blobstore.errors import (
    CorruptDataError,
    LimitExceededError,
    UsageError,
    from_os_error,
)
from blobstore.formats.archives import (
    BLOCK,
    FRAME_MAGIC,
    MAX_EXTENSION,
    Member,
    TarHeader,
    false_table,
    in_blocks,
    parse_block,
    parse_extension,
    path_of,
    seek_table,
    with_extensions,
)
from blobstore.formats.documents import Descriptor
from blobstore.formats.oci import (
    INDEX_PATH,
    LAYOUT_PATH,
    MAX_INDEX,
    blob_path,
    check_layout,
    parse_index,
)
from blobstore.formats.strictjson import check_limit
from blobstore.io.durable import os_errors
from blobstore.io.ranges import Closing, FileReader, OpenReader
from blobstore.names import Digest, ModelName
from blobstore.store.memory import KnownManifests
from blobstore.store.packed.files import (
    FramesReader,
    damaged_error,
    decompressor,
    zstd_frames,
)
from blobstore.store.ports import (
    Blobs,
    Readable,
    Spool,
    blob_not_found,
    check_blob_size,
    unique,
)

_HEX = 64
_PREFIX = blob_path(Digest("0" * _HEX))[:-_HEX]
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_PLAIN = 2**32
_MAX_RATIO = 200
MAX_MEMBERS = 400_000
"""Headers of an archive: of files, of folders, and of extensions before them."""
# Bytes of all PAX records and long paths; paths of over 100 bytes have some.
_MAX_EXTENSIONS = 2**24
MAX_PATHS = 2**27
"""Bytes of all paths, which are kept in memory: a compressed archive has room for gigabytes."""
# Zeros after the end: tar fills its last record, of 10 KiB unless another size is asked for.
_MAX_PADDING = 2**20
_READ_AT_ONCE = 2**16


class Contents:
    """The bytes of a tar, which are read at any place.

    ``reader`` makes a reader for one thread (None: all threads can share ``whole``). ``size``:
    bytes of the tar; None if its size is not known before its end.
    """

    size: int | None

    def __init__(self, whole: OpenReader, reader: Callable[[], OpenReader] | None = None) -> None:
        self.name = whole.name
        self.size = whole.size
        self.reader = reader or (lambda: whole)
        self._whole = whole

    def read_at(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from ``offset``; return the bytes filled: fewer only at the end.

        Raises: CorruptDataError for bytes that can't be decompressed; StorageError.
        """
        length = max(0, min(len(buffer), self._whole.size - offset))
        self._whole.readinto(min(offset, self._whole.size), buffer[:length])
        return length

    def close(self) -> None:
        self._whole.close()


class StreamedContents(Contents):
    """A tar from a pipe or a compressed file, plain in a temporary file as far as it was read.

    It is read to its end while its headers are: so one that is not valid takes no more room.
    ``said``: the bytes of the tar, if a seek table says so.
    """

    def __init__(self, name: str, file: IO[bytes], said: int | None = None) -> None:
        self._said = said
        self._spool = Spool()
        self._plain = self._spool.reserve(0)
        super().__init__(self._plain)
        self.name, self.size = name, None
        self._source = _Source(file, name)
        self._stream = _decompressing(self._source)

    def read_at(self, offset: int, buffer: memoryview) -> int:
        while self._plain.size < offset + len(buffer) and (data := self._next()):
            self._plain.write(self._plain.size, data)
            self._plain.size += len(data)
        return super().read_at(offset, buffer)

    def _next(self) -> bytes:
        import zstandard

        try:
            data = self._stream.read(_READ_AT_ONCE)
        except (zstandard.ZstdError, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise damaged_error(self.name, error) from error
        except OSError as error:
            raise from_os_error(error, "read", self.name) from error
        if self._plain.size + len(data) > (limit := _MAX_PLAIN + _MAX_RATIO * self._source.taken):
            raise LimitExceededError(
                f"limit exceeded: {self.name}: more than {limit:,} bytes were decompressed from"
                f" {self._source.taken:,}",
                rule="A1",
                path=self.name,
                hint="Decompress it, or save it again with blobstore save.",
            )
        if not data and self._said not in (None, self._plain.size):
            raise false_table(self.name, f"it says {self._said:,} bytes")
        return data

    def close(self) -> None:
        self._stream.close()
        self._source.close()
        self._spool.close()


class MemberReader(OpenReader):
    """One file of a tar."""

    identity = None

    def __init__(self, contents: Contents, member: Member, name: str) -> None:
        self.name = name
        self.size = member.size
        self._whole = contents.reader()
        self._offset = member.offset

    def readinto(self, offset: int, buffer: memoryview) -> None:
        self._check(offset, len(buffer))
        self._whole.readinto(self._offset + offset, buffer)

    def place(self) -> tuple[int, int] | None:
        place = self._whole.place()
        if place is not None and place[0] < 0:  # mmap would take it for no file, and give zeros
            raise UsageError(f"{self._whole.name} is closed")
        return place and (place[0], self._offset)


def contents_of(path: str | os.PathLike[str]) -> Contents:
    """Return the tar in a file; the first bytes tell whether it is compressed.

    Raises: NotFoundError; CorruptDataError for a seek table that is not valid; StorageError.
    """
    file = FileReader(path)
    try:
        magic = file.read(0, min(4, file.size))
        table = seek_table(file) if magic == FRAME_MAGIC else None
        if table is not None and table.has_small_frames:
            frames = zstd_frames(file, table)
            # Many small files may be in one frame.
            frames = replace(frames, decoded=lru_cache(maxsize=1)(frames.decoded))
            reader = partial(FramesReader, frames, file.name)
            return Contents(reader(), reader)
        if magic != FRAME_MAGIC and not magic.startswith(_GZIP_MAGIC):
            return Contents(file)
    except BaseException:
        file.close()
        raise
    file.close()
    with os_errors("open", path):
        opened = open(path, "rb")  # noqa: PTH123, SIM115  # closed with the contents
    return StreamedContents(os.fspath(path), opened, None if table is None else table.starts[-1])


class _Source:
    """A file whose bytes are counted as they are read. ``magic``: the first four."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self.close = file.close
        with os_errors("read", name):
            self.magic = self._ahead = file.read(4)
        self.taken = len(self.magic)

    def read(self, most: int) -> bytes:
        if self._ahead:
            data, self._ahead = self._ahead[:most], self._ahead[most:]
            return data
        data = self._file.read(most)
        self.taken += len(data)
        return data


def _decompressing(source: _Source) -> IO[bytes]:
    file: IO[bytes] = source  # type: ignore[assignment]  # what `read` needs
    if source.magic == FRAME_MAGIC:
        return decompressor().stream_reader(file, read_across_frames=True)
    if source.magic.startswith(_GZIP_MAGIC):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]  # as above
    return file


class _TarScan:
    """Finds the files of a tar by its headers, from one to the next."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._what = contents.name
        self._found: dict[str, Member] = {}
        self._path_bytes = 0
        self._extension_bytes = 0
        self._headers = 0
        self._at = 0
        self._block = memoryview(bytearray(BLOCK))

    def members(self) -> Mapping[str, Member]:
        """Return all files by path, and check the archive's end.

        Raises: CorruptDataError (rule A1) for a header that is not valid, a path twice, a missing
        end, data after the end; LimitExceededError for more than 400,000 headers, 128 MiB of
        paths, or 16 MiB of extensions; StorageError.
        """
        while (header := self._header()) is not None:
            path = path_of(header, self._what)
            member = Member(path or "", self._at, header.size)
            size = self._contents.size
            if size is not None and member.offset + member.size > size:
                raise self._invalid(f"{path!r} has {header.size:,} bytes, more than are left")
            if path is not None:
                self._add(member)
            self._at = member.end
        self._check_end()
        return self._found

    def _add(self, member: Member) -> None:
        if member.path in self._found:
            raise self._invalid(f"{member.path!r} appears twice")
        self._path_bytes += len(member.path.encode())
        if self._path_bytes > MAX_PATHS:
            raise self._too_much(f"{MAX_PATHS:,} bytes of paths")
        self._found[member.path] = member

    def _header(self) -> TarHeader | None:
        said: dict[str, str] = {}
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
            said |= parse_extension(header, bytes(data), self._what)
            is_extended = is_extended or header.kind != b"g"
        if header is None and is_extended:
            raise self._invalid("it ends after an extension")
        return header and with_extensions(header, said, self._what)

    def _block_at(self) -> TarHeader | None:
        if self._contents.read_at(self._at, self._block) < BLOCK:
            raise self._invalid("it ends early")
        self._at += BLOCK
        self._headers += 1
        if self._headers > MAX_MEMBERS:
            raise self._too_much(f"{MAX_MEMBERS:,} headers of files, folders and extensions")
        return parse_block(bytes(self._block), self._what)

    def _check_end(self) -> None:
        end = self._at
        buffer = memoryview(bytearray(_READ_AT_ONCE))
        while nbytes := self._contents.read_at(self._at, buffer):
            self._at += nbytes
            if any(buffer[:nbytes]) or self._at - end > _MAX_PADDING:
                raise self._invalid("data follows its end")
        if self._at - end < BLOCK:
            raise self._invalid("it ends early")

    def _too_much(self, limit: str) -> LimitExceededError:
        message = f"limit exceeded: {self._what} has more than {limit}"
        return LimitExceededError(message, rule="A1", path=self._what)

    def _invalid(self, reason: str) -> CorruptDataError:
        message = f"{self._what}: not a valid archive: {reason} (rule A1)"
        return CorruptDataError(message, rule="A1", path=self._what)


@dataclass(eq=False)
class _Blobs(Blobs):
    _contents: Contents
    _members: Mapping[str, Member]

    def open(self, descriptor: Descriptor) -> OpenReader:
        member = self._members.get(blob_path(descriptor.digest))
        if member is None:
            raise blob_not_found(descriptor.digest, self._contents.name)
        check_blob_size(descriptor, member.size, self._contents.name)
        name = f"blob {descriptor.digest} of {self._contents.name}"
        return MemberReader(self._contents, member, name)

    def missing(self, descriptors: Iterable[Descriptor]) -> list[Descriptor]:
        members = (
            (blob, self._members.get(blob_path(blob.digest))) for blob in unique(descriptors)
        )
        return [blob for blob, member in members if member is None or member.size != blob.size]

    def digests(self) -> set[str]:
        paths = (path for path in self._members if path.startswith(_PREFIX))
        return {digest for path in paths if len(digest := path.removeprefix(_PREFIX)) == _HEX}


class Archive(Closing, Readable):
    """The models of an archive, to be read. See `Readable`. A context manager.

    ``name``: that of the archive's only model, which then needs none in the index. ``unnamed``:
    manifests without a name, which can only be loaded under a given one.
    """

    open_blobs_stay = True  # an archive is not changed in place

    def __init__(self, contents: Contents, name: ModelName | None = None) -> None:
        self.address = contents.name
        self._contents = contents
        self._members = _TarScan(contents).members()
        self.blobs: _Blobs = _Blobs(contents, self._members)
        check_layout(self._document(LAYOUT_PATH), f"{LAYOUT_PATH} of {self.address}")
        index = parse_index(self._document(INDEX_PATH), f"{INDEX_PATH} of {self.address}")
        raw = {blob.digest: self.blobs.read(blob) for blob in unique(index)}
        named = [(one.model, raw[one.digest]) for one in index if one.model is not None]
        self.unnamed = tuple(one.digest for one in index if one.model is None)
        if name is not None:
            if len(raw) != 1:
                message = f"{self.address} has {len(raw):,} models: a name is for an archive of one"
                raise UsageError(message, hint="Choose models by their own names.")
            named = [(name, text) for text in raw.values()]
            self.unnamed = ()
        self.manifests: KnownManifests = KnownManifests(self.address, dict(named))

    def _document(self, path: str) -> bytes:
        member = self._members.get(path)
        if member is None:
            message = f"{self.address}: not a valid archive: it has no {path} (rule A2)"
            raise CorruptDataError(message, rule="A2", path=self.address)
        check_limit(f"{path} of {self.address}", member.size, "bytes", MAX_INDEX, "A2")
        return MemberReader(self._contents, member, path).read(0, member.size)

    def close(self) -> None:
        """Close the file. Arrays of models that were opened stay valid."""
        self._contents.close()


def open_archive(
    source: str | os.PathLike[str] | BinaryIO, *, name: str | ModelName | None = None
) -> Archive:
    """Return the models of an archive: of a file, or of a pipe that is open for reading.

    An archive is an OCI image layout in a tar, plain or compressed by zstandard or gzip. A pipe,
    and a compressed file that can't be read at any place, are read once, to a temporary file.
    ``transfer`` copies its models to a store, and `open_model` takes it as a store. ``name``: the
    name for the archive's only model, whatever its index calls it.

    Raises: NotFoundError; CorruptDataError (rules A1 to A3), DocumentError (A2, M1),
    DigestMismatchError for a manifest; LimitExceededError; UsageError for a ``name`` if there are
    several models; StorageError.
    """
    given = None if name is None else ModelName.of(name)
    if isinstance(source, str | os.PathLike):
        contents = contents_of(source)
    else:
        contents = StreamedContents(f"the pipe {source.name}", source)
    try:
        return Archive(contents, given)
    except BaseException:
        contents.close()
        raise
