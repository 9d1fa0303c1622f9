"""Schema of spec files as TAO defines them: frozen values; unknown keys and wrong values are errors.

Sections `quantize`, `gen_trt_engine`, `evaluate`, `dataset`, `results_dir` follow NVIDIA's TAO documentation ("ModelOpt
ONNX Backend (Static PTQ)", sections 9.2, 9.5 and 9.8). Settings that TAO takes from the trained model's own
configuration (preprocessing, decoder, input shapes) are keys of `dataset` and `evaluate`.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from harness.base.errors import MAX_COUNT, UserError, suggest_names
from harness.config.sections import PluginSpec, PreprocessSpec, normalize_float_precision
from harness.config.yaml_loader import read_text_file, read_yaml_mapping, to_user_error
from harness.runtimes.onnxruntime import unfused_execution

DEFAULT_LAYERS_WILDCARD = "*"  # as `module_name`: the operators that the backend quantizes by default
MAX_SUGGESTED_MODULES = 8

#: Operators that ModelOpt 0.47 quantizes by default, by mode (docstring of `modelopt/onnx/quantization/quantize.py`).
DEFAULT_OPERATORS: Mapping[str, tuple[str, ...]] = {
    "int8": (
        "Add", "AveragePool", "BatchNormalization", "Clip", "Conv", "ConvTranspose", "Gemm", "GlobalAveragePool",
        "MatMul", "MaxPool", "Mul",
    ),
    "fp8": ("Conv", "Gemm", "MatMul"),
    "int4": ("Gemm", "MatMul"),
}  # fmt: skip
#: Operators that ModelOpt leaves float for accuracy (how-to on PTQ of YOLO11, section 3.4).
FLOAT_BY_DEFAULT: Mapping[str, tuple[str, ...]] = {
    "activations": ("Softmax", "Sigmoid", "Tanh"),
    "structure": ("Concat", "Slice", "Reshape", "Transpose"),
    "arithmetic, unless fused": ("Add", "Sub", "Mul", "Div"),
}


class LayerPreset(NamedTuple):
    """Named choice of layers.

    Attributes:
        skip_names: Wildcards over names of nodes that stay native.
        text: Description.
        op_types: Operators to quantize to INT8 instead of `layers`; empty: use `layers`.
        expect: Warning about the quantized models, or "".
    """

    text: str
    skip_names: tuple[str, ...] = ()
    op_types: tuple[str, ...] = ()
    expect: str = ""


PRESETS: Mapping[str, LayerPreset] = {
    # TAO documentation, "ModelOpt ONNX Backend (Static PTQ)", section 9.8.8
    "classifier": LayerPreset(text="classifiers: the last layer stays native", skip_names=("/classifier/*", "/fc")),
    "rtdetr": LayerPreset(
        text="RT-DETR: head, encoder and decoder stay native", skip_names=("/head/*", "/encoder/*", "/decoder/*")
    ),
    # How-to on PTQ of YOLO11, section 3.4
    "extreme_int8": LayerPreset(
        text="every operator that can be forced to INT8: a stress test",
        op_types=(
            "Conv", "MatMul", "MaxPool", "Mul", "Add", "Concat", "Sigmoid", "Softmax", "Split", "Transpose",
            "Reshape", "Slice", "Resize", "Sub", "Div",
        ),
        expect=(
            "extreme INT8 is a stress test, not for deployment: on YOLO11n mAP fell from 0.42 to 0.12 (500 COCO "
            "images), and TensorRT may fail with an internal error when it builds such a model. Compare it with "
            "the defaults (qdq evaluate) before you draw conclusions"
        ),
    ),
}  # fmt: skip


def describe_defaults() -> list[str]:
    """Return lines of text about ModelOpt's defaults and the presets."""
    lines = ["Quantized by default:"]
    lines += [f"  {mode}: {', '.join(ops)}" for mode, ops in DEFAULT_OPERATORS.items()]
    lines.append("Left in high precision by default (force them by --op_types_to_quantize, at your own risk):")
    lines += [f"  {kind}: {', '.join(ops)}" for kind, ops in FLOAT_BY_DEFAULT.items()]
    lines.append("Presets:")
    for name, preset in PRESETS.items():
        what = f"skip {', '.join(preset.skip_names)}" if preset.skip_names else f"quantize {', '.join(preset.op_types)}"
        lines.append(f"  {name}: {preset.text} ({what})")
    return lines


class HasNameAndOp(Protocol):
    """Node of a model or of a signature."""

    @property
    def name(self) -> str: ...

    @property
    def op(self) -> str: ...


