"""Command line: flags, defaults and their effect, and messages for mistakes."""

import re
import sys

import numpy as np
import onnx
import pytest

from harness.base.errors import UserError
from harness.base.paths import WAIT_VARIABLE
from harness.compat.modelopt_autotune import __main__ as command
from harness.compat.modelopt_autotune.benchmark import (
    Benchmark,
    benchmark_onnx_model,
)
from harness.compat.modelopt_autotune.settings import (
    AutotunerError,
    AutotunerNotInitializedError,
    get_parser,
    select_mode_preset,
)
from harness.compat.modelopt_autotune.workflows import region_pattern_autotuning_workflow
from harness.config.sections import PluginSpec
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed


def test_defaults_are_those_of_the_guide():
    options = get_parser().parse_args(["--onnx_path", "m.onnx"])
    assert options.output_dir == "./autotuner_output"
    assert (options.mode, options.quant_type, options.default_dq_dtype) == ("default", "int8", "float32")
    assert options.timing_cache.endswith("trtexec_timing.cache")
    assert (options.use_trtexec, options.verbose, options.plugin_libraries) == (False, False, None)
    assert select_mode_preset(options) == {"schemes_per_region": 50, "warmup_runs": 50, "timing_runs": 100}
    options = get_parser().parse_args(["-m", "m", "--plugins", "a.so", "b.so", "-o", "out"])
    assert options.plugin_libraries == ["a.so", "b.so"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mod", "quick"), "unrecognized arguments: --mod quick"),
        (("-m", "none.onnx"), "none.onnx: no such file"),
        (("-s", "0"), "--schemes_per_region is at least 1, but got 0"),
        (("--searcher", "evolutionry"), "did you mean 'evolutionary'"),
        (("--use_trtexec", "--backend", "openvino"), "choose one"),
        (("--plugin_libraries", "none.so"), "none.so: no such file"),
        (("--qdq_baseline", "none.onnx"), "none.onnx: no such file"),
        (("--node_filter_list", "none.txt"), "none.txt: no such file"),
        (("--json",), "prints no table"),
        (("-o", "odd.txt/out"), "--output_dir odd.txt/out: cannot be created"),
        (("--shape", "y:1x3x16x16"), "shapes.y: the model has no such input; known: x"),
        (("--plugin_libraries", "model.onnx"), "plugin_libraries: backend 'simulated' does not have it"),
        (("--trtexec_benchmark_args", "--fp16 --verbose"), "trtexec_args: backend 'simulated' does not have it"),
        (
            ("--use_trtexec", "--trtexec_benchmark_args", "--staticPlugins='my lib.so"),
            "arguments of trtexec: No closing quotation",
        ),
        (("--node_filter_list", "odd.txt"), "node filters nothing*: no node of the model has such"),
        (("--node_filter_list", "empty.txt"), "there is no wildcard in it"),
        (("--state_file", "odd.txt"), "a mapping of keys, but got str"),
        (("--calibration_data", "images"), "an .npz file with an array for each input"),
        (("-o", "odd.txt"), "--output_dir odd.txt: is a file, not a folder"),
        (("--at", "x=1x3x8x8", "--wait", "0"), "ModelOpt's procedure times one shape"),
        (("--start", "model.onnx"), "--start, --baseline: not in ModelOpt's procedure"),
        (("--shape", "1x3x16x16"), "--shape 1x3x16x16: NAME:SHAPE"),
    ],
)
def test_mistakes_end_with_one_message_and_exit_code_2(folder, tune, monkeypatch, arguments, message):
    monkeypatch.setenv(WAIT_VARIABLE, "")  # --wait sets it
    (folder / "odd.txt").write_text("nothing*")
    (folder / "empty.txt").write_text("# nothing\n")
    assert message in tune(*arguments, code=2)


