"""`qdq run FILE --check --compile`: the models of tasks on TensorRT, with a stand-in for the compiler."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
from small import qdq, save_small

from harness.run.prepare import preflight
from harness.runtimes.rtx_compile import Compilation, Refusal

EXPERIMENT = """
experiment: e
models: [{{use: net.onnx, calibration: {{samples: 2}}}}]
backends: [{backends}]
precision: [int8, mixed]
"""


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """The number of pairs in each file that is compiled; for sm75 all are refused."""
    save_small(tmp_path / "net.onnx")
    pairs: list[int] = []

    def compile_file(path: Path, target: str) -> Compilation:
        ops = [node.op_type for node in onnx.load(path).graph.node]
        pairs.append(ops.count("DequantizeLinear"))
        refusal = Refusal(stage="builder", node="Conv", message="CHECK failed") if target == "sm75" else None
        return Compilation(target=target, version="1", build_s=0, refusal=refusal)

    monkeypatch.setattr(preflight, "import_compiler", lambda: None)
    monkeypatch.setattr(preflight, "compile_file", compile_file)
    return pairs


def check(folder: Path, *options: str, backends: str = "tensorrt, openvino") -> int:
    (folder / "e.yaml").write_text(EXPERIMENT.format(backends=backends))
    return qdq("run", str(folder / "e.yaml"), "--check", "--compile", *options)


def test_each_task_on_tensorrt_is_compiled_in_float_and_quantized(compiled, tmp_path, capsys):
    assert check(tmp_path) == 0
    shown = capsys.readouterr().out
    assert len(compiled) == 4
    assert [count > 0 for count in compiled] == [False, True, False, True]
    assert "net-tensorrt-int8: all int8: compiled for sm89: 0 kernels" in shown
    assert "unverified" in shown
    assert "openvino-int8: all" not in shown


def test_compile_check_fails_after_compiling_all_models(compiled, tmp_path, capsys):
    assert check(tmp_path, "--target", "sm75") == 2
    assert len(compiled) == 4
    shown = capsys.readouterr()
    assert "the builder refuses Conv: CHECK failed" in shown.out
    assert "refused: net-tensorrt-int8, net-tensorrt-mixed" in shown.err


def test_without_a_task_on_tensorrt_it_is_an_error(compiled, tmp_path, capsys):
    assert check(tmp_path, backends="openvino") == 2
    assert "no backend has dialect" in capsys.readouterr().err
