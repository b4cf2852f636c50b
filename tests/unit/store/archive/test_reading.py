"""Archives of other programs, and archives that lie."""

from __future__ import annotations

import gzip
import io
import itertools
import json
import mmap
import os
import random
import struct
import tarfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable
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
from blobstore.formats.oci import blob_path, encode_index
from blobstore.formats.seekable import encode_table
from blobstore.formats.tar import BLOCK, member_header
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive import StreamedContents, contents_of, open_archive
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


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_any_order_form_and_compression(
    tmp_path: Path, files: Files, form: int, seed: int, pack: Callable[[bytes], bytes]
) -> None:
    files = [("blobs/", b""), ("blobs/sha256/", b""), *files]
    random.Random(seed).shuffle(files)
    path = tmp_path / "any"
    path.write_bytes(pack(tar_of(files, form)))
    check(loaded(path))
    assert blobs_of(loaded(path, "n"), "n") == [THREE, TWO]


def test_names_with_a_dot_in_front(tmp_path: Path, files: Files) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of([("./", b""), *((f"./{name}", data) for name, data in files)]))
    check(loaded(path))


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
    for packed in (raw, gzip.compress(raw, 1), zstandard.compress(raw)):
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


def test_other_bytes_of_a_blob(tmp_path: Path, one: Files) -> None:
    wrong = changed(one, blob_path(Digest.of(ONE)), bytes(len(ONE)))
    refused(tmp_path, tar_of(wrong), DigestMismatchError)


def test_another_size_of_a_blob(tmp_path: Path, one: Files) -> None:
    for data in (ONE[:-1], ONE + b"x", b""):
        wrong = changed(one, blob_path(Digest.of(ONE)), data)
        refused(tmp_path, tar_of(wrong), CorruptDataError, "bytes, not")


def test_other_bytes_of_a_manifest(tmp_path: Path, one: Files, store: MemoryStore) -> None:
    raw = store.manifests.text(M)
    wrong = changed(one, blob_path(Digest.of(raw)), raw.replace(b"layer0", b"layer9"))
    refused(tmp_path, tar_of(wrong), DigestMismatchError)


def test_a_missing_blob(tmp_path: Path, one: Files) -> None:
    left = [(path, data) for path, data in one if data != ONE]
    refused(tmp_path, tar_of(left), NotFoundError)


@pytest.mark.parametrize("path", ["oci-layout", "index.json"])
def test_a_missing_document(tmp_path: Path, one: Files, path: str) -> None:
    left = [(name, data) for name, data in one if name != path]
    refused(tmp_path, tar_of(left), CorruptDataError, "A2")


def test_a_manifest_that_is_missing(tmp_path: Path, one: Files, store: MemoryStore) -> None:
    left = [(path, data) for path, data in one if data != store.manifests.text(M)]
    refused(tmp_path, tar_of(left), NotFoundError)


def test_a_path_twice(tmp_path: Path, one: Files) -> None:
    refused(tmp_path, tar_of([*one, one[-1]]), CorruptDataError, "twice")
    refused(tmp_path, tar_of([*one, (f"./{one[-1][0]}", b"")]), CorruptDataError, "twice")


@pytest.mark.parametrize("path", ["/index.json", "../x", "blobs/../../x"])
def test_a_path_that_leads_elsewhere(tmp_path: Path, one: Files, path: str) -> None:
    refused(tmp_path, tar_of([*one, (path, b"x")]), CorruptDataError, "A1")


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_a_link(tmp_path: Path, one: Files, kind: bytes) -> None:
    info = tarfile.TarInfo("blobs/sha256/" + 64 * "0")
    info.type, info.linkname = kind, "/etc/passwd"
    refused(tmp_path, info.tobuf() + tar_of(one), CorruptDataError, "A1")


@pytest.mark.parametrize("data", [b"x", b"\0" * 5000 + b"x", bytes(2**20 + 1024)])
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


def test_a_size_beyond_the_file(tmp_path: Path, one: Files) -> None:
    raw = b"".join(member_header(path, 2**40) + data for path, data in one[:1])
    path = tmp_path / "a.tar"
    path.write_bytes(raw + bytes(10_000))
    with pytest.raises(CorruptDataError, match="more than are left"):
        loaded(path)


def test_an_index_in_an_index(tmp_path: Path, one: Files) -> None:
    entry = {"mediaType": "application/vnd.oci.image.index.v1+json", "size": 2}
    nested = index_of(entry | {"digest": str(Digest.of(b"{}"))})
    refused(tmp_path, tar_of(changed(one, "index.json", nested)), DocumentError, "A2")


def test_a_document_beyond_its_limit(tmp_path: Path, one: Files) -> None:
    large = changed(one, "index.json", bytes(16 * 2**20 + 1))
    refused(tmp_path, tar_of(large), LimitExceededError)


def test_paths_of_a_megabyte(tmp_path: Path, one: Files) -> None:
    refused(tmp_path, tar_of([("x/" * 2**20 + "y", b""), *one]), CorruptDataError, "1 MiB")


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
    for at in range(0, sum(map(len, frames)), 997):
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with suppress(BlobStoreError):  # else it is in bytes that do not count, such as padding
            check(loaded(path))
        damaged[at] ^= 0x10


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
    tracemalloc.start()
    try:
        with pytest.raises(CorruptDataError, match=r"not 10,000|too much memory"):
            loaded(path)
        path.write_bytes(frame)
        with pytest.raises(CorruptDataError):
            loaded(path)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def test_a_long_seek_table_is_not_used(tmp_path: Path) -> None:
    """A table of 64 MiB took 1.1 GB of memory, however small its frames were."""
    frame, frames = zstandard.ZstdCompressor().compress(bytes(1024)), 2**21
    path = tmp_path / "a.tar.zst"
    entries = struct.pack("<II", len(frame), 1024) + bytes(8 * (frames - 1))
    head = struct.pack("<II", 0x184D2A5E, len(entries) + 9)
    path.write_bytes(frame + head + entries + struct.pack("<IBI", frames, 0, 0x8F92EAB1))
    contents = contents_of(path)
    assert isinstance(contents, StreamedContents)
    contents.close()


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


