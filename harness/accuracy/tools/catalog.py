"""PTQ tools: the options of an experiment that each supports, and the interpreter or environment that runs it."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness.base.errors import UserError, install_hint, suggest_names
from harness.base.files import explain_write_errors
from harness.base.paths import cache_dir

#: Pinned packages that `pip` installs, by the name of the environment.
REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "quark": ("amd-quark==0.13", "torch==2.13.0", "onnxruntime==1.24.4", "onnx==1.21.0", "numpy==2.4.6"),
}
_COMPLETE_MARK = "complete.json"
"""File that is written last, so that an interrupted installation counts as missing."""


def environment_python(name: str) -> Path | None:
    """Return the path of an installed environment's interpreter, or None if it is not installed."""
    folder = _environment_folder(name)
    return folder / "bin" / "python" if (folder / _COMPLETE_MARK).exists() else None


def install_environment(name: str, index_url: str | None = None) -> Path:
    """Create a tool's environment with its pinned packages, and return the path of its interpreter.

    A complete environment is used as it is; one whose installation was interrupted is made again.

    Args:
        name: Name of the environment.
        index_url: Additional package index, such as that of PyTorch's builds without CUDA.

    Raises:
        UserError: There is no tool with such an environment, the folder is not writable, or pip fails.
    """
    if name not in REQUIREMENTS:
        raise UserError(f"no tool is called {name!r}; {suggest_names(name, REQUIREMENTS)}")
    if (known := environment_python(name)) is not None:
        return known
    folder = _environment_folder(name)
    with explain_write_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        python = folder / "bin" / "python"
        index = [] if index_url is None else ["--extra-index-url", index_url]
        done = subprocess.run([python, "-m", "pip", "install", "--quiet", *index, *REQUIREMENTS[name]], check=False)
        if done.returncode:
            raise UserError(f"{name}: pip ended with status {done.returncode}; its reason is above")
        facts = {"requirements": REQUIREMENTS[name], "python": sys.version.split()[0]}
        (folder / _COMPLETE_MARK).write_text(json.dumps(facts), encoding="utf-8")
    return python


def _environment_folder(name: str) -> Path:
    """Return the folder of an environment; its name changes with the pinned packages."""
    pins = hashlib.sha256(repr(REQUIREMENTS[name]).encode()).hexdigest()[:12]
    return cache_dir() / "tools" / f"{name}-{pins}"


_PROGRAMS = Path(__file__).with_name("programs")
_PTQ_CHILD = Path(__file__).parents[1] / "calibration" / "ptq_child.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class PtqTool:
    """PTQ tool: what it supports and how it runs.

    Attributes:
        modules: Import names of the required modules.
        precisions: Supported precisions.
        methods: Supported calibration methods, by the names of this project; one if the tool has only one.
        program: Program of the child process, which selects the function by the name of the tool.
        extra: Optional dependency group of the project that installs the tool.
        environment: Name of the tool's separate environment; "" if it runs in the current one.
        controls_accuracy: Whether the tool keeps a bound on a metric, so that it needs an evaluator and a bound.
    """

    modules: tuple[str, ...]
    precisions: tuple[str, ...] = ("int8",)
    methods: tuple[str, ...]
    program: Path = _PTQ_CHILD
    extra: str = "modelopt"
    environment: str = ""
    controls_accuracy: bool = False

    def nearest_method(self, method: str) -> str:
        """Return the method if the tool supports it, else the most similar supported one.

        It is "minmax" for "mean", and "entropy", which clips outliers, for all others.
        """
        if method in self.methods:
            return method
        return self.methods[0] if len(self.methods) == 1 else "minmax" if method == "mean" else "entropy"


_ORT_STATIC = PtqTool(modules=("onnxruntime",), methods=("minmax", "max", "entropy", "percentile"))
_NNCF = PtqTool(
    modules=("nncf", "openvino"), methods=("mean",), program=_PROGRAMS / "nncf_child.py", extra="nncf"
)  # fmt: skip
_QUARK = PtqTool(
    modules=("quark",), methods=("minmax",), program=_PROGRAMS / "quark_child.py", environment="quark"
)  # fmt: skip
TOOLS: Mapping[str, PtqTool] = {
    "modelopt_ptq": PtqTool(
        modules=("modelopt", "torch", "onnx_graphsurgeon"),
        precisions=("int8", "fp8"),
        methods=("minmax", "max", "entropy"),
    ),
    "ort_static": _ORT_STATIC,
    "ort_static_s8": _ORT_STATIC,
    "ort_dynamic": PtqTool(modules=("onnxruntime",), methods=("none",)),
    "nncf_ptq": _NNCF,
    "nncf_ptq_onnx": _NNCF,
    "nncf_accuracy_control": PtqTool(
        modules=_NNCF.modules, methods=_NNCF.methods, program=_NNCF.program, extra="nncf", controls_accuracy=True
    ),
    "quark_ptq": _QUARK,
    "quark_adaquant": _QUARK,
}  # fmt: skip


def unavailable_reason(name: str, precision: str) -> str:
    """Return why a tool cannot run on this machine or does not support a precision; "" if it can be used."""
    tool = TOOLS[name]
    if tool_python(tool) is None:
        return f"{tool.environment} not installed: qdq tools install {tool.environment}"
    if not tool.environment and (missing := [module for module in tool.modules if find_spec(module) is None]):
        return f"{', '.join(missing)} not installed: {install_hint(tool.extra)}"
    if precision not in tool.precisions:
        return f"quantizes to {' or '.join(tool.precisions)}, not to {precision}"
    return ""


def tool_python(tool: PtqTool) -> Path | None:
    """Return the path of the interpreter that runs a tool, or None if its environment is not installed."""
    return environment_python(tool.environment) if tool.environment else Path(sys.executable)


def method_substitute(name: str, method: str) -> str:
    """Return a remark on the method that a tool uses instead of one that it lacks; "" if it supports the method."""
    instead = TOOLS[name].nearest_method(method)
    if instead in (method, "none"):  # "none": the tool uses no calibration data
        return ""
    return f"{name} has no calibration method {method} and calibrates by {instead}"
