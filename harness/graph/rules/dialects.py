"""Dialects: the form of Q/DQ pairs that each runtime fuses. Plug-ins add one by an entry point of `qdq.dialects`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from harness.base.errors import UserError
from harness.graph.rules.operator_sets import CONVOLUTION_OPS, LINEAR_OPS, POINT_OPS
from harness.graph.rules.runtime_faults import RuntimeFault, known_faults
from harness.measure.provenance import describe_installed
from harness.plugins import registry
from harness.plugins.api import capabilities_of

_SPACE_FIELDS = (
    "faults", "zero_points", "channel_activations", "operands_agree", "float_kernels", "max_fp8_filter",
    "generates_kernels", "shares_zero_points",
)  # fmt: skip
"""Fields that show in the space, or only limit numeric choices."""
INT8_MAX_LEVEL, INT7_MAX_LEVEL = 127, 64
"""Largest magnitudes of stored weights; 2 x 255 x 64, two products with UINT8 data, are 32,640 and fit into 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Form of Q/DQ pairs for which one runtime has fast kernels.

    Attributes:
        name: Name in `qdq.dialects`.
        activation: Storage type of activations at precision "int8".
        symmetric_activation: Whether activations have zero point 0 (scale = amax / 127); otherwise their range, which
            includes 0, has 255 steps.
        unsigned_positive: Whether symmetric activations without negative values are UINT8 with zero point 0.
        affine_ops: Operators whose data are UINT8 with a zero point even if `symmetric_activation` is set.
        weight: Storage type of weights at "int8"; always symmetric, one scale per output channel.
        weight_limit: Largest magnitude of a stored INT8 weight; scale = amax / limit.
        transposed_axis: Output-channel axis of a ConvTranspose weight [C, K, R, S] with one scale per channel; None:
            one scale for the tensor.
        unit_softmax: Whether the result of a Softmax is stored with the range 0 to 1, whatever its calibrated range is.
        bias: "int32": the bias of a quantized linear operator gets a DequantizeLinear with scale = data scale x weight
            scale (x alpha of a Gemm); the bias of a MatMul is in an Add after it without pairs. "float": biases are not
            changed.
        min_opset: Smallest opset of the default domain for INT8 pairs, see `opset`.
        linear_ops: Operators whose data and weight are quantized together.
        points: Other operators whose floating-point inputs may be quantized.
        constant_operands: Operators of `points` whose constants are quantized together with their data, because the
            runtime has an integer kernel only if all inputs are quantized.
        between_conv_and_activation: Whether a pair between Conv, BatchNormalization and activation is legal.
        absorbed: Activations that the runtime computes by the clipping of the pair after them. A pair before such an
            activation is illegal if no other node reads the tensor.
        faults: Known faults of the runtime at INT8, see `load_dialect`.
        quantize_outputs: Whether the runtime fuses a linear operator only if its output is quantized too.
        operands_agree: Whether the runtime refuses a linear operator whose operands have pairs of different precisions,
            also before operators that only move values.
        float_kernels: Precisions and operators that the runtime computes in float, so that pairs only take time.
        generates_kernels: Whether adjacent operators without weights become one kernel, in which pairs have no effect.
        max_fp8_filter: Largest number of filter elements of one channel for FP8 convolutions; 0: no limit.
        grouped_fp8: Whether grouped convolutions may be FP8.
        float16: Whether float16 tensors may be quantized.
        precisions: Quantized precisions of the runtime.
        zero_points: Whether INT8 activations may have a zero point other than 0.
        channel_activations: Whether the INT8 data of a depthwise Conv may have one scale for each channel.
        shares_zero_points: Whether pairs share constants of equal zero points in a model with Pad.
    """

    name: str
    activation: Literal["int8", "uint8"] = "int8"
    symmetric_activation: bool = True
    unsigned_positive: bool = False
    affine_ops: frozenset[str] = frozenset()
    weight: Literal["int8"] = "int8"
    weight_limit: int = INT8_MAX_LEVEL
    transposed_axis: int | None = 1
    unit_softmax: bool = False
    bias: Literal["float", "int32"] = "float"
    min_opset: int = 13
    linear_ops: frozenset[str] = LINEAR_OPS
    points: frozenset[str] = POINT_OPS
    constant_operands: frozenset[str] = frozenset()
    between_conv_and_activation: bool = True
    absorbed: frozenset[str] = frozenset()
    faults: tuple[RuntimeFault, ...] = ()
    quantize_outputs: bool = False
    operands_agree: bool = False
    float_kernels: frozenset[tuple[str, str]] = frozenset()
    generates_kernels: bool = False
    max_fp8_filter: int = 0
    grouped_fp8: bool = True
    float16: bool = True
    precisions: frozenset[str] = frozenset({"int8"})
    zero_points: bool = True
    channel_activations: bool = False
    shares_zero_points: bool = True

    def opset(self, precisions: Iterable[str]) -> int:
        """Return the lowest opset of the default domain that a model with these precisions needs.

        FP8 came to QuantizeLinear with opset 19, per-channel scales with 13 (ONNX operator schemas).
        """
        return max(self.min_opset, 19) if any(p.startswith("fp8") for p in precisions) else self.min_opset

    @property
    def facts(self) -> dict[str, Any]:
        """Return the fields for the fingerprint of a run.

        Left out are `weight_limit` at its default, and fields that only decide which placements and numeric choices
        exist.
        """
        fields = asdict(self)
        for name in _SPACE_FIELDS:
            del fields[name]
        if self.weight_limit == INT8_MAX_LEVEL:
            del fields["weight_limit"]
        return fields

    @property
    def operators(self) -> frozenset[str]:
        """Operators whose inputs may be quantized."""
        return self.linear_ops | self.points


# TensorRT: symmetric only, INT8 never UINT8, biases stay float, Conv-BN-activation is one kernel
# (IQuantizeLayer in NvInfer.h; parser onnx-tensorrt); no optimized FP8 kernels for grouped Conv (10.12 notes),
# nor for filters of more than 32 elements (ModelOpt leaves them float; the compiler of TensorRT-RTX as well).
# Sources disagree on the axis of ConvTranspose (ModelOpt 1, TensorRT#1694 0), so it gets one scale.
TENSORRT = Dialect(
    name="tensorrt",
    transposed_axis=None,
    between_conv_and_activation=False,
    operands_agree=True,
    max_fp8_filter=32,
    grouped_fp8=False,
    precisions=frozenset({"int8", "fp8"}),
    zero_points=False,
)

# TensorRT for RTX, by its compiler (1.7): ConvTranspose, AveragePool, and MaxPool with FP8 always run in float; grouped
# convolutions have FP8 kernels. For TensorRT itself this is unknown.
_RTX_FLOAT_KERNELS = frozenset({
    ("int8", "AveragePool"), ("int8", "ConvTranspose"), ("fp8", "AveragePool"), ("fp8", "ConvTranspose"),
    ("fp8", "MaxPool"),
})  # fmt: skip
TENSORRT_RTX = replace(
    TENSORRT, name="tensorrt_rtx", grouped_fp8=True, float_kernels=_RTX_FLOAT_KERNELS, generates_kernels=True
)

# OpenVINO turns Q/DQ pairs into FakeQuantize when it reads the model; FP8 runs, for accuracy alone on a CPU. An
# Einsum of two operands becomes a MatMul before that.
# Measured on 2026.4 with AVX512-VNNI: a Conv is up to a fifth faster with UINT8 than with INT8 data, at any zero point,
# and its result is wrong by a fifth with INT8 data after a Concat; a zero point makes a MatMul a tenth slower. Behind a
# pair with a zero point, a Pad of one axis replaces the constant of the zero point by one with the shape of this axis,
# for all pairs that read it: other results are wrong (0 to 10 dB), or the model is refused (PadTransformation).
OPENVINO = Dialect(
    name="openvino",
    unsigned_positive=True,
    affine_ops=CONVOLUTION_OPS,
    linear_ops=LINEAR_OPS | {"Einsum"},
    faults=known_faults("openvino"),
    precisions=frozenset({"int8", "fp8", "fp8e5m2"}),
    channel_activations=True,
    shares_zero_points=False,
)

_FLOAT_ONLY_CONSUMERS = frozenset({
    "Abs", "ArgMax", "ArgMin", "Ceil", "CumSum", "Equal", "Floor", "GatherElements", "GatherND", "Greater",
    "GreaterOrEqual", "GridSample", "Less", "LessOrEqual", "Log", "Neg", "Reciprocal", "ReduceL1", "ReduceL2",
    "ReduceMin", "ReduceProd", "ReduceSumSquare", "Round", "ScatterElements", "ScatterND", "Sign", "TopK", "Trilu",
})  # fmt: skip
"""They run in float alone; but the producer of their input runs in INT8 only if all its readers take the pair."""

# ONNX Runtime's CPU kernels (MLAS) are fastest with UINT8 activations times INT8 weights; QDQ operator groups are
# fused only with INT32 bias, those of convolutions only with quantized outputs too (core/optimizer/qdq_transformer;
# quantization/operators). MatMul and Add are a Gemm before it looks for pairs (matmul_add_fusion.cc). Of the
# operators other than linear ones these have integer kernels for several inputs (qdq_selector_action_transformer.cc:
# BinaryOp, Variadic, Where and Gather rules); a LayerNormalization has none, so its scale stays float. Relu and Clip
# disappear into a zero point behind them (relu_quantizelinear.cc, clip_quantizelinear.cc), while a pair in front stays:
# with every operator quantized MobileNetV2 takes 5.9 ms with such pairs and 3.3 ms without. In float16 it
# quantizes biases itself, with scales too small for float16: with weights around 0.02, 1.24 is off by 0.9, not 0.008.
# QLinearSoftmax overflows where the scale of its result is below 1/512 (the largest becomes 0), so it gets that of the
# whole range, as `quantize_static` gives it.
ONNXRUNTIME = Dialect(
    name="onnxruntime",
    activation="uint8",
    symmetric_activation=False,
    bias="int32",
    points=POINT_OPS | _FLOAT_ONLY_CONSUMERS,
    constant_operands=frozenset({"Add", "Concat", "Gather", "Mul", "Where"}),
    absorbed=frozenset({"Clip", "Relu"}),
    quantize_outputs=True,
    unit_softmax=True,
    faults=known_faults("onnxruntime"),
    float16=False,
)

# The same with INT8 activations (S8S8), which ONNX Runtime's documentation advises to try first ("Quantize ONNX
# models", on data types): U8S8 may saturate where AVX2 or AVX512 without VNNI adds pairs of products in 16 bits.
ONNXRUNTIME_S8 = replace(ONNXRUNTIME, name="onnxruntime_s8", activation="int8")

# Without fusion its kernels are those of float, so that any form of a pair is computed as it is written, and nothing
# saturates. The fused QLinearConv refuses scales by channel when it runs (qlinearconv.cc, ComputeOffset).
ONNXRUNTIME_UNFUSED = replace(ONNXRUNTIME, name="onnxruntime_unfused", channel_activations=True)

# The WebAssembly build runs the nodes of the native one: profiles of 1.24 are equal for every form that was tried; in
# 1.30 alone a Resize that interpolates stays float. It adds products in 32 bits, so weights have 8 bits on every
# processor.
ONNXRUNTIME_WEB = replace(ONNXRUNTIME, name="onnxruntime_web")

# For processors without VNNI: weights of 7 bits, as `quantize_static` stores them with `reduce_range`, and NNCF with
# its overflow fix. Measured on an AMD EPYC (AVX2): both runtimes then compute what the file says, and SqueezeNet's
# outputs are 30 dB from the float ones instead of 18.
OPENVINO_7BIT = replace(OPENVINO, name="openvino_7bit", weight_limit=INT7_MAX_LEVEL)
ONNXRUNTIME_7BIT = replace(ONNXRUNTIME, name="onnxruntime_7bit", weight_limit=INT7_MAX_LEVEL)
ONNXRUNTIME_S8_7BIT = replace(ONNXRUNTIME_S8, name="onnxruntime_s8_7bit", weight_limit=INT7_MAX_LEVEL)
BUILTIN_DIALECTS = {
    dialect.name: dialect
    for dialect in (
        TENSORRT, TENSORRT_RTX, OPENVINO, OPENVINO_7BIT, ONNXRUNTIME, ONNXRUNTIME_7BIT, ONNXRUNTIME_S8,
        ONNXRUNTIME_S8_7BIT, ONNXRUNTIME_UNFUSED, ONNXRUNTIME_WEB,
    )
}  # fmt: skip


def load_dialect(use: str, facts: Mapping[str, Any] | None = None) -> Dialect:
    """Return the dialect with a name in `qdq.dialects`, or the one at a `package.module:Attribute`.

    It has only those known faults that the version of the runtime and the processor have; all where these are unknown.

    Args:
        use: The name.
        facts: Description of the benchmarker on the device that runs the files; None: the runtime installed here.

    Raises:
        UserError: The name is unknown, or the attribute is no `Dialect`.
    """
    found: object = registry.load_plugin("dialect", use)
    if not isinstance(found, Dialect):
        raise UserError(f"dialect {use!r}: a harness.graph.rules.dialects.Dialect, but got {found!r}")
    faults = (f for f in found.faults if f.affects(describe_installed(f.runtime) if facts is None else facts))
    return replace(found, faults=tuple(faults)) if found.faults else found


def dialect_name_for(benchmarker: object, use: str, facts: Mapping[str, Any]) -> str:
    """Return the name of the dialect that a benchmarker uses.

    Args:
        benchmarker: The plug-in, whose capabilities may name a dialect.
        use: Name of the benchmarker, and by default of its dialect.
        facts: Description of the benchmarker on the device that measures, which may name another dialect.
    """
    return str(facts.get("dialect", capabilities_of(benchmarker).dialect or use))
