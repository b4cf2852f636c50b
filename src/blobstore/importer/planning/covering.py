"""Covering: which files of a source a plan keeps, and what becomes of each of its tensors and files, counted. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from blobstore.coverage import DRAFT_MODEL, MTP_HEADS, Coverage, LeftOut, Tally
from blobstore.importer.planning.outputs import OutputTensor
from blobstore.importer.profiles import Profile
from blobstore.source.files import NOT_ITS_OWN, KeptFile, OtherFiles
from blobstore.source.inventory import Inventory
from blobstore.source.shards import INDEX_NAME
from blobstore.source.weights import Form

DRAFT_FOLDER = "draft/"
"""Where a draft model's documents and files lie beside a model's."""

_STACKED = "experts that were stacked"
_APPLIED = "scales and biases that were applied to their weights"
_ACTIVATIONS = "activation scales, which no stored form uses"
_UNREAD = "not part of any weight"
_INDEX = "an export makes it again"
_PROFILE = "the ollama profile stores only the JSON documents of the folder itself"
_TAKEN = f"the draft model's files are called {DRAFT_FOLDER}…"

_ACTIVATION_SCALE = re.compile(r".*(?P<suffix>\.input_(?:global_)?scale)", re.DOTALL)
_MTP = re.compile(r"(?:.*\.)?mtp\..+", re.DOTALL)
_LAYER = re.compile(
    r"(?:model\.|language_model\.model\.|model\.language_model\.)?layers\.(?P<number>[0-9]{1,9})\..+", re.DOTALL
)


def storable(inventory: Inventory, profile: Profile, *, has_draft: bool) -> Inventory:
    """Return the checkpoint with those files left out that the profile does not store, or whose names a draft's have."""

    def reason(file: KeptFile) -> str | None:
        if not profile.own_document:
            return _INDEX if file.name == INDEX_NAME else _PROFILE
        return _TAKEN if has_draft and file.name.startswith(DRAFT_FOLDER) else None

    reasons = {file.name: found for file in inventory.kept if (found := reason(file)) is not None}
    left_out = (*inventory.left_out, *(LeftOut(name, found) for name, found in reasons.items()))
    kept = tuple(file for file in inventory.kept if file.name not in reasons)
    return replace(inventory, other_files=OtherFiles(kept, tuple(sorted(left_out, key=lambda one: one.name))))


def coverage_of(
    inventory: Inventory, tensors: Iterable[OutputTensor], draft: Inventory | None, drafted: Iterable[OutputTensor]
) -> Coverage:
    """Return what output tensors and kept files hold of a checkpoint, and of its draft model."""
    own, of_draft = tuple(tensors), tuple(drafted)
    covered, files = _tensors(inventory, own), _files(inventory)
    heads = {MTP_HEADS: sum(map(_is_of_mtp(inventory), _source_names(own)))}
    whole = [file.name for file in inventory.kept if file.holds_weights]
    if draft is not None:
        covered += _tensors(draft, of_draft)
        files += _files(draft, DRAFT_FOLDER)
        heads[DRAFT_MODEL] = len(_source_names(of_draft))
        whole += [DRAFT_FOLDER + file.name for file in draft.kept if file.holds_weights]
    return Coverage(covered, files, {head: count for head, count in heads.items() if count}, tuple(whole))


def _files(inventory: Inventory, folder: str = "") -> Tally:
    stored = len(inventory.files) + len(inventory.documents) + len(inventory.kept)
    counted = sum(one.count for one in inventory.left_out if one.reason not in NOT_ITS_OWN)
    left_out = tuple(replace(one, name=folder + one.name) for one in inventory.left_out)
    return Tally(stored + counted, stored, {}, left_out)


def _tensors(inventory: Inventory, outputs: Iterable[OutputTensor]) -> Tally:
    """Return what became of each tensor: every one is counted exactly once."""
    derived: Counter[str] = Counter()
    found: set[str] = set()
    for output in outputs:
        for source in output.sources:
            applied = source.form is not Form.PLAIN and not output.copies_codes
            for suffix, part in source.parts.items():
                found.add(part.name)
                if suffix and applied:
                    derived[_APPLIED] += 1
                elif len(output.sources) > 1:
                    derived[_STACKED] += 1
    left_out = Counter(map(_named, inventory.tensors.keys() - found))
    return Tally(
        len(inventory.tensors),
        len(found) - derived.total(),
        dict(sorted(derived.items())),
        tuple(LeftOut(name, reason, count) for (name, reason), count in sorted(left_out.items())),
    )


def _named(tensor: str) -> tuple[str, str]:
    """Return how a tensor that is left out is named, and the reason: scales of activations all together."""
    match = _ACTIVATION_SCALE.fullmatch(tensor)
    return (f"*{match['suffix']}", _ACTIVATIONS) if match else (tensor, _UNREAD)


def _source_names(outputs: Iterable[OutputTensor]) -> list[str]:
    return [part.name for output in outputs for source in output.sources for part in source.parts.values()]


def _is_of_mtp(inventory: Inventory) -> Callable[[str], bool]:
    """Return what tells the tensors of heads that predict more than the next token.

    They are called ``mtp.…``, or are the layers beyond ``num_hidden_layers`` (DeepSeek-V3's README_WEIGHTS.md, GLM-4.5).
    """
    config = inventory.config
    said = (config.num_hidden_layers, (config.text_config or {}).get("num_hidden_layers")) if config is not None else ()
    layers = next((number for number in said if type(number) is int), None)

    def is_of_mtp(name: str) -> bool:
        if _MTP.fullmatch(name):
            return True
        match = _LAYER.fullmatch(name)
        return match is not None and layers is not None and int(match["number"]) >= layers

    return is_of_mtp
