"""PyTorch's checkpoint files: where their tensors lie. Neither torch nor we read a storage here.

A file of ``torch.save`` is a zip archive: ``data.pkl`` is a pickle of a dict of tensors, and each
storage is a record ``data/KEY`` that is not compressed. So a contiguous tensor is a range of the
file's bytes. torch's own unpickler for weights reads the pickle, with storages on the device
``meta``, which know their places. Only pickles of tensors reach it: it also makes arrays of any
size. Source: torch 2.13.0 serialization.py `_load` (``_checkpoint_offset``), _tensor.py
`Tensor._reduce_ex_internal`, _weights_only_unpickler.py.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from blobstore.errors import (
    BlobStoreError,
    LimitExceededError,
    UnsupportedSourceError,
    needs,
    quoted,
)
from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import Header, TensorEntry
from blobstore.io.budget import Budget
from blobstore.io.ranges import OpenReader

TORCH_SUFFIXES = (".bin", ".pt", ".pth")
_DTYPES = {f"torch.{dtype.array_name}": dtype for dtype in DType if dtype.array_name}
# What pickles of tensors name: classes, functions and dtypes.
_GLOBALS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v[23]|parameter)"
    r"|torch(\.storage)? \w+Storage|torch b?(float|int|uint|bool|complex)\w*",
    re.ASCII,
)
_MAGIC = b"PK\x03\x04"
# Encryption, patches, strong encryption: bits of a record's flags.
_ENCRYPTED = 0x61


class _File(io.RawIOBase):
    def __init__(self, reader: OpenReader) -> None:
        self._reader = reader
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (0, self._at, self._reader.size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer)[: max(0, self._reader.size - self._at)]
        self._reader.readinto(self._at, view)
        self._at += len(view)
        return len(view)


def torch_header(reader: OpenReader, budget: Budget) -> Header:
    """Return the tensors of a file of ``torch.save``; offsets count from the file's first byte.

    Raises: UsageError without the ``torch`` extra; UnsupportedSourceError for a file of another
    kind, and for anything but tensors by name, each of consecutive bytes; LimitExceededError; as
    `OpenReader.readinto`.
    """
    with needs("torch", f"{reader.name} needs torch"):
        import torch
    try:
        file = io.BufferedReader(_File(reader), 2**16)
        records = _checked_records(file, budget)
        file.seek(0)
        stored = torch.load(file, map_location="meta", weights_only=True)
        entries = _entries(stored, records, budget)
    except (UnsupportedSourceError, LimitExceededError) as error:
        raise error.at(reader.name, path=reader.name) from None
    except BlobStoreError:
        raise
    except Exception as error:  # noqa: BLE001  # torch and zipfile raise any kind
        reason = str(error).rpartition("WeightsUnpickler error: ")[2].partition("\n")[0]
        raise _fault(f"torch can't read it: {reason}").at(reader.name, path=reader.name) from None
    return Header(entries, {}, 0)


def _checked_records(file: io.BufferedReader[_File], budget: Budget) -> list[zipfile.ZipInfo]:
    """Return the records of the archive in their order, if its pickle names only tensors."""
    if file.peek(len(_MAGIC))[: len(_MAGIC)] != _MAGIC:
        raise _fault("not a zip archive, as torch.save writes since version 1.6")
    with zipfile.ZipFile(file) as archive:
        records = sorted(archive.infolist(), key=lambda record: record.header_offset)
        if any(
            record.compress_type != zipfile.ZIP_STORED or record.flag_bits & _ENCRYPTED
            for record in records
        ):
            raise _fault("a zip archive with compressed records or encrypted ones")
        others = [record for record in records if "/data/" not in record.filename]
        budget.take_text(sum(record.file_size for record in others), "the pickle")
        texts = {record.filename.rpartition("/")[2]: archive.read(record) for record in others}
        if texts.get("byteorder", b"little") != b"little":
            raise _fault("its values are big-endian")
        for operation, argument, _ in pickletools.genops(texts["data.pkl"]):
            if "GLOBAL" in operation.name and not _GLOBALS.fullmatch(str(argument)):
                raise _fault(f"it holds {quoted(argument)}, and only tensors are read")
    return records


def _entries(
    stored: Any, records: Sequence[zipfile.ZipInfo], budget: Budget
) -> dict[str, TensorEntry]:
    if not isinstance(stored, dict):
        raise _fault(f"it holds a {type(stored).__name__}, not tensors by name")
    budget.take_tensors(len(stored), "the file")
    return {name: _entry(name, value, records) for name, value in stored.items()}


def _entry(name: Any, value: Any, records: Sequence[zipfile.ZipInfo]) -> TensorEntry:
    """Return where a tensor of a checkpoint lies in its file."""
    if not isinstance(name, str) or not name.isprintable():
        raise _fault(f"{quoted(name)} is not a tensor's name")
    if not hasattr(value, "untyped_storage"):
        raise _fault(f"{quoted(name)} is a {type(value).__name__}, not a tensor")
    if (dtype := _DTYPES.get(str(value.dtype))) is None:
        raise _fault(f"{quoted(name)} is {value.dtype}", name)
    if not value.is_contiguous() or value.is_neg() or value.is_conj():
        what = f"has strides {value.stride()}: its values do not lie in order"
        raise _fault(f"{quoted(name)} {what}", name)
    storage, nbytes = value.untyped_storage(), dtype.nbytes(value.shape)
    place = storage._checkpoint_offset  # noqa: SLF001  # torch's own for readers of files
    begin = place + value.storage_offset() * value.itemsize
    record = records[bisect_left(records, place, key=lambda record: record.header_offset) - 1]
    if record.file_size != storage.nbytes() or begin + nbytes > place + record.file_size:
        sizes = f"{storage.nbytes():,} bytes by the pickle, and {record.file_size:,} in the file"
        raise _fault(f"the storage of {quoted(name)} has {sizes}", name)
    return TensorEntry(dtype, tuple(value.shape), begin, begin + nbytes)


def _fault(reason: str, tensor: str | None = None) -> UnsupportedSourceError:
    return UnsupportedSourceError(
        reason,
        tensor=tensor,
        hint="Load it with torch, and save its tensors: "
        "safetensors.torch.save_file(tensors, FILE).",
    )