def match_skip_names(nodes: Sequence[HasNameAndOp], patterns: Iterable[str], key: str = "skip_names") -> frozenset[str]:
    """Return the names of the nodes that match any pattern; log a warning for each pattern without a match.

    Args:
        patterns: Node names, wildcards over names, or modules (all nodes below them).
        key: Name of the list in messages.
    """
    names: set[str] = set()
    for pattern in patterns:
        matched = {node.name for node in nodes if _matches_name(pattern, node.name)}
        if not matched:
            logger.warning("%s: %r matches no node; %s", key, pattern, _suggest_node_names(pattern, nodes))
        names |= matched
    return frozenset(names)


def assign_layers(
    nodes: Sequence[HasNameAndOp], layers: Sequence[Any], default_operators: Iterable[str]
) -> tuple[Any, ...]:
    """Return for each node the first entry of `layers` that matches it, or None; log entries without effect.

    Args:
        layers: Entries in the order of the file, each with a `module_name`.
        default_operators: Operators that "*" matches.
    """
    defaults = frozenset(default_operators)
    matches = [[i for i, layer in enumerate(layers) if _matches(layer.module_name, node, defaults)] for node in nodes]
    hits, effective = Counter(i for indices in matches for i in indices), {indices[0] for indices in matches if indices}
    for i, layer in enumerate(layers):
        where, name = f"layers.{i}.module_name", layer.module_name
        if not hits[i]:
            operators = {node.op for node in nodes}
            hint = _suggest_node_names(name, nodes) if "/" in name else suggest_names(name, operators)
            logger.warning("%s: %r matches no node; %s", where, name, hint)
        elif i not in effective:
            logger.warning(
                "%s: all nodes of %r belong to entries above it; the first match counts, so move it up", where, name
            )
    return tuple(layers[indices[0]] if indices else None for indices in matches)


def _matches(pattern: str, node: HasNameAndOp, defaults: frozenset[str]) -> bool:
    if pattern == DEFAULT_LAYERS_WILDCARD:
        return node.op in defaults
    return fnmatchcase(node.op, pattern) or _matches_name(pattern, node.name)


def _matches_name(pattern: str, name: str) -> bool:
    return bool(name) and (fnmatchcase(name, pattern) or name.startswith(f"{pattern.rstrip('/')}/"))


def _suggest_node_names(pattern: str, nodes: Sequence[HasNameAndOp]) -> str:
    """Return a hint: similar names of nodes or modules, or else the top modules."""
    names, stem = [node.name for node in nodes if node.name], pattern.rstrip("*").rstrip("/")
    modules = {name[:i] for name in names for i, letter in enumerate(name) if letter == "/" and i}
    known = {*names, *modules}
    if not difflib.get_close_matches(stem, known, n=1, cutoff=0.5):
        tops = sorted(module for module in modules if "/" not in module[1:]) or names
        known = set(tops[:MAX_SUGGESTED_MODULES])
    return suggest_names(stem, known)


logger = logging.getLogger(__name__)
Dtype = Literal["int8", "fp8_e4m3fn", "fp8_e5m2", "native"]
DATA_TYPE_NAMES = {"f16": "FP16", "bf16": "BF16", "tf32": "TF32", "f32": "FP32"}
EXAMPLES_HINT = "experiments/specs has one example of each kind"
T = TypeVar("T")
NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]


class _SpecModel(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, protected_namespaces=())


def _tuple_of(kind: Any) -> Any:
    return Annotated[tuple[kind, ...], Field(strict=False)]


class TensorDtype(_SpecModel):
    """Storage type of weights or activations; "native" leaves them unchanged."""

    dtype: Dtype = "native"


class LayerSpec(_SpecModel):
    """Entry of `layers`.

    Attributes:
        module_name: Operator type ("Conv"), node name ("/model.0/conv/Conv"), or a wildcard over either. "*" alone
            means the operators that the backend quantizes by default.
        weights: Type of the weights of matching operators.
        activations: Type of their data inputs.
    """

    module_name: NonEmpty
    weights: TensorDtype = TensorDtype()
    activations: TensorDtype = TensorDtype()

    @property
    def dtypes(self) -> tuple[Dtype, ...]:
        """Types of weights and activations that are not native."""
        return tuple(each.dtype for each in (self.weights, self.activations) if each.dtype != "native")


def _check_preset(value: Any) -> Any:
    if value is not None and value not in PRESETS:
        raise ValueError(f"no preset is called {value!r}; {suggest_names(str(value), PRESETS)}")
    return value


