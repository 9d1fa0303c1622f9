"""Benchmarkers on a machine that has a simulated GPU and TensorRT: `use: fake_machine:TensorRT11`."""

from __future__ import annotations

import tempfile
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from fake_cuda import FakeCuda
from fake_trt import FakeTensorRT

from harness.base.errors import UserError
from harness.plugins.api import Capabilities
from harness.runtimes import trtexec
from harness.runtimes.cuda import CudaRuntime, Device
from harness.runtimes.tensorrt import benchmarker as tensorrt
from harness.runtimes.tensorrt.library import TensorRTHandle, TimingCache, open_library
from harness.runtimes.trtexec import find_trtexec

GPU = Device(index=0, name="Fake GPU", uuid="", capability=(8, 9), l2_bytes=2**20, memory_bytes=2**30, driver="12.8")


class TensorRT10(tensorrt.TensorRTBenchmarker):
    """TensorRT 10 in this process."""

    capabilities = Capabilities(dialect="tensorrt", in_process=True)
    major: ClassVar[int] = 10
    offered: ClassVar[frozenset[str]] = frozenset()

    @cached_property
    def _ready(self) -> Any:
        api = FakeCuda()
        fake = FakeTensorRT(self.major, api)
        cache = TimingCache("cold", Path(tempfile.gettempdir()) / "none")
        return TensorRTHandle(library=open_library(lambda: fake), cuda=CudaRuntime(api), device=GPU, cache=cache)

    def describe(self) -> dict[str, Any]:
        """With few float precisions: a row for each would be cast and built many times."""
        facts = dict(super().describe())
        offered = {name: params for name, params in facts.pop("float_params").items() if name in self.offered}
        return {**facts, "float_params": offered} if offered else facts


class TensorRT11(TensorRT10):
    """TensorRT 11 in this process."""

    major = 11


class Trtexec11(trtexec.TrtexecBenchmarker):
    """The program trtexec on PATH, started from this process, on a simulated GPU."""

    capabilities = Capabilities(dialect="tensorrt", in_process=True, interleaved=False)

    @cached_property
    def _trtexec_handle(self) -> Any:
        program, version = find_trtexec(None)
        return trtexec._TrtexecHandle(
            program=program, version=version, major=int(version.partition(".")[0]), device=GPU
        )

    def describe(self) -> dict[str, Any]:
        """At one float precision: a row for each other would be cast and built."""
        return {name: fact for name, fact in super().describe().items() if name != "float_params"}


class HalfAndFull10(TensorRT10):
    """TensorRT 10 with FP16 and FP32."""

    offered = frozenset({"f16", "f32"})


class HalfAndFull11(TensorRT11):
    """TensorRT 11 with FP16 and FP32."""

    offered = frozenset({"f16", "f32"})


class NoDriver(TensorRT11):
    """TensorRT 11 without a GPU."""

    @cached_property
    def _ready(self) -> Any:
        raise UserError("no NVIDIA driver is loaded on this machine; install one, then check it by nvidia-smi")
