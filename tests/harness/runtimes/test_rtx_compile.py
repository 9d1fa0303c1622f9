"""NVIDIA's compiler as a judge: made-up samples of its log, a stand-in for its library, and itself where installed."""

import importlib.util
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from compiler_cases import FP8, INT8, Case, Pair, save

from harness.base.errors import BuildFailed, UserError
from harness.cli.main import main
from harness.runtimes import rtx_compile as compiler
from harness.runtimes.rtx_compile import RTXCompiler, compile_file, read_kernels
from harness.runtimes.testing import file_candidate
from harness.workers.helper_process import HelperCallFailed

INSTALLED = pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra rtx")
STRIDES = "Strides: [8,4,1], StrideOrder: [2,1,0], "
LAYERS = f"""Layers:
Name: MatMul_x, LayerType: gemm, \
Inputs: [ {{ Name: a, b, Dimensions: [1,2,4], {STRIDES}Datatype: Int8, Format: (N) Row major }}, \
{{ Name: w}}, Dimensions: [4,4], Datatype: FP8, Format: (N) Row }}], Constants: [], \
Outputs: [ {{ Name: y, Dimensions: [], Datatype: Half, Format: (N) Row }}], \
TacticName: stub, StreamId: 0, Metadata: [ONNX Layer: block[0]/MatMul]\x1f[ONNX Layer: x dq]__gemm_from_conv1x1
Name: added, LayerType: kgen, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 1, Metadata:
Name: done, LayerType: signal, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 1, EventId: 2, Metadata:

I/O Tensors:
 Name: x"""
MIXED = Case(operator="Conv", pairs=(INT8, Pair(storage="fp8", per="axis0")))
LEGAL = Case(operator="MatMul", pairs=(FP8, FP8))


def test_kernels_are_read_with_types_shapes_and_nodes():
    gemm, added = read_kernels(LAYERS)
    assert [(t.name, t.shape, t.type) for t in (*gemm.inputs, *gemm.outputs)] == [
        ("a, b", (1, 2, 4), "int8"), ("w}", (4, 4), "fp8"), ("y", (), "f16"),
    ]  # fmt: skip
    assert (gemm.kind, gemm.tactic, gemm.origin) == ("gemm", "stub", ("block[0]/MatMul", "x dq"))
    assert (added.kind, added.inputs, added.origin) == ("kgen", (), ())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Layers:", "Kernels:"),
        ("LayerType", "Kind"),
        ("Datatype: Int8", "Type: Int8"),
        ("[ONNX Layer: x dq]", "[Node: x dq]"),
        ("StreamId: 0, ", ""),
    ],
)
def test_unknown_kernel_log_format_is_refused(old, new):
    with pytest.raises(BuildFailed, match="list of kernels"):
        read_kernels(LAYERS.replace(old, new, 1))


class Library:
    """The names of the library that we use."""

    __version__ = "1.7.9"
    ComputeCapability = SimpleNamespace(SM89=89)
    ProfilingVerbosity = SimpleNamespace(DETAILED=2)

    class ILogger:
        INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)

    def __init__(self, refused_by: str = "") -> None:
        self.refused_by = refused_by

    def Builder(self, log: Any) -> Any:
        config = SimpleNamespace(set_compute_capability=lambda target, place: (target, place) == (89, 0))
        return SimpleNamespace(
            create_network=lambda flags: None,
            create_builder_config=lambda: config,
            build_serialized_network=lambda network, made: self._build(log, made),
        )

    def _build(self, log: Any, config: Any) -> bytes | None:
        assert (config.num_compute_capabilities, config.profiling_verbosity) == (1, 2)
        log.log(2, "UINT8 is\n read as INT8")
        log.log(1 if self.refused_by else 3, "Myelin: CHECK failed" if self.refused_by else LAYERS)
        return None if self.refused_by else b""

    def OnnxParser(self, network: Any, log: Any) -> Any:
        error = SimpleNamespace(node_name=lambda: "QuantizeLinear_0", desc=lambda: "Non-zero\n zero point")
        return SimpleNamespace(parse_from_file=lambda path: self.refused_by != "parser", get_error=lambda i: error)


