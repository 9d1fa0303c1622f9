"""CUDA by cuda-python: errors as exceptions, and one clear sentence where there is no GPU to use.

Nothing here needs a driver to be imported; the first use does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from harness.errors import MeasureFailed, UserError, install_hint

__all__ = ["CudaRuntime", "Device", "import_runtime", "open_device"]

INSTALL_HINT = f"{install_hint('tensorrt')} brings cuda-python"
STICKY_ERROR_CODES = frozenset((214, 700, 702, 710, 714, 715, 716, 717, 718, 719))
"""Memory error, illegal address, time-out, assert, stack, instruction, alignment, address space, program counter,
launch failure: driver_types.h says that "the process must be terminated and relaunched"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """GPU and its properties.

    Attributes:
        index: Number by which CUDA knows it.
        uuid: As nvidia-smi writes it, "GPU-...".
        capability: Compute capability, for instance (8, 9).
        l2_bytes: Size of its L2 cache.
        driver: Newest CUDA that its driver knows, for instance "12.8".
    """

    index: int
    name: str
    uuid: str
    capability: tuple[int, int]
    l2_bytes: int
    memory_bytes: int
    driver: str


class CudaRuntime:
    """The runtime API on one device.

    Args:
        api: Module `cuda.bindings.runtime`.
        device: Becomes the current device of this thread.
    """

    def __init__(self, api: Any, device: int = 0) -> None:
        self.api = api
        self.call("cudaSetDevice", device)

    def call(self, function: str, *args: Any) -> Any:
        """Call a function by its name, check its status and return its results without the status.

        Returns:
            Nothing, the one result, or a list of them.

        Raises:
            MeasureFailed: With the function, CUDA's name of the error and its text.
            SystemExit: The error leaves the process without a usable GPU. The sandbox then starts a fresh worker; what
                goes on with this one would fail for every later candidate.
        """
        status, *results = getattr(self.api, function)(*args)
        if int(status):
            self.api.cudaGetLastError()  # or a later launch, of TensorRT for instance, would take it for its own
            text = f"{function}: {_format_error(self.api, status)}"
            if int(status) in STICKY_ERROR_CODES:
                raise SystemExit(f"CUDA: {text}; this process can use the GPU no more")
            raise MeasureFailed(f"CUDA: {text}")
        return None if not results else results[0] if len(results) == 1 else results


def import_runtime() -> Any:
    """Return cuda-python's bindings of the CUDA runtime; the same module in 12.6 to 13.

    Raises:
        UserError: cuda-python is not installed, or too old.
    """
    try:
        from cuda.bindings import runtime
    except ImportError as error:
        raise UserError(
            f"cuda-python >= 12.6 is missing ({error}); on a machine with an NVIDIA GPU {INSTALL_HINT}"
        ) from error
    return runtime


def open_device(index: int = 0) -> tuple[CudaRuntime, Device]:
    """Open a GPU for use.

    Raises:
        UserError: There is no driver, the driver is too old, or there is no such device.
    """
    api = import_runtime()
    status, count = api.cudaGetDeviceCount()
    if int(status) or not count:
        raise UserError(_explain_no_device(api, status))
    if not 0 <= index < count:
        raise UserError(f"device: 0 to {count - 1} (the GPUs that CUDA lists here), but got {index}")
    try:
        cuda = CudaRuntime(api, index)
        return cuda, _read_device(cuda, index)
    except MeasureFailed as error:
        raise UserError(
            f"GPU {index} cannot be used: {error}; see nvidia-smi (a compute mode of EXCLUSIVE_PROCESS leaves no room "
            "for worker processes: nvidia-smi -c DEFAULT)"
        ) from error


def _explain_no_device(api: Any, status: Any) -> str:
    """Explain why no device can be used; CUDA reports "insufficient driver" for an old and for a missing driver."""
    failed, driver = api.cudaDriverGetVersion()
    _, built_for = api.cudaRuntimeGetVersion()
    if int(failed) or not driver:
        return "no NVIDIA driver is loaded on this machine; install one, then check it by nvidia-smi"
    code = api.cudaError_t
    if status == code.cudaErrorInsufficientDriver:
        return (
            f"the NVIDIA driver is too old: it knows CUDA {_format_version(driver)}, cuda-python here needs "
            f"{_format_version(built_for)}; update the driver, or pip install 'cuda-python<{built_for // 1000}'"
        )
    if status == code.cudaErrorNoDevice or not int(status):
        return "no NVIDIA GPU is visible; check nvidia-smi and the variable CUDA_VISIBLE_DEVICES"
    return f"CUDA finds no usable GPU: {_format_error(api, status)}"


def _read_device(cuda: CudaRuntime, index: int) -> Device:
    properties = cuda.call("cudaGetDeviceProperties", index)
    return Device(
        index=index,
        name=properties.name.decode(errors="replace").rstrip("\0"),
        uuid=_format_uuid(bytes(properties.uuid.bytes)),
        capability=(int(properties.major), int(properties.minor)),
        l2_bytes=int(properties.l2CacheSize),
        memory_bytes=int(properties.totalGlobalMem),
        driver=_format_version(cuda.call("cudaDriverGetVersion")),
    )


def _format_uuid(raw: bytes) -> str:
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def _format_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def _format_error(api: Any, status: Any) -> str:
    """Format CUDA's name of an error and its text, for instance "cudaErrorMemoryAllocation (out of memory)"."""
    _, name = api.cudaGetErrorName(status)
    _, text = api.cudaGetErrorString(status)
    return f"{_decode_text(name)} ({_decode_text(text)})"


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)
