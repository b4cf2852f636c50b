"""A checkpoint in shards on servers on loopback whose answers a test can change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from blobstore.formats.documents import Manifest
from blobstore.formats.provenance import OWN_DOCUMENT
from blobstore.source.addresses import open_folder
from blobstore.source.folders import Folder
from support.checkpoints import normal, safetensors_bytes
from support.hub_stand_in import REPOSITORY, HubStandIn, RepositoryFile, Rules, repository_files
from support.server_faults import versioned
from support.servers import Answer, Asked, Script, Server, reply, server

Change = Callable[[Answer], Answer]
KINDS = ("web", "hub")
Blobs = dict[str | None, tuple[str, int]]
"""Digest and size of each blob of a model, by its name."""
_HIDDEN, _INNER, _EXPERTS, _VOCABULARY = 1024, 1024, 6, 1024
_CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": _HIDDEN,
    "moe_intermediate_size": _INNER,
    "num_experts": _EXPERTS,
    "num_hidden_layers": 1,
}


def write_far_checkpoint(folder: Path) -> Path:
    """Write a mixture of experts of 46 MB in two shards, every second expert in each."""
    folder.mkdir(parents=True)
    shapes = {
        "lm_head.weight": (_VOCABULARY, _HIDDEN),
        "model.embed_tokens.weight": (_VOCABULARY, _HIDDEN),
        "model.norm.weight": (_HIDDEN,),
        "model.layers.0.input_layernorm.weight": (_HIDDEN,),
        "model.layers.0.mlp.gate.weight": (_EXPERTS, _HIDDEN),
    }
    for expert in range(_EXPERTS):
        for name in ("down", "gate", "up"):
            shape = (_HIDDEN, _INNER)
            shapes[f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight"] = shape
    files: dict[str, str] = {}
    for number in (0, 1):
        file = f"model-{number + 1:05d}-of-00002.safetensors"
        names = [name for place, name in enumerate(sorted(shapes)) if place // 3 % 2 == number]
        tensors = {name: normal(name, *shapes[name]) for name in names}
        (folder / file).write_bytes(safetensors_bytes(tensors))
        files |= dict.fromkeys(names, file)
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    return folder


@dataclass
class FarRig:
    """Running servers of one checkpoint: `play` changes their answers, ``nbytes`` is its size.

    ``single_use``: a signed address is good for one request. ``refused`` counts the others.
    """

    address: str
    endpoint: str
    nbytes: int
    single_use: bool = False
    refused: int = 0
    _parts: list[tuple[Server, Answer]] = field(default_factory=list)
    _scripts: list[Script] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _used: set[str] = field(default_factory=set)

    def play(self, change: Change = lambda answer: answer) -> None:
        """Change the correct answers of all servers; without a change they are correct again."""
        self._scripts = [running.play(change(answer)) for running, answer in self._parts]

    def signed(self, address: str) -> str:
        """Return the address with a signature."""
        return f"{address}?signature={next(self._numbers)}"

    def checking(self, answer: Answer) -> Answer:
        """Return the answers of a server that refuses addresses that were used before."""

        def checked(asked: Asked) -> Iterable[bytes]:
            if self.single_use and asked.target in self._used:
                self.refused += 1
                return reply(403, body=b"expired")
            self._used.add(asked.target)
            return answer(asked)

        return checked

    def open(self, token: str | None = None) -> Folder:
        """Open the checkpoint."""
        return open_folder(self.address, endpoint=self.endpoint, token=token)

    @property
    def asked(self) -> list[list[Asked]]:
        """The requests since `play` to each server; the second one has the Hub's large files."""
        return [script.asked for script in self._scripts]

    @property
    def sent(self) -> int:
        """How many bytes were sent since `play`."""
        return sum(script.sent for script in self._scripts)

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which ``blobstore import`` finds the Hub here."""
        return os.environ | {"HF_ENDPOINT": self.endpoint}


@contextmanager
def far_rig(kind: str, folder: Path, rules: Rules | None = None) -> Iterator[FarRig]:
    """Run a plain web server, or the stand-in for the Hub and a server of its large files."""
    files = repository_files(folder)
    nbytes = sum(file.size for file in files.values())
    with server() as front, server() as objects:
        if kind == "web":
            table = {f"m/{name}": file.path.read_bytes() for name, file in files.items()}
            rig = FarRig(front.at("m"), front.at(""), nbytes, _parts=[(front, versioned(table))])
        else:
            rig = FarRig(f"hf://{REPOSITORY}", front.at("").rstrip("/"), nbytes)
            large = [file for file in files.values() if file.sha256 is not None]
            table = {f"objects/{file.sha256}": file.path.read_bytes() for file in large}

            def signer(file: RepositoryFile) -> str:
                return rig.signed(objects.at(f"objects/{file.sha256}"))

            answers = HubStandIn({REPOSITORY: files}, signer, rules or Rules())
            rig._parts += [(front, answers), (objects, rig.checking(versioned(table)))]
        rig.play()
        yield rig


def blobs_of(manifest: Manifest) -> Blobs:
    """Return digest and size of each blob by its name, but for the document of the source."""
    assert manifest.config is not None
    layers = (manifest.config, *manifest.layers)
    return {
        layer.name: (str(layer.digest), layer.size)
        for layer in layers
        if layer.name != OWN_DOCUMENT
    }
