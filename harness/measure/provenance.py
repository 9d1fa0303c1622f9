"""Environment of a measurement: libraries, processor, limits, load, GPUs, code. Unreadable facts are left out."""

from __future__ import annotations

import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from harness.measure.machine_noise import usable_cores

RECORDED_PACKAGES = (
    "qdq-bench", "numpy", "onnx", "onnxruntime-gpu", "onnxruntime", "openvino", "nvidia-modelopt", "tensorrt", "torch",
    "optuna", "scikit-learn", "scipy",
)  # fmt: skip
RECORDED_CPU_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16",
    "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip
# CPU flags of instructions that multiply INT8, with their names, the fastest first.
INT8_INSTRUCTION_SETS = (
    ("amx_int8", "AMX"), ("avx512_vnni", "AVX512-VNNI"), ("avx_vnni", "AVX-VNNI"), ("avx512f", "AVX512"),
    ("avx2", "AVX2"), ("i8mm", "I8MM"), ("asimddp", "DotProd"),
)  # fmt: skip
NVIDIA_SMI_FIELDS = (
    "name", "driver_version", "compute_cap", "memory.total", "clocks.sm", "clocks.max.sm", "temperature.gpu",
    "power.draw",
)  # fmt: skip
LIMIT_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
CONTAINER_MARKS = {
    "docker": "/.dockerenv", "podman": "/run/.containerenv", "kubernetes": "/var/run/secrets/kubernetes.io",
}  # fmt: skip
_CPU_FOLDER = "/sys/devices/system/cpu"


def describe_environment(commit: str | None = None) -> dict[str, Any]:
    """Return facts about this machine and this installation as JSON values; those that cannot be read are absent.

    Args:
        commit: Commit of this code; None: `git_commit()`.
    """
    probes: Mapping[str, Callable[[], Any]] = {
        "python": platform.python_version,
        "system": lambda: f"{platform.system()} {platform.release()} {platform.machine()}",
        "packages": _package_versions,
        "cpu": _cpu_facts,
        "limits": _process_limits,
        "load_average": lambda: [round(load, 2) for load in os.getloadavg()],
        "memory_gib": lambda: round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": _gpu_facts,
        "git_commit": lambda: commit or git_commit(),
    }
    return {name: value for name, value in _run_probes(probes).items() if value not in ({}, [], "")}


