"""Archives of other programs, and archives that lie."""

from __future__ import annotations

import gzip
import io
import itertools
import mmap
import os
import random
import struct
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import zstandard
from support import PYCODE
from support.archives import Files, files_of, index_of, tar_of

import blobstore
from blobstore.errors import (
    BlobStoreError,
    CorruptDataError,
    DigestMismatchError,
    DocumentError,
    LimitExceededError,
    NotFoundError,
    ShortReadError,
    UsageError,
)
from blobstore.formats.oci import blob_path
from blobstore.formats.seekable import encode_table
from blobstore.formats.tar import BLOCK, member_header
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive import open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.store.ports import How
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, N, blobs_of, commit, data_of, descriptor_of

ONE, TWO, THREE = data_of(70_000), b"two", data_of(3000)


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    commit(store, "m", ONE, TWO)
    commit(store, "n", THREE, TWO)
    return store


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails a test that takes 16 MiB at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


@pytest.fixture
def files(store: MemoryStore) -> Files:
    return files_of(store, "m", "n")


def loaded(path: Path, *names: str, jobs: int = 2) -> MemoryStore:
    """Return a store with models of an archive; every one if none is named."""
    target = MemoryStore()
    with open_archive(path) as archive:
        transfer(names or archive.manifests.in_order(), archive, target, jobs=jobs)
    return target


def check(target: MemoryStore) -> None:
    assert blobs_of(target, "m") == [ONE, TWO]
    assert blobs_of(target, "n") == [THREE, TWO]


# What others write


@pytest.mark.parametrize(
    ("form", "pack", "seed"),
    [
        (tarfile.USTAR_FORMAT, gzip.compress, 0),
        (tarfile.GNU_FORMAT, bytes, 1),
        (tarfile.PAX_FORMAT, zstandard.compress, 2),
    ],
)
def test_any_order_form_and_compression(
    tmp_path: Path, files: Files, form: int, pack: Callable[[bytes], bytes], seed: int
) -> None:
    files = [("./", b""), ("blobs/", b""), *((f"./{name}", data) for name, data in files)]
    random.Random(seed).shuffle(files)
    path = tmp_path / "any"
    path.write_bytes(pack(tar_of(files, form)))
    check(loaded(path))
    assert blobs_of(loaded(path, "n"), "n") == [THREE, TWO]


def test_files_that_are_no_part_of_a_model_are_ignored(tmp_path: Path, files: Files) -> None:
    """As docker's own documents beside the index."""
    path = tmp_path / "a.tar"
    others = [("manifest.json", b"[]"), ("repositories", b"{}"), ("x" * 150, b"long")]
    others += [("blobs/sha512/" + 128 * "a", b"x"), (blob_path(Digest.of(b"unused")), b"unused")]
    path.write_bytes(tar_of([*others, *files]))
    check(loaded(path))


def test_a_model_without_a_name_gets_one(tmp_path: Path, store: MemoryStore) -> None:
    files = dict(files_of(store, "m"))
    raw = store.manifests.text(M)
    media_type = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": media_type, "digest": str(Digest.of(raw)), "size": len(raw)}
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of((files | {"index.json": index_of(entry)}).items()))
    with open_archive(path) as archive:
        assert archive.manifests.names() == []
        assert archive.unnamed == (Digest.of(raw),)
    with open_archive(path, name="other") as archive:
        assert archive.manifests.names() == [ModelName.parse("other")]
        assert archive.manifests.text(archive.find("other")) == raw


def test_a_name_for_one_of_several_models(tmp_path: Path, files: Files) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(files))
    with pytest.raises(UsageError):
        open_archive(path, name="other")


# In place


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_a_model_is_opened_in_place(tmp_path: Path, suffix: str) -> None:
    store, path = MemoryStore(), tmp_path / f"a{suffix}"
    blobstore.import_model(PYCODE, "tiny", store=store, quant="int4")
    save_models(["tiny"], path, store=store)
    with open_archive(path) as archive:
        model = blobstore.open_model("tiny", store=archive, verify=True)
    expected = blobstore.open_model("tiny", store=store).arrays()
    found = model.arrays()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)
    large = [blob.data for blob in model._blobs.values() if blob.data.size > 20_000]
    is_mapped = [isinstance(data.view().obj, mmap.mmap) for data in large]
    assert is_mapped == [suffix == ".tar"] * 30
    path.unlink()
    assert np.array_equal(model.arrays()["lm_head.weight"], expected["lm_head.weight"])


