"""Counts of layers that a pause has spoilt are made again, on engines made up: a pause cannot be ordered."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from harness.insight.layers import time_layers
from harness.plugins.api import Layer


class PausingRuntime:
    """Engine after engine with other readings; its one layer is named after the engine."""

    def __init__(self, *engines):
        self._engines = list(engines)
        self.built = []

    def build(self, candidate, workdir):
        assert workdir.is_dir()
        assert workdir not in self.built
        self.built.append(workdir)
        return len(self.built) - 1

    def open(self, artifact):
        return nullcontext(SimpleNamespace(sample=lambda n: self._engines[artifact][:n]))

    def layers(self, artifact):
        return [Layer(name=f"engine {artifact}", kind="Convolution", precision="f32", time_ms=1.0, origin=())]


CALM, HELD_UP, WORSE = (1.0, 1.0, 1.05, 1.0), (1.0, 1.0, 2.0, 1.0), (1.0, 1.0, 9.0, 1.0)


@pytest.mark.parametrize(
    ("engines", "built", "kept"),
    [((CALM,), 1, "engine 0"), ((HELD_UP, CALM), 2, "engine 1"), ((WORSE, HELD_UP, WORSE), 3, "engine 1")],
)
def test_layer_times_disturbed_by_a_pause_are_repeated(engines, built, kept, tmp_path):
    runtime = PausingRuntime(*engines)
    found = time_layers(runtime, None, tmp_path, 4)
    assert [layer.name for layer in found.layers] == [kept]
    assert len(runtime.built) == built
    assert found.whole_ms == 1.0
