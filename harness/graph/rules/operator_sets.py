"""Sets of operators of the default domain, and the element types that can be quantized."""

from __future__ import annotations

from collections.abc import Mapping

QUANTIZABLE_FLOAT_TYPES = frozenset({"float", "float16"})
"""Element types, by their ONNX names in lower case, of tensors that may be quantized."""

MAX_CONSTANT_MAGNITUDE = 1e30
"""Values beyond it say "none": attention masks have -3.4e38 where others have minus infinity; no scale holds them."""

MIN_CONSTANT_SCALE = 255e-10
"""A tensor without larger values is as good as 0: it does not fill the 255 steps of the smallest scale."""

CONVOLUTION_OPS = frozenset({"Conv", "ConvTranspose"})

LINEAR_OPS = CONVOLUTION_OPS | {"Gemm", "MatMul"}
"""They take data and weight together."""

ACTIVATION_OPS = frozenset({
    "Celu", "Clip", "Elu", "Erf", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Mish", "PRelu", "Relu", "Selu",
    "Sigmoid", "Softplus", "Softsign", "Swish", "Tanh", "ThresholdedRelu",
})  # fmt: skip
"""Runtimes fuse them into the convolution before them."""

SOFTMAX_OPS = frozenset({"LogSoftmax", "Softmax"})

ARITHMETIC_OPS = frozenset({"Add", "Div", "Max", "Mean", "Min", "Mul", "Pow", "Sqrt", "Sub", "Sum", "Where"})

POOLING_OPS = frozenset({"AveragePool", "GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool", "LpPool", "MaxPool"})

NORMALIZATION_OPS = frozenset({
    "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LRN", "LayerNormalization",
    "LpNormalization", "MeanVarianceNormalization", "RMSNormalization",
})  # fmt: skip

MOVEMENT_OPS = frozenset({
    "DepthToSpace", "Expand", "Flatten", "Gather", "Pad", "Reshape", "Resize", "Slice", "SpaceToDepth", "Split",
    "Squeeze", "Tile", "Transpose", "Unsqueeze", "Upsample",
})  # fmt: skip
"""They move values and compute none, or hardly any."""

_OTHER_POINT_OPS = frozenset({"Concat", "Exp", "ReduceMax", "ReduceMean", "ReduceSum"})

POINT_OPS = (
    ACTIVATION_OPS | SOFTMAX_OPS | ARITHMETIC_OPS | POOLING_OPS | NORMALIZATION_OPS | MOVEMENT_OPS | _OTHER_POINT_OPS
)
"""Operators other than linear ones whose floating-point inputs may be quantized."""

QUANTIZABLE_OPS = LINEAR_OPS | {
    "Add", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "MaxPool", "Mul", "Relu", "Resize", "Sum",
}  # fmt: skip
"""Operators that ModelOpt's region inspection looks for (`get_autotuner_quantizable_ops`)."""

_FIRST, _SECOND = frozenset({0}), frozenset({1})

PARAMETER_SLOTS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(("GridSample", "PRelu", "Pow", "RMSNormalization", "Upsample"), _SECOND),
    **dict.fromkeys(
        ("Clip", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "Resize"), frozenset({1, 2})
    ),
    "BatchNormalization": frozenset({1, 2, 3, 4}),
    "Pad": frozenset({2}),
}
"""Inputs, in floating point, that say how an operator treats its data."""

_SECOND_SHAPE_OPS = (
    "CumSum", "Expand", "Gather", "GatherElements", "GatherND", "Reshape", "ScatterElements", "ScatterND", "Split",
    "Squeeze", "Tile", "TopK", "Trilu", "Unsqueeze", "Upsample",
)  # fmt: skip
SHAPE_SLOTS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(_SECOND_SHAPE_OPS, _SECOND),
    "ConstantOfShape": _FIRST,
    "OneHot": frozenset({0, 1}),
    "Pad": frozenset({1, 3}),
    "Range": frozenset({0, 1, 2}),
    "Resize": frozenset({1, 2, 3}),
    "Slice": frozenset({1, 2, 3, 4}),
}
"""Inputs that give shapes, axes and indices, of whatever type: models compute them in floating point, too."""

POLE_SLOTS: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(("Acos", "Acosh", "Asin", "Atanh", "Log", "Reciprocal", "ReduceLogSum"), _FIRST),
    **dict.fromkeys(("Div", "Mod"), _SECOND),
}
"""Inputs at which 0, or the end of a range, gives infinity or NaN; so has the base of Pow, by its exponent."""
