"""Comparison of the results of the original and the prepared version of a model.

It runs in the helper process: neither version is trusted, and ONNX Runtime may crash.

Outputs are compared end to end first. If the result is not conclusive (an output deviates, or is an index, a boolean or
a constant, which shows little of the nodes before it), every node is compared separately: each node of the prepared
model reads the values that the original computed. A node that then agrees was not changed by preparation: it only
amplified rounding, as ArgMax, TopK, NonMaxSuppression, Round and casts to integers do near a tie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, numpy_helper

from harness.graph.equivalence.versions import (
    ComparisonTask,
    Feeds,
    ModelVersion,
    RunFailed,
    Values,
    accepted_runs,
    is_informative,
)
from harness.graph.passes.static_shapes import static_types
from harness.graph.protos import iter_graphs, iter_nodes

# Smallest signal-to-noise ratio of equal models. In FP32, a folded BatchNormalization has more than 110 dB, a changed
# operator less than 60 dB. With 11 or 8 significant bits, one rounding gives 70 or 52 dB, and roundings add up.
FP32_THRESHOLD_DB = 80.0
_THRESHOLD_DB_BY_DTYPE = {TensorProto.FLOAT16: 40.0, TensorProto.BFLOAT16: 25.0}
_ROUNDING_DB_BY_THRESHOLD = {FP32_THRESHOLD_DB: 144.0, 40.0: 66.0, 25.0: 48.0}  # of a value to half its last digit
_ROUNDING_MARGIN_DB = 20.0
_SENTINEL_MAGNITUDE = 1e30  # larger equal values, such as the -3.4e38 of attention masks, are no part of the signal
MAX_LOCAL_ELEMENTS = 500_000_000  # of intermediate results, which the comparison of nodes holds in memory twice


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceVerdict:
    """Result of a comparison.

    Attributes:
        change: Description of a difference; "" if none was found.
        unchecked: Reason why the comparison is not complete; "" if it is.
    """

    change: str = ""
    unchecked: str = ""


def compare_runs(task: ComparisonTask) -> EquivalenceVerdict:
    """Run both versions on random inputs; return the verdict on their outputs and, if necessary, on single nodes."""
    try:
        original = ModelVersion(task.original, task)
        runs = accepted_runs(original, task)
    except RunFailed as error:
        return EquivalenceVerdict(unchecked=f"ONNX Runtime cannot run the original: {error}")
    verdict, limit_db = EquivalenceVerdict(), threshold_db(original.proto)
    try:
        prepared = ModelVersion(task.prepared, task)
        session = prepared.open_session()
        for before, feeds in runs:
            after = prepared.run(session, feeds)
            deviations = {name: deviation_db(value, after.get(name)) for name, value in before.items()}
            failing = {name: found_db for name, found_db in deviations.items() if found_db < limit_db}
            if failing or not deviations or not all(map(is_informative, before.values())):
                verdict = _compare_uninformative(task, feeds, before, failing, limit_db)
            if verdict != EquivalenceVerdict():
                break
    except RunFailed as error:
        if error.not_implemented:
            return EquivalenceVerdict(unchecked=f"ONNX Runtime cannot run the prepared model: {error}")
        return EquivalenceVerdict(change=f"the prepared model does not run in ONNX Runtime: {error}")
    return verdict


def _compare_uninformative(
    task: ComparisonTask, feeds: Feeds, before: Values, failing: dict[str, float], limit_db: float
) -> EquivalenceVerdict:
    """Return the verdict on models whose outputs are not conclusive; `failing` are those that deviate, in dB."""
    original = ModelVersion(task.original, task)
    session = original.open_session()
    once, again = (original.run_samples(session, feeds) if failing else {} for _ in range(2))
    varying = [name for name in failing if deviation_db(once[name], again[name]) < limit_db]
    stable = [name for name in failing if name not in varying]
    change = _first_changed_node(original, ModelVersion(task.prepared, task), feeds, limit_db)
    if change is None and not before:
        return EquivalenceVerdict(unchecked="NumPy lacks the types of its outputs")
    if change is None:
        change = f"output {stable[0]!r}{_describe_deviation(failing[stable[0]], limit_db)}" if stable else ""
    if varying and not change:
        return EquivalenceVerdict(unchecked=f"outputs that change from run to run: {', '.join(varying)}")
    return EquivalenceVerdict(change=change)


def _first_changed_node(original: ModelVersion, prepared: ModelVersion, feeds: Feeds, limit_db: float) -> str | None:
    """Describe the first node whose results differ on equal inputs, "" if none does, or None if this is unknown."""
    graph = prepared.proto.graph
    # Weights may be nodes (PaddlePaddle); folding changes them, so they are compared together with their readers.
    nodes = (node for node in original.proto.graph.node if node.op_type != "Constant")
    producers = {name: node for node in nodes for name in node.output if name}
    made = {name for node in graph.node for name in node.output}
    folded = {t.name: t for t in graph.initializer if t.name in producers and t.data_location != TensorProto.EXTERNAL}
    names = [name for name in producers if name in made or name in folded]
    types = static_types(graph)
    if sum(math.prod(types[name].shape) for name in names if name in types) > MAX_LOCAL_ELEMENTS:
        return None
    norms = {n: node.input[0] for n, node in producers.items() if node.op_type == "BatchNormalization"}
    try:
        values = original.compute_tensors([*names, *({*norms.values()} & producers.keys() - {*names})], feeds)
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        own = prepared.compute_nodes_separately({n: v for n, v in arrays.items() if n in made}, feeds, arrays)[0]
        own |= {name: numpy_helper.to_array(tensor) for name, tensor in folded.items()}
        found = {name: (deviation_db(value, own[name]), limit_db) for name, value in values.items() if name in own}
        found = {name: figures for name, figures in found.items() if figures[0] < limit_db}
        for name in found.keys() & norms.keys() & {n for n, x in norms.items() if x in arrays}:
            found[name] = (found[name][0], normalization_db(arrays[norms[name]], arrays[name], limit_db))
        found = {name: figures for name, figures in found.items() if figures[0] < figures[1]}
        if found and not original.task.widened:
            # In 16 bits ONNX Runtime rounds less between adjacent nodes, and random numbers vary.
            alone, again = original.compute_nodes_separately(arrays, feeds, found, times=2)
            found = {
                name: figures
                for name, figures in found.items()
                if deviation_db(alone[name], own[name]) < figures[1] <= deviation_db(alone[name], again[name])
            }
    except RunFailed:
        return None
    if not found:
        return ""
    name = next(iter(found))
    node = producers[name]
    return f"node {node.name!r} ({node.op_type}, output {name!r}){_describe_deviation(*found[name])}"


def _describe_deviation(found_db: float, limit_db: float) -> str:
    if found_db == -math.inf:
        return " gives another result"
    return f" gives a result that is {found_db:.1f} dB from the original's, and at least {limit_db:g} dB are required"


def threshold_db(proto: onnx.ModelProto) -> float:
    """Return the smallest valid signal-to-noise ratio in dB: 80, but 40 with FP16 and 25 with BF16 tensors."""
    types = {value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)}
    types.update(tensor.data_type for graph in iter_graphs(proto.graph) for tensor in graph.initializer)
    for attribute in (attribute for node in iter_nodes(proto) for attribute in node.attribute):
        if attribute.name in ("to", "dtype"):
            types.add(attribute.i)
        elif attribute.HasField("t"):
            types.add(attribute.t.data_type)
    return min(_THRESHOLD_DB_BY_DTYPE.get(kind, FP32_THRESHOLD_DB) for kind in (*types, TensorProto.FLOAT))


def normalization_db(before: npt.NDArray[Any], after: npt.NDArray[Any], limit_db: float) -> float:
    """Return the smallest valid ratio in dB for a folded BatchNormalization, at most `limit_db`.

    If a mean is far larger than the spread around it, the rounding of the input alone makes the result inexact.

    Args:
        before: Input of the BatchNormalization, with channels along axis 1.
        after: Result of the BatchNormalization.
        limit_db: `threshold_db` of the model.
    """
    axes = tuple(axis for axis in range(before.ndim) if axis != 1)
    x, y = before.astype(np.float64), after.astype(np.float64)
    spread = x.var(axis=axes)
    gain = np.divide(y.var(axis=axes), spread, out=np.zeros_like(spread), where=spread > 0)
    amplified, signal = float(((x**2).mean(axis=axes) * gain).sum()), float((y**2).mean(axis=axes).sum())
    if not (amplified > 0 and signal > 0):
        return limit_db
    rounding_db = _ROUNDING_DB_BY_THRESHOLD[limit_db] - _ROUNDING_MARGIN_DB
    return min(limit_db, rounding_db - 10 * math.log10(amplified / signal))


def deviation_db(before: Any, after: Any) -> float:
    """Return the signal-to-noise ratio of two results in dB: inf if equal, -inf if their types or shapes differ.

    NaN, infinities and integers must be equal, element by element, else it is -inf; of a list it is the lowest ratio.
    """
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        if before.dtype != after.dtype or before.shape != after.shape:
            return -math.inf
        return _array_db(before, after) if before.dtype.kind == "f" else _equal_db(bool((before == after).all()))
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return min((deviation_db(*pair) for pair in zip(before, after, strict=True)), default=math.inf)
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        return deviation_db([np.asarray(v) for v in before.values()], [np.asarray(v) for v in after.values()])
    comparable = type(before) is type(after) and not isinstance(before, np.ndarray | list)
    return _equal_db(comparable and before == after)


def _equal_db(equal: bool) -> float:
    return math.inf if equal else -math.inf


def _array_db(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> float:
    if np.array_equal(before, after, equal_nan=True):
        return math.inf
    x, y = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return -math.inf
    x, y = x[finite], y[finite]
    signal = x[~((np.abs(x) > _SENTINEL_MAGNITUDE) & (x == y))]
    scale = float(np.abs(signal).max(initial=0.0))
    if not scale:
        return -math.inf
    noise = float(np.sum(((x - y) / scale) ** 2))
    return 10 * math.log10(float(np.sum((signal / scale) ** 2)) / noise) if noise else math.inf
