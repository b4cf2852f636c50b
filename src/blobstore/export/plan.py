"""Plan: the files of an export, decided from a model's headers and documents. No weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from blobstore.checkpoint import CONFIG_NAME, SourceConfig, parse_config
from blobstore.documents import FILE_MEDIA_TYPE, JSON_MEDIA_TYPE, TENSOR_MEDIA_TYPE, validated
from blobstore.errors import UnsupportedSourceError, quoted
from blobstore.export import texts
from blobstore.export.checkpoints import Checkpoint, plan_checkpoint
from blobstore.export.files import with_files
from blobstore.export.options import ExportOptions, Form
from blobstore.export.origin import Origin, origins_of
from blobstore.export.outputs import ExportPlan, PlannedDocument
from blobstore.export.stored_model import StoredModel
from blobstore.importer import DRAFT_FOLDER, DRAFT_PREFIX
from blobstore.provenance import OWN_DOCUMENT, Provenance


def make_plan(model: StoredModel, options: ExportOptions) -> ExportPlan:
    """Return the files that an export of ``model`` writes.

    Raises: NotFoundError or CorruptDataError for a missing or damaged document; DocumentError (config.json, blobstore.json);
    UnsupportedSourceError for two files of one name; as `plan_checkpoint`.
    """
    documents = model.documents()
    own = documents.pop(OWN_DOCUMENT, None)
    provenance = Provenance.parse(own) if own is not None else None
    main, *drafts = _checkpoints(model, documents, provenance)
    plan = plan_checkpoint(main, options)
    for draft in drafts:
        plan += _plan_draft(draft, options)
    has_draft = any(shard.path.startswith(DRAFT_FOLDER) for shard in plan.shards)
    text, notes = texts.modelfile(list(_texts(model)), model.config, _architecture(main), draft=has_draft)
    plan += ExportPlan((), (PlannedDocument(texts.NAME, text),) if text is not None else (), tuple(notes))
    # A draft that is left out takes its files with it; without one the folder is like any other.
    files = [file for file in model.files() if has_draft or not drafts or not file.name.startswith(DRAFT_FOLDER)]
    is_cast = options.dequantize is not None or (provenance is not None and provenance.is_cast)
    plan = with_files(plan, files, [one.folder for one in (main, *drafts)], same_weights=not is_cast)
    _check_paths(plan, model)
    return plan


def _checkpoints(model: StoredModel, documents: dict[str, bytes], provenance: Provenance | None) -> list[Checkpoint]:
    """Return the model's checkpoint, and its draft's when there is one; its documents are taken out of ``documents``."""
    config = model.config
    origin, draft_origin = origins_of(provenance) if provenance is not None else (Origin(), Origin())
    of_draft = {name: documents.pop(name) for name in list(documents) if name.startswith(DRAFT_FOLDER)}
    name = str(model.name)
    if config.draft is None and not of_draft:
        return [Checkpoint(name, "", "", model.weights, documents, origin, config.file_type or "")]
    prefix = (config.draft.tensor_prefix if config.draft is not None else None) or DRAFT_PREFIX
    drafted = tuple(weight for weight in model.weights if weight.name.startswith(prefix))
    own = tuple(weight for weight in model.weights if not weight.name.startswith(prefix))
    in_folder = {name.removeprefix(DRAFT_FOLDER): data for name, data in of_draft.items()}
    return [
        Checkpoint(name, "", "", own, documents, origin, config.file_type or ""),
        Checkpoint(f"{name} (draft)", DRAFT_FOLDER, prefix, drafted, in_folder, draft_origin),
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
    """Yield what the manifest has beside tensors, documents and files; of layers of unknown types only that."""
    for layer in model.manifest.layers:
        is_file = layer.media_type in (JSON_MEDIA_TYPE, FILE_MEDIA_TYPE) and layer.name is not None
        if layer.media_type != TENSOR_MEDIA_TYPE and not is_file:
            is_known = layer.media_type in texts.NAMES
            yield texts.Layer(layer.media_type, model.store.blobs.read(layer) if is_known else b"")


def _check_paths(plan: ExportPlan, model: StoredModel) -> None:
    """Raise UnsupportedSourceError when two files would have one path, or one would be the other's folder."""
    paths: Sequence[str] = [file.path for file in plan.files]
    folders = {path[:end] for path in paths for end, letter in enumerate(path) if letter == "/"}
    taken: set[str] = set()
    for path in (*paths, *sorted(folders)):
        if path in taken:
            raise UnsupportedSourceError(f"two files of {model.name} would be called {quoted(path)}", model=str(model.name))
        taken.add(path)