def comparability_key(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of `describe_environment` that must be equal for latencies to be compared."""
    # Each kind of GPU counts once, because an engine runs on one GPU, whatever their number.
    kinds = {(gpu.get("name"), gpu.get("driver_version")) for gpu in facts.get("gpus", ())}
    return {
        "python": facts.get("python"),
        "packages": facts.get("packages"),
        "cpu": facts.get("cpu", {}).get("model"),
        "instructions": facts.get("cpu", {}).get("flags"),  # clouds give different processors the same name
        "gpus": [{"name": name, "driver_version": driver} for name, driver in sorted(kinds, key=repr)],
        **({"node_label": facts["node_label"]} if "node_label" in facts else {}),
    }


def lacks_vnni(facts: Mapping[str, Any]) -> bool:
    """Return whether an environment's processor adds products of UINT8 and INT8 in 16 bits, which saturate.

    These are x86 processors with AVX2 (VPMADDUBSW) and without VNNI or AMX. There, runtimes compute something else than
    the Q/DQ file specifies (ONNX Runtime, "Quantize ONNX models", on data types).
    """
    flags = set(facts.get("cpu", {}).get("flags", ()))
    return "avx2" in flags and not flags & {"avx_vnni", "avx512_vnni", "amx_int8"}


def machine_lacks_vnni() -> bool:
    """Return `lacks_vnni` for this machine; False if its processor cannot be read."""
    return lacks_vnni({"cpu": _or_none(_cpu_facts) or {}})


def describe_installed(package: str) -> dict[str, str]:
    """Return version and device of a runtime that is installed here, as a benchmarker describes them; {} without it."""
    versions = _package_versions()
    version = versions.get(package, versions.get(f"{package}-gpu"))
    return {} if version is None else {"version": version, "device": machine_processor_label()}


def git_commit() -> str | None:
    """Return the commit of this code, with "+changes" if files differ; None for a wheel or if git cannot tell.

    A virtual environment may be inside another repository, so git must know this very file.
    """
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        return _run_command("git", "-C", str(here.parent), *arguments)

    def probe() -> str | None:
        if shutil.which("git") is None or here.name not in git("ls-files", here.name):
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return f"{git('rev-parse', 'HEAD')}{'+changes' if changed else ''}"

    commit: str | None = _or_none(probe)
    return commit


def count_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(usable_cores())


def validate_threads(threads: object) -> int:
    """Return a number of threads; raise `ValueError` if it is no integer from 1 to the number of usable cores."""
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= count_cores():
        raise ValueError(f"threads: 1 to {count_cores()} (the cores that this process may use), but got {threads!r}")
    return threads


def cpu_model_name() -> str:
    """Return the processor's name, or the architecture if it has none."""
    fields = _or_none(_cpuinfo) or {}
    return fields.get("model name") or fields.get("Model") or platform.processor() or platform.machine()


def machine_processor_label(name: str | None = None) -> str:
    """Return `processor_label` of this machine: "AMD EPYC (AVX512-VNNI)"; `name` is the processor's by a runtime."""
    return processor_label(name or cpu_model_name(), {"cpu": _or_none(_cpu_facts) or {}})


def processor_label(name: str, facts: Mapping[str, Any]) -> str:
    """Return a processor's name with the fastest INT8 instructions of an environment: "AMD EPYC (AVX512-VNNI)".

    `facts` are the result of `describe_environment`. The instructions decide the gain of quantization, and processors
    with the same name differ in them.
    """
    flags = facts.get("cpu", {}).get("flags", ())
    instructions = next((label for flag, label in INT8_INSTRUCTION_SETS if flag in flags), None)
    return name if instructions is None else f"{name} ({instructions})"


def format_options(options: Mapping[str, Any]) -> str:
    """Return an engine's options as text: "threads 1, precision f32"."""
    return ", ".join(f"{name} {value}" for name, value in options.items())


def format_scenario(options: Mapping[str, Any]) -> str:
    """Return the scenario as text, such as "latency on 1 thread, weighted mean over batch=1 (0.7); ...".

    Args:
        options: Options of an engine, see `harness.plugins.api.Benchmarker.describe`.
    """
    streams, threads = int(options.get("streams", 1)), options.get("threads")
    what = "latency" if streams == 1 else f"throughput of {streams} streams, as time per inference,"
    device = "" if threads is None else f" on {threads} thread{'' if threads == 1 else 's'}"
    return f"{what}{device}" + (f", {options['shapes']}" if "shapes" in options else "")


def _or_none(probe: Callable[[], Any]) -> Any:
    """Return the result of a function, or None if it raises, because this machine does not offer the value."""
    try:
        return probe()
    except (OSError, ValueError, KeyError, AttributeError, StopIteration, ImportError, subprocess.SubprocessError):
        return None


def _run_probes(probes: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    """Return the results of functions by name, without those that raise or return None."""
    values = {name: _or_none(probe) for name, probe in probes.items()}
    return {name: value for name, value in values.items() if value is not None}


@functools.cache
def _package_versions() -> Mapping[str, str]:
    versions = {}
    for name in RECORDED_PACKAGES:
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


def _cpu_facts() -> dict[str, Any]:
    fields = _or_none(_cpuinfo) or {}
    present = set((fields.get("flags") or fields.get("Features") or "").split())
    no_turbo = Path(f"{_CPU_FOLDER}/intel_pstate/no_turbo")
    return _run_probes(
        {
            "model": cpu_model_name,
            "cores": lambda: psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count,
            "flags": lambda: [flag for flag in RECORDED_CPU_FLAGS if flag in present],
            "virtual": lambda: "hypervisor" in present or None,
            "governor": lambda: _read_text(f"{_CPU_FOLDER}/cpu0/cpufreq/scaling_governor"),
            "turbo": lambda: (
                _read_text(no_turbo) == "0" if no_turbo.exists() else _read_text(f"{_CPU_FOLDER}/cpufreq/boost") == "1"
            ),
            "mhz": lambda: round(psutil.cpu_freq().current),
            "temperature_c": lambda: max(
                sensor.current for group in psutil.sensors_temperatures().values() for sensor in group
            ),
        }
    )


def _process_limits() -> dict[str, Any]:
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
    quota, period = _read_cgroup_files({"cpu.max": ""}, {"cpu.cfs_quota_us": "cpu", "cpu.cfs_period_us": "cpu"})
    return None if int(quota) < 0 else int(quota) / int(period)


def _cgroup_memory_gib() -> float | None:
    (text,) = _read_cgroup_files({"memory.max": ""}, {"memory.limit_in_bytes": "memory"})
    return None if int(text) >= psutil.virtual_memory().total else round(int(text) / 2**30, 1)


def _read_cgroup_files(unified: Mapping[str, str], divided: Mapping[str, str]) -> list[str]:
    """Return the words in files of this process's control group.

    Args:
        unified: Files, with the controller "", if control groups form one tree (version 2).
        divided: Files with their controllers if there is one tree for each controller (version 1).
    """
    root = Path("/sys/fs/cgroup")
    names = unified if Path("/sys/fs/cgroup/cgroup.controllers").exists() else divided
    groups = [line.split(":", 2) for line in _read_text("/proc/self/cgroup").splitlines()]
    words = []
    for name, controller in names.items():
        own = next(path for _, controllers, path in groups if controller in controllers.split(","))
        path = root / controller / own.lstrip("/") / name
        words += _read_text(
            path if path.exists() else root / controller / name
        ).split()  # a container's own is the root
    return words


def _address_space_gib() -> float | None:
    import resource  # missing on Windows

    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else round(soft / 2**30, 1)


def _gpu_facts() -> list[dict[str, str]]:
    """Return the GPUs that CUDA shows to this process; all of them if CUDA_VISIBLE_DEVICES contains UUIDs."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = f"--query-gpu={','.join(NVIDIA_SMI_FIELDS)}"
    rows = _run_command("nvidia-smi", query, "--format=csv,noheader").splitlines()
    cells = ([cell.strip() for cell in row.split(",")] for row in rows)
    gpus = [dict(zip(NVIDIA_SMI_FIELDS, row, strict=True)) for row in cells]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else []
    if visible is None or not all(name.strip().isdecimal() for name in names):
        return gpus
    return [gpus[int(name)] for name in names if int(name) < len(gpus)]


def _read_text(path: str | Path) -> str:
    return Path(path).read_text(encoding="utf-8").strip()


def _run_command(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
