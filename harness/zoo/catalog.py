"""Models of the zoo by name: convolutional networks with random weights, transformers, and a trained detector.

ResNet (He et al. 2016) and MobileNetV2 (Sandler et al. 2018) are graphs as torchvision exports them: `images`
1x3x224x224 in, `logits` 1x1000 out. The ResNets keep their BatchNormalization nodes, like a file exported after
training; in MobileNetV2 they are folded.

Layout of `shapes_detector` (trained on `harness.zoo.shapes` and exported by `experiments/scripts/train_shapes.py`):

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

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

from harness.base.errors import UserError, suggest_names
from harness.graph.builder import GraphBuilder
from harness.graph.load import write_without_output_transpose
from harness.zoo.transformer import encoder, vit_tiny

IMAGE_SHAPE = (1, 3, 224, 224)
CLASS_COUNT = 1000
BRANCH_GAIN = 0.4
"""Scale of a residual branch's last BatchNormalization: below 1, as in trained networks, so depth adds little."""
TRAINED_MODEL_PATH = Path(__file__).with_name("shapes_detector.onnx")
"""The trained detector as committed."""
IMAGE_SIDE = 320
STRIDES = (8, 16, 32)


def model_names() -> Mapping[str, str]:
    """Return a one-line description of each model by name, with its input at the end."""
    trained = "trained detector of made-up shapes (harness.zoo.shapes)"
    return {
        **{name: line for name, (_, line) in _BUILDERS.items()},
        "shapes_detector": f"{trained}; images 1x3x128x128",
        "shapes_yolo": f"{trained}, one output as Ultralytics exports, 1x7x320; images 1x3x128x128",
    }


