"""The command line: flags and defaults, files, going on after Ctrl-C, and what it says to mistakes."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest

from harness.cli.main import main
from harness.compat.modelopt_autotune import MODE_PRESETS, delivery, get_node_filter_list, workflows
from harness.compat.modelopt_autotune.benchmark import (
    Benchmark,
    backend_spec,
    benchmark_onnx_model,
    init_benchmark_instance,
    split_arguments,
)
from harness.compat.modelopt_autotune.delivery import AutotuneResult, summary_lines
from harness.compat.modelopt_autotune.settings import (
    AutotunerError,
    AutotunerNotInitializedError,
    get_parser,
    select_mode_preset,
)
from harness.compat.modelopt_autotune.workflows import region_pattern_autotuning_workflow
from harness.config.sections import PluginSpec
from harness.errors import UserError
from harness.graph.builder import GraphBuilder
from harness.graph.pattern_cache import PatternCache
from harness.graph.pattern_cache_io import read_cache, read_plain_yaml
from harness.graph.qdq.read_edges import read_qdq_edges
from harness.records import Failed
from harness.runtimes.simulated import SimulatedBenchmarker
from harness.statistics import Interval
from harness.timing.confirmation import ConfirmationSummary, ContenderSummary


def qdq(*arguments):
    """Run `qdq autotune` on the simulated backend in this process; its exit code."""
    backend = () if "--backend" in arguments or "--use_trtexec" in arguments else ("--backend", "simulated")
    try:
        main(["autotune", *backend, *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def confirmed(out):
    """The model that was built afresh: fresh builds know nothing of what the runtime of a test likes."""
    kept = out / "not_faster.onnx"
    return kept if kept.exists() else out / "optimized_final.onnx"


def state(folder):
    return read_plain_yaml(folder / "autotuner_state.yaml", 1 << 24)


def test_a_misspelled_flag_is_told_at_once(capsys):
    assert qdq("--onnx_path", "m.onnx", "--mod", "quick") == 2
    assert "unrecognized arguments: --mod quick" in capsys.readouterr().err


def test_defaults_are_those_of_the_guide():
    options = get_parser().parse_args(["--onnx_path", "m.onnx"])
    assert options.output_dir == "./autotuner_output"
    assert (options.mode, options.quant_type, options.default_dq_dtype) == ("default", "int8", "float32")
    assert options.timing_cache.endswith("trtexec_timing.cache")
    assert (options.use_trtexec, options.verbose, options.plugin_libraries) == (False, False, None)
    assert select_mode_preset(options) == {"schemes_per_region": 50, "warmup_runs": 50, "timing_runs": 100}


@pytest.mark.parametrize("mode", list(MODE_PRESETS))
def test_a_mode_sets_what_was_not_given(mode):
    parse = get_parser().parse_args
    assert select_mode_preset(parse(["-m", "m", "--mode", mode])) == MODE_PRESETS[mode]
    given = select_mode_preset(parse(["-m", "m", "--mode", mode, "-s", "50", "--timing_runs", "7"]))
    assert given == {**MODE_PRESETS[mode], "schemes_per_region": 50, "timing_runs": 7}


def test_several_plug_in_libraries_follow_one_flag():
    options = get_parser().parse_args(["-m", "m", "--plugins", "a.so", "b.so", "-o", "out"])
    assert options.plugin_libraries == ["a.so", "b.so"]


def test_every_file_has_its_name_and_place(folder, runtime):
    assert qdq("-m", "model.onnx", "-s", "4") == 0
    out = folder / "autotuner_output"
    assert {path.name for path in out.iterdir()} - {"not_faster.onnx"} == {
        "autotuner_state.yaml", "autotuner_state_pattern_cache.yaml", "baseline.onnx", "optimized_final.onnx", "logs",
        "region_models",
    }  # fmt: skip
    logs = {path.name for path in (out / "logs").iterdir()}
    assert {"baseline.log", "final.log"} <= logs
    assert any(name.startswith("region_") and "_scheme_" in name for name in logs)
    assert all("_level_" in path.name for path in (out / "region_models").iterdir())
    final = confirmed(out)
    assert read_qdq_edges(onnx.load(final))
    assert read_qdq_edges(onnx.load(out / "baseline.onnx")) == {}
    best = min((c for c in runtime.measured), key=runtime.truth_ms)
    assert sorted(read_qdq_edges(onnx.load(final)).items()) == list(best.edges)
    assert "speedup, 95 % interval" in (out / "logs/final.log").read_text()
    assert read_cache(out / "autotuner_state_pattern_cache.yaml").origins[0].backend == "simulated"


def test_an_interrupted_run_goes_on_to_where_it_would_have_come(folder, runtime, capsys):
    assert qdq("-m", "model.onnx", "-s", "5", "-o", "whole") == 0
    expected = [candidate.digest for candidate in runtime.measured]
    runtime.measured.clear()
    runtime.stop_after = len(expected) // 2
    assert qdq("-m", "model.onnx", "-s", "5", "-o", "parts") == 130
    assert "run the same command again" in capsys.readouterr().err
    assert (folder / "parts/autotuner_state.yaml").exists()
    runtime.stop_after = None
    assert qdq("-m", "model.onnx", "-s", "5", "-o", "parts") == 0
    assert "going on with parts/autotuner_state.yaml" in capsys.readouterr().err
    assert [candidate.digest for candidate in runtime.measured] == expected
    assert (folder / "parts/optimized_final.onnx").read_bytes() == (folder / "whole/optimized_final.onnx").read_bytes()


def test_an_interruption_before_the_first_measurement_says_so(folder, runtime, capsys):
    runtime.stop_after = 0
    assert qdq("-m", "model.onnx") == 130
    assert "interrupted; nothing was measured yet: run the same command again" in capsys.readouterr().err
    assert not (folder / "autotuner_output/autotuner_state.yaml").exists()


def test_how_much_there_is_to_do_is_said_first(folder, runtime, capsys):
    assert qdq("-m", "model.onnx", "--max_evals", "3") == 0
    said = capsys.readouterr().err
    shown = r"^\d+ regions of \d+ patterns, \d+ insertion points \(.* outputs\), \d+ of them to be searched$"
    assert re.search(shown, said, re.M)


def test_a_finished_run_measures_its_result_alone_when_run_again(folder, runtime):
    assert qdq("-m", "model.onnx", "-s", "3", "--state_file", "elsewhere.yaml") == 0
    assert (folder / "elsewhere.yaml").exists()
    assert (folder / "elsewhere_pattern_cache.yaml").exists()
    runtime.measured.clear()
    assert qdq("-m", "model.onnx", "-s", "3", "--state_file", "elsewhere.yaml") == 0
    assert len(runtime.measured) == 1


def test_the_limit_on_measured_models_and_the_seed_hold(folder, runtime):
    assert qdq("-m", "model.onnx", "--max_evals", "9", "-o", "a") == 0
    assert len(state(folder / "a")["measured"]) == 9
    assert qdq("-m", "model.onnx", "--max_evals", "9", "-o", "b", "--seed", "1") == 0
    assert list(state(folder / "a")["measured"]) != list(state(folder / "b")["measured"])


@pytest.mark.parametrize("limit", [1, 2])
def test_starts_beyond_the_limit_are_left_out_and_named(folder, runtime, capsys, limit):
    assert qdq("-m", "model.onnx", "--max_evals", str(limit)) == 0
    assert len(state(folder / "autotuner_output")["measured"]) == limit
    assert "all left out (max_evals)" in capsys.readouterr().err


def test_a_filter_given_later_leaves_patterns_float_that_were_done_before(folder, runtime):
    runtime.generous = True
    assert qdq("-m", "model.onnx", "-s", "4") == 0
    (folder / "filter.txt").write_text("stem*\n")
    runtime.measured.clear()
    assert qdq("-m", "model.onnx", "-s", "4", "--node_filter_list", "filter.txt") == 0
    quantized = {edge.consumer for edge, _ in runtime.measured[-1].edges}
    assert quantized
    assert not any(name.startswith("block1") for name in quantized)


def test_a_searcher_gets_the_whole_model(folder, runtime):
    assert qdq("-m", "model.onnx", "--searcher", "evolutionary", "--max_evals", "20", "-o", "a") == 0
    measured = state(folder / "a")["measured"]
    assert len(measured) == 20
    assert len({each["signature"] for each in measured.values()} - {""}) == 1
    assert len(read_cache(folder / "a/autotuner_state_pattern_cache.yaml").patterns) > 1


def test_regions_without_a_matching_node_stay_float(folder, runtime):
    (folder / "filter.txt").write_text("# the stem alone\n\nstem*\n")
    assert get_node_filter_list("filter.txt") == ["stem*"]
    assert qdq("-m", "model.onnx", "-s", "4", "--node_filter_list", "filter.txt") == 0
    quantized = {edge.consumer for candidate in runtime.measured for edge, _ in candidate.edges}
    assert any(name.startswith("stem") for name in quantized)
    assert not any(name.startswith("block1") for name in quantized), "block0 reads what leaves the stem"


def test_a_warm_start_measures_what_the_cache_has_and_says_where_it_comes_from(folder, runtime, make_small, capsys):
    assert qdq("-m", "model.onnx", "-s", "20", "-o", "first") == 0
    best_ms = min(runtime.truth_ms(candidate) for candidate in runtime.measured)
    runtime.measured.clear()
    cache = folder / "first/autotuner_state_pattern_cache.yaml"
    assert qdq("-m", "model.onnx", "--max_evals", "6", "-o", "second", "--pattern_cache", str(cache)) == 0
    assert runtime.truth_ms(runtime.measured[3]) == pytest.approx(best_ms)
    assert "measured with" not in capsys.readouterr().err
    text = cache.read_text().replace("backend: simulated", "backend: tensorrt")
    (folder / "away.yaml").write_text(text)
    make_small(5).save(folder / "deeper.onnx")
    runtime.measured.clear()
    assert qdq("-m", "deeper.onnx", "--max_evals", "6", "-o", "third", "--pattern_cache", "away.yaml") == 0
    assert "backend 'tensorrt' instead of 'simulated': good starts at best" in capsys.readouterr().err
    assert (folder / "third/logs/start_pattern_cache_0.log").exists()
    assert "backend 'tensorrt' instead of 'simulated'" in (folder / "third/logs/final.log").read_text()
    merged = read_cache(folder / "third/autotuner_state_pattern_cache.yaml")
    assert {origin.backend for origin in merged.origins} == {"simulated", "tensorrt"}


def test_a_qdq_baseline_is_one_of_the_starts(folder, runtime):
    assert qdq("-m", "model.onnx", "-s", "10", "-o", "first") == 0
    final = "first/optimized_final.onnx"
    runtime.measured.clear()
    assert qdq("-m", "model.onnx", "--max_evals", "4", "-o", "second", "--qdq_baseline", final) == 0
    edges = sorted(read_qdq_edges(onnx.load(final)).items())
    assert any(list(candidate.edges) == edges for candidate in runtime.measured[:4])


def test_calibration_data_decide_the_scales(folder, runtime):
    runtime.generous = True
    for name, gain in (("small", 1.0), ("large", 100.0)):
        np.savez(folder / f"{name}.npz", x=np.full((2, 1, 3, 16, 16), gain, np.float32))
        assert qdq("-m", "model.onnx", "--max_evals", "3", "-o", name, "--calibration_data", f"{name}.npz") == 0

    def largest(out):
        proto = onnx.load(confirmed(folder / out))
        scales = [t for t in proto.graph.initializer if "scale" in t.name and not t.dims]
        return max(float(onnx.numpy_helper.to_array(t)) for t in scales)

    assert largest("large") > 10 * largest("small")


def test_calibration_data_that_do_not_fit_are_refused_before_anything_is_timed(folder, runtime, capsys, monkeypatch):
    monkeypatch.setattr("harness.compat.modelopt_autotune.__main__.select_float_baseline", pytest.fail)
    np.savez(folder / "odd.npz", x=np.zeros((2, 1, 3, 8, 8), np.float32))
    assert qdq("-m", "model.onnx", "--calibration_data", "odd.npz") == 2
    assert re.search(r"odd\.npz: a sample of array 'x' is 1 x 3 x 8 x 8, but the input takes", capsys.readouterr().err)


def test_the_fastest_meet_before_one_is_delivered(folder, runtime):
    """The search likes every pair; fresh builds know better."""
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "12") == 0
    out = folder / "autotuner_output"
    met = json.loads((out / "logs/runoff.jsonl").read_text().splitlines()[0])["rows"]
    assert len(met) in (4, 5), "the four that read fastest, and what the walk came to"
    read = sorted(runtime.measured, key=runtime.truth_ms)
    rivals = {candidate.digest: runtime.truth_ms(candidate) for candidate in read}
    assert max(rivals[digest] for digest in met) <= runtime.truth_ms(read[4]), "of equals any"
    fresh = SimulatedBenchmarker()  # what the worker of the fresh builds has
    truth_ms = {c.digest: fresh.truth_ms(c.edges) for c in read if c.digest in met}
    final = sorted(read_qdq_edges(onnx.load(confirmed(out))).items())
    (digest,) = {candidate.digest for candidate in read if list(candidate.edges) == final}
    assert truth_ms[digest] <= 1.01 * min(truth_ms.values()) < 0.98 * max(truth_ms.values())
    before = (out / "logs/runoff.jsonl").read_bytes()
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "12") == 0
    assert (out / "logs/runoff.jsonl").read_bytes() == before, "it is held once"


def test_a_runoff_that_cannot_be_held_leaves_the_choice_to_the_lowest_reading(folder, runtime, capsys, monkeypatch):
    def refused(*arguments):
        raise UserError("the baseline failed in the confirmation: memory: more than 16 GB")

    monkeypatch.setattr("harness.compat.modelopt_autotune.delivery.select_winner", refused)
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "12") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "No final selection of the fastest 4, the lowest reading chooses: the baseline failed" in said
    fastest = max(runtime.measured[:12], key=lambda candidate: len(candidate.edges))
    final = onnx.load(confirmed(folder / "autotuner_output"))
    assert sorted(read_qdq_edges(final).items()) == list(fastest.edges)


def test_what_is_delivered_is_what_the_autotuner_calls_its_best(folder, benchmark_instance):
    benchmark_instance.generous = True
    autotuner = region_pattern_autotuning_workflow(str(folder / "model.onnx"), folder / "out", 4)
    assert autotuner.delivered is not None
    autotuner.export_onnx(str(folder / "best.onnx"), best=True)
    final = onnx.load(folder / "out/optimized_final.onnx")
    assert read_qdq_edges(onnx.load(folder / "best.onnx")) == read_qdq_edges(final)
    assert bool(read_qdq_edges(final)) == any(autotuner.placement(best=True).choices)


def test_settings_that_changed_are_named_when_a_run_goes_on(folder, runtime, capsys):
    np.savez(folder / "data.npz", x=np.ones((4, 3, 16, 16), np.float32))
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "4", "--calibration_data", "data.npz", "--searcher", "auto") == 0
    capsys.readouterr()
    assert qdq("-m", "model.onnx", "--max_evals", "4", "--searcher", "tpe") == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "calibration_data was data.npz and is None: models that are written have the scales of the present" in said
    assert "searcher was auto and is tpe: measurements of the other searcher count" in said


@pytest.mark.parametrize(
    ("verdict", "pairs", "calibrated", "says"),
    [
        (
            "slower",
            7,
            False,
            "Slower than the float model, so final.onnx is that model; the one with Q/DQ pairs is kept",
        ),
        ("tie", 7, True, "Not faster beyond noise than the float model, so final.onnx is that model; the one with"),
        ("tie", 0, False, "Final: the float model, because no placement of Q/DQ pairs proved faster"),
        ("faster", 7, False, "Scales are of random data, so its accuracy is unknown: give --calibration_data"),
        ("faster", 7, True, "Its accuracy was not measured: qdq run does"),
    ],
)
def test_the_end_says_what_to_do_with_it(verdict, pairs, calibrated, says):
    one = Interval(value=1.0, low=0.9, high=1.1)
    row = ContenderSummary(latency_ms=one, speedup=one, verdict=verdict, builds=3, builds_ok=3)
    summary = ConfirmationSummary(floor=0.012, builds=3, rows={"baseline": row, "final": row}, failed={})
    kept = Path("out/kept.onnx") if pairs and verdict != "faster" else None
    file = Path("out/final.onnx")
    told = AutotuneResult(file=file, kept=kept, pairs=pairs, read=None, options="", calibrated=calibrated)
    said = list(summary_lines(summary, told))
    figures = f"{verdict}; 3 fresh builds in turns with the baseline, A/A floor 1.2 %), {pairs} Q/DQ pairs"
    assert (figures in said[1]) == (pairs > 0), "the float model has no speedup over itself"
    assert any(line.startswith(says) for line in said)


def test_a_lucky_reading_is_told_from_what_fresh_builds_say(folder, runtime):
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "3") == 0
    said = (folder / "autotuner_output/logs/final.log").read_text()
    assert re.search(r"The reading of the search was \d+\.\d{3}x: .* only the fresh builds count", said)


def test_what_does_not_prove_faster_is_kept_and_the_float_model_delivered(folder, runtime, capsys, monkeypatch):
    out = folder / "autotuner_output"
    runtime.generous = True  # while it is searched; fresh builds of a worker know nothing of that
    monkeypatch.setattr(delivery, "is_proven_faster", lambda summary: False)
    assert qdq("-m", "model.onnx", "--max_evals", "3") == 0
    assert (out / "optimized_final.onnx").read_bytes() == (out / "baseline.onnx").read_bytes()
    assert read_qdq_edges(onnx.load(out / "not_faster.onnx"))
    assert not (out / "unproved.onnx").exists()
    assert "so optimized_final.onnx is that model; the one with Q/DQ pairs is kept as not_faster.onnx" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_proves_faster_is_delivered_and_what_an_earlier_run_kept_goes(folder, runtime, monkeypatch):
    out = folder / "autotuner_output"
    out.mkdir()
    (out / "not_faster.onnx").write_text("of an earlier run")
    runtime.generous = True
    monkeypatch.setattr(delivery, "is_proven_faster", lambda summary: True)
    assert qdq("-m", "model.onnx", "--max_evals", "3") == 0
    assert read_qdq_edges(onnx.load(out / "optimized_final.onnx"))
    assert not {"not_faster.onnx", "unproved.onnx"}.intersection(path.name for path in out.iterdir())


def test_an_interruption_of_the_confirmation_delivers_nothing_unproved(folder, runtime, monkeypatch):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    runtime.generous = True
    monkeypatch.setattr(Benchmark, "confirm", interrupted)
    assert qdq("-m", "model.onnx", "--max_evals", "3") == 130
    assert not (folder / "autotuner_output/optimized_final.onnx").exists()


def test_a_float_model_that_cannot_be_timed_is_told_with_its_reason(folder, runtime, capsys, monkeypatch):
    failed = Failed(stage="build", reason="no kernel for Odd")
    monkeypatch.setattr(Benchmark, "measure", lambda self, *arguments: failed)
    assert qdq("-m", "model.onnx") == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "model.onnx: the float model cannot be timed on simulated, so there is nothing to compare with" in said
    assert "build: no kernel for Odd" in said
    assert not (folder / "autotuner_output/autotuner_state.yaml").exists()


def test_a_qdq_baseline_that_is_none_is_refused_before_anything_is_timed(folder, runtime, capsys, monkeypatch):
    monkeypatch.setattr("harness.compat.modelopt_autotune.__main__.select_float_baseline", pytest.fail)
    assert qdq("-m", "model.onnx", "--qdq_baseline", "model.onnx") == 2
    assert "model.onnx: holds no Q/DQ pair, so there is no placement to read from it" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "theirs"), [("results", "experiment.yaml"), ("results/cell", "cell.json")])
def test_the_results_of_an_experiment_are_not_written_into(folder, runtime, capsys, output, theirs):
    (folder / output).mkdir(parents=True)
    (folder / output / theirs).write_text("")
    assert qdq("-m", "model.onnx", "-o", output) == 2
    assert f"--output_dir {output}: holds results of an experiment ({theirs})" in capsys.readouterr().err
    assert [path.name for path in (folder / output).iterdir()] == [theirs]


def test_a_larger_limit_goes_on_where_the_smaller_one_cut_the_walk_short(folder, runtime):
    runtime.generous = True
    assert qdq("-m", "model.onnx", "--max_evals", "25", "-s", "6", "-o", "whole") == 0
    expected = {candidate.digest for candidate in runtime.measured}
    runtime.measured.clear()
    for limit in ("4", "4", "9", "25"):
        assert qdq("-m", "model.onnx", "--max_evals", limit, "-s", "6", "-o", "parts") == 0
        assert len(state(folder / "parts")["measured"]) <= int(limit)
    assert len(state(folder / "parts")["measured"]) == len(state(folder / "whole")["measured"])
    assert {candidate.digest for candidate in runtime.measured} == expected
    assert confirmed(folder / "parts").read_bytes() == confirmed(folder / "whole").read_bytes()


def test_the_same_limit_again_comes_to_the_same(folder, runtime):
    runtime.generous = True
    for _ in range(2):
        assert qdq("-m", "model.onnx", "--max_evals", "9", "-s", "6") == 0
        found = confirmed(folder / "autotuner_output").read_bytes()
        runtime.first = getattr(runtime, "first", found)
    assert found == runtime.first


def test_a_searcher_without_tell_is_refused_before_a_scheme_is_measured(folder, runtime, capsys, monkeypatch):
    (folder / "half_searcher.py").write_text(
        "class Half:\n    def __init__(self, space, *, seed): pass\n    ask = print\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    assert qdq("-m", "model.onnx", "--searcher", "half_searcher:Half") == 2
    assert "searcher 'half_searcher:Half': has no tell(), but needs ask(n) and tell(observation)" in " ".join(
        capsys.readouterr().err.split()
    )


def test_what_fails_at_once_leaves_no_folder(folder, runtime):
    assert qdq("-m", "none.onnx", "-o", "out") == 2
    assert not (folder / "out").exists()


def test_a_file_is_no_output_folder(folder, runtime, capsys):
    assert qdq("-m", "model.onnx", "-o", "model.onnx") == 2
    assert "--output_dir model.onnx: is a file, not a folder" in capsys.readouterr().err


def test_a_model_that_fails_everywhere_but_as_float_stays_float(folder, runtime):
    runtime.broken = True
    assert qdq("-m", "model.onnx", "-s", "3") == 0
    final = folder / "autotuner_output/optimized_final.onnx"
    assert final.read_bytes() == (folder / "autotuner_output/baseline.onnx").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-m", "none.onnx"), "none.onnx: no such file"),
        (("-m", "model.onnx", "-s", "0"), "--schemes_per_region is at least 1, but got 0"),
        (("-m", "model.onnx", "--warmup_runs", "-1"), "--warmup_runs is at least 0, but got -1"),
        (("-m", "model.onnx", "--max_evals", "0"), "--max_evals is at least 1, but got 0"),
        (("-m", "model.onnx", "--seed", "-1"), "--seed is at least 0, but got -1"),
        (("-m", "model.onnx", "--searcher", "evolutionry"), "did you mean 'evolutionary'"),
        (("-m", "model.onnx", "--backend", "openvin"), "did you mean 'openvino'"),
        (("-m", "model.onnx", "--use_trtexec", "--backend", "openvino"), "choose one"),
        (("-m", "model.onnx", "--plugin_libraries", "none.so"), "none.so: no such file"),
        (("-m", "model.onnx", "--plugin_libraries", "model.onnx"), "plugin_libraries: backend 'simulated' takes none"),
        (
            ("-m", "model.onnx", "--trtexec_benchmark_args", "--fp16 --verbose"),
            "trtexec_args: backend 'simulated' takes none",
        ),
        (
            ("-m", "model.onnx", "--use_trtexec", "--trtexec_benchmark_args", "--staticPlugins='my lib.so"),
            "arguments of trtexec: No closing quotation",
        ),
        (("-m", "model.onnx", "--node_filter_list", "none.txt"), "--node_filter_list none.txt: cannot be read"),
        (("-m", "model.onnx", "--node_filter_list", "odd.txt"), "node filters nothing*: no node of the model has such"),
        (("-m", "model.onnx", "--node_filter_list", "empty.txt"), "there is no wildcard in it"),
        (("-m", "model.onnx", "--qdq_baseline", "none.onnx"), "none.onnx: no such file"),
        (("-m", "model.onnx", "--qdq_baseline", "model.onnx"), "model.onnx: holds no Q/DQ pair"),
        (("-m", "model.onnx", "--pattern_cache", "odd.txt"), "odd.txt: a mapping of keys, but got str"),
        (("-m", "model.onnx", "--state_file", "odd.txt"), "odd.txt: a mapping of keys, but got str"),
        (("-m", "model.onnx", "--calibration_data", "images"), "an .npz file with an array for each input"),
        (("-m", "model.onnx", "-o", "odd.txt"), "--output_dir odd.txt: is a file, not a folder"),
        (("-m", "model.onnx", "--shape", "1x3x16x16"), "--shape 1x3x16x16: NAME:SHAPE"),
        (("-m", "model.onnx", "--shape", "y:1x3x16x16"), "shapes.y: the model has no such input; known: x"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(folder, runtime, capsys, arguments, says):
    (folder / "odd.txt").write_text("nothing*")
    (folder / "empty.txt").write_text("# nothing\n")
    assert qdq(*arguments) == 2
    assert says in capsys.readouterr().err


def test_trtexec_without_its_software_says_what_is_missing(folder, runtime, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert qdq("-m", "model.onnx", "--use_trtexec") == 2
    said = capsys.readouterr().err
    reasons = ("no NVIDIA driver is loaded on this machine", "no program trtexec on PATH", "brings cuda-python")
    assert any(reason in said for reason in reasons)


def test_tensorrt_without_its_software_says_what_brings_it(folder, runtime, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    assert qdq("-m", "model.onnx", "--backend", "tensorrt") == 2
    assert "pip install 'qdq-bench[tensorrt]' brings cuda-python" in capsys.readouterr().err


def test_a_dynamic_input_is_fixed_and_a_state_of_another_shape_is_refused(folder, runtime, capsys):
    builder = GraphBuilder("dynamic")
    builder.output(builder.conv(builder.input("x", ("N", 3, 16, "width")), 8, 3, name="first"))
    builder.save(folder / "dynamic.onnx")
    assert qdq("-m", "dynamic.onnx") == 2
    assert "on the command line as --dim width=224" in capsys.readouterr().err
    assert qdq("-m", "dynamic.onnx", "--shape", "x:2x3x16x16", "--max_evals", "3") == 0
    final = onnx.load(folder / "autotuner_output/optimized_final.onnx")
    assert [d.dim_value for d in final.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 16, 16]
    assert qdq("-m", "dynamic.onnx", "--shape", "x:1x3x16x16") == 2
    assert "inputs was {'x': [2, 3, 16, 16]} and is {'x': [1, 3, 16, 16]}" in capsys.readouterr().err


def test_a_model_with_nothing_to_quantize_ends_as_it_is(folder, runtime, capsys):
    builder = GraphBuilder("plain")
    builder.output(builder.op("Identity", builder.input("x", (1, 4))))
    builder.save(folder / "plain.onnx")
    assert qdq("-m", "plain.onnx") == 0
    assert "plain.onnx: no insertion point that dialect 'openvino' allows at int8: rule" in capsys.readouterr().err
    out = folder / "autotuner_output"
    assert (out / "optimized_final.onnx").read_bytes() == (out / "baseline.onnx").read_bytes()


def test_a_cache_that_is_not_there_costs_the_warm_start_alone(folder, runtime, caplog):
    assert qdq("-m", "model.onnx", "--max_evals", "3", "--pattern_cache", "none.yaml") == 0
    assert "none.yaml: there is no such pattern cache, so the start is cold" in caplog.text


def test_verbose_shows_what_the_parts_log(folder, runtime, capsys):
    assert qdq("-m", "model.onnx", "--max_evals", "3", "-v") == 0
    assert "harness.compat.modelopt_autotune.session: " in capsys.readouterr().err


def test_the_workflow_needs_a_benchmark_and_a_model(folder):
    with pytest.raises(AutotunerNotInitializedError, match="Benchmark instance not initialized"):
        region_pattern_autotuning_workflow("model.onnx")
    with pytest.raises(AutotunerError, match="needs model_path"):
        region_pattern_autotuning_workflow()
    assert benchmark_onnx_model("model.onnx") == float("inf")


def test_the_workflow_takes_either_name_of_the_model_and_a_transform(folder, benchmark_instance, model):
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


def test_options_of_tensorrt_reach_a_backend_that_takes_them(monkeypatch):
    import inspect

    def backend(plugin_libraries=None, timing_cache_file=None, trtexec_args=None):
        raise AssertionError("not made here")

    monkeypatch.setattr("harness.registry.plugin_signature", lambda *_: inspect.signature(backend))
    given = {"plugin_libraries": ["a.so"], "timing_cache_file": "t.cache", "trtexec_args": ["--fp16"]}
    use = backend_spec("trtexec", given)
    assert use.params == {"plugin_libraries": ["a.so"], "timing_cache_file": "t.cache", "trtexec_args": ["--fp16"]}


def test_arguments_of_trtexec_are_split_as_a_shell_does():
    assert split_arguments("--device=0 --staticPlugins='/my libs/a.so'") == [
        "--device=0",
        "--staticPlugins=/my libs/a.so",
    ]


def test_runs_are_counted_and_cannot_be_none():
    with pytest.raises(AutotunerError, match="timing_runs at least 1, but got 5 and 0"):
        Benchmark(PluginSpec(use="simulated"), timing_runs=0)
    with pytest.raises(UserError, match="use_trtexec and backend 'openvino': choose one"):
        init_benchmark_instance(use_trtexec=True, backend="openvino")


def test_an_empty_cache_is_a_cache():
    assert PatternCache().origins == ()


def sorted_rows(path, count=96):
    """Inputs sorted by class: the last rows are 15 times as large as the first."""
    rows = np.random.default_rng(0).uniform(-1, 1, (count, 3, 16, 16)).astype(np.float32)
    rows[count // 2 :] *= 15
    rows[:, 0, 0, 0] = np.where(np.arange(count) < count // 2, 1, 15)
    np.savez(path, x=rows)


def input_scale(path):
    """Scale of the model's input."""
    proto = onnx.load(path)
    scale = next(n.input[1] for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == "x")
    (tensor,) = (t for t in proto.graph.initializer if t.name == scale)
    return float(onnx.numpy_helper.to_array(tensor).max())


