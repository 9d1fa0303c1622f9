"""Methods that do without a part of the harness, and external searchers, on simulated runtimes: what a user sees."""

from pathlib import Path

import pytest
from small import qdq
from stored import read_records

from harness.graph.builder import GraphBuilder
from harness.results.artifacts import read_finalists
from harness.results.journal import read_journal
from harness.results.lines import first_line
from harness.results.termination import Termination, read_termination

EXPERIMENT = """
experiment: parts
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.05, noise_seed: 1}}]
searchers:
  - random
  - {use: random, label: cold, without: [initial]}
  - {use: random, label: unshared, without: [sharing]}
  - {use: random, label: hasty, without: [racing, rebuilds]}
initial: [float, all, linear]
baselines: [all]
budget: {evaluations: [12]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    for name, channels in (("net", (8, 8, 8, 8)), ("bigger", (8, 8, 8, 8, 8, 8))):
        builder = GraphBuilder(name, seed=1)
        x = builder.input("x", (1, 8, 16, 16))
        for count in channels:
            x = builder.op("Add", x, builder.op("Relu", builder.conv(x, count, 3, pad=1)))
        builder.output(builder.op("GlobalAveragePool", x))
        builder.save(folder / f"{name}.onnx")
    return folder


def run(folder: Path, text: str, out: str) -> Path:
    (folder / f"{out}.yaml").write_text(text)
    assert qdq("run", str(folder / f"{out}.yaml"), "--out", str(folder / out)) == 0
    return folder / out


@pytest.fixture(scope="module")
def parts(folder):
    return run(folder, EXPERIMENT, "parts") / "net-simulated-int8"


def journal(task: Path, run_name: str):
    return list(read_journal(task / "runs" / f"{run_name}.jsonl"))


def test_search_without_initial_placements_starts_cold(parts):
    assert {entry.proposal.origin for entry in journal(parts, "cold-0")} == {"searcher"}
    assert "initial:linear" in {entry.proposal.origin for entry in journal(parts, "random-0")}


def test_without_sharing_every_region_has_choices_of_its_own(parts):
    shared, own = (len(journal(parts, name)[0].proposal.choices) for name in ("random-0", "unshared-0"))
    assert own > shared
    seeds = {
        e.proposal.origin: e.proposal.digest for e in journal(parts, "unshared-0") if e.proposal.origin != "searcher"
    }
    assert seeds == {
        e.proposal.origin: e.proposal.digest for e in journal(parts, "random-0") if e.proposal.origin in seeds
    }
    row = next(pick.row for pick in read_finalists(parts)[1] if pick.method == "unshared")
    assert row in {entry.proposal.digest for entry in journal(parts, "unshared-0")}


def test_search_without_racing_and_rebuilds_samples_in_full_once(parts):
    measured = [entry.result.outcome for entry in journal(parts, "hasty-0") if entry.result is not None]
    assert all(outcome.saved == 0 and outcome.rebuilt_ms == () for outcome in measured)
    with_care = [entry.result.outcome for entry in journal(parts, "random-0") if entry.result is not None]
    assert any(outcome.saved or outcome.rebuilt_ms for outcome in with_care)


def test_default_method_fingerprint_is_unchanged(parts):
    headers = {p.name.partition(".")[0]: read_records(p)[0] for p in (parts / "runs").glob("*.gz")}
    assert "without" not in str(headers["random-0"])
    assert "'without': ['initial']" in str(headers["cold-0"])


TRANSFER = """
experiment: transfer
models: [{use: net.onnx, calibration: {samples: 2}}, {use: bigger.onnx, calibration: {samples: 2}}]
backends:
  - {use: simulated, label: one, params: {seed: 5, noise: 0.0}}
  - {use: simulated, label: two, params: {seed: 6, noise: 0.0}}
