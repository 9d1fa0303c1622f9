"""Transformers with random weights: encoders in the form that traced exports have, and ViT-Tiny.

The encoders (Vaswani et al. 2017, arXiv:1706.03762, layers in pre-norm order) have LayerNormalization and GELU
decomposed, scalars as Constant nodes, and the target shapes of Reshape computed from the input's shape, as
`torch.onnx.export` at opset 13 to 17 writes them for a dynamic batch: 87 nodes a layer, 49 of them once the
shapes are constants. ViT-Tiny has LayerNormalization as one node and static shapes, as timm's exports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.graph.builder import GraphBuilder


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Encoder layer under construction.

    Its weights are drawn here, not by the builder: behind a computed Reshape the builder knows no shapes.
    """

    g: GraphBuilder
    rng: np.random.Generator
    width: int
    heads: int

    def write(self, x: str) -> str:
        x = self.g.op("Add", x, self._attention(self.norm(x)))
        return self.g.op("Add", x, self._feed_forward(self.norm(x)))

    def norm(self, x: str) -> str:
        """Add LayerNormalization (Ba et al. 2016, arXiv:1607.06450, eq. 4) of the last axis, in nine operators."""
        g = self.g
        centred = g.op("Sub", x, g.op("ReduceMean", x, axes=[-1]))
        variance = g.op("ReduceMean", g.op("Pow", centred, self._scalar(2.0)), axes=[-1])
        deviation = g.op("Sqrt", g.op("Add", variance, self._scalar(1e-5)))
        scale, shift = self.rng.uniform(0.5, 1.5, self.width), self.rng.normal(0, 0.1, self.width)
        return g.op("Add", g.op("Mul", g.op("Div", centred, deviation), self._const(scale)), self._const(shift))

    def _attention(self, x: str) -> str:
        g, depth = self.g, self.width // self.heads
        batch, tokens = self._extent(x, 0), self._extent(x, 1)
        query = self._heads(self._linear(x, self.width, self.width), batch, [0, 2, 1, 3])
        key = self._heads(self._linear(x, self.width, self.width), batch, [0, 2, 3, 1])
        value = self._heads(self._linear(x, self.width, self.width), batch, [0, 2, 1, 3])
        scores = g.op("Div", g.op("MatMul", query, key), self._scalar(math.sqrt(depth)))
        mixed = g.op("Transpose", g.op("MatMul", g.op("Softmax", scores, axis=-1), value), perm=[0, 2, 1, 3])
        shape = g.op("Concat", self._axis(batch), self._axis(tokens), self._integers(self.width), axis=0)
        return self._linear(g.op("Reshape", mixed, shape), self.width, self.width)

    def _feed_forward(self, x: str) -> str:
        """Add two linear layers around a GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) by its error function."""
        g = self.g
        y = self._linear(x, self.width, 4 * self.width)
        gate = g.op("Add", g.op("Erf", g.op("Div", y, self._scalar(math.sqrt(2)))), self._scalar(1.0))
        return self._linear(g.op("Mul", g.op("Mul", y, gate), self._scalar(0.5)), 4 * self.width, self.width)

    def _heads(self, x: str, batch: str, order: list[int]) -> str:
        depth = self.width // self.heads
        extents = [self._integers(n) for n in (-1, self.heads, depth)]
        shape = self.g.op("Concat", self._axis(batch), *extents, axis=0)
        return self.g.op("Transpose", self.g.op("Reshape", x, shape), perm=order)

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        weight = self.rng.normal(0, 1 / math.sqrt(inputs), (inputs, outputs))
        bias = self.rng.normal(0, 0.02, outputs)
        return self.g.op("Add", self.g.op("MatMul", x, self._const(weight)), self._const(bias))

    def _extent(self, x: str, axis: int) -> str:
        return self.g.op("Gather", self.g.op("Shape", x), self.g.op("Constant", value_int=axis), axis=0)

    def _axis(self, extent: str) -> str:
        return self.g.op("Unsqueeze", extent, self._integers(0))

    def _integers(self, value: int) -> str:
        return self.g.op("Constant", value_ints=[value])

    def _scalar(self, value: float) -> str:
        return self.g.op("Constant", value_float=value)

    def _const(self, values: npt.NDArray[np.float64]) -> str:
        return self.g.const(values.astype(np.float32))


