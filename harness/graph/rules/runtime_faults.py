"""Table of known faults: operators that a runtime computes wrongly, or refuses, with an INT8 input.

Each fault is a placement rule of the dialects of its runtime, where the installed version and the processor have it.
The faults were found by comparing each quantizable operator, in many shapes, alone and between others, with ONNX
Runtime without optimizations on the same Q/DQ file. FP8 is right in all cases, because it is computed in floats.

To add a fault: a row of `RUNTIME_FAULTS`, a small model with its id in `MODELS` of tests/cases/test_known_faults.py,
where it is right with the rule and wrong without it, and its row in docs/explanation/measurement.md.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from harness.graph.model import Model, Node
from harness.graph.rules.movement import find_repeated_input
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    ARITHMETIC_OPS,
    LINEAR_OPS,
    MOVEMENT_OPS,
    POINT_OPS,
    SOFTMAX_OPS,
)
from harness.graph.rules.precision_sensitive import find_nonnegative_tensors

MAX_EPSILON = 1e-3
"""Of a normalization; wrong results are 43 dB from right ones there, for data with a deviation of 0.3."""

_PROPAGATING_OPS = frozenset({"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"})
"""Operators behind which ONNX Runtime repeats the pair in front of them."""


@dataclass(frozen=True, slots=True)
class RuntimeFault:
    """Fault of a runtime.

    Attributes:
        id: Name of the fault, which is that of its placement rule.
        runtime: Runtime that has the fault, by the name of its package.
        text: The rule as a sentence.
        operators: Types of operators that may have the fault.
        matches: Function that returns whether a node of these types has the fault if its data are quantized.
        both_sides: Whether the node has the fault only if its result is quantized and its data are not; then a pair
            behind it comes with one in front, see `points.add_required_edges`, and no input stays float.
        is_passed: Whether nodes that pass stored integers on to such a node are affected too.
        instructions: Label in `provenance.INT8_INSTRUCTION_SETS`, if only processors have the fault whose fastest INT8
            instructions these are; "": all processors.
        right_in: Version that is right; "" if all checked versions have the fault.
    """

    id: str
    runtime: str
    text: str
    operators: frozenset[str]
    matches: Callable[[Model, Node], bool]
    both_sides: bool = False
    instructions: str = ""
    right_in: str = ""
    is_passed: bool = True

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


def _tensors_before(ends: Callable[[Model, Node], bool], passing: frozenset[str]) -> Callable[[Model], frozenset[str]]:
    """Return an analysis that finds the activations that some nodes read, directly or behind operators of some types.

    Args:
        ends: Function that returns whether a node is one of these nodes.
        passing: The types of operators.
    """

    def find(model: Model) -> frozenset[str]:
        found: set[str] = set()
        for node in reversed(model.nodes):
            passes = node.op in passing and not found.isdisjoint(node.outputs)
            if not node.opaque and (passes or ends(model, node)):
                found.update(filter(model.is_activation, node.inputs))
        return frozenset(found)

    return find


def _reduces_batch(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a mean or sum of [N > 1, C, L] over C, or over L alone with C < N, is 0 to 20 dB off.

    So is a LeakyRelu of it whose data are quantized, as both become one kernel, which scales the stored integers.
    """
    if node.op in ("LeakyRelu", "PRelu"):
        reduction = model.producer_node(node.inputs[0])
        return reduction is not None and reduction.op in _BATCH_REDUCTIONS and _reduces_batch(model, reduction)
    known, axes = model.types.get(node.inputs[0]), _reduction_axes(model, node)
    if known is None or len(known.shape) != 3:
        return False
    batch, channels, _ = known.shape
    if batch == 1 or (axes is not None and 0 in axes):
        return False
    return axes is None or 1 in axes or channels < batch


_BATCH_REDUCTIONS = frozenset({"GlobalAveragePool", "ReduceMean", "ReduceSum"})


def _reduction_axes(model: Model, node: Node) -> set[int] | None:
    """Return the axes of a reduction of a tensor of rank 3 as numbers from 0, or None if they are not constant."""
    if node.op.startswith("Global"):
        return {2}
    given = node.attributes.get("axes", ())
    if len(node.inputs) > 1 and node.inputs[1]:
        axes = model.constant_array(node.inputs[1])
        if axes is None:
            return None
        given = axes.reshape(-1).tolist()
    everything = () if node.attributes.get("noop_with_empty_axes", 0) else range(3)
    return {int(axis) % 3 for axis in given or everything}


