"""Transfer of Q/DQ pairs from a model with fixed inputs to the same model with its dynamic axes.

A search measures at one size of each dimension. Its result differs from the fixed float model in added nodes (Q/DQ
pairs, casts), inputs of nodes, and constants. These differences are applied to the original file, which is prepared in
the same way except for its sizes, so that scales, zero points and stored weights are those that were measured.
"""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

import onnx

from harness.base.errors import UserError
from harness.graph.io.files import write_model
from harness.graph.io.model_reader import read_model
from harness.graph.load import prepare_model
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import Axes, InputSizes
from harness.graph.protos import copy_message, input_values, replace_field, tensors_read

logger = logging.getLogger(__name__)


class TransferError(UserError):
    """Failure to transfer a change: its node, edge or constant does not exist in the model with dynamic axes."""


def read_original(model: Model) -> onnx.ModelProto | None:
    """Read the original file of a model with dynamic inputs; return None if its inputs are static."""
    if model.origin is None:
        return None
    if isinstance(model.origin.model, Path):
        return read_model(model.origin.model, model.source)[0]
    return copy_message(model.origin.model)


def load_dynamic(model: Model) -> Model | None:
    """Prepare the original of a model with its dynamic axes; return None if its inputs are static.

    Node names are those of `model`, except for nodes that are folded only at known shapes.
    """
    proto = read_original(model)
    if model.origin is None or proto is None:
        return None
    sizes = InputSizes(keep_dynamic=True)
    return prepare_model(proto, proto, model.source, model.sha256, sizes, model.origin.min_opset)


def write_dynamic(model: Model, file: Path, target: Path) -> tuple[Path, dict[str, Axes | None]]:
    """Write a quantized model with the dynamic axes of its original.

    Args:
        model: The float model at fixed sizes, whose original has dynamic axes.
        file: The model with Q/DQ pairs at the same sizes.
        target: File to write.

    Returns:
        The file of the original float model (`float.onnx` in the folder of `target` if it was given in memory), and the
        declared dimensions of its inputs by name.
    """
    given, twin = read_original(model), load_dynamic(model)
    if given is None or twin is None or model.origin is None:
        raise TransferError(f"{model.source}: its inputs are static")
    made = transfer_changes(model.proto, onnx.load(file), twin.proto)
    for ours, theirs in ((made.graph.input, input_values(given.graph)), (made.graph.output, given.graph.output)):
        for own, value in zip(ours, theirs, strict=True):
            if (own.name, own.type) != (value.name, value.type):
                raise TransferError(
                    f"{own.name!r} would have another name, type or shape than {value.name!r} of the model"
                )
    write_model(made, target)
    source = model.origin.model
    floating = source if isinstance(source, Path) else write_model(given, target.with_name("float.onnx"))
    return floating, {name: axes for name, axes in model.origin.axes.items() if name in model.types}


def transfer_file(fixed: onnx.ModelProto, file: Path, other: onnx.ModelProto, target: Path) -> Path:
    """Write a quantized model with the shapes of another form of its float model, and return `target`.

    The model is `transfer_changes(fixed, content of file, other)`; see there for arguments.
    """
    return write_model(transfer_changes(fixed, onnx.load(file), other), target)