def _check_backend(value: Any) -> Any:
    if value == "modelopt.pytorch":
        raise ValueError(
            "'modelopt.onnx' or 'qdq', but got 'modelopt.pytorch', which takes PyTorch modules instead of ONNX files; "
            "'qdq' has its precision layer by layer"
        )
    return value


def _check_device(value: str) -> str:
    if not re.fullmatch(r"cpu|trt|cuda(:\d+)?", value):
        raise ValueError(f"cpu, cuda, cuda:N or trt, but got {value!r}")
    return value


class QuantizeSection(_SpecModel):
    """Section `quantize`.

    Attributes:
        model_path: ONNX file; all relative paths in a spec start from its folder.
        results_dir: Folder of `quantized_model.onnx`; None: `results_dir` of the file.
        backend: "modelopt.onnx": NVIDIA ModelOpt, one dtype for all layers. "qdq": built in, a dtype for each layer.
        algorithm: Calibration method; ModelOpt's name of minmax is max.
        device: Device of ModelOpt's calibration: "cpu", "cuda", "cuda:N" or "trt".
        skip_names: Node names, wildcards over them, or modules ("/head": all nodes below it) that stay native.
        preset: Name in `harness.compat.tao_specs.spec.PRESETS`.
        default_layer_dtype: Accepted and ignored, as documented by TAO.
        default_activation_dtype: Accepted and ignored, as documented by TAO.
        backend_kwargs: For "modelopt.onnx" arguments of `modelopt.onnx.quantization.quantize`; for "qdq" `dialect`.
    """

    model_path: str
    results_dir: str | None = None
    backend: Annotated[Literal["modelopt.onnx", "qdq"], BeforeValidator(_check_backend)] = "modelopt.onnx"
    mode: Literal["static_ptq"] = "static_ptq"
    algorithm: Literal["minmax", "max", "entropy"] = "minmax"
    device: Annotated[str, AfterValidator(_check_device)] = "cpu"
    layers: _tuple_of(LayerSpec) = ()  # type: ignore[valid-type]
    skip_names: _tuple_of(NonEmpty) = ()  # type: ignore[valid-type]
    preset: Annotated[str | None, BeforeValidator(_check_preset)] = None
    default_layer_dtype: Dtype | None = None
    default_activation_dtype: Dtype | None = None
    backend_kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _has_layers(self) -> QuantizeSection:
        forced = PRESETS[self.preset].op_types if self.preset else ()
        if not self.layers and not forced:
            raise ValueError(
                "quantize.layers: at least one entry is required, for instance "
                "{module_name: Conv, weights: {dtype: int8}, activations: {dtype: int8}}"
            )
        if self.layers and forced:
            raise ValueError(f"quantize.preset: {self.preset!r} sets the quantized operators; leave layers out")
        return self


class TestDataSources(_SpecModel):
    """Labelled images, or labelled arrays that are inputs of the model.

    Attributes:
        image_dir: Folder of the images.
        json_file: Labels of the images in COCO format (.json) or as lines "FILENAME CLASS" (.txt).
        arrays: A `.npz` file with an array for each input of the model, or a `.npy` file for its only input.
        labels: Labels of the arrays: the name of one in the `.npz` file, or a .npy, .npz, .csv or .txt file.
    """

    __test__ = False  # pytest collects classes by this name

    image_dir: str | None = None
    json_file: str | None = None
    arrays: str | None = None
    labels: str | None = None

    @model_validator(mode="after")
    def _one(self) -> TestDataSources:
        if (self.image_dir is None) == (self.arrays is None):
            raise ValueError("dataset.test_data_sources: give either image_dir or arrays")
        if self.arrays is None and self.labels is not None:
            raise ValueError("dataset.test_data_sources.labels: labels of images are given as json_file")
        if self.arrays is not None and self.json_file is not None:
            raise ValueError("dataset.test_data_sources.json_file: labels of arrays are given as labels")
        return self


class DatasetSection(_SpecModel):
    """Section `dataset`.

    Attributes:
        test_data_sources: Labelled data for `qdq evaluate`; calibration data too, if none are given.
        batch_size: Images of one inference, if the batch of the model is dynamic.
        calibration_data: A folder of images, a `.npy` or an `.npz` file.
        preprocess: Preprocessing of images (`qdq list`).
        classes: Names of the model's classes in the order of its outputs; empty: those of the labels.
        samples: Maximum number of calibration samples; None: all. ModelOpt's README advises 500 or more for CNNs and
            ViTs.
        count: Maximum number of images of the evaluation; None: all.
        shapes: Static shapes by input name, if more than the batch is dynamic. Batch sizes of an engine override their
            first number.
        dims: Sizes of dynamic dimensions by symbol, such as {time: 128}.
    """

    test_data_sources: TestDataSources | None = None
    batch_size: Count = 1
    calibration_data: str | None = None
    preprocess: PreprocessSpec | None = None
    classes: _tuple_of(str) = ()  # type: ignore[valid-type]
    samples: Count | None = 512
    count: Count | None = None
    shapes: dict[str, str] = {}
    dims: dict[str, Annotated[int, Field(ge=0, le=MAX_COUNT)]] = {}


