"""Export of a placement as the input of another quantization tool: operators to quantize and nodes left in float."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any

import yaml

from harness.base.errors import UserError, suggest_names
from harness.graph.protos import input_values
from harness.graph.qdq.qdq_graph import QDQ_OPS, read_precisions, read_qdq_graph
from harness.graph.rules.dialects import INT7_MAX_LEVEL, INT8_MAX_LEVEL
from search.space import Edge

#: Templates of the scripts that quantize with another tool.
HEAD = '''"""Quantize a model as qdq-bench placed Q/DQ pairs in {shipped}, with {tool}.

    python {file} {model} calibration.npz model-quantized.onnx

calibration.npz has one array by input name, with the samples along the first axis; a .npy file is the only input. The
node names are those of the float model that qdq-bench prepared, float.onnx of the task in the results folder.
"""

import sys
import tempfile

import numpy as np

OP_TYPES = {op_types}
FLOAT_NODES = {float_nodes}
RANKS = {ranks}  # of the inputs


def samples(path):
    """Yield a mapping of input names to arrays for each sample, with a batch of 1."""
    found = np.load(path, allow_pickle=False)
    arrays = dict(found) if hasattr(found, "files") else {{next(iter(RANKS)): found}}
    if missing := RANKS.keys() - arrays.keys():
        sys.exit(f"{{path}}: no array for input {{', '.join(sorted(missing))}}")
    for values in zip(*(arrays[name] for name in RANKS), strict=True):
        named = dict(zip(RANKS, values, strict=True))
        yield {{name: value if value.ndim == RANKS[name] else value[None] for name, value in named.items()}}


def check_names(model):
    """End if a node that stays in float has another name in the model."""
    import onnx

    names = {{node.name for node in onnx.load(model, load_external_data=False).graph.node}}
    if missing := set(FLOAT_NODES) - names:
        remedy = "take float.onnx of the results folder, or export as for the search"
        sys.exit(f"{{model}}: no node {{', '.join(sorted(missing))}}; {{remedy}}")

'''
ORT_BODY = '''
def quantize(model, calibration, output):
    """Quantize with ONNX Runtime's quantize_static."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Reader(CalibrationDataReader):
        def __init__(self):
            self._samples = samples(calibration)

        def get_next(self):
            return next(self._samples, None)

    check_names(model)
    quantize_static(
        model,
        output,
        Reader(),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        reduce_range={reduce_range},
        activation_type=QuantType.{activation},
        weight_type=QuantType.QInt8,
        op_types_to_quantize=OP_TYPES,
        nodes_to_exclude=FLOAT_NODES,
        extra_options={{
            "OpTypesToExcludeOutputQuantization": OP_TYPES,
            "ActivationSymmetric": {symmetric},
            "QuantizeBias": {biases},
            "ForceQuantizeNoInputCheck": True,  # MaxPool and others, even if nothing before them is quantized
        }},
    )

'''
ULTRALYTICS_BODY = (
    ORT_BODY.replace("def quantize(", "def quantize_file(").removesuffix("\n")
    + '''
def quantize(weights, calibration, output):
    """Export a model of Ultralytics for images of the calibration's size, and quantize the file."""
    from ultralytics import YOLO

    image = next(iter(next(samples(calibration)).values()))
    exported = YOLO(weights).export(format="onnx", imgsz=image.shape[2:])
    quantize_file(exported, calibration, output)

'''
)
MODELOPT_BODY = '''
UNSIGNED = {unsigned}  # tensors without negative values
WEIGHT_LEVELS = {weight_levels}


