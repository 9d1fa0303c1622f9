"""Workflow from a float model to an optimized one: files, limits, resume after Ctrl-C, and the delivered model."""

import json
import re
import sys
from contextlib import closing

import numpy as np
import onnx
import pytest

from harness.base.errors import UserError
from harness.cli.main import main
from harness.compat.modelopt_autotune import workflows
from harness.compat.modelopt_autotune.benchmark import init_benchmark_instance
from harness.compat.modelopt_autotune.workflows import region_pattern_autotuning_workflow
from harness.config.yaml_loader import read_cache_file
from harness.graph.pattern_cache import read_cache
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.runtimes.simulated import SimulatedBenchmarker


def edges_in(path):
    return sorted(QDQGraph(onnx.load(path)).edges.items())


def consumers(candidate):
    return {edge.consumer for edge, _ in candidate.edges}


def digests(runtime):
    return [candidate.digest for candidate in runtime.measured]


def test_output_files_and_folders(folder, tune, confirmed):
    tune("-s", "4")
    out = folder / "out"
    assert {path.name for path in out.iterdir()} - {"not_faster.onnx"} == {
        "autotuner_state.yaml", "autotuner_state_pattern_cache.yaml", "baseline.onnx", "optimized_final.onnx", "logs",
        "region_models",
    }  # fmt: skip
    logs = {path.name for path in (out / "logs").iterdir()}
    assert {"baseline.log", "final.log"} <= logs
    assert any(name.startswith("region_") and "_scheme_" in name for name in logs)
    models = [path.name for path in (out / "region_models").iterdir()]
    assert [name for name in models if "_level_" in name] == models != []
    assert edges_in(out / "baseline.onnx") == []
    best = min(tune.runtime.measured, key=tune.runtime.truth_ms)
    assert edges_in(confirmed()) == list(best.edges) != []
    assert "speedup, 95 % interval" in (out / "logs/final.log").read_text()
    assert read_cache(out / "autotuner_state_pattern_cache.yaml").origins[0].backend == "simulated"


def test_interrupted_run_resumes_to_the_same_result(folder, tune):
    tune("-s", "5", out="whole")
    expected = digests(tune.runtime)
    tune.runtime.measured.clear()
    tune.runtime.stop_after = len(expected) // 2
    assert "run the same command again" in tune("-s", "5", out="parts", code=130)
    assert (folder / "parts/autotuner_state.yaml").exists()
    tune.runtime.stop_after = None
    assert "resuming from parts/autotuner_state.yaml" in tune("-s", "5", out="parts")
    assert digests(tune.runtime) == expected
    assert (folder / "parts/optimized_final.onnx").read_bytes() == (folder / "whole/optimized_final.onnx").read_bytes()


def test_interruption_before_measurements_is_reported(folder, tune):
    tune.runtime.stop_after = 0
    assert "interrupted; nothing was measured yet: run the same command again" in tune(code=130)
    assert not (folder / "out/autotuner_state.yaml").exists()


def test_finished_run_repeats_the_final_measurement_only(folder, tune):
    for count in (None, 1):
        tune.runtime.measured.clear()
        tune("-s", "3", "--state_file", "elsewhere.yaml")
        assert count is None or len(tune.runtime.measured) == count
    assert (folder / "elsewhere.yaml").exists()
    assert (folder / "elsewhere_pattern_cache.yaml").exists()


def test_max_evals_and_seed_are_respected(tune, measured):
    tune("--max_evals", "9", out="a")
    tune("--max_evals", "9", "--seed", "1", out="b")
    assert len(measured("a")) == 9
    assert "all left out (max_evals)" in tune("--max_evals", "2", out="c")
    assert len(measured("c")) == 2
    assert list(measured("a")) != list(measured("b"))


