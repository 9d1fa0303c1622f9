"""Catalog of the zoo: models by name, and their export to a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from harness.base.errors import UserError, suggest_names
from harness.graph.builder import GraphBuilder
from harness.graph.load import write_without_output_transpose
from harness.zoo import cnn, detector, transformer

_BUILDERS: Mapping[str, tuple[Callable[[], GraphBuilder], str]] = {
    "resnet18": (cnn.resnet18, "ResNet-18, BatchNormalization unfolded; images 1x3x224x224"),
    "resnet50": (cnn.resnet50, "ResNet-50, BatchNormalization unfolded; images 1x3x224x224"),
    "mobilenetv2": (cnn.mobilenetv2, "MobileNetV2, inverted residuals with ReLU6; images 1x3x224x224"),
    "vit_tiny": (transformer.vit_tiny, "ViT-Tiny, 12 layers, 192 wide, 3 heads; images 1x3x224x224"),
    "encoder6": (transformer.encoder6, "transformer encoder, 6 layers, 256 wide, decomposed; x 1x128x256"),
    "encoder48": (transformer.encoder48, "transformer encoder, 48 layers, 64 wide, decomposed; x 1x128x64"),
    "yolo_tiny": (detector.yolo_tiny, "detector, CSP blocks, SiLU, decoupled heads; images 1x3x320x320"),
    "yolo_tiny_export": (
        detector.yolo_tiny_export,
        "the same with one output as Ultralytics exports, 1x84x2100; images 1x3x320x320",
    ),
}
_TRAINED_NAME = "shapes_detector"
_TRAINED_EXPORT_NAME = "shapes_yolo"


def model_names() -> Mapping[str, str]:
    """Return a one-line description of each model by name, with its input at the end."""
    made = {name: line for name, (_, line) in _BUILDERS.items()}
    trained = "trained detector of made-up shapes (harness.zoo.shapes)"
    return {
        **made,
        _TRAINED_NAME: f"{trained}; images 1x3x128x128",
        _TRAINED_EXPORT_NAME: f"{trained}, one output as Ultralytics exports, 1x7x320; images 1x3x128x128",
    }


def write_model(name: str, path: Path) -> Path:
    """Write a model of the zoo to an ONNX file; the same name gives the same bytes.

    Args:
        name: A key of `model_names()`.
        path: The file to write, also the return value; missing folders are created.

    Raises:
        UserError: The zoo has no such model, or the file cannot be written.
    """
    if name not in model_names():
        raise UserError(f"zoo:{name}: no such model; {suggest_names(name, model_names())}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == _TRAINED_NAME:
            path.write_bytes(detector.TRAINED_MODEL_PATH.read_bytes())
            return path
        if name == _TRAINED_EXPORT_NAME:
            return write_without_output_transpose(detector.TRAINED_MODEL_PATH, path)
        return _BUILDERS[name][0]().save(path)
    except OSError as error:
        raise UserError(f"zoo:{name}: cannot write {path}: {error.strerror or error}") from error
