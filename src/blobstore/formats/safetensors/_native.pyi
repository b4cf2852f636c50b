# Types of the compiled module: see bindings.cpp and ../manifest_bindings.cpp.
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

_Descriptor = TypeVar("_Descriptor")

class Tensors:
    def fields(self, index: int) -> tuple[str, tuple[int, ...], int, int]: ...

class FileHeaders:
    def __len__(self) -> int: ...
    def header(
        self, index: int, unescape: Callable[[bytes], str]
    ) -> tuple[Scanned, int] | None: ...
    def totals(self) -> tuple[int, int]: ...
    def outline(
        self,
    ) -> tuple[list[str], list[int], list[bytes], list[tuple[int, str]], list[int]]: ...

Scanned: TypeAlias = tuple[dict[str, int], Tensors, dict[str, str]]

def scan(
    text: bytes, data_size: int | None, unescape: Callable[[bytes], str]
) -> Scanned | None: ...
def scan_files(folder: int, files: Sequence[tuple[str, int]]) -> FileHeaders: ...
def scan_manifest(
    text: bytes, descriptor: type[_Descriptor], digest: type, unescape: Callable[[bytes], str]
) -> tuple[tuple[_Descriptor, ...], bytes] | None: ...
