"""Convolutional classifiers with random weights: ResNet (He et al. 2016) and MobileNetV2 (Sandler et al. 2018).

The graphs are those of torchvision's exports: `images` 1x3x224x224 in, `logits` 1x1000 out. The ResNets keep their
BatchNormalization nodes, like a file exported after training; in MobileNetV2 they are folded.
"""

from __future__ import annotations

from harness.graph.builder import GraphBuilder

IMAGE_SHAPE = (1, 3, 224, 224)
CLASS_COUNT = 1000
BRANCH_GAIN = 0.4
"""Scale of a residual branch's last BatchNormalization: below 1, as in trained networks, so depth adds little."""


def resnet18() -> GraphBuilder:
    """Build ResNet-18 (arXiv:1512.03385, table 1): `images` 1x3x224x224 in, `logits` 1x1000 out."""
    return _resnet("resnet18", (2, 2, 2, 2), bottleneck=False)


def resnet50() -> GraphBuilder:
    """Build ResNet-50 (see `resnet18`): bottleneck blocks with the stride in the 3x3 convolution."""
    return _resnet("resnet50", (3, 4, 6, 3), bottleneck=True)


def mobilenetv2() -> GraphBuilder:
    """Build MobileNetV2 at width 1.0 (arXiv:1801.04381, table 2), with input and output as in `resnet18`."""
    g = GraphBuilder("mobilenetv2", seed=3)
    x = _relu6(g, g.conv(g.input("images", IMAGE_SHAPE), 32, 3, stride=2))
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expansion, channels, repeats, stride in stages:
        for index in range(repeats):
            x = _inverted_residual(g, x, channels, expansion, stride if index == 0 else 1)
    return _classifier(g, _relu6(g, g.conv(x, 1280, 1)))


def _resnet(name: str, depths: tuple[int, ...], *, bottleneck: bool) -> GraphBuilder:
    g = GraphBuilder(name, seed=sum(depths))
    x = _conv_bn(g, g.input("images", IMAGE_SHAPE), 64, 7, stride=2)
    x = g.op("MaxPool", g.op("Relu", x), kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    for stage, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if stage and index == 0 else 1
            x = _residual(g, x, 64 << stage, stride, bottleneck=bottleneck)
    return _classifier(g, x)


def _residual(g: GraphBuilder, x: str, width: int, stride: int, *, bottleneck: bool) -> str:
    channels = 4 * width if bottleneck else width
    if bottleneck:
        branch = g.op("Relu", _conv_bn(g, x, width, 1))
        branch = g.op("Relu", _conv_bn(g, branch, width, 3, stride=stride))
        branch = _conv_bn(g, branch, channels, 1, gain=BRANCH_GAIN)
    else:
        branch = g.op("Relu", _conv_bn(g, x, width, 3, stride=stride))
        branch = _conv_bn(g, branch, channels, 3, gain=BRANCH_GAIN)
    shortcut = x if g.shape(x)[1] == channels and stride == 1 else _conv_bn(g, x, channels, 1, stride=stride)
    return g.op("Relu", g.op("Add", branch, shortcut))


def _inverted_residual(g: GraphBuilder, x: str, channels: int, expansion: int, stride: int) -> str:
    inputs = g.shape(x)[1]
    y = x if expansion == 1 else _relu6(g, g.conv(x, inputs * expansion, 1))
    y = _relu6(g, g.conv(y, g.shape(y)[1], 3, stride=stride, groups=-1))
    y = g.conv(y, channels, 1)
    return g.op("Add", x, y) if stride == 1 and inputs == channels else y


def _conv_bn(g: GraphBuilder, x: str, channels: int, kernel: int, *, stride: int = 1, gain: float = 1.0) -> str:
    return g.batch_norm(g.conv(x, channels, kernel, stride=stride, bias=False), gain=gain)


def _relu6(g: GraphBuilder, x: str) -> str:
    return g.op("Clip", x, g.const(0.0), g.const(6.0))


def _classifier(g: GraphBuilder, x: str) -> GraphBuilder:
    pooled = g.op("Flatten", g.op("GlobalAveragePool", x), axis=1)
    g.output(g.gemm(pooled, CLASS_COUNT), name="logits")
    return g
