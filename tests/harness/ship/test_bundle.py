"""Folder to deploy: the script runs the model as it was measured, and the manifest shows damage."""

import json
import os
import random
import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from fake_cuda import FakeCuda
from fake_trt import FakeTensorRT
from onnx_models import activation_ranges, loaded, run_onnxruntime
from small import qdq
from small_results import TASK, edit_json, seal_bundle, write_folder

from harness.base.errors import UserError
from harness.base.files import read_json, write_json
from harness.base.progress import NullProgress
from harness.base.statistics import Interval
from harness.graph.builder import GraphBuilder
from harness.graph.io.digests import digest_file
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import OPENVINO
from harness.report.frames import main_frame
from harness.report.next_steps import describe_answers, ship_path
from harness.results.artifacts import read_finalists
from harness.results.deploy_folder import check_bundle, find_bundle, read_bundle
from harness.results.folder import load
from harness.results.manifest import reopen_results
from harness.results.search_log import Goal
from harness.runtimes.onnxruntime import ONNXRuntimeBenchmarker
from harness.runtimes.onnxruntime_web.benchmarker import ONNXRuntimeWebBenchmarker
from harness.runtimes.openvino import OpenVINOBenchmarker
from harness.ship import bundle, deploy_runtime
from harness.ship.bundle import deploy_script, find_target, run_script, write_bundle
from harness.ship.results_bundle import ship_results
from harness.ship.runtime_comparison import RuntimeComparison, compare_runtimes

NOT_SCORED = dict.fromkeys(("metric", "score", "float_score", "drop", "bound"))
FACTS: dict[str, Any] = {
    "answer": "net.onnx: 2.00x [1.90, 2.10]", "method": "auto", "decision": "ship: fastest",
    "speedup": [2.0, 1.9, 2.1], "latency_ms": [1.0, 0.9, 1.1], "float_latency_ms": [2.0, 1.9, 2.1], "p99_ms": 1.2,
    "float_p99_ms": 2.2, "builds": 3, "noise_floor": 0.01, **NOT_SCORED, "python": "3", "packages": {"numpy": "2"},
    "calibration": {"data": "8 samples", "method": "minmax", "ranges": "0"}, "dynamic_remark": "", "experiment": {},
}  # fmt: skip

TENSORRT = {
    "name": "tensorrt", "version": "11.0", "float_precision": "f32",
    "options": {"typing": "strong", "workspace_bytes": 2**20, "optimization_level": 3},
}  # fmt: skip


def fake_tensorrt(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """Replace TensorRT and cuda-python by simulations."""
    cuda = FakeCuda()
    bindings = ModuleType("cuda.bindings")
    bindings.runtime = cuda  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT(major, cuda))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def save_quantized(path: Path, *, name: str = "x") -> tuple[Path, Path]:
    """Return the files of a float model and of its placement `all`."""
    builder = GraphBuilder("net", seed=3)
    x = builder.input(name, (1, 3, 8, 8))
    builder.output(builder.op("GlobalAveragePool", builder.op("Relu", builder.conv(x, 4, 3, pad=1))))
    model = loaded(builder)
    feeds = [{name: np.random.default_rng(seed).random((1, 3, 8, 8), np.float32)} for seed in range(2)]
    space = build_space(model, OPENVINO, precisions=("int8",))
    inserter = Inserter(model, OPENVINO, activation_ranges(model, feeds))
    floating = path / "float.onnx"
    onnx.save(model.proto, floating)
    return floating, inserter.export(space.resolve(space.quantize_all()), path / "all.onnx")


def describe(runtime: str) -> dict[str, Any]:
    if runtime == "openvino":
        return dict(OpenVINOBenchmarker(precision="f32").describe())
    if runtime == "throughput":
        facts = dict(OpenVINOBenchmarker(precision="f32").describe())
        return {**facts, "options": {"threads": 2, "streams": 2, "precision": "f32"}}
    if runtime == "onnxruntime_web":
        try:
            return dict(ONNXRuntimeWebBenchmarker().describe())
        except UserError as error:
            pytest.skip(str(error))
    return dict(ONNXRuntimeBenchmarker().describe())


