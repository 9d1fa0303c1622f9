"""Which decoder and preprocessing a detector wants, by the shapes of its outputs."""

from __future__ import annotations

from collections.abc import Mapping

from harness.graph.declared import Dims

__all__ = ["decoder_of"]

STRIDES = (8, 16, 32)


def decoder_of(outputs: Mapping[str, Dims], size: tuple[int, int]) -> str | None:
    """Name of the decoder, which is also that of the preprocessing; None where the shapes fit none or several.

    Args:
        outputs: Shape of each output, the batch first.
        size: Height and width of the model's input.
    """
    shapes = [tuple(size or 0 for size in dims) for dims in outputs.values()]
    if {"labels", "boxes", "scores"} <= outputs.keys():
        return "rtdetr"
    if len(shapes) == 2 and all(len(shape) == 3 for shape in shapes):
        (_, queries, width), (_, others, second) = sorted(shapes, key=lambda shape: shape[2] != 4)
        return "rtdetr" if queries == others and width == 4 and second != 4 else None
    if len(shapes) != 1 or len(shapes[0]) != 3:
        return None
    _, rows, columns = shapes[0]
    cells = sum((size[0] // stride) * (size[1] // stride) for stride in STRIDES)
    if rows == cells and columns > 5:
        return "yolox"
    return "ultralytics" if columns == 6 or 4 < rows < columns else None
