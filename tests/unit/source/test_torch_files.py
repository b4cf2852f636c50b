"""PyTorch's checkpoint files: tensors are read as those of safetensors, or refused by name."""

import json
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.arrays import bits
from support.checkpoints import LLAMA_CONFIG

from blobstore import Store, import_model, inspect
from blobstore.errors import BlobStoreError, UnsupportedSourceError, UsageError
from blobstore.source.addresses import Source
from blobstore.source.inventory import read_inventory
from blobstore.source.weights import SourceReaders

UP = "model.layers.0.mlp.up_proj.weight"
EMBEDDING, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, Any]


def tensors() -> Tensors:
    """Return tensors of several dtypes, of which some share a storage."""
    torch.manual_seed(0)
    embedding, stacked = torch.randn(32, 64).bfloat16(), torch.randn(3, 8, 64)
    return {
        EMBEDDING: embedding,
        OUTPUT: embedding,
        UP: torch.nn.Parameter(stacked[1]),
        "model.layers.0.mlp.gate_proj.weight": stacked[2].half(),
        "model.norm.weight": torch.ones(64),
        "model.codes": torch.randn(5, 7).to(torch.float8_e4m3fn),
        "model.mask": torch.tensor([True, False, True]),
        "model.step": torch.tensor(7),
        "model.empty": torch.empty(0, 4),
    }


def write(folder: Path, **said: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG | said))
    torch.save(tensors(), folder / "pytorch_model.bin")
    return folder


def write_shards(folder: Path) -> Path:
    (write(folder) / "pytorch_model.bin").unlink()
    places: dict[str, str] = {}
    named = list(tensors().items())
    for number, own in ((1, dict(named[:4])), (2, dict(named[4:]))):
        file = f"pytorch_model-0000{number}-of-00002.bin"
        torch.save(own, folder / file)
        places |= dict.fromkeys(own, file)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def check_values(source: Source, *left_out: str) -> None:
    """Compare the bytes of all tensors, except some, with those that were saved."""
    wanted = {name: one for name, one in tensors().items() if name not in left_out}
    assert read(source) == {
        name: (tuple(one.shape), bits(one.detach())) for name, one in wanted.items()
    }


def read(source: Source) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return each tensor's shape and bytes."""
    inventory, readers, found = read_inventory(source), SourceReaders(), {}
    for name, tensor in inventory.tensors.items():
        readers.readinto(tensor, 0, memoryview(data := bytearray(tensor.nbytes)))
        found[name] = (tensor.shape, bytes(data))
    readers.close()
    return found


@pytest.mark.parametrize("written", [write, write_shards])
def test_values_are_those_that_were_saved(written: Callable[[Path], Path], tmp_path: Path) -> None:
    """An output layer that is the embedding is left out, as in safetensors of transformers."""
    folder = written(tmp_path / "m")
    check_values(folder, OUTPUT)
    assert sum(tensor.nbytes for tensor in inspect(folder).tensors) > 0
    inventory = read_inventory(folder)
    assert [*inventory.documents] == ["config.json"]
    assert (inventory.kept, inventory.left_out) == ((), ())


def test_embeddings_that_config_json_does_not_tie(tmp_path: Path) -> None:
    check_values(write(tmp_path / "m", tie_word_embeddings=False))


def test_a_file(tmp_path: Path) -> None:
    for name in ("model.pt", "other.pth", "pytorch_model.bin"):
        torch.save(tensors(), tmp_path / name)
        check_values(tmp_path / name)


def test_blobs_are_those_of_safetensors(tmp_path: Path, store: Store) -> None:
    folder = write(tmp_path / "bin")
    one = import_model(folder, "a", store=store, quant="int8")
    held = {name: one.detach().clone() for name, one in tensors().items() if name != OUTPUT}
    save_file(held, folder / "model.safetensors")
    assert {file.name for file in read_inventory(folder).files} == {"model.safetensors"}
    other = import_model(folder, "b", store=store, quant="int8")
    assert other.created == 1
    assert other.manifest.layers[:-1] == one.manifest.layers[:-1]


def test_without_torch_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "m")
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError) as caught:
        read_inventory(folder)
    assert "torch" in (caught.value.hint or "").rpartition(" install ")[2]


def saved(**changed: Any) -> Callable[[Path], None]:
    return lambda path: torch.save({UP: torch.ones(4, 64), **changed}, path)


