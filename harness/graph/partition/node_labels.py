"""A model as plain numbers: what each node is, and which tensors it reads; private to
`harness.graph.partition.patterns`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.graph.model import Model, Node
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, LINEAR_OPS, QUANTIZABLE_FLOAT_TYPES

__all__ = ["NodeLabels", "label_nodes"]

# Numbers and paddings that change neither where a Q/DQ pair may stand nor which kernel runs.
_IGNORED_ATTRIBUTES = frozenset({
    "alpha", "auto_pad", "beta", "ceil_mode", "coordinate_transformation_mode", "count_include_pad", "cubic_coeff_a",
    "epsilon", "exclude_outside", "extrapolation_value", "gamma", "max", "min", "momentum", "nearest_mode",
    "output_padding", "output_shape", "pads", "ratio", "seed", "spatial", "storage_order", "training_mode", "value",
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLabels:
    """Nodes and activations of a model by number.

    Attributes:
        labels: All distinct node labels, sorted: operator, attributes that matter, kind of each input.
        label: For each node the position of its label.
        digest: For each label 63 bits of its SHA-256, the same in any model and process.
        reads: For each node the activations that it reads, in slot order; what else it reads is in its label.
        producer: For each activation the node that makes it, or -1.
        position: For each activation its position among the outputs of that node, or -1.
        number: Activations by tensor name.
    """

    labels: tuple[str, ...]
    label: tuple[int, ...]
    digest: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    producer: tuple[int, ...]
    position: tuple[int, ...]
    number: Mapping[str, int]


def label_nodes(model: Model) -> NodeLabels:
    """Number the nodes and activations of a model."""
    number: dict[str, int] = {}
    producer: list[int] = []
    position: list[int] = []

    def numbered(name: str) -> int:
        known = number.setdefault(name, len(number))
        if known == len(producer):
            producer.append(-1)
            position.append(-1)
        return known

    reads = []
    for node in model.nodes:
        names = (*node.inputs, *node.captures)
        reads.append(tuple(numbered(name) for name in names if name and name not in model.constants))
        for place, name in enumerate(node.outputs):
            if name:
                made = numbered(name)
                producer[made], position[made] = node.index, place
    texts = [_node_label(model, node) for node in model.nodes]
    labels = sorted(set(texts))
    rank = {text: place for place, text in enumerate(labels)}
    return NodeLabels(
        labels=tuple(labels),
        label=tuple(rank[text] for text in texts),
        digest=tuple(int(hashlib.sha256(text.encode()).hexdigest()[:15], 16) for text in labels),
        reads=tuple(reads),
        producer=tuple(producer),
        position=tuple(position),
        number=number,
    )


def _node_label(model: Model, node: Node) -> str:
    """Describe what two matching nodes have in common, apart from the activations that they read."""
    parts = [f"{node.domain}:{node.op}", *_relevant_attributes(model, node)]
    kinds = [_input_kind(model, node, slot, name) for slot, name in enumerate(node.inputs)]
    while kinds and kinds[-1] == "_":
        kinds.pop()
    outputs = "".join("o" if name else "_" for name in node.outputs).rstrip("_")
    captured = f" captures {len(node.captures)}" if node.captures else ""
    body = f" body {node.body[:16]}" if node.body else ""
    return f"{' '.join(parts)} ({','.join(kinds)}) -> {outputs}{captured}{body}{' opaque' if node.opaque else ''}"


def _input_kind(model: Model, node: Node, slot: int, name: str) -> str:
    if not name:
        return "_"
    known = model.types.get(name)
    if name in model.constants:
        shape = model.constants[name].dims
        return f"constant{len(shape)}" if node.op in LINEAR_OPS and slot < 2 else "constant"
    if known is None:
        return "untyped"
    kind = "float" if known.dtype in QUANTIZABLE_FLOAT_TYPES else known.dtype
    return kind if known.shape else f"{kind} scalar"


def _relevant_attributes(model: Model, node: Node) -> list[str]:
    values = {name: _stable_value(value) for name, value in node.attributes.items() if name not in _IGNORED_ATTRIBUTES}
    if node.op in CONVOLUTION_OPS:
        for name in ("strides", "dilations"):
            if all(value == 1 for value in values.get(name, ())):
                values.pop(name, None)
        known = model.types.get(node.inputs[1])
        values.pop("group", None)
        values["class"] = _classify_groups(node, known.shape if known else ())
        if known:
            values["kernel_shape"] = known.shape[2:]
    return [f"{name}={value}" for name, value in sorted(values.items())]


def _classify_groups(node: Node, weight: Sequence[int]) -> str:
    """Return the kind of kernel that a convolution runs in; the number of groups does not matter."""
    groups = int(node.attributes.get("group", 1))
    if groups == 1:
        return "dense"
    channels = (weight[0] // groups, weight[1]) if len(weight) > 1 else (0, 0)
    return "depthwise" if channels == (1, 1) else "grouped"


def _stable_value(value: Any) -> Any:
    """Return a value whose text is the same in every process: lists as tuples, arrays as a digest."""
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, list | tuple):
        return tuple(_stable_value(item) for item in value)
    if hasattr(value, "tobytes"):
        return f"{value.dtype}{list(value.shape)} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}"
    return value
