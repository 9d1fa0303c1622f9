"""A search that starts from the placement of a tool's model may choose that model, if its form is faster."""

import numpy as np
import onnx
import pandas as pd
import pytest
from small import qdq, save_chain
from stored import forget_task, read_records

from harness.graph.io.digests import digest_file
from harness.graph.load import load
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import load_dialect
from harness.results.artifacts import read_finalists
from harness.results.search_log import Evaluation
from harness.run.prepare.methods import WarmStartModel
from harness.run.select.final_selection import rank_finalists

PLUGINS = """
import numpy as np
import onnx
from harness.runtimes.simulated import SimulatedBenchmarker
from harness.base.errors import BuildFailed
from harness.accuracy.metrics.fidelity import Fidelity


class Bench(SimulatedBenchmarker):
    '''Placements as the simulated runtime has them; a tool's model by what is written in its file.'''

    def build(self, candidate, workdir):
        word = onnx.load(candidate.source()).doc_string
        if word == "refused":
            raise BuildFailed("a form that no runtime takes")
        built = super().build(candidate, workdir)
        if word == "fast form":
            built.engine._latency_ms = self.base_ms / 5
        built.engine.infer = lambda feeds: {"y": np.array([[1.0, 10.0]], np.float32)}
        return built


class Near(Fidelity):
    metric = "cosine"

    def __init__(self, reference, inputs, data, base=None):
        super().__init__(reference, inputs, data, samples=8, base=base)
"""
EXPERIMENT = """
experiment: told
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: 'form_plugins:Bench', label: bench, params: {seed: 5, noise: 0.0}}]
searchers: [random, {use: random, label: told_nothing, without: [initial]}]
initial: [float, {use: import, params: {path: WORD.onnx}, label: mine}]
baselines: [mine]
budget: {evaluations: [1, 12]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""
TASK = "net-bench-int8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("told")
    save_chain(folder / "net.onnx", (8, 8, 12, 12, 12, 8))
    model, dialect = load(folder / "net.onnx"), load_dialect("openvino")
    space = build_space(model, dialect)
    ranges = {edge.tensor: (-1.0, 1.0) for d in space.dimensions for edge in d.edges}
    path = folder / "mine.onnx"
    Inserter(model, dialect, ranges).export(space.resolve(space.quantize_all()), path)
    for word in ("fast form", "slow form", "refused"):
        proto = onnx.load(path)
        proto.doc_string = word
        onnx.save(proto, folder / f"{word.split()[0]}.onnx")
    (folder / "form_plugins.py").write_text(PLUGINS)
    return folder


def run(folder, word, *more, out=None):
    path = folder / f"{word}.yaml"
    path.write_text("\n".join((EXPERIMENT.replace("WORD", word), *more)))
    out = out or folder / f"out-{word}"
    assert qdq("run", str(path), "--out", str(out)) == 0
    return out


def choices(out):
    """Row of each search at each budget."""
    picks = read_finalists(out / TASK)[1]
    return {(pick.method, pick.budget): pick for pick in picks if pick.kind == "search"}


@pytest.fixture(scope="module")
def fast(folder):
    return run(folder, "fast")


def test_faster_tool_model_is_selected_by_warm_started_search(fast, folder):
    found = choices(fast)
    assert found["random", 12].row == "mine"
    assert found["random", 12].search_ms is None, "no search has evaluated that file"
    assert found["random", 12].final_selection == pytest.approx(5.0)
    assert found["told_nothing", 12].row not in {"mine", ""}
    assert digest_file(fast / TASK / "models" / "mine.onnx") == digest_file(folder / "fast.onnx")
    table = pd.read_csv(fast / "report" / "main.csv").set_index("method")
    assert table.loc["random", "speedup"] == table.loc["mine", "speedup"] == pytest.approx(5.0)
    assert "the same placement" in (fast / "report" / "fixed.md").read_text()
    assert qdq("report", str(fast), "--trace", "mine:speedup") == 0


def test_tool_model_needs_its_placement_evaluated_first(fast):
    """With a budget of one evaluation a search has seen the float model alone."""
    assert choices(fast)["random", 1].row == "float"


def test_targets_count_evaluations_with_tool_model_selected(folder, tmp_path):
    """The chosen file was not evaluated: goals are shares of the best row that met it in the final selection."""
    path, out = folder / "gaining.yaml", tmp_path / "out"
    path.write_text(EXPERIMENT.replace("WORD", "fast").replace("noise: 0.0", "noise: 0.0, wanted_share: 1.0"))
    assert qdq("run", str(path), "--out", str(out)) == 0
    assert choices(out)["random", 12].row == "mine"
    table = pd.read_csv(out / "report" / "targets.csv").set_index(["searcher", "share"])
    assert table.loc[("random", 0.99), "evaluations"] <= 12


def test_duplicate_initial_placement_counts_as_evaluated(folder, tmp_path):
    """Of two starts that are one placement the second costs no budget, so that fewer evaluations suffice."""
    path = folder / "twice.yaml"
    text = EXPERIMENT.replace("WORD", "fast").replace("initial: [float, {", "initial: [float, all, {")
    path.write_text(text.replace("evaluations: [1, 12]", "evaluations: [1, 2, 12]"))
    assert qdq("run", str(path), "--out", str(tmp_path / "out")) == 0
    found = choices(tmp_path / "out")
    assert (found["random", 1].row, found["random", 2].row) == ("float", "mine")


def test_repeated_run_selects_same_model_without_timing(fast, folder):
    record = (fast / TASK / "final_selection.jsonl.gz").read_bytes()
    forget_task(fast / TASK)
    run(folder, "fast", out=fast)
    assert (fast / TASK / "final_selection.jsonl.gz").read_bytes() == record
    assert choices(fast)["random", 12].row == "mine"


def test_final_selection_records_digest_of_tool_model(fast, folder):
    header = read_records(fast / TASK / "final_selection.jsonl")[0]
    assert header["told"] == {"mine": digest_file(folder / "fast.onnx")}


def test_tool_model_of_other_precision_is_not_selected(folder, tmp_path):
    """Its row would be called FP8; the import as a start does not decide the precision of its file."""
    path = folder / "fp8.yaml"
    path.write_text(EXPERIMENT.replace("WORD", "fast").replace("baselines: [mine]", "precision: [fp8]"))
    assert qdq("run", str(path), "--out", str(tmp_path / "out")) == 0
    found = {
        pick.method: pick.row for pick in read_finalists(tmp_path / "out" / "net-bench-fp8")[1] if pick.budget == 12
    }
    assert set(found) == {"random", "told_nothing"}
    assert "mine" not in found.values()


def test_slow_tool_model_is_not_selected(folder):
    out = run(folder, "slow")
    assert choices(out)["random", 12].row not in {"mine", ""}
    met = read_records(out / TASK / "final_selection.jsonl")[0]["rows"]
    assert "mine" in met


def test_failed_tool_model_leaves_selection_to_evaluated(folder, capsys):
    out = run(folder, "refused")
    assert choices(out)["random", 12].row not in {"mine", ""}
    assert "final selection: mine failed: build: a form that no runtime takes" in capsys.readouterr().err.replace(
        "\n", " "
    )


@pytest.mark.parametrize(
    ("close", "losses", "first"),
    [
        (["aa", "bb", "mine"], {}, "bb"),
        (["mine"], {}, "mine"),
        (["aa"], {}, "aa"),
        (["aa", "bb", "mine"], {"aa": 0.002, "bb": 0.004, "mine": 0.003}, "aa"),
        (["aa", "bb", "mine"], {"aa": 0.004, "bb": 0.004, "mine": 0.003}, "mine"),
        (["aa", "bb", "mine"], {"aa": 0.004, "bb": 0.004, "mine": 0.004}, "mine"),
    ],
)
def test_tool_model_is_selected_if_faster_and_ties_are_ranked_by_loss(close, losses, first, tmp_path):
    leaders = [
        *(
            Evaluation(evaluations=1, elapsed_s=1.0, digest=d, choices=(1,), origin="", latency_ms=1.0, score=None)
            for d in ("aa", "bb")
        ),
        WarmStartModel(digest="mine", placement_digest="0", path=tmp_path / "mine.onnx", pairs=1),
    ]
    ordered = rank_finalists(leaders, close, {"aa": 2.0, "bb": 2.1, "mine": 2.2}, losses)
    assert ordered[0].digest == first


def test_tool_model_is_not_selected_without_final_selection(folder, tmp_path):
    text = EXPERIMENT.replace("samples: 3}", "samples: 3, candidates: 1}", 1)
    path = folder / "alone.yaml"
    path.write_text(text.replace("WORD", "fast"))
    assert qdq("run", str(path), "--out", str(tmp_path / "out")) == 0
    assert choices(tmp_path / "out")["random", 12].row not in {"mine", ""}


def test_unscored_tool_model_is_not_selected_under_accuracy_bound(folder, tmp_path):
    rng = np.random.default_rng(0)
    np.savez(folder / "labelled.npz", x=rng.normal(size=(8, 3, 16, 16)).astype(np.float32))
    path = folder / "bound.yaml"
    text = EXPERIMENT.replace("WORD", "fast").replace(
        "samples: 2}}]",
        "samples: 2}, evaluator: {use: 'form_plugins:Near', params: {data: {use: npz, path: labelled.npz}}}}]",
    )
    path.write_text(text + "objective: {max_drop: 1.0}\n")
    assert qdq("run", str(path), "--out", str(tmp_path / "out")) == 0
    assert choices(tmp_path / "out")["random", 12].row not in {"mine", ""}
