"""Copies of manifests and the trash: what others do meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from blobstore.io.durable import make_folder
from blobstore.names import ModelName
from blobstore.store.local import backups
from blobstore.store.local.backups import ManifestCopies


def test_a_copy_is_written_although_its_folder_goes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal of a namespace's last model takes the folders that the copy's is made in."""
    calls = []

    def once_without_its_parent(path: Path, **options: Any) -> None:
        calls.append(path)
        if len(calls) == 1:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        make_folder(path, **options)

    monkeypatch.setattr(backups, "make_folder", once_without_its_parent)
    copies = ManifestCopies(tmp_path)
    assert copies.write(ModelName.parse("m"), b"{}")
    assert copies.of(ModelName.parse("m")) == [b"{}"]
    assert not copies.write(ModelName.parse("m"), b"{}")