def write(tmp_path: Path, runtime: str = "onnxruntime", **changes: Any) -> Path:
    floating, quantized = save_quantized(tmp_path)
    folder, facts = tmp_path / "ship/net", {**FACTS, "runtime": describe(runtime), **changes}
    write_bundle(folder, quantized, floating, facts, NullProgress())
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return write(tmp_path_factory.mktemp("written"))


@pytest.fixture
def folder(written, tmp_path):
    """Return a copy of a folder to deploy, of ONNX Runtime."""
    return shutil.copytree(written, tmp_path / "ship" / written.name)


@pytest.mark.parametrize("runtime", ["openvino", "throughput", "onnxruntime", "onnxruntime_web"])
def test_the_script_runs_the_model_that_was_timed(tmp_path, runtime, monkeypatch, capsys):
    folder = write(tmp_path, runtime)
    feed = np.random.default_rng(5).random((1, 3, 8, 8), np.float32)
    np.save(tmp_path / "x.npy", feed)
    command = [str(folder / "deploy.py"), "--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "y.npz")]
    done = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True)
    assert "ms, median of 20 runs" in done.stdout
    (wanted,) = run_onnxruntime(tmp_path / "all.onnx", {"x": feed})
    (found,) = np.load(tmp_path / "y.npz").values()
    np.testing.assert_allclose(found, wanted, atol=0.05)
    run = runpy.run_path(str(folder / "deploy.py"))["load"]()
    np.testing.assert_allclose(next(iter(run({"x": feed}).values())), found, atol=1e-6)
    np.save(tmp_path / "x.npy", feed.transpose(0, 2, 3, 1))
    for given, fact in (([], "shape (1, 8, 8, 3)"), (["--model", "gone.onnx"], "gone.onnx")):
        monkeypatch.setattr(sys, "argv", [*command, *given])
        with pytest.raises(SystemExit) as refused:
            runpy.run_path(command[0], run_name="__main__")
        assert refused.value.code == 2
        assert fact in capsys.readouterr().err
    facts = read_bundle(folder)
    assert facts["footprint"]["model"]["load_ms"] > 0
    assert facts["footprint"]["float"]["peak_memory_mb"] > 0
    assert "2.000 [1.900, 2.100]" in (folder / "report.md").read_text()
    subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=folder, check=True, capture_output=True)


@pytest.fixture(params=["openvino", "throughput", "onnxruntime", "threads", "tensorrt", "tensorrt 10", "weak"])
def program(request, tmp_path, monkeypatch):
    """Return a function that runs the functions of a deploy script, which it has as text, with command-line arguments.

    The model has a dynamic batch, which was timed at 1 and 2.
    """
    runtime = request.param
    facts = TENSORRT if runtime in ("tensorrt", "tensorrt 10", "weak") else describe(runtime)
    if facts is TENSORRT:
        fake_tensorrt(monkeypatch, 11 if runtime == "tensorrt" else 10)
    if runtime in ("threads", "weak"):
        changes = {"threads": 2} if runtime == "threads" else {"typing": "weak"}
        facts = {**facts, "options": {**facts["options"], **changes}}
    _, quantized = save_quantized(tmp_path)
    target = find_target(facts)
    assert target is not None
    script = tmp_path / "deploy.py"
    shapes = {f"batch={size}": {"x": (size, 3, 8, 8)} for size in (1, 2)}
    script.write_text(deploy_script(quantized, facts, target, shapes, save_dynamic(quantized)))
    written = runpy.run_path(str(script))
    for name in ("MODEL", "PACKAGE", "OPTIONS", "INPUTS", "OUTPUTS", "SHAPES", "DYNAMIC"):
        monkeypatch.setattr(deploy_runtime, name, written[name])
    monkeypatch.setattr(deploy_runtime, "__file__", str(script))

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["deploy.py", "--repeat", "2", *arguments])
        deploy_runtime.main(lambda model, *shape: target.load(model, written["OPTIONS"], *shape))

    return run


