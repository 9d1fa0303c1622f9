"""Predictor of the latency of placements, which proposes placements for the initial design.

A placement gives every operator a state: none, some or all of its inputs are quantized, and all readers of its result
or not. The features are multiply-accumulates, tensor sizes and numbers of operators by kind and state, as shares of the
model's totals; a linear model of them predicts the log latency relative to the float model. The coefficients were
fitted to the committed readings (`tests/recorded/train_latency_predictor.py`), once to all models and once without each
of them. The fits differ, and so do their proposals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import OPENVINO
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    LINEAR_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    POOLING_OPS,
    QUANTIZABLE_FLOAT_TYPES,
    SOFTMAX_OPS,
)
from harness.graph.rules.points import count_macs
from search.heuristics import HEURISTIC_RULES
from search.space import Edge, Placement, Space

Floats = npt.NDArray[np.float64]

FILE_NAME = "latency_predictor.json"
_LINEAR_KINDS = ("depthwise", "grouped", "pointwise", "conv", "matmul", "product")
_ARITHMETIC_KINDS = ("add", "bias", "mul", "scale", "clip", "activation", "softmax", "norm", "other")
_MOVING_KINDS = ("concat", "gpool", "pool", "resize", "view", "movement")
_POOLED = dict.fromkeys(_LINEAR_KINDS, "linear") | dict.fromkeys(_ARITHMETIC_KINDS, "arithmetic")
_POOLED |= dict.fromkeys(_MOVING_KINDS, "moving")
#: Kinds, and sums of several kinds, to which ridge regression shrinks kinds with few readings.
_KINDS = (*_POOLED, "linear", "arithmetic", "moving")
_VOLUMES = ("macs", "size", "nodes")
_STATES = tuple(f"{inputs}{outputs}" for inputs in ("none", "some", "all") for outputs in ("", "+result"))
_TENSOR_STATES = ("quantized", "requantized", "dequantized", "mixed")
COLUMNS = (
    *(f"{kind}/{state}/{volume}" for state in _STATES for kind in _KINDS for volume in _VOLUMES),
    *(f"{state}/tensor/{volume}" for state in _TENSOR_STATES for volume in _VOLUMES[1:]),
)
"""Names of the features."""
FIRST_RULES: Mapping[str, tuple[str, ...]] = MappingProxyType({"openvino": ("movers",)})
"""Rules by runtime that are proposed without a prediction: the optimum, or nearly, of most recorded tables."""
_VIEW_OPS = frozenset({"Flatten", "Reshape", "Squeeze", "Unsqueeze"})
_CLIPPING_OPS = frozenset({"Clip", "Relu"})
_MAX_STEPS = 40
_MIN_GAIN = 1e-6


class PlacementFeatures:
    """Features of the placements of one space.

    Args:
        model: Float model.
        space: Space of the model in the dialect of the runtime.
    """

    def __init__(self, model: Model, space: Space) -> None:
        self._space = space
        self._numbers: dict[Edge, int] = {edge: i for i, edge in enumerate(_all_edges(space))}
        self._model = model
        self._outputs_quantized = space.has_output_points
        nodes = [node for node in model.nodes if self._data_edges(node) and self._results(node)]
        self._inputs = _membership([self._data_edges(node) for node in nodes], self._numbers)
        self._readers = _membership([self._reader_edges(node) for node in nodes], self._numbers)
        self._input_counts = np.array([len(self._data_edges(node)) for node in nodes])
        self._reader_counts = np.array([len(self._reader_edges(node)) for node in nodes])
        self._volumes = np.array([self._node_volumes(node) for node in nodes]).reshape(len(nodes), -1)
        places = {node.name: i for i, node in enumerate(nodes)}
        tensors = [(place, name) for place, node in enumerate(nodes) for name in self._results(node)]
        tensors += [(-1, name) for name in model.inputs if self._is_float(name)]
        self._producers = np.array([place for place, _ in tensors])
        self._uses = _membership([self._edges_of(name) for _, name in tensors], self._numbers)
        self._use_counts = np.array([len(self._edges_of(name)) for _, name in tensors])
        self._edge_nodes = np.array([places.get(edge.consumer, len(nodes)) for edge in self._numbers], dtype=int)
        self._tensor_volumes = np.array([(self._size(name), 1.0) for _, name in tensors])
        totals = self._volumes.reshape(len(nodes), len(_KINDS), 3)[:, : len(_POOLED)].sum((0, 1))
        node_columns = np.tile(totals, len(_STATES) * len(_KINDS))
        self._scale = np.maximum([*node_columns, *np.tile(totals[1:], len(_TENSOR_STATES))], 1e-9)
        self._float = self._sums([space.float_placement()])

    def encode(self, placements: Sequence[Placement]) -> Floats:
        """Return the features of placements minus those of the float model, shape (placements, len(COLUMNS))."""
        return (self._sums(placements) - self._float) / self._scale

    def _sums(self, placements: Sequence[Placement]) -> Floats:
        quantized = np.zeros((len(placements), len(self._numbers)), dtype=bool)
        for row, placement in enumerate(placements):
            quantized[row, [self._numbers[edge] for edge, _ in self._space.resolve(placement)]] = True
        counts = quantized.astype(float)
        found = counts @ self._inputs
        inputs = (found > 0).astype(int) + (found >= self._input_counts)
        results = (counts @ self._readers >= self._reader_counts) & (self._reader_counts > 0)
        state = 2 * inputs + results
        sums = [(state == number) @ self._volumes for number in range(len(_STATES))]
        uses = counts @ self._uses
        integer = np.column_stack([state == len(_STATES) - 1, np.ones((len(placements), 1), dtype=bool)])
        to_float = (quantized & ~integer[:, self._edge_nodes]).astype(float) @ self._uses > 0
        after = np.column_stack([inputs == 2, np.zeros((len(placements), 1), dtype=bool)])[:, self._producers]
        for flags in ((uses > 0) & ~after, (uses > 0) & after, to_float, (uses > 0) & (uses < self._use_counts)):
            sums.append(flags @ self._tensor_volumes)
        return np.column_stack(sums)

    def _is_float(self, name: str) -> bool:
        return name in self._model.types and self._model.types[name].dtype in QUANTIZABLE_FLOAT_TYPES

    def _size(self, name: str) -> float:
        return math.prod(self._model.types[name].shape)

    def _results(self, node: Node) -> list[str]:
        return [name for name in node.outputs if self._is_float(name)]

    def _data_edges(self, node: Node) -> list[Edge]:
        return [
            Edge(name, node.name, slot)
            for slot, name in enumerate(node.inputs)
            if self._is_float(name) and self._model.is_activation(name)
        ]

    def _edges_of(self, name: str) -> list[Edge]:
        edges = [Edge(name, self._model.nodes[i].name, slot) for i, slot in self._model.consumers.get(name, ())]
        return [*edges, *([Edge(name, "", 0)] if name in self._model.output_names else [])]

    def _reader_edges(self, node: Node) -> list[Edge]:
        """Return the edges that read the result of a node, or that of an activation that is fused with it."""
        edges = [edge for name in self._results(node) for edge in self._edges_of(name)]
        while node.op in LINEAR_OPS and len(edges) == 1 and self._is_fused(edges[0]):
            (name,) = self._model.nodes[self._model.consumers[edges[0].tensor][0][0]].outputs
            edges = self._edges_of(name)
        return edges

    def _is_fused(self, edge: Edge) -> bool:
        reader = self._model.nodes[self._model.consumers[edge.tensor][0][0]] if edge.consumer else None
        return reader is not None and reader.op in (_CLIPPING_OPS if self._outputs_quantized else ACTIVATION_OPS)

    def _node_volumes(self, node: Node) -> Floats:
        """Return multiply-accumulates, elements read and written, and 1, in the columns of the node's kind and sum."""
        volumes = np.zeros((len(_KINDS), len(_VOLUMES)))
        kind = _operator_kind(self._model, node)
        names = {edge.tensor for edge in self._data_edges(node)}.union(self._results(node))
        values = (count_macs(self._model, OPENVINO, node), sum(map(self._size, names)), 1)
        volumes[[_KINDS.index(kind), _KINDS.index(_POOLED[kind])]] = values
        return volumes.ravel()


