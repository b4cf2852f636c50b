"""Batches: a list of models to import, and their tasks in turn, by one worker or by many.

Rule P4: a TOML document (or JSON, if its name ends in .json) of at most 1 MiB and 10,000 models.
Each ``[[model]]`` has ``source`` and ``name``, and the options of an import under their Python
names. No two models have one name.

The plan of each model lies in ``FILE.plans/``, under a hash of its entry in the list, with its
receipts. The worker that comes first makes it. The worker that finds all tasks done commits the
model. So a batch that was stopped goes on where it was, and a model whose options are changed is
made anew. An error of one model is reported, and the others go on.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Final, get_args, get_type_hints

from blobstore.errors import (
    BlobStoreError,
    DocumentError,
    NotFoundError,
    UnfinishedPlanError,
)
from blobstore.formats import strictjson
from blobstore.formats.strictdocument import AtMost, InvalidError, check_of
from blobstore.importer.model_names import check_tag
from blobstore.importer.planning.document import write_plan
from blobstore.importer.policies.arguments import ImportArguments
from blobstore.importer.policies.rules import parse_settings
from blobstore.importer.run import plan_import
from blobstore.importer.work.publishing import commit_shared
from blobstore.importer.work.tasks import check_shard
from blobstore.importer.work.worker import SharedPlan, TaskWork
from blobstore.io.durable import make_folder, os_errors
from blobstore.io.ranges import FileReader
from blobstore.io.workers import Progress, silent
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, open_folder, without_secrets
from blobstore.store.ports import Home

RULE: Final = "P4"
_LARGEST = 2**20
_MOST_MODELS = 10_000
_AT_ONCE: Final = 8
"""Models whose tasks are done in turn: a small one need not wait for a huge one."""
_KINDS: Final = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Sequence[str]: "a list of texts",
}


@dataclass(frozen=True, slots=True)
class BatchModel:
    """A model of a list: its source, its name, and the options of its import."""

    source: str
    name: ModelName
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """A hash of all of it."""
        document = {"source": self.source, "name": str(self.name), "options": dict(self.options)}
        return hashlib.sha256(strictjson.encode(document)).hexdigest()

    @property
    def place(self) -> str:
        """The source without what may be a secret in its address: a query, a password."""
        return without_secrets(self.source)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The outcome of one model of a list. ``source`` is without signatures and passwords.

    ``digest`` is that of its manifest, if it was published. Otherwise ``error`` says why it failed,
    or ``waits_for`` how many tasks are left, which other workers do. ``made``: tasks done here.
    """

    name: ModelName
    source: str
    made: int = 0
    digest: Digest | None = None
    waits_for: int = 0
    error: str | None = None


def read_batch(path: str | os.PathLike[str]) -> tuple[BatchModel, ...]:
    """Return the models of a list. Raises: DocumentError (rule P4); NotFoundError; StorageError."""
    with FileReader(path) as reader:
        raw = reader.read(0, min(reader.size, _LARGEST + 1))
    name = os.fspath(path)
    strictjson.check_limit(name, len(raw), "bytes", _LARGEST, RULE)
    value = parse_settings(raw, name, RULE)
    try:
        return _models(value)
    except InvalidError as error:
        raise DocumentError(f"{name}: {error} (rule {RULE})", rule=RULE, path=name) from None


def _models(value: dict[str, Any]) -> tuple[BatchModel, ...]:
    if unknown := value.keys() - {"model"}:
        raise _unknown(min(unknown), {"model"})
    if not value:
        raise InvalidError("Field required", "model")
    try:
        given = check_of(Annotated[list[Any], AtMost(_MOST_MODELS)])(value["model"])
    except InvalidError as error:
        raise error.within("model") from None
    models = []
    for number, one in enumerate(given):
        try:
            models.append(_model(one))
        except InvalidError as error:
            raise error.within(number).within("model") from None
    _check_names(models)
    return tuple(models)


def _model(value: Any) -> BatchModel:
    if not isinstance(value, dict):
        raise InvalidError("Input should be a valid dictionary")
    hints = get_type_hints(ImportArguments)
    known = {"source", "name", *hints}
    if unknown := value.keys() - known:
        raise _unknown(min(unknown), known)
    texts = {}
    for key in ("source", "name"):
        if key not in value:
            raise InvalidError("Field required", key)
        try:
            texts[key] = check_of(str)(value[key])
        except InvalidError as error:
            raise error.within(key) from None
    options = {key: one for key, one in value.items() if key not in texts}
    for key, one in options.items():
        try:
            _check_option(one, hints[key])
        except InvalidError as error:
            raise error.within(key) from None
    try:
        return BatchModel(texts["source"], ModelName.parse(texts["name"]), options)
    except BlobStoreError as error:
        raise InvalidError(error.message, "name") from None


