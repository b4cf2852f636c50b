"""verify: every kind of damage is found, with the models and tensors that it hits.

What is only odd is no damage.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, write_checkpoint
from support.stores import (
    blob_path,
    commit_model,
    layer_by_hand,
    link_by_hand,
    manifest_path,
    stored_arrays,
)

import blobstore
from blobstore.errors import NotFoundError, StorageError, UsageError
from blobstore.importer.repair import repair_model
from blobstore.names import ModelName
from blobstore.store.care.verify import Sample, VerifyResult, verify
from blobstore.store.local.store import Store

Change = Callable[[Path], object]
A = safetensors_bytes({"a": np.arange(9.0)})
B = safetensors_bytes({"b": np.arange(8.0)})
CONFIG = "application/vnd.docker.container.image.v1+json"


@pytest.fixture
def model(store: Store, tmp_path: Path) -> Store:
    """A store with an imported model ``m``, quantized, and its copy ``n``."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    store.copy(ModelName.parse("m"), ModelName.parse("n"))
    return store


def only(result: VerifyResult) -> tuple[str, list[str], list[str]]:
    """Return reason, models and tensors of the one damaged blob."""
    assert result.broken == ()
    (blob,) = result.damaged
    return blob.reason, [str(name) for name in blob.models], list(blob.tensors)


def test_a_sound_store(model: Store) -> None:
    result = verify(model)
    assert result.is_sound
    assert result.odd == ()
    sizes = [path.stat().st_size for path in (model.root / "blobs").iterdir()]
    assert (result.checked, result.nbytes) == (len(sizes), sum(sizes))


def test_an_empty_store_is_sound_and_an_absent_one_is_an_error(store: Store) -> None:
    with pytest.raises(NotFoundError, match="no store"):
        verify(store)
    assert not store.root.exists()
    store.root.mkdir()
    assert verify(store).is_sound


@pytest.mark.parametrize("at", [8, -1])
def test_a_bit_that_flipped(model: Store, at: int) -> None:
    layer = next(
        layer
        for layer in model.manifest(ModelName.parse("m")).layers
        if layer.name == "lm_head.weight"
    )
    path = model.blobs.path / layer.digest.file_name
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    reason, models, tensors = only(verify(model))
    assert (reason, models, tensors) == (
        "its bytes do not match its digest",
        ["m:latest", "n:latest"],
        ["lm_head.weight"],
    )
    assert verify(model, quick=True).is_sound == (at == -1)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Path.unlink, "missing"),
        (lambda path: path.chmod(0), "mode is 000|permission denied"),
    ],
)
def test_a_blob_that_is_not_what_it_should_be(store: Store, change: Change, says: str) -> None:
    """More kinds: store/local/test_corpus_store.py."""
    link_by_hand(store, "m", {"layer": A, "other": B})
    change(blob_path(store, A))
    for quick in (True, False):
        reason, models, tensors = only(verify(store, quick=quick))
        assert models == ["m:latest"]
        assert tensors in (["layer"], ["a"])  # in the manifest, where no header can be read
    assert re.search(says, reason)


def test_a_blob_of_another_size_than_a_manifest_says(store: Store) -> None:
    link_by_hand(store, "m", {"layer": A})
    path = manifest_path(store, "m")
    path.write_text(path.read_text().replace(f'"size": {len(A)}', f'"size": {len(A) + 1}'))
    for quick in (False, True):
        assert only(verify(store, quick=quick))[0] == f"it has {len(A)} bytes, not {len(A) + 1}"


def test_a_header_or_companions_that_are_wrong_although_the_bytes_are_the_digests(
    store: Store,
) -> None:
    arrays, metadata = stored_arrays("w", normal("w", 4, 128), "int4")
    del arrays["w.scale"]
    bad = safetensors_bytes(arrays, metadata)
    link_by_hand(store, "m", {"w": bad, "no header": b"nonsense" * 9})
    for quick in (False, True):
        reasons = sorted(blob.reason for blob in verify(store, quick=quick).damaged)
        assert len(reasons) == 2
        assert "its header would have" in reasons[0]
        assert "scale" in reasons[1]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"quant_type": "int4", "group_size": "64"}, "tensor 'w' of type int4/64: its scale is"),
        ({}, "the type of 'w' can't be inferred"),
    ],
)
def test_a_type_that_metadata_do_not_name_is_odd(
    store: Store, metadata: dict[str, str], reason: str
) -> None:
    """As in fixtures/ollama-records: the head of d_mlx_mixed_4_8, and d_mlx_int4."""
    arrays, _ = stored_arrays("w", normal("w", 4, 128), "int8")
    content = safetensors_bytes(arrays, metadata)
    link_by_hand(store, "m", {"w": content})
    for names in ([], ["m"]):
        result = verify(store, names)
        assert result.is_sound
        (odd,) = result.odd
        assert odd.path == blob_path(store, content)
        assert odd.reason.startswith(f"its bytes are whole, but {reason}")
    odd.path.write_bytes(content[:-1] + b"\xff")
    assert only(verify(store))[0] == "its bytes do not match its digest"


def test_documents_that_are_read_here_and_are_none(store: Store) -> None:
    config = layer_by_hand(store, "", b'{"model_format":1}') | {"mediaType": CONFIG}
    document = layer_by_hand(store, "config.json", b"[]") | {
        "mediaType": "application/vnd.ollama.image.json"
    }
    other = layer_by_hand(store, "other.json", b"NaN") | {
        "mediaType": "application/vnd.ollama.image.json"
    }
    path = manifest_path(store, "m")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": [document, other]}))
    for quick in (False, True):
        reasons = {blob.reason for blob in verify(store, quick=quick).damaged}
        assert len(reasons) == 2
        assert any("config.json is not a JSON object" in reason for reason in reasons)


