"""A synthetic data set for object detection: circles, squares and triangles, drawn by code.

Every image is drawn from its own seed (split, index), so the splits are disjoint, `count` only cuts a longer split
short, and nothing has to be stored or downloaded. Images are RGB, 128 by 128: a colour gradient with noise, distractors
that are not labelled (lines, crosses, long ellipses), and one to six shapes that hardly overlap. A tenth of the shapes
are outlines only.

Labels have the form of COCO (https://cocodataset.org/#format-data): boxes are x, y, width, height in pixels,
circumscribing the shape as drawn (before occlusion); category ids are 1 to 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from harness.base.errors import UserError, suggest_names

IMAGE_SIZE_PX = 128
"""Height and width of every image, in pixels."""
MAX_IMAGES = 20_000  # in memory, of 49,152 bytes each

CLASS_NAMES = ("circle", "square", "triangle")
"""Names by class index; the category id of COCO is the index plus one."""

_SPLITS: Mapping[str, tuple[int, int]] = {"train": (1, 6000), "calibration": (2, 64), "evaluation": (3, 200)}
_SUPERSAMPLING = 2
_MAX_OVERLAP = 0.15

Box = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapesSplit:
    """Images with their labels.

    Attributes:
        images: 8-bit RGB arrays, SIZE x SIZE x 3, in the order of `coco["images"]`.
        coco: Labels in the form of `pycocotools.coco.COCO.dataset`; image ids count from 1.
    """

    images: tuple[npt.NDArray[np.uint8], ...]
    coco: dict[str, Any]


class _Shape(NamedTuple):
    """Shape to draw: its class, its outline and its box in pixels, its area in square pixels."""

    category: int
    outline: list[tuple[float, float]]
    box: Box
    area: float


def draw_split(name: str, count: int | None = None) -> ShapesSplit:
    """Draw one split of the data set.

    Args:
        name: "train", "calibration" or "evaluation".
        count: Number of images, 1 to `MAX_IMAGES`; by default 6000, 64 and 200.
    """
    if name not in _SPLITS:
        raise UserError(f"shapes: no split {name!r}; {suggest_names(name, _SPLITS)}")
    seed, default = _SPLITS[name]
    if count is not None and not 1 <= count <= MAX_IMAGES:
        raise UserError(f"shapes: count must be at least 1 and at most {MAX_IMAGES:,}, but got {count}")
    images: list[npt.NDArray[np.uint8]] = []
    labels: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    size = {"width": IMAGE_SIZE_PX, "height": IMAGE_SIZE_PX}
    for index in range(default if count is None else count):
        image, shapes = _draw_scene(np.random.default_rng((seed, index)))
        images.append(image)
        labels.append({"id": index + 1, "file_name": f"{name}_{index:05d}.png", **size})
        for shape in shapes:
            left, top, right, bottom = shape.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": index + 1,
                    "category_id": shape.category + 1,
                    "bbox": [left, top, right - left, bottom - top],
                    "area": shape.area,
                    "iscrowd": 0,
                }
            )
    coco = {
        "info": {"description": f"made-up shapes, split {name}"},
        "categories": [{"id": index + 1, "name": label} for index, label in enumerate(CLASS_NAMES)],
        "images": labels,
        "annotations": annotations,
    }
    return ShapesSplit(images=tuple(images), coco=coco)


def _draw_scene(rng: np.random.Generator) -> tuple[npt.NDArray[np.uint8], list[_Shape]]:
    base = rng.uniform(20, 235, 3)
    # The background changes by up to 60 levels along a random direction.
    angle = rng.uniform(0, 2 * math.pi)
    steps = np.linspace(-0.5, 0.5, IMAGE_SIZE_PX)
    ramp = steps[:, None] * math.sin(angle) + steps * math.cos(angle)
    gradient = np.clip(base + ramp[..., None] * rng.uniform(-60, 60, 3), 0, 255).astype(np.uint8)
    large = IMAGE_SIZE_PX * _SUPERSAMPLING
    canvas = Image.fromarray(gradient).resize((large, large), Image.Resampling.BILINEAR)
    pen = ImageDraw.Draw(canvas)
    for _ in range(int(rng.integers(0, 5))):
        _draw_distractor(pen, _contrasting_colour(base, rng), rng)
    shapes = _place_shapes(rng)
    for shape in shapes:
        colour = _contrasting_colour(base, rng)
        outline = [(x * _SUPERSAMPLING, y * _SUPERSAMPLING) for x, y in shape.outline]
        if rng.random() < 0.1:
            pen.line([*outline, *outline[:2]], fill=colour, width=2 * _SUPERSAMPLING, joint="curve")
        else:
            pen.polygon(outline, fill=colour)
    drawn = np.asarray(canvas.reduce(_SUPERSAMPLING), np.float32)
    noise = rng.standard_normal(drawn.shape, np.float32) * np.float32(rng.uniform(0, 18))
    return np.clip(np.rint(drawn + noise), 0, 255).astype(np.uint8), shapes


def _contrasting_colour(base: npt.NDArray[np.float64], rng: np.random.Generator) -> tuple[int, int, int]:
    """Return a colour that differs from the background by at least 60 levels in its best channel."""
    while True:
        colour = rng.integers(0, 256, 3)
        if np.abs(colour - base).max() >= 60:
            return int(colour[0]), int(colour[1]), int(colour[2])


def _draw_distractor(pen: ImageDraw.ImageDraw, colour: tuple[int, int, int], rng: np.random.Generator) -> None:
    centre, size = rng.uniform(0, IMAGE_SIZE_PX, 2), rng.uniform(6, 24)
    angle = rng.uniform(0, math.pi)
    arm = np.array([math.cos(angle), math.sin(angle)]) * size
    bars = [(centre - arm, centre + arm)]
    kind = rng.integers(3)
    if kind == 0:  # a long ellipse: no circle
        outline = [
            (centre + arm * math.cos(t) + arm[::-1] * (0.3, -0.3) * math.sin(t)) * _SUPERSAMPLING
            for t in np.linspace(0, 2 * math.pi, 32, endpoint=False)
        ]
        pen.polygon([(float(x), float(y)) for x, y in outline], fill=colour)
        return
    if kind == 1:  # a cross: no square
        bars.append((centre - arm[::-1] * (1, -1), centre + arm[::-1] * (1, -1)))
    for start, end in bars:
        ends = np.concatenate([start, end]) * _SUPERSAMPLING
        pen.line([float(value) for value in ends], fill=colour, width=int(rng.integers(2, 5)) * _SUPERSAMPLING)


def _place_shapes(rng: np.random.Generator) -> list[_Shape]:
    """Return one to six shapes whose boxes overlap by at most _MAX_OVERLAP of the smaller one."""
    shapes: list[_Shape] = []
    for _ in range(int(rng.integers(1, 7))):
        for _attempt in range(10):
            index = int(rng.integers(len(CLASS_NAMES)))
            radius = math.exp(rng.uniform(math.log(8), math.log(28)))  # of the circumscribed circle: many are small
            x, y = rng.uniform(radius, IMAGE_SIZE_PX - radius, 2)
            corners = (48, 4, 3)[index]
            turn = rng.uniform(0, 2 * math.pi)
            angles = [turn + 2 * math.pi * k / corners for k in range(corners)]
            outline = [(x + radius * math.cos(a), y + radius * math.sin(a)) for a in angles]
            xs, ys = zip(*outline, strict=True)
            box = min(xs), min(ys), max(xs), max(ys)
            area = 0.5 * corners * radius**2 * math.sin(2 * math.pi / corners)
            if all(_overlap(box, other.box) <= _MAX_OVERLAP for other in shapes):
                shapes.append(_Shape(index, outline, box, area))
                break
    return shapes


def _overlap(a: Box, b: Box) -> float:
    """Return the share of the smaller of two boxes (left, top, right, bottom) that the other one covers."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    smaller = min((box[2] - box[0]) * (box[3] - box[1]) for box in (a, b))
    return max(width, 0.0) * max(height, 0.0) / smaller