def test_a_closed_archive_is_not_mapped(tmp_path: Path, store: MemoryStore) -> None:
    path = tmp_path / "a.tar"
    save_models(["m"], path, store=store)
    archive = open_archive(path)
    reader = archive.blobs.open(descriptor_of(ONE))
    archive.close()
    with pytest.raises(BlobStoreError):
        reader.place()


# Lies


def changed(files: Files, name: str, data: bytes) -> Files:
    return [(path, data if path == name else old) for path, old in files]


def refused(
    tmp_path: Path, raw: bytes, error: type[BlobStoreError], match: str | None = None
) -> None:
    """Check that an archive is refused: from a file, compressed, and from a pipe."""
    path = tmp_path / "a"
    for packed in (raw, zstandard.compress(raw)):
        path.write_bytes(packed)
        with pytest.raises(error, match=match):
            loaded(path)
    target = MemoryStore()
    with pytest.raises(error, match=match):
        load_piped(raw, target)
    assert target.blobs.digests() == set()


def load_piped(raw: bytes, target: MemoryStore | None = None) -> None:
    """Load all models of an archive that comes through a pipe."""
    with open_archive(piped(raw)) as archive:
        transfer(archive.manifests.in_order(), archive, target or MemoryStore())


def piped(raw: bytes) -> io.BufferedReader:
    """Return the reading end of a pipe that gives these bytes."""
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(raw)

    threading.Thread(target=write, daemon=True).start()
    return os.fdopen(reading, "rb")


@pytest.fixture
def one(store: MemoryStore) -> Files:
    return files_of(store, "m")


def test_contents_that_lie(tmp_path: Path, one: Files, store: MemoryStore) -> None:
    blob, raw = blob_path(Digest.of(ONE)), store.manifests.text(M)
    manifest = blob_path(Digest.of(raw))
    nested = {"mediaType": "application/vnd.oci.image.index.v1+json", "size": 2}
    index = index_of(nested | {"digest": str(Digest.of(b"{}"))})
    for files, error, match in (
        (changed(one, blob, bytes(len(ONE))), DigestMismatchError, "sha256"),
        (changed(one, blob, ONE[:-1]), CorruptDataError, "bytes, not"),
        (changed(one, blob, ONE + b"x"), CorruptDataError, "bytes, not"),
        (changed(one, manifest, raw.replace(b"layer0", b"layer9")), DigestMismatchError, "sha256"),
        (without(one, blob), NotFoundError, "sha256"),
        (without(one, manifest), NotFoundError, "sha256"),
        (without(one, "oci-layout"), CorruptDataError, "A2"),
        (without(one, "index.json"), CorruptDataError, "A2"),
        (changed(one, "index.json", index), DocumentError, "A2"),
        (changed(one, "index.json", bytes(16 * 2**20 + 1)), LimitExceededError, "index.json"),
    ):
        refused(tmp_path, tar_of(files), error, match)


def test_paths_that_are_refused(tmp_path: Path, one: Files) -> None:
    path, data = one[-1]
    for more, match in (
        ((path, data), "twice"),
        ((f"./{path}", b""), "twice"),
        (("/index.json", b"x"), "A1"),
        (("blobs/../../x", b"x"), "A1"),
        (("x/" * 2**20 + "y", b""), "1 MiB"),
    ):
        refused(tmp_path, tar_of([*one, more]), CorruptDataError, match)


def without(files: Files, name: str) -> Files:
    return [(path, data) for path, data in files if path != name]


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_link(tmp_path: Path, one: Files, kind: bytes) -> None:
    info = tarfile.TarInfo("blobs/sha256/" + 64 * "0")
    info.type, info.linkname = kind, "/etc/passwd"
    refused(tmp_path, info.tobuf() + tar_of(one), CorruptDataError, "A1")


@pytest.mark.parametrize("data", [b"\0" * 5000 + b"x", bytes(2**20 + 1024)])
def test_data_after_the_end(tmp_path: Path, one: Files, data: bytes) -> None:
    refused(tmp_path, tar_of(one) + data, CorruptDataError, "follow its end")


