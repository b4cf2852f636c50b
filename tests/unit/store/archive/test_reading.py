"""Archives of other programs, and archives that lie."""

import gzip
import io
import itertools
import json
import os
import random
import struct
import tarfile
import threading
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore import errors
from blobstore.formats.archives import BLOCK, encode_table, member_header
from blobstore.formats.documents import Manifest
from blobstore.formats.oci import LAYOUT, blob_path, encode_index
from blobstore.names import Digest, ModelName
from blobstore.store.archive.archive import open_archive
from blobstore.store.archive.saving import save_models
from blobstore.store.memory import MemoryStore
from blobstore.store.transfer import transfer
from blobstore.testing.blobs import M, N, blobs_of, commit, data_of, descriptor_of

ONE, TWO, THREE = data_of(70_000), b"two", data_of(3000)
Files = list[tuple[str, bytes]]
SUFFIXES = pytest.mark.parametrize("suffix", [".tar", ".tar.zst"])


def files_of(store: MemoryStore, *names: ModelName) -> Files:
    """Return the files of an archive of models, as other programs may order them."""
    models = {name: store.manifests.text(name) for name in names}
    files = {"oci-layout": LAYOUT, "index.json": encode_index(models.items())}
    files |= {blob_path(Digest.of(raw)): raw for raw in models.values()}
    blobs = (blob for raw in models.values() for blob in Manifest.parse(raw).descriptors)
    return [*(files | {blob_path(blob.digest): store.blobs.read(blob) for blob in blobs}).items()]


def tar_of(files: Iterable[tuple[str, bytes]], form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar of files, as Python's tarfile writes it; folders end with a slash."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for path, data in files:
            info = tarfile.TarInfo(path)
            info.type = tarfile.DIRTYPE if path.endswith("/") else tarfile.REGTYPE
            info.size = len(data)
            info.mtime = 1_700_000_000.5  # PAX keeps the half in an extension
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def index_of(*entries: dict[str, Any]) -> bytes:
    return json.dumps({"schemaVersion": 2, "manifests": entries}).encode()


@pytest.fixture
def store() -> MemoryStore:
    store = MemoryStore()
    commit(store, "m", ONE, TWO)
    commit(store, "n", THREE, TWO)
    return store


@pytest.fixture
def files(store: MemoryStore) -> Files:
    return files_of(store, M, N)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fails a test that takes 16 MiB at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()


def load(archive: Path | io.BufferedReader, *names: str) -> MemoryStore:
    """Return a store with models of an archive; every one if none is named."""
    target = MemoryStore()
    with open_archive(archive) as opened:
        transfer(names or opened.manifests.in_order(), opened, target, jobs=2)
    return target


def check(target: MemoryStore) -> None:
    assert blobs_of(target, "m") == [ONE, TWO]
    assert blobs_of(target, "n") == [THREE, TWO]


@pytest.mark.parametrize(
    ("form", "pack", "seed"),
    [
        (tarfile.USTAR_FORMAT, gzip.compress, 0),
        (tarfile.GNU_FORMAT, bytes, 1),
        (tarfile.PAX_FORMAT, zstandard.compress, 2),
    ],
)
def test_any_order_form_and_compression(
    path: Path, files: Files, form: int, pack: Callable[[bytes], bytes], seed: int
) -> None:
    """Files that are no part of a model are ignored, such as docker's documents."""
    files = [("./", b""), ("blobs/", b""), *((f"./{name}", data) for name, data in files)]
    files += [("manifest.json", b"[]"), ("x" * 100, b"long"), ("blobs/sha512/" + 16 * "a", b"x")]
    random.Random(seed).shuffle(files)
    path.write_bytes(pack(tar_of(files, form)))
    check(load(path))
    assert blobs_of(load(path, "n"), "n") == [THREE, TWO]


def test_a_model_without_a_name_gets_one(path: Path, files: Files, store: MemoryStore) -> None:
    raw = store.manifests.text(M)
    media_type = "application/vnd.oci.image.manifest.v1+json"
    entry = {"mediaType": media_type, "digest": str(Digest.of(raw)), "size": len(raw)}
    path.write_bytes(tar_of(changed(files, "index.json", index_of(entry))))
    with open_archive(path) as archive:
        assert archive.manifests.names() == []
        assert archive.unnamed == (Digest.of(raw),)
    with open_archive(path, name="other") as archive:
        assert archive.manifests.names() == [ModelName.parse("other")]
        assert archive.manifests.text(archive.find("other")) == raw
    path.write_bytes(tar_of(files))
    with pytest.raises(errors.UsageError):  # it has two models
        open_archive(path, name="other")


@SUFFIXES
def test_a_model_is_opened_in_place(tmp_path: Path, suffix: str) -> None:
    """And stays usable when the archive is closed and its file is removed."""
    tensors = {f"{name}.weight": normal(name, 64, 64) for name in "ab"}
    store, path = MemoryStore(), tmp_path / f"a{suffix}"
    blobstore.import_model(write_checkpoint(tmp_path / "m", tensors), "tiny", store=store)
    save_models(["tiny"], path, store=store)
    with open_archive(path) as archive:
        model = blobstore.open_model("tiny", store=archive, verify=True)
    path.unlink()
    expected = blobstore.open_model("tiny", store=store).arrays()
    found = model.arrays()
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in found)