def _unknown(key: str, known: set[str]) -> InvalidError:
    near = get_close_matches(key, sorted(known), 1)
    return InvalidError(f"unknown key{f'; did you mean {near[0]}?' if near else ''}", key)


def _check_option(value: Any, hint: Any) -> None:
    """Raise InvalidError unless a value is of a type that the option's ``hint`` has."""
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    if isinstance(value, list) and Sequence[str] in kinds:
        check_of(list[str])(value)
        return
    is_number = type(value) in (int, float) and float in kinds and math.isfinite(value)
    if not is_number and (type(value) not in kinds or type(value) is float):
        known = [words for kind, words in _KINDS.items() if kind in kinds]
        raise InvalidError(f"Input should be {' or '.join(known)}")


def _check_names(models: Sequence[BatchModel]) -> None:
    seen: set[tuple[str, ...]] = set()
    for number, model in enumerate(models):
        if model.name.folded in seen:
            raise InvalidError(f"two models are called {model.name}", "model", number, "name")
        seen.add(model.name.folded)


def work_on_batch(
    path: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    store: Home,
    open_source: OpenSource = open_folder,
    jobs: int | None = None,
    memory: int | None = None,
    verify_reuse: bool = False,
    progress: Progress | None = None,
) -> list[BatchResult]:
    """Do the tasks of one shard of each model of a list, and publish models whose tasks are done.

    Models are worked on in turn, some tasks of each of up to 8 models. Shards differ from model to
    model, so that small models are not all one worker's. A relative ``source`` is one below the
    current folder. Raises: as `read_batch`; UsageError for a shard that does not exist;
    StorageError if plans can't be written.
    """
    check_shard(*shard)
    models = read_batch(path)
    folder = Path(f"{os.fspath(path)}.plans")
    with os_errors("write", folder):
        make_folder(folder, durable=False)
    worker = _BatchWorker(
        folder,
        shard,
        store,
        open_source,
        TaskWork(store, jobs, memory, verify_reuse=verify_reuse),
        progress or silent,
    )
    results = worker.work(models)
    return [worker.again(model, result) for model, result in zip(models, results, strict=True)]


@dataclass(frozen=True, slots=True)
class _BatchWorker:
    folder: Path
    shard: tuple[int, int]
    store: Home
    open_source: OpenSource
    worker: TaskWork
    progress: Progress

    def work(self, models: tuple[BatchModel, ...]) -> list[BatchResult]:
        """Return the outcome of each model."""
        results: dict[int, BatchResult] = {}
        waiting = deque(enumerate(models))
        active: deque[tuple[int, Iterator[BatchResult]]] = deque()
        while waiting or active:
            while waiting and len(active) < _AT_ONCE:
                number, model = waiting.popleft()
                active.append((number, self._steps(number, model)))
            number, steps = active.popleft()
            if (result := next(steps, None)) is not None:
                results[number] = result
                active.append((number, steps))
        return [results[number] for number in range(len(models))]

    def _steps(self, number: int, model: BatchModel) -> Iterator[BatchResult]:
        """Yield the state of a model after each portion of its tasks, and at its end."""
        result = BatchResult(name=model.name, source=model.place)
        try:
            shared = self._plan(model)
            index, count = self.shard
            for portion in self.worker.portions(
                shared.divided.shard((index + number) % count, count)
            ):
                made = self.worker.do(shared, portion, self.progress)
                result = replace(result, made=result.made + len(made))
                yield result
            yield self._committed(shared, model, result)
        except BlobStoreError as error:
            yield replace(result, error=error.message)

    def _plan(self, model: BatchModel) -> SharedPlan:
        """Return a model's plan, which is made if no worker has made it."""
        path = self.folder / f"{model.key[:32]}.json"
        try:
            return SharedPlan.read(path, open_source=self.open_source)
        except NotFoundError:
            if path.exists():
                raise  # a file of the source is missing
        plan = plan_import(model.source, open_source=self.open_source, **model.options)
        check_tag(plan, model.name)
        write_plan(plan, path)
        return SharedPlan.read(path, open_source=self.open_source)

    def _committed(self, shared: SharedPlan, model: BatchModel, result: BatchResult) -> BatchResult:
        shared.receipts.make()
        try:
            done = commit_shared(shared, model.name, store=self.store)
        except UnfinishedPlanError as error:
            return replace(result, waits_for=len(error.tasks))
        return replace(result, digest=done.digest, waits_for=0)

    def again(self, model: BatchModel, result: BatchResult) -> BatchResult:
        """Return the outcome of a model that waited, after all others."""
        if not result.waits_for:
            return result
        try:
            return self._committed(self._plan(model), model, result)
        except BlobStoreError as error:
            return replace(result, error=error.message)