@pytest.mark.parametrize(("stop", "status"), [(None, 0), (UserError("no kernel"), 2), (KeyboardInterrupt(), 130)])
def test_exit_status_of_the_module(monkeypatch, capsys, stop, status):
    def run(given, prog, observer):
        assert given == ["-m", "model.onnx"]
        if stop is not None:
            raise stop

    monkeypatch.setattr(command, "autotune", run)
    monkeypatch.setattr(sys, "argv", ["autotune", "-m", "model.onnx"])
    assert command.main() == status
    assert ("autotune: no kernel" in capsys.readouterr().err) is (status == 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--calibration_data", "odd.npz"), r"odd\.npz: a sample of array 'x' is 1 x 3 x 8 x 8, but the input takes"),
        (("--qdq_baseline", "model.onnx"), "model.onnx: holds no Q/DQ pair, so there is no placement to read from it"),
    ],
)
def test_mismatched_files_are_refused_before_timing(folder, tune, monkeypatch, arguments, message):
    monkeypatch.setattr("harness.compat.modelopt_autotune.__main__.select_float_baseline", pytest.fail)
    np.savez(folder / "odd.npz", x=np.zeros((2, 1, 3, 8, 8), np.float32))
    assert re.search(message, tune(*arguments, code=2))


@pytest.mark.parametrize(("output", "theirs"), [("results", "experiment.yaml"), ("results/task", "task.json")])
def test_output_dir_with_experiment_results_is_refused(folder, tune, output, theirs):
    (folder / output).mkdir(parents=True)
    (folder / output / theirs).write_text("")
    assert f"--output_dir {output}: contains results of an experiment ({theirs})" in tune(out=output, code=2)
    assert [path.name for path in (folder / output).iterdir()] == [theirs]


def test_early_failure_leaves_no_output_folder(folder, tune):
    tune("-m", "none.onnx", code=2)
    assert not (folder / "out").exists()


def test_float_model_failure_is_reported_with_its_reason(folder, tune, monkeypatch):
    failed = Failed(stage="build", reason="no kernel for Odd")
    monkeypatch.setattr(Benchmark, "measure", lambda self, *arguments: failed)
    printed = tune(code=2)
    assert "model.onnx: the float model cannot be timed on simulated, so there is nothing to compare with" in printed
    assert "build: no kernel for Odd" in printed
    assert not (folder / "out/autotuner_state.yaml").exists()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    ask = print\n", "searcher 'odd:Odd': has no tell()"),
        ("    ask = lambda self, n: 1 / 0\n    tell = print\n", "searcher 'odd:Odd': ZeroDivisionError"),
    ],
)
def test_failing_searcher_is_named(folder, tune, monkeypatch, measured, body, message):
    (folder / "odd.py").write_text(f"class Odd:\n    def __init__(self, space, *, seed): pass\n{body}")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "odd", raising=False)
    assert message in tune("--searcher", "odd:Odd", code=2)
    assert len(measured()) == 3, "the baseline and the starts, and no scheme"


def test_dynamic_input_is_fixed_and_other_shape_state_refused(folder, tune):
    builder = GraphBuilder("dynamic")
    builder.output(builder.conv(builder.input("x", ("N", 3, 16, "width")), 8, 3, name="first"))
    builder.save(folder / "dynamic.onnx")
    assert "--dim width=224" in tune("-m", "dynamic.onnx", code=2)
    tune("-m", "dynamic.onnx", "--shape", "x:2x3x16x16", "--max_evals", "3")
    final = onnx.load(folder / "out/optimized_final.onnx")
    assert [d.dim_value for d in final.graph.input[0].type.tensor_type.shape.dim] == [2, 3, 16, 16]
    printed = tune("-m", "dynamic.onnx", "--shape", "x:1x3x16x16", code=2)
    assert "inputs.x: [2, 3, 16, 16] -> [1, 3, 16, 16]" in printed


def test_model_without_insertion_points_is_delivered_unchanged(folder, tune):
    builder = GraphBuilder("plain")
    builder.output(builder.op("Identity", builder.input("x", (1, 4))))
    builder.save(folder / "plain.onnx")
    assert "plain.onnx: no insertion point that dialect 'openvino' allows at int8: rule" in tune("-m", "plain.onnx")
    assert (folder / "out/optimized_final.onnx").read_bytes() == (folder / "out/baseline.onnx").read_bytes()


