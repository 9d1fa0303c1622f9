"""Rules that decide which inputs of nodes may have a Q/DQ pair in the dialect of a runtime.

The rules are those of TensorRT's documentation ("Explicit quantization", sections on layer recommendations and
placement; `IQuantizeLayer` in NvInfer.h); a dialect has those that apply to its runtime.

Pairs between operators that a runtime computes in one kernel only reduce accuracy. A convolution is fused with
BatchNormalization, activation and residual Add. The compiler of TensorRT-RTX generates one kernel for all operators
between two products; for operators that only move values, those after them decide. Measured on 1.7 with all points of
nine models quantized: of 702 edges by this rule 10 had an effect, of 2145 others 2069.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from harness.graph.model import Model, Node, TensorType
from harness.graph.rules.agreements import find_joint_inputs, is_float, passed_slot
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.operator_sets import (
    ACTIVATION_OPS,
    ARITHMETIC_OPS,
    CONVOLUTION_OPS,
    MOVEMENT_OPS,
    NORMALIZATION_OPS,
    SOFTMAX_OPS,
)
from harness.graph.rules.precision_sensitive import (
    find_cache_nodes,
    find_parameter_inputs,
    find_pole_inputs,
    find_sentinel_constants,
    find_unquantizable_constants,
)
from harness.graph.rules.runtime_faults import RUNTIME_FAULTS, find_affected_nodes

_GENERATED_OPS = (
    ACTIVATION_OPS
    | ARITHMETIC_OPS
    | NORMALIZATION_OPS
    | SOFTMAX_OPS
    | {"Exp", "GlobalAveragePool", "ReduceMax", "ReduceMean", "ReduceSum"}
)
_EPILOGUE_SOURCES = frozenset({"Conv", "ConvTranspose", "Gemm"})
"""Products whose result is written in float, for a generated kernel behind them."""
_MOVING_OPS = MOVEMENT_OPS | {"Concat", "Dropout", "Identity"}


class _InputSite(NamedTuple):
    """Input of a node, for which a precision is requested.

    Attributes:
        tensor: Tensor at this input; "" if it is omitted.
        is_linear: Whether the node is a linear operator of the dialect.
        is_convolution: Whether the node is a convolution.
        faults: Known faults of the runtime at INT8 that affect the node, by id.
    """

    model: Model
    dialect: Dialect
    node: Node
    slot: int
    precision: str
    tensor: str
    is_linear: bool
    is_convolution: bool
    faults: tuple[str, ...]

    @property
    def type(self) -> TensorType | None:
        return self.model.types.get(self.tensor)

    @property
    def joint_constants(self) -> tuple[int, ...]:
        """Inputs that are quantized together with this one if constants are among them, else ()."""
        operand = not self.is_linear and self.node.op in self.dialect.constant_operands
        if not (operand and is_float(self.model, self.tensor)):
            return ()
        joint = find_joint_inputs(self.model, self.node, with_constants=True)
        return joint.slots if joint.constants and self.slot in joint.members else ()


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """Rule that keeps an input float.

    Attributes:
        name: Name in messages and tables.
        text: The rule as a sentence.
        forbids: Function that returns whether the rule forbids a pair at an input, in its dialect and precision.
    """

    name: str
    text: str
    forbids: Callable[[_InputSite], bool]


def first_violated_rule(
    model: Model, dialect: Dialect, node: Node, slot: int, precision: str = "int8"
) -> PlacementRule | None:
    """Return the first rule that keeps an input of a node float at a precision, or None if a Q/DQ pair is legal."""
    tensor = node.inputs[slot] if slot < len(node.inputs) else ""
    linear, convolution = node.op in dialect.linear_ops, node.op in CONVOLUTION_OPS
    affected = model.cached_analysis(find_affected_nodes)
    known = dialect.faults if precision == "int8" else ()
    faults = tuple([fault.id for fault in known if node.index in affected[fault.id]])
    site = _InputSite(model, dialect, node, slot, precision, tensor, linear, convolution, faults)
    return next((rule for rule in PLACEMENT_RULES if rule.forbids(site)), None)


def _shares_another_point(site: _InputSite) -> bool:
    """Return whether the input belongs to the point of another input of the node, the first of those that are joint."""
    if site.is_linear:
        return site.slot != 0
    joint = site.joint_constants if site.tensor in site.model.constants else ()
    return bool(joint) and site.slot != find_joint_inputs(site.model, site.node, with_constants=True).first


def _has_bad_operand(site: _InputSite) -> bool:
    if not site.is_linear or (site.node.op == "Einsum" and len(site.node.inputs) != 2):
        return site.is_linear
    model, (first, second) = site.model, site.node.inputs[:2]
    if site.is_convolution:
        fits = model.is_activation(first) and second in model.constants
    else:
        fits = model.is_activation(first) or model.is_activation(second)
    return not (fits and is_float(model, first) and is_float(model, second))


def _is_vector_product(site: _InputSite) -> bool:
    if site.is_convolution or not site.is_linear:
        return False
    return any(
        (kind := site.model.types.get(name)) is not None and len(kind.shape) < 2 for name in site.node.inputs[:2]
    )


def _has_unquantizable_constant(site: _InputSite) -> bool:
    """Return whether an input that is quantized together with this one, or any input of a Concat, is unquantizable."""
    model = site.model
    if site.is_linear:
        names = site.node.inputs[: 3 if site.dialect.bias == "int32" else 2]
        return not model.cached_analysis(find_unquantizable_constants).isdisjoint(names)
    shares = site.node.op == "Concat" and is_float(model, site.tensor)
    is_joint = shares or bool(site.joint_constants)
    return is_joint and site.node.index in model.cached_analysis(_find_nodes_with_unquantizable_operands)


def _find_nodes_with_unquantizable_operands(model: Model) -> frozenset[int]:
    bad = model.cached_analysis(find_sentinel_constants) | model.cached_analysis(find_unquantizable_constants)
    found = set()
    for node in model.nodes:
        joint = find_joint_inputs(model, node, with_constants=True).constants
        if not bad.isdisjoint(node.inputs if node.op == "Concat" else joint):
            found.add(node.index)
    return frozenset(found)


def _find_first_activations(model: Model) -> Mapping[int, float]:
    """Return the number of the first activation among the inputs of each Concat; infinity without activations."""
    return {
        node.index: next((slot for slot, name in enumerate(node.inputs) if model.is_activation(name)), math.inf)
        for node in model.nodes
        if node.op == "Concat"
    }


def _is_absorbed(site: _InputSite) -> bool:
    model, tensor, inputs = site.model, site.tensor, site.node.inputs
    maker = model.producer_node(tensor)
    if (
        site.slot
        or site.node.op not in site.dialect.absorbed
        or (maker is not None and maker.op in site.dialect.absorbed)
        or tensor in model.output_names
        or tensor in model.captured
    ):
        return False
    if site.node.op == "Clip":  # a lower bound other than 0 depends on the rounding of the pair
        low = model.constant_array(inputs[1]) if len(inputs) > 1 else None
        return len(model.consumers[tensor]) == 1 and low is not None and not low.any()
    return len(model.consumers[tensor]) == 1


def _has_large_fp8_filter(site: _InputSite) -> bool:
    limit = site.dialect.max_fp8_filter if site.is_convolution and site.precision.startswith("fp8") else 0
    weight = site.model.types.get(site.node.inputs[1]) if limit else None
    return weight is not None and math.prod(weight.shape[2:]) > limit


def _is_grouped_fp8(site: _InputSite) -> bool:
    limited = site.is_convolution and site.precision.startswith("fp8") and not site.dialect.grouped_fp8
    return limited and int(site.node.attributes.get("group", 1)) > 1


def _follows_convolution(site: _InputSite) -> bool:
    """Return whether the input is between Conv, BatchNormalization and activation, also in x * sigmoid(x)."""
    model, node = site.model, site.node
    source = None if site.dialect.between_conv_and_activation else model.producer_node(site.tensor)
    if source is None:
        return False
    is_gate = False  # whether it multiplies x by an activation of x
    if node.op == "Mul" and len(node.inputs) == 2:
        makers = zip(map(model.producer_node, node.inputs), reversed(node.inputs), strict=True)
        is_gate = any(maker and maker.op in ACTIVATION_OPS and maker.inputs[0] == other for maker, other in makers)
    residual = source.op == "Add" and any(_is_fused_convolution(model, site.dialect, name) for name in source.inputs)
    if source.op in CONVOLUTION_OPS or source.op == "BatchNormalization" or residual:
        return node.op in ACTIVATION_OPS or node.op == "BatchNormalization" or is_gate
    if not (is_gate and source.op in ACTIVATION_OPS):
        return False
    others = (model.producer_node(name) for name in node.inputs if name != site.tensor)
    return any(other is not None and other.op in CONVOLUTION_OPS for other in others)


def _is_fusible_operand(site: _InputSite) -> bool:
    """Return whether the input of an Add is fused with it: the result of a convolution that only the Add reads.

    Of two such inputs it is the first. The result of a MatMul does not count, because an Add of two tensors is not
    fused with it, and ModelOpt quantizes both.
    """
    if site.dialect.between_conv_and_activation or site.node.op != "Add":
        return False
    fusible = [_is_fused_convolution(site.model, site.dialect, name) for name in site.node.inputs]
    return site.slot < len(fusible) and fusible[site.slot] and not any(fusible[: site.slot])


def _is_fused_convolution(model: Model, dialect: Dialect, tensor: str) -> bool:
    """Return whether a convolution, or the Add of its bias, computes a tensor with only one reader."""
    for _ in range(2):
        node = model.producer_node(tensor)
        if node is None or len(model.consumers.get(tensor, ())) != 1 or tensor in model.output_names:
            return False
        if node.op in dialect.linear_ops:
            return node.op in CONVOLUTION_OPS
        activations = [name for name in node.inputs if model.is_activation(name)]
        if node.op != "Add" or len(activations) != 1:
            return False
        tensor = activations[0]
    return False


def find_inner_tensors(model: Model) -> frozenset[str]:
    """Return the names of tensors that are computed and read inside one kernel that TensorRT-RTX generates."""
    slots = {node.index: passed_slot(model, node) for node in model.nodes}
    sources: dict[str, str] = {}  # operators that compute the tensors, without those that only move values
    for node in model.nodes:
        slot = 0 if node.op in _MOVING_OPS and not node.opaque else slots[node.index]
        moved = slot is not None and node.op != "MaxPool" and node.inputs[slot] not in model.constants
        for name in node.outputs:
            sources[name] = sources.get(node.inputs[slot], "") if moved and slot is not None else node.op
    ends: dict[str, set[str]] = defaultdict(set)  # operators that use the tensors; "" for a model output
    for name in model.outputs:
        ends[name].add("")
    for node in reversed(model.nodes):
        moves = not node.opaque and node.op != "MaxPool"
        moves &= node.op in _MOVING_OPS or slots[node.index] is not None
        used = set().union(*(ends[name] for name in node.outputs)) if moves else {node.op}
        for name in {*node.inputs, *node.captures} - {""}:
            ends[name] |= used
    found = set()
    for tensor, operators in ends.items():
        source = sources.get(tensor, "")
        is_inner = source in _GENERATED_OPS | _EPILOGUE_SOURCES | {""} or (source == "MatMul" and operators == {"Add"})
        if tensor not in model.constants and operators <= _GENERATED_OPS | {""} and is_inner:
            found.add(tensor)
    return frozenset(found)


def _meets_fault(fault: str, site: _InputSite) -> bool:
    return fault in site.faults


PLACEMENT_RULES: tuple[PlacementRule, ...] = (
    PlacementRule(
        "opaque",
        "A node that has a subgraph, is random or is of an unknown operator stays float.",
        lambda s: s.node.opaque,
    ),
    PlacementRule(
        "operator",
        "The dialect offers no point at this operator.",
        lambda s: not s.is_linear and s.node.op not in s.dialect.points,
    ),
    PlacementRule(
        "precision",
        "The runtime does not run this precision.",
        lambda s: s.precision not in s.dialect.precisions,
    ),
    PlacementRule(
        "finite",
        "A constant with infinite, NaN or huge values stays float, with what is quantized together with it.",
        _has_unquantizable_constant,
    ),
    PlacementRule(
        "bias",
        "The bias of a linear operator is never quantized on its own.",
        lambda s: s.is_linear and s.slot > 1,
    ),
    PlacementRule(
        "together",
        "A linear operator takes both inputs together, at its first one; constant operands go with the data.",
        _shares_another_point,
    ),
    PlacementRule(
        "operands",
        "A linear operator needs two float32 or float16 inputs, one an activation; a convolution, a constant weight.",
        _has_bad_operand,
    ),
    PlacementRule(
        "vector",
        "A product with a vector stays float: it is no product of matrices for INT8 kernels.",
        _is_vector_product,
    ),
    PlacementRule(
        "constant",
        "Constants stay float, but for weights of linear operators and operands that the dialect quantizes.",
        lambda s: not (s.is_linear or s.model.is_activation(s.tensor) or s.joint_constants),
    ),
    PlacementRule(
        "type",
        "Only float32 and float16 tensors: integers, booleans and tensors of unknown type stay as they are.",
        lambda s: not s.is_linear and not is_float(s.model, s.tensor),
    ),
    PlacementRule(
        "float16",
        "The runtime computes wrong results from Q/DQ in float16.",
        lambda s: not s.dialect.float16 and s.type is not None and s.type.dtype == "float16",
    ),
    PlacementRule(
        "parameter",
        "A parameter of an operator (scales of Resize, bounds of Clip) stays float, and what a shape is computed from.",
        lambda s: (s.node.index, s.slot) in s.model.cached_analysis(find_parameter_inputs),
    ),
    PlacementRule(
        "pole",
        "Small values round to 0, where this operator, or one that it leads to (Log, Div), gives infinity or NaN.",
        lambda s: (s.node.index, s.slot) in s.model.cached_analysis(find_pole_inputs),
    ),
    PlacementRule(
        "cache",
        "The values of an input that an output of the model returns, as those of a KV cache, are not rounded.",
        lambda s: s.node.index in s.model.cached_analysis(find_cache_nodes),
    ),
    PlacementRule(
        "scalar",
        "A tensor without dimensions is not quantized.",
        lambda s: s.type is not None and not s.type.shape,
    ),
    PlacementRule(
        "one scale",
        "All inputs of a Concat share a scale: one point, at its first activation.",
        lambda s: s.node.op == "Concat" and s.slot > s.model.cached_analysis(_find_first_activations)[s.node.index],
    ),
    PlacementRule(
        "fusion",
        "No pair is inserted between Conv, BatchNormalization and activation.",
        _follows_convolution,
    ),
    PlacementRule(
        "residual",
        "Of an Add behind a convolution, only the residual operand is quantized.",
        _is_fusible_operand,
    ),
    PlacementRule(
        "absorbed",
        "The pair behind this activation computes it: no pair lies in front.",
        _is_absorbed,
    ),
    *(
        PlacementRule(fault.id, fault.rule, partial(_meets_fault, fault.id))
        for fault in RUNTIME_FAULTS
        if not fault.both_sides
    ),
    PlacementRule(
        "float kernel",
        "The runtime computes this operator in float, so that a pair in front of it only costs time.",
        lambda s: (s.precision, s.node.op) in s.dialect.float_kernels,
    ),
    PlacementRule(
        "one kernel",
        "Producer and consumer become one generated kernel, in which a pair has no effect.",
        lambda s: s.dialect.generates_kernels and s.tensor in s.model.cached_analysis(find_inner_tensors),
    ),
    PlacementRule(
        "fp8 filter",
        "Convolutions with large filters have no FP8 kernels.",
        _has_large_fp8_filter,
    ),
    PlacementRule(
        "grouped fp8",
        "Grouped convolutions have no FP8 kernels.",
        _is_grouped_fp8,
    ),
)