searchers: [random]
transfer: [backends, models]
initial: [float, all, linear]
baselines: [all]
budget: {evaluations: [8]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def test_transfer_adds_best_placement_to_sibling_tasks(folder):
    out = run(folder, TRANSFER, "transfer")
    found = {}
    for task in ("net-one-int8", "net-two-int8", "bigger-one-int8"):
        rows, picks = read_finalists(out / task)
        found[task] = {pick.method: pick for pick in picks}
        assert (out / task / "patterns.yaml").exists()
        assert all(pick.row in {row.id for row in rows} for pick in picks if pick.row)
    assert found["net-one-int8"]["from_two"].row == found["net-two-int8"]["random"].row
    assert found["net-two-int8"]["from_one"].row == found["net-one-int8"]["random"].row
    assert found["bigger-one-int8"]["from_net"].row, "both are made of the same block"
    assert "from_one" not in found["bigger-one-int8"]
    assert "| from_two" in (out / "report" / "main.md").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("searchers: [modelot]", "no searcher or external searcher is called 'modelot'; did you mean 'modelopt'?"),
        (
            "searchers: [{use: modelopt, params: {schemes: 3}}]",
            "external searcher 'modelopt' has no parameter 'schemes'",
        ),
        ("searchers: [{use: modelopt, params: {task: 3}}]", "'task' is set by the harness"),
        ("searchers: [{use: modelopt, without: [initial]}]", "has no effect on it"),
        ("searchers: [{use: modelopt, params: {schemes_per_region: 0}}]", "schemes_per_region is at least 1"),
        ("searchers: [{use: modelopt, params: {qdq_baseline: ort_static}}]", "add it there"),
        ("searchers: [{use: modelopt, params: {qdq_baseline: nowhere.onnx}}]", "no such file"),
        ("searchers: [{use: auto, without: [seed]}]", "Input should be 'initial', 'sharing', 'racing' or 'rebuilds'"),
        ("searchers: [{use: auto, without: [initial, initial]}]", "'initial' appears twice"),
        ("searchers: [{use: auto, with: [initial]}]", "unknown key; did you mean 'without'"),
        ("searchers: [auto]\ntransfer: [backend]", "transfer.0: Input should be 'backends' or 'models'"),
    ],
)
def test_check_refuses_invalid_methods(folder, capsys, line, message):
    text = "experiment: wrong\nmodels: [net.onnx]\nbackends: [simulated]\ninitial: [float]\nbaselines: [all]\n"
    (folder / "wrong.yaml").write_text(text + line + "\n")
    assert qdq("run", str(folder / "wrong.yaml"), "--check") == 2
    assert message in capsys.readouterr().err.replace("\n", " ")


PEER = '''
from contextlib import contextmanager
from pathlib import Path
from harness.plugins.api import Artifact, Capabilities
from harness.base.errors import BuildFailed
from harness.graph.builder import GraphBuilder


class Scales:
    """A model takes a microsecond a byte."""

    capabilities = Capabilities(dialect="openvino", in_process=True)

    def build(self, candidate, workdir):
        return Artifact(engine=candidate.source().stat().st_size / 1000)

    @contextmanager
    def open(self, artifact):
        self.latency_ms = artifact.engine
        yield self

    def sample(self, n):
        return [self.latency_ms] * n

    def describe(self):
        return {"name": "scales", "version": "1", "device": "scales", "options": {}, "float_precision": "f32"}


class Bringer:
    """Brings one model a channel count; breaks at the last."""

    kind = "external searcher"

    def __init__(self, task, *, channels):
        self._task, self._left = task, list(channels)

    def __enter__(self):
        self._task.workdir.mkdir(parents=True)
        return self

    def __exit__(self, *_):
        pass

    def ask(self):
        if not self._left:
            return None
        count = self._left.pop(0)
        if not count:
            raise BuildFailed("no channels, no model")
        builder = GraphBuilder("brought", seed=count)
        x = builder.input("x", (1, 8, 16, 16))
        builder.output(builder.conv(x, count, 3, pad=1))
        return builder.save(self._task.workdir / "next.onnx")

    def tell(self, latency_ms):
        with Path(__file__).with_name("told.txt").open("a") as told:
            told.write(f"{latency_ms:.2f} ")


class Tells(Bringer):
    def tell(self, latency_ms):
        raise BuildFailed("its process is gone")


class Leaves(Bringer):
    def __exit__(self, *_):
        raise RuntimeError("its process stays")
'''


