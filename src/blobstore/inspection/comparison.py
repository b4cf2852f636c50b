"""Comparison: how far values are from each other, in sums that can be added chunk by chunk.

The values are a checkpoint's weights and what is stored of them, or those of two stored tensors.
The kernels compute the sums, in float64.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, astuple, dataclass, replace
from typing import Annotated, Self

import numpy as np

from blobstore import kernels
from blobstore.formats.documents import TENSOR_MEDIA_TYPE, Manifest
from blobstore.formats.dtypes import DType
from blobstore.io.workers import results_of, threads
from blobstore.kernels.arrays import Array, QuantizedArray
from blobstore.model.loader import StoredArray, Tensor, open_model, parts_of, run_of, values_of
from blobstore.names import Digest, ModelName
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Readable

Figure = Annotated[float, float | None]
"""A number; in JSON null for infinity and NaN."""
CHUNK_WEIGHTS = 2**19
"""Weights compared at a time by one thread: a whole number of groups of every type."""
_WHOLE_GROUPS = 128


@dataclass(frozen=True, slots=True)
class Errors:
    """How far values are from each other: sums over weights and what they are read back as.

    Sums of two runs can be added.
    """

    KEYS = (
        "weights=count",
        "rmse",
        "relative_rmse",
        "max_error",
        "cosine",
        "saturated",
    )

    count: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    squared_read: float = 0.0
    product: float = 0.0
    max_error: Figure = 0.0
    saturated_count: int = 0

    @classmethod
    def between(cls, weights: Array, read: StoredArray) -> Errors:
        """Return the sums over flat weights and as many values, stored as an array or in groups.

        Infinite, or NaN, where a value is, or where no float64 holds them.
        """
        return cls(weights.size, *kernels.compare(weights, read))

    @property
    def are_finite(self) -> bool:
        """True if all values were finite; False if one was not, or if a sum is not."""
        return math.isfinite(self.squared_weight) and math.isfinite(self.squared_read)

    def __add__(self, other: Self) -> Self:
        sums = type(self)(*map(operator.add, astuple(self), astuple(other)))
        return replace(sums, max_error=max(self.max_error, other.max_error))

    @property
    def rmse(self) -> Figure:
        """Root of the mean squared error, in the weights' unit; 0 of no weights."""
        return math.sqrt(self.squared_error / max(1, self.count))

    @property
    def relative_rmse(self) -> float | None:
        """`rmse` over the root mean square of the weights.

        0 if nothing is lost, None if all weights are zero.
        """
        if not self.squared_error:
            return 0.0
        return math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else None

    @property
    def cosine(self) -> Figure:
        """Cosine of the angle between the weights and the values read back, as vectors.

        1 if they are equal, 0 if either is all zeros.
        """
        if not self.squared_error:
            return 1.0
        lengths = math.sqrt(self.squared_weight) * math.sqrt(self.squared_read)
        return self.product / lengths if lengths else 0.0

    @property
    def saturated(self) -> float:
        """Share of the weights that lie half a step or more beyond the last code of their group."""
        return self.saturated_count / max(1, self.count)


