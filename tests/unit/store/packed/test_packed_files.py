"""Packed files: every blob comes back, damage is found, memory is bounded by a frame."""

from __future__ import annotations

import hashlib
import random
import shutil
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, strategies as st
from support import ROOT
from support.checkpoints import BF16, normal, safetensors_bytes
from support.packed_format import decoded

from blobstore.errors import BlobStoreError, CorruptDataError, DigestMismatchError, ShortReadError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.io.ranges import BytesReader
from blobstore.names import Digest
from blobstore.store.care.prune import prune
from blobstore.store.care.verify import verify
from blobstore.store.local.packed import PackedBlobs
from blobstore.store.local.store import Store, open_store, unpack
from blobstore.store.packed import files
from blobstore.store.packed.files import join_planes, split_planes, write_packed

BEFORE = ROOT / "fixtures" / "before" / "packed"


def descriptor_of(data: bytes, media_type: str = TENSOR_MEDIA_TYPE) -> Descriptor:
    return Descriptor(media_type=media_type, digest=Digest.of(data), size=len(data))


def packed(folder: Path, data: bytes, media_type: str = TENSOR_MEDIA_TYPE) -> Path:
    """Return the packed file of a blob."""
    blob = descriptor_of(data, media_type)
    path = folder / blob.digest.file_name
    write_packed(path, blob, BytesReader(data))
    return path


def tensors(dtype: object, *shape: int) -> bytes:
    return safetensors_bytes({"w": normal("w", *shape, dtype=dtype)})


