"""A torchvision that has every name, and nothing behind any.

SGLang and transformers import it for models that see; nothing here builds one.
"""

import enum
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.28.0"

# Looked up while transformers is imported.
_INTERPOLATIONS = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")


class _Nothing:
    def __init__(self, *_: object, **__: object) -> None:
        pass


class _Names(ModuleType):
    """Makes up a class for whatever it is asked for."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            made_up: object = enum.Enum(name, _INTERPOLATIONS)
        else:
            made_up = type(name, (_Nothing,), {})
        setattr(self, name, made_up)
        return made_up


class _Submodules(MetaPathFinder, Loader):
    """Finds every module below this package."""

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.startswith(f"{__name__}."):
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Names(spec.name)

    def exec_module(self, _module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Submodules())


def __getattr__(name: str) -> ModuleType:
    if name.startswith("__"):
        raise AttributeError(name)
    return importlib.import_module(f"{__name__}.{name}")