def paired_values(one: Tensor, other: Tensor) -> Iterator[tuple[Array, Array]]:
    """Yield the values of two tensors of one `checkpoint_shape`, chunk by chunk, in the same order.

    Where one of them is transposed and the other is not, that is columns of the one and rows of the
    other.
    """
    if one.transposed is other.transposed:
        count = math.prod(one.shape)
        for start in range(0, count, CHUNK_WEIGHTS):
            size = min(CHUNK_WEIGHTS, count - start)
            yield stored_values(one, start, size), stored_values(other, start, size)
    elif one.transposed:
        yield from ((b, a) for a, b in paired_values(other, one))
    else:
        *lead, rows, cols = one.shape
        most = max(_WHOLE_GROUPS, CHUNK_WEIGHTS // max(cols, 1) // _WHOLE_GROUPS * _WHOLE_GROUPS)
        for matrix in range(math.prod(lead)):
            for row in range(0, rows, most):
                stop = min(row + most, rows)
                yield (
                    stored_values(one, (matrix * rows + row) * cols, (stop - row) * cols),
                    _columns(other, matrix, row, stop),
                )


def checkpoint_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of the checkpoint's tensor: the last two axes swapped if transposed."""
    shape = tensor.shape
    return (*shape[:-2], shape[-1], shape[-2]) if tensor.transposed else shape


def _columns(tensor: Tensor, matrix: int, begin: int, end: int) -> Array:
    """Return columns of one matrix of a quantized tensor, column by column, as flat float32."""
    stored = tensor.numpy()
    if not isinstance(stored, QuantizedArray):
        raise AssertionError(f"{tensor.name} is transposed and not quantized")  # noqa: TRY004  # stored.py checks it
    block = kernels.block_of(
        kernels.matrix_of(stored, matrix), slice(0, tensor.shape[-2]), slice(begin, end)
    )
    return kernels.dequantize(block).T.reshape(-1)


def stored_values(tensor: Tensor, start: int, count: int) -> Array:
    """Return ``count`` values of a tensor from index ``start`` on, flat.

    Of a quantized one whole groups, as float32.
    """
    return values_of(run_of(tensor.numpy(), start, count))


def errors_between(
    before: Array, after: StoredArray, check: Callable[[Array, Array, Array], None]
) -> Errors:
    """Return the errors of flat values, without those that are infinite or NaN on a side.

    ``check`` is called with the float64 values of both sides, if some are, and with where these are
    not the same on both.
    """
    errors = Errors.between(before, after)
    if errors.are_finite:
        return errors
    one, other = as_float64(before), as_float64(after)
    odd = ~(np.isfinite(one) & np.isfinite(other))
    if not odd.any():
        return errors  # float64 holds the values, and not their sums
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    check(one, other, odd & ~same)
    one[odd] = other[odd] = 0
    return Errors.between(one, other)


def as_float64(stored: StoredArray) -> Array:
    """Return the values as a new float64 array."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a value here, not an accident
        return values_of(stored).astype(np.float64)


_CHUNK = 2**22
# Dtypes whose values can't be subtracted as floats here.
_NO_NUMBERS = frozenset({DType.C64, DType.F4, DType.F6_E2M3, DType.F6_E3M2})


@dataclass(frozen=True, slots=True)
class TensorFact:
    """A tensor of one of the models: its type in words, shape before packing and stored bytes."""

    KEYS = ("name", "type=type_name", "shape", "bytes=nbytes")

    name: str
    type_name: str
    shape: tuple[int, ...]
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> TensorFact:
        return cls(tensor.name, tensor.type_text, tensor.shape, tensor.nbytes)


@dataclass(frozen=True, slots=True)
class ValueErrors(Errors):
    """How far a tensor's values in one model are from those in the other.

    Values that are infinite or NaN and not so in both are not among the errors.
    """

    KEYS = ("weights=count", "rmse", "relative_rmse", "max_error", "cosine", "odd_values")

    odd_values: Annotated[int, "values that are infinite or NaN on one side only"] = 0


@dataclass(frozen=True, slots=True)
class ChangedTensor:
    """A tensor that is not the same in both models.

    ``errors``: of the values after against those before, where they were asked for and can be
    compared: both of one shape, and of numbers.
    """

    KEYS = ("name=before.name", "before", "after", "error=errors")

    before: TensorFact
    after: TensorFact
    errors: Annotated[ValueErrors | None, "with --error"] = None


@dataclass(frozen=True, slots=True)
class DocumentDiff:
    """Layers other than tensors that differ, by file name or kind, sorted."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sides:
    """A number for each of two models."""

    a: int
    b: int


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """How model b differs from a: tensors by name, sorted, and everything else.

    ``equal`` tensors are the same, bit for bit. ``shared_bytes`` are those of blobs that both have,
    ``nbytes`` all of each.
    """

    KEYS = (
        "a",
        "b",
        "added",
        "removed",
        "changed",
        "equal",
        "documents",
        "shared_bytes",
        "bytes=sides",
    )

    a: ModelName
    b: ModelName
    added: tuple[TensorFact, ...]
    removed: tuple[TensorFact, ...]
    changed: tuple[ChangedTensor, ...]
    equal: Annotated[int, "tensors"]
    documents: DocumentDiff
    shared_bytes: int
    nbytes: tuple[int, int]

    @property
    def sides(self) -> Sides:
        """Bytes of all blobs of each."""
        return Sides(*self.nbytes)


def diff_models(
    a: str | ModelName,
    b: str | ModelName,
    *,
    store: Readable | StorePlace = None,
    error: bool = False,
    jobs: int | None = None,
) -> ModelDiff:
    """Return how the stored model ``b`` differs from ``a``.

    With ``error`` also how far the values of changed tensors are.

    Values are compared in float64, in chunks, by ``jobs`` threads (None: one per core), so memory
    does not grow with the model. A model without tensor blobs (GGUF) is compared by its blobs.

    Raises: as `open_model`; UsageError for jobs under 1.
    """
    store = opened_store(store)
    workers = threads(jobs)
    with ExitStack() as stack:
        before, after = (_open_model(name, store, stack) for name in (a, b))
        common = [
            (before.tensors[name], after.tensors[name])
            for name in sorted(before.tensors.keys() & after.tensors.keys())
        ]
        compared = results_of(
            common, lambda pair: _compare(*pair, error=error), workers, name="diff"
        )
        old, new = before.documents, after.documents
        return ModelDiff(
            a=before.name,
            b=after.name,
            added=_only(after, before),
            removed=_only(before, after),
            changed=tuple(change for change in compared if change is not None),
            equal=compared.count(None),
            documents=DocumentDiff(
                added=tuple(sorted(new.keys() - old.keys())),
                removed=tuple(sorted(old.keys() - new.keys())),
                changed=tuple(
                    sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
                ),
            ),
            shared_bytes=sum(
                before.sizes[digest] for digest in before.sizes.keys() & after.sizes.keys()
            ),
            nbytes=(sum(before.sizes.values()), sum(after.sizes.values())),
        )


@dataclass(frozen=True, slots=True)
class _Opened:
    """A model: tensors by name, digests of documents by name or kind, sizes of blobs by digest."""

    name: ModelName
    tensors: Mapping[str, Tensor]
    documents: Mapping[str, Digest]
    sizes: Mapping[Digest, int]


def _open_model(name: str | ModelName, store: Readable, stack: ExitStack) -> _Opened:
    full = store.find(name)
    manifest = store.manifests.read(full)
    tensors: Mapping[str, Tensor] = {}
    if manifest.tensor_layers:
        model = stack.enter_context(open_model(full, store=store))
        manifest, tensors = model.manifest, model
    return _Opened(
        full,
        tensors,
        dict(_documents(manifest, store)),
        {blob.digest: blob.size for blob in manifest.descriptors},
    )


def _documents(manifest: Manifest, store: Readable) -> Iterator[tuple[str, Digest]]:
    kinds: Counter[str] = Counter()
    for layer in manifest.layers:
        if layer.media_type != TENSOR_MEDIA_TYPE:
            kind = layer.media_type.rpartition(".")[2]
            kinds[kind] += 1
            yield (
                layer.name or (kind if kinds[kind] == 1 else f"{kind} {kinds[kind]}"),
                layer.digest,
            )
    if manifest.config is not None:
        # Newer Ollamas add a newline at its end: ollama/ollama PR 14969 @ca0b86d3
        # x/create/manifest.go, where json.Encoder writes what json.Marshal wrote before.
        yield "(config)", Digest.of(store.blobs.read(manifest.config).removesuffix(b"\n"))


def _only(one: _Opened, other: _Opened) -> tuple[TensorFact, ...]:
    return tuple(
        TensorFact.of(one.tensors[name])
        for name in sorted(one.tensors.keys() - other.tensors.keys())
    )


def _compare(before: Tensor, after: Tensor, *, error: bool) -> ChangedTensor | None:
    facts = TensorFact.of(before), TensorFact.of(after)
    if before.blob == after.blob or (
        facts[0] == facts[1] and before.transposed is after.transposed and _is_same(before, after)
    ):
        return None
    is_comparable = (
        checkpoint_shape(before) == checkpoint_shape(after)
        and not {before.dtype, after.dtype} & _NO_NUMBERS
    )
    if not error or not is_comparable:
        return ChangedTensor(*facts)
    errors, odd = Errors(), [0]

    def count(_before: Array, _after: Array, changed: Array) -> None:
        odd[0] += int(np.count_nonzero(changed))

    for pair in paired_values(before, after):
        errors += errors_between(*pair, count)
    return ChangedTensor(*facts, ValueErrors(**asdict(errors), odd_values=odd[0]))


def _is_same(before: Tensor, after: Tensor) -> bool:
    pairs = [(np.frombuffer(before.raw(), np.uint8), np.frombuffer(after.raw(), np.uint8))]
    if before.quant_type is not None:
        parts = (parts_of(tensor.numpy()).values() for tensor in (before, after))
        pairs = list(zip(*parts, strict=True))
    for part, other_part in pairs:
        if part.dtype != other_part.dtype:  # scales of the same bits may be BF16 and F16
            return False
        one, other = part.reshape(-1).view(np.uint8), other_part.reshape(-1).view(np.uint8)
        for start in range(0, one.size, _CHUNK):
            if not np.array_equal(one[start : start + _CHUNK], other[start : start + _CHUNK]):
                return False
    return True
