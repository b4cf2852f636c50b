# Types of the compiled module: see bindings.cpp.
from typing import Any, TypeAlias

import numpy as np

_Array: TypeAlias = np.ndarray[Any, Any]

def targets() -> list[str]: ...
def quantize(
    target: str,
    method: str,
    quant_type: str,
    float_type: str,
    weights: _Array,
    group_size: int,
    words: _Array,
    scales: _Array,
    biases: _Array | None,
    global_scale: float,
    importance: _Array | None,
    first_column: int,
    factors: list[float],
    shifts: list[float],
    neighbours: bool,
) -> int: ...
def dequantize(
    target: str,
    quant_type: str,
    scale_type: str,
    out_type: str,
    words: _Array,
    scales: _Array,
    biases: _Array | None,
    group_size: int,
    global_scale: float,
    out: _Array,
) -> None: ...
def compare(
    target: str, float_type: str, read_type: str, weights: _Array, read: _Array
) -> tuple[float, float, float, float, float, int]: ...
def compare_stored(
    target: str,
    float_type: str,
    quant_type: str,
    scale_type: str,
    weights: _Array,
    words: _Array,
    scales: _Array,
    biases: _Array | None,
    group_size: int,
    global_scale: float,
) -> tuple[float, float, float, float, float, int]: ...
def decode_blocks(
    target: str,
    code: str,
    out_type: str,
    codes: _Array,
    values: _Array | None,
    scales: _Array,
    first: int,
    rows: int,
    cols: int,
    block_rows: int,
    block_cols: int,
    out: _Array,
) -> None: ...
def dequantize_columns(
    target: str,
    out_type: str,
    codes: _Array,
    group_of: _Array,
    scales: _Array,
    biases: _Array,
    by_zero: bool,
    out: _Array,
) -> None: ...
def widen(words: _Array, bits: int, used: int, wide: int, rows: _Array) -> None: ...
def turn(lines: _Array, square: int, rows: _Array) -> None: ...
