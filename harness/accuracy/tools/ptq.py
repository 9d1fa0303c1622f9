"""PTQ tools: the options of an experiment that each supports, and the interpreter or environment that runs it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from harness.base.errors import BuildFailed, UserError, install_hint, suggest_names
from harness.base.files import explain_write_errors
from harness.base.paths import cache_dir
from harness.config.sections import Calibration, PluginSpec
from harness.graph.io.files import copy_model, move_model
from harness.graph.plugin_operators import extract_plugin_subgraph
from harness.graph.rules.dialects import INT8_MAX_LEVEL, Dialect, load_dialect
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, StepLimits
from harness.workers.process import python_command, wait_for_output

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
_PTQ_CHILD = _PROGRAMS / "ptq_child.py"


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


logger = logging.getLogger(__name__)

_RUN_PROGRAM = (
    "sys.argv = sys.argv[1:]; sys.path.append(os.path.dirname(sys.argv[0])); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
_CHILD_BOOTSTRAP = (
    "import os, runpy; from harness.workers.process import die_with_parent; die_with_parent(); " + _RUN_PROGRAM
)
_PLAIN_BOOTSTRAP = (  # for interpreters without the harness; does what `die_with_parent` does
    "import fcntl, os, runpy, signal, sys; signal.signal(signal.SIGIO, signal.SIG_DFL); "
    "fcntl.fcntl(0, fcntl.F_SETOWN, -os.getpgrp()); "
    "fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC); " + _RUN_PROGRAM
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRequest:
    """Bound on a metric that a tool has to keep.

    Attributes:
        evaluator: Evaluator of the metric.
        max_drop: Largest loss: in the metric's unit, or as text in per cent of the float model's metric, for instance
            "1 %".
    """

    evaluator: PluginSpec
    max_drop: float | str


class PtqOptions(TypedDict, total=False):
    """Options that all tools take.

    Attributes:
        dialect_name: Name of the dialect of the runtime that the model is for.
        method: Calibration method, by default "minmax"; a tool may support only some (`PtqTool.methods`).
        percentile: Share of the values inside the range, in per cent, by default 99.99; for method "percentile".
        precision: Precision, by default "int8"; a tool may support only some (`PtqTool.precisions`).
        limit_s: Seconds after which the tool is ended, by default the general limit of steps. Not in the fingerprint.
    """

    dialect_name: Required[str]
    method: str
    percentile: float
    precision: str
    limit_s: float


def ptq_options(settings: Calibration, dialect: Dialect, precision: str) -> PtqOptions:
    """Return the options for PTQ tools that the settings of a calibration give."""
    return {
        "dialect_name": dialect.name,
        "method": settings.method,
        "percentile": settings.percentile,
        "precision": precision,
    }


def quantize(
    tool: str,
    model_path: Path,
    output_path: Path,
    batches: Iterable[Mapping[str, Array]],
    metric: MetricRequest | None = None,
    **options: Unpack[PtqOptions],
) -> float:
    """Quantize a model with a tool of `harness.accuracy.tools.ptq`.

    The Q/DQ pairs of ModelOpt are always in TensorRT's form: symmetric, with float biases.

    Args:
        tool: Name of the tool.
        model_path: Float model with unique node names and static shapes; its folder is not modified.
        output_path: Path of the ONNX file or, by its suffix, OpenVINO IR (.xml); written atomically.
        batches: Calibration data, input arrays by name; iterated over once.
        metric: Evaluator and bound for tools that keep one.
        **options: Options of the tool.

    Returns:
        Seconds that the tool took.

    Raises:
        BuildFailed: The tool failed; the message is that of the tool on one line.
    """
    supported, settings = TOOLS[tool], _tool_settings(options)
    if settings["precision"] not in supported.precisions:
        precisions = " or ".join(supported.precisions)
        raise BuildFailed(f"{tool}: quantizes to {precisions}, not to {settings['precision']}")
    if len(supported.methods) > 1 and settings["method"] not in supported.methods:
        raise BuildFailed(f"{tool}: calibrates by {', '.join(supported.methods)}, not by {settings['method']}")
    return _run_tool(tool, (model_path, output_path), batches, settings, options.get("limit_s"), metric)


def modelopt(
    model_path: Path, output_path: Path, batches: Iterable[Mapping[str, Array]], arguments: Mapping[str, Any]
) -> Path:
    """Quantize a model with NVIDIA ModelOpt and any of its arguments.

    Args:
        model_path: Float model, which ModelOpt receives unchanged; its folder is not modified.
        output_path: Path of the Q/DQ model, written atomically.
        batches: Calibration data, input arrays by name; iterated over once.
        arguments: Arguments of `modelopt.onnx.quantization.quantize` except model, output and data, as in JSON.

    Returns:
        `output_path`.

    Raises:
        BuildFailed: ModelOpt failed; the message is that of ModelOpt on one line.
    """
    _run_tool("modelopt", (model_path, output_path), batches, {"arguments": dict(arguments)})
    return output_path


def ptq_fingerprint(options: PtqOptions, tool: str = "") -> str:
    """Return the SHA-256 of the options, the dialect's fields and the program that calls the tool ("": ModelOpt's).

    Raises:
        UserError: The dialect is unknown.
    """
    digest = hashlib.sha256(json.dumps(_tool_settings(options), sort_keys=True).encode())
    digest.update((TOOLS[tool].program if tool in TOOLS else _PTQ_CHILD).read_bytes())
    return digest.hexdigest()


def _run_tool(
    tool: str,
    paths: tuple[Path, Path],
    batches: Iterable[Mapping[str, Array]],
    settings: Mapping[str, Any],
    limit_s: float | None = None,
    metric: MetricRequest | None = None,
) -> float:
    from harness.accuracy.calibration.histogram_calibrators import runtime_operators

    model_path, output_path = paths
    with tempfile.TemporaryDirectory(prefix="qdq-ptq-") as scratch:
        folder = Path(scratch)
        made, data, seconds = folder / "out" / output_path.name, folder / "data.npz", folder / "seconds.txt"
        made.parent.mkdir()
        (folder / "in").mkdir()
        names, count = list[str](), 0
        with zipfile.ZipFile(data, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for count, batch in enumerate(batches, start=1):
                names = names or list(batch)
                for slot, name in enumerate(names):  # one array at a time: `numpy.savez` needs all in memory
                    with archive.open(f"{count - 1}_{slot}.npy", "w", force_zip64=True) as file:
                        np.lib.format.write_array(file, np.asanyarray(batch[name]), allow_pickle=False)
        if not count:
            raise BuildFailed(f"{tool}: there is no calibration data; give at least one batch")
        copy, behind = copy_model(model_path, folder / "in"), None
        arguments = settings.get("arguments", {})
        # ModelOpt runs a model with plug-in operators if its arguments name TensorRT.
        if not arguments.get("trt_plugins") and "trt" not in arguments.get("calibration_eps", ()):
            behind = extract_plugin_subgraph(copy, runtime_operators(), model_path.name)
        if behind is not None:
            logger.warning("%s: what lies behind plug-in operator %s stays float", tool, behind.operators)
        request = {
            **settings,
            "data": str(data),
            "names": names,
            "count": count,
            "tool": tool,
            "model": str(copy),
            "output": str(made),
            "reason": str(folder / "reason.txt"),
            "seconds": str(seconds),
        }
        if metric is not None:
            drop = metric.max_drop
            request["relative_drop"] = isinstance(drop, str)
            request["max_drop"] = float(drop.strip(" %")) / 100 if isinstance(drop, str) else drop
            request |= {"evaluator": metric.evaluator.model_dump(mode="json"), "folder": str(Path.cwd())}
        started_s = time.monotonic()
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        _run_child(tool, folder, made, limit_s)
        if behind is not None:
            try:
                behind.restore_into(made)
            except UserError as error:
                raise BuildFailed(f"{tool}: {error}") from error
        move_model(made, output_path)
        return float(seconds.read_text(encoding="ascii")) if seconds.exists() else time.monotonic() - started_s


def _tool_settings(options: PtqOptions) -> dict[str, Any]:
    dialect = load_dialect(options["dialect_name"])
    return {
        "method": options.get("method", "minmax"),
        "percentile": options.get("percentile", 99.99),
        "precision": options.get("precision", "int8"),
        "activation": dialect.activation,
        "symmetric": dialect.symmetric_activation,
        "bias": dialect.bias,
        **({"reduce_range": True} if dialect.weight_limit < INT8_MAX_LEVEL else {}),
    }


def _child_command(tool: str, request: Path) -> list[str]:
    found = TOOLS.get(tool)
    program, python = (_PTQ_CHILD, Path(sys.executable)) if found is None else (found.program, tool_python(found))
    if str(python) == sys.executable:
        return python_command(_CHILD_BOOTSTRAP, str(program), str(request))
    return [str(python), "-c", _PLAIN_BOOTSTRAP, str(program), str(request)]  # its environment lacks the harness


def _run_child(tool: str, folder: Path, made: Path, limit_s: float | None) -> None:
    """Run the child process with the scratch folder as its working and temporary folder.

    Raises:
        BuildFailed: The process took too long or too much memory, or did not write the file `made`.
    """
    limits = StepLimits.read(RUNTIME_FACTOR)
    theirs, ours = os.pipe()  # `die_with_parent` ends the child when this pipe is closed; nothing is written
    with open(ours, "wb"), open(theirs, "rb") as stdin:
        process = subprocess.Popen(
            _child_command(tool, folder / "request.json"), cwd=folder,
            env=os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(folder)},
            stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        with process:
            try:
                seconds = limits.seconds if limit_s is None else limit_s
                printed = wait_for_output(process, seconds, limits.memory_gb)[0]
            except TimeoutError:
                how = limits.time_message if limit_s is None else f"took longer than {limit_s:g} s"
                raise BuildFailed(f"{tool}: {how}") from None
            except MemoryError:
                raise BuildFailed(f"{tool}: {limits.memory_message}") from None
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    logger.debug("%s", printed)
    if process.returncode or not made.exists():
        last = printed.strip().rpartition("\n")[2][:500]
        reason = f"ended with code {process.returncode} and no model; its last output: {last or 'none'}"
        file = folder / "reason.txt"
        raise BuildFailed(f"{tool}: {file.read_text(encoding='utf-8')[:1000] if file.exists() else reason}")
