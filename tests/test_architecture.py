"""Structure of the code: import layers, plug-in declarations, test layout."""

import ast
import subprocess
import sys
import traceback
from collections import Counter
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from harness.base.progress import NullProgress
from harness.config.experiment import load_experiment
from harness.graph.builder import GraphBuilder
from harness.run.runner import run_experiment
from harness.runtimes.simulated import SimulatedBenchmarker

ROOT = Path(__file__).resolve().parents[1]


def test_import_contracts_hold():
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_search_imports_only_allowed_packages():
    bridge = {"optuna_bridge"}
    for path in (ROOT / "search").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
        modules += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        foreign = {module.partition(".")[0] for module in modules} - {*sys.stdlib_module_names, "search"}
        assert foreign <= {"numpy", "scipy", "sklearn"} | ({"optuna"} if path.stem in bridge else set()), path


CALIBRATION_WITH_ONNX = (
    "calibration/histogram_calibrators", "tools/programs/ptq_child",
    "tools/programs/nncf_child",
)  # fmt: skip


def test_only_graph_imports_onnx():
    offenders = [
        str(path.relative_to(ROOT))
        for path in (ROOT / "harness").rglob("*.py")
        if "graph" not in path.relative_to(ROOT).parts and path.name not in ("preflight.py", "options.py")
        and any(line.startswith(("import onnx\n", "import onnx ", "from onnx ", "from onnx.", "import onnx_g"))
                for line in path.read_text().splitlines(keepends=True))
    ]  # fmt: skip
    # The first two run in ONNX Runtime's calibration, the others in processes of their own.
    allowed = {f"harness/accuracy/{name}.py" for name in CALIBRATION_WITH_ONNX}
    assert set(offenders) <= allowed


@pytest.mark.parametrize(
    ("group", "parts"),
    [
        ("qdq.searchers", {"ask", "tell"}),
        ("qdq.external_searchers", {"ask", "tell"}),
        ("qdq.benchmarkers", {"build", "open", "describe"}),
        ("qdq.evaluators", {"score"}),
        ("qdq.preprocessings", {"prepare"}),
        ("qdq.decoders", {"__call__"}),
        ("qdq.dialects", {"precisions", "opset"}),
        ("qdq.range_estimators", {"collect", "ranges"}),
        ("qdq.weight_estimators", {"__call__"}),
        ("qdq.recovery_steps", {"apply", "keeps_function"}),
    ],
)
def test_declared_plugins_load_and_have_required_methods(group, parts):
    points = entry_points(group=group)
    assert points
    for point in points:
        assert parts <= set(dir(point.load())), point.name


def test_every_search_algorithm_has_entry_point():
    declared = {point.value.partition(":")[0] for point in entry_points(group="qdq.searchers")}
    files = {f"search.algorithms.{p.stem}" for p in (ROOT / "search/algorithms").glob("*.py") if p.stem[0] != "_"}
    assert files <= declared


FRONT_END_NAMES = {"PatternCache", "Region"}
"""Names that users of ModelOpt import from our front end to its autotune."""


def test_no_class_name_is_defined_twice():
    names = Counter(
        node.name
        for package in ("harness", "search")
        for path in (ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert {name for name, count in names.items() if count > 1} <= FRONT_END_NAMES


NATIVE_CALLS = {
    "InferenceSession", "check_model", "check_node", "compile_model", "convert_to_f16", "convert_version",
    "import_model", "infer_node_outputs", "infer_shapes", "open_reference_session", "quantize_static",
}  # fmt: skip
NATIVE_MODULES = {
    "accuracy.calibration.histogram_calibrators", "accuracy.tools.programs.ptq_child", "accuracy.calibration.ranges",
    "accuracy.tools.programs.nncf_child",
    "graph.builder", "graph.equivalence.compare", "graph.passes.normalize", "graph.passes.pipeline",
    "graph.passes.simplify", "graph.passes.static_shapes", "graph.segmented_run",
    "runtimes.example", "runtimes.onnxruntime", "runtimes.openvino", "runtimes.tensorrt.options",
    "runtimes.tensorrt_rtx", "runtimes.testing",
    "run.prepare.preflight", "run.verify.dynamic_check", "ship.deploy_runtime",
}  # fmt: skip
"""Modules whose native code is run in the helper process, a worker or a tool's process, or on models made by code."""


def test_native_calls_are_limited_to_listed_modules():
    found = {
        ".".join(path.relative_to(ROOT / "harness").with_suffix("").parts)
        for path in (ROOT / "harness").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in NATIVE_CALLS
    }
    assert found == NATIVE_MODULES, "call it by `call_in_helper_process`"


def test_commands_print_only_by_echo():
    modules = list((ROOT / "harness/cli").glob("*.py"))
    assert modules
    for path in modules:
        calls = [ast.unparse(n.func) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
        assert calls.count("typer.echo") == (path.stem == "common"), f"{path.name}: use `echo` of common"
        assert "print" not in calls, path.name


def test_folders_have_no_init_files():
    assert not list((ROOT / "tests").rglob("__init__.py")), "tests/search/__init__.py would shadow the package search"


MAX_FRAMES = 18
SMALL_RUN = """
experiment: frames
models: [{use: net.onnx, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5, noise: 0.0}}]
searchers: [random]
seeds: [0]
initial: [float, all]
budget: {evaluations: [3]}
confirmation: {builds: 3, rounds: 2, samples: 3}
"""


def test_call_depth_from_run_to_build_is_bounded(tmp_path, monkeypatch):
    builder = GraphBuilder("net", seed=0)
    x = builder.conv(builder.input("x", (1, 3, 8, 8)), 8, 3, pad=1)
    builder.output(builder.conv(x, 8, 3, pad=1), name="y")
    builder.save(tmp_path / "net.onnx")
    (tmp_path / "frames.yaml").write_text(SMALL_RUN)
    build, depths = SimulatedBenchmarker.build, []

    def counting(self, *args):
        own = [f.filename for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "harness"))]
        depths.append(len(own))
        return build(self, *args)

    monkeypatch.setattr(SimulatedBenchmarker, "build", counting)
    run_experiment(load_experiment(tmp_path / "frames.yaml"), out=tmp_path / "out", observer=NullProgress())
    assert depths
    assert max(depths) + 2 <= MAX_FRAMES  # `main` and the command `run` come before `run_experiment`
