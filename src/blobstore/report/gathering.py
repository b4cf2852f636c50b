"""Gathering: everything that a report shows of a model, read from the store and the other side.

The other side is the model's source, or a stored model. Without one, the errors are those that the
store kept of the last `quality`, if there are any.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from blobstore.errors import UnsupportedSourceError
from blobstore.inspection.comparison import checkpoint_shape, stored_values
from blobstore.inspection.diff import ModelDiff, diff_models
from blobstore.inspection.distributions import (
    ValueDistribution,
    ValueReader,
    distribution_of,
    source_values,
)
from blobstore.inspection.listing import ModelDetails, ModelSummary, describe, summarize
from blobstore.inspection.quality import measure_quality, sources_of
from blobstore.io.workers import Progress
from blobstore.kernels.arrays import Array
from blobstore.model.loader import Model, open_model
from blobstore.model.tensors import Tensor
from blobstore.names import ModelName
from blobstore.plots.subjects import TensorError
from blobstore.source.addresses import Source, is_address
from blobstore.source.weights import SourceReaders
from blobstore.store.ports import Readable
from blobstore.store.stored import StoredTensor
from blobstore.views.records import kept_quality

MOST_DISTRIBUTIONS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFindings:
    """What there is to show of a model.

    ``errors``: of its tensors, None if they were not measured; ``basis``: against what, as the end
    of a sentence. ``difference``: from another model. ``distributions``: of a few tensors;
    ``undrawn``: why others have none.
    """

    summary: ModelSummary
    details: ModelDetails
    errors: tuple[TensorError, ...] | None
    basis: str | None
    difference: ModelDiff | None
    distributions: tuple[ValueDistribution, ...]
    undrawn: tuple[str, ...]


def gather(
    name: str | ModelName,
    *,
    store: Readable,
    against: Source | ModelName | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> ModelFindings:
    """Return what a report shows of a stored model.

    ``against``: its source, or a `ModelName` for a stored model. A packed model is unpacked, as
    `open_model` does it.

    Raises: as `open_model`, `measure_quality` and `diff_models`; DocumentError for a kept result
    that is damaged.
    """
    with open_model(name, store=store) as model:
        summary = summarize(store, model.name, model.manifest)
        details = describe(store, model.manifest, summary.tensors)
        errors, basis, difference = None, None, None
        if against is None:
            errors, basis = _kept(model, store)
        elif isinstance(against, ModelName):
            difference = diff_models(against, model.name, store=store, error=True, jobs=jobs)
            errors = tuple(map(TensorError.of_change, difference.changed))
            basis = f"the stored model {difference.a}"
        else:
            found = measure_quality(model.name, against, store=store, jobs=jobs, progress=progress)
            errors = tuple(map(TensorError.of, found.tensors))
            basis = f"the checkpoint {source_label(against)}"
        with _beside(model, against, store) as readers:
            chosen = _chosen(summary.tensors, errors or ())
            distributions, undrawn = _distributions(model, chosen, readers)
    return ModelFindings(
        summary=summary,
        details=details,
        errors=errors,
        basis=basis,
        difference=difference,
        distributions=distributions,
        undrawn=undrawn,
    )


def _kept(model: Model, store: Readable) -> tuple[tuple[TensorError, ...] | None, str | None]:
    kept = kept_quality(store, model.name, model.manifest.digest)
    if kept.result is None:
        return None, None
    when = "" if kept.measured is None else f", as measured on {kept.measured:%Y-%m-%d}"
    errors = tuple(map(TensorError.of_view, kept.result.tensors))
    return errors, f"the checkpoint {kept.against or 'that it was made from'}{when}"


def source_label(source: Source) -> str:
    """Return a source's name; paths of this machine, and the query of an address, stay on it."""
    name = os.fspath(source) if isinstance(source, str | os.PathLike) else source.name
    return name.partition("?")[0] if is_address(name) else Path(name).resolve().name


def _chosen(tensors: tuple[StoredTensor, ...], errors: tuple[TensorError, ...]) -> list[str]:
    """Return names of tensors: the one with the largest error, and the largest of each type."""
    measured = [one for one in errors if one.relative_rmse and not one.kept]
    measured.sort(key=lambda one: (-(one.relative_rmse or 0), one.name))
    chosen = [one.name for one in measured[:1]]
    types: dict[str, StoredTensor] = {}
    for tensor in sorted(tensors, key=lambda one: (-one.nbytes, one.name)):
        types.setdefault(tensor.type_name, tensor)
    chosen += [tensor.name for tensor in types.values()]
    return list(dict.fromkeys(chosen))[:MOST_DISTRIBUTIONS]


_Readers = Callable[[Tensor], ValueReader | None]


@contextmanager
def _beside(
    model: Model, against: Source | ModelName | None, store: Readable
) -> Iterator[_Readers]:
    """Yield what returns the reader of the values beside a tensor's; None without any."""
    if against is None:
        yield lambda _: None
    elif isinstance(against, ModelName):
        with open_model(against, store=store) as other:
            yield lambda tensor: _of_other(tensor, other)
    else:
        pairs = {tensor.name: made_from for tensor, made_from in sources_of(model, against)}
        readers = SourceReaders()
        try:
            yield (
                lambda tensor: (
                    source_values(pairs[tensor.name], readers) if tensor.name in pairs else None
                )
            )
        finally:
            readers.close()


def _of_other(tensor: Tensor, others: Mapping[str, Tensor]) -> ValueReader | None:
    other = others.get(tensor.name)
    if other is None or checkpoint_shape(other) != checkpoint_shape(tensor):
        return None
    if other.transposed is not tensor.transposed:
        return None  # a run of the one is not a run of the other

    def read(start: int, count: int) -> Array:
        return stored_values(other, start, count)

    return read


def _distributions(
    model: Model, names: list[str], readers: _Readers
) -> tuple[tuple[ValueDistribution, ...], tuple[str, ...]]:
    """Return the distributions of tensors, and why complex ones, F4 and F6 have none."""
    found, undrawn = [], []
    for name in names:
        tensor = model[name]
        try:
            found.append(distribution_of(tensor, readers(tensor)))
        except UnsupportedSourceError as error:
            undrawn.append(error.message)
    return tuple(found), tuple(undrawn)
