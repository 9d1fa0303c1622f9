"""Which inputs of which nodes may carry a Q/DQ pair: named rules, parametrised by the dialect of a runtime.

The rules restate what TensorRT's documentation asks for ("Explicit quantization", sections on layer recommendations and
placement; `IQuantizeLayer` in NvInfer.h); a dialect says which of them its runtime shares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnx import numpy_helper

from harness.graph.model import Model, Node
from harness.graph.rules.dialects import Dialect
from harness.graph.rules.input_site import InputSite, is_activation, is_float, jointly_quantized_inputs
from harness.graph.rules.operator_sets import ACTIVATION_OPS, CONVOLUTION_OPS
from harness.graph.rules.precision_sensitive import (
    find_parameter_inputs,
    find_pole_inputs,
    find_sentinel_constants,
    find_unquantizable_constants,
)
from harness.graph.rules.runtime_faults import RUNTIME_FAULTS, RuntimeFault, find_affected_nodes

__all__ = ["PLACEMENT_RULES", "PlacementRule", "first_violated_rule"]


@dataclass(frozen=True, slots=True)
class PlacementRule:
    """A reason why an input stays float.

    Attributes:
        name: What messages and tables call it.
        text: The rule as a sentence.
        forbids: Whether it forbids a site.
    """

    name: str
    text: str
    forbids: Callable[[InputSite], bool]


def _is_unsupported_float16(site: InputSite) -> bool:
    known = site.model.types.get(site.tensor)
    return known is not None and known.dtype == "float16" and not site.dialect.float16


def _is_scalar(site: InputSite) -> bool:
    known = site.model.types.get(site.tensor)
    return known is not None and not known.shape


def _shares_another_point(site: InputSite) -> bool:
    """A linear operator has one point, at its first input; a constant operand goes with the data."""
    if site.is_linear:
        return site.slot != 0
    joint = _jointly_quantized_constants(site) if site.tensor in site.model.constants else ()
    return bool(joint) and site.slot != _point_slot(site.model, site.node, joint)


def _jointly_quantized_constants(site: InputSite) -> tuple[int, ...]:
    """What goes together with a site where constants do; nothing where they stay float."""
    if site.is_linear or site.node.op not in site.dialect.constant_operands:
        return ()
    joint = (
        jointly_quantized_inputs(site.model, site.dialect, site.node, site.slot)
        if is_float(site.model, site.tensor)
        else ()
    )
    return joint if any(site.node.inputs[slot] in site.model.constants for slot in joint) else ()


def _point_slot(model: Model, node: Node, slots: tuple[int, ...]) -> int:
    """Where the point of inputs that go together stands: at the first activation, else at the first of them."""
    return next((slot for slot in slots if is_activation(model, node.inputs[slot])), slots[0])


def _is_bias(site: InputSite) -> bool:
    return site.is_linear and site.slot > 1


def _has_bad_operand(site: InputSite) -> bool:
    if not site.is_linear or (site.node.op == "Einsum" and len(site.node.inputs) != 2):
        return site.is_linear
    first, second = site.node.inputs[:2]
    return not (
        _matches_operator_pair(site, first, second) and is_float(site.model, first) and is_float(site.model, second)
    )


def _is_bare_product(site: InputSite) -> bool:
    """A matrix, and no stack of them, times weights, without a bias of its own."""
    if site.dialect.bare_products or site.precision != "int8" or site.node.op in CONVOLUTION_OPS or not site.is_linear:
        return False
    data, weight, *rest = site.node.inputs
    known, bias = site.model.types.get(data), site.model.types.get(rest[0]) if rest else None
    flat = known is not None and len(known.shape) == 2 and weight in site.model.constants
    return flat and not (bias and len(bias.shape) == 1)


def _is_vector(site: InputSite) -> bool:
    known = map(site.model.types.get, () if site.node.op in CONVOLUTION_OPS else site.node.inputs[:2])
    return site.is_linear and any(kind is not None and len(kind.shape) < 2 for kind in known)


def _matches_operator_pair(site: InputSite, first: str, second: str) -> bool:
    if site.node.op in CONVOLUTION_OPS:
        return is_activation(site.model, first) and second in site.model.constants
    return is_activation(site.model, first) or is_activation(site.model, second)


def _is_lone_constant(site: InputSite) -> bool:
    return not site.is_linear and not is_activation(site.model, site.tensor) and not _jointly_quantized_constants(site)


def _has_unquantizable_constant(site: InputSite) -> bool:
    """Look at what is quantized together; around a Concat all share a scale, constants that stay float too."""
    names = [site.node.inputs[slot] for slot in _jointly_quantized_constants(site)]
    if site.node.op == "Concat" and is_float(site.model, site.tensor):
        names = list(site.node.inputs)
    if site.is_linear:
        names = list(site.node.inputs[: 3 if site.dialect.bias == "int32" else 2])
    elif not site.model.cached_analysis(find_sentinel_constants).isdisjoint(names):
        return True
    return not site.model.cached_analysis(find_unquantizable_constants).isdisjoint(names)


def _follows_convolution(site: InputSite) -> bool:
    """Between Conv, BatchNormalization and activation; x * sigmoid(x) is an activation."""
    source = site.producer
    if site.dialect.between_conv_and_activation or source is None:
        return False
    if source.op in CONVOLUTION_OPS or source.op == "BatchNormalization" or _adds_to_convolution(site, source):
        return site.node.op in ACTIVATION_OPS or site.node.op == "BatchNormalization" or _is_gate(site.model, site.node)
    return source.op in ACTIVATION_OPS and _is_gate(site.model, site.node) and _gated_convolution(site)


def _adds_to_convolution(site: InputSite, node: Node) -> bool:
    """A residual Add that runs inside the convolution before it."""
    makers = (_linear_producer(site, name) for name in node.inputs) if node.op == "Add" else ()
    return any(maker is not None and maker.op in CONVOLUTION_OPS for maker in makers)


def _is_gate(model: Model, node: Node) -> bool:
    """A Mul of x by an activation of x."""
    if node.op != "Mul" or len(node.inputs) != 2:
        return False
    makers = [model.producer.get(name) for name in node.inputs]
    for maker, other in zip(makers, reversed(node.inputs), strict=True):
        if maker is not None and model.nodes[maker].op in ACTIVATION_OPS and model.nodes[maker].inputs[0] == other:
            return True
    return False


def _gated_convolution(site: InputSite) -> bool:
    others = (site.model.producer.get(name) for name in site.node.inputs if name != site.tensor)
    return any(index is not None and site.model.nodes[index].op in CONVOLUTION_OPS for index in others)


def _is_fusible_operand(site: InputSite) -> bool:
    """The operand that a convolution computes for this Add alone; of two, the first.

    Behind a MatMul both are legal: an Add of two tensors is no part of its kernel, and ModelOpt quantizes both.
    """
    if site.dialect.between_conv_and_activation or site.node.op != "Add":
        return False
    makers = [_linear_producer(site, name) for name in site.node.inputs]
    fusible = [maker is not None and maker.op in CONVOLUTION_OPS for maker in makers]
    return site.slot < len(fusible) and fusible[site.slot] and not any(fusible[: site.slot])


def _linear_producer(site: InputSite, tensor: str) -> Node | None:
    """The linear operator that computes a tensor for one reader alone, with its bias Add where it has one."""
    model = site.model
    for _ in range(2):
        index = model.producer.get(tensor)
        if index is None or len(model.consumers.get(tensor, ())) != 1 or tensor in model.outputs:
            return None
        node = model.nodes[index]
        if node.op in site.dialect.linear_ops:
            return node
        activations = [name for name in node.inputs if is_activation(model, name)]
        if node.op != "Add" or len(activations) != 1:
            return None
        tensor = activations[0]
    return None


def _is_later_concat_input(site: InputSite) -> bool:
    return site.node.op == "Concat" and any(is_activation(site.model, n) for n in site.node.inputs[: site.slot])


def _is_absorbed(site: InputSite) -> bool:
    model, tensor = site.model, site.tensor
    if site.slot or site.node.op not in site.dialect.absorbed or tensor in model.outputs or tensor in model.captured:
        return False
    return len(model.consumers[tensor]) == 1 and not _clips_off_zero(site)


def _clips_off_zero(site: InputSite) -> bool:
    """A Clip that does not begin at 0, where the integers do: whether a pair computes it, rounding decides."""
    if site.node.op != "Clip":
        return False
    low = site.model.constants.get(site.node.inputs[1]) if len(site.node.inputs) > 1 else None
    return low is None or bool(numpy_helper.to_array(low).any())


def _is_grouped_fp8(site: InputSite) -> bool:
    grouped = site.node.op in CONVOLUTION_OPS and int(site.node.attributes.get("group", 1)) > 1
    return grouped and site.precision.startswith("fp8") and not site.dialect.grouped_fp8


def _rule_for_fault(name: str, fault: RuntimeFault) -> PlacementRule:
    def forbids(site: InputSite) -> bool:
        return (
            site.precision == "int8"
            and name in site.dialect.faults
            and site.node.index in site.model.cached_analysis(find_affected_nodes)[name]
        )

    return PlacementRule(name, fault.text, forbids)


PLACEMENT_RULES: tuple[PlacementRule, ...] = (
    PlacementRule("opaque", "A node with a subgraph or of an unknown operator stays float.", lambda s: s.node.opaque),
    PlacementRule(
        "operator",
        "The dialect offers no point at this operator.",
        lambda s: not s.is_linear and s.node.op not in s.dialect.points,
    ),
    PlacementRule(
        "precision", "The runtime does not run this precision.", lambda s: s.precision not in s.dialect.precisions
    ),
    PlacementRule(
        "finite",
        "A constant with infinite, NaN or huge values stays float, with what is quantized together with it.",
        _has_unquantizable_constant,
    ),
    PlacementRule("bias", "The bias of a linear operator is never quantized on its own.", _is_bias),
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
        "vector", "A product with a vector stays float: it is no product of matrices for INT8 kernels.", _is_vector
    ),
    PlacementRule(
        "bare product",
        "The runtime makes garbage of a matrix times weights without a bias of its own.",
        _is_bare_product,
    ),
    PlacementRule(
        "constant",
        "Constants stay float, but for weights of linear operators and operands that the dialect quantizes.",
        _is_lone_constant,
    ),
    PlacementRule(
        "type",
        "Only float32 and float16 tensors: integers, booleans and tensors of unknown type stay as they are.",
        lambda s: not s.is_linear and not is_float(s.model, s.tensor),
    ),
    PlacementRule("float16", "The runtime computes wrong results from Q/DQ in float16.", _is_unsupported_float16),
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
    PlacementRule("scalar", "A tensor without dimensions is not quantized.", _is_scalar),
    PlacementRule(
        "one scale", "All inputs of a Concat share a scale: one point, at its first activation.", _is_later_concat_input
    ),
    PlacementRule("fusion", "Nothing stands between Conv, BatchNormalization and activation.", _follows_convolution),
    PlacementRule(
        "residual", "Of an Add behind a convolution, only the residual operand is quantized.", _is_fusible_operand
    ),
    PlacementRule("absorbed", "The pair behind this activation computes it: none stands in front.", _is_absorbed),
    *(_rule_for_fault(name, fault) for name, fault in RUNTIME_FAULTS.items()),
    PlacementRule("grouped fp8", "Grouped convolutions have no FP8 kernels.", _is_grouped_fp8),
)


def first_violated_rule(
    model: Model, dialect: Dialect, node: Node, slot: int, precision: str = "int8"
) -> PlacementRule | None:
    """The first rule that keeps an input float, or None where a Q/DQ pair is legal.

    Args:
        model: The model.
        dialect: Whose rules.
        node: The node that reads.
        slot: Which of its inputs.
        precision: What is asked for.
    """
    site = InputSite(model, dialect, node, slot, precision)
    return next((rule for rule in PLACEMENT_RULES if rule.forbids(site)), None)
