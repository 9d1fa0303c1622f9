"""Where a figure comes from: libraries, processor, limits, load, GPU, code. Every probe fails softly."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

__all__ = [
    "checked_threads",
    "cores",
    "cpu_model",
    "decisive",
    "environment",
    "git_commit",
    "options_said",
    "processor",
    "saturates",
    "saturates_here",
    "with_instructions",
]

PACKAGES = (
    "qdq-bench", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime", "openvino", "nvidia-modelopt", "tensorrt", "torch",
    "optuna", "scikit-learn", "scipy",
)  # fmt: skip
FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
INTEGER = (
    ("amx_int8", "AMX"), ("avx512_vnni", "AVX512-VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx512f", "AVX512"),
    ("avx2", "AVX2"), ("i8mm", "I8MM"), ("asimddp", "DotProd"),
)  # fmt: skip
"""Flags of what multiplies INT8 and what it is called, the fastest first."""
GPU_FIELDS = (
    "name", "driver_version", "compute_cap", "memory.total", "clocks.sm", "clocks.max.sm", "temperature.gpu",
    "power.draw",
)  # fmt: skip


def environment(commit: str | None = None) -> dict[str, Any]:
    """Facts about this machine and this installation, ready for JSON; what cannot be read is absent.

    Args:
        commit: What `git_commit` gave when this code was loaded; None: looked up now.
    """
    probes: Mapping[str, Callable[[], Any]] = {
        "python": platform.python_version,
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": _packages,
        "cpu": _cpu,
        "limits": _limits,
        "load_average": lambda: [round(load, 2) for load in os.getloadavg()],
        "memory_gib": lambda: round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpus,
        "git_commit": lambda: commit or git_commit(),
    }
    found = {name: _soft(probe) for name, probe in probes.items()}
    return {name: value for name, value in found.items() if value not in (None, {}, [], "")}


def decisive(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an `environment` that must be the same where figures are put side by side."""
    return {
        "python": facts.get("python"),
        "packages": facts.get("packages"),
        "cpu": facts.get("cpu", {}).get("model"),
        "instructions": facts.get("cpu", {}).get("flags"),  # clouds give one name to processors of different ones
        "gpus": _kinds(facts.get("gpus", ())),
    }


def _kinds(gpus: Iterable[Mapping[str, str]]) -> list[dict[str, str | None]]:
    """One of each kind: how many there are is no matter, for an engine runs on one."""
    kinds = {(gpu.get("name"), gpu.get("driver_version")) for gpu in gpus}
    return [{"name": name, "driver_version": driver} for name, driver in sorted(kinds, key=repr)]


def saturates(facts: Mapping[str, Any]) -> bool:
    """Whether the processor of an `environment` adds products of UINT8 and INT8 in 16 bits, where they saturate.

    x86 with AVX2 (VPMADDUBSW) and without VNNI or AMX: runtimes compute something else there than the Q/DQ file says
    (ONNX Runtime, "Quantize ONNX models", on data types).
    """
    flags = set(facts.get("cpu", {}).get("flags", ()))
    return "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni", "amx_int8"}


def saturates_here() -> bool:
    """Whether the processor of this machine does, see `saturates`; where it cannot be read, no."""
    return saturates({"cpu": _soft(_cpu) or {}})


def git_commit() -> str | None:
    """The commit that this code runs from; None where it was installed from a wheel or git cannot tell."""
    found: str | None = _soft(_git_commit)
    return found


def cores() -> int:
    """Number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_threads(threads: object) -> int:
    """The number of threads where this process can have so many.

    Raises:
        ValueError: Not a whole number from 1 to `cores()`; more threads than cores time the scheduler.
    """
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= cores():
        raise ValueError(f"threads: 1 to {cores()} (the cores that this process may use), but got {threads!r}")
    return threads


def cpu_model() -> str:
    """The processor's name as it gives it itself; the architecture where it gives none."""
    fields = _soft(_cpuinfo) or {}
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()


def processor(name: str | None = None) -> str:
    """The processor of this machine with what multiplies INT8 on it, see `with_instructions`.

    Args:
        name: What a runtime calls it; None: its own name.
    """
    return with_instructions(name or cpu_model(), {"cpu": _soft(_cpu) or {}})


def with_instructions(name: str, facts: Mapping[str, Any]) -> str:
    """A processor's name and the fastest instructions for INT8 of an `environment`: "AMD EPYC (AVX512-VNNI)".

    They decide what quantization gains, and processors that give themselves one and the same name differ in them.
    """
    flags = facts.get("cpu", {}).get("flags", ())
    found = next((called for flag, called in INTEGER if flag in flags), None)
    return name if found is None else f"{name} ({found})"