def rewritten(change: Callable[[dict[str, bytes]], Any], method: int = zipfile.ZIP_STORED) -> Any:
    def write_file(path: Path) -> None:
        torch.save({UP: torch.ones(4, 64), "b": torch.ones(7)}, path)
        with zipfile.ZipFile(path) as archive:
            records = {name: archive.read(name) for name in archive.namelist()}
        (top,) = {name.partition("/")[0] for name in records}
        records = {name.partition("/")[2]: raw for name, raw in records.items()}
        change(records)
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, raw in records.items():
                archive.writestr(f"{top}/{name}", raw)

    return write_file


def pickled(raw: bytes) -> Any:
    return rewritten(lambda records: records.update({"data.pkl": b"\x80\x02" + raw + b"."}))


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a pickle without an archive": (
        lambda path: torch.save({UP: torch.ones(4)}, path, _use_new_zipfile_serialization=False),
        "version 1.6",
    ),
    "text": (lambda path: path.write_text("version https://git-lfs"), "not a zip archive"),
    "a list": (lambda path: torch.save([torch.ones(4)], path), "a list"),
    "a tensor": (lambda path: torch.save(torch.ones(4), path), "a Tensor"),
    "training state": (saved(optimizer={"state": {}}), "'optimizer' is a dict"),
    "a number": (saved(epoch=3), "'epoch' is a int"),
    "a class": (saved(args=Path("x")), "pathlib"),
    "a name that is a number": (lambda path: torch.save({3: torch.ones(4)}, path), "'3' is not"),
    "transposed values": (saved(b=torch.ones(4, 64).T), "'b' has strides (1, 64)"),
    "every other value": (saved(b=torch.ones(8)[::2]), "'b' has strides (2,)"),
    "repeated values": (saved(b=torch.ones(1).expand(8)), "'b' has strides (0,)"),
    "negated": (saved(b=torch.ones(4, dtype=torch.complex64).conj().imag), "'b' has strides"),
    "complex of 128 bits": (saved(b=torch.ones(4, dtype=torch.complex128)), "'b' is torch."),
    "sparse values": (saved(b=torch.ones(4, 4).to_sparse()), "_rebuild_sparse_tensor"),
    "compressed records": (rewritten(lambda _: None, zipfile.ZIP_DEFLATED), "compressed records"),
    "big-endian values": (rewritten(lambda one: one.update(byteorder=b"big")), "big-endian"),
    "a missing storage": (rewritten(lambda one: one.pop("data/1")), "28 bytes by the pickle"),
    "a short storage": (rewritten(lambda one: one.update({"data/1": bytes(8)})), "28 bytes by"),
    "a long storage": (
        rewritten(lambda one: one.update({"data/0": bytes(2048)})),
        "and 2,048 in the",
    ),
    "no pickle": (rewritten(lambda one: one.pop("data.pkl")), "data.pkl"),
    "a pickle that ends early": (
        rewritten(lambda one: one.update({"data.pkl": one["data.pkl"][:80]})),
        "not enough data",
    ),
    "an array": (pickled(b"cbuiltins\nbytearray\n\x8a\x05\x00\x00\x00\x00\x10\x85R"), "bytearray"),
    "a call": (pickled(b"cos\nsystem\nX\x04\x00\x00\x00true\x85R"), "os system"),
    "a name that is not UTF-8": (pickled(b"}X\x03\x00\x00\x00\xed\xa0\x80K\x01s"), "ud800"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_else_is_refused(what: str, tmp_path: Path, store: Store) -> None:
    path = tmp_path / "pytorch_model.bin"
    written, reason = REFUSED[what]
    written(path)
    with pytest.raises(UnsupportedSourceError) as caught:
        import_model(tmp_path, "m", store=store)
    assert reason in str(caught.value)
    assert caught.value.path == str(path)
    assert "safetensors" in (caught.value.hint or "")
    assert not store.manifests.names()


def test_a_file_with_a_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    """Each fourth; tests/fuzz/producers.py compares others with what torch reads."""
    path = tmp_path / "pytorch_model.bin"
    torch.save({UP: torch.ones(2, 4), "b": torch.ones(3)}, path)
    raw = path.read_bytes()
    for place in range(0, len(raw), 4):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 0x41]) + raw[place + 1 :])
        with suppress(BlobStoreError):
            read(path)
