"""ModelOpt's own autotuner, driven through the contract of peers; the process is real, the latencies are made up."""

import hashlib
import os
from pathlib import Path

import pytest

from harness.base.errors import BuildFailed
from harness.graph.builder import GraphBuilder
from harness.graph.qdq.qdq_graph import count_pairs
from harness.plugins.api import ExternalSearchTask
from harness.run.search.external.modelopt import ModelOptAutotune


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 16, 16))
    for channels in (8, 12):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    builder.output(builder.op("Add", x, builder.conv(x, 12, 1)))
    return builder.save(tmp_path_factory.mktemp("external searcher") / "net.onnx")


def task(model: Path, workdir: Path) -> ExternalSearchTask:
    return ExternalSearchTask(model=model, workdir=workdir, precision="int8", seed=3, find=Path)


def walk(peer: ModelOptAutotune, most: int = 100) -> list[tuple[str, int]]:
    """Digest and Q/DQ pairs of each model; more pairs take less time."""
    found = []
    while len(found) < most and (path := peer.ask()) is not None:
        pairs = count_pairs(path)
        found.append((hashlib.sha256(path.read_bytes()).hexdigest(), pairs))
        peer.tell(10.0 - 0.1 * pairs if len(found) != 3 else None)
    return found


@pytest.fixture(scope="module")
def walked(model, tmp_path_factory):
    """A whole walk, and the folder that it left."""
    folder = tmp_path_factory.mktemp("walked")
    with ModelOptAutotune(task(model, folder), schemes_per_region=3) as peer:
        return folder, walk(peer)


def test_modelopt_delivers_baseline_schemes_and_best_in_order(walked):
    pairs = [count for _, count in walked[1]]
    assert pairs[:2] == [0, 0], "the baseline, and its first scheme, which is empty"
    assert pairs[-1] == max(pairs) > 0, "the best of each pattern, which here is the one with most pairs"
    assert len(pairs) > 5


def test_the_same_seed_and_latencies_give_the_same_files(model, walked):
    folder, found = walked
    with ModelOptAutotune(task(model, folder), schemes_per_region=3) as peer:
        assert walk(peer, 5) == found[:5], "and what the first walk left in the folder is not gone on with"


def test_modelopt_failure_quotes_its_error(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no model")
    with (
        ModelOptAutotune(task(broken, tmp_path / "work")) as peer,
        pytest.raises(BuildFailed, match=r"modelopt: DecodeError: "),
    ):
        peer.ask()


def test_killed_child_process_is_a_failed_build(model, tmp_path):
    with ModelOptAutotune(task(model, tmp_path / "work")) as peer:
        os.kill(peer._process.pid, 9)
        with pytest.raises(BuildFailed, match=r"modelopt: ended with status -9; its last output: "):
            peer.ask()
        peer.tell(1.0)


def test_a_child_that_takes_too_long_is_a_failure(model, tmp_path):
    with (
        ModelOptAutotune(task(model, tmp_path / "work"), limit_s=0.01) as peer,
        pytest.raises(BuildFailed, match=r"modelopt: no model within 0.01 s"),
    ):
        peer.ask()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"schemes_per_region": 0}, "schemes_per_region is at least 1, but got 0"),
        ({"limit_s": 0.0}, "limit_s is above 0, but got 0.0"),
    ],
)
def test_invalid_settings_are_refused(model, tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        ModelOptAutotune(task(model, tmp_path), **setting)
