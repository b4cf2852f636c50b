"""Packed files: every blob comes back, and damage is found; files of earlier versions are read."""

import hashlib
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
from support import ROOT
from support.checkpoints import BF16, normal, safetensors_bytes
from support.packed_format import decoded

from blobstore.errors import BlobStoreError, CorruptDataError, DigestMismatchError, ShortReadError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest
from blobstore.store.care.verify import verify
from blobstore.store.local.packed import PackedBlobs
from blobstore.store.local.store import Store, open_store, unpack
from blobstore.store.packed.files import write_packed

BEFORE = ROOT / "fixtures" / "before" / "packed"
JSON = "application/vnd.ollama.image.json"


def descriptor_of(data: bytes, media_type: str = TENSOR_MEDIA_TYPE) -> Descriptor:
    return Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))


def packed(folder: Path, data: bytes, media_type: str = TENSOR_MEDIA_TYPE) -> Path:
    blob = descriptor_of(data, media_type)
    path = folder / blob.digest.file_name
    write_packed(path, blob, BytesReader(data))
    return path


def tensor(dtype: object, *shape: int) -> bytes:
    return safetensors_bytes({"w": normal("w", *shape, dtype=dtype)})


BF16_BLOB = tensor(BF16, 1100, 1024)  # three frames
MIXED = safetensors_bytes(
    {"a": normal("a", 33), "b": normal("b", 5, dtype=np.float32), "c": np.ones(7, np.int8)}
)


@pytest.mark.parametrize(
    ("data", "kind", "part"),
    [
        (BF16_BLOB, TENSOR_MEDIA_TYPE, 0.69),
        (tensor(np.float32, 300, 256), TENSOR_MEDIA_TYPE, 0.85),
        (MIXED, TENSOR_MEDIA_TYPE, 2),
        (safetensors_bytes({"w": np.zeros((0, 3), np.float32)}), TENSOR_MEDIA_TYPE, 3),
        (tensor(BF16, 8)[:-1], TENSOR_MEDIA_TYPE, 2),
        (random.Random(0).randbytes(300_000), TENSOR_MEDIA_TYPE, 1.01),
        (b'{"a": [1, 2, 3]}' * 1000, JSON, 0.0125),
        (b"", JSON, 1),
    ],
    ids=["BF16", "F32", "mixed", "empty tensor", "cut header", "noise", "text", "nothing"],
)
def test_a_blob_comes_back(tmp_path: Path, data: bytes, kind: str, part: float) -> None:
    """By our reader and after docs/formats.md; it takes that part of its bytes at most."""
    path = packed(tmp_path, data, kind)
    assert decoded(path.read_bytes()) == data
    assert path.stat().st_size <= max(100, part * len(data))
    with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
        assert reader.read(0, len(data)) == data
        assert reader.digest() == Digest.of(data)


def test_every_range_of_a_blob_is_read(tmp_path: Path) -> None:
    path = packed(tmp_path, BF16_BLOB)
    chance, size = random.Random(1), len(BF16_BLOB)
    with PackedBlobs(tmp_path).open(descriptor_of(BF16_BLOB)) as reader:
        for _ in range(8):
            begin, end = sorted(chance.randrange(size + 1) for _ in range(2))
            assert reader.read(begin, end - begin) == BF16_BLOB[begin:end]
        with pytest.raises(ShortReadError):
            reader.read(size - 1, 2)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with PackedBlobs(tmp_path).open(descriptor_of(BF16_BLOB)) as reader:
        assert reader.read(0, 100) == BF16_BLOB[:100]
        for _ in range(2):  # nothing else is read in place of a damaged frame
            with pytest.raises(CorruptDataError):
                reader.read(2**20, 100)


def test_flipped_bits_and_cuts_are_found(tmp_path: Path) -> None:
    """A bit of a frame's header is not used by zstandard: the bytes are right then."""
    path = packed(tmp_path, MIXED)
    raw, outcomes = path.read_bytes(), list[str]()
    flipped = [raw[:i] + bytes([raw[i] ^ 1 << i % 8]) + raw[i + 1 :] for i in range(0, len(raw), 2)]
    for other in (*flipped, *(raw[:length] for length in range(0, len(raw), 20))):
        path.write_bytes(other)
        try:
            with PackedBlobs(tmp_path).open(descriptor_of(MIXED)) as reader:
                assert reader.read(0, len(MIXED)) == MIXED
                outcomes.append("unnoticed")
        except CorruptDataError as error:
            outcomes.append(str(error.path))
    assert outcomes.count("unnoticed") <= 1
    assert all(str(path) in outcome for outcome in outcomes if outcome != "unnoticed")


def test_a_blob_whose_bytes_do_not_match_its_digest_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatchError) as caught:
        write_packed(tmp_path / "file", descriptor_of(MIXED), BytesReader(MIXED[:-1] + b"!"))
    assert caught.value.blob == str(Digest.of(MIXED))


# Packed files of earlier versions: "base", and "tuned" that was packed against it


@pytest.fixture
def old(tmp_path: Path) -> Store:
    shutil.copytree(BEFORE, tmp_path / "old")
    return open_store(tmp_path / "old")


def old_files(store: Store) -> list[Path]:
    return sorted((store.root / ".blobstore" / "packed" / "blobs").iterdir())


def test_packed_files_of_before_are_read_on(old: Store) -> None:
    assert verify(old).is_sound
    assert unpack(old, "base").blobs == 6
    assert unpack(old, "tuned").blobs == 3  # its documents are those of "base"
    assert old_files(old) == []
    assert verify(old).is_sound


def test_an_index_of_before_that_lies_is_refused(old: Store) -> None:
    """Words of the index are replaced, and its sha256 is made right again."""
    [path, *_] = [path for path in old_files(old) if path.name.startswith("many-")]
    raw = path.read_bytes()
    offset, length = struct.unpack_from("<QQ", raw, len(raw) - 56)
    index = raw[offset : offset + length]
    digests = {Digest(digest) for digest in PackedBlobs(path.parent).files()[path.name]}
    for place in range(0, length, 22):
        for word in (0, 2**32 - 1):
            other = (index[:place] + struct.pack("<I", word) + index[place + 4 :])[:length]
            trailer = struct.pack("<QQ32s", offset, length, hashlib.sha256(other).digest())
            path.write_bytes(raw[:offset] + other + trailer + raw[-8:])
            blobs = PackedBlobs(path.parent)
            for digest in digests:
                try:
                    with blobs.open_of(digest) as reader:
                        reader.digest()  # whatever it is: no other error, and no end without one
                except BlobStoreError:
                    continue