@pytest.fixture
def install(monkeypatch):
    def install(library: Any) -> None:
        monkeypatch.setitem(sys.modules, "tensorrt_rtx", library)
        monkeypatch.setattr(compiler, "call_in_helper_process", lambda what, work, *args, factor: work(*args))

    return install


def test_compiled_model_has_kernels_and_warnings(install, tmp_path):
    install(Library())
    found = compile_file(save(LEGAL, tmp_path / "m.onnx"), "sm89")
    assert (found.target, found.version, found.refusal) == ("sm89", "1.7.9", None)
    assert found.warnings == ("UINT8 is read as INT8",)
    assert len(found.kernels) == 2
    artifact = RTXCompiler().build(file_candidate(tmp_path / "m.onnx"), tmp_path)
    assert artifact.engine.kernels == found.kernels
    with pytest.raises(UserError, match="only compiles models"):
        RTXCompiler().open(artifact)


def test_a_refusal_names_stage_node_message_and_rule(install, tmp_path):
    shifted = save(Case(operator="MatMul", pairs=(Pair(storage="int8", zero=3), INT8)), tmp_path / "shifted.onnx")
    install(Library(refused_by="parser"))
    refusal = compile_file(shifted, "sm89").refusal
    assert (refusal.stage, refusal.node, refusal.message) == ("parser", "QuantizeLinear_0", "Non-zero zero point")
    assert refusal.rule.startswith("'zero point'")
    install(Library(refused_by="builder"))  # which names no node
    refusal = compile_file(shifted, "sm89").refusal
    assert (refusal.stage, refusal.node, refusal.message) == ("builder", "QuantizeLinear_0", "Myelin: CHECK failed")
    with pytest.raises(BuildFailed, match="Myelin: CHECK failed"):
        RTXCompiler().build(file_candidate(shifted), tmp_path)


def test_a_crash_of_the_compiler_is_a_refusal(install, tmp_path, monkeypatch):
    def crash(*_: object, **__: object) -> None:
        raise HelperCallFailed("m.onnx", "was ended by SIGSEGV", crashed=True)

    install(Library())
    monkeypatch.setattr(compiler, "call_in_helper_process", crash)
    refusal = compile_file(save(LEGAL, tmp_path / "m.onnx"), "sm89").refusal
    assert (refusal.stage, refusal.message, refusal.crashed) == ("builder", "was ended by SIGSEGV", True)


def test_missing_library_names_the_remedy(install, monkeypatch):
    install(None)
    with pytest.raises(UserError, match=r"pip install 'qdq-bench\[rtx\]'") as caught:
        RTXCompiler().describe()
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(sys, "version_info", (3, 12, 1))
    with pytest.raises(UserError, match=r"no wheels for Python 3\.12"):
        RTXCompiler().describe()


def test_other_targets_are_refused_by_name():
    with pytest.raises(UserError, match=r"'sm90': .*sm89, sm120"):
        RTXCompiler(target="sm90")


def test_rtx_compile_is_refused_as_a_search_backend(tmp_path, capsys):
    (tmp_path / "e.yaml").write_text("experiment: e\nmodels: [zoo:shapes_detector]\nbackends: [rtx_compile]\n")
    with pytest.raises(SystemExit):
        main(["run", str(tmp_path / "e.yaml"), "--check"])
    assert "only compiles models" in capsys.readouterr().err


@INSTALLED
def test_installed_compiler_builds_and_refuses_models(tmp_path):
    built = compile_file(save(LEGAL, tmp_path / "legal.onnx"), "sm89")
    (gemm,) = (kernel for kernel in built.kernels if kernel.kind == "gemm")
    assert {tensor.type for tensor in gemm.inputs} == {"fp8"}
    assert "MatMul_0" in gemm.origin
    refusal = compile_file(save(MIXED, tmp_path / "mixed.onnx"), "sm89").refusal
    assert refusal.stage == "builder"