def test_every_cut_is_noticed(tmp_path: Path, one: Files) -> None:
    raw = tar_of(one)
    end = len(raw.rstrip(b"\0")) // BLOCK * BLOCK + BLOCK
    path = tmp_path / "a.tar"
    for length in {*range(0, end, 3001), end - 1, end, end + 1, end + BLOCK, end + 2 * BLOCK - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises(BlobStoreError):
            loaded(path)
    path.write_bytes(raw[: end + 2 * BLOCK])
    assert blobs_of(loaded(path), "m") == [ONE, TWO]
    path.write_bytes(member_header("oci-layout", 2**40) + bytes(10_000))
    with pytest.raises(CorruptDataError, match="more than are left"):
        loaded(path)


# Frames


def framed(raw: bytes, *cuts: int) -> tuple[list[bytes], list[tuple[int, int]]]:
    edges = [0, *cuts, len(raw)]
    plain = [raw[a:b] for a, b in itertools.pairwise(edges)]
    frames = [zstandard.compress(part) for part in plain]
    return frames, [(len(frame), len(part)) for frame, part in zip(frames, plain, strict=True)]


def test_frames_of_another_program(tmp_path: Path, files: Files) -> None:
    """Cut anywhere, in headers too."""
    raw, path = tar_of(files), tmp_path / "a.tar.zst"
    frames, table = framed(raw, 100, 100, 5000, 5120, 60_001)
    path.write_bytes(b"".join(frames) + encode_table(table))
    check(loaded(path, jobs=4))


def test_frames_that_lie(tmp_path: Path, files: Files) -> None:
    raw, path = tar_of(files), tmp_path / "a.tar.zst"
    frames, table = framed(raw, 5120, 60_000)
    lies = {
        "size": [(table[0][0], 5119), (table[1][0], table[1][1] + 1), table[2]],
        "swapped": [table[1], table[0], table[2]],
        "empty": [(table[0][0], 0), *table[1:]],
    }
    for said in lies.values():
        path.write_bytes(b"".join(frames) + encode_table(said))
        with pytest.raises(CorruptDataError):
            loaded(path)
    damaged = bytearray(b"".join(frames) + encode_table(table))
    for at in range(0, sum(map(len, frames)), 4001):
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with suppress(BlobStoreError):  # else it is in bytes that do not count, such as padding
            check(loaded(path))
        damaged[at] ^= 0x10


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "frame",
    [
        b"\xe0" + (2**40).to_bytes(8, "little"),
        b"\xa0" + (10**8).to_bytes(4, "little"),
    ],
)
def test_a_frame_that_says_it_is_large(tmp_path: Path, frame: bytes) -> None:
    """The bytes that its header says are not allocated."""
    frame = bytes.fromhex("28b52ffd") + frame + b"\x01\x00\x00"
    path = tmp_path / "a.tar.zst"
    path.write_bytes(frame + encode_table([(len(frame), 10_000)]))
    with pytest.raises(CorruptDataError, match=r"not 10,000|too much memory"):
        loaded(path)
    path.write_bytes(frame)
    with pytest.raises(CorruptDataError):
        loaded(path)


