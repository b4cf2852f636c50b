"""Plan: the files of an export, decided from a model's headers and documents. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blobstore.checkpoint import CONFIG_NAME, SourceConfig, parse_config
from blobstore.documents import JSON_MEDIA_TYPE, TENSOR_MEDIA_TYPE, validated
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export import texts
from blobstore.export.checkpoints import Checkpoint, plan_checkpoint
from blobstore.export.options import ExportOptions, Form
from blobstore.export.outputs import ExportPlan, PlannedDocument
from blobstore.export.stored_model import StoredModel
from blobstore.importer import DRAFT_PREFIX, OWN_DOCUMENT
from blobstore.origin import read_origins

_DRAFT_FOLDER = "draft/"


def make_plan(model: StoredModel, options: ExportOptions) -> ExportPlan:
    """Return the files that an export of ``model`` writes.

    Raises: NotFoundError or CorruptDataError for a missing or damaged document; DocumentError (config.json, blobstore.json);
    UnsupportedSourceError for two files of one name; as `plan_checkpoint`.
    """
    main, *drafts = _checkpoints(model)
    plan = plan_checkpoint(main, options)
    for draft in drafts:
        plan += _plan_draft(draft, options)
    has_draft = any(shard.path.startswith(_DRAFT_FOLDER) for shard in plan.shards)
    text, notes = texts.modelfile(list(_texts(model)), model.config, _architecture(main), draft=has_draft)
    plan += ExportPlan((), (PlannedDocument(texts.NAME, text),) if text is not None else (), tuple(notes))
    _check_paths(plan, model)
    return plan


def _checkpoints(model: StoredModel) -> list[Checkpoint]:
    """Return the model's checkpoint, and its draft's when there is one."""
    documents, config = model.documents(), model.config
    origin, draft_origin = read_origins(documents.pop(OWN_DOCUMENT, None))
    of_draft = {name: documents.pop(name) for name in list(documents) if name.startswith(_DRAFT_FOLDER)}
    name = str(model.name)
    if config.draft is None and not of_draft:
        return [Checkpoint(name, "", "", model.weights, documents, origin)]
    prefix = (config.draft.tensor_prefix if config.draft is not None else None) or DRAFT_PREFIX
    drafted = tuple(weight for weight in model.weights if weight.name.startswith(prefix))
    own = tuple(weight for weight in model.weights if not weight.name.startswith(prefix))
    in_folder = {name.removeprefix(_DRAFT_FOLDER): data for name, data in of_draft.items()}
    return [
        Checkpoint(name, "", "", own, documents, origin),
        Checkpoint(f"{name} (draft)", _DRAFT_FOLDER, prefix, drafted, in_folder, draft_origin),
    ]


def _plan_draft(draft: Checkpoint, options: ExportOptions) -> ExportPlan:
    try:
        return plan_checkpoint(draft, options)
    except UnsupportedSourceError as error:
        if options.form is not Form.MLX:
            raise
        # Ollama knows architectures of drafts that mlx-lm does not.
        return ExportPlan((), (), (f"the draft model was left out: {error}",))


def _architecture(checkpoint: Checkpoint) -> SourceConfig | None:
    if CONFIG_NAME not in checkpoint.documents:
        return None
    config = parse_config(checkpoint.documents[CONFIG_NAME])
    named: dict[str, object] = {key: config[key] for key in ("architectures", "model_type") if key in config}
    return validated(SourceConfig, named, CONFIG_NAME, "Q1")


def _texts(model: StoredModel) -> Iterator[texts.Layer]:
    """Yield what the manifest has beside tensors and documents; of layers of unknown types only that."""
    for layer in model.manifest.layers:
        is_document = layer.media_type == JSON_MEDIA_TYPE and layer.name is not None
        if layer.media_type != TENSOR_MEDIA_TYPE and not is_document:
            is_known = layer.media_type in texts.NAMES
            yield texts.Layer(layer.media_type, model.store.blobs.read(layer) if is_known else b"")


def _check_paths(plan: ExportPlan, model: StoredModel) -> None:
    """Raise UnsupportedSourceError when two files would have one path, or one would be the other's folder."""
    paths: Sequence[str] = [file.path for file in plan.files]
    taken: set[str] = set()
    for path in (*paths, *{path.rpartition("/")[0] for path in paths if "/" in path}):
        if path in taken:
            raise UnsupportedSourceError(f"two files of {model.name} would be called {quoted(path)}", model=str(model.name))
        taken.add(path)
