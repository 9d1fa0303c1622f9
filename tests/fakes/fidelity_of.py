"""Quantizes small models end to end, as `qdq run` does, and says how close the results are."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from harness.accuracy.calibration.range_estimators import Ranges, finite_ranges, restrict_space
from harness.accuracy.calibration.ranges import calibrate
from harness.graph.load import load_proto, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import Inserter
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect
from search.space import Resolved

Array = npt.NDArray[np.float32]
Feed = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True)
class Quantizer:
    """A model that is calibrated and ready for placements.

    Attributes:
        folder: Where files are written.
        ranges: As `calibrate` gives them.
        resolved: Every edge that may be quantized.
    """

    folder: Path
    float_file: Path
    inserter: Inserter
    ranges: Ranges
    resolved: Resolved

    def write(self, kept: Collection[str] | None = None) -> Path:
        """Quantize the inputs of these nodes; all that may be by default."""
        edges = [(e, p) for e, p in self.resolved if kept is None or e.consumer in kept]
        return self.inserter.write(tuple(edges), self.folder)

    def decibels(self, path: Path, feeds: Sequence[Feed], *, optimize: bool = False) -> float:
        """Signal to noise of a quantized file on ONNX Runtime, all outputs together."""
        signal = noise = 0.0
        for feed in feeds:
            exact, found = run(self.float_file, feed), run(path, feed, optimize=optimize)
            for name, values in exact.items():
                signal += float(np.square(values, dtype=np.float64).sum())
                noise += float(np.square(values.astype(np.float64) - found[name]).sum())
        return float(10 * np.log10(signal / max(noise, 1e-30)))


def quantizer(
    proto: onnx.ModelProto, dialect: Dialect, feeds: Sequence[Feed], folder: Path, method: str = "minmax"
) -> Quantizer:
    """Load, calibrate and prepare a model."""
    model = load_proto(proto, source="m.onnx", sha256="0")
    space = build_space(model, dialect)
    folder.mkdir(parents=True, exist_ok=True)
    path = save_to_folder(model, folder)
    tensors = {edge.tensor for d in space.dimensions for edge in d.edges} - model.constants.keys()
    ranges = calibrate(path, tensors, feeds, method=method)
    kept = restrict_space(space, ranges)
    return Quantizer(
        folder=folder,
        float_file=path,
        inserter=Inserter(model, dialect, finite_ranges(ranges)),
        ranges=ranges,
        resolved=kept.resolve(kept.quantize_all()),
    )


def write_quantized(
    model: Model, dialect: Dialect, feeds: Sequence[Feed], folder: Path, roles: Collection[str] = ()
) -> Path:
    """Calibrate a model, and quantize all insertion points or those of some roles."""
    space = build_space(model, dialect)
    tensors = {edge.tensor for d in space.dimensions for edge in d.edges} - model.constants.keys()
    inserter = Inserter(model, dialect, calibrate(save_to_folder(model, folder), tensors, feeds))
    placement = space.quantize_roles({*roles}) if roles else space.quantize_all()
    return inserter.write(space.resolve(placement), folder, name="quantized")


def run_openvino(path: Path, feed: Feed) -> list[Array]:
    """The outputs of a file on OpenVINO."""
    import openvino

    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    return list(openvino.Core().compile_model(path, "CPU", hints)(dict(feed)).values())


def run(path: Path, feed: Feed, *, optimize: bool = False) -> dict[str, Array]:
    """The outputs of a file on ONNX Runtime, by name."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))


def scales(path: Path) -> dict[str, tuple[float, int]]:
    """Scale and zero point of each pair of a file, by the tensor that it quantizes."""
    graph = onnx.load(path, load_external_data=False).graph
    values = {tensor.name: tensor for tensor in graph.initializer}
    return {
        node.input[0]: (
            float(numpy_helper.to_array(values[node.input[1]])),
            int(numpy_helper.to_array(values[node.input[2]])),
        )
        for node in graph.node
        if node.op_type == "QuantizeLinear"
    }
