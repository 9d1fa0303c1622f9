"""Contract of every installed runtime, and contracts that find a wrong engine."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import pytest

from harness.base.errors import UserError
from harness.plugins.registry import create_plugin, plugin_signature
from harness.runtimes.example import PlainBenchmarker, PlainProbe
from harness.runtimes.testing import BenchmarkerContract

CHROMIUM = next((name for name in ("chromium", "chromium-browser", "google-chrome") if shutil.which(name)), None)


class InstalledContract(BenchmarkerContract):
    """Contract of a runtime by name; skipped with the reason where the runtime does not work."""

    use: ClassVar[str]
    params: ClassVar[Mapping[str, Any]] = {}

    def make(self, **more: Any) -> Any:
        made = create_plugin("benchmarker", self.use, {**self.params, **more})
        try:
            made.describe()
        except UserError as error:
            pytest.skip(str(error))
        return made

    def make_profiled(self) -> Any:
        counters = {"profile": True} if "profile" in plugin_signature("benchmarker", self.use).parameters else {}
        return self.make(**counters)


class TestExample(BenchmarkerContract):
    def make(self):
        return PlainBenchmarker()


class TestOpenVINO(InstalledContract):
    use = "openvino"


class TestONNXRuntime(InstalledContract):
    use = "onnxruntime"


class TestONNXRuntimeWeb(InstalledContract):
    use = "onnxruntime_web"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
class TestONNXRuntimeWebInChromium(TestONNXRuntimeWeb):
    params: ClassVar = {"chromium": CHROMIUM}


@pytest.mark.gpu
class TestTensorRT(InstalledContract):
    use = "tensorrt"


@pytest.mark.gpu
class TestTrtexec(InstalledContract):
    use = "trtexec"


@pytest.mark.gpu
class TestTensorRTRTX(InstalledContract):
    use = "tensorrt_rtx"


class WrongProbe(PlainProbe):
    """Engine with wrong values, which accepts any input and returns one array again and again."""

    def sample(self, n):
        return [0.0] * n

    def infer(self, feeds):
        if not hasattr(self, "_outputs"):
            self._outputs = {name: 0 * array for name, array in super().infer(self._fixed_inputs).items()}
        for array in self._outputs.values():
            array += 1
        return self._outputs


class WrongBenchmarker(PlainBenchmarker):
    """Benchmarker that breaks every part of the contract."""

    def build(self, candidate, workdir):
        path = candidate.source()
        return type("Built", (), {"engine": path})()

    def open(self, artifact):
        return nullcontext(WrongProbe(artifact.engine))

    def describe(self):
        return {**super().describe(), "version": ""}

    def save(self, candidate, path):
        shutil.copy(candidate.source(), path)

    def load(self, path):
        return self.build(None, path)

    def layers(self, artifact):
        return ()


class WrongContract(BenchmarkerContract):
    def make(self):
        return WrongBenchmarker()


def broken_tests(contract: BenchmarkerContract, tmp_path) -> dict[str, str]:
    """The error by the name of each test of a contract that fails, and of those that are skipped."""
    found = {}
    for name in [name for name in dir(contract) if name.startswith("test_")]:
        folder = tmp_path / type(contract).__name__ / name
        folder.mkdir(parents=True)
        fixtures = {"tmp_path": folder, "record_property": lambda *_: None}
        method = getattr(contract, name)
        try:
            method(**{each: fixtures[each] for each in method.__func__.__annotations__ if each in fixtures})
        except Exception as error:
            found[name.removeprefix("test_")] = str(error)
    return found


def test_contract_finds_every_fault(tmp_path):
    assert len(broken_tests(WrongContract(), tmp_path)) == 10


@pytest.mark.usefixtures("machine")
def test_contract_on_simulated_libraries(tmp_path):
    """The simulated TensorRT computes right and lists no layers; that of trtexec always has the same outputs."""
    assert broken_tests(TestTensorRT(), tmp_path).keys() == {"layers_show_the_quantized_precision"}
    found = broken_tests(TestTrtexec(), tmp_path)
    assert "outputs {'y': (1, 2, 2)} instead of" in found["float_model_computes_the_reference"]
    assert "readings_are_positive" not in found
