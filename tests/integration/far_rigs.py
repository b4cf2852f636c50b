"""A checkpoint in shards on servers on loopback whose answers a test can change."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from integration.server_faults import versioned
from support.hub_stand_in import REPOSITORY, HubStandIn, RepositoryFile, Rules, repository_files
from support.servers import Answer, Asked, Script, Server, reply, server

from blobstore.formats.documents import OWN_DOCUMENT, Manifest
from blobstore.source.addresses import open_folder
from blobstore.source.folders import Folder

Change = Callable[[Answer], Answer]
KINDS = ("web", "hub")
Blobs = dict[str | None, tuple[str, int]]
"""Digest and size of each blob of a model, by its name."""


@dataclass
class FarRig:
    """Running servers of one checkpoint: `play` changes their answers, ``nbytes`` is its size.

    ``single_use``: a signed address is good for one request. ``refused`` counts the others.
    """

    address: str
    endpoint: str
    nbytes: int
    parts: list[tuple[Server, Answer]] = field(default_factory=list)
    single_use: bool = False
    refused: int = 0
    scripts: list[Script] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)
    _used: set[str] = field(default_factory=set)

    def play(self, change: Change = lambda answer: answer) -> None:
        """Change the correct answers of all servers; without a change they are correct again."""
        self.scripts = [running.play(change(answer)) for running, answer in self.parts]

    def signed(self, address: str) -> str:
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
        return open_folder(self.address, endpoint=self.endpoint, token=token)

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
            rig = FarRig(front.at("m"), front.at(""), nbytes, [(front, versioned(table))])
        else:
            rig = FarRig(f"hf://{REPOSITORY}", front.at("").rstrip("/"), nbytes)
            large = [file for file in files.values() if file.sha256 is not None]
            table = {f"objects/{file.sha256}": file.path.read_bytes() for file in large}

            def signer(file: RepositoryFile) -> str:
                return rig.signed(objects.at(f"objects/{file.sha256}"))

            answers = HubStandIn(files, signer, rules)
            rig.parts += [(front, answers), (objects, rig.checking(versioned(table)))]
        rig.play()
        yield rig


def blobs_of(manifest: Manifest) -> Blobs:
    """Return digest and size of each blob by its name, but for the document of the source."""
    blobs = {layer.name: (str(layer.digest), layer.size) for layer in manifest.descriptors}
    return {name: blob for name, blob in blobs.items() if name != OWN_DOCUMENT}