def test_blobs_that_nobody_needs_are_checked_too(store: Store) -> None:
    link_by_hand(store, "m", {"layer": A})
    layer_by_hand(store, "", b"orphan")
    blob_path(store, b"orphan").write_bytes(b"damage")
    assert only(verify(store)) == ("its bytes do not match its digest", [], [])
    assert verify(store, ["m"]).is_sound


def test_a_manifest_that_can_not_be_read(store: Store) -> None:
    link_by_hand(store, "m", {"layer": A})
    manifest_path(store, "m").write_bytes(b"{")
    (broken,) = verify(store).broken
    assert str(broken.name) == "m:latest"
    assert "not valid JSON" in broken.reason


def test_a_manifest_that_is_valid_but_not_the_one_that_was_written(store: Store) -> None:
    commit_model(store, "m", A)
    path = manifest_path(store, "m")
    path.write_bytes(path.read_bytes().replace(b"\n", b" "))
    (broken,) = verify(store).broken
    assert "from what was written" in broken.reason


def test_a_manifest_that_another_program_replaced_is_no_damage(store: Store) -> None:
    commit_model(store, "m", A)
    link_by_hand(store, "m", {"layer": B})
    assert verify(store).is_sound


def test_odd_files_are_shown_and_no_damage(store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", A)
    blobs, manifests = store.root / "blobs", store.root / "manifests/registry.ollama.ai/library"
    for name in (
        f"sha256-{'a' * 64}-partial-0",
        f"sha256-{'a' * 64}.tmp",
        f"sha256-{'A' * 64}",
        os.fsdecode(b"sha256-\xff"),
        "notes",
    ):
        (blobs / name).write_bytes(b"x")
    (blobs / "folder").mkdir()
    (manifests / "m" / "deep").mkdir()
    for path in (
        manifests / "m" / "deep" / "er",
        manifests / "shallow",
        manifests / "m" / "latest~",
    ):
        path.write_bytes(b"x")
    (manifests / "m" / "link").symlink_to(tmp_path)
    (store.root / "manifests-v2").mkdir()
    (store.root / "manifests-v2" / "x").write_bytes(b"x")
    blobs.chmod(0o777)
    blob_path(store, A).chmod(0o666)
    result = verify(store)
    assert result.is_sound
    reasons = {os.fsencode(odd.path.name): odd.reason for odd in result.odd}
    assert len(reasons) == len(result.odd) == 13
    assert reasons[b"folder"] == "it is a folder"
    for end in (b"-partial-0", b".tmp"):
        part = b"sha256-" + b"a" * 64 + end
        assert reasons[part] == "a pull by Ollama, running or unfinished"
    assert reasons[b"sha256-\xff"] == reasons[b"notes"] == "its name is not a blob's"
    assert reasons[b"er"] == "it is 5 levels deep, and manifests are 4"
    assert reasons[b"link"] == "it is a symbolic link"
    assert "may be a manifest" in reasons[b"latest~"]
    assert "no blob is removed" in reasons[b"x"]
    assert reasons[b"blobs"] == "every user may put files into it"
    assert reasons[os.fsencode(blob_path(store, A).name)] == "every user may write to it"
    assert verify(store, ["m"]).odd == ()


def test_a_manifest_that_is_lost_is_shown_and_no_damage(model: Store, tmp_path: Path) -> None:
    model.remove(ModelName.parse("n"))
    manifest_path(model, "m").unlink()
    result = verify(model)
    (odd,) = result.odd
    assert (result.is_sound, odd.path.parts[-2:]) == (True, ("m", "latest"))
    assert "repair restores it" in odd.reason
    assert repair_model("m", tmp_path / "s", store=model).manifest_restored
    assert verify(model).odd == ()


def test_the_parts_of_a_sample_are_all_blobs(model: Store) -> None:
    whole = verify(model).checked
    assert sum(verify(model, sample=Sample(number, 3)).checked for number in (1, 2, 3)) == whole
    first = next((model.root / "blobs").iterdir())
    first.write_bytes(b"damage")
    found = [verify(model, sample=Sample.parse(f"{number}/3")).is_sound for number in (1, 2, 3)]
    assert sorted(found) == [False, True, True]


def test_what_is_no_part() -> None:
    for text in ("", "0/3", "4/3", "1", "1/", "1/0", "-1/3", "1/3/3", "1.0/3", "¹/3"):
        with pytest.raises(UsageError):
            Sample.parse(text)


def test_what_is_removed_or_made_again_meanwhile_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is found is looked at again when everything was checked."""
    from blobstore.store.care.checks import BlobChecks

    commit_model(store, "m", A)
    commit_model(store, "n", B)
    blob_path(store, A).unlink()
    blob_path(store, B).write_bytes(b"damage")
    real = BlobChecks.run

    def meanwhile(self: BlobChecks, *arguments: Any) -> None:
        real(self, *arguments)
        store.remove(ModelName.parse("m"))
        commit_model(store, "n", B)

    monkeypatch.setattr(BlobChecks, "run", meanwhile)
    assert verify(store).is_sound


def test_what_says_nothing_about_a_blob_is_no_damage(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = errno.EMFILE
    commit_model(store, "m", A, B)
    real = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if str(path) == str(blob_path(store, B)):
            raise OSError(code, os.strerror(code))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError) as caught:
        verify(store)
    assert caught.value.errno == code