def encoder(layers: int, *, width: int = 256, heads: int = 4, tokens: int = 128) -> GraphBuilder:
    """Build a transformer encoder of any depth: `x` 1 x tokens x width in, `hidden` of the same shape out.

    Args:
        layers: Number of layers; a layer adds 87 nodes.
        width: Size of the token vectors; the feed-forward part is four times as wide.
        heads: Number of attention heads; divides the width.

    Raises:
        ValueError: The width is no multiple of the number of heads, or there is no layer.
    """
    if layers < 1 or width % heads:
        raise ValueError(f"layers >= 1 and width divisible by heads, but got {layers=}, {width=}, {heads=}")
    g = GraphBuilder(f"encoder{layers}", seed=6)
    layer = _Layer(g=g, rng=np.random.default_rng(6), width=width, heads=heads)
    x = g.input("x", (1, tokens, width))
    for _ in range(layers):
        x = layer.write(x)
    g.output(layer.norm(x), (1, tokens, width), name="hidden")
    return g


def encoder6() -> GraphBuilder:
    """Build a transformer encoder of 6 layers of width 256 with 4 heads: `x` 1x128x256 in, `hidden` 1x128x256 out."""
    return encoder(6)


def encoder48() -> GraphBuilder:
    """Build a transformer encoder of 48 layers of width 64: `x` 1x128x64 in, `hidden` 1x128x64 out.

    It is for measurements on a graph of many nodes; the small width keeps its file near 10 MB.
    """
    return encoder(48, width=64)


def vit_tiny(layers: int = 12) -> GraphBuilder:
    """Build ViT-Tiny (arXiv:2012.12877, table 1, with 12 layers): `images` 1x3x224x224 in, `logits` 1x1000 out."""
    g, width, tokens = GraphBuilder("vit_tiny", seed=12), 192, 14 * 14 + 1
    patches = g.conv(g.input("images", (1, 3, 224, 224)), width, 16, stride=16, pad=0)
    patches = g.op("Transpose", g.op("Reshape", patches, g.const([1, width, tokens - 1])), perm=[0, 2, 1])
    rng = np.random.default_rng(12)
    first = g.const(rng.normal(0, 1, (1, 1, width)).astype(np.float32), "class_token")
    position = g.const(rng.normal(0, 0.5, (1, tokens, width)).astype(np.float32), "position")
    x = g.op("Add", g.op("Concat", first, patches, axis=1), position)
    for _ in range(layers):
        x = g.op("Add", x, _self_attention(g, g.layer_norm(x, epsilon=1e-6), heads=3))
        y = g.linear(g.layer_norm(x, epsilon=1e-6), 4 * width)
        gate = g.op("Add", g.op("Erf", g.op("Div", y, g.const(math.sqrt(2)))), g.const(1.0))
        x = g.op("Add", x, g.linear(g.op("Mul", g.op("Mul", y, gate), g.const(0.5)), width))
    x = g.op("Gather", g.layer_norm(x, epsilon=1e-6), g.const(0), axis=1)
    g.output(g.gemm(x, 1000), name="logits")
    return g


def _self_attention(g: GraphBuilder, x: str, *, heads: int) -> str:
    """Add attention with one projection to queries, keys and values, separated by Split and Squeeze."""
    _, tokens, width = g.shape(x)
    depth = width // heads
    joined = g.op("Reshape", g.linear(x, 3 * width), g.const([1, tokens, 3, heads, depth]))
    parts = g.op("Split", g.op("Transpose", joined, perm=[2, 0, 3, 1, 4]), g.const([1, 1, 1]), outputs=3, axis=0)
    query, key, value = (g.op("Squeeze", part, g.const([0])) for part in parts)
    query = g.op("Mul", query, g.const(1 / math.sqrt(depth)))
    weights = g.op("Softmax", g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2])), axis=-1)
    mixed = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
    return g.linear(g.op("Reshape", mixed, g.const([1, tokens, width])), width)