def transfer_changes(fixed: onnx.ModelProto, quantized: onnx.ModelProto, dynamic: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with dynamic axes after the changes between a fixed float model and its quantized form.

    Args:
        fixed: The float model with fixed inputs.
        quantized: The fixed model with Q/DQ pairs, and Casts that the runtime needs.
        dynamic: The float model with dynamic inputs, which is not changed.

    Raises:
        TransferError: A node, an edge or a constant of the differences has no counterpart in `dynamic`; the message
            names it.
    """
    made = _ChangeTransfer(fixed.graph, quantized.graph, dynamic.graph)
    result = copy_message(dynamic)
    replace_field(result.opset_import, quantized.opset_import)
    result.ir_version = max(dynamic.ir_version, quantized.ir_version)
    nodes = made.sorted_nodes()
    replace_field(result.graph.node, nodes)
    replace_field(result.graph.initializer, made.iter_constants(nodes))
    if made.late:
        names = ", ".join(repr(node.input[0]) for node in made.late.values())
        logger.warning("%s: constant only at fixed shapes, so at other sizes it keeps that scale", names)
    del result.graph.value_info[:]  # it would be wrong for changed tensors, and runtimes infer it
    return result


class _ChangeTransfer:
    def __init__(self, fixed: onnx.GraphProto, quantized: onnx.GraphProto, dynamic: onnx.GraphProto) -> None:
        self._before = {node.name: node for node in fixed.node}
        self._after = {node.name: node for node in quantized.node if node.name in self._before}
        self._added = [node for node in quantized.node if node.name not in self._before]
        self._dynamic = dynamic
        self._old = {tensor.name: tensor for tensor in fixed.initializer}
        self._new = {tensor.name: tensor for tensor in quantized.initializer}
        self._there = {tensor.name: tensor for tensor in dynamic.initializer}
        self.late: dict[str, onnx.NodeProto] = {}
        """By the name of what is stored at fixed shapes: the node that makes it with dynamic axes."""
        lost = [name for name in self._before if name not in self._after]
        if lost:
            raise TransferError(f"node {lost[0]!r} is not in the quantized model")

    def sorted_nodes(self) -> list[onnx.NodeProto]:
        """Return all nodes in topological order."""
        theirs = {node.name for node in self._dynamic.node}
        for name, node in self._after.items():
            if node != self._before[name] and name not in theirs:
                slot = next((i for i, t in enumerate(node.input) if t not in self._before[name].input), 0)
                edge = f"edge {self._before[name].input[slot]!r} -> input {slot} of {name!r}"
                raise TransferError(f"{edge}: the node exists only at fixed shapes")
        changed = [self._transfer_node(node) for node in self._dynamic.node]
        # Tools may give a DequantizeLinear the name of the constant that it replaces.
        made = {name for node in self._added for name in node.output}
        known = {"", *self._there, *self._new, *(value.name for value in self._dynamic.input)} - made
        made.update(known, *(node.output for node in changed))
        for op, slot, name in ((n.op_type, i, name) for n in self._added for i, name in enumerate(n.input)):
            if name in self._old and name in self._new and name not in self._there:
                raise TransferError(f"tensor {name!r}, which is quantized, is a constant only at fixed shapes")
            if name not in made:
                raise TransferError(f"edge {name!r} -> input {slot} of {op}: the tensor is not there")
        added = [*self._added, *self.late.values()]
        found = list(_sort_with_added(changed, added, known.difference(self.late)))
        if len(found) != len(changed) + len(added):
            raise TransferError("a Q/DQ pair reads a tensor that is not there with dynamic axes")
        return found

    def iter_constants(self, nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.TensorProto]:
        """Yield the constants that nodes read, with the values of the quantized model if they differ."""
        nodes = list(nodes)
        read = {name for node in nodes for name in tensors_read(node)}
        read.update(value.name for value in self._dynamic.output)
        read.difference_update(name for node in nodes for name in node.output)
        for name in [*self._there, *(name for name in self._new if name not in self._there)]:
            if name in read:
                if name in self._new and self._new[name] != self._old.get(name):
                    if name not in self.late:
                        yield self._new[name]
                elif name in self._there:
                    yield self._there[name]

    def _transfer_node(self, node: onnx.NodeProto) -> onnx.NodeProto:
        before, after = self._before.get(node.name), self._after.get(node.name)
        if before is None or after is None or before == after:
            return node
        result = copy_message(after)
        if (node.op_type, node.domain, len(node.output)) != (before.op_type, before.domain, len(before.output)):
            raise TransferError(f"node {node.name!r} is {before.op_type} at fixed shapes and {node.op_type} at others")
        if list(after.attribute) == list(before.attribute):
            replace_field(result.attribute, node.attribute)
        elif list(node.attribute) != list(before.attribute):
            raise TransferError(f"node {node.name!r} has other attributes at fixed shapes")
        inputs = []
        for slot, (old, new, own) in enumerate(zip_longest(before.input, after.input, node.input, fillvalue="")):
            edge = f"edge {old!r} -> input {slot} of {node.name!r}"
            if old != new and old in self._old and new in self._new:  # tools rename copies of shared constants
                renamed = copy_message(self._new[new])
                renamed.name = old
                new = old if renamed == self._old[old] else new
            inputs.append(own if old == new else new)
            if old == new:
                continue
            if old != own:
                raise TransferError(f"{edge}: with dynamic axes it reads {own!r}")
            if old in self._old and old not in self._there:
                self._quantize_at_producer(old, new, edge)
            elif old in self._there and self._old.get(old) != self._there[old]:
                raise TransferError(f"{edge}: the constant has other values with dynamic axes")
        while inputs and not inputs[-1]:
            inputs.pop()
        replace_field(result.input, inputs)
        return result

    def _quantize_at_producer(self, old: str, new: str, edge: str) -> None:
        """Insert a pair after the producer of a tensor that is a quantized constant at fixed shapes.

        An example is a position embedding that is cut to the length of the input. Scales by channel are refused,
        because they may be scales by position.
        """
        maker = next((node for node in self._added if new in node.output), None)
        computed = any(old in node.output for node in self._dynamic.node)
        if maker is None or maker.op_type != "DequantizeLinear" or len(maker.input) < 3 or not computed:
            raise TransferError(f"{edge}: the tensor is a constant only at fixed shapes")
        stored, *grid = maker.input
        if grid[0] not in self._new or len(self._new[grid[0]].dims):
            raise TransferError(f"{edge}: the tensor is a constant only at fixed shapes, with a scale for each channel")
        self.late[stored] = onnx.NodeProto(
            op_type="QuantizeLinear", name=f"{stored}.q", input=[old, *grid], output=[stored]
        )


def _sort_with_added(
    nodes: Iterable[onnx.NodeProto], added: Iterable[onnx.NodeProto], known: set[str]
) -> Iterator[onnx.NodeProto]:
    """Yield nodes in their order, and each added node as soon as its inputs are known."""
    waiting: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    missing: dict[int, int] = {}
    ready: deque[onnx.NodeProto] = deque()
    for node in added:
        lacking = {name for name in node.input if name not in known}
        missing[id(node)] = len(lacking)
        for name in lacking:
            waiting[name].append(node)
        if not lacking:
            ready.append(node)
    for node in (None, *nodes):
        ready.extend([node] if node is not None else ())
        while ready:
            done = ready.popleft()
            yield done
            for name in done.output:
                for reader in waiting.pop(name, ()):
                    missing[id(reader)] -= 1
                    if not missing[id(reader)]:
                        ready.append(reader)
