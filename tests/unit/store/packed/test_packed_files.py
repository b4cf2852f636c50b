"""Packed files: every blob comes back, damage is found, memory is bounded by a frame."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from support.checkpoints import BF16, normal, safetensors_bytes
from support.packed_format import decoded

from blobstore.errors import BlobStoreError, CorruptDataError, DigestMismatchError, ShortReadError
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor
from blobstore.formats.safetensors.codec import header_of
from blobstore.io.ranges import BytesReader, OpenReader
from blobstore.names import Digest
from blobstore.store.packed.coders import Coded, Encoder
from blobstore.store.packed.container import PackedIndex
from blobstore.store.packed.cuts import FRAME, BasePlace, BaseTensor, Coding, Cut, cuts_of
from blobstore.store.packed.decoding import PackedFile
from blobstore.store.packed.encoding import write_packed

Bases = Mapping[str, BaseTensor]


def descriptor_of(data: bytes) -> Descriptor:
    return Descriptor(media_type=TENSOR_MEDIA_TYPE, digest=Digest.of(data), size=len(data))


def no_base(digest: Digest, size: int) -> OpenReader:
    raise AssertionError((digest, size))


def packed(
    path: Path,
    *blobs: bytes,
    bases: Bases | None = None,
    open_base: Callable[[Digest, int], OpenReader] = no_base,
) -> PackedIndex:
    by_digest = {Digest.of(data): data for data in blobs}

    def cut(_: Descriptor, reader: OpenReader) -> list[Cut]:
        is_tensors = reader.size > 8 and reader.read(8, 1) == b"{"
        header = header_of(reader) if is_tensors else None
        return cuts_of(header, reader.size, bases or {})

    return write_packed(
        path,
        list(map(descriptor_of, blobs)),
        lambda blob: BytesReader(by_digest[blob.digest]),
        cut,
        open_base,
    )


def tensors(dtype: object, *shape: int) -> bytes:
    return safetensors_bytes({"w": normal("w", *shape, dtype=dtype)})


KINDS = {
    "bf16": tensors(BF16, 1100, 1024),  # three frames
    "f16": tensors(np.float16, 256, 256),
    "f32": tensors(np.float32, 700, 512),
    "e4m3": safetensors_bytes(
        {"w": normal("w", 256, 256, scale=50).astype(ml_dtypes.float8_e4m3fn)}
    ),
    "e5m2": tensors(ml_dtypes.float8_e5m2, 256, 256),
    "codes": safetensors_bytes(
        {
            "w": np.random.default_rng(1).integers(0, 2**32, (64, 64), np.uint32),
            "w.scale": normal("s", 64, 8),
        }
    ),
    "f64": safetensors_bytes({"w": np.zeros((30, 30))}),
    "mixed": safetensors_bytes(
        {"a": normal("a", 33), "b": normal("b", 5, dtype=np.float32), "c": np.ones(7, np.int8)}
    ),
    "empty tensor": safetensors_bytes({"w": np.zeros((0, 3), np.float32), "b": normal("b", 3)}),
    "document": b'{"a": [1, 2, 3]}' * 1000,
    "noise": random.Random(0).randbytes(300_000),
    "one byte": b"x",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_blob_comes_back(tmp_path: Path, kind: str) -> None:
    data = KINDS[kind]
    index = packed(tmp_path / "file", data)
    assert decoded((tmp_path / "file").read_bytes()) == {Digest.of(data).hex: data}
    with PackedFile(tmp_path / "file", no_base) as file:
        assert file.index == index
        reader = file.reader(file.index.blobs[0])
        assert reader.read(0, len(data)) == data
        assert reader.digest() == Digest.of(data)


def test_every_range_of_a_blob_is_read(tmp_path: Path) -> None:
    data = KINDS["bf16"]
    packed(tmp_path / "file", b"before", data)
    chance = random.Random(1)
    with PackedFile(tmp_path / "file", no_base) as file:
        reader = file.reader(file.index.blobs[1])
        for _ in range(200):
            begin, end = sorted(chance.randrange(len(data) + 1) for _ in range(2))
            assert reader.read(begin, end - begin) == data[begin:end]
        with pytest.raises(ShortReadError):
            reader.read(len(data) - 1, 2)


def test_several_blobs_lie_in_one_file(tmp_path: Path) -> None:
    blobs = [value for value in KINDS.values() if len(value) < FRAME]
    packed(tmp_path / "file", *blobs)
    found = decoded((tmp_path / "file").read_bytes())
    assert found == {Digest.of(data).hex: data for data in blobs}


@pytest.mark.parametrize(
    ("kind", "share"),
    [("bf16", 0.69), ("f16", 0.87), ("f32", 0.85), ("e4m3", 0.86), ("e5m2", 0.75), ("codes", 1.03)],
)
def test_weights_shrink(tmp_path: Path, kind: str, share: float) -> None:
    packed(tmp_path / "file", KINDS[kind])
    assert (tmp_path / "file").stat().st_size <= share * len(KINDS[kind])


def test_codes_are_stored_as_they_are(tmp_path: Path) -> None:
    codes = np.random.default_rng(1).integers(0, 2**32, (64, 64), np.uint32)
    index = packed(tmp_path / "file", KINDS["codes"])
    assert codes.tobytes() in (tmp_path / "file").read_bytes()
    assert [frame.is_coded for frame in index.blobs[0].frames][1] == (False,)


def fine_tune(tmp_path: Path, amount: float) -> tuple[bytes, bytes, PackedIndex]:
    base = normal("base", 512, 512, dtype=np.float32)
    tuned = base + normal("tuned", 512, 512, dtype=np.float32, scale=amount)
    first = safetensors_bytes({"w": base.astype(BF16), "other": normal("o", 9)})
    second = safetensors_bytes({"w": tuned.astype(BF16)})
    header = header_of(BytesReader(first))
    bases = {
        name: BaseTensor(
            entry.dtype,
            entry.shape,
            BasePlace(Digest.of(first), len(first), header.data_start + entry.begin),
        )
        for name, entry in header.tensors.items()
    }
    index = packed(
        tmp_path / "file", second, bases=bases, open_base=lambda _, __: BytesReader(first)
    )
    return first, second, index


def test_a_fine_tune_is_stored_as_its_difference(tmp_path: Path) -> None:
    first, second, index = fine_tune(tmp_path, 1e-4)
    assert index.bases == ((Digest.of(first), len(first)),)
    assert (tmp_path / "file").stat().st_size < 0.4 * len(second)
    raw = (tmp_path / "file").read_bytes()
    assert decoded(raw, {Digest.of(first).hex: first}.__getitem__) == {
        Digest.of(second).hex: second
    }
    with PackedFile(tmp_path / "file", lambda _, __: BytesReader(first)) as file:
        assert file.reader(file.index.blobs[0]).read(0, len(second)) == second
        other = BytesReader(bytes(len(first)))
    with PackedFile(tmp_path / "file", lambda _, __: other) as file:
        assert file.reader(file.index.blobs[0]).digest() != Digest.of(second)


def test_a_difference_that_is_not_smaller_is_not_stored(tmp_path: Path) -> None:
    assert fine_tune(tmp_path, 1.0)[2].bases == ()


def test_a_tensor_of_another_shape_or_dtype_is_no_base() -> None:
    data = safetensors_bytes({"w": normal("w", 8, 4)})
    header = header_of(BytesReader(data))
    entry = header.tensors["w"]
    place = BasePlace(Digest.of(b""), 1000, 0)
    for dtype, shape, is_taken in [
        (entry.dtype, (8, 4), True),
        (entry.dtype, (4, 8), False),
        (type(entry.dtype).F16, (8, 4), False),
    ]:
        cuts = cuts_of(header, len(data), {"w": BaseTensor(dtype, shape, place)})
        assert [cut.base is not None for cut in cuts] == [False, is_taken]


def test_cuts_cover_every_byte_once_and_neighbours_of_one_kind_are_one() -> None:
    data = safetensors_bytes(
        {**{f"n{number}": normal("n", 3) for number in range(9)}, "i": np.ones(3, np.int64)}
    )
    cuts = cuts_of(header_of(BytesReader(data)), len(data), {})
    assert [cut.coding for cut in cuts] == [Coding.TEXT, Coding.FLOATS, Coding.TEXT]
    assert [cut.begin for cut in cuts] == [0, *(cut.end for cut in cuts[:-1])]
    assert cuts[-1].end == len(data)


def test_a_blob_of_very_many_small_tensors_is_one_text() -> None:
    many = {
        f"{number}": normal("a", 8 + number % 2, dtype=(BF16, np.float32)[number % 2])
        for number in range(200)
    }
    data = safetensors_bytes(many)
    assert cuts_of(header_of(BytesReader(data)), len(data), {}) == [
        Cut(0, len(data), Coding.TEXT, 1)
    ]


def test_every_flipped_bit_is_an_error_and_never_other_bytes(tmp_path: Path) -> None:
    data = safetensors_bytes({"w": normal("w", 48, 16), "s": normal("s", 7, dtype=np.float32)})
    packed(tmp_path / "file", data)
    raw = (tmp_path / "file").read_bytes()
    for place in range(len(raw)):
        (tmp_path / "bad").write_bytes(
            raw[:place] + bytes([raw[place] ^ 1 << place % 8]) + raw[place + 1 :]
        )
        with pytest.raises(CorruptDataError) as caught, PackedFile(tmp_path / "bad", no_base) as it:
            it.reader(it.index.blobs[0]).read(0, len(data))
        assert caught.value.path == str(tmp_path / "bad")


def test_every_cut_is_an_error(tmp_path: Path) -> None:
    packed(tmp_path / "file", KINDS["mixed"])
    raw = (tmp_path / "file").read_bytes()
    for length in range(len(raw)):
        (tmp_path / "bad").write_bytes(raw[:length])
        with pytest.raises(CorruptDataError):
            PackedFile(tmp_path / "bad", no_base)


def test_an_index_that_lies_is_refused(tmp_path: Path) -> None:
    """Every 4 bytes of the index are replaced, and its sha256 is made right again."""
    import struct

    packed(tmp_path / "file", KINDS["mixed"])
    raw = (tmp_path / "file").read_bytes()
    offset, length = struct.unpack_from("<QQ", raw, len(raw) - 56)
    index = raw[offset : offset + length]
    for place in range(0, length, 2):
        for word in (0, 1, 2**31, 2**32 - 1):
            other = index[:place] + struct.pack("<I", word) + index[place + 4 :]
            other = other[:length]
            trailer = struct.pack(
                "<QQ32s8s", offset, length, hashlib.sha256(other).digest(), b"BSPEND\x01\n"
            )
            (tmp_path / "bad").write_bytes(raw[:offset] + other + trailer)
            try:
                with PackedFile(tmp_path / "bad", no_base) as file:
                    blob = file.index.blobs[0] if file.index.blobs else None
                    found = b"" if blob is None else file.reader(blob).read(0, blob.size)
            except BlobStoreError:
                continue
            assert (
                other == index
                or blob is None
                or Digest.of(found) != blob.digest
                or (found == KINDS["mixed"])
            )


def test_a_blob_whose_bytes_do_not_match_its_digest_is_not_packed(tmp_path: Path) -> None:
    data = KINDS["mixed"]
    with pytest.raises(DigestMismatchError) as caught:
        write_packed(
            tmp_path / "file",
            [descriptor_of(data)],
            lambda _: BytesReader(data[:-1] + b"!"),
            lambda _, __: [Cut(0, len(data), Coding.TEXT, 1)],
            no_base,
        )
    assert caught.value.blob == str(Digest.of(data))


def test_the_written_file_is_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coder that makes a mistake is found before the plain blob is given up."""
    real = Encoder.encode

    def mistaken(self: Encoder, data: memoryview, *rest: object) -> Coded:
        changed = bytes(data[:-1]) + bytes([data[-1] ^ 1])
        return real(self, memoryview(changed), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Encoder, "encode", mistaken)
    with pytest.raises(DigestMismatchError):
        packed(tmp_path / "file", KINDS["mixed"])
