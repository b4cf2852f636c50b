"""Random commands on one store: what one leaves behind, killed or not, is where the next begins."""

from __future__ import annotations

import random
from collections.abc import Collection
from pathlib import Path

from faults.lab.cases import Figures, Models, check_sound, is_between
from faults.lab.checker import look
from faults.lab.command import At, Done, Kill, run
from faults.lab.commands import PRUNE_ALL, model
from support.checkpoints import normal, write_checkpoint

import blobstore
from blobstore.store.local.store import open_store

_NAMES = tuple(f"{name}:latest" for name in "abcdef")
_TYPES = ("none", "int4", "int8", "mxfp4")
_SOURCES = 4
_LONGEST_S = 0.05
_CALLS = {"pack": 90, "unpack": 70, "rm": 20, "cp": 30, "mv": 35, "import": 80, "prune": 30}
"""About as many as a command of that kind makes, so that most kills come before its end."""
_LOADED_EVERY = 25


class Choices:
    """Sources that share most tensors, and random commands on a few names.

    ``sources``: a path, a type, and the digest of the manifest that its import makes.
    """

    def __init__(self, folder: Path, moments: random.Random) -> None:
        """Write the sources to ``folder``, and import each once elsewhere as the reference."""
        self._moments = moments
        self.sources: list[tuple[Path, str, str]] = []
        for number in range(_SOURCES):
            tensors = model(
                f"source {number}",
                **{"more.weight": normal(f"more {number}", 512, 256 * number + 64)},
            )
            source = write_checkpoint(folder / f"source{number}", tensors)
            for quant in _TYPES:
                wanted = None if quant == "none" else quant
                result = blobstore.import_model(
                    source, "m", store=open_store(folder / "elsewhere"), quant=wanted
                )
                self.sources.append((source, quant, result.digest.hex))

    def choose(
        self, models: Models, packed: Collection[str]
    ) -> tuple[list[object], dict[str, str]]:
        """Return a command for a store of these models, and the models that there are after it.

        A packed model gets no name that another has.
        """
        name, other = self._moments.sample(_NAMES, 2)
        kind = self._moments.random()
        after = dict(models)
        if kind < 0.2 and name in models:
            del after[name]
            return ["rm", name], after
        is_named = name in models and not (name in packed and other in models)
        if kind < 0.35 and is_named:
            return ["cp", name, other, "--force"], {**after, other: models[name]}
        if kind < 0.4 and is_named:
            return ["mv", name, other, "--force"], {
                key: value for key, value in after.items() if key != name
            } | {other: models[name]}
        if kind < 0.5 and models:  # else the store may not be there yet, which is an error
            return [*PRUNE_ALL], after
        if kind < 0.66 and name in models:
            return ["pack" if kind < 0.58 else "unpack", name], after
        source, quant, digest = self._moments.choice(self.sources)
        options = [] if quant == "none" else ["--quant", quant]
        jobs = self._moments.choice((1, 2, 4))
        return ["import", source, name, *options, "--jobs", jobs], {**after, name: digest}


class Wanderer:
    """A store on which random commands are killed."""

    def __init__(self, folder: Path, moments: random.Random) -> None:
        """Begin with an empty store in ``folder``."""
        self._choices = Choices(folder, moments)
        self._moments = moments
        self._root = folder / "store"
        self._folder = folder
        self._steps = 0
        self._models: Models = {}
        self._packed: Collection[str] = ()

    def step(self, figures: Figures) -> tuple[bool, int]:
        """Run and kill one command, and look.

        Return whether it was killed, and how many temporary folders it left.
        """
        arguments, end = self._choices.choose(self._models, self._packed)
        before = look(self._root).temporary
        done = self._killed(arguments)
        found = look(self._root)
        self._steps += 1
        at = f"step {self._steps}: {' '.join(map(str, arguments))}: {done.code} {done.err}"
        check_sound(found, figures, at)
        figures.expect(done.code in (0, -9), "re-runs failed", at)
        is_right = is_between(found.models, self._models, end, said=done.code == 0)
        figures.expect(is_right, "lost", f"{at} {self._models} -> {end}: {found.models}")
        figures.expect(len(found.half_written) <= 1, "left behind", f"{at} {found.half_written}")
        self._models, self._packed = found.models, found.packed
        if self._steps % _LOADED_EVERY == 0:
            self._load(figures, at)
            self._packed = ()  # opening a model unpacks it
        return done.code == -9, len(set(found.temporary) - set(before))

    def _killed(self, arguments: list[object]) -> Done:
        """Run a command; kill it at a random call or time, unless it ends before."""
        line = [*arguments, "--store", self._root]
        if self._moments.random() < 0.5:
            return run(*line, kill_after_s=self._moments.uniform(0, _LONGEST_S))
        fault = At(self._moments.randrange(1, _CALLS[str(arguments[0])]), Kill())
        return run(*line, within=[self._folder], decide=fault)

    def _load(self, figures: Figures, at: str) -> None:
        """Open every model with our own code, too."""
        store = open_store(self._root)
        for name in self._models:
            try:
                blobstore.open_model(name, store=store, verify=True).close()
            except blobstore.BlobStoreError as error:
                figures.wrong("lost", f"{at}: {name}: {error}")
