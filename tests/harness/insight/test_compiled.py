"""What a compiler made of a model, on kernels made up; and `qdq inspect check`, which needs no compiler."""

import json
import sys
from pathlib import Path

import onnx
import pytest
from compiler_cases import FLOAT, INT8, Case, Pair
from small import qdq

from harness.cli.main import main
from harness.insight.compiled import CompiledReport, explain_compilation
from harness.insight.model_report import compare_precisions
from harness.runtimes.rtx_compile import Compilation, Kernel, KernelTensor, Refusal

MATMUL = Case(operator="MatMul", pairs=(INT8, INT8), behind="relu+pair")
PAIRS = ("QuantizeLinear_0", "QuantizeLinear_1")


def kernel(kind: str, inputs: str, origin: tuple[str, ...], outputs: str = "f32") -> Kernel:
    def tensors(types: str) -> tuple[KernelTensor, ...]:
        return tuple(KernelTensor(name=f"t{i}", shape=(1,), type=each) for i, each in enumerate(types.split()))

    return Kernel(
        name=f"{kind}_{origin}", kind=kind, inputs=tensors(inputs), constants=(), outputs=tensors(outputs),
        tactic="", origin=origin,
    )  # fmt: skip


def compiled(*kernels: Kernel, refusal: Refusal | None = None) -> Compilation:
    return Compilation(target="sm89", version="1.7", build_s=0.5, kernels=kernels, refusal=refusal)


def explained(case: Case, folder: Path, *kernels: Kernel) -> CompiledReport:
    onnx.save(case.build(), folder / "m.onnx")
    return explain_compilation(folder / "m.onnx", compiled(*kernels))


def effects(report: CompiledReport) -> list[tuple[str, int, str]]:
    return [(edge.consumer, edge.slot, edge.effect) for edge in report.edges]


def test_matmul_is_quantized_if_both_operands_are(tmp_path):
    quantize, tail = kernel("kgen", "f32", PAIRS, "int8"), kernel("kgen", "f32", ("Relu_0", "QuantizeLinear_2"))
    full = explained(MATMUL, tmp_path, quantize, kernel("gemm", "int8 int8 f32", ("MatMul_0",)), tail)
    assert full.precision == {"MatMul_0": "int8"}
    assert [layer.requested for layer in full.layers if layer.name == "MatMul_0"] == [("int8", "int8")]
    assert effects(full)[:2] == [("MatMul_0", 0, "taken"), ("MatMul_0", 1, "taken")]
    assert full.fallbacks == ()
    half = explained(MATMUL, tmp_path, quantize, kernel("runtime_fusion", "int8 f32", ("MatMul_0",)), tail)
    assert [layer.name for layer in half.fallbacks] == ["MatMul_0"]
    assert effects(half)[:2] == [("MatMul_0", 0, "float"), ("MatMul_0", 1, "float")]
    assert compare_precisions(full.precision, half.precision) == [("MatMul_0", "int8", "f32")]


def test_pair_inside_its_consumers_kernel_has_no_effect(tmp_path):
    pool = Case(operator="MaxPool", pairs=(INT8, FLOAT))
    inside = explained(pool, tmp_path, kernel("kgen", "f32", ("QuantizeLinear_0", "MaxPool_0", "DequantizeLinear_0")))
    assert effects(inside) == [("MaxPool_0", 0, "inside")]
    taken = explained(pool, tmp_path, kernel("maxpool", "int8", ("MaxPool_0", "DequantizeLinear_0")))
    assert effects(taken) == [("MaxPool_0", 0, "taken")]
    assert effects(explained(pool, tmp_path, kernel("avgpool", "f32", ("MaxPool_0",)))) == [("MaxPool_0", 0, "float")]
    assert effects(explained(pool, tmp_path, kernel("kgen", "f32", ("other",)))) == [("MaxPool_0", 0, "unknown")]


def test_kernels_without_node_are_listed(tmp_path):
    found = explained(MATMUL, tmp_path, kernel("gemm", "int8 int8", ("MatMul_0",)), kernel("kgen", "f32", (), "f16"))
    assert [added.kind for added in found.added_kernels] == ["kgen"]
    assert found.kernel_counts() == {"gemm int8": 1, "kgen f32": 1}


@pytest.mark.parametrize("form", ["text", "json", "html"])
def test_the_command_shows_text_json_and_a_page(form, tmp_path, monkeypatch, capsys):
    path, page = tmp_path / "m.onnx", tmp_path / "page.html"
    onnx.save(MATMUL.build(), path)
    verdict = compiled(kernel("runtime_fusion", "int8 f32", ("MatMul_0",)))
    monkeypatch.setattr("harness.insight.compiled.compile_file", lambda path, target: verdict)
    options = {"text": [], "json": ["--json"], "html": ["--html", str(page)]}[form]
    main(["explain", str(path), "--backend", "rtx_compile", "--target", "sm89", *options])
    shown = capsys.readouterr().out
    if form == "json":
        data = json.loads(shown)
        assert data["layers"][0]["requested"] == ["int8", "int8"]
        assert {edge["effect"] for edge in data["edges"]} == {"float", "unknown"}
        assert "unverified" in data["note"]
    else:
        shown = page.read_text() if form == "html" else shown
        assert "quantized in the file 1, in the kernels 0" in shown
        assert "Silent fallbacks to float" in shown
        assert "MatMul_0" in shown


def test_refusal_replaces_the_report(tmp_path):
    onnx.save(MATMUL.build(), tmp_path / "m.onnx")
    refusal = Refusal(stage="builder", node="MatMul_0", message="CHECK failed", rule="'mixed'")
    found = explain_compilation(tmp_path / "m.onnx", compiled(refusal=refusal))
    lines = list(found.lines(10))
    assert "the builder refuses MatMul_0: CHECK failed (our rule 'mixed')" in lines[0]
    assert len(lines) == 2


def test_a_file_is_checked_without_the_compiler(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    for zero, status in ((0, 0), (3, 1)):
        onnx.save(Case(operator="MatMul", pairs=(Pair(storage="int8", zero=zero), INT8)).build(), tmp_path / "m.onnx")
        assert qdq("inspect", "check", str(tmp_path / "m.onnx")) == status
        shown = capsys.readouterr().out
        assert ("zero point: QuantizeLinear 'QuantizeLinear_0'" in shown) == bool(status)
        assert "not asked" in shown
        assert "qdq-bench[rtx]" in shown


@pytest.mark.parametrize(("damage", "status"), [("circle", 0), ("no scale", 2), ("no ONNX", 2)])
def test_check_command_ends_on_damaged_files(damage, status, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    proto = Case(operator="MatMul", pairs=(INT8, Pair(storage="int8", between="Identity"))).build()
    path = tmp_path / "m"
    nodes = {node.name: node for node in proto.graph.node}
    if damage == "circle":
        nodes["DequantizeLinear_1"].op_type = "Identity"
        nodes["DequantizeLinear_1"].input[:] = [nodes["Identity_0"].output[0]]
    elif damage == "no scale":
        del nodes["DequantizeLinear_0"].input[1:]
    path.write_bytes(b"no model" if damage == "no ONNX" else proto.SerializeToString())
    assert qdq("inspect", "check", str(path)) == status