def options_said(options: Mapping[str, Any]) -> str:
    """The options that an engine was made with, in words: "threads 1, precision f32"."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _soft(probe: Callable[[], Any]) -> Any:
    """The probe's value, or None where this machine does not offer it."""
    try:
        return probe()
    except (OSError, ValueError, KeyError, AttributeError, StopIteration, ImportError, subprocess.SubprocessError):
        return None


def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu() -> dict[str, Any]:
    fields = _soft(_cpuinfo) or {}
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    facts = {
        "model": cpu_model(),
        "cores": psutil.cpu_count(logical=False),
        "threads": psutil.cpu_count(),
        "flags": [flag for flag in FLAGS if flag in present],
        "virtual": "hypervisor" in present or None,
        "governor": _soft(lambda: _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")),
        "turbo": _soft(_turbo),
        "mhz": _soft(lambda: round(psutil.cpu_freq().current)),
        "temperature_c": _soft(_temperature),
    }
    return {key: value for key, value in facts.items() if value is not None}


def _turbo() -> bool:
    folder = Path("/sys/devices/system/cpu")
    no_turbo = folder / "intel_pstate/no_turbo"
    return _read(no_turbo) == "0" if no_turbo.exists() else _read(folder / "cpufreq/boost") == "1"


def _temperature() -> float | None:
    readings = [sensor.current for group in psutil.sensors_temperatures().values() for sensor in group]
    return max(readings, default=None)


def _limits() -> dict[str, Any]:
    """What a container or the user allows: affinity, CPU quota (cores), memory (GiB), address space, variables."""
    variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
    facts = {
        "affinity": _soft(lambda: sorted(os.sched_getaffinity(0))),
        "container": _soft(_container),
        "cgroup_cores": _soft(_cgroup_cores),
        "cgroup_memory_gib": _soft(_cgroup_memory_gib),
        "address_space_gib": _soft(_address_space_gib),
        "variables": {name: os.environ[name] for name in variables if name in os.environ},
    }
    return {key: value for key, value in facts.items() if value not in (None, {})}


def _container() -> str | None:
    """What runs this container, by the marks that it leaves."""
    marks = {"docker": "/.dockerenv", "podman": "/run/.containerenv", "kubernetes": "/var/run/secrets/kubernetes.io"}
    return next((name for name, mark in marks.items() if Path(mark).exists()), None)


def _cgroup_cores() -> float | None:
    quota, period = (
        _cgroup("", "cpu.max").split()
        if _unified()
        else (_cgroup("cpu", "cpu.cfs_quota_us"), _cgroup("cpu", "cpu.cfs_period_us"))
    )
    return None if int(quota) < 0 else int(quota) / int(period)


def _cgroup_memory_gib() -> float | None:
    limit = int(_cgroup("", "memory.max") if _unified() else _cgroup("memory", "memory.limit_in_bytes"))
    return None if limit >= psutil.virtual_memory().total else round(limit / 2**30, 1)


def _unified() -> bool:
    """Whether control groups are those of version 2, which are one tree; version 1 has one for each controller."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def _cgroup(controller: str, name: str) -> str:
    """A file of this process's control group; "max" makes the callers' int() fail softly.

    Args:
        controller: Whose tree; "" for the one of version 2.
    """
    listed = (line.split(":", 2) for line in _read("/proc/self/cgroup").splitlines())
    own = next(path for _, controllers, path in listed if controller in controllers.split(","))
    tree = Path("/sys/fs/cgroup") / controller
    there = tree / own.lstrip("/") / name
    return _read(there if there.exists() else tree / name)  # a container sees its own group as the root


def _address_space_gib() -> float | None:
    import resource  # not on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else round(soft / 2**30, 1)


def _gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    rows = _run("nvidia-smi", f"--query-gpu={','.join(GPU_FIELDS)}", "--format=csv,noheader").splitlines()
    return _visible([dict(zip(GPU_FIELDS, (cell.strip() for cell in row.split(",")), strict=True)) for row in rows])


def _visible(gpus: list[dict[str, str]]) -> list[dict[str, str]]:
    """The GPUs that CUDA shows to this process; all where CUDA_VISIBLE_DEVICES names them by UUID."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = given.split(",") if given else []
    if given is None or not all(name.strip().isdecimal() for name in names):
        return gpus
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]


def _git_commit() -> str | None:
    """See `git_commit`.

    A virtual environment may lie inside of somebody else's repository, so git must know this very file.
    """
    here = Path(__file__).resolve()
    if shutil.which("git") is None or here.name not in _run("git", "-C", str(here.parent), "ls-files", here.name):
        return None
    commit = _run("git", "-C", str(here.parent), "rev-parse", "HEAD")
    changed = _run("git", "-C", str(here.parent), "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{'+changes' if changed else ''}"


def _read(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8").strip()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
