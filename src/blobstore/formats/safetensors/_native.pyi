# Types of the compiled module: see bindings.cpp.
from collections.abc import Callable

class Tensors:
    def fields(self, index: int) -> tuple[str, tuple[int, ...], int, int]: ...

def scan(
    text: bytes, data_size: int | None, unescape: Callable[[bytes], str]
) -> tuple[dict[str, int], Tensors, dict[str, str]] | None: ...
