"""Headers of tar archives: the ones that we write, and the ones that we accept. Pure.

Rule A1: a member is a regular file or a folder with a relative path of ordinary names (rule P1).
Links, devices, sparse files and members in several volumes are refused, and so is a header whose
checksum, size or text is not valid. Long paths and large sizes may be in PAX records or in GNU's
members of type ``L``. Owners, modes, times and extended attributes are ignored.

Written headers are USTAR with the owner 0, the mode 0644 (of folders 0755) and the time 0, so equal
contents are equal bytes. A size of 8 GiB or more and a long path do not fit in USTAR and are PAX
records.

Sources: POSIX.1-2024 pax, "ustar Interchange Format" and "pax Extended Header"; GNU tar's
manual, "Basic Tar Format" (types ``L`` and ``S``, numbers in base 256).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from blobstore.errors import CorruptDataError, InvalidNameError, LimitExceededError
from blobstore.formats.documents import MAX_BLOB
from blobstore.names import relative_path

BLOCK = 512
"""Headers and contents begin at multiples of this."""
END = bytes(2 * BLOCK)
"""Two blocks of zeros end an archive."""
MAX_EXTENSION = 2**20
"""Bytes of the PAX records, or of the long path, of one member."""

_MAX_USTAR_SIZE = 8**11
_MAX_USTAR_PATH = 100
_MODE = b"0000644"
_FOLDER_MODE = b"0000755"
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
        (_FOLDER_MODE if kind == b"5" else _MODE) + b"\0",
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