def test_larger_max_evals_continues_the_shorter_run(tune, measured, confirmed):
    tune.runtime.generous = True
    tune("--max_evals", "25", "-s", "6", out="whole")
    expected = set(digests(tune.runtime))
    tune.runtime.measured.clear()
    for limit in (4, 4, 9, 25):
        tune("--max_evals", limit, "-s", "6", out="parts")
        assert len(measured("parts")) <= limit
    assert len(measured("parts")) == len(measured("whole"))
    assert set(digests(tune.runtime)) == expected
    before = confirmed("parts").read_bytes()
    assert before == confirmed("whole").read_bytes()
    tune("--max_evals", "25", "-s", "6", out="parts")
    assert confirmed("parts").read_bytes() == before, "the same limit again comes to the same"


def test_node_filter_on_resume_makes_done_patterns_float(folder, tune):
    tune.runtime.generous = True
    tune("-s", "4")
    (folder / "filter.txt").write_text("# the stem alone\n\nstem*\n")
    tune.runtime.measured.clear()
    tune("-s", "4", "--node_filter_list", "filter.txt")
    quantized = consumers(tune.runtime.measured[-1])
    assert any(name.startswith("stem") for name in quantized)
    assert not any(name.startswith("block1") for name in quantized), "block0 reads what leaves the stem"


def test_searcher_option_searches_the_whole_model(folder, tune, measured):
    tune("--searcher", "evolutionary", "--max_evals", "20")
    assert len(measured()) == 20
    assert len({each["signature"] for each in measured().values()} - {""}) == 1
    assert len(read_cache(folder / "out/autotuner_state_pattern_cache.yaml").patterns) > 1


def test_warm_start_measures_cached_schemes_and_names_origin(folder, tune, make_small):
    runtime = tune.runtime
    tune("-s", "20", out="first")
    best_ms = min(runtime.truth_ms(candidate) for candidate in runtime.measured)
    runtime.measured.clear()
    cache = folder / "first/autotuner_state_pattern_cache.yaml"
    assert "measured with" not in tune("--max_evals", "6", "--pattern_cache", cache, out="second")
    assert runtime.truth_ms(runtime.measured[3]) == pytest.approx(best_ms)
    (folder / "away.yaml").write_text(cache.read_text().replace("backend: simulated", "backend: tensorrt"))
    make_small(5).save(folder / "deeper.onnx")
    printed = tune("-m", "deeper.onnx", "--max_evals", "6", "--pattern_cache", "away.yaml", out="third")
    assert "backend 'tensorrt' instead of 'simulated', so they may be slow here" in printed
    assert (folder / "third/logs/start_pattern_cache.log").exists()
    assert "backend 'tensorrt' instead of 'simulated'" in (folder / "third/logs/final.log").read_text()
    merged = read_cache(folder / "third/autotuner_state_pattern_cache.yaml")
    assert {origin.backend for origin in merged.origins} == {"simulated", "tensorrt"}


def test_a_qdq_baseline_is_one_of_the_starts(folder, tune):
    tune("-s", "10", out="first")
    final = folder / "first/optimized_final.onnx"
    tune.runtime.measured.clear()
    tune("--max_evals", "4", "--qdq_baseline", final, out="second")
    assert any(list(candidate.edges) == edges_in(final) for candidate in tune.runtime.measured[:4])


def test_changed_settings_are_named_on_resume(folder, tune):
    np.savez(folder / "data.npz", x=np.ones((4, 3, 16, 16), np.float32))
    tune.runtime.generous = True
    tune("--max_evals", "4", "--calibration_data", "data.npz", "--searcher", "auto")
    printed = tune("--max_evals", "4", "--searcher", "tpe")
    assert "calibration_data was data.npz and is None: written models have the scales of the new" in printed
    assert "searcher was auto and is tpe: measurements of the other searcher are kept" in printed


