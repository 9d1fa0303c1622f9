"""Table of known faults: operators that a runtime computes wrongly, or refuses, with an INT8 input.

Each fault is a placement rule of the dialects of its runtime, where the installed version and the processor have it.
The faults were found by comparing each quantizable operator, in many shapes, alone and between others, with ONNX
Runtime without optimizations on the same Q/DQ file. FP8 is right in all cases, because it is computed in floats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.graph.model import Model, Node
from harness.graph.rules.movement import find_repeated_input
from harness.graph.rules.operator_sets import ARITHMETIC_OPS, MOVEMENT_OPS

MAX_EPSILON = 1e-3
"""Of a normalization; wrong results are 43 dB from right ones there, for data with a deviation of 0.3."""

_PROPAGATING_OPS = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators behind which ONNX Runtime repeats the pair in front of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeFault:
    """Fault of a runtime.

    Attributes:
        id: Name of the placement rule.
        runtime: Runtime that has the fault, by the name of its package.
        text: The rule as a sentence.
        operators: Types of operators that may have the fault.
        matches: Function that returns whether a node of these types has the fault if its data are quantized.
        also_behind: Operators with one activation or a Concat through which the fault passes, besides
            `_INTEGER_PRESERVING_OPS`.
        both_sides: Whether the node has the fault only if its result is quantized and its data are not; then a pair
            behind it comes with one in front, see `points.add_required_edges`, and no input stays float.
        instructions: Label in `provenance.INT8_INSTRUCTION_SETS`, if only processors have the fault whose fastest INT8
            instructions these are; "": all processors.
        right_in: Version that is right; "" if all checked versions have the fault.
    """

    id: str
    runtime: str
    text: str
    operators: frozenset[str]
    matches: Callable[[Model, Node], bool]
    also_behind: frozenset[str] = frozenset()
    both_sides: bool = False
    instructions: str = ""
    right_in: str = ""

    @property
    def rule(self) -> str:
        """Return the rule as a sentence, with the version that is right."""
        return f"{self.text[:-1]} (right in {self.runtime} {self.right_in})." if self.right_in else self.text

    def affects(self, facts: Mapping[str, str]) -> bool:
        """Return whether a runtime has the fault on a device.

        Args:
            facts: `version` of the runtime and `device`, as `Benchmarker.describe` gives them; the fault counts as
                present if they are absent, for instance because the file is for another machine.
        """
        version, device = _release(facts.get("version", "")), facts.get("device", "")
        affected = not (version and self.right_in) or version < _release(self.right_in)
        return affected and (not device or device.endswith(f"({self.instructions})" if self.instructions else ""))


def _release(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _reduces_batch(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a mean or sum of [N > 1, C, L] over C, or over L alone with C < N, is 0 to 20 dB off."""
    known = model.types.get(node.inputs[0])
    if known is None or len(known.shape) != 3:
        return False
    axes = {2} if node.op == "GlobalAveragePool" else _reduction_axes(model, node)
    batch, channels, _ = known.shape
    if batch == 1 or (axes is not None and 0 in axes):
        return False
    return axes is None or 1 in axes or channels < batch


def _reduction_axes(model: Model, node: Node) -> set[int] | None:
    """Return the axes of a reduction of a tensor of rank 3 as numbers from 0, or None if they are not constant."""
    given = node.attributes.get("axes", ())
    if len(node.inputs) > 1 and node.inputs[1]:
        axes = model.constant_array(node.inputs[1])
        if axes is None:
            return None
        given = axes.reshape(-1).tolist()
    everything = () if node.attributes.get("noop_with_empty_axes", 0) else range(3)
    return {int(axis) % 3 for axis in given or everything}