def _all_edges(space: Space) -> list[Edge]:
    return sorted({edge for dimension in space.dimensions for edge in dimension.edges})


def _membership(lists: Sequence[Sequence[Edge]], numbers: Mapping[Edge, int]) -> Floats:
    """Return a matrix [edges, lists] with 1 for each edge in a list, else 0."""
    found = np.zeros((len(numbers), len(lists)))
    for column, edges in enumerate(lists):
        found[[numbers[edge] for edge in edges if edge in numbers], column] = 1
    return found


def _operator_kind(model: Model, node: Node) -> str:
    if node.op in ("Conv", "ConvTranspose"):
        return _convolution_kind(model, node)
    both = sum(map(model.is_activation, node.inputs)) > 1
    pairs = {"MatMul": "product matmul", "Gemm": "product matmul", "Add": "add bias", "Mul": "mul scale"}
    pairs |= {"Sum": "add bias", "Div": "mul scale"}
    if node.op in pairs:
        return pairs[node.op].split()[not both]
    if node.op == "ReduceMean":
        return "gpool" if len(model.types[node.inputs[0]].shape) == 4 else "norm"
    groups: tuple[tuple[frozenset[str], str], ...] = (
        (frozenset({"Concat"}), "concat"), (frozenset({"GlobalAveragePool", "GlobalMaxPool"}), "gpool"),
        (POOLING_OPS, "pool"), (_CLIPPING_OPS, "clip"), (ACTIVATION_OPS, "activation"), (SOFTMAX_OPS, "softmax"),
        (NORMALIZATION_OPS, "norm"), (frozenset({"Resize", "Upsample"}), "resize"), (_VIEW_OPS, "view"),
        (MOVEMENT_OPS, "movement"),
    )  # fmt: skip
    return next((kind for ops, kind in groups if node.op in ops), "other")