@SUFFIXES
def test_a_blob_ends_where_its_header_says(tmp_path: Path, store: MemoryStore, suffix: str) -> None:
    """What follows it in the archive is not its bytes."""
    path = tmp_path / f"a{suffix}"
    save_models(["m"], path, store=store)
    archive = open_archive(path)
    reader = archive.blobs.open(descriptor_of(ONE))
    with pytest.raises(errors.ShortReadError):
        reader.read(len(ONE) - 1, 2)
    with pytest.raises(errors.ShortReadError):
        reader.readinto(len(ONE) - 1, memoryview(bytearray(2)))
    assert (reader.place() is not None) is (suffix == ".tar")  # where it can be mapped
    archive.close()
    if suffix == ".tar":
        with pytest.raises(errors.UsageError):  # mmap would give zeros
            reader.place()


def changed(files: Files, name: str, data: bytes | None) -> Files:
    """Return the files with another content of one; without it if there is none."""
    found = [(path, data if path == name else old) for path, old in files]
    return [(path, data) for path, data in found if data is not None]


def refused(path: Path, raw: bytes, error: type[errors.BlobStoreError], match: str) -> None:
    """Check that an archive is refused: from a file, compressed, and from a pipe."""
    for packed in (raw, zstandard.compress(raw)):
        path.write_bytes(packed)
        with pytest.raises(error, match=match):
            load(path)
    with pytest.raises(error, match=match):
        load(piped(raw))


def piped(raw: bytes) -> io.BufferedReader:
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), os.fdopen(writing, "wb") as pipe:
            pipe.write(raw)

    threading.Thread(target=write, daemon=True).start()
    return os.fdopen(reading, "rb")


def test_contents_that_lie(path: Path, store: MemoryStore) -> None:
    files, raw = files_of(store, M), store.manifests.text(M)
    blob, manifest = blob_path(Digest.of(ONE)), blob_path(Digest.of(raw))
    nested = {"mediaType": "application/vnd.oci.image.index.v1+json", "size": 2}
    index = index_of(nested | {"digest": str(Digest.of(b"{}"))})
    for name, data, error, match in (
        (blob, bytes(len(ONE)), errors.DigestMismatchError, "sha256"),
        (blob, ONE[:-1], errors.CorruptDataError, "bytes"),
        (blob, ONE + b"x", errors.CorruptDataError, "bytes"),
        (manifest, raw.replace(b"layer0", b"layer9"), errors.DigestMismatchError, "sha256"),
        (blob, None, errors.NotFoundError, "sha256"),
        (manifest, None, errors.NotFoundError, "sha256"),
        ("oci-layout", None, errors.CorruptDataError, "A2"),
        ("index.json", index, errors.DocumentError, "A2"),
        ("index.json", bytes(16 * 2**20 + 1), errors.LimitExceededError, "index.json"),
    ):
        refused(path, tar_of(changed(files, name, data)), error, match)


def test_paths_that_are_refused(path: Path, files: Files) -> None:
    again, data = files[-1]
    for more, match in (
        ((again, data), "twice"),
        ((f"./{again}", b""), "twice"),
        (("/index.json", b"x"), "A1"),
        (("blobs/../../x", b"x"), "A1"),
        (("x/" * 2**20 + "y", b""), "1 MiB"),
    ):
        refused(path, tar_of([*files, more]), errors.CorruptDataError, match)


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_a_link(path: Path, files: Files, kind: bytes) -> None:
    info = tarfile.TarInfo("blobs/sha256/" + 64 * "0")
    info.type, info.linkname = kind, "/etc/passwd"
    refused(path, info.tobuf() + tar_of(files), errors.CorruptDataError, "A1")


def test_every_cut_and_data_after_the_end_are_noticed(path: Path, files: Files) -> None:
    raw = tar_of(files)
    for data in (b"\0" * 5000 + b"x", bytes(2**20 + 1024)):
        refused(path, raw + data, errors.CorruptDataError, "end")
    end = len(raw.rstrip(b"\0")) // BLOCK * BLOCK + BLOCK
    for length in {*range(0, end, 9001), end - 1, end, end + BLOCK, end + 2 * BLOCK - 1}:
        path.write_bytes(raw[:length])
        with pytest.raises(errors.BlobStoreError):
            load(path)
    path.write_bytes(raw[: end + 2 * BLOCK])
    check(load(path))
    path.write_bytes(member_header("oci-layout", 2**40) + bytes(10_000))
    with pytest.raises(errors.CorruptDataError):
        load(path)


