"""Passes that prepare a model for placement, with their pre- and postconditions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVarTuple

import onnx
from onnx import checker, helper

from harness.base.errors import UserError
from harness.graph.builder import MAX_IR_VERSION
from harness.graph.model import TensorType
from harness.graph.passes.normalize import (
    Weights,
    check_valid,
    externalize_weights,
    fold_batch_norms,
    inline_functions,
    isolate_custom_ops,
    lower_constants,
    name_nodes,
    normalize_resizes,
    restore_custom_ops,
    restore_weights,
)
from harness.graph.passes.simplify import fold_and_prune, fold_shape_ops, inline_branches, remove_noops
from harness.graph.passes.static_shapes import infer_types, static_types
from harness.graph.passes.upgrade_opset import EXPLICIT_RESIZE_OPSET, upgrade_opset
from harness.graph.protos import (
    attribute_value,
    find_random_nodes,
    is_standard_op,
    iter_graphs,
    iter_nodes,
    iter_subgraphs,
    opset_versions,
    replace_field,
)
from harness.workers.helper_process import call_in_helper_process

logger = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")

FLOAT16_QUANTIZE_OPSET = 19  # first opset whose QuantizeLinear accepts float16 (ONNX operator schemas)
_TRAINING_OUTPUTS = 3  # of a BatchNormalization in training mode
MIN_IR_VERSION = 4  # first IR version whose initializers need not be inputs


@dataclass(slots=True)
class ModelDraft:
    """Model during its preparation.

    Attributes:
        proto: Model without its large weights.
        weights: Large weights, which are inputs of `proto`.
        custom_ops: Operators that ONNX does not define at the model's original opset, as "domain.op".
        types_before_upgrade: Known types before the upgrade of the opset; empty without one.
    """

    proto: onnx.ModelProto
    source: str
    weights: Weights = field(default_factory=dict)
    custom_ops: tuple[str, ...] = ()
    types_before_upgrade: Mapping[str, TensorType] = field(default_factory=dict)

    @property
    def opsets(self) -> dict[str, int]:
        """Opset version by domain."""
        return opset_versions(self.proto)


def _accept(draft: ModelDraft) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Pass:
    """Change of a model that does not change its results, with a pre- and a postcondition.

    Attributes:
        call: Function that changes the draft.
        requires: Function that raises `UserError` if the pass cannot be applied.
        ensures: Function that raises `UserError` if the result is not valid.
    """

    call: Callable[[ModelDraft], object]
    requires: Callable[[ModelDraft], None] = _accept
    ensures: Callable[[ModelDraft], None] = _accept


def run_passes(draft: ModelDraft, passes: Iterable[Pass]) -> None:
    """Apply passes to a draft in order, in place; raise `UserError` if a condition of a pass is violated."""
    for each in passes:
        each.requires(draft)
        each.call(draft)
        each.ensures(draft)


def prepare_passes(min_opset: int) -> tuple[Pass, ...]:
    """Return the passes that prepare a model for placement, in order; they do not change shapes of inputs.

    Args:
        min_opset: Older models are upgraded to this version of the default operator set.
    """
    return (
        Pass(_split_off_weights),
        Pass(_inline_local_functions),
        Pass(_normalize_opsets),
        Pass(_isolate_custom_ops, requires=_require_inference_mode),
        Pass(_simplify, ensures=_require_valid),
        Pass(lambda draft: _upgrade(draft, min_opset), requires=_require_known_opset),
        Pass(lambda draft: restore_custom_ops(draft.proto), ensures=_require_valid_custom_ops),
        Pass(_infer_types),
        Pass(_remove_shape_ops_and_noops),
        Pass(_report_float_nodes),
        Pass(lambda draft: restore_weights(draft.proto.graph, draft.weights)),
        Pass(lambda draft: normalize_resizes(draft.proto.graph)),
        Pass(lambda draft: fold_batch_norms(draft.proto.graph)),
    )


def _split_off_weights(draft: ModelDraft) -> None:
    lower_constants(draft.proto.graph)
    draft.weights = externalize_weights(draft.proto.graph)


def _inline_local_functions(draft: ModelDraft) -> None:
    draft.proto = inline_functions(draft.proto)


def _normalize_opsets(draft: ModelDraft) -> None:
    """Use one name for the default domain, and an IR version that runtimes can read."""
    proto = draft.proto
    opsets: dict[str, int] = {}
    for opset in proto.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        opsets[domain] = max(opset.version, opsets.get(domain, 0))
    replace_field(proto.opset_import, [helper.make_opsetid(domain, version) for domain, version in opsets.items()])
    for graph in iter_graphs(proto.graph):
        for node in graph.node:
            if node.domain == "ai.onnx":
                node.domain = ""
    _set_ir_version(proto)


def _set_ir_version(proto: onnx.ModelProto) -> None:
    needed = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = min(MAX_IR_VERSION, max(proto.ir_version, needed, MIN_IR_VERSION))


def _isolate_custom_ops(draft: ModelDraft) -> None:
    draft.custom_ops = tuple(isolate_custom_ops(draft.proto))
    if draft.custom_ops:
        names = ", ".join(draft.custom_ops)
        logger.warning("%s: operators that ONNX does not define stay float: %s", draft.source, names)


def _require_inference_mode(draft: ModelDraft) -> None:
    """Report each BatchNormalization in training mode; raise `UserError` if it is no valid one."""
    for node in iter_nodes(draft.proto):
        if node.op_type == "BatchNormalization" and not node.domain and attribute_value(node, "training_mode"):
            what = (
                f"{draft.source}: BatchNormalization {node.name or node.output[0]!r} is in training mode, in which it "
                "normalizes each batch by its own mean; export the model for inference (PyTorch: model.eval())"
            )
            if sum(map(bool, node.output)) < _TRAINING_OUTPUTS:
                raise UserError(what)
            logger.warning("%s", what)


def _report_float_nodes(draft: ModelDraft) -> None:
    nested = sorted({node.op_type for node in draft.proto.graph.node if any(iter_subgraphs(node))})
    if nested:
        logger.warning("%s: subgraphs of %s stay float", draft.source, ", ".join(nested))
    if random := ", ".join(sorted(set(find_random_nodes(draft.proto).values()))):
        remedy = "; if Dropout is in training mode by mistake, export for inference (PyTorch: model.eval())"
        logger.warning(
            "%s: a random model, whose results change from run to run: %s%s",
            draft.source,
            random,
            remedy if "Dropout" in random else "",
        )


def _simplify(draft: ModelDraft) -> None:
    """Sort nodes, fold constants and remove unused nodes and weights."""
    graph = draft.proto.graph
    lower_constants(graph)
    name_nodes(graph)
    draft.weights.update(externalize_weights(graph))
    fold_and_prune(graph, draft.opsets, draft.weights, draft.source)
    draft.weights.update(externalize_weights(graph))


def _infer_types(draft: ModelDraft) -> None:
    draft.proto = infer_types(draft.proto, draft.source)


def _remove_shape_ops_and_noops(draft: ModelDraft) -> None:
    while fold_shape_ops(graph := draft.proto.graph) | inline_branches(graph) | remove_noops(graph):
        _simplify(draft)
        _infer_types(draft)


def _require_valid(draft: ModelDraft) -> None:
    _run_checker(draft, check_valid, draft.proto)


def _require_valid_custom_ops(draft: ModelDraft) -> None:
    """Check operators that only the newer opset defines, because shape inference (onnx 1.21) does not check them."""
    nodes = [
        node
        for graph in (iter_graphs(draft.proto.graph) if draft.custom_ops else ())
        for node in graph.node
        if f"{node.domain or 'ai.onnx'}.{node.op_type}" in draft.custom_ops and is_standard_op(node, draft.opsets)
    ]
    if nodes:
        _run_checker(draft, _check_nodes, nodes, draft.proto.ir_version, draft.opsets)


def _check_nodes(nodes: list[onnx.NodeProto], ir_version: int, opsets: dict[str, int]) -> None:
    context = checker.DEFAULT_CONTEXT.__class__()
    context.ir_version, context.opset_imports = ir_version, opsets
    for node in nodes:
        checker.check_node(node, context)


def _run_checker(draft: ModelDraft, check: Callable[[*Ts], None], *args: *Ts) -> None:
    if problem := call_in_helper_process(f"{draft.source}: the check of its validity", _find_invalid, check, args):
        raise UserError(f"{draft.source}: no valid ONNX model: {problem}; export the model again")


def _find_invalid(check: Callable[[*Ts], None], args: tuple[*Ts]) -> str:
    try:
        check(*args)
    except checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def _require_known_opset(draft: ModelDraft) -> None:
    version, newest = draft.opsets.get("", 0), onnx.defs.onnx_opset_version()
    if version > newest:
        raise UserError(
            f"{draft.source}: opset {version} is newer than the installed onnx {onnx.__version__} knows ({newest}); "
            f"export the model with opset {newest} or earlier, or install a newer onnx"
        )


def _upgrade(draft: ModelDraft, min_opset: int) -> None:
    """Upgrade the default operator set to the required version."""
    if _has_float16(draft):
        min_opset = max(min_opset, FLOAT16_QUANTIZE_OPSET)
    version = draft.opsets.get("")
    if version is None:
        draft.proto.opset_import.append(helper.make_opsetid("", min_opset))
        _set_ir_version(draft.proto)
    if version is None or version >= min_opset:
        return
    _infer_types(draft)  # the converter adds fewer nodes if it knows the shapes
    while version < EXPLICIT_RESIZE_OPSET and fold_shape_ops(draft.proto.graph):  # old Resizes need constant scales
        _simplify(draft)
        _infer_types(draft)
    draft.types_before_upgrade = static_types(draft.proto.graph)
    draft.proto = upgrade_opset(draft.proto, version, min_opset, draft.source)
    _set_ir_version(draft.proto)
    _simplify(draft)
    _require_valid(draft)


def _has_float16(draft: ModelDraft) -> bool:
    tensors = (*draft.proto.graph.initializer, *draft.weights.values())
    inputs = (value.type.tensor_type.elem_type for value in draft.proto.graph.input)
    return onnx.TensorProto.FLOAT16 in {*(tensor.data_type for tensor in tensors), *inputs}
