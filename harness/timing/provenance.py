"""Environment of a measurement: libraries, processor, limits, load, GPUs, code. Unreadable facts are absent."""

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
]  # fmt: skip

PACKAGES = (
    "qdq-bench", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime", "openvino", "nvidia-modelopt", "tensorrt", "torch",
    "optuna", "scikit-learn", "scipy",
)  # fmt: skip
FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
# CPU flags of instructions that multiply INT8, with their names, the fastest first.
INTEGER = (
    ("amx_int8", "AMX"), ("avx512_vnni", "AVX512-VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx512f", "AVX512"),
    ("avx2", "AVX2"), ("i8mm", "I8MM"), ("asimddp", "DotProd"),
)  # fmt: skip
GPU_FIELDS = (
    "name", "driver_version", "compute_cap", "memory.total", "clocks.sm", "clocks.max.sm", "temperature.gpu",
    "power.draw",
)  # fmt: skip
LIMIT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
CONTAINER_MARKS = {
    "docker": "/.dockerenv", "podman": "/run/.containerenv", "kubernetes": "/var/run/secrets/kubernetes.io",
}  # fmt: skip
_CPU_FOLDER = "/sys/devices/system/cpu"


def environment(commit: str | None = None) -> dict[str, Any]:
    """Return facts about this machine and this installation; `commit` defaults to `git_commit()`."""
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
    return {name: value for name, value in _run_probes(probes).items() if value not in ({}, [], "")}


