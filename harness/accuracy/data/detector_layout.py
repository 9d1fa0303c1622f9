"""Detection of a detector's decoder and preprocessing from the shapes of its outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

STRIDES = (8, 16, 32)


def suggest_decoder(outputs: Mapping[str, Sequence[int | None]], size: tuple[int, int]) -> str | None:
    """Return the name of the decoder (and of its preprocessing), or None if the shapes fit none or several.

    Args:
        outputs: Shape of each output, the batch first.
        size: Height and width of the model's input.
    """
    shapes = [tuple(each or 0 for each in dims) for dims in outputs.values()]
    if {"labels", "boxes", "scores"} <= outputs.keys():
        return "rtdetr"
    if len(shapes) == 2 and all(len(shape) == 3 for shape in shapes):
        (_, queries, width), (_, others, second) = sorted(shapes, key=lambda shape: shape[2] != 4)
        return "rtdetr" if queries == others and width == 4 and second != 4 else None
    cells = count_cells(size)
    if len(shapes) == 2 * len(STRIDES) and all(len(shape) == 3 for shape in shapes):
        return "nanodet" if sum(shape[1] for shape in shapes) == 2 * cells else None
    if len(shapes) != 1 or len(shapes[0]) != 3:
        return None
    _, rows, columns = shapes[0]
    if rows == cells and columns > 5:
        return "yolox"
    return "ultralytics" if columns == 6 or (rows > 4 and (columns == cells or rows < columns)) else None


def count_cells(size: tuple[int, int]) -> int:
    """Return how many cells detectors of strides 8, 16 and 32 have for an input of this height and width."""
    return sum(-(-size[0] // stride) * -(-size[1] // stride) for stride in STRIDES)
