"""What other programs quantized or saved, from servers: its blobs are those of a local import."""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from integration.cloud_services import CloudBucket
from safetensors.torch import load_file
from support import FIXTURES
from support.hub_stand_in import hub
from support.servers import files, server

from blobstore import import_model
from blobstore.source.addresses import open_folder
from blobstore.store.memory import MemoryStore

KINDS = {
    "AWQ": "producers/awq-g32",
    "GPTQ": "producers/gptq-4-g128",
    "compressed-tensors": "producers/compressed-tensors-int4-g128",
    "bitsandbytes": "producers/bitsandbytes-nf4-nested",
    "FP8": "producers/compressed-tensors-fp8-blocks",
    "GGUF": "gguf-models/llama.gguf",
    "adapter": "adapters/peft-patterns",
    "torch.save": "adapters/base-llama",
}
BASE = FIXTURES / "adapters" / "base-llama"


def write(kind: str, folder: Path) -> str:
    """Write a model, or an adapter of `BASE`, to a new folder; return the part of its address."""
    place = FIXTURES / KINDS[kind]
    if kind == "GGUF":
        folder.mkdir()
        shutil.copy(place, folder)
        return f"/{place.name}"
    shutil.copytree(place, folder, ignore=shutil.ignore_patterns("dequantized*", "merged*"))
    if kind == "torch.save":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    return ""


def digests(kind: str, address: str, **options: Any) -> list[str]:
    open_source: Any = partial(open_folder, **options)
    given: dict[str, Any] = {"source": open_source(address)}
    if kind == "adapter":
        given = {"source": BASE, "adapter": address, "open_source": open_source}
    if kind == "GGUF":
        given["config"] = FIXTURES / "pycode-5m"
    made = import_model(name="m", store=MemoryStore(), **given)
    return [str(layer.digest) for layer in made.manifest.tensor_layers]


@pytest.mark.parametrize("place", ["http", "hub"])
@pytest.mark.parametrize("kind", KINDS)
def test_from_a_server(kind: str, place: str, tmp_path: Path) -> None:
    part = write(kind, folder := tmp_path / "m")
    with server() as running:
        if place == "http":
            table = {f"m/{one.name}": one.read_bytes() for one in folder.iterdir()}
            running.play(files(table, 'ETag: "v1"'))
            part = "/pytorch_model.bin" if kind == "torch.save" else part  # nothing lists it
            got = digests(kind, running.at(f"m{part}"))
        else:
            running.play(hub(folder))
            got = digests(kind, f"hf://org/name{part}", endpoint=running.at("").rstrip("/"))
    assert got == digests(kind, f"{folder}{part}")


@pytest.mark.lab
def test_from_a_bucket(s3: CloudBucket, tmp_path: Path) -> None:
    for kind in KINDS:
        part = write(kind, folder := tmp_path / kind)
        s3.upload(folder, kind)
        got = digests(kind, f"{s3.address}/{kind}{part}", bucket_options=s3.options)
        assert got == digests(kind, f"{folder}{part}"), kind
