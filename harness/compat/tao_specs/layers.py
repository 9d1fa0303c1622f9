"""Selection of nodes by `layers` and `skip_names`, and the presets of the reference documents."""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

from harness.base.errors import suggest_names

logger = logging.getLogger(__name__)

DEFAULT_LAYERS_WILDCARD = "*"  # as `module_name`: the operators that the backend quantizes by default
MAX_SUGGESTED_MODULES = 8

#: Operators that ModelOpt 0.47 quantizes by default, by mode (docstring of `modelopt/onnx/quantization/quantize.py`).
DEFAULT_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "int8": (
        "Add", "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Gemm", "GlobalAveragePool",
        "MatMul", "MaxPool", "Mul",
    ),
    "fp8": ("Conv", "Gemm", "MatMul"),
    "int4": ("Gemm", "MatMul"),
}  # fmt: skip
#: Operators that ModelOpt leaves float for accuracy (how-to on PTQ of YOLO11, section 3.4).
FLOAT_BY_DEFAULT: Mapping[str, tuple[str, ...]] = {
    "activations": ("Softmax", "Sigmoid", "Tanh"),
    "structure": ("Concat", "Slice", "Reshape", "Transpose"),
    "arithmetic, unless fused": ("Add", "Sub", "Mul", "Div"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPreset:
    """Named choice of layers.

    Attributes:
        skip_names: Wildcards over names of nodes that stay native.
        text: Description.
        op_types: Operators to quantize to INT8 instead of `layers`; empty: use `layers`.
        expect: Warning about the quantized models, or "".
    """

    text: str
    skip_names: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    expect: str = ""


PRESETS: Mapping[str, LayerPreset] = {
    # TAO documentation, "ModelOpt ONNX Backend (Static PTQ)", section 9.8.8
    "classifier": LayerPreset(text="classifiers: the last layer stays native", skip_names=("/classifier/*", "/fc")),
    "rtdetr": LayerPreset(
        text="RT-DETR: head, encoder and decoder stay native", skip_names=("/head/*", "/encoder/*", "/decoder/*")
    ),
    # How-to on PTQ of YOLO11, section 3.4
    "extreme_int8": LayerPreset(
        text="every operator that can be forced to INT8: a stress test",
        op_types=(
            "Conv", "MatMul", "MaxPool", "Mul", "Add", "Concat", "Sigmoid", "Softmax", "Split", "Transpose",
            "Reshape", "Slice", "Resize", "Sub", "Div",
        ),
        expect=(
            "extreme INT8 is a stress test, not for deployment: on YOLO11n mAP fell from 0.42 to 0.12 (500 COCO "
            "images), and TensorRT may fail with an internal error when it builds such a model. Compare it with "
            "the defaults (qdq evaluate) before you draw conclusions"
        ),
    ),
}  # fmt: skip


def describe_defaults() -> list[str]:
    """Return lines of text about ModelOpt's defaults and the presets."""
    lines = ["Quantized by default:"]
    lines += [f"  {mode}: {', '.join(ops)}" for mode, ops in DEFAULT_OPERATORS.items()]
    lines.append("Left in high precision by default (force them by --op_types_to_quantize, at your own risk):")
    lines += [f"  {kind}: {', '.join(ops)}" for kind, ops in FLOAT_BY_DEFAULT.items()]
    lines.append("Presets:")
    for name, preset in PRESETS.items():
        what = f"skip {', '.join(preset.skip_names)}" if preset.skip_names else f"quantize {', '.join(preset.op_types)}"
        lines.append(f"  {name}: {preset.text} ({what})")
    return lines


class HasNameAndOp(Protocol):
    """Node of a model or of a signature."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


def match_skip_names(nodes: Sequence[HasNameAndOp], patterns: Iterable[str], key: str = "skip_names") -> frozenset[str]:
    """Return the names of the nodes that match any pattern; log a warning for each pattern without a match.

    Args:
        patterns: Node names, wildcards over names, or modules (all nodes below them).
        key: Name of the list in messages.
    """
    names: set[str] = set()
    for pattern in patterns:
        matched = {node.name for node in nodes if _matches_name(pattern, node.name)}
        if not matched:
            logger.warning("%s: %r matches no node; %s", key, pattern, _suggest_node_names(pattern, nodes))
        names |= matched
    return frozenset(names)


def assign_layers(
    nodes: Sequence[HasNameAndOp], layers: Sequence[Any], default_operators: Iterable[str]
) -> tuple[Any, ...]:
    """Return for each node the first entry of `layers` that matches it, or None; log entries without effect.

    Args:
        layers: Entries in the order of the file, each with a `module_name`.
        default_operators: Operators that "*" matches.
    """
    defaults = frozenset(default_operators)
    matches = [[i for i, layer in enumerate(layers) if _matches(layer.module_name, node, defaults)] for node in nodes]
    hits, effective = Counter(i for indices in matches for i in indices), {indices[0] for indices in matches if indices}
    for i, layer in enumerate(layers):
        where, name = f"layers.{i}.module_name", layer.module_name
        if not hits[i]:
            operators = {node.op for node in nodes}
            hint = _suggest_node_names(name, nodes) if "/" in name else suggest_names(name, operators)
            logger.warning("%s: %r matches no node; %s", where, name, hint)
        elif i not in effective:
            logger.warning(
                "%s: all nodes of %r belong to entries above it; the first match counts, so move it up", where, name
            )
    return tuple(layers[indices[0]] if indices else None for indices in matches)


def _matches(pattern: str, node: HasNameAndOp, defaults: frozenset[str]) -> bool:
    if pattern == DEFAULT_LAYERS_WILDCARD:
        return node.op in defaults
    return fnmatchcase(node.op, pattern) or _matches_name(pattern, node.name)


def _matches_name(pattern: str, name: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/"))


def _suggest_node_names(pattern: str, nodes: Sequence[HasNameAndOp]) -> str:
    """Return a hint: similar names of nodes or modules, or else the top modules."""
    names, stem = [node.name for node in nodes if node.name], pattern.rstrip("*").rstrip("/")
    modules = {name[:i] for name in names for i, letter in enumerate(name) if letter == "/" and i}
    known = {*names, *modules}
    if not difflib.get_close_matches(stem, known, n=1, cutoff=0.5):
        tops = sorted(module for module in modules if "/" not in module[1:]) or names
        known = set(tops[:MAX_SUGGESTED_MODULES])
    return suggest_names(stem, known)
