"""Small Q/DQ models, made systematically: operator x types x granularity x neighbours.

`compiler_verdicts.csv` has the verdict of NVIDIA's compiler on each; `python tests/recorded/compiler_cases.py` asks it
again.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from harness.insight.compiled import GENERATED_KINDS, CompiledReport, explain_compilation
from harness.runtimes.rtx_compile import compile_file

FILE = Path(__file__).with_name("compiler_verdicts.csv")
STORAGE = {
    "int8": TensorProto.INT8, "uint8": TensorProto.UINT8, "fp8": TensorProto.FLOAT8E4M3FN,
    "e5m2": TensorProto.FLOAT8E5M2, "int4": TensorProto.INT4, "int16": TensorProto.INT16,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Form of the pair at an input.

    Attributes:
        storage: Key of `STORAGE`; "" leaves the input in float.
        per: Scale: "tensor", "one" (of shape [1]), or "axis0", "axis1".
        zero: Zero point; None: the pair has none, so that it is UINT8.
        between: Operator between the pair and its reader, a key of `BETWEEN`.
    """

    storage: str = ""
    per: str = "tensor"
    scale: float = 0.05
    zero: int | None = 0
    between: str = ""

    def __str__(self) -> str:
        marks = [self.storage or "float"]
        marks += [self.per] if self.per != "tensor" else []
        marks += [f"scale={self.scale:g}"] if self.scale != 0.05 else []
        marks += [f"zero={self.zero}"] if self.zero else ["no-zero"] if self.zero is None else []
        return "-".join([*marks, *([self.between] if self.between else [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One small model.

    Attributes:
        operator: Key of `OPERATORS`.
        pairs: Forms at the first and at the second input.
        behind: What reads the result: "", "relu", "pair", "relu+pair".
    """

    operator: str
    pairs: tuple[Pair, Pair]
    behind: str = ""

    @property
    def name(self) -> str:
        """Name in `compiler_verdicts.csv`."""
        return " ".join([self.operator, *map(str, self.pairs), *([f"> {self.behind}"] if self.behind else [])])

    def build(self) -> onnx.ModelProto:
        """Return the model."""
        net = Net()
        first, second = (partial(net.quantize, pair=pair) for pair in self.pairs)
        result = OPERATORS[self.operator](net, first, second)
        for step in filter(None, self.behind.split("+")):
            result = net.op("Relu", result) if step == "relu" else net.quantize(result, pair=self.pairs[0])
        return net.finish(result)


@dataclass(slots=True)
class Net:
    """A model under construction; nodes are named by operator and number."""

    nodes: list[Any] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def input(self, *shape: int) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
        self.shapes[name] = shape
        return name

    def weight(self, *shape: int) -> str:
        rng = np.random.default_rng(len(self.constants))
        return self.const((0.1 * rng.standard_normal(shape)).astype(np.float32))

    def const(self, values: Any, storage: int | None = None) -> str:
        name, values = f"c{len(self.constants)}", np.asarray(values)
        made = numpy_helper.from_array(values, name)
        if storage is not None:
            made = helper.make_tensor(name, storage, values.shape, values.ravel().tolist())
        self.constants.append(made)
        self.shapes[name] = values.shape
        return name

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{sum(node.op_type == kind for node in self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [f"{name}_out"], name=name, **attributes))
        return f"{name}_out"

    def quantize(self, tensor: str, pair: Pair) -> str:
        """Return the tensor behind its pair and what is between the pair and its reader."""
        if pair.storage:
            shape = self.shapes.get(tensor, ())
            axis = int(pair.per[-1]) if pair.per.startswith("axis") else None
            count = () if pair.per == "tensor" else (1,) if axis is None else (shape[axis],)
            scale = self.const(np.full(count, pair.scale, np.float32))
            zero = [] if pair.zero is None else [self.const(np.full(count, pair.zero), STORAGE[pair.storage])]
            options = {} if axis is None else {"axis": axis}
            stored = self.op("QuantizeLinear", tensor, scale, *zero, **options)
            self.shapes[stored] = shape
            result = self.op("DequantizeLinear", stored, scale, *zero, **options)
            self.shapes[result] = shape
            tensor = result
        return BETWEEN[pair.between](self, tensor) if pair.between else tensor

    def finish(self, result: str) -> onnx.ModelProto:
        output = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
        graph = helper.make_graph(self.nodes, "case", self.inputs, [output], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


Quantizer = Callable[[str], str]
BETWEEN: dict[str, Callable[[Net, str], str]] = {
    "Transpose": lambda net, x: net.op("Transpose", x, perm=[0, 2, 1]),
    "Reshape": lambda net, x: net.op("Reshape", x, net.const([1, 64, 64])),
    "Squeeze": lambda net, x: net.op("Squeeze", x, net.const([0])),
    "Unsqueeze": lambda net, x: net.op("Unsqueeze", x, net.const([0])),
    "Slice": lambda net, x: net.op("Slice", x, *map(net.const, ([-1], [-65], [1], [-1]))),
    "Flatten": lambda net, x: net.op("Flatten", x, axis=2),
    "Concat": lambda net, x: net.op("Concat", x, x, axis=0),
    "Gather": lambda net, x: net.op("Gather", x, net.const(np.arange(64)[::-1].copy()), axis=1),
    "Expand": lambda net, x: net.op("Expand", x, net.const([2, 64, 64])),
    "Tile": lambda net, x: net.op("Tile", x, net.const([2, 1, 1])),
    "Pad": lambda net, x: net.op("Pad", x, net.const([0, 0, 0, 1, 0, 0])),
    "PadEdge": lambda net, x: net.op("Pad", x, net.const([0, 0, 0, 1, 0, 0]), mode="edge"),
    "Two": lambda net, x: net.op("Transpose", net.op("Mul", x, net.const(np.float32(0.125))), perm=[0, 2, 1]),
    "Mul": lambda net, x: net.op("Mul", x, net.const(np.float32(0.125))),
    "MulVector": lambda net, x: net.op("Mul", x, net.const(np.full(64, 0.125, np.float32))),
    "MulTensor": lambda net, x: net.op("Mul", x, net.input(1, 64, 64)),
    "Sub": lambda net, x: net.op("Sub", x, net.const(np.float32(0.125))),
    "Div": lambda net, x: net.op("Div", x, net.const(np.float32(8))),
    "Add": lambda net, x: net.op("Add", x, net.const(np.float32(0.125))),
    "Relu": lambda net, x: net.op("Relu", x),
    "Identity": lambda net, x: net.op("Identity", x),
    "Softmax": lambda net, x: net.op("Softmax", x, axis=-1),
}


def _conv(
    net: Net, first: Quantizer, second: Quantizer, *, op: str = "Conv", kernel: tuple[int, ...] = (3, 3), group: int = 1
) -> str:
    data = first(net.input(1, 32, *(16 for _ in kernel)))
    return net.op(op, data, second(net.weight(32, 32 // group, *kernel)), group=group)


def _gemm(net: Net, first: Quantizer, second: Quantizer, *, transposed: int) -> str:
    data = first(net.input(64, 32))
    weight = second(net.weight(48, 32) if transposed else net.weight(32, 48))
    return net.op("Gemm", data, weight, net.weight(48), transB=transposed)


def _matmul(net: Net, first: Quantizer, second: Quantizer, *, constant: bool) -> str:
    data = first(net.input(1, 64, 64))
    return net.op("MatMul", data, second(net.weight(64, 64) if constant else net.input(1, 64, 64)))


def _two(net: Net, first: Quantizer, second: Quantizer, *, op: str, constant: bool = False, **attributes: Any) -> str:
    data = first(net.input(1, 32, 16, 16))
    return net.op(op, data, second(net.weight(1, 32, 1, 1) if constant else net.input(1, 32, 16, 16)), **attributes)


def _one(
    net: Net, first: Quantizer, _: Quantizer, *, op: str, constants: tuple[Any, ...] = (), **attributes: Any
) -> str:
    data = first(net.input(1, 32, 16, 16))
    return net.op(op, data, *(net.const(values) if values is not None else "" for values in constants), **attributes)


WEIGHTED = {
    "Conv": _conv,
    "Conv1x1": partial(_conv, kernel=(1, 1)),
    "Conv7x7": partial(_conv, kernel=(7, 7)),
    "ConvGroup2": partial(_conv, group=2),
    "ConvDepthwise": partial(_conv, group=32),
    "Conv1D": partial(_conv, kernel=(3,)),
    "ConvTranspose": partial(_conv, op="ConvTranspose"),
    "Gemm": partial(_gemm, transposed=0),
    "GemmTransB": partial(_gemm, transposed=1),
    "MatMulWeight": partial(_matmul, constant=True),
}
BINARY = {
    "MatMul": partial(_matmul, constant=False),
    "Add": partial(_two, op="Add"),
    "Mul": partial(_two, op="Mul"),
    "Concat": partial(_two, op="Concat", axis=1),
}
_FLOATS = np.float32
UNARY = {
    "Relu": partial(_one, op="Relu"),
    "Sigmoid": partial(_one, op="Sigmoid"),
    "Clip": partial(_one, op="Clip", constants=(_FLOATS(0), _FLOATS(6))),
    "Softmax": partial(_one, op="Softmax", axis=-1),
    "MaxPool": partial(_one, op="MaxPool", kernel_shape=[2, 2], strides=[2, 2]),
    "AveragePool": partial(_one, op="AveragePool", kernel_shape=[2, 2], strides=[2, 2]),
    "GlobalAveragePool": partial(_one, op="GlobalAveragePool"),
    "ReduceMean": partial(_one, op="ReduceMean", constants=([2, 3],)),
    "LayerNormalization": partial(_one, op="LayerNormalization", constants=(np.ones(16, np.float32),)),
    "Transpose": partial(_one, op="Transpose", perm=[0, 2, 3, 1]),
    "Reshape": partial(_one, op="Reshape", constants=([1, 32, 256],)),
    "Slice": partial(_one, op="Slice", constants=([0], [8], [1])),
    "Pad": partial(_one, op="Pad", constants=([0, 0, 1, 1, 0, 0, 1, 1],)),
    "Resize": partial(_one, op="Resize", constants=(None, np.array([1, 1, 2, 2], np.float32)), mode="nearest"),
    "MulConstant": partial(_one, op="Mul", constants=(_FLOATS(0.5),)),
}
OPERATORS: dict[str, Callable[[Net, Quantizer, Quantizer], str]] = {**WEIGHTED, **BINARY, **UNARY}
FLOAT, INT8, FP8 = Pair(), Pair(storage="int8"), Pair(storage="fp8")
BEHIND = ("relu", "pair", "relu+pair")


def _weight_form(operator: str, storage: str) -> Pair:
    """Return the form that our dialect gives a weight."""
    if operator in BINARY:
        return Pair(storage=storage)
    axis = {"ConvTranspose": "tensor", "Gemm": "axis1", "MatMulWeight": "axis1"}.get(operator, "axis0")
    return Pair(storage=storage, per=axis, scale=0.01)


def cases() -> tuple[Case, ...]:
    """Return all small models, each once."""
    return tuple({case.name: case for case in _iter_cases()}.values())


def _iter_cases() -> Iterator[Case]:
    kinds = ("int8", "fp8", "")
    for operator in (*WEIGHTED, *BINARY):
        for data, other in itertools.product(kinds, kinds):
            second = _weight_form(operator, other) if other else FLOAT
            for behind in ("", *BEHIND) if data == other and data else ("",):
                yield Case(operator=operator, pairs=(Pair(storage=data), second), behind=behind)
    for operator, data, behind in itertools.product(UNARY, (INT8, FP8), ("", "pair")):
        yield Case(operator=operator, pairs=(data, FLOAT), behind=behind)
    yield from _granularities()
    yield from _storages()
    yield from _neighbours()


def _granularities() -> Iterator[Case]:
    for operator, storage, per in itertools.product(WEIGHTED, ("int8", "fp8"), ("tensor", "one", "axis0", "axis1")):
        weight = Pair(storage=storage, per=per, scale=0.01)
        yield Case(operator=operator, pairs=(Pair(storage=storage), weight))
        if operator in ("Conv", "Gemm", "MatMulWeight") and per != "tensor":
            yield Case(operator=operator, pairs=(Pair(storage=storage, per=per), _weight_form(operator, storage)))
    for operator, storage, per in itertools.product(("MatMul", "Add", "MaxPool"), ("int8", "fp8"), ("one", "axis1")):
        other = Pair(storage=storage) if operator in BINARY else FLOAT
        yield Case(operator=operator, pairs=(Pair(storage=storage, per=per), other))


def _storages() -> Iterator[Case]:
    forms = (
        Pair(storage="uint8"), Pair(storage="uint8", zero=128), Pair(storage="uint8", zero=None),
        Pair(storage="int8", zero=3), Pair(storage="e5m2"), Pair(storage="int16"), Pair(storage="int4"),
        Pair(storage="int8", scale=0.0),
        Pair(storage="int8", scale=-0.05), Pair(storage="fp8", scale=0.0), Pair(storage="fp8", scale=-0.05),
    )  # fmt: skip
    for operator, form in itertools.product(("Conv", "Gemm", "MatMul", "Add", "MaxPool"), forms):
        same = form.storage if form.storage in ("int8", "fp8") else "int8"
        other = FLOAT if operator in UNARY else _weight_form(operator, same)
        yield Case(operator=operator, pairs=(form, other))
        if operator in WEIGHTED:
            yield Case(operator=operator, pairs=(Pair(storage=same), form))


def _neighbours() -> Iterator[Case]:
    for between, (one, two) in itertools.product(BETWEEN, itertools.product(("int8", "fp8"), repeat=2)):
        for sides in ((between, ""), ("", between), (between, between)):
            pairs = tuple(Pair(storage=kind, between=side) for kind, side in zip((one, two), sides, strict=True))
            yield Case(operator="MatMul", pairs=pairs)
        if between in ("Transpose", "Mul", "Relu", "Softmax"):
            weight = _weight_form("MatMulWeight", two)
            yield Case(operator="MatMulWeight", pairs=(Pair(storage=one, between=between), weight))


def node_name(case: Case) -> str:
    """Return the name of the node that a case is about."""
    kind = {"MatMulWeight": "MatMul", "MulConstant": "Mul", "GemmTransB": "Gemm"}.get(case.operator, case.operator)
    kind = "Conv" if kind.startswith("Conv") and kind != "ConvTranspose" else kind
    return f"{kind}_{sum(pair.between.startswith(kind) for pair in case.pairs)}"


def verdict(report: CompiledReport, case: Case) -> str:
    """Return the compiler's verdict on a case.

    "parser" and "builder" refuse; else the node computes in "int8", "fp8" or "float" (of a linear operator or a pool),
    or the whole model became one kernel ("built").
    """
    if report.compilation.refusal is not None:
        return report.compilation.refusal.stage
    (layer,) = [layer for layer in report.layers if layer.name == node_name(case)] or [None]
    if layer is None or layer.kind in ("", *GENERATED_KINDS):
        return "built"
    return layer.compiled if layer.compiled in ("int8", "fp8") else "float"


def save(case: Case, path: Path) -> Path:
    """Write the model of a case to a file, and return its path."""
    onnx.save(case.build(), path)
    return path


def ask_compiler(wanted: Iterable[Case]) -> Iterator[tuple[Case, str]]:
    """Yield the verdict of the installed compiler on each case."""
    with tempfile.TemporaryDirectory() as folder:
        for case in wanted:
            path = save(case, Path(folder) / "case.onnx")
            yield case, verdict(explain_compilation(path, compile_file(path, "sm89")), case)


def read_verdicts() -> dict[str, str]:
    """Return the recorded verdicts by the name of the case."""
    rows = (line.rsplit(",", 1) for line in FILE.read_text(encoding="utf-8").splitlines())
    return {name: found for name, found in rows}


if __name__ == "__main__":
    FILE.write_text("".join(f"{case.name},{found}\n" for case, found in ask_compiler(cases())), encoding="utf-8")
