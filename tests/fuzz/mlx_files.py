"""MLX loads, evaluates, indexes, converts and saves any validated file without a signal.

`python tests/fuzz/mlx_files.py FOLDER` tries every file of a folder, and says each file and step
before it begins: the last lines of a process that died are the culprit. test_mlx_files.py makes the
folders.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from blobstore import read_header
from blobstore.errors import BlobStoreError
from blobstore.formats.dtypes import fits_mlx
from blobstore.formats.safetensors.header import Header

# What Python code can catch, and MLX says about arrays that are as the file has them.
EXPECTED = (
    "Cannot do a non-empty take from an empty axis",
    "is not a valid PEP 3118 buffer format string",
)


def passed(path: Path) -> Header | None:
    """Return the header of a file that our loader would give to `mx.load`, else None."""
    try:
        header = read_header(path)
        header.check_limits(str(path))
    except BlobStoreError:
        return None
    return (
        header
        if all(fits_mlx(entry.dtype, entry.shape) for entry in header.tensors.values())
        else None
    )


def step(what: str, call: Callable[[], Any]) -> Any:
    """Call, and say so before; let only those errors pass that are expected."""
    print(what, flush=True)
    try:
        return call()
    except (ValueError, RuntimeError) as error:
        if not any(words in str(error) for words in EXPECTED):
            raise
        return None


def use_array(array: Any) -> Any:
    """Do with an array what programs do, and return its bytes as a numpy array."""
    step("eval", lambda: mx.eval(array))
    step("sum", lambda: mx.eval(mx.sum(array)))
    if array.ndim:
        step("index", lambda: mx.eval(array[0], array[-1:]))
    step("numpy", lambda: np.array(array))
    return step("bytes", lambda: np.array(array.reshape(-1).view(mx.uint8)))


def use(path: Path, header: Header, folder: Path) -> None:
    """Load a file and do with each of its arrays what programs do.

    Raises: AssertionError where MLX reads it otherwise.
    """
    arrays = step("load", lambda: mx.load(str(path), format="safetensors"))
    assert arrays.keys() == header.tensors.keys()
    raw = path.read_bytes()
    for name, array in arrays.items():
        entry = header.tensors[name]
        assert tuple(array.shape) == entry.shape
        values = use_array(array)
        assert (
            values.tobytes() == raw[header.data_start + entry.begin : header.data_start + entry.end]
        )
    step("save", lambda: mx.save_safetensors(str(folder / "saved.safetensors"), arrays))


def main() -> None:
    """Use every file of a folder; print how many there were of each kind."""
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted(Path(sys.argv[1]).iterdir()):
            print(path.name, flush=True)
            header = passed(path)
            counts["passed" if header is not None else "kept from MLX"] += 1
            if header is not None:
                use(path, header, Path(folder))
    print(f"{counts['passed']} passed, {counts['kept from MLX']} kept from MLX")


if __name__ == "__main__":
    main()
