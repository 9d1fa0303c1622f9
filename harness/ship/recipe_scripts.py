"""Templates of the scripts that quantize with another tool; see `harness.ship.recipes`."""

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
