"""The CUDA bindings of a simulated device: a module, because a folder without `__init__.py` loses to installed ones."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from fake_cuda import FakeCuda

__path__: list[str] = []
bindings = ModuleType("cuda.bindings")
bindings.__path__ = []
bindings.__spec__ = ModuleSpec("cuda.bindings", None, is_package=True)
bindings.runtime = FakeCuda()  # type: ignore[attr-defined]
sys.modules |= {"cuda.bindings": bindings, "cuda.bindings.runtime": bindings.runtime}  # type: ignore[attr-defined]
