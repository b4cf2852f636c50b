"""The installed mlx-lm: its package, and the classes of its networks.

``import mlx_lm`` imports transformers, and PyTorch where that is installed: 1.9 seconds of a
processor and 150 MB of memory. Its networks are modules without either (mlx_lm/models), but Python
runs the code of a package before any module of it, unless that is delayed (`delay_package`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from blobstore.errors import UsageError
from blobstore.model.on_mlx_lm import VERSION, module_for

_NAME = "mlx_lm"


def import_mlx_lm() -> Any:
    """Return mlx-lm's ``utils``. Raises: UsageError without the ``lm`` extra."""
    require_mlx_lm()
    from mlx_lm import utils

    return utils


def require_mlx_lm() -> None:
    """Raise UsageError without the ``lm`` extra. Nothing is imported."""
    if importlib.util.find_spec(_NAME) is None:
        raise UsageError(
            "mlx-lm is not installed", hint="Install the extra: pip install 'blobstore[lm]'."
        )


def network_classes(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return mlx-lm's classes of a config.json: that of the network, and that of its settings.

    Raises: UsageError without the ``lm`` extra; what mlx-lm raises, ValueError among it for an
    unknown type.
    """
    # Where its version is not that of our table, its own is asked.
    name = module_for(config) if importlib.metadata.version("mlx-lm") == VERSION else None
    if name is not None:
        module = importlib.import_module(f"{_NAME}.models.{name}")
        return module.Model, module.ModelArgs
    # load_model itself insists on files in a folder; its default is the table of architectures.
    options = signature(import_mlx_lm().load_model).parameters
    classes: tuple[Any, Any] = options["get_model_classes"].default(config)
    return classes


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