def test_external_searcher_is_journalled_and_resumed(folder, capsys):
    (folder / "bringing.py").write_text(PEER)
    text = "experiment: peer\nmodels: [{use: net.onnx, calibration: {samples: 2}}]\n"
    text += "backends: [{use: 'bringing:Scales', label: scales}]\nsearchers:\n"
    text += "  - {use: 'bringing:Bringer', label: peer, params: {channels: [4, 5, 4, 6, 0, 7]}}\n"
    text += "  - {use: 'bringing:Bringer', label: broken, params: {channels: [0]}}\n"
    text += "initial: [float]" + EXPERIMENT.partition("initial: [float, all, linear]")[2]
    task = run(folder, text, "peer") / "net-scales-int8"
    entries = journal(task, "peer-0")
    assert [entry.proposal.choices for entry in entries] == [(0,), (1,), (2,), (3,), (4,)]
    assert [entry.proposal.duplicate_of for entry in entries] == [None, None, 0, None, None]
    assert entries[4].result.outcome.reason == "no channels, no model"
    picks = {pick.method: pick for pick in read_finalists(task)[1]}
    assert picks["broken"].reason == "nothing measured; build: no channels, no model"
    assert picks["peer"].row == "float", "none of them has a Q/DQ pair"
    before = (folder / "told.txt").read_text()
    capsys.readouterr()
    assert qdq("run", str(folder / "peer.yaml"), "--out", str(folder / "peer")) == 0
    assert "net-scales-int8: nothing is left to do" in capsys.readouterr().err
    assert (folder / "told.txt").read_text() == before, "a finished task does not ask its external searchers again"
    (task / "confirmation.jsonl.gz").unlink()
    assert qdq("run", str(folder / "peer.yaml"), "--out", str(folder / "peer")) == 0
    assert first_line(task / "confirmation.jsonl")
    assert journal(task, "peer-0") == entries
    assert (folder / "told.txt").read_text() == 2 * before, "a resumed external searcher receives the same again"


def test_external_searcher_failing_in_tell_or_exit_ends_alone(folder, capsys):
    (folder / "bringing.py").write_text(PEER)
    text = "experiment: leaving\nmodels: [{use: net.onnx, calibration: {samples: 2}}]\n"
    text += "backends: [{use: 'bringing:Scales', label: scales}]\nsearchers:\n"
    for name in ("Tells", "Leaves", "Bringer"):
        text += f"  - {{use: 'bringing:{name}', label: {name}, params: {{channels: [4, 5, 6]}}}}\n"
    text += "initial: [float]" + EXPERIMENT.partition("initial: [float, all, linear]")[2]
    (folder / "leaving.yaml").write_text(text)
    assert qdq("run", str(folder / "leaving.yaml"), "--out", str(folder / "leaving")) == 1
    task = folder / "leaving" / "net-scales-int8"
    told, left = (task / "runs" / f"{name}-0.jsonl" for name in ("Tells", "Leaves"))
    assert [len(journal(task, f"{name}-0")) for name in ("Tells", "Leaves", "Bringer")] == [1, 3, 3]
    assert {pick.method: pick.row for pick in read_finalists(task)[1]}["Leaves"], "what it found by then is compared"
    assert read_termination(told) == Termination(reason="failed at 1 of 12: its process is gone", failed=True)
    assert told.with_suffix(".failed.txt").read_text() == "failed at 1 of 12: its process is gone\n"
    trace = left.with_suffix(".failed.txt")
    said = "failed at 3 of 12: on leaving: RuntimeError: its process stays"
    assert read_termination(left) == Termination(reason=said, failed=True, traceback_file=trace)
    assert "in __exit__" in trace.read_text()
    last = capsys.readouterr().err.rpartition("qdq: ")[2]
    assert last.startswith("net-scales-int8 Tells-0 failed at 1 of 12: its process is gone\n"), "there is no traceback"
    assert f"net-scales-int8 Leaves-0 {said} (traceback: {trace}); all other work is done" in last
    report = (folder / "leaving" / "report" / "main.md").read_text().replace("\\", "")
    assert "Tells-0 failed at 1 of 12: its process is gone." in report
    assert f"Leaves-0 {said}; traceback: net-scales-int8/runs/Leaves-0.failed.txt." in report
