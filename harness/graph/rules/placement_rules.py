"""Rules that decide which inputs of nodes may have a Q/DQ pair in the dialect of a runtime.

The rules are those of TensorRT's documentation ("Explicit quantization", sections on layer recommendations and
placement; `IQuantizeLayer` in NvInfer.h); a dialect has those that apply to its runtime.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from harness.graph.model import Model, Node, TensorType
from harness.graph.rules.agreements import find_joint_inputs, is_float
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.kernel_fusion import find_inner_tensors, follows_convolution, is_fusible_operand
from harness.graph.rules.operator_sets import CONVOLUTION_OPS
from harness.graph.rules.precision_sensitive import (
    find_cache_nodes,
    find_parameter_inputs,
    find_pole_inputs,
    find_sentinel_constants,
    find_unquantizable_constants,
)
from harness.graph.rules.runtime_faults import RUNTIME_FAULTS, RuntimeFault, find_affected_nodes


class _InputSite(NamedTuple):
    """Input of a node, for which a precision is requested.

    Attributes:
        tensor: Tensor at this input; "" if it is omitted.
        is_linear: Whether the node is a linear operator of the dialect.
        is_convolution: Whether the node is a convolution.
    """

    model: Model
    dialect: Dialect
    node: Node
    slot: int
    precision: str
    tensor: str
    is_linear: bool
    is_convolution: bool

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
        forbids: Function that returns whether the rule forbids a pair at an input.
        applies: Function that returns whether a dialect has the rule at a precision.
    """

    name: str
    text: str
    forbids: Callable[[_InputSite], bool]
    applies: Callable[[Dialect, str], bool] = lambda dialect, precision: True


def applicable_rules(dialect: Dialect, precision: str) -> tuple[PlacementRule, ...]:
    """Return the rules that a dialect has at a precision, in the order in which they are checked."""
    return tuple(rule for rule in PLACEMENT_RULES if rule.applies(dialect, precision))


def first_violated_rule(
    model: Model,
    dialect: Dialect,
    node: Node,
    slot: int,
    precision: str = "int8",
    rules: Sequence[PlacementRule] | None = None,
) -> PlacementRule | None:
    """Return the first rule that keeps an input of a node float at a precision, or None if a Q/DQ pair is legal.

    Args:
        rules: Result of `applicable_rules`, which callers with many inputs can compute once; None: it is computed.
    """
    tensor = node.inputs[slot] if slot < len(node.inputs) else ""
    linear, convolution = node.op in dialect.linear_ops, node.op in CONVOLUTION_OPS
    site = _InputSite(model, dialect, node, slot, precision, tensor, linear, convolution)
    for rule in applicable_rules(dialect, precision) if rules is None else rules:
        if rule.forbids(site):
            return rule
    return None


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
    if site.is_linear:
        names = site.node.inputs[: 3 if site.dialect.bias == "int32" else 2]
        return not site.model.cached_analysis(find_unquantizable_constants).isdisjoint(names)
    if site.node.op == "Concat" and is_float(site.model, site.tensor):
        return site.node.index in site.model.cached_analysis(_find_concats_with_unquantizable_constants)
    return bool(site.joint_constants) and site.node.index in site.model.cached_analysis(
        _find_nodes_with_unquantizable_operands
    )


def _find_concats_with_unquantizable_constants(model: Model) -> frozenset[int]:
    bad = model.cached_analysis(find_sentinel_constants) | model.cached_analysis(find_unquantizable_constants)
    return frozenset(node.index for node in model.nodes if node.op == "Concat" and not bad.isdisjoint(node.inputs))


def _find_nodes_with_unquantizable_operands(model: Model) -> frozenset[int]:
    bad = model.cached_analysis(find_sentinel_constants) | model.cached_analysis(find_unquantizable_constants)
    joint = ((node.index, find_joint_inputs(model, node, with_constants=True).constants) for node in model.nodes)
    return frozenset(index for index, names in joint if not bad.isdisjoint(names))


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


def _is_grouped_fp8(site: _InputSite) -> bool:
    return site.is_convolution and int(site.node.attributes.get("group", 1)) > 1


def _has_large_fp8_filter(site: _InputSite) -> bool:
    weight = site.model.types.get(site.node.inputs[1]) if site.is_convolution else None
    return weight is not None and math.prod(weight.shape[2:]) > site.dialect.max_fp8_filter


def _meets_fault(fault: RuntimeFault, site: _InputSite) -> bool:
    return site.node.index in site.model.cached_analysis(find_affected_nodes)[fault.id]


def _has_fault(fault: RuntimeFault, dialect: Dialect, precision: str) -> bool:
    return precision == "int8" and fault in dialect.faults


def _splits_convolutions(dialect: Dialect, precision: str) -> bool:
    return not dialect.between_conv_and_activation


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
        lambda s: True,
        lambda dialect, precision: precision not in dialect.precisions,
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
        lambda s: s.type is not None and s.type.dtype == "float16",
        lambda dialect, precision: not dialect.float16,
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
        lambda s: follows_convolution(s.model, s.dialect, s.node, s.tensor),
        _splits_convolutions,
    ),
    PlacementRule(
        "residual",
        "Of an Add behind a convolution, only the residual operand is quantized.",
        lambda s: is_fusible_operand(s.model, s.dialect, s.node, s.slot),
        _splits_convolutions,
    ),
    PlacementRule(
        "absorbed",
        "The pair behind this activation computes it: no pair lies in front.",
        _is_absorbed,
        lambda dialect, precision: bool(dialect.absorbed),
    ),
    *(
        PlacementRule(fault.id, fault.rule, partial(_meets_fault, fault), partial(_has_fault, fault))
        for fault in RUNTIME_FAULTS
        if not fault.both_sides
    ),
    PlacementRule(
        "float kernel",
        "The runtime computes this operator in float, so that a pair in front of it only costs time.",
        lambda s: (s.precision, s.node.op) in s.dialect.float_kernels,
        lambda dialect, precision: bool(dialect.float_kernels),
    ),
    PlacementRule(
        "one kernel",
        "Producer and consumer become one generated kernel, in which a pair has no effect.",
        lambda s: s.tensor in s.model.cached_analysis(find_inner_tensors),
        lambda dialect, precision: dialect.generates_kernels,
    ),
    PlacementRule(
        "fp8 filter",
        "Convolutions with large filters have no FP8 kernels.",
        _has_large_fp8_filter,
        lambda dialect, precision: precision.startswith("fp8") and dialect.max_fp8_filter > 0,
    ),
    PlacementRule(
        "grouped fp8",
        "Grouped convolutions have no FP8 kernels.",
        _is_grouped_fp8,
        lambda dialect, precision: precision.startswith("fp8") and not dialect.grouped_fp8,
    ),
)
