"""verify: every kind of damage is found, with its models and tensors; what is odd is not damage."""

import os
from pathlib import Path

import numpy as np
import pytest
from support.checkpoints import normal, safetensors_bytes, write_checkpoint
from support.stores import blob_path, commit_model, link_by_hand, manifest_path, stored_arrays

import blobstore
from blobstore.errors import UsageError
from blobstore.names import ModelName
from blobstore.store.care.verify import Sample, VerifyResult, verify
from blobstore.store.local.store import Store

A = safetensors_bytes({"a": np.arange(9.0)})
B = safetensors_bytes({"b": np.arange(8.0)})
MISMATCH = "its bytes do not match its digest"


@pytest.fixture
def model(store: Store, tmp_path: Path) -> Store:
    """A store with an imported model ``m``, quantized, and its copy ``n``."""
    blobstore.import_model(write_checkpoint(tmp_path / "s"), "m", store=store, quant="int4")
    store.copy("m", "n")
    return store


def only(result: VerifyResult) -> tuple[str, list[str], list[str]]:
    assert result.broken == ()
    (blob,) = result.damaged
    return blob.reason, [str(name) for name in blob.models], list(blob.tensors)


def test_a_bit_that_flipped(model: Store) -> None:
    sound = verify(model)
    sizes = [path.stat().st_size for path in model.blobs.path.iterdir()]
    assert (sound.is_sound, sound.odd) == (True, ())
    assert (sound.checked, sound.nbytes) == (len(sizes), sum(sizes))
    layers = {layer.name: layer for layer in model.manifest("m").layers}
    path = model.blobs.path / layers["lm_head.weight"].digest.file_name
    data = path.read_bytes()
    for at, is_quick in ((8, True), (len(data) - 1, False)):
        path.write_bytes(data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :])
        assert only(verify(model)) == (MISMATCH, ["m:latest", "n:latest"], ["lm_head.weight"])
        assert verify(model, quick=True).is_sound != is_quick
    for name in ("m", "n"):
        model.manifests.remove(ModelName.parse(name))
    assert only(verify(model)) == (MISMATCH, [], [])


def test_a_wrong_header_or_companions_under_the_right_digest(store: Store) -> None:
    arrays, metadata = stored_arrays("w", normal("w", 4, 128), "int4")
    del arrays["w.scale"]
    bad = safetensors_bytes(arrays, metadata)
    link_by_hand(store, "m", {"w": bad, "no header": b"nonsense" * 9})
    for quick in (False, True):
        reasons = sorted(blob.reason for blob in verify(store, quick=quick).damaged)
        assert len(reasons) == 2
        assert "header" in reasons[0]
        assert "scale" in reasons[1]


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"quant_type": "int4", "group_size": "64"}, "tensor 'w' of type int4/64: its scale is"),
        ({}, "the type of 'w' can't be inferred"),
    ],
)
def test_a_type_not_in_metadata_is_odd(store: Store, metadata: dict[str, str], reason: str) -> None:
    """As in fixtures/ollama-records: the head of d_mlx_mixed_4_8, and d_mlx_int4."""
    arrays, _ = stored_arrays("w", normal("w", 4, 128), "int8")
    content = safetensors_bytes(arrays, metadata)
    link_by_hand(store, "m", {"w": content})
    for names in ([], ["m"]):
        result = verify(store, names)
        assert result.is_sound
        (odd,) = result.odd
        assert odd.path == blob_path(store, content)
        assert reason in odd.reason
    odd.path.write_bytes(content[:-1] + b"\xff")
    assert only(verify(store))[0] == MISMATCH


def test_a_damaged_manifest(store: Store) -> None:
    raw = commit_model(store, "m", A).raw
    for changed, says in (
        (raw[:1], "not valid JSON"),
        (raw.replace(b"\n", b" "), "from what was written"),
    ):
        manifest_path(store, "m").write_bytes(changed)
        (broken,) = verify(store).broken
        assert str(broken.name) == "m:latest"
        assert says in broken.reason


def test_odd_files_are_shown_and_no_damage(store: Store, tmp_path: Path) -> None:
    commit_model(store, "m", A)
    blobs, manifests = store.root / "blobs", store.root / "manifests/registry.ollama.ai/library"
    pull = f"sha256-{'a' * 64}"
    odd: dict[Path, str] = {
        blobs: "every user may put files into it",
        blob_path(store, A): "every user may write to it",
        blobs / f"{pull}-partial-0": "a pull by Ollama",
        blobs / f"{pull}.tmp": "a pull by Ollama",
        blobs / f"sha256-{'A' * 64}": "its name is not a blob's",
        blobs / os.fsdecode(b"sha256-\xff"): "its name is not a blob's",
        blobs / "notes": "its name is not a blob's",
        blobs / "folder": "a folder",
        manifests / "m" / "deep" / "er": "5 levels deep",
        manifests / "shallow": "3 levels deep",
        manifests / "m" / "latest~": "may be a manifest",
        manifests / "m" / "link": "a symbolic link",
        store.root / "manifests-v2" / "x": "no blob is removed",
    }
    blobs.chmod(0o777)
    blob_path(store, A).chmod(0o666)
    (blobs / "folder").mkdir()
    (manifests / "m" / "link").symlink_to(tmp_path)
    for path in odd:
        path.parent.mkdir(exist_ok=True)
        if not path.exists():
            path.write_bytes(b"x")
    result = verify(store)
    assert result.is_sound
    found = {one.path: one.reason for one in result.odd}
    assert found.keys() == odd.keys()
    assert [path for path, reason in odd.items() if reason not in found[path]] == []
    assert verify(store, ["m"]).odd == ()


def test_the_parts_of_a_sample_are_all_blobs(model: Store) -> None:
    whole = verify(model).checked
    assert sum(verify(model, sample=Sample(number, 3)).checked for number in (1, 2, 3)) == whole
    next(model.blobs.path.iterdir()).write_bytes(b"damage")
    found = [verify(model, sample=Sample.parse(f"{number}/3")).is_sound for number in (1, 2, 3)]
    assert sorted(found) == [False, True, True]


def test_what_is_no_part() -> None:
    for text in ("", "0/3", "4/3", "1", "1/0", "-1/3", "1/3/3", "1.0/3", "¹/3"):
        with pytest.raises(UsageError):
            Sample.parse(text)


def test_what_is_removed_or_made_again_meanwhile_is_no_damage(store: Store) -> None:
    """What is found is looked at again when everything was checked."""
    commit_model(store, "m", A)
    commit_model(store, "n", B)
    blob_path(store, A).unlink()
    blob_path(store, B).write_bytes(b"damage")

    def meanwhile(_nbytes: int, _name: str) -> None:
        if store.manifests.has(ModelName.parse("m")):
            store.remove("m")
            commit_model(store, "n", B)

    assert verify(store, progress=meanwhile).is_sound
    assert [str(name) for name, _ in store.models()] == ["n:latest"]