def script_text(model: Path, facts: dict[str, Any]) -> str:
    target = find_target(facts)
    assert target is not None
    return deploy_script(model, facts, target)


def save_dynamic(model: Path) -> Path:
    """Write a copy of a model with a dynamic batch next to it, as `qdq run` does, and return its path."""
    proto = onnx.load(model)
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del proto.graph.value_info[:]
    path = model.with_suffix(".dynamic.onnx")
    onnx.save(proto, path)
    return path


def test_the_script_reports_what_it_ran(program, tmp_path, capsys):
    feed = np.random.default_rng(5).random((3, 8, 8), np.float32)
    np.save(tmp_path / "x.npy", feed)
    given = ("--input", f"x={tmp_path / 'x.npy'}", "--output", str(tmp_path / "y.npz"))
    program("--json", *given)
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["outputs"].values()) == [[1, 4, 1, 1]]
    assert len(facts["samples_ms"]) == 2
    (wanted,) = run_onnxruntime(tmp_path / "all.onnx", {"x": feed[None]})
    (found,) = np.load(tmp_path / "y.npz").values()
    np.testing.assert_allclose(found, wanted, atol=0.05)
    program(*given)
    assert "median of 2 runs" in capsys.readouterr().out


@pytest.mark.parametrize("program", ["openvino", "onnxruntime"], indirect=True)
def test_the_script_names_an_argument_that_it_cannot_use(program, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.npy").write_text("1 2 3")
    for name, shape in (("small", (2, 2)), ("last", (1, 8, 8, 3)), ("two", (2, 3, 8, 8))):
        np.save(f"{name}.npy", np.zeros(shape, np.float32))
    dynamic, other = ("--model", "all.dynamic.onnx"), "; --model all.dynamic.onnx takes other sizes"
    for given, fact in (
        (("--input", "y=x.npy"), "the inputs are x"),
        (("--input", "x=gone.npy"), "gone.npy"),
        (("--input", "x=text.npy"), "text.npy"),
        (("--input", "x=small.npy"), "shape (2, 2), but the model takes (1, 3, 8, 8)\n"),
        (("--input", "x=two.npy"), f"shape (2, 3, 8, 8), but the model takes (1, 3, 8, 8){other}\n"),
        (("--input", "x=last.npy", *dynamic), "shape (1, 8, 8, 3), but the model takes ("),
        (("--at", "batch=2", "--input", "x=small.npy"), "the model takes (2, 3, 8, 8)\n"),
        (("--at", "batch=3"), "batch=3"),
        (("--output", "gone/y.npz"), "gone/y.npz: the folder does not exist"),
    ):
        with pytest.raises(SystemExit) as refused:
            program(*given)
        assert refused.value.code == 2
        assert fact in capsys.readouterr().err
    program("--input", "x=two.npy", *dynamic)
    with pytest.raises(SystemExit):
        program("--help")
    assert "--at" in capsys.readouterr().out
    program("--at", "batch=2", "--output", "y.npz")
    (made,) = np.load("y.npz").values()
    assert len(made) == 2


@pytest.mark.parametrize("runtime", ["openvino", "onnxruntime", "tensorrt"])
def test_loaded_function_refuses_arrays_that_do_not_fit(tmp_path, monkeypatch, runtime):
    fake_tensorrt(monkeypatch, 11)
    _, quantized = save_quantized(tmp_path)
    facts = TENSORRT if runtime == "tensorrt" else describe(runtime)
    (tmp_path / "deploy.py").write_text(script_text(quantized, facts))
    found = runpy.run_path(str(tmp_path / "deploy.py"))
    run, x = found["load"](), np.random.default_rng(5).random((1, 3, 8, 8), np.float32)
    expected = next(iter(run({"x": x}).values()))
    for feeds, fact in (
        ({}, "inputs are x, but the arrays are none"),
        ({"y": x}, "inputs are x, but the arrays are y"),
        ({"x": x.transpose(0, 2, 3, 1)}, "x: shape"),
        ({"x": x.astype(str)}, "x: an array of"),
    ):
        with pytest.raises(ValueError, match=fact):
            run(feeds)
    np.testing.assert_array_equal(next(iter(run({"x": x.astype(np.float64)}).values())), expected)
    found["INPUTS"]["x"] = ((1, 2), "int64")
    assert found["fit_inputs"]({"x": [[1.0, 2.0]]}, {"x": (1, 2)})["x"].dtype == np.int64
    with pytest.raises(ValueError, match="x: an array of float64 has values that int64"):
        found["fit_inputs"]({"x": [[1.5, 2.0]]}, {"x": (1, 2)})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"file": '"""\nimport os#.onnx'}, "file"),
        ({"file": "../net.onnx"}, "file"),
        ({"schema": 9}, "schema"),
        ({"latency_ms": ["1", 1, 1]}, "latency_ms"),
        ({"runtime": []}, "runtime"),
        ({"runtime": {"name": "openvino"}}, "runtime"),
        ({"runtime": {"name": "nothing"}}, "nothing"),
    ],
)
def test_verify_validates_ship_json(folder, tmp_path, changes, key, capsys):
    edit_json(folder / "ship.json", **changes)
    seal_bundle(folder)
    assert qdq("verify", str(folder)) == 1
    assert key in capsys.readouterr().err


