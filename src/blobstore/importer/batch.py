"""Batches: a list of models to import, one after the other, by one worker or by many.

Rule P4: a TOML document (or JSON, if its name ends in .json) of at most 1 MiB and 10,000 models.
Each ``[[model]]`` has ``source`` and ``name``, and the options of an import under their Python
names. No two models have one name.

The plan of each model is in ``FILE.plans/``, under a hash of its entry in the list, with its
receipts. The worker that comes first makes it. The worker that finds all tasks done commits the
model. So a batch that was stopped goes on where it was, and a model whose options are changed is
made anew. An error of one model is reported, and the others go on.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_type_hints

from blobstore.errors import BlobStoreError, DocumentError, UnfinishedPlanError
from blobstore.formats import strictjson
from blobstore.formats.strictjson import (
    Between,
    Document,
    InvalidError,
    Key,
    check_of,
    checked_at,
)
from blobstore.importer.arguments import ImportArguments
from blobstore.importer.planfile import VERSION, plan_bytes, write_plan
from blobstore.importer.rules import read_settings
from blobstore.importer.run import check_tag, plan_import
from blobstore.importer.worker import SharedPlan, check_shard, commit_shared, do_tasks, shard_of
from blobstore.importer.writing import Means
from blobstore.io.durable import make_folder, os_errors
from blobstore.io.workers import Progress, no_progress
from blobstore.names import Digest, ModelName
from blobstore.source.addresses import OpenSource, open_folder, without_secrets
from blobstore.store.places import StorePlace, opened_store
from blobstore.store.ports import Home

RULE = "P4"


_KINDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    Sequence[str]: "a list of texts",
}


@dataclass(frozen=True, slots=True)
class BatchModel(Document):
    """A model of a list: its source, its name, and the options of its import."""

    source: str
    name: str
    options: Annotated[Mapping[str, Any], Key(None)]

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        fields = super(BatchModel, cls).fields_of(value)
        hints = get_type_hints(ImportArguments)
        options = {key: one for key, one in value.items() if key not in fields}
        for key, one in options.items():
            _check_known(key, {*fields, *hints})
            checked_at(key, partial(_check_option, hints[key]), one)
        try:
            ModelName.parse(fields["name"])
        except BlobStoreError as error:
            raise InvalidError(error.message, "name") from None
        return {**fields, "options": options}

    @property
    def model_name(self) -> ModelName:
        return ModelName.parse(self.name)

    @property
    def key(self) -> str:
        document = {
            "plan": VERSION,
            "source": self.source,
            "name": str(self.model_name),
            "options": dict(self.options),
        }
        return hashlib.sha256(strictjson.encode(document)).hexdigest()


@dataclass(frozen=True, slots=True)
class _Batch(Document):
    model: Annotated[list[BatchModel], Between(0, 10_000)]

    @classmethod
    def fields_of(cls, value: dict[str, Any]) -> dict[str, Any]:
        for key in value:
            _check_known(key, {"model"})
        fields = super(_Batch, cls).fields_of(value)
        seen: set[tuple[str, ...]] = set()
        for number, model in enumerate(fields["model"]):
            if model.model_name.folded in seen:
                raise InvalidError(
                    f"two models have the name {model.model_name}", "model", number, "name"
                )
            seen.add(model.model_name.folded)
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchResult:
    """The outcome of one model of a list. ``source`` is without signatures and passwords.

    ``error``: why it failed.
    """

    KEYS = ("name", "source", "state", "made", "digest", "waits_for", "error")

    name: ModelName
    source: str
    made: Annotated[int, "tasks that were done now"] = 0
    digest: Annotated[Digest | None, "of the manifest, if the model was published"] = None
    waits_for: Annotated[int, "tasks left to other workers"] = 0
    error: str | None = None

    @property
    def state(self) -> Literal["imported", "waiting", "failed"]:
        """Whether it is imported, waits for other workers, or has failed."""
        if self.error is not None:
            return "failed"
        return "imported" if self.digest is not None else "waiting"


@dataclass(frozen=True, slots=True)
class Batch:
    """What a worker did of a list of models."""

    KEYS = ("imported", "waiting", "failed", "models")

    models: list[BatchResult]

    @property
    def imported(self) -> int:
        return self._number("imported")

    @property
    def waiting(self) -> int:
        return self._number("waiting")

    @property
    def failed(self) -> int:
        return self._number("failed")

    def _number(self, state: str) -> int:
        return sum(model.state == state for model in self.models)


def read_batch(path: str | os.PathLike[str]) -> tuple[BatchModel, ...]:
    """Return the models of a list. Raises: DocumentError (rule P4); NotFoundError; StorageError."""
    value, name = read_settings(path, RULE), os.fspath(path)
    try:
        return tuple(_Batch.from_json(value).model)
    except InvalidError as error:
        raise DocumentError(f"{name}: {error} (rule {RULE})", rule=RULE, path=name) from None


def _check_known(key: str, known: set[str]) -> None:
    if key not in known:
        near = get_close_matches(key, sorted(known), 1)
        raise InvalidError(f"unknown key{f'; did you mean {near[0]}?' if near else ''}", key)


def _check_option(hint: Any, value: Any) -> None:
    kinds = set(get_args(hint)) if isinstance(hint, UnionType) else {hint}
    if isinstance(value, list) and Sequence[str] in kinds:
        check_of(list[str])(value)
        return
    is_number = type(value) in (int, float) and float in kinds and math.isfinite(value)
    if not is_number and (type(value) not in kinds or type(value) is float):
        known = [words for kind, words in _KINDS.items() if kind in kinds]
        raise InvalidError(f"Input should be {' or '.join(known)}")


def work_on_batch(
    path: str | os.PathLike[str],
    *,
    shard: tuple[int, int] = (0, 1),
    store: Home | StorePlace = None,
    open_source: OpenSource = open_folder,
    jobs: int | None = None,
    memory: int | None = None,
    verify_reuse: bool = False,
    progress: Progress | None = None,
) -> list[BatchResult]:
    """Do the tasks of one shard of each model of a list, and publish models whose tasks are done.

    Shards differ from model to model, so that one worker does not get all the small models. A
    relative ``source`` is one below the current folder. Raises: as `read_batch`; UsageError for a
    shard that does not exist; StorageError if plans can't be written.
    """
    store = opened_store(store)
    check_shard(*shard)
    models = read_batch(path)
    folder = Path(f"{os.fspath(path)}.plans")
    with os_errors("write", folder):
        make_folder(folder, durable=False)
    index, count = shard

    def outcome(number: int, model: BatchModel, made: int | None = None) -> BatchResult:
        """Do the shard's tasks, if ``made`` does not say how many were done, and publish."""
        result = BatchResult(
            name=model.model_name, source=without_secrets(model.source), made=made or 0
        )
        try:
            shared = _make_plan(model, folder, open_source)
            if made is None:
                tasks = shard_of(shared.tasks, (index + number) % count, count)
                means = Means(jobs, memory, progress or no_progress, verify=verify_reuse)
                result = replace(result, made=len(do_tasks(shared, tasks, store, means)))
            return replace(result, digest=commit_shared(shared, result.name, store=store).digest)
        except UnfinishedPlanError as error:
            return replace(result, waits_for=len(error.tasks))
        except BlobStoreError as error:
            return replace(result, error=error.message)

    results = [outcome(number, model) for number, model in enumerate(models)]
    return [
        outcome(number, models[number], result.made) if result.waits_for else result
        for number, result in enumerate(results)
    ]


def _make_plan(model: BatchModel, folder: Path, open_source: OpenSource) -> SharedPlan:
    path = folder / f"{model.key[:32]}.json"
    if path.exists():
        return SharedPlan.read(path, open_source=open_source)
    plan = plan_import(model.source, open_source=open_source, **model.options)
    check_tag(plan, model.model_name)
    write_plan(plan, path)
    return SharedPlan(plan, str(path), Digest.of(plan_bytes(path)))