def _pads_with_value(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a constant other than 0 is scaled like the data, so the borders are wrong (2 to 19 dB)."""
    if node.attributes.get("mode", "constant") != "constant":
        return False
    value = node.inputs[2] if len(node.inputs) > 2 else ""
    constant = model.constant_array(value)
    return bool(value) and (constant is None or bool(constant.any()))


def _has_large_epsilon(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 normalizes the stored integers with the same epsilon (5 dB with 0.1, for data as above)."""
    return float(node.attributes.get("epsilon", 1e-5)) > 1.001 * MAX_EPSILON


def _is_softmax_of_one(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4: QLinearSoftmax gives 0 instead of 1 over an axis of length 1."""
    known = model.types.get(node.inputs[0])
    return known is not None and bool(known.shape) and known.shape[int(node.attributes.get("axis", -1))] == 1


def _transposes_output(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 and 1.32.0 repeat a pair behind a Transpose in front of it (TryFixTransposeMissingDQ).

    All other readers of the tensor in front then get its rounded values, also the outputs of the model (a KV cache)
    and subgraphs, of which the runtime does not know there.
    """
    tensor, read = node.inputs[0], model.output_names | model.captured
    while (maker := model.producer_node(tensor)) is not None:
        if tensor in read:
            return True
        slot = find_repeated_input(model, maker)
        if slot is None:
            return False
        tensor = maker.inputs[slot]
    return False


def _clips_beside_zero(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 makes an integer operator of "operator, Clip, pair" and keeps the operator as well.

    So it refuses the file ("two nodes with same node name") if it did not remove the Clip before: with a lower bound
    other than 0, or behind another Clip or Relu.
    """
    maker = model.producer_node(node.inputs[0])
    low = model.constant_array(node.inputs[1]) if node.op == "Clip" and len(node.inputs) > 1 else None
    bounded = node.op == "Clip" and (low is None or bool(low.any()))
    return bounded or (maker is not None and maker.op in ("Clip", "Relu"))


def _feeds_subgraph(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 and 1.32.0 end the process: they add a pair at each reader (qdq_propagation.cc).

    They first remove nodes without effect, also those that the preparation keeps for a subgraph.
    """
    if node.outputs[0] not in model.captured:
        return False
    keeps_shape = node.op in MOVEMENT_OPS and model.types.get(node.inputs[0]) == model.types.get(node.outputs[0])
    return keeps_shape or node.op in _PROPAGATING_OPS or find_repeated_input(model, node) is not None


def _has_unused_output(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 and 1.32.0 count pairs: two behind one result, of Relu and of others, become two results."""
    return any(name not in model.consumers and name not in model.output_names | model.captured for name in node.outputs)


def _is_dilated(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 and 1.32.0 have no integer kernel with this attribute (opset 19), and refuse the file."""
    return "dilations" in node.attributes


def _scales_bias(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 quantizes a float bias behind quantized operands, and leaves out the factor alpha."""
    operand, bias = node.inputs[1], node.inputs[2] if len(node.inputs) > 2 else ""
    scaled = node.attributes.get("alpha", 1.0) != 1.0
    return scaled and operand not in model.constants and bias in model.constants


def _fills_half_tile(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 loses columns from the 17th on in a last block of 17 to 31 columns, if there are 32 rows.

    Its AMX kernel is that of all products but convolutions of 4n to 4m channels (onnxruntime#26324, #27671). Several
    threads divide the columns of a matrix that is wider than high into multiples of 16.
    """
    weight, result = (model.types.get(name) for name in (node.inputs[1], node.outputs[0]))
    if weight is None or result is None or len(result.shape) < 2:
        return True
    if node.op == "Conv":
        groups = int(node.attributes.get("group", 1))
        columns, rows, wide = weight.shape[0] // groups, math.prod(result.shape[2:]), False
        if groups == 1 and columns % 4 == weight.shape[1] % 4 == 0:
            return False
    else:
        columns, rows = (
            result.shape[-1],
            math.prod(result.shape[:-1] if len(weight.shape) == 2 else result.shape[-2:-1]),
        )
        wide = columns > rows
    return rows >= 32 and columns > 16 and (columns % 32 > 16 or (wide and columns % 16 > 0))


def _is_cubic(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 cannot run it on integers, which it tries where the result has the scale of the data."""
    return bool(node.attributes.get("mode") == "cubic")


def _has_rounded_bound(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 rounds the bounds of a Clip to steps of the pair in front of it, by up to a step.

    A positive lower bound may become 0, for which a root, a logarithm or a division behind it is 0 to 15 dB off; and a
    bound may fall below the integer that a Floor makes of it. Bounds around 0 (0 and 6) only lose accuracy.
    """
    given = zip((*node.inputs[1:], "", ""), (-np.inf, np.inf), strict=False)
    bounds = [model.constant_array(name) if name else np.array(limit) for name, limit in given]
    if any(bound is None or bound.size != 1 for bound in bounds):  # computed, so unknown
        return True
    low, high = (bound.item() for bound in bounds if bound is not None)
    if low > 0 or high < 0:
        return True
    if not any(math.isfinite(bound) and bound for bound in (low, high)):
        return False
    readers = [model.nodes[index] for index, _ in model.consumers.get(node.outputs[0], ())]
    kinds = {model.types[reader.outputs[0]].dtype for reader in readers if reader.outputs[0] in model.types}
    return any(reader.op in _STEP_OPS for reader in readers) or not kinds <= _FLOAT_TYPES


RUNTIME_FAULTS = (
    RuntimeFault(
        id="batched reduction",
        runtime="openvino",
        text="The runtime computes a mean or sum over the rows of several matrices wrongly.",
        operators=frozenset({"GlobalAveragePool", "ReduceMean", "ReduceSum"}),
        matches=_reduces_batch,
    ),
    RuntimeFault(
        id="padding value",
        runtime="openvino",
        text="The runtime scales the value of a Pad, which is not 0, as if it were data.",
        operators=frozenset({"Pad"}),
        matches=_pads_with_value,
    ),
    RuntimeFault(
        id="epsilon",
        runtime="openvino",
        text="The runtime adds the large epsilon of a normalization to unscaled data.",
        operators=frozenset({"GroupNormalization", "InstanceNormalization", "LayerNormalization"}),
        matches=_has_large_epsilon,
    ),
    RuntimeFault(
        id="clip bound",
        runtime="openvino",
        text="The runtime rounds the bounds of a Clip to steps of the pair in front, past 0 or the integer of a Floor.",
        operators=frozenset({"Clip"}),
        matches=_has_rounded_bound,
        also_behind=frozenset({"Add", "Concat", "Div", "Mul", "Sub"}),
    ),
    RuntimeFault(
        id="softmax of one",
        runtime="onnxruntime",
        text="The runtime computes 0 for a Softmax over an axis of length 1.",
        operators=frozenset({"Softmax"}),
        matches=_is_softmax_of_one,
        right_in="1.32.0",
    ),
    RuntimeFault(
        id="cubic resize",
        runtime="onnxruntime",
        text="The runtime cannot resize integers with mode cubic.",
        operators=frozenset({"Resize"}),
        matches=_is_cubic,
        right_in="1.32.0",
    ),
    RuntimeFault(
        id="half tile",
        runtime="onnxruntime",
        text="The runtime loses results with AMX if the last 32 columns of a product are more than half full, not full.",
        operators=frozenset({"Conv", "Gemm", "MatMul"}),
        matches=_fills_half_tile,
        instructions="AMX",
        right_in="1.32.0",
    ),
    RuntimeFault(
        id="dilated pool",
        runtime="onnxruntime",
        text="The runtime refuses an AveragePool of integers with the attribute dilations.",
        operators=frozenset({"AveragePool"}),
        matches=_is_dilated,
    ),
    RuntimeFault(
        id="scaled bias",
        runtime="onnxruntime",
        text="The runtime scales the bias of a Gemm with alpha wrongly if both operands are activations.",
        operators=frozenset({"Gemm"}),
        matches=_scales_bias,
        right_in="1.32.0",
    ),
    RuntimeFault(
        id="transposed output",
        runtime="onnxruntime",
        text="The runtime rounds an output of the model, or what a subgraph reads, if only its Transpose is quantized.",
        operators=frozenset({"Transpose"}),
        matches=_transposes_output,
        both_sides=True,
    ),
    RuntimeFault(
        id="redundant clip",
        runtime="onnxruntime",
        text="The runtime refuses a Clip with a lower bound other than 0, or behind another one, in front of a pair.",
        operators=frozenset({"Clip", "Relu"}),
        matches=_clips_beside_zero,
        both_sides=True,
        right_in="1.32.0",
    ),
    RuntimeFault(
        id="captured tensor",
        runtime="onnxruntime",
        text="The runtime crashes if a subgraph reads the result of an operator that only moves values.",
        operators=_PROPAGATING_OPS | MOVEMENT_OPS | ARITHMETIC_OPS | {"Cast", "Concat", "Dropout", "Identity"},
        matches=_feeds_subgraph,
    ),
    RuntimeFault(
        id="unused result",
        runtime="onnxruntime",
        text="The runtime exchanges results of a Split if one of them has no reader.",
        operators=frozenset({"Split"}),
        matches=_has_unused_output,
    ),
)
"""Faults in the order in which their rules are checked; a dialect has those of its runtime."""


def known_faults(runtime: str) -> tuple[RuntimeFault, ...]:
    """Return the known faults of a runtime in any version and on any processor."""
    return tuple(fault for fault in RUNTIME_FAULTS if fault.runtime == runtime)


_STEP_OPS = frozenset({"Ceil", "Floor", "Mod", "Round", "Sign"})
_FLOAT_TYPES = frozenset({"bfloat16", "double", "float", "float16"})
_INTEGER_PRESERVING_OPS = MOVEMENT_OPS | {"LeakyRelu", "MaxPool", "PRelu", "Relu"}
"""Operators behind which a runtime dequantizes instead of in front of them."""


def find_affected_nodes(model: Model) -> Mapping[str, frozenset[int]]:
    """Return the indices of affected nodes by id of the fault.

    These are the nodes with the fault, and nodes that pass stored integers to them. If pairs are needed on both sides,
    they are the nodes with the fault, and nodes in front of which the runtime repeats the pair behind them.
    """
    found: dict[str, set[int]] = {fault.id: set() for fault in RUNTIME_FAULTS}
    tensors: dict[str, set[str]] = {fault.id: set() for fault in RUNTIME_FAULTS}
    nodes = [node for node in model.nodes if not node.opaque and node.inputs]
    repeated = {node.index: find_repeated_input(model, node) for node in nodes}
    for fault in RUNTIME_FAULTS:
        passing = _PROPAGATING_OPS if fault.both_sides else _INTEGER_PRESERVING_OPS
        for node in nodes if fault.both_sides else reversed(nodes):
            slot, activations = repeated[node.index], [name for name in node.inputs if model.is_activation(name)]
            alone = node.op == "Concat" or len(activations) == 1
            data = activations if alone and not fault.both_sides else [node.inputs[slot or 0]]
            before, behind = (data, node.outputs) if fault.both_sides else (node.outputs, data)
            passes = slot is not None or node.op in passing or (alone and node.op in fault.also_behind)
            affected = passes and not tensors[fault.id].isdisjoint(before)
            if affected or (node.op in fault.operators and fault.matches(model, node)):
                found[fault.id].add(node.index)
                tensors[fault.id].update(behind)
    return {name: frozenset(indices) for name, indices in found.items()}
