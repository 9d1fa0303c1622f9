"""First experiment file for a model, with what its inputs and outputs tell; comments say what to fill in."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Iterator
from pathlib import Path

from harness.accuracy.data.decode import suggest_decoder
from harness.base.errors import UserError
from harness.graph.load import ModelSignature, read_signature
from harness.graph.passes.dimension_sizes import format_shape
from harness.plugins.registry import load_plugin

DEFAULT_SEQUENCE_LENGTH = 128
DEFAULT_IMAGE_SIZE = 224
CHANNELS = 3


def first_experiment(model: Path, output: Path, images: Path | None, labels: Path | None, backend: str) -> str:
    """Return the text of an experiment that `qdq run --check` accepts.

    Preprocessing, layout and decoder are found by the shapes of inputs and outputs. Lines to fill in are comments, and
    without images the calibration is on random inputs.

    Args:
        model: ONNX file.
        output: File that the text will be written to, from whose folder its paths start.
        images: Folder of images.
        labels: Labels of these images.
        backend: Name of the benchmarker.

    Raises:
        UserError: The model cannot be read or is already quantized, or there is no such backend.
    """
    signature = read_signature(model)
    if signature.precisions:
        raise UserError(f"{model}: is already quantized; start from the float model")

    def quote(path: Path | None, missing: str = "") -> str:
        return json.dumps(missing if path is None else os.path.relpath(path, output.parent), ensure_ascii=False)

    preprocess, evaluator, decode = _find_task(signature) or ("NAME", "NAME", "")
    data = f"use: images, images: {quote(images, 'FOLDER')}"
    scored = f"{{data: {{{data}, labels: {quote(labels, 'FILE')}}}{decode}}}"
    unknown = "# " if images is None or preprocess == "NAME" else ""
    threads = "threads: 2" if "threads" in inspect.signature(load_plugin("benchmarker", backend)).parameters else ""
    unlabelled = unknown or ("# " if labels is None else "")
    random = "    calibration: {samples: 48}  # on random inputs: give data, whose ranges decide the scales"
    lines = [
        f"# First experiment for {model.name}; docs/reference/experiment.md has all keys.",
        f"experiment: {quote(None, output.stem)}",
        "models:",
        f"  - use: {quote(model)}",
        *_size_lines(signature),
        *([random] if unknown else []),
        f"    {unknown}preprocess: {preprocess}  # found by shapes; others: qdq list preprocessings",
        f"    {unknown}calibration: {{data: {{{data}}}, samples: 300}}",
        f"    {unlabelled}evaluator: {{use: {evaluator}, params: {scored}}}  # others: qdq list evaluators",
        f"backends: [{{use: {backend}, params: {{{threads}}}}}]  # the runtime and threads that you deploy with",
        f"{unlabelled}objective: {{minimize: latency, max_drop: 0.01, halves: true}}  # 0.01: a point of the metric",
        "searchers: [auto]",
        "budget: {evaluations: [25, 50]}",
    ]
    return "\n".join([*lines, ""])


def _find_task(signature: ModelSignature) -> tuple[str, str, str] | None:
    """Return preprocessing, evaluator and the evaluator's decoder as text, or None for a model without images."""
    shapes = [dims for _, dims in signature.inputs.values()]
    if len(shapes) != 1 or len(shapes[0]) != 4 or CHANNELS not in (shapes[0][1], shapes[0][3]):
        return None
    first = 2 if shapes[0][1] == CHANNELS else 1
    height, width = (size or DEFAULT_IMAGE_SIZE for size in shapes[0][first : first + 2])
    if decoder := suggest_decoder(signature.outputs, (height, width)):
        return decoder, "coco_map", f", decode: {decoder}"
    outputs = list(signature.outputs.values())
    return ("torch_imagenet", "top1", "") if len(outputs) == 1 and len(outputs[0]) == 2 else None


def _size_lines(signature: ModelSignature) -> Iterator[str]:
    """Yield the sizes of dynamic axes: by symbol, or the whole shape of an input with an axis that has no symbol."""
    sizes: dict[str, int] = {}
    shapes: dict[str, str] = {}
    for name, axes in signature.axes.items():
        rank = len(axes or ())
        usual = [1, *[DEFAULT_IMAGE_SIZE if rank == 4 else DEFAULT_SEQUENCE_LENGTH] * rank]
        known = [axis if isinstance(axis, int) else size for axis, size in zip(axes or (), usual, strict=False)]
        sizes |= {axis: size for axis, size in zip(axes or (), known, strict=True) if isinstance(axis, str)}
        if None in (axes or ()):
            shapes[name] = format_shape(tuple(known))
    if sizes:
        yield f"    dims: {json.dumps(sizes, ensure_ascii=False)}  # of dynamic axes: those that you deploy with"
    if shapes:
        yield f"    shapes: {json.dumps(shapes, ensure_ascii=False)}  # of dynamic inputs: those that you deploy with"
