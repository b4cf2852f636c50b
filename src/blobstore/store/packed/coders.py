"""Frames: up to 1 MiB of a blob, coded and decoded in memory by one thread.

Floats are split into planes (kernels/planes.py). Each plane is coded by zstandard, or stored if
that is not smaller. The parameters for planes make zstandard almost a pure Huffman coder: matches
of 7 bytes at least, found through a table of 64 entries, are rare among exponents. It then takes
0.326 of the exponents of normal BF16 weights at 2.4 times the speed of level 1, which finds matches
that cost more than they save, and takes 0.36 (docs/performance.md). Negative levels would not code
literals at all. Other planes are coded only if a sample of them shrinks.

What is written depends on the version of libzstd; what is read does not (RFC 8878).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from blobstore.errors import CorruptDataError
from blobstore.store.packed.cuts import FRAME, Coding

if TYPE_CHECKING:
    import zstandard

_SAMPLE = 2**15
"""Bytes of a plane that are tried first."""
_WORTH = {Coding.TEXT: 0.97, Coding.FLOATS: 0.97, Coding.CODES: 0.9}
"""The largest share of its bytes that a coded plane may keep. The packed codes of int4, int8 and
mxfp4 would shrink by 3 to 4% and take four times as long, those of nvfp4 would not shrink; those of
mxfp8 are like FP8."""
_TEXT_LEVEL = 9


@dataclass(frozen=True, slots=True)
class Coded:
    """A coded frame: its planes in order, which of them zstandard coded, and whether by a base."""

    parts: tuple[memoryview | bytes, ...]
    is_coded: tuple[bool, ...]
    has_base: bool = False

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return sum(map(len, self.parts))


class Encoder:
    """Codes frames; for one thread."""

    def __init__(self) -> None:
        import zstandard

        planes = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST,
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            write_content_size=True,
        )
        self._floats = zstandard.ZstdCompressor(compression_params=planes)
        self._text = zstandard.ZstdCompressor(level=_TEXT_LEVEL)
        self._differences = zstandard.ZstdCompressor(level=1)

    def encode(
        self, data: memoryview, coding: Coding, width: int, base: memoryview | None = None
    ) -> Coded:
        """Return the frame of ``data``: whole items of ``width`` bytes.

        ``base``: as many bytes of a base model. They are used if the frame gets smaller.
        """
        coded = self._planes(data, width, self._coder(coding), _WORTH[coding])
        if base is None:
            return coded
        differences = self._planes(data, width, self._differences, 1.0, base)
        return differences if differences.nbytes < coded.nbytes else coded

    def _coder(self, coding: Coding) -> zstandard.ZstdCompressor:
        return self._text if coding is Coding.TEXT else self._floats

    def _planes(
        self,
        data: memoryview,
        width: int,
        coder: zstandard.ZstdCompressor,
        worth: float,
        base: memoryview | None = None,
    ) -> Coded:
        from blobstore.kernels import split_planes

        planes = split_planes(data, width, base)
        nbytes = len(planes) // width
        exponents = _part(planes[:nbytes], coder, worth, is_sampled=width == 1)
        others = (planes[begin : begin + nbytes] for begin in range(nbytes, len(planes), nbytes))
        parts = (exponents, *(_part(plane, coder, worth, is_sampled=True) for plane in others))
        return Coded(parts, tuple(len(part) < nbytes for part in parts), base is not None)


def _part(
    plane: memoryview, coder: zstandard.ZstdCompressor, worth: float, *, is_sampled: bool
) -> memoryview | bytes:
    """Return a plane coded if it gets small enough, else as it is. A sample may decide."""
    if is_sampled and len(plane) >= 4 * _SAMPLE:
        middle = len(plane) // 2
        if len(coder.compress(plane[middle : middle + _SAMPLE])) > worth * _SAMPLE:
            return plane
    coded = coder.compress(plane)
    return coded if len(coded) < worth * len(plane) else plane


class Decoder:
    """Decodes frames; for one thread."""

    def __init__(self) -> None:
        import zstandard

        self._zstandard = zstandard
        self._decompressor = zstandard.ZstdDecompressor()
        self._planes = memoryview(bytearray(FRAME))

    def decode(
        self,
        parts: tuple[memoryview, ...],
        is_coded: tuple[bool, ...],
        out: memoryview,
        base: memoryview | None = None,
    ) -> None:
        """Write the bytes of a frame to ``out``. ``parts``: a plane for each byte of an item.

        Raises: CorruptDataError if a part is not a plane of the size that ``out`` needs.
        """
        from blobstore.kernels import join_planes

        width = len(parts)
        nbytes = len(out) // width
        planes = self._planes[: len(out)]
        for number, (part, coded) in enumerate(zip(parts, is_coded, strict=True)):
            plane = self._plane(part, nbytes) if coded else part
            if len(plane) != nbytes:
                raise CorruptDataError("a plane has the wrong size")
            planes[number * nbytes :][:nbytes] = plane
        join_planes(planes, width, out, base)

    def _plane(self, part: memoryview, nbytes: int) -> bytes:
        try:
            # Before anything is allocated for it.
            if self._zstandard.frame_content_size(part) != nbytes:
                raise CorruptDataError("a zstandard frame has another size than its plane")
            return self._decompressor.decompress(part)
        except self._zstandard.ZstdError as error:
            raise CorruptDataError(f"a zstandard frame is damaged: {error}") from None
