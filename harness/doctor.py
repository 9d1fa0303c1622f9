"""What this machine can run: each backend, or why not and the command that supplies it."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from harness.errors import CandidateError, UserError
from harness.measure.provenance import environment
from harness.registry import plugins

__all__ = ["examine"]

REMEDIES: Mapping[str, tuple[str, str]] = {
    "openvino": ("openvino", "pip install openvino"),
    "onnxruntime": ("onnxruntime", "pip install 'nvidia-modelopt[onnx]' (never onnxruntime beside it)"),
    "modelopt": ("modelopt", "pip install 'nvidia-modelopt[onnx]'"),
    "tensorrt": ("tensorrt", "pip install 'qdq-bench[tensorrt]' (needs an NVIDIA GPU)"),
    "cuda-python": ("cuda.bindings", "pip install 'qdq-bench[tensorrt]'"),
    "ray": ("ray", "pip install 'qdq-bench[ray]'"),
}
"""Name: module to look for, and what installs it."""


def examine() -> list[tuple[str, str, str]]:
    """Rows (what, state, detail) about runtimes, benchmarkers, data and the machine."""
    return [*_packages(), *_benchmarkers(), *_tools(), *_machine()]


def _packages() -> Iterator[tuple[str, str, str]]:
    for name, (module, remedy) in REMEDIES.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        yield (name, "ok" if found else "missing", "" if found else remedy)


def _benchmarkers() -> Iterator[tuple[str, str, str]]:
    for plugin in plugins("benchmarker"):
        try:
            facts = plugin.entry_point.load()().describe()
        except (ImportError, UserError, CandidateError, TypeError, ValueError, OSError) as error:
            yield (f"benchmarker {plugin.name}", "not usable", f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        shown = ", ".join(f"{key} {facts[key]}" for key in ("version", "device", "float_precision") if key in facts)
        yield (f"benchmarker {plugin.name}", "ok", shown)


def _tools() -> Iterator[tuple[str, str, str]]:
    trtexec = shutil.which("trtexec")
    yield ("trtexec", "ok" if trtexec else "missing", trtexec or "comes with TensorRT's archive, not with pip")
    assets = os.environ.get("QDQ_ASSETS", "")
    there = bool(assets) and os.path.isdir(assets)
    yield ("QDQ_ASSETS", "ok" if there else "not set", assets or "folder with models and images for assets: paths")


def _machine() -> Iterator[tuple[str, str, str]]:
    for key, value in _flat(environment()):
        yield (key, "", str(value))


def _flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in facts.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
