"""GGUF headers: what the rules G1 to G8 refuse, and that no bytes do anything else."""

import random
import struct
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from support.gguf_files import ARRAY, BOOL, STRING, U32, Described, GgufFile, model

from blobstore.errors import BlobStoreError, HeaderError, LimitExceededError
from blobstore.formats.gguf import gguf_header
from blobstore.io.budget import Budget
from blobstore.io.ranges import BytesReader

FILE = model("Q8_0", bytes(2 * 2 * 34), (2, 64))
FILE.metadata += [("tokens", ["a", "é", ""]), ("rate", 0.5), ("yes", True)]


def test_a_header_is_read() -> None:
    header = gguf_header(BytesReader(FILE.raw))
    assert header.values == dict(FILE.metadata)
    light = gguf_header(BytesReader(FILE.raw), arrays=False)
    values: dict[str, object] = {str(key): value for key, value in FILE.metadata}
    assert light == replace(header, values=values | {"tokens": []})
    head = header.tensors["output.weight"]
    assert (head.type.name, head.dims, head.nbytes) == ("Q8_0", (2, 64), 136)
    assert (head.begin, head.shape) == (512, (2, 68))
    assert header.data_start + head.end == len(FILE.raw)
    assert "tokens" not in header.metadata
    assert header.metadata["rate"] == "0.5"


def keyed(key: str | bytes, value: object) -> GgufFile:
    return replace(FILE, metadata=[*FILE.metadata, (key, value)])


def tensors(*others: Described) -> GgufFile:
    return replace(FILE, tensors=[*FILE.tensors, *others])


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IIQ", ARRAY, kind, count) + items


HOSTILE: dict[str, tuple[GgufFile, str]] = {
    "another magic": (replace(FILE, magic=b"GGML"), "G1"),
    "version 1": (replace(FILE, version=1), "G1"),
    "version 4": (replace(FILE, version=4), "G1"),
    "big-endian": (replace(FILE, version=3 << 24), "G1"),
    "more tensors than bytes": (replace(FILE, counts=(2**40, 3)), "G2"),
    "more keys than bytes": (replace(FILE, counts=(2, 2**63)), "G2"),
    "a longer array than the file": (keyed("k", array(STRING, 2**61)), "G2"),
    "numbers beyond the file": (keyed("k", array(U32, 2**30)), "G2"),
    "a longer text than the file": (keyed("k", struct.pack("<IQ", STRING, 2**62)), "G2"),
    "fewer values than counted": (replace(FILE, counts=(2, 9)), "G"),
    "a key twice": (keyed("rate", 1), "G3"),
    "a key that is not UTF-8": (keyed(b"\xff", 1), "G3"),
    "a text that is not UTF-8": (keyed("k", array(STRING, 1, b"\2" + bytes(7) + b"\xc3(")), "G3"),
    "an array in an array": (keyed("k", array(ARRAY, 1, array(U32, 0))), "G4"),
    "an unknown type": (keyed("k", struct.pack("<II", 13, 0)), "G4"),
    "an array of an unknown type": (keyed("k", array(99, 1, bytes(8))), "G4"),
    "a bool of 2": (keyed("k", struct.pack("<IB", BOOL, 2)), "G4"),
    "no alignment": (keyed("general.alignment", 0), "G5"),
    "an alignment of 24": (keyed("general.alignment", 24), "G5"),
    "an alignment that is text": (keyed("general.alignment", "32"), "G5"),
    "a negative alignment": (keyed("general.alignment", struct.pack("<Ii", 5, -32)), "G5"),
    "five dimensions": (tensors(Described("x", "F32", (1,) * 5, bytes(4))), "G6"),
    "a type that was removed": (tensors(Described("x", 4, (32,), bytes(18))), "G6"),
    "an overflow": (tensors(Described("x", "F32", (2**31, 2**31))), "G6"),
    "an overflow that a 0 hides": (tensors(Described("x", "F32", (2**62, 0, 2**62))), "G6"),
    "half a block": (tensors(Described("x", "Q4_0", (2, 16), bytes(18))), "G7"),
    "a block of scalars": (tensors(Described("x", "Q4_0", (), bytes(18))), "G7"),
    "two tensors of a name": (tensors(Described("output.weight", "F32", (1,), bytes(4))), "G3"),
    "a tensor in another's bytes": (tensors(Described("x", "F32", (1,), bytes(4), 0)), "G8"),
    "a tensor between multiples": (tensors(Described("x", "F32", (1,), bytes(4), 648)), "G8"),
    "a hole": (tensors(Described("x", "F32", (1,), bytes(99), 704)), "G8"),
    "an offset beyond 64 bits": (tensors(Described("x", "F32", (1,), b"", 2**64 - 32)), "G8"),
    "a tensor beyond the end": (tensors(Described("x", "F32", (2**40,), bytes(4))), "G8"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files_are_refused(case: str) -> None:
    file, rule = HOSTILE[case]
    tracemalloc.start()
    with pytest.raises(HeaderError) as caught:
        gguf_header(BytesReader(file.raw, "m.gguf"))
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    assert str(caught.value.rule).startswith(rule)
    assert caught.value.message.startswith("m.gguf: ")


def test_every_shorter_file_is_refused() -> None:
    raw = FILE.raw
    for length in range(len(raw)):
        with pytest.raises(HeaderError):
            gguf_header(BytesReader(raw[:length]), arrays=length % 2 == 0)


def test_changed_bytes_are_refused_or_make_another_header() -> None:
    """No other error, no more memory than the file has, whatever the bytes are."""
    drawn = random.Random(33)
    mutations: list[Callable[[bytearray], object]] = [
        lambda raw: raw.__setitem__(drawn.randrange(len(raw)), drawn.randrange(256)),
        lambda raw: raw.insert(drawn.randrange(len(raw)), drawn.randrange(256)),
        lambda raw: raw.pop(drawn.randrange(len(raw))),
        lambda raw: raw.__setitem__(
            slice(at := drawn.randrange(len(raw) - 8), at + 8), drawn.randbytes(8)
        ),
    ]
    whole, read = FILE.raw, 0
    for _ in range(800):
        raw = bytearray(whole)
        for _ in range(drawn.randint(1, 3)):
            drawn.choice(mutations)(raw)
        try:
            header = gguf_header(BytesReader(bytes(raw)))
        except BlobStoreError:
            continue
        read += 1
        assert gguf_header(BytesReader(bytes(raw)), arrays=False).tensors == header.tensors
        ends = [header.data_start + one.end for one in header.tensors.values()]
        assert max(ends, default=0) <= len(raw)
    assert read > 30  # bytes of data, and of texts


def test_items_of_arrays_and_bytes_are_counted() -> None:
    items = struct.pack("<IIQ", ARRAY, 0, 1_500_000) + bytes(1_500_000)
    file = replace(FILE, metadata=[*FILE.metadata, ("one", items), ("two", items)])
    with pytest.raises(LimitExceededError, match=r"header with 'two' has .* at most 2,000,000"):
        gguf_header(BytesReader(file.raw))
    with pytest.raises(LimitExceededError, match="headers and documents"):
        gguf_header(BytesReader(FILE.raw), Budget("m", text=100))
    with pytest.raises(LimitExceededError, match="2 tensors"):
        gguf_header(BytesReader(FILE.raw), Budget("m", tensors=1))