def _normalize_data_type(value: Any) -> Any:
    if isinstance(value, str) and value.upper() in ("INT8", "FP8"):
        raise ValueError(
            f"FP16, BF16, TF32 or FP32, but got {value!r}: scales come with the Q/DQ pairs of the ONNX file, so "
            "quantize it first (qdq quantize) and give here the precision of the other layers"
        )
    return DATA_TYPE_NAMES.get(normalize_float_precision(value), value) if isinstance(value, str) else value


class TensorRTOptions(_SpecModel):
    """Section `gen_trt_engine.tensorrt`.

    Attributes:
        data_type: Precision of everything outside of Q/DQ pairs.
        workspace_size: Limit of the workspace in MiB.
        min_batch_size: Smallest batch of the optimization profile, if the batch of the model is dynamic.
        opt_batch_size: Batch that the engine is optimized for.
        max_batch_size: Largest batch.
    """

    data_type: Annotated[Literal["FP16", "BF16", "TF32", "FP32"], BeforeValidator(_normalize_data_type)] = "FP16"
    workspace_size: Count = 1024
    min_batch_size: Count = 1
    opt_batch_size: Count = 1
    max_batch_size: Count = 1

    @model_validator(mode="after")
    def _ascending(self) -> TensorRTOptions:
        sizes = (self.min_batch_size, self.opt_batch_size, self.max_batch_size)
        if list(sizes) != sorted(sizes):
            raise ValueError(f"min_batch_size <= opt_batch_size <= max_batch_size, but got {sizes}")
        return self


class EngineSection(_SpecModel):
    """Section `gen_trt_engine`.

    Attributes:
        onnx_file: Model to build.
        trt_engine: File of the engine, see `harness.compat.tao_specs.engine.engine_path`.
        tensorrt: Options, of which other backends than TensorRT use `opt_batch_size` alone.
    """

    onnx_file: str
    trt_engine: str
    tensorrt: TensorRTOptions = TensorRTOptions()


class EvaluateSection(_SpecModel):
    """Section `evaluate`.

    Attributes:
        trt_engine: An engine of `qdq gen-trt-engine`; either this or `onnx_file`.
        onnx_file: A model, built for the evaluation.
        backend: Runtime of `onnx_file`; by default ONNX Runtime without its optimizers, which emulates any precision.
        evaluator: None: mAP for COCO labels, top-1 for lines "FILENAME CLASS" and for arrays.
        decode: Decoder of a detector; None: inferred from the shapes of its outputs.
    """

    trt_engine: str | None = None
    onnx_file: str | None = None
    backend: PluginSpec = unfused_execution()
    evaluator: PluginSpec | None = None
    decode: str | None = None

    @model_validator(mode="after")
    def _one(self) -> EvaluateSection:
        if (self.trt_engine is None) == (self.onnx_file is None):
            raise ValueError("evaluate: give either trt_engine or onnx_file")
        return self


class Spec(_SpecModel):
    """Spec file; each command needs its own section and ignores the others. `results_dir` is relative to the file."""

    quantize: QuantizeSection | None = None
    gen_trt_engine: EngineSection | None = None
    evaluate: EvaluateSection | None = None
    dataset: DatasetSection = DatasetSection()
    results_dir: str = "results"


def read_spec(path: Path) -> Spec:
    """Read and check a spec file."""
    return parse_spec(read_text_file(path, "a spec file"), str(path))


def parse_spec(text: str, source: str) -> Spec:
    """Parse and check a spec in YAML; raise a `UserError` that names `source` for an invalid one."""
    try:
        return Spec.model_validate(read_yaml_mapping(text, source, "a spec file"))
    except ValidationError as error:
        raise to_user_error(Spec, source, error) from None


def require_section(section: T | None, name: str, source: str) -> T:
    """Return a section, or raise `UserError` if the file, which the message calls `source`, does not have it."""
    if section is None:
        raise UserError(f"{source}: there is no section {name!r}; {EXAMPLES_HINT}")
    return section
