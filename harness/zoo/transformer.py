"""Transformers with random weights: encoders in the form that traced exports have, and ViT-Tiny.

The encoders (Vaswani et al. 2017, arXiv:1706.03762, layers in pre-norm order) have LayerNormalization and GELU
decomposed, scalars as Constant nodes, and the target shapes of Reshape computed from the input's shape, as
`torch.onnx.export` at opset 13 to 17 writes them for a dynamic batch: 87 nodes a layer, 49 of them once the
shapes are constants. ViT-Tiny has LayerNormalization as one node and static shapes, as timm's exports.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from harness.graph.builder import GraphBuilder


class _EncoderBuilder(GraphBuilder):
    """Builder of encoder layers, which draws their weights: behind a computed Reshape no shapes are known."""

    def __init__(self, name: str, width: int, heads: int) -> None:
        super().__init__(name, seed=6)
        self._width, self._heads = width, heads

    def add_layer(self, x: str) -> str:
        x = self.op("Add", x, self._attention(self.add_norm(x)))
        # Two linear layers around a GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415) by its error function.
        y = self._linear(self.add_norm(x), self._width, 4 * self._width)
        gate = self.op("Add", self.op("Erf", self.op("Div", y, self._scalar(math.sqrt(2)))), self._scalar(1.0))
        y = self.op("Mul", self.op("Mul", y, gate), self._scalar(0.5))
        return self.op("Add", x, self._linear(y, 4 * self._width, self._width))

    def add_norm(self, x: str) -> str:
        """Add LayerNormalization (Ba et al. 2016, arXiv:1607.06450, eq. 4) of the last axis, in nine operators."""
        centred = self.op("Sub", x, self.op("ReduceMean", x, axes=[-1]))
        variance = self.op("ReduceMean", self.op("Pow", centred, self._scalar(2.0)), axes=[-1])
        deviation = self.op("Sqrt", self.op("Add", variance, self._scalar(1e-5)))
        scale, shift = self._rng.uniform(0.5, 1.5, self._width), self._rng.normal(0, 0.1, self._width)
        scaled = self.op("Mul", self.op("Div", centred, deviation), self._weights(scale))
        return self.op("Add", scaled, self._weights(shift))

    def _attention(self, x: str) -> str:
        width, heads, depth = self._width, self._heads, self._width // self._heads
        batch, tokens = (
            self.op("Gather", self.op("Shape", x), self.op("Constant", value_int=axis), axis=0) for axis in (0, 1)
        )
        parts = []
        for order in ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]):  # queries, keys, values
            y = self._linear(x, width, width)
            extents = [self._integers(n) for n in (-1, heads, depth)]
            shape = self.op("Concat", self.op("Unsqueeze", batch, self._integers(0)), *extents, axis=0)
            parts.append(self.op("Transpose", self.op("Reshape", y, shape), perm=order))
        query, key, value = parts
        weights = self.op(
            "Softmax", self.op("Div", self.op("MatMul", query, key), self._scalar(math.sqrt(depth))), axis=-1
        )
        mixed = self.op("Transpose", self.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        extents = [self.op("Unsqueeze", extent, self._integers(0)) for extent in (batch, tokens)]
        shape = self.op("Concat", *extents, self._integers(width), axis=0)
        return self._linear(self.op("Reshape", mixed, shape), width, width)

    def _linear(self, x: str, inputs: int, outputs: int) -> str:
        weight = self._rng.normal(0, 1 / math.sqrt(inputs), (inputs, outputs))
        bias = self._rng.normal(0, 0.02, outputs)
        return self.op("Add", self.op("MatMul", x, self._weights(weight)), self._weights(bias))

    def _integers(self, value: int) -> str:
        return self.op("Constant", value_ints=[value])

    def _scalar(self, value: float) -> str:
        return self.op("Constant", value_float=value)

    def _weights(self, values: npt.NDArray[np.float64]) -> str:
        return self.const(values.astype(np.float32))


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
    g = _EncoderBuilder(f"encoder{layers}", width, heads)
    x = g.input("x", (1, tokens, width))
    for _ in range(layers):
        x = g.add_layer(x)
    g.output(g.add_norm(x), (1, tokens, width), name="hidden")
    return g


def vit_tiny(layers: int = 12) -> GraphBuilder:
    """Build ViT-Tiny (arXiv:2012.12877, table 1, with 12 layers): `images` 1x3x224x224 in, `logits` 1x1000 out."""
    g, width, tokens = GraphBuilder("vit_tiny", seed=12), 192, 14 * 14 + 1
    heads, depth = 3, width // 3
    patches = g.conv(g.input("images", (1, 3, 224, 224)), width, 16, stride=16, pad=0)
    patches = g.op("Transpose", g.op("Reshape", patches, g.const([1, width, tokens - 1])), perm=[0, 2, 1])
    rng = np.random.default_rng(12)
    first = g.const(rng.normal(0, 1, (1, 1, width)).astype(np.float32), "class_token")
    position = g.const(rng.normal(0, 0.5, (1, tokens, width)).astype(np.float32), "position")
    x = g.op("Add", g.op("Concat", first, patches, axis=1), position)
    for _ in range(layers):
        # Attention with one projection to queries, keys and values, separated by Split and Squeeze.
        joined = g.linear(g.layer_norm(x, epsilon=1e-6), 3 * width)
        joined = g.op("Reshape", joined, g.const([1, tokens, 3, heads, depth]))
        parts = g.op("Split", g.op("Transpose", joined, perm=[2, 0, 3, 1, 4]), g.const([1, 1, 1]), outputs=3, axis=0)
        query, key, value = (g.op("Squeeze", part, g.const([0])) for part in parts)
        query = g.op("Mul", query, g.const(1 / math.sqrt(depth)))
        weights = g.op("Softmax", g.op("MatMul", query, g.op("Transpose", key, perm=[0, 1, 3, 2])), axis=-1)
        mixed = g.op("Transpose", g.op("MatMul", weights, value), perm=[0, 2, 1, 3])
        x = g.op("Add", x, g.linear(g.op("Reshape", mixed, g.const([1, tokens, width])), width))
        y = g.linear(g.layer_norm(x, epsilon=1e-6), 4 * width)
        gate = g.op("Add", g.op("Erf", g.op("Div", y, g.const(math.sqrt(2)))), g.const(1.0))
        x = g.op("Add", x, g.linear(g.op("Mul", g.op("Mul", y, gate), g.const(0.5)), width))
    x = g.op("Gather", g.layer_norm(x, epsilon=1e-6), g.const(0), axis=1)
    g.output(g.gemm(x, 1000), name="logits")
    return g
