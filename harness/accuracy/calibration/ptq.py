"""Post-training quantization by external tools, for baselines and initial placements of searches.

Each tool runs in a child process, for the reasons given in `harness.accuracy.calibration.ptq_child`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Required, TypedDict, Unpack

import numpy as np

from harness.accuracy.tools.catalog import TOOLS, tool_python
from harness.base.errors import BuildFailed, UserError
from harness.config.sections import PluginSpec
from harness.graph.io.files import copy_model, move_model
from harness.graph.plugin_operators import extract_plugin_subgraph
from harness.graph.rules.dialects import INT8_MAX_LEVEL, load_dialect
from harness.plugins.api import Array
from harness.workers.helper_process import RUNTIME_FACTOR, StepLimits
from harness.workers.process import python_command, wait_for_output

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
_MODELOPT_PROGRAM = Path(__file__).with_name("ptq_child.py")


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

    @property
    def settings(self) -> dict[str, Any]:
        """Return `max_drop` as a number, and `relative_drop`, whether it is a share of the float model's metric."""
        relative = isinstance(self.max_drop, str)
        bound = float(self.max_drop.strip(" %")) / 100 if isinstance(self.max_drop, str) else self.max_drop
        return {"max_drop": bound, "relative_drop": relative}


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


def quantize(
    tool: str,
    model_path: Path,
    output_path: Path,
    batches: Iterable[Mapping[str, Array]],
    metric: MetricRequest | None = None,
    **options: Unpack[PtqOptions],
) -> float:
    """Quantize a model with a tool of `harness.accuracy.tools.catalog`.

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
    return _run_tool(
        tool, (model_path, output_path), batches, _tool_settings(options), options.get("limit_s"), metric
    )  # fmt: skip


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
    digest.update((TOOLS[tool].program if tool in TOOLS else _MODELOPT_PROGRAM).read_bytes())
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
        made = folder / "out" / output_path.name
        made.parent.mkdir()
        (folder / "in").mkdir()
        data = _write_data(batches, folder / "data.npz")
        if not data["count"]:
            raise BuildFailed(f"{tool}: there is no calibration data; give at least one batch")
        copy = copy_model(model_path, folder / "in")
        behind = (
            None
            if _uses_tensorrt_plugins(settings)
            else extract_plugin_subgraph(copy, runtime_operators(), model_path.name)
        )
        if behind is not None:
            logger.warning("%s: what lies behind plug-in operator %s stays float", tool, behind.operators)
        request = {
            **settings,
            **data,
            "tool": tool,
            "model": str(copy),
            "output": str(made),
            "reason": str(folder / "reason.txt"),
            "seconds": str(folder / "seconds.txt"),
        }
        if metric is not None:
            evaluator = metric.evaluator.model_dump(mode="json")
            request |= {**metric.settings, "evaluator": evaluator, "folder": str(Path.cwd())}
        started_s = time.monotonic()
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        done = _run_child(tool, folder, limit_s)
        if done.returncode or not made.exists():
            raise BuildFailed(f"{tool}: {_failure_reason(folder, done)}")
        if behind is not None:
            try:
                behind.restore_into(made)
            except UserError as error:
                raise BuildFailed(f"{tool}: {error}") from error
        move_model(made, output_path)
        file = folder / "seconds.txt"
        return float(file.read_text(encoding="ascii")) if file.exists() else time.monotonic() - started_s


def _uses_tensorrt_plugins(settings: Mapping[str, Any]) -> bool:
    """Return whether ModelOpt's arguments make it run the model with TensorRT, which has plug-in operators."""
    arguments = settings.get("arguments", {})
    return bool(arguments.get("trt_plugins")) or "trt" in arguments.get("calibration_eps", ())


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


def _write_data(batches: Iterable[Mapping[str, Array]], path: Path) -> dict[str, Any]:
    """Write the data in the form of `tool_child`; one array at a time, because `numpy.savez` needs all in memory."""
    names: list[str] = []
    count = 0
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for count, batch in enumerate(batches, start=1):
            names = names or list(batch)
            for slot, name in enumerate(names):
                with archive.open(f"{count - 1}_{slot}.npy", "w", force_zip64=True) as file:
                    np.lib.format.write_array(file, np.asanyarray(batch[name]), allow_pickle=False)
    return {"data": str(path), "names": names, "count": count}


def _run_child(tool: str, folder: Path, limit_s: float | None) -> subprocess.CompletedProcess[str]:
    """Run the child process with the scratch folder as its working and temporary folder.

    Raises:
        BuildFailed: The process took too long or too much memory.
    """
    environment = os.environ | {"PYTHONHASHSEED": "0", "TMPDIR": str(folder)}
    theirs, ours = os.pipe()  # `die_with_parent` ends the child when this pipe is closed; nothing is written
    with open(ours, "wb"), open(theirs, "rb") as stdin:
        process = subprocess.Popen(
            _child_command(tool, folder / "request.json"),
            cwd=folder, env=environment, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        with process:
            try:
                printed = _read_output(process, tool, limit_s)
            finally:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
    logger.debug("%s", printed)
    return subprocess.CompletedProcess(process.args, process.returncode, printed)


def _child_command(tool: str, request: Path) -> list[str]:
    """Return the command of a tool's child process.

    The interpreter of a separate environment lacks the harness, so its program imports only `tool_child`, from its own
    folder.
    """
    found = TOOLS.get(tool)
    program = _MODELOPT_PROGRAM if found is None else found.program
    python = sys.executable if found is None else str(tool_python(found))
    if python == sys.executable:
        return python_command(_CHILD_BOOTSTRAP, str(program), str(request))
    return [python, "-c", _PLAIN_BOOTSTRAP, str(program), str(request)]


def _read_output(process: subprocess.Popen[str], tool: str, limit_s: float | None) -> str:
    limits = StepLimits.read(RUNTIME_FACTOR)
    try:
        return wait_for_output(process, limits.seconds if limit_s is None else limit_s, limits.memory_gb)[0]
    except TimeoutError:
        how = limits.time_message if limit_s is None else f"took longer than {limit_s:g} s"
    except MemoryError:
        how = limits.memory_message
    raise BuildFailed(f"{tool}: {how}")


def _failure_reason(folder: Path, done: subprocess.CompletedProcess[str]) -> str:
    file = folder / "reason.txt"
    if file.exists():
        return file.read_text(encoding="utf-8")[:1000]
    last = done.stdout.strip().rpartition("\n")[2][:500]
    return f"ended with code {done.returncode} and no model; its last output: {last or 'none'}"
