"""Every operator of ONNX with ranks, sizes, types and attributes that lie: read or refused, and nothing falls or hangs.

QDQ_FUZZ sets how many (docs/explanation/reliability.md has the figures); QDQ_SEED draws others. As in
test_hostile_models.py, files are read in a fork, which says by a file how far it came.
"""

from __future__ import annotations

import gc
import os
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, defs, helper, numpy_helper
from onnx_models import net

from harness.base.errors import UserError
from harness.graph.load import load
from harness.workers import helper_process

FUZZ = int(os.environ.get("QDQ_FUZZ", "300"))
SEED = int(os.environ.get("QDQ_SEED", "7"))
BATCH, SLOW_S = 100, 30
SMALL = (0, -1, 1, 2, 3, 7)
WILD = (*SMALL, 2**31, 2**40, 2**62, -(2**62))
TYPES = {
    "float": TensorProto.FLOAT, "double": TensorProto.DOUBLE, "int64": TensorProto.INT64, "int32": TensorProto.INT32,
    "uint8": TensorProto.UINT8, "int8": TensorProto.INT8, "bool": TensorProto.BOOL,
}  # fmt: skip
SCHEMAS = sorted(
    (schema for schema in defs.get_all_schemas() if not schema.domain and not schema.deprecated),
    key=lambda schema: schema.name,
)


def model_of(rng: random.Random) -> onnx.ModelProto:
    """One operator that lies, and a Relu behind it."""
    schema = rng.choice(SCHEMAS)
    most = min(max(schema.min_input, schema.max_input), schema.min_input + 4)
    inputs, weights, names = [], [], []
    for index in range(rng.randint(schema.min_input, most)):
        name = f"i{index}"
        names.append(name if rng.random() < 0.95 else "")
        kind = _kind(schema, index, rng)
        dims = [rng.choice((1, 2, 3, 4, 8, 0)) for _ in range(rng.choice((0, 1, 2, 3, 4, 4, 5)))]
        if rng.random() < 0.5 and kind != TensorProto.BOOL:
            weights.append(_weight(name, kind, dims, rng))
        else:
            if dims and rng.random() < 0.1:
                dims[0] = max(0, rng.choice(WILD))
            inputs.append(helper.make_tensor_value_info(name, kind, dims if rng.random() < 0.9 else None))
    outputs = [f"o{index}" for index in range(rng.randint(1, max(1, min(schema.max_output, 3))))]
    node = helper.make_node(schema.name, names, outputs, name="lies")
    node.attribute.extend(_attributes(schema, rng))
    end = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    nodes = [node, helper.make_node("Relu", ["o0"], ["y"], name="behind")]
    opset = rng.choice([13, 17, 19, schema.since_version, 26])
    graph = helper.make_graph(nodes, "lies", inputs, [end], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def _kind(schema: defs.OpSchema, index: int, rng: random.Random) -> int:
    """An element type, most often one that the operator takes there."""
    wanted = schema.inputs[min(index, len(schema.inputs) - 1)].type_str
    allowed = {c.type_param_str: c.allowed_type_strs for c in schema.type_constraints}.get(wanted, [wanted])
    fitting = [kind for name, kind in TYPES.items() if f"tensor({name})" in allowed]
    return rng.choice(fitting) if fitting and rng.random() < 0.9 else TensorProto.FLOAT


def _weight(name: str, kind: int, dims: list[int], rng: random.Random) -> onnx.TensorProto:
    values = [rng.choice(WILD if kind == TensorProto.INT64 else SMALL) for _ in range(int(np.prod(dims)))]
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    return numpy_helper.from_array(np.array(values, np.int64).reshape(dims).astype(dtype), name)


def _attributes(schema: defs.OpSchema, rng: random.Random) -> list[onnx.AttributeProto]:
    made: dict[Any, Any] = {
        AttributeProto.INT: lambda: rng.choice(WILD),
        AttributeProto.INTS: lambda: [rng.choice(WILD) for _ in range(rng.randint(0, 5))],
        AttributeProto.FLOAT: lambda: rng.choice((0.0, 1.0, -1.0, float("nan"), float("inf"), 1e30)),
        AttributeProto.FLOATS: lambda: [rng.choice((0.0, 1.0, -1.0, 1e30)) for _ in range(rng.randint(0, 5))],
        AttributeProto.STRING: lambda: rng.choice(
            ("", "VALID", "SAME_UPPER", "linear", "ij,jk->ik", "...", "constant")
        ),
        AttributeProto.TENSOR: lambda: numpy_helper.from_array(np.array([rng.choice(SMALL)], np.int64)),
    }
    return [
        helper.make_attribute(attribute.name, made[int(attribute.type)](), attr_type=int(attribute.type))
        for attribute in schema.attributes.values()
        if int(attribute.type) in made and (attribute.required or rng.random() < 0.5)
    ]


def read_all(folder: Path, numbers: range) -> None:
    """Body of a fork."""
    helper_process.HELPER_CALL_LIMIT_S = 5.0  # the first constant that is computed waits for ONNX Runtime to be loaded
    for number in numbers:
        (folder / "at").write_text(f"{number} making")
        proto = model_of(random.Random(f"{SEED} {number}"))
        (folder / "at").write_text(f"{number} {proto.graph.node[0].op_type}")
        (folder / "lies.onnx").write_bytes(proto.SerializeToString())
        signal.alarm(SLOW_S)
        try:
            load(folder / "lies.onnx")
            said = "read"
        except UserError:
            said = "refused"
        except Exception as error:  # a finding
            said = f"{type(error).__name__}: {str(error)[:150]!r}"
        with (folder / "said").open("a") as file:
            file.write(f"{said} {proto.graph.node[0].op_type}\n")


@pytest.mark.slow
def test_malformed_operators_do_not_crash(tmp_path):
    fallen, number = [], 0
    while number < FUZZ:
        child = os.fork()
        if not child:
            gc.freeze()  # finalizers of the parent's objects may wait for threads that a fork lacks
            code = 1
            try:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
                read_all(tmp_path, range(number, min(number + BATCH, FUZZ)))
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        at = (tmp_path / "at").read_text()
        if status:
            fallen.append(f"{at}: signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"{at}: raised")
        number = int(at.split()[0]) + 1
    said = (tmp_path / "said").read_text().splitlines()
    findings = [line for line in said if line.split()[0] not in ("read", "refused")]
    counts = {what: sum(line.startswith(what) for line in said) for what in ("read", "refused")}
    print(f"{FUZZ} operators: {counts}", *fallen, *findings, sep="\n")
    assert (fallen, findings) == ([], [])
    assert min(counts.values()) > FUZZ // 50


@pytest.mark.parametrize(
    ("shape", "attributes", "message"),
    [
        ((1, 8), {}, "shape inference was ended by SIGABRT.* damaged"),
        ((1, 3, 8, 8), {"strides": [0, 0]}, "shape inference was ended by SIGFPE.* damaged"),
    ],
)
def test_operators_that_crash_onnx_are_refused(tmp_path, shape, attributes, message):
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="conv", **attributes)
    weight = np.ones((4, 3, 3, 3), np.float32)
    onnx.save(net([node], {"x": shape}, {"y": None}, {"w": weight}), tmp_path / "falls.onnx")
    with pytest.raises(UserError, match=f"falls.onnx: {message}"):
        load(tmp_path / "falls.onnx")