def framed(raw: bytes, *cuts: int) -> tuple[bytes, list[tuple[int, int]]]:
    plain = [raw[a:b] for a, b in itertools.pairwise([0, *cuts, len(raw)])]
    frames = [zstandard.compress(part) for part in plain]
    sizes = [(len(frame), len(part)) for frame, part in zip(frames, plain, strict=True)]
    return b"".join(frames), sizes


def test_frames_that_lie(path: Path, files: Files) -> None:
    """Also where the file would pass as a stream, whose bytes the table does not describe."""
    frames, (first, second, third) = framed(tar_of(files), 5120, 60_000)
    for table in (
        encode_table([(first[0], 5119), (second[0], second[1] + 1), third]),
        encode_table([second, first, third]),
        encode_table([(first[0], 0), second, third]),
        encode_table([(len(frames), 10)]),
        encode_table([(len(frames), 2**27)]),
        struct.pack("<IBI", 10_000, 0, 0x8F92EAB1),
    ):
        path.write_bytes(frames + table)
        with pytest.raises(errors.CorruptDataError):
            load(path)
    damaged = bytearray(frames + encode_table([first, second, third]))
    for at in range(0, len(frames), 8001):
        damaged[at] ^= 0x10
        path.write_bytes(damaged)
        with suppress(errors.BlobStoreError):  # else its bytes do not count, such as padding
            check(load(path))
        damaged[at] ^= 0x10


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize(
    "header", [b"\xe0" + (2**40).to_bytes(8, "little"), b"\xa0" + (10**8).to_bytes(4, "little")]
)
def test_a_frame_that_says_it_is_large(path: Path, header: bytes) -> None:
    """The bytes that its header says are not allocated."""
    frame = bytes.fromhex("28b52ffd") + header + b"\x01\x00\x00"
    for data in (frame + encode_table([(len(frame), 10_000)]), frame):
        path.write_bytes(data)
        with pytest.raises(errors.CorruptDataError):
            load(path)


@pytest.mark.usefixtures("little_memory")
def test_a_long_seek_table_is_not_read(path: Path, files: Files) -> None:
    """One of 64 MiB would take as much memory; such a file is read as a stream."""
    count = 2**23
    with path.open("wb") as file:
        file.write(zstandard.compress(tar_of(files)))
        file.write(struct.pack("<II", 0x184D2A5E, 8 * count + 9))
        file.seek(8 * count, os.SEEK_CUR)  # a hole
        file.write(struct.pack("<IBI", count, 0, 0x8F92EAB1))
    check(load(path))


def test_paths_are_limited(path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million paths of 4 KiB would take gigabytes, and little of a compressed file."""
    path.write_bytes(tar_of([*files, *((f"{number}/{'x' * 200}", b"") for number in range(20))]))
    monkeypatch.setattr("blobstore.store.archive.archive.MAX_PATHS", 5000)
    open_archive(path).close()
    monkeypatch.setattr("blobstore.store.archive.archive.MAX_PATHS", 4000)
    with pytest.raises(errors.LimitExceededError, match="4,000"):
        open_archive(path)


@pytest.mark.usefixtures("little_memory")
def test_bombs_take_no_memory(path: Path, files: Files) -> None:
    """Many zeros in a file that no model names."""
    with gzip.open(path, "wb", 1) as out:
        out.write(member_header("blobs/sha256/" + 64 * "0", 2**25))
        for _ in range(2**5):
            out.write(bytes(2**20))
        out.write(tar_of(files))
    check(load(path))


def test_extensions_without_an_end(path: Path) -> None:
    records = b"%d a=" % 10**6 + bytes(10**6 - 11) + b"\n"
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, len(records)
    extension = info.tobuf() + records + bytes(-len(records) % BLOCK)
    path.write_bytes(zstandard.compress(extension * 30))
    with pytest.raises(errors.LimitExceededError):
        open_archive(path)


@pytest.mark.parametrize(("suffix", "names"), [(".tar", ["n"]), (".tar.zst", ["m", "n"])])
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
    assert not any(one.copied for one in done)


def test_a_pipe_that_is_cut_is_named(files: Files) -> None:
    for length in (BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK + 1):
        with pytest.raises(errors.CorruptDataError, match=r"pipe .* \(rule A1\)"):
            load(piped(tar_of(files)[:length]))


def test_a_pipe_that_is_not_an_archive_is_refused_early() -> None:
    class Endless(io.RawIOBase):
        name = "endless"
        given = 0

        def read(self, size: int = -1) -> bytes:
            self.given += size
            return b"x" * size

    pipe = Endless()
    with pytest.raises(errors.CorruptDataError, match="A1"):
        open_archive(pipe)  # type: ignore[arg-type]  # what `read` needs
    assert pipe.given < 2**20