@pytest.mark.parametrize(("flags", "said"), [
    ((), "96 samples of feeds.npz"),
    (("--calibration_samples", "5"), "5 of the 96 samples of feeds.npz, evenly spread"),
    (("--calibration_samples", "300"), "96 samples of feeds.npz, all there are of the 300 asked for"),
])  # fmt: skip
def test_every_calibration_sample_counts(folder, runtime, capsys, flags, said):
    runtime.generous = True
    sorted_rows("feeds.npz")
    assert qdq("-m", "model.onnx", "--max_evals", "2", "-o", "out", "--calibration_data", "feeds.npz", *flags) == 0
    assert f"calibrated on {said}" in capsys.readouterr().err
    assert input_scale(confirmed(folder / "out")) == pytest.approx(15 / 127, rel=0.02)


def test_calibration_samples_in_python(folder, runtime):
    runtime.generous = True
    sorted_rows("feeds.npz")
    init_benchmark_instance(backend="simulated")
    region_pattern_autotuning_workflow("model.onnx", Path("out"), 1, calibration_data="feeds.npz")
    assert input_scale(confirmed(folder / "out")) == pytest.approx(15 / 127, rel=0.02)
    with pytest.raises(AutotunerError, match="calibration_samples"):
        region_pattern_autotuning_workflow("model.onnx", Path("out"), 1, calibration_samples=0)


def test_what_models_are_made_for_is_the_first_and_the_last_line(folder, runtime, capsys):
    assert qdq("-m", "model.onnx", "--max_evals", "2") == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    for line in (said[0], said[-1]):
        assert "simulated on simulated" in line
        assert "dialect openvino" in line
        assert "TensorRT" in line


@pytest.mark.parametrize(("flags", "named"), [
    (("--timing_cache", "mine.cache"), "--timing_cache mine.cache"),
    (("--calibration_samples", "4"), "--calibration_samples"),
    (("--timing_runs", "1"), "--timing_runs 1: 3 are timed"),
    (("--mode", "quick", "-s", "1", "--warmup_runs", "0", "--timing_runs", "5"), "--mode quick"),
    (("--default_dq_dtype", "float16"), "--default_dq_dtype float16"),
    (("--seed", "3"), None),
])  # fmt: skip
def test_flags_without_effect_are_named(folder, runtime, capsys, flags, named):
    assert qdq("-m", "model.onnx", "--max_evals", "2", *flags) == 0
    idle = [line for line in capsys.readouterr().err.splitlines() if line.startswith("without effect: ")]
    assert len(idle) == (named is not None)
    assert all(named in line for line in idle)
