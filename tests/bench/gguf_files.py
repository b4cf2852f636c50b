"""Processor time and memory of importing GGUF files of 200 MB, by the type of their matrices.

``python tests/bench/gguf_files.py DIR [TYPE…]`` writes the files into a folder, unless it has them,
and imports each three times in turn, in processes of their own; first BF16 as int4.
"""

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from tables import show, table

from blobstore import Store, import_model

COLS, ROWS, SIZE = 2048, 2048, 200_000_000
TYPES = ("BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "MXFP4", "Q4_K")


def write(path: Path, name: str) -> None:
    """Write a model of one layer's names, repeated; types that gguf can't write get any bytes."""
    random, kind = np.random.default_rng(0), gguf.GGMLQuantizationType[name]
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    layers = max(1, round(SIZE / (7 * ROWS * COLS // block * nbytes)))
    file = gguf.GGUFWriter(path, "qwen2")
    file.add_block_count(layers)
    file.add_embedding_length(COLS)
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    names = [f"blk.{layer}.{part}" for layer in range(layers) for part in parts]
    for tensor in ("token_embd", *names):
        values = random.standard_normal((ROWS, COLS), np.float32) / 50
        try:
            raw = gguf.quantize(values, kind)
        except NotImplementedError:
            raw = random.integers(0, 256, (ROWS, COLS // block * nbytes), np.uint8) & 0xBB
        file.add_tensor(f"{tensor}.weight", raw, raw_dtype=kind)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


def one(path: Path, quant: str) -> None:
    """Import a file in this process; print its processor time in seconds and added MB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        (Path(work) / "config.json").write_text("{}")
        store = Store(Path(work) / "store")
        import_model(path, "m", store=store, config=work, quant=quant or None)
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, (used.ru_maxrss - before) / 1024)


def main() -> None:
    folder = Path(sys.argv[1])
    cases = [("BF16", "int4"), *((name, "") for name in sys.argv[2:] or TYPES)]
    for name, _ in cases:
        if not (path := folder / f"{name}.gguf").exists():
            write(path, name)
    runs: dict[tuple[str, str], list[list[float]]] = {case: [] for case in cases}
    for _ in range(3):
        for name, quant in cases:
            command = [sys.executable, __file__, "--one", str(folder / f"{name}.gguf"), quant]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            runs[name, quant].append([*map(float, out.split())])
    table("type", "s per 200 MB", "speed", "memory")
    first = 0.0
    for (name, quant), results in runs.items():
        size = (folder / f"{name}.gguf").stat().st_size
        seconds = statistics.median(result[0] for result in results) * SIZE / size
        first = first or seconds
        memory = f"{max(result[1] for result in results):.0f} MB"
        show((f"{name} {quant}", f"{seconds:.2f}", f"{first / seconds:.2f}", memory))


if __name__ == "__main__":
    if sys.argv[1] == "--one":
        one(Path(sys.argv[2]), sys.argv[3])
    else:
        main()
