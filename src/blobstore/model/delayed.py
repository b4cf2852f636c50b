"""Delayed packages: the modules of a package without the package's own code.

Python runs the code of a package before any module of it. ``import mlx_lm`` imports transformers,
and PyTorch where that is installed: 1.9 seconds of a processor and 150 MB of memory, which the
modules of its networks (mlx_lm/models) do not need.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any


class _Delayed(ModuleType):
    """A package whose own code runs when a name is asked for that it does not have yet.

    `importlib.util.LazyLoader` would run it for ``__path__``, so for every module of the package.
    """

    def __getattr__(self, name: str) -> Any:
        self.__class__ = ModuleType  # type: ignore[assignment]  # its code asks for names too
        spec = self.__spec__
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module(self)
        return getattr(self, name)


def delay_package(name: str) -> None:
    """Let a package run its own code only when a name of it is asked for.

    Nothing happens if it is imported already, or missing. Only for a process of our own, before it
    has threads: another thread could see a package that is half imported.
    """
    spec = importlib.util.find_spec(name) if name not in sys.modules else None
    if spec is not None and spec.submodule_search_locations is not None:
        package = _Delayed(name)
        package.__spec__, package.__file__ = spec, spec.origin
        package.__loader__, package.__package__ = spec.loader, name
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[name] = package