KINDS = {
    "bf16": (tensors(BF16, 1100, 1024), 0.69),  # three frames
    "f16": (tensors(np.float16, 256, 256), 0.87),
    "f32": (tensors(np.float32, 700, 512), 0.85),
    "e4m3": (
        safetensors_bytes({"w": normal("w", 256, 256, scale=50).astype(ml_dtypes.float8_e4m3fn)}),
        0.86,
    ),
    "mixed": (
        safetensors_bytes(
            {"a": normal("a", 33), "b": normal("b", 5, dtype=np.float32), "c": np.ones(7, np.int8)}
        ),
        2,
    ),
    "empty tensor": (
        safetensors_bytes({"w": np.zeros((0, 3), np.float32), "b": normal("b", 3)}),
        2,
    ),
    "a header that is cut": (tensors(BF16, 8)[:-1], 2),
    "noise": (random.Random(0).randbytes(300_000), 1.01),
    "nothing": (b"", 100),
}
"""Blobs, and the part of their bytes that their packed files take at most."""
BF16_BLOB, MIXED = KINDS["bf16"][0], KINDS["mixed"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_blob_comes_back(tmp_path: Path, kind: str) -> None:
    data, part = KINDS[kind]
    path = packed(tmp_path, data)
    assert decoded(path.read_bytes()) == data
    assert path.stat().st_size <= max(100, part * len(data))
    with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
        assert reader.read(0, len(data)) == data
        assert reader.digest() == Digest.of(data)


def test_a_document_comes_back_and_other_programs_can_read_it(tmp_path: Path) -> None:
    data = b'{"a": [1, 2, 3]}' * 1000
    path = packed(tmp_path, data, "application/vnd.ollama.image.json")
    assert path.stat().st_size < 200
    assert decoded(path.read_bytes()) == data


def test_every_range_of_a_blob_is_read(tmp_path: Path) -> None:
    packed(tmp_path, BF16_BLOB)
    chance, size = random.Random(1), len(BF16_BLOB)
    with PackedBlobs(tmp_path).open(descriptor_of(BF16_BLOB)) as reader:
        for _ in range(12):
            begin, end = sorted(chance.randrange(size + 1) for _ in range(2))
            assert reader.read(begin, end - begin) == BF16_BLOB[begin:end]
        with pytest.raises(ShortReadError):
            reader.read(size - 1, 2)


def test_after_a_damaged_frame_nothing_else_is_read_in_its_place(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(3 * 2**20)
    path = packed(tmp_path, data)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
        assert reader.read(0, 100) == data[:100]
        for _ in range(2):
            with pytest.raises(CorruptDataError):
                reader.read(2**20, 100)


def test_flipped_bits_and_cuts_are_found(tmp_path: Path) -> None:
    """A bit of a frame's header is not used by zstandard: the bytes are right then."""
    path = packed(tmp_path, MIXED)
    raw, errors = path.read_bytes(), []
    flipped = [raw[:at] + bytes([raw[at] ^ 1 << at % 8]) + raw[at + 1 :] for at in range(len(raw))]
    for other in (*flipped, *(raw[:length] for length in range(0, len(raw), 5))):
        path.write_bytes(other)
        try:
            with PackedBlobs(tmp_path).open(descriptor_of(MIXED)) as reader:
                assert reader.read(0, len(MIXED)) == MIXED
        except CorruptDataError as error:
            errors.append(error)
    assert len(errors) >= len(raw) + len(raw) // 5
    assert all(str(path) in str(error.path) for error in errors)


def test_a_blob_whose_bytes_do_not_match_its_digest_is_not_packed(tmp_path: Path) -> None:
    with pytest.raises(DigestMismatchError) as caught:
        write_packed(tmp_path / "file", descriptor_of(MIXED), BytesReader(MIXED[:-1] + b"!"))
    assert caught.value.blob == str(Digest.of(MIXED))


@given(data=st.binary(max_size=300), width=st.sampled_from([1, 2, 4]))
def test_planes_are_joined_to_what_was_split(data: bytes, width: int) -> None:
    assert join_planes(b"".join(split_planes(data, width)), width) == data


def test_the_written_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coder that makes a mistake is found before the plain blob is given up."""
    monkeypatch.setattr(files, "split_planes", lambda data, width: split_planes(data, width)[::-1])
    with pytest.raises(DigestMismatchError):
        packed(tmp_path, MIXED)


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


def test_a_base_of_before_stays_while_it_is_needed(old: Store) -> None:
    old.remove("base")
    prune(old, grace_s=0, sole_owner=True)
    assert len(old_files(old)) == 3
    unpack(old, "tuned")
    assert verify(old).is_sound
    assert old_files(old) == []


def test_damage_of_a_file_of_before_is_found(old: Store) -> None:
    """In some bytes: never other bytes, and never an error without the file."""
    for path in old_files(old):
        raw = path.read_bytes()
        middle, size = len(raw) // 2, len(raw)
        flipped = raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :]
        for damaged in (flipped, raw[:7], raw[:60], raw[: size - 1]):
            path.write_bytes(damaged)
            assert verify(open_store(old.root)).damaged, (path.name, len(damaged))
        path.write_bytes(raw)
    assert verify(open_store(old.root)).is_sound


def test_an_index_of_before_that_lies_is_refused(old: Store) -> None:
    """Words of the index are replaced, and its sha256 is made right again."""
    [path, *_] = [path for path in old_files(old) if path.name.startswith("many-")]
    raw = path.read_bytes()
    offset, length = struct.unpack_from("<QQ", raw, len(raw) - 56)
    index = raw[offset : offset + length]
    digests = {Digest(digest) for digest in PackedBlobs(path.parent).files()[path.name]}
    for place in range(0, length, 18):
        for word in (0, 2**32 - 1):
            other = (index[:place] + struct.pack("<I", word) + index[place + 4 :])[:length]
            trailer = struct.pack("<QQ32s", offset, length, hashlib.sha256(other).digest())
            path.write_bytes(raw[:offset] + other + trailer + raw[-8:])
            blobs = PackedBlobs(path.parent)
            for digest in digests:
                try:
                    with blobs.open_of(digest, None) as reader:
                        reader.digest()  # whatever it is: no other error, and no end without one
                except BlobStoreError:
                    continue
