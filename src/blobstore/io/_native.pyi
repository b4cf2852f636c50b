# Types of the compiled module: see writing.cpp.
from collections.abc import Sequence

from blobstore.hashing import Bytes

def write_parts(parts: Sequence[tuple[int, int, Bytes]], /) -> None: ...