def _convolution_kind(model: Model, node: Node) -> str:
    weight = model.types[node.inputs[1]].shape
    if int(node.attributes.get("group", 1)) > 1:
        return "depthwise" if weight[1] == 1 else "grouped"
    return "pointwise" if math.prod(weight[2:]) == 1 else "conv"


def runtime_key(facts: Mapping[str, Any]) -> str:
    """Return the key of the coefficients for a benchmarker's facts: "NAME/FLOAT_PRECISION/INSTRUCTIONS"."""
    device = str(facts.get("device", ""))
    instructions = "vnni" if "VNNI" in device or "AMX" in device else "avx2" if "AVX" in device else "unknown"
    return f"{facts['name']}/{facts.get('float_precision', 'f32')}/{instructions}"


@cache
def _coefficients() -> Mapping[str, Floats]:
    """Return the coefficients by runtime key, with shape [fits, COLUMNS]; the first fit has all models."""
    body = json.loads(resources.files(__package__).joinpath(FILE_NAME).read_text(encoding="utf-8"))
    places = [COLUMNS.index(name) for name in body["columns"]]
    found = {}
    for key, rows in body["coefficients"].items():
        found[key] = np.zeros((len(rows), len(COLUMNS)))
        found[key][:, places] = rows
    return found


def predict_log_ratios(features: Floats, coefficients: Floats) -> Floats:
    """Return the predicted log(latency / float latency), shape (fits, placements).

    Args:
        features: Result of `PlacementFeatures.encode`.
        coefficients: Shape (fits, len(COLUMNS)).
    """
    return coefficients @ features.T


def choose_portfolio(predicted: Floats, count: int, chosen: Sequence[int] = ()) -> list[int]:
    """Return the columns of a portfolio, selected greedily by the mean over fits of its lowest predicted latency.

    Args:
        predicted: Log latencies with shape [fits, placements].
        count: Maximum number of columns.
        chosen: Columns that belong to the portfolio already; not returned.
    """
    best = predicted[:, list(chosen)].min(1) if chosen else np.full(len(predicted), np.inf)
    found: list[int] = []
    for _ in range(min(count, predicted.shape[1] - len(chosen))):
        means = np.minimum(best[:, None], predicted).mean(0)
        means[[*chosen, *found]] = np.inf
        found.append(int(means.argmin()))
        best = np.minimum(best, predicted[:, found[-1]])
    return found


def propose_fast_placements(model: Model, space: Space, facts: Mapping[str, Any], count: int) -> list[Placement]:
    """Return at most `count` placements: `FIRST_RULES`, then the fastest predicted ones that complement them and "all".

    Args:
        model: Float model.
        space: Space of the model, with INT8.
        facts: Facts of the benchmarker: `name`, `device`, `float_precision`.
        count: Maximum number of placements.

    Returns:
        Different placements, without those that quantize nothing or everything; none if the predictor has no
        coefficients for the runtime.
    """
    fits = _coefficients().get(runtime_key(facts))
    if fits is None or any("int8" not in dimension.choices for dimension in space.dimensions):
        return []
    features = PlacementFeatures(model, space)

    def predict(placements: Sequence[Placement], rows: Floats = fits) -> Floats:
        return predict_log_ratios(features.encode(placements), rows)

    everything = space.quantize_all("int8")
    starts = [everything, *(rule(space, "int8") for rule in HEURISTIC_RULES.values())]
    best = starts[int(predict(starts)[0].argmin())]
    first = _descend(space, best, lambda tried: predict(tried, fits[:1])[0])
    found = [_descend(space, first, lambda tried, row=row: predict(tried, row[None])[0]) for row in fits[1:]]  # type: ignore[misc]
    float_digest = space.digest(space.float_placement())
    candidates = {space.digest(each): each for each in (*starts, first, *found)}
    candidates.pop(float_digest, None)
    listed, digests = list(candidates.values()), list(candidates)
    rules = FIRST_RULES.get(runtime_key(facts).partition("/")[0], ())
    ruled = dict.fromkeys(space.digest(HEURISTIC_RULES[name](space, "int8")) for name in rules)
    first_rows = [digests.index(digest) for digest in ruled if digest in digests[1:]][:count]
    predicted_rows = choose_portfolio(predict(listed), count - len(first_rows), [0, *first_rows])
    return [listed[row] for row in (*first_rows, *predicted_rows)]


def _descend(space: Space, start: Placement, predict: Callable[[Sequence[Placement]], Floats]) -> Placement:
    """Return a placement that no single change improves by the prediction, or the last one after `_MAX_STEPS`."""
    current, value = start, float(predict([start])[0])
    for _ in range(_MAX_STEPS):
        tried = [_flip(space, current, index) for index in range(len(space))]
        values = predict(tried)
        if values.min() > value - _MIN_GAIN:
            break
        current, value = tried[int(values.argmin())], float(values.min())
    return current


def _flip(space: Space, placement: Placement, index: int) -> Placement:
    choices = list(placement.choices)
    choices[index] = 0 if choices[index] else space.dimensions[index].choices.index("int8")
    return Placement(tuple(choices))