def _scales_rows(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a reduction of [N > 1, C, L] over L is -2 to 26 dB off if factors of channels move behind it.

    Such factors are the scales of a quantized Conv, or those of a Mul with a pair in front or behind the reduction.
    """
    rows = model.cached_analysis(_FIND_REDUCED_ROWS)
    if node.op in ("Conv", "ConvTranspose", "Div", "Mul") and node.outputs[0] in rows:
        return True
    reductions = [maker for name in node.inputs if (maker := model.producer_node(name)) and _reduces_rows(model, maker)]
    factors = [model.producer_node(reduction.inputs[0]) for reduction in reductions]
    return any(factor is not None and factor.op in ("Div", "Mul") for factor in factors)


def _reduces_rows(model: Model, node: Node) -> bool:
    if node.op not in _BATCH_REDUCTIONS | _EXTREMUM_OPS:
        return False
    known, axes = model.types.get(node.inputs[0]), _reduction_axes(model, node)
    return known is not None and len(known.shape) == 3 and known.shape[0] > 1 and (axes is None or 2 in axes)


_FIND_REDUCED_ROWS = _tensors_before(
    _reduces_rows, frozenset({"Div", "Dropout", "Identity", "LeakyRelu", "Mul", "Neg", "PRelu", "Relu"})
)


def _pads_with_value(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: a constant other than 0 is scaled like the data, so the borders are wrong (2 to 19 dB)."""
    if node.attributes.get("mode", "constant") != "constant":
        return False
    value = node.inputs[2] if len(node.inputs) > 2 else ""
    constant = model.constant_array(value)
    return bool(value) and (constant is None or bool(constant.any()))


_EXTREMUM_OPS = frozenset({"GlobalMaxPool", "ReduceMax", "ReduceMin"})
_ELEMENTWISE_OPS = ACTIVATION_OPS | ARITHMETIC_OPS | SOFTMAX_OPS | {"Abs", "Exp", "Neg", "Sign"}
_RESHAPING_OPS = frozenset({"Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
_STRIDED_OPS = _ELEMENTWISE_OPS | {"Dropout", "Identity", "Squeeze", "Unsqueeze"}
_SCALING_OPS = frozenset({"Add", "Div", "Mul", "Sub"})
_PRODUCT_OPS = frozenset({"Einsum", "Gemm", "MatMul"})
_SEQUENCE_OPS = _ELEMENTWISE_OPS | {"Cast", "Ceil", "Dropout", "Floor", "Identity", "Log", "Mod", "Reciprocal", "Round"}


def _find_extrema(model: Model) -> frozenset[str]:
    """OpenVINO 2026.4.1 collects in the type of the kernel's result: 8 bits if it is quantized (8 to 20 dB).

    Operators of one operand become part of the kernel, also several that are one (x * Sigmoid(x)). The pair behind a
    Concat is moved in front of it.
    """
    found: set[str] = set()
    for node in model.nodes:
        operands = set(filter(model.is_activation, node.inputs))
        fused = node.op == "Concat" or (
            node.op in _ELEMENTWISE_OPS | _RESHAPING_OPS and (len(operands) == 1 or operands <= found)
        )
        if not node.opaque and (node.op in _EXTREMUM_OPS or (fused and not found.isdisjoint(node.inputs))):
            found.update(node.outputs)
    return frozenset(found)


def _pools_border(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1: the border is 0 in stored integers; unsigned data with a zero point are -7 to 15 dB off."""
    padded = any(node.attributes.get("pads", ())) or str(node.attributes.get("auto_pad", "")).startswith("SAME")
    counted = bool(node.attributes.get("count_include_pad", 0)) and padded
    return counted and node.inputs[0] not in model.cached_analysis(find_nonnegative_tensors)


def _drops_border(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 replaces it by a MaxPool with the strides of the Conv and a Conv without strides.

    It also moves the strides of a Conv behind it to the Conv in front, past elementwise operators and axes of length 1.
    A pair in front of such operators before the Conv has the same effect.
    """
    inner = node.op in _STRIDED_OPS and node.outputs[0] in model.cached_analysis(_FIND_BORDERS)
    return inner or _is_strided_border(model, node)


def _is_strided_border(model: Model, node: Node) -> bool:
    if node.op != "Conv" or not any(node.attributes.get("pads", ())) or not _is_point(model, node):
        return False
    return _has_strides(node) or node.outputs[0] in model.cached_analysis(_FIND_STRIDED)


def _has_strides(node: Node) -> bool:
    return node.op == "Conv" and any(stride > 1 for stride in node.attributes.get("strides", ()))


def _is_point(model: Model, node: Node) -> bool:
    known = model.types.get(node.inputs[1])
    return known is not None and set(known.shape[2:]) == {1}


_FIND_BORDERS = _tensors_before(_is_strided_border, _STRIDED_OPS)
_FIND_STRIDED = _tensors_before(lambda model, node: _has_strides(node) and _is_point(model, node), _STRIDED_OPS)


def _pools_columns(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 takes the scales of columns for those of channels; it refuses the file, or is 4 to 10 dB off.

    Behind an activation, a bias or a change of the shape these scales stay in front of a pool, but not of a pool that
    the runtime makes of the strides of a Conv of one element.
    """
    pooled = model.cached_analysis(_FIND_POOLED) | model.cached_analysis(_FIND_STRIDED)
    return node.inputs[1] in model.constants and node.outputs[0] in pooled


def _copies_or_pools(_: Model, node: Node) -> bool:
    nearest = node.op == "Resize" and node.attributes.get("mode", "nearest") == "nearest"
    return nearest or node.op in ("AveragePool", "MaxPool")


_FIND_POOLED = _tensors_before(
    _copies_or_pools, frozenset({"Div", "Dropout", "Identity", "Mul", "Neg", "Pad", "Squeeze", "Unsqueeze"})
)


def _divides_concat(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 refuses it ("DepthToSpaceTransformation") if a Conv reads the quantized Concat as well."""
    maker = model.producer_node(node.inputs[0])
    return maker is not None and maker.op == "Concat"


def _negates(model: Model, node: Node) -> bool:
    factors = [model.constant_array(name) for name in node.inputs if node.op in ("Div", "Mul")]
    difference = node.op == "Sub" and model.is_activation(node.inputs[1])
    return node.op == "Neg" or difference or any(values is not None and bool((values < 0).any()) for values in factors)


_FIND_NEGATED = _tensors_before(_negates, frozenset({"Div", "Mul"}))
_FIND_NEGATED_ACTIVATIONS = _tensors_before(
    lambda model, node: (
        node.op in ("LeakyRelu", "PRelu", "Relu") and node.outputs[0] in model.cached_analysis(_FIND_NEGATED)
    ),
    frozenset({"Div", "Mul"}),
)


MAX_SEQUENCE_ROWS, MAX_SEQUENCE_WIDTH = 8, 256
"""Largest data and weights of products that OpenVINO 2026.4.1 computes with others in one kernel."""


def _find_sequences(model: Model) -> frozenset[int]:
    """OpenVINO 2026.4.1 generates one kernel for small products with weights and elementwise operators behind them.

    With pairs in it, or behind it, results are off by a factor of up to 1e9 (a product without a bias of its own,
    factors by channel), by 0 to 30 dB (four products of which some are quantized), or refused for a lack of registers.
    Right are up to three products with biases and activations between them, if only products have pairs.
    """
    members: set[int] = set()
    behind: set[int] = set()
    right: set[int] = set()
    for node in model.nodes:
        if node.index in members or not _is_small_product(model, node):
            continue
        chain = [node]
        while len(readers := model.consumers.get(chain[-1].outputs[0], ())) == 1:
            reader = model.nodes[readers[0][0]]
            if reader.opaque or not (_is_small_product(model, reader) or reader.op in _SEQUENCE_OPS):
                break
            chain.append(reader)
        products = [each for each in chain if _is_small_product(model, each)]
        if len(products) > 1:
            members.update(each.index for each in chain)
            behind.update(index for index, _ in readers)
            biased = all(_has_bias(model, each) for each in products)
            others = {each.op for each in chain if each not in products}
            if len(products) < 4 and biased and others <= (ACTIVATION_OPS | SOFTMAX_OPS) - {"Mish"}:
                right.update(each.index for each in products)
    return frozenset(members - right | behind)


def _has_bias(model: Model, node: Node) -> bool:
    """Return whether a Gemm adds a constant with one value for each column to its unscaled product."""
    scaled = node.attributes.get("alpha", 1.0) != 1 or not node.attributes.get("beta", 1.0)
    if len(node.inputs) < 3 or node.inputs[2] not in model.constants or scaled:
        return False
    bias, width = model.types[node.inputs[2]].shape, model.types[node.outputs[0]].shape[1]
    return bias in ((width,), (1, width))


def _is_small_product(model: Model, node: Node) -> bool:
    """Return whether a node multiplies a small matrix, not a stack of them, by constant weights."""
    if node.op not in _PRODUCT_OPS or len(node.inputs) < 2 or node.inputs[1] not in model.constants:
        return False
    known = [model.types.get(name) for name in (*node.inputs[:2], node.outputs[0])]
    shapes = [kind.shape for kind in known if kind is not None and len(kind.shape) == 2]
    return len(shapes) == 3 and shapes[2][0] <= MAX_SEQUENCE_ROWS and max(shapes[1]) <= MAX_SEQUENCE_WIDTH


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
    readers = [[model.nodes[index].op for index, _ in model.consumers.get(name, ())] for name in node.outputs]
    unused = model.output_names.union(model.captured).isdisjoint
    is_short = any(not ops and unused([name]) for name, ops in zip(node.outputs, readers, strict=True))
    return is_short and any(len(ops) > 1 and not {"Clip", "Relu"}.isdisjoint(ops) for ops in readers)


def _scales_bias(model: Model, node: Node) -> bool:
    """ONNX Runtime 1.24.4 quantizes a float bias behind quantized data, and leaves out the factor alpha.

    It also quantizes the weights if only data and result have pairs, for instance behind a Slice of quantized data.
    """
    scaled = node.attributes.get("alpha", 1.0) != 1.0
    return scaled and len(node.inputs) > 2 and node.inputs[2] in model.constants


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


def _has_rounded_bound(model: Model, node: Node) -> bool:
    """OpenVINO 2026.4.1 rounds the bounds of a Clip to steps of the pair in front of it, by up to a step.

    A positive lower bound may become 0, for which a root, a logarithm or a division behind it is 0 to 15 dB off; and a
    bound may fall below the integer that a Floor makes of it. Data that are mostly at one of two bounds other than 0
    are 12 to 20 dB further off than the file. One such bound, as of 0 and 6, only loses accuracy.
    """
    given = zip((*node.inputs[1:], "", ""), (-np.inf, np.inf), strict=False)
    bounds = [model.constant_array(name) if name else np.array(limit) for name, limit in given]
    if any(bound is None or bound.size != 1 for bound in bounds):  # computed, so unknown
        return True
    low, high = (bound.item() for bound in bounds if bound is not None)
    finite = sum(math.isfinite(bound) and bound != 0 for bound in (low, high))
    if low > 0 or high < 0 or finite > 1:
        return True
    if not finite:
        return False
    readers = [model.nodes[index] for index, _ in model.consumers.get(node.outputs[0], ())]
    kinds = {model.types[reader.outputs[0]].dtype for reader in readers if reader.outputs[0] in model.types}
    return any(reader.op in _STEP_OPS for reader in readers) or not kinds <= _FLOAT_TYPES


RUNTIME_FAULTS = (
    RuntimeFault(
        "batched reduction",
        "openvino",
        "The runtime computes a mean or sum over the rows of several matrices wrongly.",
        _BATCH_REDUCTIONS | {"LeakyRelu", "PRelu"},
        _reduces_batch,
    ),
    RuntimeFault(
        "scaled rows",
        "openvino",
        "The runtime reduces rows of several matrices wrongly if their channels are scaled.",
        LINEAR_OPS | POINT_OPS,
        _scales_rows,
        is_passed=False,
    ),
    RuntimeFault(
        "reduced extremum",
        "openvino",
        "The runtime collects a maximum or minimum in the 8 bits of its quantized result.",
        LINEAR_OPS | POINT_OPS,
        lambda model, node: not model.cached_analysis(_find_extrema).isdisjoint(node.inputs),
        is_passed=False,
    ),
    RuntimeFault(
        "pooled border",
        "openvino",
        "The runtime pools a border of stored zeros, which are not 0 if the data have a zero point.",
        frozenset({"AveragePool"}),
        _pools_border,
    ),
    RuntimeFault(
        "strided border",
        "openvino",
        "The runtime drops the border of a Conv with strides and a kernel of one element.",
        _STRIDED_OPS | {"Conv"},
        _drops_border,
        is_passed=False,
    ),
    RuntimeFault(
        "divided concat",
        "openvino",
        "The runtime refuses a DepthToSpace of a Concat that a Conv reads as well.",
        frozenset({"DepthToSpace"}),
        _divides_concat,
    ),
    RuntimeFault(
        "negated activation",
        "openvino",
        "The runtime exchanges an activation and a negative factor behind a product without a bias.",
        LINEAR_OPS | {"Einsum"},
        # OpenVINO 2026.4.1 multiplies in front of the activation, which is right for positive factors (-4 to 14 dB).
        lambda model, node: (
            len(node.inputs) < 3 and node.outputs[0] in model.cached_analysis(_FIND_NEGATED_ACTIVATIONS)
        ),
        is_passed=False,
    ),
    RuntimeFault(
        "pooled columns",
        "openvino",
        "The runtime pools or repeats the result of a MatMul with weights as if its columns were channels.",
        frozenset({"MatMul"}),
        _pools_columns,
        is_passed=False,
    ),
    RuntimeFault(
        "product sequence",
        "openvino",
        "The runtime computes wrong results in a sequence of small products with weights.",
        LINEAR_OPS | POINT_OPS | {"Einsum"},
        lambda model, node: node.index in model.cached_analysis(_find_sequences),
        is_passed=False,
    ),
    RuntimeFault(
        "padding value",
        "openvino",
        "The runtime scales the value of a Pad, which is not 0, as if it were data.",
        frozenset({"Pad"}),
        _pads_with_value,
    ),
    RuntimeFault(
        "epsilon",
        "openvino",
        "The runtime adds the large epsilon of a normalization to unscaled data.",
        frozenset({"GroupNormalization", "InstanceNormalization", "LayerNormalization"}),
        # OpenVINO 2026.4.1 normalizes the stored integers with the same epsilon (5 dB with 0.1, for data as above).
        lambda model, node: float(node.attributes.get("epsilon", 1e-5)) > 1.001 * MAX_EPSILON,
    ),
    RuntimeFault(
        "clip bound",
        "openvino",
        "The runtime rounds the bounds of a Clip to steps of the pair in front, past 0 or the integer of a Floor.",
        frozenset({"Clip"}),
        _has_rounded_bound,
    ),
    RuntimeFault(
        "softmax of one",
        "onnxruntime",
        "The runtime computes 0 for a Softmax over an axis of length 1.",
        frozenset({"Softmax"}),
        _is_softmax_of_one,
        right_in="1.32.0",
    ),
    RuntimeFault(
        "cubic resize",
        "onnxruntime",
        "The runtime cannot resize quantized data with mode cubic or with axes.",
        frozenset({"Resize"}),
        # ONNX Runtime 1.24.4 and 1.32.0 refuse it where they change the layout around quantized convolutions; version
        # 1.24.4 also tries to run mode cubic on integers where the result has the scale of the data.
        lambda model, node: bool(node.attributes.get("mode") == "cubic" or "axes" in node.attributes),
    ),
    RuntimeFault(
        "linear resize",
        "onnxruntime",
        "The runtime rounds the results of a Resize of integers with mode linear down.",
        frozenset({"Resize"}),
        # ONNX Runtime 1.24.4 rounds interpolated integers down: means of them are half a step too low (24 dB).
        lambda model, node: bool(node.attributes.get("mode") == "linear"),
        right_in="1.32.0",
    ),
    RuntimeFault(
        "half tile",
        "onnxruntime",
        "The runtime loses columns of a product with AMX if the last 17 to 31 are no full block of 32.",
        frozenset({"Conv", "Gemm", "MatMul"}),
        _fills_half_tile,
        instructions="AMX",
        right_in="1.32.0",
    ),
    RuntimeFault(
        "dilated pool",
        "onnxruntime",
        "The runtime refuses an AveragePool of integers with the attribute dilations.",
        frozenset({"AveragePool"}),
        # ONNX Runtime 1.24.4 and 1.32.0 have no integer kernel with this attribute (opset 19), and refuse the file.
        lambda model, node: "dilations" in node.attributes,
    ),
    RuntimeFault(
        "scaled bias",
        "onnxruntime",
        "The runtime scales the bias of a Gemm with alpha wrongly if it quantizes the bias itself.",
        frozenset({"Gemm"}),
        _scales_bias,
        right_in="1.32.0",
    ),
    RuntimeFault(
        "transposed output",
        "onnxruntime",
        "The runtime rounds an output of the model, or what a subgraph reads, if only its Transpose is quantized.",
        frozenset({"Transpose"}),
        _transposes_output,
        both_sides=True,
    ),
    RuntimeFault(
        "redundant clip",
        "onnxruntime",
        "The runtime refuses a Clip with a lower bound other than 0, or behind another one, in front of a pair.",
        frozenset({"Clip", "Relu"}),
        _clips_beside_zero,
        both_sides=True,
        right_in="1.32.0",
    ),
    RuntimeFault(
        "captured tensor",
        "onnxruntime",
        "The runtime crashes if a subgraph reads the result of an operator that only moves values.",
        _PROPAGATING_OPS | MOVEMENT_OPS | ARITHMETIC_OPS | {"Cast", "Concat", "Dropout", "Identity"},
        _feeds_subgraph,
    ),
    RuntimeFault(
        "unused result",
        "onnxruntime",
        "The runtime exchanges results of a Split with an unread result and one that a Relu and others read.",
        frozenset({"Split"}),
        _has_unused_output,
    ),
)
"""Faults in the order in which their rules are checked; a dialect has those of its runtime."""


def known_faults(runtime: str) -> tuple[RuntimeFault, ...]:
    """Return the known faults of a runtime in any version and on any processor."""
    return tuple(fault for fault in RUNTIME_FAULTS if fault.runtime == runtime)


_STEP_OPS = frozenset({"Ceil", "Floor", "Mod", "Round", "Sign"})
_FLOAT_TYPES = frozenset({"bfloat16", "double", "float", "float16"})
_PASSING_OPS: Mapping[str, frozenset[str]] = {
    "onnxruntime": MOVEMENT_OPS | {"LeakyRelu", "MaxPool", "PRelu", "Relu"},
    "openvino": MOVEMENT_OPS
    | _BATCH_REDUCTIONS
    | {"AveragePool", "Clip", "Concat", "LeakyRelu", "MaxPool", "PRelu", "ReduceMax", "ReduceMin", "Relu"},
}
"""Operators behind which a runtime dequantizes instead of in front of them; OpenVINO also behind `_SCALING_OPS`."""


def find_affected_nodes(model: Model) -> Mapping[str, frozenset[int]]:
    """Return the indices of affected nodes by id of the fault.

    These are the nodes with the fault, and nodes that pass stored integers to them. If pairs are needed on both sides,
    they are the nodes with the fault, and nodes in front of which the runtime repeats the pair behind them, also a Clip
    or Relu that the pair computes.
    """
    found: dict[str, frozenset[int]] = {}
    rows, nodes_by_op = [], defaultdict[str, list[Node]](list)
    for node in model.nodes:
        if not node.opaque and node.inputs:
            activations = list(filter(model.is_activation, node.inputs))
            rows.append((node, find_repeated_input(model, node), activations))
            nodes_by_op[node.op].append(node)
    for fault in RUNTIME_FAULTS:
        operators = fault.operators & nodes_by_op.keys()
        affected = {node.index for op in operators for node in nodes_by_op[op] if fault.matches(model, node)}
        tensors = set[str]()
        passing = _PROPAGATING_OPS | {"Clip", "Relu"} if fault.both_sides else _PASSING_OPS[fault.runtime]
        scaling = _SCALING_OPS if fault.runtime == "openvino" and not fault.both_sides else frozenset[str]()
        candidates = rows if affected and fault.is_passed else []  # without a faulty node nothing is passed on
        for node, slot, activations in candidates if fault.both_sides else reversed(candidates):
            passes = slot is not None or node.op in passing or (node.op in scaling and len(activations) == 1)
            before = [node.inputs[slot or 0]] if fault.both_sides else node.outputs
            if node.index in affected or (passes and not tensors.isdisjoint(before)):
                affected.add(node.index)
                tensors.update(node.outputs if fault.both_sides else activations)
        found[fault.id] = frozenset(affected)
    return found
