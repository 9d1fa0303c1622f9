"""Preparation of a model for placement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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
        types_before_upgrade: Known types before the upgrade of the opset; empty without one.
    """

    proto: onnx.ModelProto
    source: str
    weights: Weights = field(default_factory=dict)
    types_before_upgrade: Mapping[str, TensorType] = field(default_factory=dict)

    def prepare(self, min_opset: int) -> None:
        """Prepare the model for placement, without a change of its results and of the shapes of its inputs.

        Args:
            min_opset: An older model is upgraded to this version of the default operator set.
        """
        lower_constants(self.proto.graph)
        self.weights = externalize_weights(self.proto.graph)
        self.proto = inline_functions(self.proto)
        _normalize_opsets(self.proto)
        _check_training(self.proto, self.source)
        custom_ops = isolate_custom_ops(self.proto)  # by the original opset
        if custom_ops:
            names = ", ".join(custom_ops)
            logger.warning("%s: operators that ONNX does not define stay float: %s", self.source, names)
        self._simplify()
        self._run_checker(check_valid, self.proto)
        self._upgrade(min_opset)
        restore_custom_ops(self.proto)
        # Operators that only the newer opset defines: shape inference (onnx 1.21) does not check them.
        opsets = opset_versions(self.proto)
        known = [
            node
            for node in (iter_nodes(self.proto) if custom_ops else ())
            if f"{node.domain or 'ai.onnx'}.{node.op_type}" in custom_ops and is_standard_op(node, opsets)
        ]
        if known:
            self._run_checker(_check_nodes, known, self.proto.ir_version, opsets)
        self.proto = infer_types(self.proto, self.source)
        while fold_shape_ops(graph := self.proto.graph) | inline_branches(graph) | remove_noops(graph):
            self._simplify()
            self.proto = infer_types(self.proto, self.source)
        nested = sorted({node.op_type for node in self.proto.graph.node if any(iter_subgraphs(node))})
        if nested:
            logger.warning("%s: subgraphs of %s stay float", self.source, ", ".join(nested))
        if random := ", ".join(sorted(set(find_random_nodes(self.proto).values()))):
            remedy = "; if Dropout is in training mode by mistake, export for inference (PyTorch: model.eval())"
            remedy = remedy if "Dropout" in random else ""
            what = "a random model, whose results change from run to run"
            logger.warning("%s: %s: %s%s", self.source, what, random, remedy)
        restore_weights(self.proto.graph, self.weights)
        normalize_resizes(self.proto.graph)
        fold_batch_norms(self.proto.graph)

    def _simplify(self) -> None:
        """Sort nodes, fold constants and remove unused nodes and weights."""
        graph = self.proto.graph
        lower_constants(graph)
        name_nodes(graph)
        self.weights.update(externalize_weights(graph))
        fold_and_prune(graph, opset_versions(self.proto), self.weights, self.source)
        self.weights.update(externalize_weights(graph))

    def _upgrade(self, min_opset: int) -> None:
        """Upgrade the default operator set to the required version."""
        version, newest = opset_versions(self.proto).get(""), onnx.defs.onnx_opset_version()
        if version is not None and version > newest:
            raise UserError(
                f"{self.source}: opset {version} is newer than the installed onnx {onnx.__version__} knows ({newest}); "
                f"export the model with opset {newest} or earlier, or install a newer onnx"
            )
        types = {tensor.data_type for tensor in (*self.proto.graph.initializer, *self.weights.values())}
        types.update(value.type.tensor_type.elem_type for value in self.proto.graph.input)
        if onnx.TensorProto.FLOAT16 in types:
            min_opset = max(min_opset, FLOAT16_QUANTIZE_OPSET)
        if version is None:
            self.proto.opset_import.append(helper.make_opsetid("", min_opset))
            _set_ir_version(self.proto)
        if version is None or version >= min_opset:
            return
        self.proto = infer_types(self.proto, self.source)  # the converter adds fewer nodes if it knows the shapes
        while version < EXPLICIT_RESIZE_OPSET and fold_shape_ops(self.proto.graph):  # old Resizes need constant scales
            self._simplify()
            self.proto = infer_types(self.proto, self.source)
        self.types_before_upgrade = static_types(self.proto.graph)
        self.proto = upgrade_opset(self.proto, version, min_opset, self.source)
        _set_ir_version(self.proto)
        self._simplify()
        self._run_checker(check_valid, self.proto)

    def _run_checker(self, check: Callable[[*Ts], None], *args: *Ts) -> None:
        if problem := call_in_helper_process(f"{self.source}: the check of its validity", _find_invalid, check, args):
            raise UserError(f"{self.source}: no valid ONNX model: {problem}; export the model again")


def _normalize_opsets(proto: onnx.ModelProto) -> None:
    """Use one name for the default domain, and an IR version that runtimes can read."""
    opsets: dict[str, int] = {}
    for opset in proto.opset_import:
        domain = "" if opset.domain == "ai.onnx" else opset.domain
        opsets[domain] = max(opset.version, opsets.get(domain, 0))
    replace_field(proto.opset_import, [helper.make_opsetid(domain, version) for domain, version in opsets.items()])
    for node in iter_nodes(proto):
        if node.domain == "ai.onnx":
            node.domain = ""
    _set_ir_version(proto)


def _set_ir_version(proto: onnx.ModelProto) -> None:
    needed = helper.find_min_ir_version_for(proto.opset_import, ignore_unknown=True)
    proto.ir_version = min(MAX_IR_VERSION, max(proto.ir_version, needed, MIN_IR_VERSION))


def _check_training(proto: onnx.ModelProto, source: str) -> None:
    """Report each BatchNormalization in training mode; raise `UserError` if it is no valid one."""
    for node in iter_nodes(proto):
        if node.op_type == "BatchNormalization" and not node.domain and attribute_value(node, "training_mode"):
            what = (
                f"{source}: BatchNormalization {node.name or node.output[0]!r} is in training mode, in which it "
                "normalizes each batch by its own mean; export the model for inference (PyTorch: model.eval())"
            )
            if sum(map(bool, node.output)) < _TRAINING_OUTPUTS:
                raise UserError(what)
            logger.warning("%s", what)


def _check_nodes(nodes: list[onnx.NodeProto], ir_version: int, opsets: dict[str, int]) -> None:
    context = checker.DEFAULT_CONTEXT.__class__()
    context.ir_version, context.opset_imports = ir_version, opsets
    for node in nodes:
        checker.check_node(node, context)


def _find_invalid(check: Callable[[*Ts], None], args: tuple[*Ts]) -> str:
    try:
        check(*args)
    except checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""
