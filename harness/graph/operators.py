"""Kinds of operators of the default domain, and which elements carry Q/DQ: the one place that lists them."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS", "ARITHMETIC", "CONVOLUTIONS", "FLOATS", "LARGEST", "LINEAR", "MOVEMENT", "NORMALIZATION", "POINTS",
    "POOLING", "SMALLEST", "SOFTMAX",
]  # fmt: skip

FLOATS = frozenset({"float", "float16"})
"""Element types, by their ONNX names in lower case, of tensors that may be quantized."""

LARGEST = 1e30
"""Values beyond it say "none": attention masks have -3.4e38 where others have minus infinity; no scale holds them."""

SMALLEST = 255e-10
"""A tensor without larger values is as good as 0: it does not fill the 255 steps of the smallest scale."""

CONVOLUTIONS = frozenset({"Conv", "ConvTranspose"})

LINEAR = CONVOLUTIONS | {"Gemm", "MatMul"}
"""They take data and weight together."""

ACTIVATIONS = frozenset({
    "Celu", "Clip", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu",
    "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu",
})  # fmt: skip
"""Runtimes fuse them into the convolution before them."""

SOFTMAX = frozenset({"LogSoftmax", "Softmax"})

ARITHMETIC = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sqrt", "Sub", "Sum", "Where"})

POOLING = frozenset({"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"})

NORMALIZATION = frozenset({
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
    "LpNormalization", "MeanVarianceNormalization", "RMSNormalization",
})  # fmt: skip

MOVEMENT = frozenset({
    "DepthToSpace", "Expand", "Flatten", "Gather", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze", "Upsample",
})  # fmt: skip
"""They move values and compute none, or hardly any."""

_OTHERS = frozenset({"Concat", "Exp", "ReduceMax", "ReduceMean", "ReduceSum"})

POINTS = ACTIVATIONS | SOFTMAX | ARITHMETIC | POOLING | NORMALIZATION | MOVEMENT | _OTHERS
"""Whose floating-point inputs may be quantized, beside those of linear operators."""
