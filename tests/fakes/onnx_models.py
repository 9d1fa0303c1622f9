"""ONNX models of tests: loaded, run by ONNX Runtime, and the ranges of their tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from harness.graph.builder import GraphBuilder
from harness.graph.load import load_proto
from harness.graph.model import Model
from harness.graph.protos import copy_message, replace_field
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect
from search.space import Resolved

Arrays = Mapping[str, np.ndarray]
Ranges = dict[str, tuple[float, float]]


def loaded(built: GraphBuilder | onnx.ModelProto, source: str = "m", **options: Any) -> Model:
    proto = built.build() if isinstance(built, GraphBuilder) else built
    return load_proto(proto, source=source, sha256="0", **options)


def run_onnxruntime(
    model: onnx.ModelProto | Path | bytes, feeds: Arrays, names: Sequence[str] | None = None, *, optimize: bool = True
) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    return session.run(names, dict(feeds))


def activation_ranges(
    model: Model, feeds: Iterable[Arrays], *, optimize: bool = True
) -> dict[str, tuple[float, float]]:
    """Smallest and largest value of each float tensor over some runs."""
    probe = copy_message(model.proto)
    names = [name for node in model.nodes for name in node.outputs if model.types[name].dtype == "float"]
    replace_field(probe.graph.output, [onnx.ValueInfoProto(name=name) for name in names])
    seen = [dict(zip(names, run_onnxruntime(probe, f, names, optimize=optimize), strict=True)) | {**f} for f in feeds]
    return {n: (min(float(s[n].min()) for s in seen), max(float(s[n].max()) for s in seen)) for n in seen[0]}


def everywhere(model: Model, dialect: Dialect, **options: Any) -> Resolved:
    """Every edge that may be quantized."""
    space = build_space(model, dialect, **options)
    return space.resolve(space.quantize_all())


def net(
    nodes: Iterable[onnx.NodeProto],
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    constants: Arrays | None = None,
    *,
    kinds: Mapping[str, int] | None = None,
    opset: int = 17,
) -> onnx.ModelProto:
    """A model of nodes; inputs and outputs by name with their shapes, and with their types where these are no float."""
    types = {**dict.fromkeys((*inputs, *outputs), onnx.TensorProto.FLOAT), **(kinds or {})}
    ends = [[helper.make_tensor_value_info(n, types[n], each[n]) for n in each] for each in (inputs, outputs)]
    tensors = [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]
    graph = helper.make_graph(list(nodes), "net", *ends, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10 if opset > 20 else 8)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def by_name(argument: str, values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by objects with names."""
    return pytest.mark.parametrize(argument, values, ids=lambda each: each.name)


def applied(op: str, *constants: Any, **attributes: Any) -> Callable[[GraphBuilder, str], str]:
    """A function that adds an operator with these constants behind a tensor."""
    return lambda g, x: g.op(op, x, *map(g.const, constants), **attributes)


def pair(g: GraphBuilder, x: str, scale: float, zero: np.generic | None = None) -> str:
    """Add a Q/DQ pair; without a zero point it is 0 as INT8."""
    grid = g.const(scale), g.const(np.int8(0) if zero is None else zero)
    return g.op("DequantizeLinear", g.op("QuantizeLinear", x, *grid), *grid)


def new_node(op: str, inputs: Iterable[str], output: str, **attributes: Any) -> onnx.NodeProto:
    """A node of one output, with the name of it."""
    return helper.make_node(op, list(inputs), [output], **{"name": output, **attributes})
