# Types of the compiled module: see bindings.cpp.
from collections.abc import Callable

class Table:
    def entry(self, index: int) -> tuple[int, tuple[int, ...], int, int]: ...

def scan(
    text: bytes, data_size: int | None, unescape: Callable[[bytes], str]
) -> tuple[dict[str, int], Table, bytes] | None: ...
def dtypes() -> list[str]: ...