def test_missing_pattern_cache_disables_only_the_warm_start(tune, caplog):
    tune("--max_evals", "3", "--pattern_cache", "none.yaml")
    assert "none.yaml: there is no such pattern cache, so the start is cold" in caplog.text


def test_run_reports_target_regions_and_insertion_points(tune):
    printed = [line for line in tune("--max_evals", "3", "-v", lines=True).splitlines() if line.strip()]
    for line in (printed[0], printed[-1]):
        assert "simulated on simulated" in line
        assert "dialect openvino" in line
        assert "TensorRT" in line
    shown = r"\d+ regions of \d+ patterns, \d+ insertion points \(.* outputs\), \d+ of them to be searched"
    assert any(re.fullmatch(shown, line) for line in printed)
    assert any(line.startswith("harness.compat.modelopt_autotune.session: ") for line in printed), "with -v"


@pytest.mark.parametrize(("flags", "named"), [
    (("--timing_cache", "mine.cache"), "--timing_cache mine.cache"),
    (("--calibration_samples", "4"), "--calibration_samples"),
    (("--timing_runs", "1"), "--timing_runs 1: 3 are timed"),
    (("--mode", "quick", "-s", "1", "--warmup_runs", "0", "--timing_runs", "5"), "--mode quick"),
    (("--default_dq_dtype", "float16"), "--default_dq_dtype float16"),
    (("--seed", "3"), None),
])  # fmt: skip
def test_flags_without_effect_are_named(tune, flags, named):
    printed = tune("--max_evals", "2", *flags, lines=True).splitlines()
    idle = [line for line in printed if line.startswith("without effect: ")]
    assert len(idle) == (named is not None)
    assert all(named in line for line in idle)


def largest_scale(path, tensor=None):
    """Largest scale of the activations, or that of a tensor."""
    proto = onnx.load(path)
    named = {n.input[1] for n in proto.graph.node if n.op_type == "QuantizeLinear" and n.input[0] == tensor}
    scales = [t for t in proto.graph.initializer if (t.name in named if tensor else "scale" in t.name and not t.dims)]
    return max(float(onnx.numpy_helper.to_array(t).max()) for t in scales)


def sorted_rows(path, count=96):
    """Inputs sorted by class: the last rows are 15 times as large as the first."""
    rows = np.random.default_rng(0).uniform(-1, 1, (count, 3, 16, 16)).astype(np.float32)
    rows[count // 2 :] *= 15
    rows[:, 0, 0, 0] = np.where(np.arange(count) < count // 2, 1, 15)
    np.savez(path, x=rows)


@pytest.mark.parametrize(("flags", "printed"), [
    ((), "96 samples of feeds.npz"),
    (("--calibration_samples", "5"), "5 of the 96 samples of feeds.npz, evenly spread"),
    (("--calibration_samples", "300"), "96 samples of feeds.npz, all there are of the 300 asked for"),
])  # fmt: skip
def test_calibration_uses_samples_of_the_whole_file(tune, confirmed, flags, printed):
    tune.runtime.generous = True
    sorted_rows("feeds.npz")
    assert f"calibrated on {printed}" in tune("--max_evals", "2", "--calibration_data", "feeds.npz", *flags)
    assert largest_scale(confirmed(), "x") == pytest.approx(15 / 127, rel=0.02)


def test_the_workflow_needs_a_benchmark_and_a_model(folder):
    with pytest.raises(AutotunerNotInitializedError, match="Benchmark instance not initialized"):
        region_pattern_autotuning_workflow("model.onnx")
    with pytest.raises(AutotunerError, match="needs model_path"):
        region_pattern_autotuning_workflow()
    assert benchmark_onnx_model("model.onnx") == float("inf")
    with pytest.raises(AutotunerError, match="timing_runs at least 1, but got 5 and 0"):
        Benchmark(PluginSpec(use="simulated"), timing_runs=0)