def test_final_selection_compares_the_fastest_models(folder, tune, confirmed):
    """In the search every pair is faster, in fresh builds not."""
    runtime, log = tune.runtime, folder / "out/logs/final_selection.jsonl"
    runtime.generous = True
    tune("--max_evals", "12")
    met = json.loads(log.read_text().splitlines()[0])["rows"]
    assert len(met) in (4, 5), "the four fastest models, and the result of the search"
    read = sorted(runtime.measured, key=runtime.truth_ms)
    rivals = {candidate.digest: runtime.truth_ms(candidate) for candidate in read}
    assert max(rivals[digest] for digest in met) <= runtime.truth_ms(read[4]), "of equals any"
    fresh = SimulatedBenchmarker()  # what the worker of the fresh builds has
    truth_ms = {c.digest: fresh.truth_ms(c.edges) for c in read if c.digest in met}
    (digest,) = {candidate.digest for candidate in read if list(candidate.edges) == edges_in(confirmed())}
    assert truth_ms[digest] <= 1.01 * min(truth_ms.values()) < 0.98 * max(truth_ms.values())
    before = log.read_bytes()
    tune("--max_evals", "12")
    assert log.read_bytes() == before, "a finished selection is not repeated"


def test_failed_selection_falls_back_to_the_lowest_latency(tune, confirmed, monkeypatch):
    def refused(*arguments):
        raise UserError("the baseline failed in the confirmation: memory: more than 16 GB")

    monkeypatch.setattr(workflows, "select_winner", refused)
    tune.runtime.generous = True
    printed = tune("--max_evals", "12")
    assert (
        "No final selection of the fastest 4, the model with the lowest reading is used: the baseline failed" in printed
    )
    fastest = max(tune.runtime.measured[:12], key=lambda candidate: len(candidate.edges))
    assert edges_in(confirmed()) == list(fastest.edges)


def test_delivered_model_equals_the_autotuners_best(folder, benchmark_instance):
    benchmark_instance.generous = True
    autotuner = region_pattern_autotuning_workflow(str(folder / "model.onnx"), folder / "out", 4)
    assert autotuner.delivered is not None
    autotuner.export_onnx(str(folder / "best.onnx"), best=True)
    assert edges_in(folder / "best.onnx") == edges_in(folder / "out/optimized_final.onnx")
    assert bool(edges_in(folder / "best.onnx")) == any(autotuner.placement(best=True).choices)


@pytest.mark.parametrize("faster", [False, True])
def test_float_model_is_delivered_unless_proven_faster(folder, tune, monkeypatch, faster):
    out = folder / "out"
    out.mkdir()
    (out / "not_faster.onnx").write_text("of an earlier run")
    tune.runtime.generous = True  # while it is searched; fresh builds of a worker know nothing of that
    monkeypatch.setattr(workflows, "is_proven_faster", lambda summary: faster)
    printed = tune("--max_evals", "3")
    assert not (out / "unproved.onnx").exists()
    assert re.search(r"The reading of the search was \d+\.\d{3}x: ", (out / "logs/final.log").read_text())
    if faster:
        assert edges_in(out / "optimized_final.onnx")
        assert not (out / "not_faster.onnx").exists()
        assert "accuracy is unknown: give --calibration_data" in printed
    else:
        assert (out / "optimized_final.onnx").read_bytes() == (out / "baseline.onnx").read_bytes()
        assert edges_in(out / "not_faster.onnx")
        assert "optimized_final.onnx is that model; the one with Q/DQ pairs is kept as not_faster.onnx" in printed


