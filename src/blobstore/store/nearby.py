"""Nearby: which models a user may have meant by a name that is not in the store.

A few folders are listed, none of them through a symbolic link.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

from blobstore.errors import InvalidNameError
from blobstore.names import ModelName

_MOST_ENTRIES = 10_000
_MOST_MODELS = 3
_MOST_NAMES = 8


def hint_for(manifests: Path, name: ModelName) -> str:
    """Return the hint for a model that is not there: its other tags, else the tags of models with a similar name."""
    if tags := _names(manifests, name, name.model):
        return f"The store has {_some(tags)}."
    models = _similar(name.model, _entries(manifests, name.host, name.namespace, folders=True))
    if near := [found for model in models for found in _names(manifests, name, model)]:
        return f"Did you mean {_some(near)}?"
    return "blobstore list shows the models of the store."


def _names(manifests: Path, name: ModelName, model: str) -> list[str]:
    """Return what the store has of ``model`` in the host and namespace of ``name``, as a user names it."""
    found = []
    for tag in _entries(manifests, name.host, name.namespace, model, folders=False):
        try:
            found.append(str(replace(name, model=model, tag=tag)))
        except InvalidNameError:
            continue
    return sorted(found)


def _similar(model: str, others: list[str]) -> list[str]:
    from difflib import get_close_matches

    by_lower_case = {other.lower(): other for other in sorted(others)}
    return [by_lower_case[match] for match in get_close_matches(model.lower(), by_lower_case, _MOST_MODELS)]


def _entries(manifests: Path, *parts: str, folders: bool) -> list[str]:
    """Return the names of the folders, or of the files, in a folder: none when it can't be listed or lies behind a link."""
    paths = list(accumulate(parts, Path.joinpath, initial=manifests))
    try:
        if any(path.is_symlink() for path in paths[1:]):
            return []
        with os.scandir(paths[-1]) as entries:
            some = islice(entries, _MOST_ENTRIES)
            return [
                entry.name
                for entry in some
                if (entry.is_dir(follow_symlinks=False) if folders else entry.is_file(follow_symlinks=False))
            ]
    except OSError:
        return []


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
