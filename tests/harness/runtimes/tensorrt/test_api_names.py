"""No name of TensorRT or cuda-python stands in the source that the libraries lack, or that a major removed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import fake_trt
import pytest

from harness.base.errors import UserError
from harness.runtimes.cuda import import_runtime

ROOT = Path(__file__).parents[4] / "harness"
SOURCES = tuple(sorted(path for pattern in ("tensorrt/*.py", "tensorrt*.py", "trtexec.py", "cuda.py")
                       for path in (ROOT / "runtimes").glob(pattern)))  # fmt: skip
OWNERS = {
    "trt", "library.trt", "builder", "network", "parser", "config", "engine", "context", "inspector", "runtime",
    "error", "cache", "self.context", "session.context", "artifact.engine", "self._engine",
}  # fmt: skip
"""Expressions that stand for objects of TensorRT."""
ONLY_10 = {"FP16", "BF16", "INT8"}
"""Flags of weakly typed networks, which 11 does not have: asked for by name, and on 10 alone."""


def used(path: Path) -> Iterator[str]:
    """Attributes of TensorRT's objects in a file."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in OWNERS:
            yield node.attr


def known(major: int) -> set[str]:
    """Every name of a major version, in any class."""
    names = fake_trt.api(major)
    return {name for members in names.values() for name in members}


OURS = {"words", "said", "load_plugins", "version", "log", "major", "enter", "leave", "policy", "path", "plan",
        "inputs", "outputs", "trt", "api", "call", "strerror", "engine", "profiles"}  # fmt: skip


@pytest.mark.parametrize("major", [10, 11])
def test_used_tensorrt_names_exist_in_both_majors(major):
    names = known(major) | OURS
    wrong = {f"{path.name}: {name}" for path in SOURCES for name in used(path) if name not in names}
    assert not wrong


def test_name_scan_finds_known_uses():
    found = {name for path in SOURCES for name in used(path)}
    assert {"Builder", "OnnxParser", "build_serialized_network", "execute_async_v3", "create_timing_cache"} <= found


def test_removed_names_are_used_in_the_builder_only():
    gone = known(10) - known(11) - {"precision"}
    for path in SOURCES:
        texts = [node.value for node in ast.walk(tree(path)) if is_text(node)]
        assert gone & {*texts} <= (ONLY_10 if path.name == "library.py" else set()), path.name


def tree(path: Path) -> ast.AST:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_used_cuda_names_exist_in_cuda_python():
    found = {name for path in SOURCES for name in re.findall(r"\bcuda[A-Z]\w+", path.read_text(encoding="utf-8"))}
    assert "cudaEventElapsedTime" in found
    assert found <= fake_cuda.NAMES
    try:
        runtime = import_runtime()
    except UserError as error:
        pytest.skip(str(error))
    spaces = (runtime, runtime.cudaError_t, runtime.cudaMemcpyKind, runtime.cudaStreamCaptureMode)
    assert [name for name in sorted(found) if not any(hasattr(space, name) for space in spaces)] == []


def test_fakes_refuse_names_absent_in_their_major():
    for major, name in ((10, "build_route"), (11, "int8_calibrator")):
        config = fake_trt.FakeTensorRT(major, fake_cuda.FakeCuda()).IBuilderConfig()
        with pytest.raises(AttributeError, match=f"TensorRT {major}: IBuilderConfig has no '{name}'"):
            setattr(config, name, None)
        with pytest.raises(AttributeError, match=f"TensorRT {major}: IBuilderConfig has no '{name}'"):
            getattr(config, name)
    flags = fake_trt.FakeTensorRT(11, fake_cuda.FakeCuda()).BuilderFlag
    assert not hasattr(flags, "FP16")
    with pytest.raises(AttributeError, match=r"has no cudaFrobnicate"):
        fake_cuda.FakeCuda().cudaFrobnicate()