def test_a_script_that_takes_too_much_memory_or_time_is_ended(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import time; found = bytearray(400_000_000); time.sleep(60)")
    monkeypatch.setenv("QDQ_MODEL_MEMORY_GB", "0.2")
    with pytest.raises(UserError, match=r"more than 0\.2 GB of memory \(QDQ_MODEL_MEMORY_GB"):
        run_script(sys.executable, script)
    script.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(bundle, "SCRIPT_LIMIT_S", 0.2)
    with pytest.raises(UserError, match=r"takes more than 0\.2 s"):
        run_script(sys.executable, script)


def test_model_names_are_escaped_in_the_deploy_script(tmp_path):
    name = '"""\nimport os\nos.abort()  # \\'
    _, quantized = save_quantized(tmp_path, name=name)
    facts = {**describe("onnxruntime"), "version": '1.0"""\nimport os'}
    found: dict[str, Any] = {"__name__": "deploy", "__file__": str(tmp_path / "deploy.py")}
    exec(compile(script_text(quantized, facts), "deploy.py", "exec"), found)
    assert list(found["INPUTS"]) == [name]
    assert "abort" not in str(found["__doc__"]).partition("os.")[0]


def test_an_unchanged_folder_is_not_written_again_and_files_of_others_are_kept(tmp_path):
    folder = write(tmp_path)
    before = (folder / "ship.json").stat().st_mtime_ns
    write(tmp_path)
    assert (folder / "ship.json").stat().st_mtime_ns == before
    (folder / "notes.txt").touch()
    with pytest.raises(UserError, match="notes"):
        write(tmp_path, method="tpe")
    (folder / "notes.txt").unlink()
    write(tmp_path, method="tpe")
    assert read_bundle(folder)["method"] == "tpe"


def test_check_bundle_detects_damaged_files(folder, tmp_path, capsys):
    for path in (path for path in sorted(folder.iterdir()) if path.is_file()):
        whole = path.read_bytes()
        for place in {len(whole) * part // 4 for part in range(4)} | {len(whole) - 1}:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
            assert list(check_bundle(folder)), f"{path.name}, byte {place}"
        assert qdq("verify", str(folder)) == 1
        assert str(folder) in capsys.readouterr().err
        path.write_bytes(whole)
    assert not list(check_bundle(folder))


ENTRIES: Mapping[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "folder": Path.mkdir,
    "package": lambda path: [path.mkdir(), (path / "__init__.py").touch()],
    "link": lambda path: path.symlink_to(__file__),
    "folder link": lambda path: path.symlink_to(Path(__file__).parent),
    "dangling link": lambda path: path.symlink_to("gone"),
    "pipe": os.mkfifo,
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(os.path.relpath(path)),
}


def test_each_unlisted_or_replaced_entry_is_reported(folder, monkeypatch):
    monkeypatch.chdir(folder)
    draw = random.Random(0)
    listed = sorted(path.name for path in folder.iterdir())
    suffixes = ("", ".py", ".pyc", ".cpython-311-x86_64-linux-gnu.so", ".txt", ".onnx", ".part")
    for turn in range(80):
        make = draw.choice(sorted(ENTRIES))
        if replaced := turn % 4 == 0:
            name = draw.choice(listed)
            kept = folder.with_name(name)
            (folder / name).rename(kept)
        else:
            stem = draw.choice(("numpy", "onnxruntime", "__pycache__", ".hidden", "NET", "net", "Deploy", "é", "a b"))
            name = f"{stem}{draw.choice(suffixes)}"
        if (folder / name).exists():
            continue
        ENTRIES[make](folder / name)
        assert list(check_bundle(folder)), f"{make} {name}"
        remove(folder / name)
        if replaced:
            kept.rename(folder / name)
        assert not list(check_bundle(folder)), f"{make} {name}"


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda lines: [*lines, f"{'0' * 64}  ../secret\n"], "line"),
        (lambda lines: [*lines, lines[0]], "line"),
        (lambda lines: [*lines, lines[0].upper().replace(lines[0][:64].upper(), lines[0][:64])], "line"),
        (lambda lines: [line for line in lines if "ship.json" not in line], "ship.json"),
        (lambda lines: [line for line in lines if "net.onnx" not in line], "net.onnx"),
        (lambda lines: [line for line in lines if "deploy.py" not in line], "deploy.py"),
        (lambda lines: [line[1:] for line in lines], "line"),
        (lambda lines: [], "ship.json"),
    ],
)
def test_each_change_of_the_manifest_is_reported(folder, change, fact):
    path = folder / "SHA256SUMS"
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    assert any(fact in problem for problem in check_bundle(folder))
    path.unlink()
    assert [str(path) in problem for problem in check_bundle(folder)] == [True]