def test_interrupted_confirmation_delivers_nothing(folder, tune, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    tune.runtime.generous = True
    monkeypatch.setattr(workflows, "run_comparison", interrupted)
    tune("--max_evals", "3", code=130)
    assert not (folder / "out/optimized_final.onnx").exists()


def test_float_model_is_delivered_if_all_candidates_fail(folder, tune):
    tune.runtime.broken = True
    assert "Final: the float model, because no placement" in tune("-s", "3")
    assert (folder / "out/optimized_final.onnx").read_bytes() == (folder / "out/baseline.onnx").read_bytes()


def test_workflow_accepts_both_model_arguments_and_a_transform(folder, benchmark_instance, model):
    seen = []

    def transform(proto):
        seen.append(proto)
        return proto

    for given in ({"model_path": "model.onnx"}, {"model_or_path": model, "model_transform": transform}):
        autotuner = region_pattern_autotuning_workflow(**given, num_schemes_per_region=2)
        assert autotuner.baseline_latency_ms == 10.0
        assert autotuner.profiled_patterns
    assert seen
    assert not list(folder.glob("*output*"))


def test_measurements_are_saved_while_a_region_is_under_profile(folder, benchmark_instance, monkeypatch):
    monkeypatch.setattr(workflows, "STATE_SAVE_INTERVAL_S", -1.0)
    saved = []
    original = workflows.QDQAutotuner.save_state
    monkeypatch.setattr(
        workflows.QDQAutotuner, "save_state", lambda self, path: (saved.append(path), original(self, path))
    )
    region_pattern_autotuning_workflow("model.onnx", folder / "out", num_schemes_per_region=3)
    assert len(saved) > 6


BACKEND = '''
"""Latencies by formula, on a machine whose pace jumps between 1 and 4: all that is timed at once shares it."""

from contextlib import contextmanager

import numpy as np

from harness.plugins.api import Artifact, Capabilities
from harness.runtimes.simulated import SimulatedBenchmarker


class Probe:
    def __init__(self, truth_ms):
        self.truth_ms = truth_ms

    def sample(self, n):
        pace = Restless.pace()
        return [self.truth_ms * pace * float(np.exp(0.2 * Restless.rng.standard_normal())) for _ in range(n)]


class Restless:
    capabilities = Capabilities(dialect="openvino")
    calls = 0

    @classmethod
    def pace(cls):
        cls.calls += 1
        return 4.0 if cls.calls // 40 % 2 else 1.0

    def build(self, candidate, workdir):
        Restless.calls, Restless.rng = 0, np.random.default_rng(7)  # as in a worker of its own
        truth_ms = SimulatedBenchmarker(seed=5).truth_ms(candidate.edges)
        return Artifact(engine=Probe(truth_ms), info={"truth_ms": truth_ms})

    @contextmanager
    def open(self, artifact):
        yield artifact.engine

    def describe(self):
        return {"name": "restless", "version": "1", "device": "simulated", "float_precision": "f32"}
'''


@pytest.fixture
def machine(folder, monkeypatch):
    """A working folder with a model and a runtime on such a machine."""
    (folder / "restless.py").write_text(BACKEND)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    yield folder
    sys.modules.pop("restless", None)


def run(*more: str) -> None:
    main(["autotune", "-m", "model.onnx", "--backend", "restless:Restless", "--mode", "quick", "-o", "out", *more])


def test_noisy_machine_interleaves_models_with_the_float_model(machine, capsys):
    run("--max_evals", "6")
    printed = capsys.readouterr().err
    kept = read_cache_file(machine / "out/autotuner_state.yaml", "a state")
    scale = kept["baseline_latency_ms"]
    assert kept["interleaved"] is True
    assert f"timed in turns with the float model, whose {scale:.3f} ms set the scale" in printed
    logs = [path.read_text() for path in sorted((machine / "out/logs").glob("[rs]*.log"))]
    assert len(logs) == 5
    for log in logs:
        found = float(log.split()[1])
        truth = float(log.split('"truth_ms": ')[1].split("}")[0])
        assert found / scale == pytest.approx(truth / 10.0, rel=0.25)
        assert "reference_ms: [" in log
    assert re.search(rf"^baseline {scale:.3f} ms; starts: linear \d+\.\d+ ms \(0\.\d+x\), ", printed, re.M)
    run("--max_evals", "8")
    assert f"whose {scale:.3f} ms set the scale" in capsys.readouterr().err


def test_interleaving_ends_with_the_workflow(machine):
    with closing(init_benchmark_instance(backend="restless:Restless")) as benchmark:
        region_pattern_autotuning_workflow("model.onnx", "out", num_schemes_per_region=1)
        assert read_cache_file(machine / "out/autotuner_state.yaml", "a state")["interleaved"] is True
        benchmark.run("model.onnx", machine / "after.log")
    assert "reference_ms: [" in next((machine / "out/logs").glob("start_*.log")).read_text()
    assert "reference_ms: [" not in (machine / "after.log").read_text()
