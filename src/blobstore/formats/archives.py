"""Archives: headers of tar files, and Zstandard's seekable format, both written and accepted. Pure.

Rule A1: a member is a regular file or a folder with a relative path of ordinary names (rule P1).
Links, devices, sparse files and members in several volumes are refused, and so is a header whose
checksum, size or text is not valid. Long paths and large sizes may be in PAX records or in GNU's
members of type ``L``. Owners, modes, times and extended attributes are ignored.

Written headers are USTAR with the owner 0, the mode 0644 (of folders 0755) and the time 0, so equal
contents are equal bytes. A size of 8 GiB or more and a long path do not fit in USTAR and are PAX
records.

A file in the seekable format is a row of frames, which are decompressed one by one, and a skippable
frame at its end, the *seek table*: the compressed and the decompressed size of each frame. Other
programs skip it. Checksums in a table are not checked: blobs have digests. A frame of *stored*
bytes has raw blocks only, which cost no compression.

Rule A3: the sizes in a seek table add up to the file's, and no frame has more than 1 GiB.

Sources: POSIX.1-2024 pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar's
manual, "Basic Tar Format" (types ``L`` and ``S``, numbers in base 256); facebook/zstd
contrib/seekable_format/zstd_seekable_compression_format.md (version 0.1.0); zstd_seekable.h
``ZSTD_SEEKABLE_MAX_FRAME_DECOMPRESSED_SIZE``; RFC 8878 sections 3.1.1 (frame header, blocks) and
3.1.2 (skippable frames).
"""

import re
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from blobstore.errors import CorruptDataError, InvalidNameError, LimitExceededError
from blobstore.formats.documents import MAX_BLOB
from blobstore.io.ranges import OpenReader
from blobstore.names import relative_path

BLOCK = 512
"""Headers and contents begin at multiples of this."""
END = bytes(2 * BLOCK)
"""Two blocks of zeros end an archive."""
MAX_EXTENSION = 2**20
"""Bytes of the PAX records, or of the long path, of one member."""

_MAX_USTAR_SIZE = 8**11
_MAX_USTAR_PATH = 100
_CHECKSUM = slice(148, 156)
_BLANK_CHECKSUM = b" " * 8
_OCTAL = re.compile(rb" *([0-7]*)[ \0]*", re.ASCII)
_RECORD = re.compile(rb"([1-9][0-9]{0,6}) ([^=\n]+)=", re.ASCII)
_IS_BASE_256 = 0x80
_MAX_DIGITS = 19
_REFUSED = {
    b"1": "a hard link",
    b"2": "a symbolic link",
    b"3": "a character device",
    b"4": "a block device",
    b"6": "a FIFO",
    b"K": "a link with a long target",
    b"M": "part of a multi-volume archive",
    b"S": "a sparse file",
}


@dataclass(frozen=True, slots=True)
class TarHeader:
    """One header block: the type, the path and the size of what follows."""

    kind: bytes
    path: str
    size: int

    @property
    def extends(self) -> bool:
        """True if the contents describe the next member: PAX records, or a long path."""
        return self.kind in (b"x", b"g", b"L")


@dataclass(frozen=True, slots=True)
class Member:
    """A file of an archive. ``offset`` of its first byte counts from the archive's first byte."""

    path: str
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.offset + in_blocks(self.size)