def test_a_listed_file_that_no_folder_to_deploy_has_is_reported(folder):
    (folder / "numpy.py").touch()
    seal_bundle(folder)
    assert ["numpy.py" in problem for problem in check_bundle(folder)] == [True]
    (folder / "numpy.py").rename(folder / "net.onnx.data1")
    seal_bundle(folder)
    assert not list(check_bundle(folder)), "external data"


@pytest.mark.parametrize(
    "command",
    [
        ("verify", "SHIP"),
        ("apply", "SHIP", "float.onnx", "--out", "out"),
        ("apply", "SHIP", "--recipe", "ort", "-o", "recipe.py"),
        ("explain", "SHIP/net.onnx", "--backend", "openvino"),
        ("insert", "float.onnx", "--placement", "SHIP", "-o", "q.onnx"),
        ("inspect", "recover", "float.onnx", "--placement", "SHIP/net.onnx"),
        ("autotune", "--onnx_path", "float.onnx", "--start", "SHIP", "--output_dir", "out"),
    ],
)
def test_every_command_refuses_a_folder_with_an_unlisted_entry(folder, tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    save_quantized(tmp_path)
    (folder / "numpy").mkdir()
    status = 1 if command[0] == "verify" else 2
    assert qdq(*(word.replace("SHIP", str(folder)) for word in command)) == status
    assert f"{folder.relative_to(tmp_path)}/numpy" in capsys.readouterr().err


def test_verify_reports_unlisted_entries_of_a_results_folder(folder, tmp_path, capsys):
    results = tmp_path / "results"
    results.mkdir()
    write_folder(results)
    reopen_results(results)
    folder.parent.rename(results / "ship")
    assert qdq("verify", str(results)) == 0
    for name in ("ship/numpy.py", "ship/net/numpy.py"):
        (results / name).touch()
        assert qdq("verify", str(results)) == 1
        assert f"results/{name}" in capsys.readouterr().out  # relative or absolute, whichever is shorter
        (results / name).unlink()
    (results / "ship/other").symlink_to(results / "ship/net")
    assert qdq("verify", str(results)) == 1


STARTS = {
    "script": ("deploy.py", "--repeat", "1"),
    "module": ("-c", "import sys; from deploy import load; load(); import os; assert '' in sys.path"),
    "module of another folder": ("-c", "import sys; sys.path.insert(0, {folder!r}); from deploy import load; load()"),
    "program": ("-m", "deploy", "--repeat", "1"),
}


@pytest.mark.parametrize("start", sorted(STARTS))
def test_the_script_imports_no_file_of_its_folder_and_leaves_none(folder, tmp_path, start):
    before = {path.name for path in folder.iterdir()}
    planted = ("numpy", "onnxruntime", "argparse", "statistics", "concurrent", "typing")
    for name in planted:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    place = tmp_path if "another" in start else folder
    command = [sys.executable, *(word.format(folder=str(folder)) for word in STARTS[start])]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "marker").exists()
    assert {path.name for path in folder.iterdir()} == {*before, *planted}