def write_model(name: str, path: Path) -> Path:
    """Write a model of the zoo to an ONNX file; the same name gives the same bytes.

    Args:
        name: A key of `model_names()`.
        path: The file to write, also the return value; missing folders are created.
    """
    if name not in model_names():
        raise UserError(f"zoo:{name}: no such model; {suggest_names(name, model_names())}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "shapes_detector":
            path.write_bytes(TRAINED_MODEL_PATH.read_bytes())
            return path
        if name == "shapes_yolo":
            return write_without_output_transpose(TRAINED_MODEL_PATH, path)
        return _BUILDERS[name][0]().save(path)
    except OSError as error:
        raise UserError(f"zoo:{name}: cannot write {path}: {error.strerror or error}") from error


def resnet(name: str, depths: tuple[int, ...], *, bottleneck: bool = False) -> GraphBuilder:
    """Build a ResNet (arXiv:1512.03385, table 1); a bottleneck block has its stride in the 3x3 convolution.

    Args:
        name: Name of the graph.
        depths: Number of residual blocks of each stage.
        bottleneck: Whether the blocks are bottlenecks, as from ResNet-50 on.
    """
    g = GraphBuilder(name, seed=sum(depths))
    x = _conv_bn(g, g.input("images", IMAGE_SHAPE), 64, 7, stride=2)
    x = g.op("MaxPool", g.op("Relu", x), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, index in ((stage, index) for stage, depth in enumerate(depths) for index in range(depth)):
        width, stride = 64 << stage, 2 if stage and index == 0 else 1
        channels = 4 * width if bottleneck else width
        if bottleneck:
            branch = g.op("Relu", _conv_bn(g, x, width, 1))
            branch = g.op("Relu", _conv_bn(g, branch, width, 3, stride=stride))
        else:
            branch = g.op("Relu", _conv_bn(g, x, width, 3, stride=stride))
        branch = _conv_bn(g, branch, channels, 1 if bottleneck else 3, gain=BRANCH_GAIN)
        shortcut = x if g.shape(x)[1] == channels and stride == 1 else _conv_bn(g, x, channels, 1, stride=stride)
        x = g.op("Relu", g.op("Add", branch, shortcut))
    return _classifier(g, x)


def mobilenetv2() -> GraphBuilder:
    """Build MobileNetV2 at width 1.0 (arXiv:1801.04381, table 2)."""
    g = GraphBuilder("mobilenetv2", seed=3)
    x = _relu6(g, g.conv(g.input("images", IMAGE_SHAPE), 32, 3, stride=2))
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, first_stride in stages:
        for index in range(repeats):
            inputs, stride = g.shape(x)[1], first_stride if index == 0 else 1
            y = x if expansion == 1 else _relu6(g, g.conv(x, inputs * expansion, 1))
            y = _relu6(g, g.conv(y, g.shape(y)[1], 3, stride=stride, groups=-1))
            y = g.conv(y, channels, 1)
            x = g.op("Add", x, y) if stride == 1 and inputs == channels else y
    return _classifier(g, _relu6(g, g.conv(x, 1280, 1)))


def _conv_bn(g: GraphBuilder, x: str, channels: int, kernel: int, *, stride: int = 1, gain: float = 1.0) -> str:
    return g.batch_norm(g.conv(x, channels, kernel, stride=stride, bias=False), gain=gain)


def _relu6(g: GraphBuilder, x: str) -> str:
    return g.op("Clip", x, g.const(0.0), g.const(6.0))


def _classifier(g: GraphBuilder, x: str) -> GraphBuilder:
    pooled = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    g.output(g.gemm(pooled, CLASS_COUNT), name="logits")
    return g


def yolo_tiny() -> GraphBuilder:
    """Build a detector like YOLOX-tiny (Ge et al. 2021, arXiv:2107.08430), 320 x 320, strides 8, 16 and 32."""
    g = GraphBuilder("yolo_tiny", seed=80)
    for name, parts in zip(("boxes", "scores"), _detector_outputs(g), strict=True):
        g.output(g.op("Transpose", g.op("Concat", *parts, axis=2), perm=[0, 2, 1]), name=name)
    return g


def yolo_tiny_export() -> GraphBuilder:
    """Build `yolo_tiny` with its boxes decoded in the graph and one output, 1 x 84 x 2100."""
    g = GraphBuilder("yolo_tiny_export", seed=80)
    boxes, scores = (g.op("Concat", *parts, axis=2) for parts in _detector_outputs(g))
    sides = [IMAGE_SIDE // stride for stride in STRIDES]
    cells = np.concatenate([np.mgrid[:side, :side][::-1].reshape(2, -1) for side in sides], axis=1)
    strides = np.repeat(STRIDES, np.square(sides))
    step = g.const(strides[None, None].astype(np.float32), "strides")
    middle, size = g.op("Split", boxes, g.const([2, 2]), axis=1, outputs=2)
    middle = g.op("Mul", g.op("Add", middle, g.const(cells[None].astype(np.float32) + 0.5, "cells")), step)
    g.output(g.op("Concat", middle, g.op("Mul", g.op("Exp", size), step), scores, axis=1), name="output0")
    return g


def _detector_outputs(g: GraphBuilder) -> list[tuple[str, ...]]:
    """Build the network; return the boxes of all strides (1 x 4 x cells), and the scores (1 x 80 x cells)."""
    x = _conv(g, g.input("images", (1, 3, IMAGE_SIDE, IMAGE_SIDE)), 24, 3, stride=2)
    levels = []
    for channels, depth in ((48, 1), (96, 2), (192, 2), (384, 1)):
        x = _csp(g, _conv(g, x, channels, 3, stride=2), channels, depth, residual=True)
        levels.append(x)
    _, fine, middle, coarse = levels
    # Three max poolings in a row, all concatenated: the SPPF block of YOLOv5.
    pools = [_conv(g, coarse, g.shape(coarse)[1] // 2)]
    for _ in range(3):
        pools.append(g.op("MaxPool", pools[-1], kernel_shape=[5, 5], strides=[1, 1], pads=[2, 2, 2, 2]))
    coarse = _conv(g, g.op("Concat", *pools, axis=1), g.shape(coarse)[1])
    middle, lateral_coarse = _merge_up(g, coarse, middle, 192)
    fine, lateral_middle = _merge_up(g, middle, fine, 96)
    middle = _merge_down(g, fine, lateral_middle, 192)
    coarse = _merge_down(g, middle, lateral_coarse, 384)
    heads = []
    for level in (fine, middle, coarse):
        x = _conv(g, level, 96)
        scores = g.op("Sigmoid", g.conv(_conv(g, _conv(g, x, 96, 3), 96, 3), 80, 1))
        boxes = g.conv(_conv(g, _conv(g, x, 96, 3), 96, 3), 4, 1)
        cells = g.shape(x)[2] * g.shape(x)[3]
        heads.append(tuple(g.op("Reshape", y, g.const([1, n, cells])) for y, n in ((boxes, 4), (scores, 80))))
    return list(zip(*heads, strict=True))


def _conv(g: GraphBuilder, x: str, channels: int, kernel: int = 1, *, stride: int = 1) -> str:
    """Add a convolution, BatchNormalization, SiLU as x * sigmoid(x) (Elfwing et al. 2017, arXiv:1702.03118)."""
    x = _conv_bn(g, x, channels, kernel, stride=stride)
    return g.op("Mul", x, g.op("Sigmoid", x))


def _csp(g: GraphBuilder, x: str, channels: int, depth: int, *, residual: bool) -> str:
    """Add a cross stage partial block (Wang et al. 2020, arXiv:1911.11929)."""
    main, side = _conv(g, x, channels // 2), _conv(g, x, channels // 2)
    for _ in range(depth):
        branch = _conv(g, _conv(g, main, channels // 2), channels // 2, 3)
        main = g.op("Add", main, branch) if residual else branch
    return _conv(g, g.op("Concat", main, side, axis=1), channels)


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


_BUILDERS: Mapping[str, tuple[Callable[[], GraphBuilder], str]] = {
    "resnet18": (
        partial(resnet, "resnet18", (2, 2, 2, 2)),
        "ResNet-18, BatchNormalization unfolded; images 1x3x224x224",
    ),
    "resnet50": (
        partial(resnet, "resnet50", (3, 4, 6, 3), bottleneck=True),
        "ResNet-50, BatchNormalization unfolded; images 1x3x224x224",
    ),
    "mobilenetv2": (mobilenetv2, "MobileNetV2, inverted residuals with ReLU6; images 1x3x224x224"),
    "vit_tiny": (vit_tiny, "ViT-Tiny, 12 layers, 192 wide, 3 heads; images 1x3x224x224"),
    "encoder6": (partial(encoder, 6), "transformer encoder, 6 layers, 256 wide, decomposed; x 1x128x256"),
    "encoder48": (partial(encoder, 48, width=64), "transformer encoder, 48 layers, 64 wide, decomposed; x 1x128x64"),
    "yolo_tiny": (yolo_tiny, "detector, CSP blocks, SiLU, decoupled heads; images 1x3x320x320"),
    "yolo_tiny_export": (
        yolo_tiny_export,
        "the same with one output as Ultralytics exports, 1x84x2100; images 1x3x320x320",
    ),
}