def in_blocks(size: int) -> int:
    """Return the bytes that contents of ``size`` bytes take, in whole blocks."""
    return -(-size // BLOCK) * BLOCK


def member_header(path: str, size: int = 0) -> bytes:
    """Return the header of a file, or of a folder, which everyone may list: its path ends with "/".

    It is one block, or more where PAX records are needed: for a size of 8 GiB or more, and for a
    path of over 100 bytes or not in ASCII.
    """
    records = {"path": path} if len(path) > _MAX_USTAR_PATH or not path.isascii() else {}
    if size >= _MAX_USTAR_SIZE:
        records, size = records | {"size": str(size)}, 0
    block = _block(path, size, b"5" if path.endswith("/") else b"0")
    if not records:
        return block
    data = b"".join(_record(key, value) for key, value in records.items())
    extension = _block("PaxHeaders/size", len(data), b"x")
    return extension + data.ljust(in_blocks(len(data)), b"\0") + block


def _record(key: str, value: str) -> bytes:
    rest = f" {key}={value}\n".encode()
    length = len(rest)
    while len(str(length)) + len(rest) != length:
        length = len(str(length)) + len(rest)
    return f"{length}".encode() + rest


def _block(path: str, size: int, kind: bytes) -> bytes:
    # Where the path is in PAX records, what fits of it is only shown by old programs.
    shown = path.encode("ascii", "replace")[:_MAX_USTAR_PATH]
    fields = (
        (shown if kind == b"5" else shown.rstrip(b"/")).ljust(_MAX_USTAR_PATH, b"\0"),
        (b"0000755" if kind == b"5" else b"0000644") + b"\0",
        b"0000000\0" * 2,  # owner and group
        b"%011o\0" % size,
        b"%011o\0" % 0,  # time
        _BLANK_CHECKSUM,
        kind,
        bytes(100),  # the target of a link
        b"ustar\x0000",
        bytes(64),  # names of owner and group
        b"0000000\0" * 2,  # numbers of a device
    )
    block = b"".join(fields).ljust(BLOCK, b"\0")
    return b"%b%06o\0 %b" % (block[:148], sum(block), block[156:])


def parse_block(block: bytes, what: str) -> TarHeader | None:
    """Return the header in a block, None for a block of zeros.

    ``what`` names the archive. Raises: CorruptDataError (rule A1).
    """
    if not any(block):
        return None
    if _OCTAL.fullmatch(block[_CHECKSUM]) is None:
        raise _invalid(what, "it is not a tar, or a header is damaged")
    said = _number(block[_CHECKSUM], what)
    # Old programs summed signed bytes.
    plain = block[:148] + _BLANK_CHECKSUM + block[156:]
    total = sum(plain)
    if said not in (total, total - 256 * sum(byte > 127 for byte in plain)):  # noqa: PLR2004
        raise _invalid(what, "a header's checksum is wrong")
    kind = block[156:157]
    path = _text(block[:100], what)
    if block[257:263] == b"ustar\0" and (prefix := _text(block[345:500], what)):
        path = f"{prefix}/{path}"
    size = _number(block[124:136], what)
    return with_extensions(TarHeader(b"0" if kind == b"\0" else kind, path, size), {}, what)


def parse_extension(header: TarHeader, data: bytes, what: str) -> dict[str, str]:
    """Return what an extension says of the next member: ``path`` and ``size``, if it has them.

    Raises: CorruptDataError (rule A1): also for a sparse file, a link's target, another charset.
    """
    if header.kind == b"L":
        return {"path": _text(data, what)}
    said = {}
    for key, value in _records(data, what):
        if key.startswith("GNU.sparse") or key in ("linkpath", "hdrcharset"):
            raise _invalid(what, f"the PAX record {key!r} is not supported")
        if key in ("path", "size"):  # extended attributes may be any bytes
            said[key] = _text(value, what)
    if said and header.kind == b"g":
        raise _invalid(what, "a global PAX header sets a path or a size")
    return said


def with_extensions(header: TarHeader, said: Mapping[str, str], what: str) -> TarHeader:
    """Return a member's header with what the extensions before it say.

    Raises: CorruptDataError (rule A1) for a size that is not a number; LimitExceededError.
    """
    size = said.get("size", "0")
    if not (size.isascii() and size.isdigit() and len(size) <= _MAX_DIGITS):
        raise _invalid(what, f"invalid size {size[:20]!r}")
    nbytes = int(size) if "size" in said else header.size
    if nbytes > MAX_BLOB:
        raise LimitExceededError(f"limit exceeded: {what}: a member of {nbytes:,} bytes", rule="A1")
    return TarHeader(header.kind, said.get("path", header.path), nbytes)


def _records(data: bytes, what: str) -> Iterator[tuple[str, bytes]]:
    """Yield PAX records: ``LENGTH KEY=VALUE`` and a newline, the length that of the record."""
    at = 0
    while at < len(data):
        match = _RECORD.match(data, at)
        end = at + int(match[1]) if match else 0
        if match is None or not match.end() < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _invalid(what, "a PAX record is not valid")
        yield match[2].decode("utf-8", "replace"), data[match.end() : end - 1]
        at = end


def path_of(header: TarHeader, what: str) -> str | None:
    """Return the path of a file, None for a folder.

    Raises: CorruptDataError (rule A1) for other kinds of members, and for a path that is not one of
    ordinary names below the archive.
    """
    is_folder = header.kind == b"5" or (header.kind == b"0" and header.path.endswith("/"))
    if header.kind != b"0" and not is_folder:
        named = _REFUSED.get(header.kind, f"of the unknown type {header.kind!r}")
        raise _invalid(what, f"{header.path[:100]!r} is {named}")
    if is_folder and header.size:
        raise _invalid(what, f"the folder {header.path[:100]!r} has contents")
    path = header.path.removeprefix("./")
    if is_folder and path.strip("/.") == "":
        return None
    try:
        relative_path(path.removesuffix("/") if is_folder else path)
    except InvalidNameError as error:
        raise _invalid(what, error.message) from error
    return None if is_folder else path


def _number(field: bytes, what: str) -> int:
    if field[0] & _IS_BASE_256:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    match = _OCTAL.fullmatch(field)
    if match is None:
        raise _invalid(what, "a number in a header is not octal")
    return int(match[1] or b"0", 8)


def _text(field: bytes, what: str) -> str:
    try:
        return field.partition(b"\0")[0].decode()
    except UnicodeDecodeError:
        raise _invalid(what, "a path is not UTF-8") from None


def _invalid(what: str, reason: str) -> CorruptDataError:
    return CorruptDataError(f"{what}: not a valid archive: {reason} (rule A1)", rule="A1")


FRAME_MAGIC = b"\x28\xb5\x2f\xfd"
_MAX_FRAME = 2**30
_MAX_SMALL_FRAME = 2**26
# Bytes of a seek table: of 2 TB in frames of 1 MiB, or of two million files.
_MAX_TABLE = 2**24

_FOOTER = struct.Struct("<IBI")
_SKIPPABLE_MAGIC = 0x184D2A5E
_SKIPPABLE_BYTES = 8
_TABLE_MAGIC = 0x8F92EAB1
_MAX_FRAMES = 0x8000000
_HAS_CHECKSUMS = 0x80
_RESERVED = 0x7C
_MAX_BLOCK = 2**17
# A frame header's descriptor: a single segment, whose size has four bytes; no checksum.
_SINGLE_SEGMENT_4_BYTES = 0xA0


@dataclass(frozen=True, slots=True)
class SeekTable:
    """Where each frame begins in the file, and where in the contents; the last item is the end."""

    places: Sequence[int]
    starts: Sequence[int]

    @property
    def has_small_frames(self) -> bool:
        """True if each frame is small enough to be decompressed as a whole."""
        return all(end - start <= _MAX_SMALL_FRAME for start, end in pairwise(self.starts))


def encode_table(frames: Sequence[tuple[int, int]]) -> bytes:
    """Return the seek table of frames, each given as its compressed and decompressed bytes."""
    entries = b"".join(struct.pack("<II", *frame) for frame in frames)
    head = struct.pack("<II", _SKIPPABLE_MAGIC, len(entries) + _FOOTER.size)
    return head + entries + _FOOTER.pack(len(frames), 0, _TABLE_MAGIC)


def seek_table(file: OpenReader) -> SeekTable | None:
    """Return where the frames of a file begin; None without a table of at most 16 MiB.

    Raises: CorruptDataError (rule A3).
    """
    if file.size < _FOOTER.size:
        return None
    count, flags, magic = _FOOTER.unpack(file.read(file.size - _FOOTER.size, _FOOTER.size))
    if magic != _TABLE_MAGIC:
        return None
    if flags & _RESERVED or count > _MAX_FRAMES:
        raise false_table(file.name, "its footer is not valid")
    entry_bytes = 12 if flags & _HAS_CHECKSUMS else 8
    nbytes = _SKIPPABLE_BYTES + count * entry_bytes + _FOOTER.size
    if nbytes > file.size:
        raise false_table(file.name, "it is longer than the file")
    if nbytes > _MAX_TABLE:
        return None
    table = _table(file.read(file.size - nbytes, nbytes), entry_bytes, file.name)
    if table.places[-1] + nbytes != file.size:
        raise false_table(file.name, "its sizes do not add up to the file's")
    return table


def _table(data: bytes, entry_bytes: int, name: str) -> SeekTable:
    if struct.unpack_from("<II", data) != (_SKIPPABLE_MAGIC, len(data) - _SKIPPABLE_BYTES):
        raise false_table(name, "its frame is not a skippable frame")
    places, starts = array("Q", [0]), array("Q", [0])  # millions of frames take little memory
    for begin in range(_SKIPPABLE_BYTES, len(data) - _FOOTER.size, entry_bytes):
        compressed, plain = struct.unpack_from("<II", data, begin)
        if plain > _MAX_FRAME:
            raise false_table(name, f"a frame has {plain:,} bytes, at most {_MAX_FRAME:,}")
        if compressed > plain + plain // 256 + 2**12:  # zstd.h `ZSTD_compressBound`
            raise false_table(name, f"a frame of {plain:,} bytes can't take {compressed:,}")
        places.append(places[-1] + compressed)
        starts.append(starts[-1] + plain)
    return SeekTable(places, starts)


def false_table(name: str, problem: str) -> CorruptDataError:
    """Return the error of a seek table that is not valid."""
    message = f"{name}: not a valid seek table: {problem} (rule A3)"
    return CorruptDataError(message, rule="A3", path=name)


def stored_frame(data: memoryview) -> Iterator[bytes | memoryview]:
    """Yield the parts of a frame that holds ``data``, at most 1 GiB, as it is."""
    yield FRAME_MAGIC + struct.pack("<BI", _SINGLE_SEGMENT_4_BYTES, len(data))
    for begin in range(0, max(len(data), 1), _MAX_BLOCK):
        block = data[begin : begin + _MAX_BLOCK]
        is_last = begin + len(block) == len(data)
        yield (len(block) << 3 | is_last).to_bytes(3, "little")
        yield block
