"""Packed files: every blob comes back, damage is found, memory is bounded by a frame."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
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
from blobstore.store.local.store import Store, open_store, pack, unpack
from blobstore.store.packed import files
from blobstore.store.packed.files import write_packed

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
    "bf16": tensors(BF16, 1100, 1024),  # three frames
    "f16": tensors(np.float16, 256, 256),
    "f32": tensors(np.float32, 700, 512),
    "e4m3": safetensors_bytes(
        {"w": normal("w", 256, 256, scale=50).astype(ml_dtypes.float8_e4m3fn)}
    ),
    "codes": safetensors_bytes(
        {
            "w": np.random.default_rng(1).integers(0, 2**32, (64, 64), np.uint32),
            "w.scale": normal("s", 64, 8),
        }
    ),
    "mixed": safetensors_bytes(
        {"a": normal("a", 33), "b": normal("b", 5, dtype=np.float32), "c": np.ones(7, np.int8)}
    ),
    "empty tensor": safetensors_bytes({"w": np.zeros((0, 3), np.float32), "b": normal("b", 3)}),
    "a header that is cut": tensors(BF16, 8)[:-1],
    "noise": random.Random(0).randbytes(300_000),
    "one byte": b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_blob_comes_back(tmp_path: Path, kind: str) -> None:
    data = KINDS[kind]
    path = packed(tmp_path, data)
    assert decoded(path.read_bytes()) == data
    with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
        assert reader.read(0, len(data)) == data
        assert reader.digest() == Digest.of(data)


def test_a_document_comes_back_and_other_programs_can_read_it(tmp_path: Path) -> None:
    data = b'{"a": [1, 2, 3]}' * 1000
    path = packed(tmp_path, data, "application/vnd.ollama.image.json")
    assert path.stat().st_size < 200
    assert decoded(path.read_bytes()) == data
    if zstd := shutil.which("zstd"):
        done = subprocess.run([zstd, "-dc", path], check=True, capture_output=True)
        assert done.stdout == data


def test_every_range_of_a_blob_is_read(tmp_path: Path) -> None:
    data = KINDS["bf16"]
    packed(tmp_path, data)
    chance = random.Random(1)
    with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
        for _ in range(200):
            begin, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
            assert reader.read(begin, end - begin) == data[begin:end]
        with pytest.raises(ShortReadError):
            reader.read(len(data) - 1, 2)


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


@pytest.mark.parametrize(
    ("kind", "share"),
    [("bf16", 0.69), ("f16", 0.87), ("f32", 0.85), ("e4m3", 0.86), ("codes", 1.03)],
)
def test_weights_shrink(tmp_path: Path, kind: str, share: float) -> None:
    assert packed(tmp_path, KINDS[kind]).stat().st_size <= share * len(KINDS[kind])


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """A bit of a frame's header is not used by zstandard: the bytes are right then."""
    data = safetensors_bytes({"w": normal("w", 24, 8), "s": normal("s", 7, dtype=np.float32)})
    path = packed(tmp_path, data)
    raw = path.read_bytes()
    errors = []
    for place in range(len(raw)):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :])
        try:
            with PackedBlobs(tmp_path).open(descriptor_of(data)) as reader:
                assert reader.read(0, len(data)) == data
        except CorruptDataError as error:
            errors.append(error)
    assert len(errors) >= len(raw) - 1
    assert {error.blob for error in errors} == {str(Digest.of(data))}
    assert all(str(path) in str(error.path) for error in errors)


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    data = KINDS["mixed"]
    path = packed(tmp_path, data)
    raw = path.read_bytes()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CorruptDataError) as caught:
            PackedBlobs(tmp_path).open(descriptor_of(data))
        assert caught.value.path == str(path)


def test_a_blob_whose_bytes_do_not_match_its_digest_is_not_packed(tmp_path: Path) -> None:
    data = KINDS["mixed"]
    with pytest.raises(DigestMismatchError) as caught:
        write_packed(tmp_path / "file", descriptor_of(data), BytesReader(data[:-1] + b"!"))
    assert caught.value.blob == str(Digest.of(data))


def test_the_written_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coder that makes a mistake is found before the plain blob is given up."""
    split: Callable[[bytes, int], list[bytes]] = files.split_planes
    monkeypatch.setattr(files, "split_planes", lambda data, width: split(data, width)[::-1])
    with pytest.raises(DigestMismatchError):
        packed(tmp_path, KINDS["mixed"])


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


def test_a_model_that_was_packed_before_is_packed_anew(old: Store) -> None:
    unpack(old, "tuned")
    done = pack(old, "tuned")
    assert done.stored < 0.7 * done.nbytes
    assert verify(old).is_sound
    unpack(old, "base")
    assert unpack(old, "tuned").blobs == 3


def test_damage_of_a_file_of_before_is_found(old: Store) -> None:
    """In some bytes: never other bytes, and never an error without the file."""
    for path in old_files(old):
        raw = path.read_bytes()
        for place in range(0, len(raw), 1 + len(raw) // 8):
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            result = verify(open_store(old.root))
            assert result.damaged, (path.name, place)
        for length in (0, 7, 60, len(raw) - 1):
            path.write_bytes(raw[:length])
            assert verify(open_store(old.root)).damaged, (path.name, length)
        path.write_bytes(raw)
    assert verify(open_store(old.root)).is_sound


def test_an_index_of_before_that_lies_is_refused(old: Store) -> None:
    """Words of the index are replaced, and its sha256 is made right again."""
    import hashlib
    import struct

    [path, *_] = [path for path in old_files(old) if path.name.startswith("many-")]
    raw = path.read_bytes()
    offset, length = struct.unpack_from("<QQ", raw, len(raw) - 56)
    index = raw[offset : offset + length]
    digests = {Digest(digest) for digest in PackedBlobs(path.parent).files()[path.name]}
    for place in range(0, length, 6):
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