def match_form(path):
    """Store tensors without negative values as UINT8 with zero point 0, and weights in the levels of the placement."""
    import onnx
    from onnx import numpy_helper

    model = onnx.load(path, load_external_data=False)
    stored = {{tensor.name: tensor for tensor in model.graph.initializer}}

    def store(name, values):
        if name not in stored:
            stored[name] = numpy_helper.from_array(values, name)
            model.graph.initializer.append(stored[name])
        return name

    kinds = {{}}
    for node in model.graph.node:
        kind = kinds.get(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if node.op_type == "QuantizeLinear":
            kind = "unsigned" if node.input[0] in UNSIGNED else None
            if node.input[0] in stored and WEIGHT_LEVELS < 127:
                kind = "weight"
            kinds[node.output[0]] = kind
        if kind is not None and len(node.input) > 2 and stored.keys() >= set(node.input[1:]):
            scale, zero = (numpy_helper.to_array(stored[name]) for name in node.input[1:])
            if zero.dtype == np.int8 and not zero.any():
                levels = WEIGHT_LEVELS if kind == "weight" else 255
                node.input[1] = store(f"{{node.input[1]}}_{{levels}}", (scale * (127 / levels)).astype(scale.dtype))
                if kind == "unsigned":
                    node.input[2] = store(f"{{node.input[2]}}_unsigned", zero.astype(np.uint8))
    onnx.save(model, path)


def quantize(model, calibration, output):
    """Quantize with NVIDIA ModelOpt; excluded nodes are regular expressions there."""
    import re

    import onnx
    from modelopt.onnx.quantization import quantize as modelopt_quantize

    check_names(model)
    rows = list(samples(calibration))
    with tempfile.TemporaryDirectory() as scratch:  # ModelOpt writes to the file that it reads, and next to it
        copy = f"{{scratch}}/model.onnx"
        onnx.save(onnx.load(model), copy)  # with external data
        modelopt_quantize(
            copy,
            quantize_mode="{precision}",
            calibration_data={{name: np.concatenate([row[name] for row in rows]) for name in rows[0]}},
            op_types_to_quantize=OP_TYPES,
            nodes_to_exclude=[f"^{{re.escape(name)}}$" for name in FLOAT_NODES],
            target_dla=True,  # else nodes that gain nothing in TensorRT stay in float
            high_precision_dtype="fp32",  # its default casts the other operators to FP16
            output_path=output,
        )
    match_form(output)  # ModelOpt's INT8 with zero point 0 takes longer

'''
NNCF_BODY = '''
def quantize(model, calibration, output):
    """Quantize with NNCF; operators that it would quantize and the placement leaves in float are ignored."""
    import nncf
    import onnx
    from nncf.quantization.advanced_parameters import AdvancedQuantizationParameters, QuantizationParameters

    check_names(model)
    data = nncf.Dataset(list(samples(calibration)))
    scope = nncf.IgnoredScope(names=FLOAT_NODES, validate=False)
    preset = nncf.QuantizationPreset.{preset}
    # None: one scale a channel at depthwise convolutions, NNCF's default, which takes longer than one scale
    activations = QuantizationParameters(per_channel={channel_activations})
    advanced = AdvancedQuantizationParameters(activations_quantization_params=activations)
    made = nncf.quantize(
        onnx.load(model), data, preset=preset, ignored_scope=scope, advanced_parameters=advanced
    )
    onnx.save(made, output)

'''
TAIL = """
if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    quantize(*sys.argv[1:])
"""

_CAST_OPS = frozenset({"Cast", "Identity"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementSummary:
    """Placement in the terms of tools that quantize whole nodes.

    Attributes:
        op_types: Operator types with at least one quantized node, such as "Conv".
        excluded: Nodes of these types that are not quantized.
        unquantized: All nodes that are not quantized.
        inexpressible: Inputs that the placement leaves in float and a tool may quantize: other inputs of a quantized
            node, and other consumers of a quantized tensor, as a tool inserts one pair for all consumers.
        symmetric: Whether activations have zero point 0.
        unsigned: Tensors whose pairs are UINT8 with zero point 0, because calibration found no negative values.
        channel_activations: Whether an activation has one scale for each channel.
        biases: Whether biases are quantized, which costs time in runtimes that add them in float.
        precision: Precision of all pairs, such as "int8".
        ranks: Number of dimensions of each model input, by name.
    """

    op_types: tuple[str, ...]
    excluded: tuple[str, ...]
    unquantized: tuple[str, ...]
    inexpressible: tuple[Edge, ...]
    precision: str
    symmetric: bool
    unsigned: tuple[str, ...]
    channel_activations: bool
    biases: bool
    ranks: Mapping[str, int]


def summarize_placement(path: Path) -> PlacementSummary:
    """Return the placement of a Q/DQ file in the terms of tools that quantize whole nodes."""
    graph = read_qdq_graph(path)
    precisions = read_precisions(path)
    if len(precisions) != 1:
        names = ", ".join(sorted(precisions)) or "none"
        raise UserError(f"{path}: a recipe has pairs of one precision, but this file has {names}")
    quantized = {(edge.consumer, edge.slot) for edge in graph.edges}
    shared = {edge.tensor for edge in graph.edges} - graph.constants.keys()
    op_types: set[str] = set()
    floats: dict[str, str] = {}
    partial: list[Edge] = []
    for label, node in graph.nodes.items():
        if node.op_type in QDQ_OPS | _CAST_OPS:
            continue
        sources = {slot: graph.before_pairs(name) for slot, name in enumerate(node.input) if name}
        data = [slot for slot, name in sources.items() if name not in graph.constants]
        reads_quantized = any((label, slot) in quantized for slot in data)
        if reads_quantized:
            op_types.add(node.op_type)
        else:
            floats[label] = node.op_type
        unquantized_slots = (slot for slot in data if (label, slot) not in quantized)
        partial += (
            Edge(sources[slot], label, slot) for slot in unquantized_slots if reads_quantized or sources[slot] in shared
        )
    nodes = (node for node in graph.proto.graph.node if node.op_type in QDQ_OPS and len(node.input) > 2)
    zeros = [graph.values(node.input[2]) for node in nodes]
    return PlacementSummary(
        op_types=tuple(sorted(op_types)),
        excluded=tuple(name for name, op in floats.items() if op in op_types),
        unquantized=tuple(floats),
        inexpressible=tuple(partial),
        precision=next(iter(precisions)),
        symmetric=all(zero is None or not zero.any() for zero in zeros),
        unsigned=tuple(sorted(graph.unsigned_tensors)),
        channel_activations=graph.has_channel_activations,
        biases=graph.has_quantized_biases,
        ranks={value.name: len(value.type.tensor_type.shape.dim) for value in input_values(graph.proto.graph)},
    )


def _has_narrow_weights(facts: Mapping[str, Any]) -> bool:
    """Return whether the weights have 7 bits, as on processors that add products in 16 bits."""
    return str(facts["runtime"].get("dialect", "")).endswith("_7bit")


def _script(
    body: str, tool: str, names: Callable[[PlacementSummary], tuple[str, ...]], model: str = "model.onnx"
) -> Any:
    def render(found: PlacementSummary, file: str, facts: Mapping[str, Any]) -> str:
        head = HEAD.format(
            shipped=facts["file"],
            tool=tool,
            file=file,
            model=model,
            op_types=pformat(list(found.op_types), width=110),
            float_nodes=pformat(list(names(found)), width=110),
            ranks=pformat(dict(found.ranks), width=110),
        )
        filled = body.format(
            reduce_range=_has_narrow_weights(facts),
            activation="QInt8" if found.symmetric else "QUInt8",
            symmetric=found.symmetric,
            unsigned=pformat(list(found.unsigned), width=110),
            weight_levels=INT7_MAX_LEVEL if _has_narrow_weights(facts) else INT8_MAX_LEVEL,
            channel_activations=None if found.channel_activations else False,
            biases=found.biases,
            precision=found.precision,
            preset="PERFORMANCE" if found.symmetric else "MIXED",
        )
        return f"{head}{filled}{TAIL}"

    return render


def _olive_config(found: PlacementSummary, file: str, facts: Mapping[str, Any]) -> str:
    """Return the pass of an Olive workflow as JSON (Olive docs, OnnxStaticQuantization)."""
    described = {
        "type": "OnnxStaticQuantization",
        "quant_format": "QDQ",
        "per_channel": True,
        "activation_type": "int8" if found.symmetric else "uint8",
        "weight_type": "int8",
        "op_types_to_quantize": list(found.op_types),
        "nodes_to_exclude": list(found.excluded),
        "reduce_range": _has_narrow_weights(facts),
        "extra_options": {
            "OpTypesToExcludeOutputQuantization": list(found.op_types),
            "ActivationSymmetric": found.symmetric,
            "QuantizeBias": found.biases,
            "ForceQuantizeNoInputCheck": True,
        },
    }
    return json.dumps({"passes": {"qdq_bench_placement": described}}, indent=1) + "\n"


def _tao_spec(found: PlacementSummary, file: str, facts: Mapping[str, Any]) -> str:
    """Return a spec file of TAO, which `qdq quantize` takes too (`harness.compat.tao_specs`)."""
    dtype = {"dtype": "fp8_e4m3fn" if found.precision == "fp8" else found.precision}
    described = {
        "quantize": {
            "model_path": "model.onnx",
            "backend": "modelopt.onnx",
            "mode": "static_ptq",
            "algorithm": "max",
            "layers": [
                {"module_name": op, "weights": dict(dtype), "activations": dict(dtype)} for op in found.op_types
            ],
            "skip_names": [glob.escape(name) for name in found.excluded],
        },
        "dataset": {"calibration_data": "calibration.npz"},
        "results_dir": "results",
    }
    head = f"# qdq quantize {file}\n# Placement of {facts['file']} by qdq-bench; put your paths here.\n"
    return head + yaml.safe_dump(described, sort_keys=False, default_flow_style=None, width=110)


#: Writer of a recipe by the name of the tool.
RECIPES: Mapping[str, Callable[[PlacementSummary, str, Mapping[str, Any]], str]] = {
    "ort": _script(ORT_BODY, "ONNX Runtime", lambda found: found.excluded),
    "modelopt": _script(MODELOPT_BODY, "NVIDIA ModelOpt", lambda found: found.excluded),
    "nncf": _script(NNCF_BODY, "NNCF", lambda found: found.unquantized),
    "olive": _olive_config,
    "ultralytics": _script(ULTRALYTICS_BODY, "Ultralytics", lambda found: found.excluded, "yolo11n.pt"),
    "tao": _tao_spec,
}


SCRIPT_IMPORTS = frozenset({"modelopt", "nncf", "numpy", "olive", "onnx", "onnxruntime", "openvino", "ultralytics"})
"""Packages that the scripts import; a script must not have one of these names."""


def export_recipe(folder: Path, facts: Mapping[str, Any], tool: str, out: Path) -> PlacementSummary:
    """Write the placement of a folder to deploy as a script or configuration file for another tool.

    Args:
        folder: Folder to deploy.
        facts: Content of its `ship.json`, see `harness.results.deploy_folder.read_bundle`.
        tool: Name in `RECIPES`.
        out: File to write: a Python script, or JSON for Olive and YAML for TAO. An existing file is replaced.

    Returns:
        The exported placement.
    """
    if tool not in RECIPES:
        raise UserError(f"--for {tool}: no recipe for it; {suggest_names(tool, RECIPES)}")
    if out.suffix == ".py" and out.stem in SCRIPT_IMPORTS:
        raise UserError(f"--output {out}: a script of this name hides the package {out.stem}; use another name")
    summary = summarize_placement(folder / str(facts["file"]))
    if tool in ("ort", "olive", "nncf", "ultralytics") and summary.precision != "int8":
        raise UserError(f"--for {tool}: it quantizes to int8, but the placement has {summary.precision}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(RECIPES[tool](summary, out.name, facts), encoding="utf-8")
    return summary