def decisive(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of an environment that must be equal for figures to be compared."""
    return {
        "python": facts.get("python"),
        "packages": facts.get("packages"),
        "cpu": facts.get("cpu", {}).get("model"),
        "instructions": facts.get("cpu", {}).get("flags"),  # clouds give different processors the same name
        "gpus": _kinds(facts.get("gpus", ())),
    }


def _kinds(gpus: Iterable[Mapping[str, str]]) -> list[dict[str, str | None]]:
    """Return each kind of GPU once: an engine runs on one, so their number does not matter."""
    kinds = {(gpu.get("name"), gpu.get("driver_version")) for gpu in gpus}
    return [{"name": name, "driver_version": driver} for name, driver in sorted(kinds, key=repr)]


def saturates(facts: Mapping[str, Any]) -> bool:
    """Return whether an environment's processor adds products of UINT8 and INT8 in 16 bits, which saturate.

    These are x86 processors with AVX2 (VPMADDUBSW) and without VNNI or AMX. There, runtimes compute something else than
    the Q/DQ file specifies (ONNX Runtime, "Quantize ONNX models", on data types).
    """
    flags = set(facts.get("cpu", {}).get("flags", ()))
    return "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni", "amx_int8"}


def saturates_here() -> bool:
    """Return `saturates` for this machine; False if its processor cannot be read."""
    return saturates({"cpu": _soft(_cpu) or {}})


def git_commit() -> str | None:
    """Return the commit of this code; None if it was installed from a wheel or git cannot tell.

    A virtual environment may be inside another repository, so git must know this very file.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return _run("git", "-C", str(here.parent), *arguments)

    def probe() -> str | None:
        if shutil.which("git") is None or here.name not in git("ls-files", here.name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return f"{git('rev-parse', 'HEAD')}{'+changes' if changed else ''}"

    commit: str | None = _soft(probe)
    return commit


def cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def checked_threads(threads: object) -> int:
    """Return a number of threads; raise `ValueError` above the number of cores, where the scheduler is timed."""
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= cores():
        raise ValueError(f"threads: 1 to {cores()} (the cores that this process may use), but got {threads!r}")
    return threads


def cpu_model() -> str:
    """Return the processor's name, or the architecture if it has none."""
    fields = _soft(_cpuinfo) or {}
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()


def processor(name: str | None = None) -> str:
    """Return `with_instructions` for this machine, with the name that a runtime gives or the processor's own."""
    return with_instructions(name or cpu_model(), {"cpu": _soft(_cpu) or {}})


def with_instructions(name: str, facts: Mapping[str, Any]) -> str:
    """Return a processor's name with the fastest INT8 instructions of an environment: "AMD EPYC (AVX512-VNNI)".

    These decide the gain of quantization, and processors with the same name differ in them.
    """
    flags = facts.get("cpu", {}).get("flags", ())
    instructions = next((label for flag, label in INTEGER if flag in flags), None)
    return name if instructions is None else f"{name} ({instructions})"


def options_said(options: Mapping[str, Any]) -> str:
    """Return an engine's options as text: "threads 1, precision f32"."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def _soft(probe: Callable[[], Any]) -> Any:
    """Return the probe's value, or None if this machine does not offer it."""
    try:
        return probe()
    except (OSError, ValueError, KeyError, AttributeError, StopIteration, ImportError, subprocess.SubprocessError):
        return None


def _run_probes(probes: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the values of the probes that have one."""
    values = {name: _soft(probe) for name, probe in probes.items()}
    return {name: value for name, value in values.items() if value is not None}


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _cpuinfo() -> dict[str, str]:
    """Return the fields of the first processor; py-cpuinfo runs other programs for them, which takes a second."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _cpu() -> dict[str, Any]:
    fields = _soft(_cpuinfo) or {}
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    return _run_probes(
        {
            "model": cpu_model,
            "cores": lambda: psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count,
            "flags": lambda: [flag for flag in FLAGS if flag in present],
            "virtual": lambda: "hypervisor" in present or None,
            "governor": lambda: _read_text(f"{_CPU_FOLDER}/cpu0/cpufreq/scaling_governor"),
            "turbo": _turbo,
            "mhz": lambda: round(psutil.cpu_freq().current),
            "temperature_c": _temperature,
        }
    )


def _turbo() -> bool:
    no_turbo = Path(f"{_CPU_FOLDER}/intel_pstate/no_turbo")
    return _read_text(no_turbo) == "0" if no_turbo.exists() else _read_text(f"{_CPU_FOLDER}/cpufreq/boost") == "1"


def _temperature() -> float | None:
    readings = [sensor.current for group in psutil.sensors_temperatures().values() for sensor in group]
    return max(readings, default=None)


def _limits() -> dict[str, Any]:
    """Return the limits of the container or the user: affinity, CPU quota (cores), memory, address space, variables."""
    probes: Mapping[str, Callable[[], Any]] = {
        "affinity": lambda: sorted(os.sched_getaffinity(0)),
        "container": lambda: next((name for name, mark in CONTAINER_MARKS.items() if Path(mark).exists()), None),
        "cgroup_cores": _cgroup_cores,
        "cgroup_memory_gib": _cgroup_memory_gib,
        "address_space_gib": _address_space_gib,
        "variables": lambda: {name: os.environ[name] for name in LIMIT_VARIABLES if name in os.environ},
    }
    return {name: value for name, value in _run_probes(probes).items() if value != {}}


def _cgroup_cores() -> float | None:
    if _unified():
        quota, period = _cgroup("", "cpu.max").split()
    else:
        quota, period = (_cgroup("cpu", f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return None if int(quota) < 0 else int(quota) / int(period)


def _cgroup_memory_gib() -> float | None:
    controller, name = ("", "memory.max") if _unified() else ("memory", "memory.limit_in_bytes")
    limit = int(_cgroup(controller, name))
    return None if limit >= psutil.virtual_memory().total else round(limit / 2**30, 1)


def _unified() -> bool:
    """Return whether control groups form one tree (version 2) and not one for each controller (version 1)."""
    return Path("/sys/fs/cgroup/cgroup.controllers").exists()


def _cgroup(controller: str, name: str) -> str:
    """Return the text of a file of this process's control group; the controller of version 2 is ""."""
    groups = (line.split(":", 2) for line in _read_text("/proc/self/cgroup").splitlines())
    own = next(path for _, controllers, path in groups if controller in controllers.split(","))
    tree = Path("/sys/fs/cgroup") / controller
    path = tree / own.lstrip("/") / name
    return _read_text(path if path.exists() else tree / name)  # a container sees its own group as the root


def _address_space_gib() -> float | None:
    import resource  # missing on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else round(soft / 2**30, 1)


def _gpus() -> list[dict[str, str]]:
    if shutil.which("nvidia-smi") is None:
        return []
    query = f"--query-gpu={','.join(GPU_FIELDS)}"
    rows = _run("nvidia-smi", query, "--format=csv,noheader").splitlines()
    cells = ([cell.strip() for cell in row.split(",")] for row in rows)
    return _visible([dict(zip(GPU_FIELDS, row, strict=True)) for row in cells])


def _visible(gpus: list[dict[str, str]]) -> list[dict[str, str]]:
    """Return the GPUs that CUDA shows to this process; all of them if CUDA_VISIBLE_DEVICES contains UUIDs."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    if visible is None or not all(name.strip().isdecimal() for name in names):
        return gpus
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]


def _read_text(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8").strip()


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
