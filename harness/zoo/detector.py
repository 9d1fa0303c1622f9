"""Detectors: `yolo_tiny` with random weights, and `shapes_detector`, trained on `harness.zoo.shapes`.

Layout of `shapes_detector` (trained and exported by `experiments/scripts/train_shapes.py`):

- input `images`: 1 x 3 x 128 x 128, float, RGB, pixel values divided by 255 (preprocessing `shapes`);
- output `detections`: 1 x 320 x 7, one row per cell: first the 16 x 16 cells of stride 8, then the 8 x 8 cells of
  stride 16, each row by row. Columns: centre x, centre y, width, height in pixels of the input, then the scores
  (0 to 1, after the sigmoid) of circle, square and triangle.

Boxes are decoded in the graph, overlapping boxes are not suppressed: class-wise non-maximum suppression at 0.65 of the
rows that score above 0.001 gives mAP 0.846 (AP50 0.988) on the evaluation split. Pixels and scores share one tensor, so
a single scale for it, as in plain INT8, costs both: mAP 0.484 (symmetric INT8, ONNX Runtime's `quantize_static`, every
operator) against 0.805 with convolutions alone.

Layout of `yolo_tiny`: `images` 1 x 3 x 320 x 320; `boxes` 1 x 2100 x 4 (undecoded), `scores` 1 x 2100 x 80.

Layout of `yolo_tiny_export`, the same network, and of `shapes_yolo`, the trained detector (1 x 7 x 320): one output as
Ultralytics exports YOLOv8 and YOLO11, `output0` 1 x (4 + classes) x cells, decoded: centre x, centre y, width, height
in pixels of the input, then the classes' scores.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from harness.graph.builder import GraphBuilder

TRAINED_MODEL_PATH = Path(__file__).with_name("shapes_detector.onnx")
"""The trained detector as committed."""
IMAGE_SIDE = 320
STRIDES = (8, 16, 32)


def yolo_tiny() -> GraphBuilder:
    """Build a detector like YOLOX-tiny (Ge et al. 2021, arXiv:2107.08430), 320 x 320, strides 8, 16 and 32."""
    g = GraphBuilder("yolo_tiny", seed=80)
    for name, parts in zip(("boxes", "scores"), zip(*_heads(g), strict=True), strict=True):
        g.output(g.op("Transpose", g.op("Concat", *parts, axis=2), perm=[0, 2, 1]), name=name)
    return g


def yolo_tiny_export() -> GraphBuilder:
    """Build `yolo_tiny` with its boxes decoded in the graph and one output, 1 x 84 x 2100."""
    g = GraphBuilder("yolo_tiny_export", seed=80)
    boxes, scores = (g.op("Concat", *parts, axis=2) for parts in zip(*_heads(g), strict=True))
    sides = [IMAGE_SIDE // stride for stride in STRIDES]
    cells = np.concatenate([np.mgrid[:side, :side][::-1].reshape(2, -1) for side in sides], axis=1)
    strides = np.concatenate([np.full(side**2, stride) for side, stride in zip(sides, STRIDES, strict=True)])
    step = g.const(strides[None, None].astype(np.float32), "strides")
    middle, size = g.op("Split", boxes, g.const([2, 2]), axis=1, outputs=2)
    middle = g.op("Mul", g.op("Add", middle, g.const(cells[None].astype(np.float32) + 0.5, "cells")), step)
    g.output(g.op("Concat", middle, g.op("Mul", g.op("Exp", size), step), scores, axis=1), name="output0")
    return g


def _heads(g: GraphBuilder) -> list[tuple[str, str]]:
    """Build the network; return boxes and scores of each stride."""
    x = _conv(g, g.input("images", (1, 3, IMAGE_SIDE, IMAGE_SIDE)), 24, 3, stride=2)
    levels = []
    for channels, depth in ((48, 1), (96, 2), (192, 2), (384, 1)):
        x = _csp(g, _conv(g, x, channels, 3, stride=2), channels, depth, residual=True)
        levels.append(x)
    _, fine, middle, coarse = levels
    coarse = _pyramid_pool(g, coarse)
    middle, lateral_coarse = _merge_up(g, coarse, middle, 192)
    fine, lateral_middle = _merge_up(g, middle, fine, 96)
    middle = _merge_down(g, fine, lateral_middle, 192)
    coarse = _merge_down(g, middle, lateral_coarse, 384)
    return [_head(g, level) for level in (fine, middle, coarse)]


def _conv(g: GraphBuilder, x: str, channels: int, kernel: int = 1, *, stride: int = 1) -> str:
    """Add a convolution, BatchNormalization, SiLU as x * sigmoid(x) (Elfwing et al. 2017, arXiv:1702.03118)."""
    x = g.batch_norm(g.conv(x, channels, kernel, stride=stride, bias=False))
    return g.op("Mul", x, g.op("Sigmoid", x))


def _csp(g: GraphBuilder, x: str, channels: int, depth: int, *, residual: bool) -> str:
    """Add a cross stage partial block (Wang et al. 2020, arXiv:1911.11929)."""
    main, side = _conv(g, x, channels // 2), _conv(g, x, channels // 2)
    for _ in range(depth):
        branch = _conv(g, _conv(g, main, channels // 2), channels // 2, 3)
        main = g.op("Add", main, branch) if residual else branch
    return _conv(g, g.op("Concat", main, side, axis=1), channels)


def _pyramid_pool(g: GraphBuilder, x: str) -> str:
    """Add three max poolings in a row, all concatenated (the SPPF block of YOLOv5)."""
    channels = g.shape(x)[1]
    pools = [_conv(g, x, channels // 2)]
    for _ in range(3):
        pools.append(g.op("MaxPool", pools[-1], kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2]))
    return _conv(g, g.op("Concat", *pools, axis=1), channels)


def _merge_up(g: GraphBuilder, coarse: str, fine: str, channels: int) -> tuple[str, str]:
    """Return the finer level concatenated with the upsampled coarser level, and the lateral tensor of the latter."""
    lateral = _conv(g, coarse, channels)
    scales = g.const([1.0, 1.0, 2.0, 2.0])
    up = g.op(
        "Resize", lateral, "", scales, mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
    )
    return _csp(g, g.op("Concat", up, fine, axis=1), channels, 1, residual=False), lateral


def _merge_down(g: GraphBuilder, fine: str, lateral: str, channels: int) -> str:
    down = _conv(g, fine, g.shape(fine)[1], 3, stride=2)
    return _csp(g, g.op("Concat", down, lateral, axis=1), channels, 1, residual=False)


def _head(g: GraphBuilder, x: str) -> tuple[str, str]:
    """Add a decoupled head: boxes (1 x 4 x cells) and scores (1 x 80 x cells) of one level."""
    x = _conv(g, x, 96)
    scores = g.op("Sigmoid", g.conv(_conv(g, _conv(g, x, 96, 3), 96, 3), 80, 1))
    boxes = g.conv(_conv(g, _conv(g, x, 96, 3), 96, 3), 4, 1)
    cells = g.shape(x)[2] * g.shape(x)[3]
    return g.op("Reshape", boxes, g.const([1, 4, cells])), g.op("Reshape", scores, g.const([1, 80, cells]))