def test_the_script_refuses_a_package_that_a_program_imported_from_its_folder(folder, monkeypatch):
    monkeypatch.setattr(np, "__file__", str(folder / "numpy/__init__.py"))
    with pytest.raises(ImportError, match="numpy was imported from"):
        runpy.run_path(str(folder / "deploy.py"))["load"]()


@pytest.mark.parametrize("version", ["0.1", None])
def test_the_script_warns_of_another_version_in_one_line(folder, monkeypatch, capsys, version):
    monkeypatch.setattr(onnxruntime, "__version__", version or onnxruntime.__version__)
    runpy.run_path(str(folder / "deploy.py"))["load"]()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == (version is not None)
    for line in lines:
        assert all(word in line for word in ("0.1", read_bundle(folder)["runtime"]["version"], f"qdq verify {folder}"))


def test_verify_runs_the_folder_but_not_its_script(folder, tmp_path, capsys):
    assert qdq("verify", str(folder)) == 0
    text = capsys.readouterr().out
    assert "run: ok" in text
    assert "version:" not in text
    runtime = read_bundle(folder)["runtime"]
    edit_json(folder / "ship.json", runtime={**runtime, "version": "0.1"})
    seal_bundle(folder)
    assert qdq("verify", str(folder)) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in (f"version: {runtime['version']}", "0.1", "--runtime-python"))
    edit_json(folder / "ship.json", runtime=runtime)
    seal_bundle(folder)
    assert qdq("explain", str(folder), "--runs", "2") == 0, "the model of a folder to deploy"
    capsys.readouterr()
    (folder / "deploy.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w')\n")
    seal_bundle(folder)
    found = compare_runtimes(
        folder, str(environment(tmp_path, f'exec {sys.executable} "$@"')), NullProgress(), builds=2
    )
    assert found.sqnr_db > 100, "the same environment computes the same"
    assert found.versions == (found.recorded_version,) * 2
    assert qdq("verify", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["latency_ms"] > 0
    assert not (tmp_path / "marker").exists()


def environment(path: Path, command: str) -> Path:
    """Write the folder of a Python environment whose program is a shell command."""
    program = path / "new" / "bin" / "python"
    program.parent.mkdir(parents=True, exist_ok=True)
    program.write_text(f"#!/bin/sh\n{command}\n")
    program.chmod(0o755)
    return path / "new"


@pytest.mark.parametrize(
    ("case", "status", "words"),  # latency in ms, that of the float model, output and version in the other environment
    [
        ((1.0, 2.0, 1.0, "1.25.0"), 0, ("tie", "1.24.0", "1.25.0", "2.00x recorded")),
        ((0.5, 1.0, 1.0, "1.24.0"), 0, ("faster", "versions are equal")),
        ((1.0, 1.6, 1.0, "1.25.0"), 0, ("gain over the float model: ok", "1.60x")),
        ((2.0, 4.0, 1.0, "1.25.0"), 1, ("slower", "outputs: ok")),
        ((0.5, 1.0, 9.0, "1.25.0"), 1, ("faster", "outputs: MISMATCH")),
        ((1.0, 1.2, 1.0, "1.25.0"), 1, ("tie", "the gain is gone", "2.00x", "1.20x", "run the experiment again")),
    ],
)
def test_exit_status_by_comparison_with_a_new_runtime(folder, monkeypatch, capsys, case, status, words):
    new = environment(folder.parent, "false")

    def run(python: str, _: Path, *arguments: str) -> dict[str, Any]:
        latency_ms, float_ms, output, version = case if python.startswith(str(new)) else (1.0, 2.0, 1.0, "1.24.0")
        if "--output" not in arguments:
            return {"latency_ms": float_ms, "version": version}
        np.savez(arguments[-1], y=np.arange(9.0, dtype=np.float32) + output)
        return {"latency_ms": latency_ms, "version": version}

    monkeypatch.setattr("harness.ship.runtime_comparison.run_script", run)
    edit_json(folder / "ship.json", runtime={**read_bundle(folder)["runtime"], "version": "1.24.0+commit"})
    seal_bundle(folder)
    command = ("verify", str(folder), "--runtime-python", str(new))
    assert qdq(*command) == status
    text = capsys.readouterr().out
    assert all(word in text for word in words)
    assert qdq(*command, "--json") == status
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is (status == 0)
    assert found["lost_gain"] == ["other"] * ("the gain is gone in the other one" in text)


@pytest.mark.parametrize(
    ("versions", "gains", "lost"),  # of this environment and of the other one; the file was measured with 1.24.4
    [
        (("1.24.4", "1.32.0"), ((1.72, 1.70, 1.74), (1.12, 1.10, 1.14)), ("other",)),
        (("1.24.4", "1.32.0"), ((1.72, 1.10, 2.40), (1.12, 0.80, 1.50)), ()),  # not beyond noise
        (("1.24.4", "1.32.0"), ((1.72, 1.70, 1.74), (1.40, 1.38, 1.42)), ()),
        (("1.24.4", "1.32.0"), ((0.98, 0.97, 0.99), (0.90, 0.89, 0.91)), ()),  # no gain before
        (("1.24.4", "1.24.4"), ((1.12, 1.10, 1.14), (1.12, 1.10, 1.14)), ()),  # another machine
        (("1.32.0", "1.24.4"), ((1.12, 1.10, 1.14), (1.72, 1.70, 1.74)), ("this",)),
        (("1.32.0", "1.33.0"), ((1.12, 1.10, 1.14), (1.12, 1.10, 1.14)), ("this", "other")),
        (("1.24.4", "1.32.0"), None, ()),
    ],
)
def test_a_gain_is_gone_if_less_than_half_of_it_is_left_beyond_noise(versions, gains, lost):
    def interval(limits: tuple[float, float, float]) -> Interval:
        return Interval(value=limits[0], low=limits[1], high=limits[2])

    found = RuntimeComparison(
        speedup=interval((1.0, 0.99, 1.01)),
        noise_floor=0.01,
        verdict="tie",
        latencies_ms=(1.0, 1.0),
        sqnr_db=40.0,
        versions=versions,
        recorded_version="1.24.4",
        recorded_gain=interval((1.72, 1.68, 1.76)),
        gains=None if gains is None else (interval(gains[0]), interval(gains[1])),
    )
    assert found.lost_gain == lost
    assert found.holds is not bool(lost)
    assert any("the gain is gone" in line for line in found.lines()) is bool(lost)


@pytest.mark.parametrize(
    ("command", "status", "fact"),
    [
        ("true", 2, "Python program"),
        ("echo \"ModuleNotFoundError: No module named 'onnxruntime'\" >&2; false", 2, "pip install numpy onnxruntime"),
        ("printf '\\377broken' >&2; false", 1, "\ufffdbroken"),
        (None, 2, "no such program"),
    ],
)
def test_exit_status_by_environment_that_cannot_run_the_file(folder, tmp_path, capsys, command, status, fact):
    new = tmp_path / "nowhere" if command is None else environment(tmp_path, command)
    assert qdq("verify", str(folder), "--runtime-python", str(new)) == status
    assert fact in capsys.readouterr().err


def test_a_path_means_its_only_deploy_folder(folder, tmp_path, capsys):
    for path in (tmp_path, tmp_path / "ship", folder, folder / "net.onnx"):
        assert find_bundle(path) == folder
    shutil.copytree(folder, folder.with_name("other"))
    for path, fact in ((tmp_path, "other"), (tmp_path / "gone", "no such"), (Path(__file__).parent, "no folder")):
        with pytest.raises(UserError, match=fact):
            find_bundle(path)
    assert qdq("verify", str(folder), "auto", "--runtime-python", sys.executable) == 2
    assert "row" in capsys.readouterr().err


def test_the_best_row_of_a_task_is_shipped_with_its_facts(tmp_path):
    folder = tmp_path / "results"
    folder.mkdir()
    write_folder(folder)
    floating, quantized = save_quantized(tmp_path)
    models = folder / TASK / "models"
    models.mkdir()
    rows, picks = read_finalists(folder / TASK)
    changed = []
    for row in rows:
        source = floating if row.id.startswith("float") else quantized
        (models / row.file).write_bytes(source.read_bytes())
        changed.append({**asdict(row), "sha256": digest_file(models / row.file)})
    write_json(folder / TASK / "rows.json", {"rows": changed, "picks": [asdict(pick) for pick in picks]})
    quantized_score = {"metrics": {"top1": 0.79}, "per_item": []}
    float_score = {"metrics": {"top1": 0.8}, "per_item": []}
    by_file = {floating: float_score, quantized: quantized_score}
    scores = {f"{digest_file(path)} main": score for path, score in by_file.items()}
    write_json(folder / TASK / "accuracy.json", scores)
    task = read_json(folder / TASK / "task.json")
    task["backend"] |= {"options": {"threads": 1, "precision": "f32"}, "version": "1"}
    write_json(folder / TASK / "task.json", {**task, "source": "net.onnx", "model_sha256": "0", "ranges": "1"})
    results = load(folder)
    main = main_frame(results)
    ship_results(results, main, NullProgress())
    shipped = ship_path(folder, TASK)
    assert digest_file(shipped) == digest_file(quantized)
    facts = read_bundle(shipped.parent)
    assert facts["speedup"][0] == pytest.approx(4.0)
    assert (facts["p99_ms"], facts["float_p99_ms"]) == pytest.approx((2.0, 8.0))
    assert facts["drop"][0] == pytest.approx(0.01)
    assert facts["experiment"]["models"][0]["use"] == "net.onnx"
    (answer,) = describe_answers(results, main)
    assert answer.startswith(f"take {shipped}: 4.00x")
    edit_json(folder / TASK / "task.json", goal=asdict(Goal(metric="top1", reference=0.8, max_drop=0.001)))
    results = load(folder)
    ship_results(results, main_frame(results), NullProgress())
    assert digest_file(shipped) == digest_file(floating), "the float model is the answer now"
    assert "float model at f32" in read_bundle(shipped.parent)["answer"]
    (answer,) = describe_answers(results, main_frame(results))
    assert answer.startswith("keep the float model at f32")
    assert str(shipped) in answer
