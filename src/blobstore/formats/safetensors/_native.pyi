# Types of the compiled module: see bindings.cpp.
from collections.abc import Callable

from blobstore.formats.dtypes import DType
from blobstore.formats.safetensors.header import TensorEntry

class Tensors:
    def entry(
        self, index: int, entry_type: type[TensorEntry], dtypes: tuple[DType, ...]
    ) -> TensorEntry: ...

def scan(
    text: bytes, data_size: int | None, unescape: Callable[[bytes], str]
) -> tuple[dict[str, int], Tensors, bytes] | None: ...
def write(
    names: list[str], members: list[TensorEntry | bytes], dtypes: tuple[DType, ...]
) -> bytes | None: ...
def dtypes() -> list[str]: ...
