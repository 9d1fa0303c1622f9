"""Preparation of a model for placement: another batch size, a newer opset, and a simpler structure.

Models that were exported for one sample, like most detectors, get another batch size: the first size of the inputs is
changed, and the constants that Reshape, Resize and Expand read as shapes. Then every tensor that depends on the inputs
is checked: its first axis must be the batch, and its shape for one sample must be unchanged. Models that mix samples or
move them to another axis are refused.

onnx's version converter (1.21) changes the meaning of a few operators, which are handled here: Upsample and Resize
before opset 11 become a Resize that samples at half pixels, Hardmax works along one axis from opset 13 on and along all
following axes before, Scan of opset 8 loses its batch axis, and training becomes inference.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVarTuple

import numpy as np
import onnx
from onnx import checker, helper, numpy_helper, version_converter

from harness.base.errors import UserError
from harness.graph.builder import MAX_IR_VERSION
from harness.graph.model import TensorType
from harness.graph.passes.dimension_sizes import Shapes, parse_shape
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
from harness.graph.protos import (
    attribute_value,
    constants_by_name,
    copy_message,
    find_random_nodes,
    is_standard_op,
    iter_graphs,
    iter_nodes,
    iter_subgraphs,
    opset_versions,
    replace_field,
    tensors_read,
)
from harness.workers.helper_process import call_in_helper_process

logger = logging.getLogger(__name__)
Ts = TypeVarTuple("Ts")

FLOAT16_QUANTIZE_OPSET = 19  # first opset whose QuantizeLinear accepts float16 (ONNX operator schemas)
_TRAINING_OUTPUTS = 3  # of a BatchNormalization in training mode
MIN_IR_VERSION = 4  # first IR version whose initializers need not be inputs
SHAPE_INPUT_SLOT = {"Reshape": 1, "Expand": 1, "Resize": 3}  # number of the input that is the shape of the result
# Operators that work along the first axis, or with indices for one sample, without a change of the result's shape.
BATCH_MIXING_OPS = frozenset(
    {"CumSum", "GatherElements", "GatherND", "GRU", "LSTM", "RNN", "Scatter", "ScatterElements", "ScatterND"}
)
SHAPE_OPS = frozenset({"Shape", "Size"})  # their results do not depend on values
EXPLICIT_RESIZE_OPSET = 11  # from this opset on, Resize has coordinate modes
_SINGLE_AXIS_SOFTMAX_OPSET = 13  # from this opset on, Hardmax works along one axis
_UNBATCHED_SCAN_OPSET = 9  # from this opset on, Scan has no batch axis
_NO_IS_TEST_OPSET = 7  # from this opset on, BatchNormalization for training is recognised by its number of outputs
_TRAINING_MODE_OPSET = 14  # from this opset on, it is recognised by an attribute


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
        if problem := call_in_helper_process(
            f"{self.source}: the check of its validity", _validation_problem, check, args
        ):
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


def _validation_problem(check: Callable[[*Ts], None], args: tuple[*Ts]) -> str:
    """Return the message of the checker, which runs in the helper process; "" for a valid model."""
    try:
        check(*args)
    except checker.ValidationError as error:
        return " ".join(str(error).split())
    return ""


def upgrade_opset(proto: onnx.ModelProto, version: int, wanted: int, source: str) -> onnx.ModelProto:
    """Return a model upgraded from opset `version` to `wanted` of the default domain; `proto` is changed.

    The model must have inferred types and unique node names.

    Raises:
        UserError: The model has no equivalent in the newer opset; the message starts with `source`.
    """
    metadata, declared, outputs = (
        list(each) for each in (proto.metadata_props, proto.graph.value_info, proto.graph.output)
    )
    try:
        _refuse_unconvertible(proto.graph, version)
        if version < _SINGLE_AXIS_SOFTMAX_OPSET:
            _flatten_hardmax(proto.graph)
        resizes = _explicit_resizes(proto.graph) if version < EXPLICIT_RESIZE_OPSET else []
        what = f"{source}: the upgrade from opset {version} to {wanted}"
        proto = call_in_helper_process(what, version_converter.convert_version, proto, wanted)
    except (version_converter.ConvertError, RuntimeError) as error:
        text = " ".join(str(error).split())
        raise UserError(
            f"{source}: opset {version} cannot be upgraded to {wanted}, which Q/DQ needs here ({text}); "
            f"export the model with opset {wanted} or later"
        ) from error
    _restore_resizes(proto.graph, resizes)
    replace_field(proto.metadata_props, metadata)
    for graph in iter_graphs(proto.graph):
        # The converter writes shapes that are not always right (onnx 1.21: rank 0 after Softmax).
        del graph.value_info[:]
    proto.graph.value_info.extend(declared)
    for value, before in zip(proto.graph.output, outputs, strict=True):
        value.type.CopyFrom(before.type)
    return proto


def _iter_nodes(graph: onnx.GraphProto, *operators: str) -> Iterator[onnx.NodeProto]:
    """Yield nodes of these ONNX operators, including those in subgraphs."""
    for inner in iter_graphs(graph):
        yield from (node for node in inner.node if node.op_type in operators and not node.domain)


def _refuse_unconvertible(graph: onnx.GraphProto, version: int) -> None:
    """Raise `RuntimeError` for a node that newer opsets cannot express."""
    for node in _iter_nodes(graph, "BatchNormalization", "Dropout", "Scan"):
        if node.op_type == "Scan" and version < _UNBATCHED_SCAN_OPSET:
            raise RuntimeError(f"{_describe_node(node)} has the batch axis of opset 8, which Scan lost in opset 9")
        old = version < _NO_IS_TEST_OPSET and node.op_type != "Scan" and not attribute_value(node, "is_test")
        several = sum(map(bool, node.output)) > 1
        if old or (node.op_type == "BatchNormalization" and version < _TRAINING_MODE_OPSET and several):
            raise RuntimeError(f"{_describe_node(node)} is exported for training; export the model for inference")


def _explicit_resizes(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """Return nodes with the name, attributes and output of the Resize that replaces each Upsample or old Resize.

    Before the attribute `nearest_mode` existed, ONNX Runtime rounded coordinates up on axes that shrink and down on
    others (`GetNearestPixelFromOriginal`, mode SIMPLE); onnx's own test of Resize-10 expects the same.
    """
    constants = {name: value for inner in iter_graphs(graph) for name, value in constants_by_name(inner).items()}
    resizes = []
    for node in _iter_nodes(graph, "Upsample", "Resize"):
        mode = attribute_value(node, "mode", "nearest")
        mode = "linear" if mode == "bilinear" else mode  # the name in opset 1
        attributes = {"mode": mode, "coordinate_transformation_mode": "asymmetric"}
        if mode == "nearest":
            attributes["nearest_mode"] = "floor"  # of an Upsample, which only enlarges
            if node.op_type == "Resize":
                what = _describe_node(node)
                if node.input[1] not in constants:
                    raise RuntimeError(f"the scales of {what} are not constant, so its rounding is not known")
                factors = numpy_helper.to_array(constants[node.input[1]]).ravel().tolist()
                if min(factors) < 1 < max(factors):
                    raise RuntimeError(f"{what} enlarges one axis and shrinks another, which it rounds differently")
                attributes["nearest_mode"] = "ceil" if min(factors) < 1 else "floor"
        resizes.append(helper.make_node("Resize", [], list(node.output), name=node.name, **attributes))
    return resizes


def _restore_resizes(graph: onnx.GraphProto, resizes: Sequence[onnx.NodeProto]) -> None:
    """Set names and attributes of the Resize nodes of a converted graph, which are in the order of `resizes`."""
    new_names = {}
    for node, resize in zip(list(_iter_nodes(graph, "Resize")) if resizes else (), resizes, strict=True):
        node.name = resize.name
        new_names[node.output[0]] = resize.output[0]
        replace_field(node.attribute, resize.attribute)
    for inner in iter_graphs(graph) if new_names else ():
        for value in inner.output:
            value.name = new_names.get(value.name, value.name)
        for node in inner.node:
            for names in (node.input, node.output):
                names[:] = [new_names.get(name, name) for name in names]


def _flatten_hardmax(graph: onnx.GraphProto) -> None:
    """Replace every Hardmax by one over the rows of a matrix, whose meaning is equal in all opsets, in place."""
    for inner in iter_graphs(graph):
        nodes: list[onnx.NodeProto] = []
        for node in inner.node:
            if node.op_type != "Hardmax" or node.domain:
                nodes.append(node)
                continue
            axis, data = attribute_value(node, "axis", 1), node.input[0]
            result, rows, largest, shape = (node.output[0] + end for end in ("", ".rows", ".largest", ".shape"))
            nodes += [
                helper.make_node("Flatten", [data], [rows], name=f"{node.name}.rows", axis=axis),
                helper.make_node("Hardmax", [rows], [largest], name=node.name, axis=1),
                helper.make_node("Shape", [data], [shape], name=f"{node.name}.size"),
                helper.make_node("Reshape", [largest, shape], [result], name=f"{node.name}.shape"),
            ]
        if len(nodes) > len(inner.node):
            replace_field(inner.node, nodes)


def _describe_node(node: onnx.NodeProto) -> str:
    return f"{node.op_type} {node.name or node.output[0]!r}"


def with_batch_size(proto: onnx.ModelProto, shapes: Shapes, source: str) -> onnx.ModelProto:
    """Return a copy of a model with the batch size of `shapes` if it is fixed to one sample, or else the model itself.

    Raises:
        UserError: The shapes have several batch sizes, or the model cannot be changed; then the message, which starts
            with `source`, names the operator that prevents it.
    """
    batch_sizes = {}
    inputs = {value.name: value for value in proto.graph.input}
    for name, given in shapes.items():
        if name in inputs:
            declared = tuple(dim.dim_value for dim in inputs[name].type.tensor_type.shape.dim)
            size, *rest = parse_shape(given, f"{source}: shapes.{name}")
            if declared[:1] == (1,) and declared[1:] == tuple(rest) and size > 1:
                batch_sizes[name] = size
    if not batch_sizes:
        return proto
    if len(set(batch_sizes.values())) > 1:
        raise UserError(f"{source}: shapes: one number of samples for all inputs, but got {dict(batch_sizes)}")
    samples = next(iter(batch_sizes.values()))
    one = copy_message(proto)
    lower_constants(one.graph)
    weights = externalize_weights(one.graph)
    dependent = set(batch_sizes)  # tensors that are computed from values, and not only from shapes, of the inputs
    for node in one.graph.node:
        if node.op_type not in SHAPE_OPS and dependent.intersection(tensors_read(node)):
            dependent.update(name for name in node.output if name)
    many = copy_message(one)
    _set_batch_size(many.graph, set(batch_sizes), dependent, samples)
    before, after = (static_types(infer_types(model, source).graph) for model in (one, many))
    problem = _first_batch_mixing_op(one.graph, dependent, before, after, samples)
    if problem:
        widened = ", ".join(f"{name!r} to {samples}" for name in batch_sizes)
        raise UserError(
            f"{source}: shapes: the model is fixed to one sample and cannot be widened ({widened}): {problem}; "
            "export it with a dynamic batch"
        )
    restore_weights(many.graph, weights)
    logger.info("%s: batch size changed from 1 to %d", source, samples)
    return many


def _set_batch_size(graph: onnx.GraphProto, inputs: set[str], dependent: set[str], samples: int) -> None:
    """Set the batch size of inputs and of constants that are shapes; clear all other declared shapes."""
    for value in graph.input:
        if value.name in inputs:
            value.type.tensor_type.shape.dim[0].dim_value = samples
    for value in graph.output:
        value.type.tensor_type.ClearField("shape")
    del graph.value_info[:]
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        slot = SHAPE_INPUT_SLOT.get(node.op_type, len(node.input))
        if slot < len(node.input) and node.input[slot] in constants and node.input[0] in dependent:
            sizes = numpy_helper.to_array(constants[node.input[slot]])
            if sizes.size and sizes.flat[0] == 1:
                name = f"{node.input[slot]}.{samples}"
                if name not in constants:
                    batched = np.concatenate([[samples], sizes.ravel()[1:]]).astype(sizes.dtype)
                    constants[name] = numpy_helper.from_array(batched, name)
                    graph.initializer.append(constants[name])
                node.input[slot] = name


def _first_batch_mixing_op(
    graph: onnx.GraphProto,
    dependent: set[str],
    before: Mapping[str, TensorType],
    after: Mapping[str, TensorType],
    samples: int,
) -> str:
    """Describe the first operator whose result is not the same for each sample; "" if there is none."""
    for node in graph.node:
        if not dependent.intersection(tensors_read(node)) or node.op_type in SHAPE_OPS:
            continue
        label = f"{node.op_type} {node.name or node.output[0]!r}"
        if any(True for _ in iter_subgraphs(node)):
            return f"{label} has a subgraph"
        first = node.input[0]
        axis = attribute_value(node, "axis", 0 if node.op_type == "Gather" else None)
        along = axis == 0 or (first in before and axis == -len(before[first].shape))
        if first in dependent and (node.op_type in BATCH_MIXING_OPS or along):
            return f"{label} works along the samples"
        for name in node.output:
            if name in before and name not in after:
                return f"the result of {label} for several samples is not known"
            own = before[name].shape if name in before else None
            if own is not None and (own[:1] != (1,) or after[name].shape != (samples, *own[1:])):
                return f"{label} does not keep samples apart"
    unknown = [value.name for value in graph.output if value.name in dependent and value.name not in before]
    return f"the shape of output {unknown[0]!r} is not known" if unknown else ""