def test_bombs_take_no_memory(tmp_path: Path, one: Files) -> None:
    """Many zeros in a file that no model names."""
    path = tmp_path / "a.tar.gz"
    with gzip.open(path, "wb", 1) as out:
        out.write(member_header("blobs/sha256/" + 64 * "0", 2**26))
        for _ in range(2**6):
            out.write(bytes(2**20))
        out.write(tar_of(one))
    tracemalloc.start()
    try:
        assert blobs_of(loaded(path), "m") == [ONE, TWO]
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


# Work without an end


def compressed(path: Path, parts: Iterable[bytes]) -> Path:
    """Write a stream of one frame, whose parts are made one after the other."""
    compressor = zstandard.ZstdCompressor().compressobj()
    with path.open("wb") as file:
        for part in parts:
            file.write(compressor.compress(part))
        file.write(compressor.flush())
    return path


def test_extensions_without_an_end(tmp_path: Path) -> None:
    extension = member_header("x", 8**11)[:-BLOCK]  # PAX records, and not the file
    records = b"6 a=b\n" * 2**17
    header = bytearray(extension[:BLOCK])
    header[124:136] = b"%011o\0" % len(records)
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    path = compressed(tmp_path / "b.tar.zst", itertools.repeat(bytes(header) + records, 30))
    with pytest.raises(LimitExceededError, match="PAX records"):
        open_archive(path)


def test_headers_without_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blobstore.store.archive.archive.MAX_MEMBERS", 100)
    folders = (member_header(f"{number}/", 0) for number in itertools.count())
    path = compressed(tmp_path / "a.tar.zst", itertools.islice(folders, 101))
    with pytest.raises(LimitExceededError, match="100 headers of files"):
        open_archive(path)


def test_many_names_of_a_model_take_time_for_each_once(tmp_path: Path, store: MemoryStore) -> None:
    raw = store.manifests.text(M)
    entry = json.loads(encode_index([(M, raw)]))["manifests"][0]
    (key,) = (key for key in entry["annotations"] if "ref.name" in key)
    entries = [{**entry, "annotations": {key: f"m:{number}"}} for number in range(2000)]
    files = dict(files_of(store, "m")) | {"index.json": index_of(*entries)}
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(files.items()))
    with open_archive(path) as archive:
        begin = time.process_time()
        assert [str(archive.find(f"M:{number}")) for number in range(2000)][-1] == "m:1999"
        assert time.process_time() - begin < 2  # comparing each with all takes 10 s and more


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
def test_a_blob_ends_where_its_header_says(tmp_path: Path, store: MemoryStore, suffix: str) -> None:
    """What follows it in the archive is not its bytes."""
    path = tmp_path / f"a{suffix}"
    save_models(["m"], path, store=store)
    with open_archive(path) as archive:
        for layer in archive.manifests.read(M).layers:
            with archive.blobs.open(layer) as reader:
                assert len(reader.read(0, layer.size)) == layer.size
                with pytest.raises(ShortReadError):
                    reader.read(layer.size - 1, 2)
                with pytest.raises(ShortReadError):
                    reader.readinto(layer.size - 1, memoryview(bytearray(2)))


def test_a_stream_that_gives_much_more_than_it_has(tmp_path: Path) -> None:
    zeros = itertools.repeat(bytes(2**24), 300)
    parts = itertools.chain([member_header("x", 300 * 2**24)], zeros)
    path = compressed(tmp_path / "a.tar.zst", parts)
    with pytest.raises(LimitExceededError, match="were decompressed from"):
        open_archive(path)


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


# Pipes


@pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])
@pytest.mark.parametrize("names", [["m", "n"], ["n"], ["m"], ["n", "m"]])
def test_a_pipe(tmp_path: Path, store: MemoryStore, suffix: str, names: list[str]) -> None:
    path, target = tmp_path / f"a{suffix}", MemoryStore()
    save_models(["m", "n"], path, store=store)
    with open_archive(piped(path.read_bytes())) as archive:
        assert archive.manifests.in_order() == [M, N]
        chosen = [name for name in archive.manifests.in_order() if str(name)[0] in names]
        transfer(chosen, archive, target)
    assert target.manifests.names() == sorted(map(ModelName.parse, names))
    for name in names:
        assert blobs_of(target, name) == blobs_of(store, name)


def test_a_pipe_whose_blobs_are_there(tmp_path: Path, store: MemoryStore) -> None:
    path = tmp_path / "a.tar"
    save_models(["m", "n"], path, store=store)
    with open_archive(piped(path.read_bytes())) as archive:
        (done, _) = transfer(["m", "n"], archive, store)
    assert not done.blobs.get(How.COPIED)


def test_a_pipe_in_another_order(files: Files) -> None:
    for order in (files[::-1], [*files[2:], *files[:2]], [*files[:2], *files[4:], *files[2:4]]):
        target = MemoryStore()
        load_piped(tar_of(order), target)
        check(target)


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