def test_paths_are_limited_in_all(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A million paths of 4 KiB would take gigabytes, and little of a compressed file."""
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([*files, *((f"{number}/{'x' * 200}", b"") for number in range(20))]))
    monkeypatch.setattr("blobstore.store.archive.archive.MAX_PATHS", 5000)
    open_archive(path).close()
    monkeypatch.setattr("blobstore.store.archive.archive.MAX_PATHS", 4000)
    with pytest.raises(LimitExceededError, match="4,000 bytes of paths"):
        open_archive(path)


@pytest.mark.usefixtures("little_memory")
def test_bombs_take_no_memory(tmp_path: Path, one: Files) -> None:
    """Many zeros in a file that no model names."""
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", 1) as out:
        out.write(member_header("blobs/sha256/" + 64 * "0", 2**25))
        for _ in range(2**5):
            out.write(bytes(2**20))
        out.write(tar_of(one))
    assert blobs_of(loaded(path), "m") == [ONE, TWO]


# Work without an end


def endless(path: Path, parts: Iterable[bytes]) -> Path:
    """Write a stream of one frame, whose parts are made one after the other."""
    compressor = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        for part in parts:
            file.write(compressor.compress(part))
        file.write(compressor.flush())
    return path


def test_extensions_without_an_end(tmp_path: Path) -> None:
    extension = member_header("x", 8**11)[:-BLOCK]  # PAX records, and not the file
    size = 1954 * BLOCK
    records = b"%d a=" % size + bytes(size - 11) + b"\n"
    header = bytearray(extension[:BLOCK])
    header[124:136] = b"%011o\0" % len(records)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = endless(tmp_path / "b.tar.zst", itertools.repeat(bytes(header) + records, 30))
    with pytest.raises(LimitExceededError, match="PAX records"):
        open_archive(path)


def test_a_stream_that_gives_much_more_than_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many bytes as archives may have uncompressed, and then 200 times what came."""
    monkeypatch.setattr("blobstore.store.archive.archive._MAX_PLAIN", 2**20)
    parts = itertools.chain([member_header("x", 2**26)], itertools.repeat(bytes(2**20), 64))
    path = endless(tmp_path / "a.tar.zst", parts)
    with pytest.raises(LimitExceededError, match="were decompressed from"):
        open_archive(path)


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_a_blob_ends_where_its_header_says(tmp_path: Path, store: MemoryStore, suffix: str) -> None:
    """What follows it in the archive is not its bytes."""
    path = tmp_path / f"a{suffix}"
    save_models(["m"], path, store=store)
    with open_archive(path) as archive, archive.blobs.open(descriptor_of(ONE)) as reader:
        with pytest.raises(ShortReadError):
            reader.read(len(ONE) - 1, 2)
        with pytest.raises(ShortReadError):
            reader.readinto(len(ONE) - 1, memoryview(bytearray(2)))


def test_a_seek_table_that_lies_is_an_error(tmp_path: Path, files: Files) -> None:
    """It would pass as a stream otherwise, whose bytes the table does not describe."""
    frame = zstandard.compress(tar_of(files))
    lies = {
        "a frame of too few bytes": encode_table([(len(frame), 10)]),
        "a frame of too many": encode_table([(len(frame), 2**27)]),
        "more frames than the file": struct.pack("<IBI", 10_000, 0, 0x8F92EAB1),
    }
    for name, table in lies.items():
        path = tmp_path / name
        path.write_bytes(frame + table)
        with pytest.raises(CorruptDataError, match="A3"):
            loaded(path)


@pytest.mark.usefixtures("little_memory")
def test_a_long_seek_table_is_not_read(tmp_path: Path, files: Files) -> None:
    """One of 64 MiB would take as much memory; such a file is read as a stream."""
    count = 2**23
    path = tmp_path / "a.tar.zst"
    with path.open("wb") as file:
        file.write(zstandard.compress(tar_of(files)))
        file.write(struct.pack("<II", 0x184D2A5E, 8 * count + 9))
        file.seek(8 * count, os.SEEK_CUR)  # a hole
        file.write(struct.pack("<IBI", count, 0, 0x8F92EAB1))
    check(loaded(path))


# Pipes


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
@pytest.mark.parametrize("names", [["m", "n"], ["n"]])
def test_a_pipe(tmp_path: Path, store: MemoryStore, suffix: str, names: list[str]) -> None:
    path, target = tmp_path / f"a{suffix}", MemoryStore()
    save_models(["m", "n"], path, store=store)
    with open_archive(piped(path.read_bytes())) as archive:
        assert archive.manifests.in_order() == [M, N]
        transfer(names, archive, target)
    for name in names:
        assert blobs_of(target, name) == blobs_of(store, name)
    with open_archive(piped(path.read_bytes())) as archive:
        done = transfer(names, archive, target)
    assert not any(one.blobs.get(How.COPIED) for one in done)


def test_a_pipe_that_is_cut_is_named(one: Files) -> None:
    for length in (BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1):
        with pytest.raises(CorruptDataError, match=r"^the pipe .*: it ends early \(rule A1\)"):
            load_piped(tar_of(one)[:length], MemoryStore())


def test_a_pipe_that_is_not_an_archive_is_refused_early() -> None:
    class Endless(io.RawIOBase):
        name = "endless"
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return b"x" * size

    pipe = Endless()
    with pytest.raises(CorruptDataError, match="A1"):
        open_archive(pipe)  # type: ignore[arg-type]  # what `read` needs
    assert pipe.given < 2**20
