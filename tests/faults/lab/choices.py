"""Random commands on a few names, and the models that there are after each."""

import random
from collections.abc import Collection
from pathlib import Path

from faults.lab.cases import Models
from faults.lab.commands import PRUNE_ALL, model
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore.store.local.store import open_store

_NAMES = tuple(f"{name}:latest" for name in "abcdef")
_TYPES = (None, "int4", "mxfp4")
_SOURCES = 3
CALLS = {"rm": 20, "cp": 30, "mv": 35, "import": 80, "prune": 30}
"""About as many as a command of that kind makes, so that most kills come before its end."""


class Choices:
    """Sources that share most tensors; the arguments of their imports by manifest; commands."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        """Write the sources to ``folder``, and import each there as the reference."""
        self.chance = chance
        self.reference = open_store(folder / "reference")
        self.imports: dict[str, list[object]] = {}
        for number in range(_SOURCES):
            more = normal(f"more {number}", 512, 256 * number + 64)
            tensors = model(f"source {number}", **{"more.weight": more})
            source = write_checkpoint(folder / f"source{number}", tensors)
            for quant in _TYPES:
                result = blobstore.import_model(
                    source, f"{number}-{quant}", store=self.reference, quant=quant, jobs=1
                )
                options = [] if quant is None else ["--quant", quant]
                self.imports[result.digest.hex] = [source, *options, "--jobs", number + 1]

    def choose_import(self, name: str) -> tuple[list[object], str]:
        """Return an import, and the digest of the manifest that it makes."""
        digest, (source, *options) = self.chance.choice(list(self.imports.items()))
        return ["import", source, name, *options], digest

    def choose(
        self, models: Models, packed: Collection[str]
    ) -> tuple[list[object], dict[str, str]]:
        """Return a command for these models, and the models after it. Packed names stay unique."""
        name, other = self.chance.sample(_NAMES, 2)
        kind = self.chance.random()
        after = dict(models)
        if kind < 0.2 and name in models:
            del after[name]
            return ["rm", name], after
        if kind < 0.4 and name in models and not (name in packed and other in models):
            after[other] = models[name]
            if kind < 0.35:
                return ["cp", name, other, "--force"], after
            del after[name]
            return ["mv", name, other, "--force"], after
        if kind < 0.5 and models:  # else the store may not be there yet, which is an error
            return [*PRUNE_ALL], after
        if kind < 0.66 and name in models:
            return ["pack" if kind < 0.58 else "unpack", name], after
        line, after[name] = self.choose_import(name)
        return line, after
