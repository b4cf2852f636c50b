# Types of the compiled module: see bindings.cpp.
from collections.abc import Callable, Sequence
from typing import TypeAlias

class Tensors:
    def fields(self, index: int) -> tuple[str, tuple[int, ...], int, int]: ...

Scanned: TypeAlias = tuple[dict[str, int], Tensors, dict[str, str]]

def scan(
    text: bytes, data_size: int | None, unescape: Callable[[bytes], str]
) -> Scanned | None: ...
def scan_files(
    folder: int, files: Sequence[tuple[str, int]], unescape: Callable[[bytes], str]
) -> list[tuple[Scanned, int, int] | None]: ...
