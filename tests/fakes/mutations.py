"""Valid files of every kind that the harness reads, and seeded mutations of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import onnx
from onnx import TensorProto, helper

from harness.graph.builder import GraphBuilder

EXPERIMENT_YAML = """
experiment: small
models: [{use: net.onnx, label: net, calibration: {samples: 2}}]
backends: [{use: simulated, params: {seed: 5}}]
searchers: [random, {use: tpe, label: tpe5}]
budget: {evaluations: [25, 50]}
executor: {use: local, workers: 2}
matrix: {backends.params.seed: [1, 2]}
"""
PATTERN_CACHE = f"""
kind: qdq pattern cache
schema: 1
minimum_distance: 4
maximum_schemes: 32
patterns:
- signature: {"ab" * 32}
  size: 3
  schemes:
  - {{latency_ms: 4.5, baseline_ms: 9.0, backend: openvino, precision: int8, device: "", points: [output/0.0/int8]}}
"""
AUTOTUNE_STATE = """
kind: qdq autotuner state
schema: 1
facts: {model_sha256: ab, inputs: {x: [1, 3]}}
baseline_latency_ms: 9.0
interleaved: false
current_profile_pattern_schemes_signature: null
config: {verbose: false}
measured: {abcd: {latency_ms: 4.5, signature: ab, timestamp: '2026-11-21T21:00:00+00:00'}}
patterns:
- pattern_signature: ab
  pattern_size: 3
  schemes:
  - {latency_ms: 4.5, error: false, profile_timestamp: null, nodes_insertion_points: [], child_region_inputs: [],
     region_outputs: [], hash: ab}
"""


def onnx_files() -> list[bytes]:
    """Small models with all that goes wrong: weights, constants, branches, attributes, a subgraph."""
    builder = GraphBuilder("conv", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for channels in (4, 6):
        x = builder.op("Relu", builder.conv(x, channels, 3, pad=1))
    x = builder.op("Add", x, builder.conv(x, 6, 1))
    builder.output(builder.op("GlobalAveragePool", x))
    made = [builder.build().SerializeToString()]
    branch = helper.make_graph(
        [helper.make_node("Identity", ["y"], ["z"])], "then", [], [helper.make_tensor_value_info("z", 1, [1, 4])]
    )
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["y"]),
            helper.make_node("If", ["c"], ["o"], then_branch=branch, else_branch=branch),
            helper.make_node("Reshape", ["o", "s"], ["r"]),
        ],
        "sub",
        [helper.make_tensor_value_info("x", 1, [1, 4]), helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("r", 1, None)],
        [helper.make_tensor("w", 1, [4, 4], [0.5] * 16), helper.make_tensor("s", TensorProto.INT64, [2], [2, -1])],
    )
    made.append(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString())
    return made


def flipped(raw: bytes, rng: random.Random) -> bytes:
    """A few bits turned over."""
    data = bytearray(raw)
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(data)


def truncated(raw: bytes, rng: random.Random) -> bytes:
    """Cut short."""
    return raw[: rng.randrange(len(raw))]


def spliced(raw: bytes, rng: random.Random) -> bytes:
    """A piece taken out, doubled or moved."""
    a, b = sorted(rng.randrange(len(raw)) for _ in range(2))
    piece, at = raw[a:b], rng.randrange(len(raw))
    return rng.choice([raw[:a] + raw[b:], raw[:b] + piece + raw[b:], raw[:at] + piece + raw[at:]])


def random_bytes(raw: bytes, rng: random.Random) -> bytes:
    """Noise in the middle."""
    a = rng.randrange(len(raw))
    return raw[:a] + rng.randbytes(rng.randint(1, 32)) + raw[a + rng.randint(0, 32) :]


def rewritten(raw: bytes, rng: random.Random) -> bytes:
    """Well-formed, with fields that lie: shapes, types, names, attributes, edges."""
    proto = onnx.ModelProto.FromString(raw)
    graph = proto.graph
    for _ in range(rng.randint(1, 3)):
        with suppress(IndexError):  # the part that it would change was dropped before
            rng.choice([_shape, _rename, _retype, _attribute, _drop, _version])(graph, proto, rng)
    return proto.SerializeToString()


def _shape(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    wild = rng.choice([0, -1, 1, 2**31 - 1, 2**31, 2**40, 2**62, -(2**62)])
    tensor = rng.choice(list(graph.initializer))
    if tensor.dims and rng.random() < 0.5:
        tensor.dims[rng.randrange(len(tensor.dims))] = wild
    else:
        dims = rng.choice(list(graph.input)).type.tensor_type.shape.dim
        if dims:
            rng.choice(list(dims)).dim_value = wild


def _rename(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    names = [name for node in graph.node for name in (*node.input, *node.output)] + [
        "",
        "../x",
        "\udcff" * 0 + "é" * 500,
    ]
    node = rng.choice(list(graph.node))
    target = rng.choice([node.input, node.output])
    if target:
        target[rng.randrange(len(target))] = rng.choice(names)


def _retype(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    kind = rng.choice([0, 1, 2, 7, 8, 9, 10, 14, 16, 17, 99])
    rng.choice(list(graph.initializer)).data_type = kind
    if rng.random() < 0.5:
        rng.choice(list(graph.input)).type.tensor_type.elem_type = kind


def _attribute(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    node = rng.choice(list(graph.node))
    for attribute in node.attribute:
        if attribute.ints:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice([0, -1, 2**31, 2**62, -(2**62)])
        attribute.type = rng.choice([attribute.type, 1, 2, 3, 4, 5, 6, 7])
    if rng.random() < 0.3:
        node.op_type = rng.choice(
            ["Conv", "Loop", "Scan", "Reshape", "Expand", "Tile", "ConstantOfShape", "Range", "nope"]
        )


def _drop(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    part = rng.choice([graph.node, graph.initializer, graph.input, graph.output])
    if part:
        del part[rng.randrange(len(part))]


def _version(graph: onnx.GraphProto, proto: onnx.ModelProto, rng: random.Random) -> None:
    proto.opset_import[0].version = rng.choice([0, -1, 1, 7, 11, 13, 26, 999, 2**40])
    proto.ir_version = rng.choice([0, 1, 3, 8, 10, 99, 2**40])


BYTE_MUTATIONS = (flipped, truncated, spliced, random_bytes)
ONNX_MUTATIONS: tuple[Callable[[bytes, random.Random], bytes], ...] = (*BYTE_MUTATIONS, rewritten)


def edited(raw: bytes, rng: random.Random) -> bytes:
    """Text with a few characters replaced by others, more or fewer of them."""
    data = list(raw.decode())
    letters = [*sorted(set(data)), "&", "*", "!", "\t", "\u00e9", "\x85", "%"]
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data))
        data[at : at + rng.randint(0, 3)] = rng.choices(letters, k=rng.randint(0, 3))
    return "".join(data).encode()


ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 2**63, -(2**70), 1e308, float("nan"), "", "x", "../x", "\0", "\ud800", [], [[]], {},
)  # fmt: skip


def misfilled(value: Any, rng: random.Random) -> Any:
    """JSON with one value replaced, dropped or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: misfilled(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:place] + value[place + 1 :] if rng.random() < 0.5 else [*value, value[place]]
        return [misfilled(entry, rng) if number == place else entry for number, entry in enumerate(value)]
    return rng.choice(ODD_VALUES)
