"""Plug-in operators, which ONNX does not define: detection, and removal for tools that cannot process them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import onnx

from harness.base.errors import BuildFailed
from harness.graph.io.files import write_model
from harness.graph.load import load_proto
from harness.graph.passes.static_shapes import infer_types
from harness.graph.protos import (
    copy_message,
    extend_field,
    is_standard_op,
    iter_subgraphs,
    opset_versions,
    replace_field,
    tensors_read,
)


def find_plugin_nodes(
    proto: onnx.ModelProto, known: Collection[tuple[str, str]] = frozenset()
) -> dict[int, onnx.NodeProto]:
    """Return the nodes of the main graph that are plug-in operators, or have one in a subgraph, by index.

    A plug-in operator is one that ONNX does not define at the imported version.

    Args:
        known: Domain and name of operators that are no plug-ins although ONNX does not define them.
    """
    opsets = opset_versions(proto)

    def unknown(node: onnx.NodeProto) -> bool:
        if not is_standard_op(node, opsets) and (node.domain, node.op_type) not in known:
            return True
        return any(unknown(inner) for graph in iter_subgraphs(node) for inner in graph.node)

    return {index: node for index, node in enumerate(proto.graph.node) if unknown(node)}


def truncate_before_plugins(
    file: Path, tensors: Collection[str], known: Collection[tuple[str, str]]
) -> tuple[set[str], str]:
    """Remove plug-ins and all nodes that depend on them from a model file, in place.

    Args:
        file: Model whose nodes are in topological order; its external data are not changed.
        tensors: Names of tensors of interest.
        known: Domain and name of operators that are no plug-ins although ONNX does not define them.

    Returns:
        The tensors of interest that were removed, and the names of the plug-in operators, joined by commas; an empty
        set and "" without plug-ins, when the file is not changed.
    """
    proto = onnx.load(file, load_external_data=False)
    graph, plugins = proto.graph, find_plugin_nodes(proto, known)
    behind = _dependent_nodes(proto, plugins)
    lost = {name for node in behind.values() for name in node.output if name}
    if plugins:
        kept = [node for index, node in enumerate(graph.node) if index not in behind]
        domains = {"", *(node.domain for node in kept)}
        replace_field(proto.opset_import, [opset for opset in proto.opset_import if opset.domain in domains])
        replace_field(graph.node, kept)
        replace_field(graph.output, [value for value in graph.output if value.name not in lost])
        replace_field(graph.value_info, [value for value in graph.value_info if value.name not in lost])
        file.write_bytes(proto.SerializeToString())
    return lost.intersection(tensors), _operator_names(plugins)


class PluginSubgraph(NamedTuple):
    """Plug-ins of a model, and the nodes that depend on them, which were removed from its file.

    Attributes:
        proto: Original model.
        nodes: Nodes that were removed, by index.
        known: Domain and name of operators that are no plug-ins although ONNX does not define them.
        source: Name of the model in messages.
    """

    proto: onnx.ModelProto
    nodes: Mapping[int, onnx.NodeProto]
    known: Collection[tuple[str, str]]
    source: str

    @property
    def operators(self) -> str:
        """Names of the plug-in operators, joined by commas."""
        return _operator_names(find_plugin_nodes(self.proto, self.known))

    def restore_into(self, file: Path) -> None:
        """Add the removed nodes to a changed version of the file, in place; they are upgraded to its operator set."""
        cut, proto, nodes = onnx.load(file), self.proto, self.nodes
        plugins = find_plugin_nodes(proto, self.known)
        if _default_opset(cut) != _default_opset(proto) and len(nodes) > len(plugins):
            proto = load_proto(proto, source=self.source, sha256="", min_opset=_default_opset(cut)).proto
            nodes = _dependent_nodes(proto, find_plugin_nodes(proto, self.known))
        write_model(restore_plugins(cut, proto, nodes), file)


def extract_plugin_subgraph(file: Path, known: Collection[tuple[str, str]], source: str) -> PluginSubgraph | None:
    """Remove plug-ins and the nodes that depend on them from a model file; return them, or None without plug-ins.

    Args:
        file: Model whose nodes are in topological order; it is not changed if it has no plug-ins.
        known: Domain and name of operators that are no plug-ins although ONNX does not define them.
        source: Name of the model in messages.

    Raises:
        BuildFailed: No node is left, or type or shape of a tensor is unknown.
    """
    proto = onnx.load(file)
    plugins = find_plugin_nodes(proto, known)
    if not plugins:
        return None
    behind = PluginSubgraph(proto, _dependent_nodes(proto, plugins), known, source)
    if len(behind.nodes) == len(proto.graph.node):
        raise BuildFailed(f"{source}: every node lies behind plug-in operator {behind.operators}")
    write_model(remove_plugins(proto, behind.nodes, source), file)
    return behind


def remove_plugins(proto: onnx.ModelProto, plugins: Mapping[int, onnx.NodeProto], source: str) -> onnx.ModelProto:
    """Return a copy of a model without some nodes; tensors between them and other nodes become inputs and outputs.

    Args:
        plugins: Nodes to remove, by index.
        source: Name of the model in messages.

    Raises:
        BuildFailed: Type or shape of such a tensor is unknown.
    """
    cut = infer_types(proto, source)
    graph = cut.graph
    kept = [node for index, node in enumerate(graph.node) if index not in plugins]
    made = {name for node in plugins.values() for name in node.output if name}
    read = {name for node in plugins.values() for name in tensors_read(node)}
    types = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    inputs = sorted(made.intersection(name for node in kept for name in tensors_read(node)))
    outputs = [value.name for value in graph.output if value.name not in made]
    outputs += sorted(read.intersection(name for node in kept for name in node.output).difference(outputs))
    for name in (*inputs, *outputs):
        if name not in types or not types[name].type.tensor_type.elem_type:
            raise BuildFailed(
                f"{source}: type and shape of tensor {name!r} are not known, but needed where plug-in operators stay; "
                "export the model with those of all tensors (value_info)"
            )
    moved = {*inputs, *outputs}
    replace_field(graph.node, kept)
    replace_field(graph.input, [*graph.input, *(types[name] for name in inputs)])
    replace_field(graph.output, [types[name] for name in outputs])
    replace_field(graph.value_info, [value for value in graph.value_info if value.name not in moved])
    domains = {"", *(node.domain for node in kept)}
    replace_field(cut.opset_import, [opset for opset in cut.opset_import if opset.domain in domains])
    return cut


def restore_plugins(
    cut: onnx.ModelProto, proto: onnx.ModelProto, plugins: Mapping[int, onnx.NodeProto]
) -> onnx.ModelProto:
    """Return a copy of `cut` with the removed nodes; its inputs and outputs have the types of the original.

    Args:
        cut: Result of `remove_plugins`, after its operators were cast to other types.
        proto: Original model.
        plugins: Removed nodes by index.
    """
    whole = copy_message(cut)
    graph = whole.graph
    originals = {tensor.name: tensor for tensor in proto.graph.initializer}
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    constants, nodes = {}, [copy_message(node) for node in plugins.values()]
    for node in nodes:
        for slot, name in enumerate(node.input):
            if name in originals and types.get(name) != originals[name].data_type:
                node.input[slot] = name if name not in types else f"{name}.plugin"
                constants[node.input[slot]] = tensor = copy_message(originals[name])
                tensor.name = node.input[slot]
    made, final = {n for node in nodes for n in node.output}, {value.name for value in proto.graph.output}
    inner = [value for value in graph.input if value.name in made]
    inner += [value for value in graph.output if value.name not in final]
    graph.value_info.extend(inner)
    extend_field(graph.initializer, constants.values())
    replace_field(graph.input, [value for value in graph.input if value.name not in made])
    replace_field(graph.output, list(proto.graph.output))
    nodes = [*graph.node, *nodes]
    maker = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    needed = {index: sorted(maker[n] for n in tensors_read(node) if n in maker) for index, node in enumerate(nodes)}
    replace_field(graph.node, [nodes[index] for index in TopologicalSorter(needed).static_order()])
    domains = {opset.domain for opset in whole.opset_import}
    whole.opset_import.extend(opset for opset in proto.opset_import if opset.domain not in domains)
    return whole


def _dependent_nodes(proto: onnx.ModelProto, nodes: Collection[int]) -> dict[int, onnx.NodeProto]:
    found, made = dict[int, onnx.NodeProto](), set[str]()
    for index, node in enumerate(proto.graph.node):
        if index in nodes or not made.isdisjoint(tensors_read(node)):
            found[index] = node
            made.update(filter(None, node.output))
    return found


def _default_opset(proto: onnx.ModelProto) -> int:
    return max((opset.version for opset in proto.opset_import if opset.domain in ("", "ai.onnx")), default=0)


def _operator_names(nodes: Mapping[int, onnx.NodeProto]) -> str:
    return ", ".join(sorted({f"{node.domain}.{node.op_type}".lstrip(".") for node in nodes.values()}))
