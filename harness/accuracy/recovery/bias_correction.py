"""Bias correction: remove the mean error of each quantized layer's results from its bias.

Nagel et al. 2019, "Data-free quantization through weight equalization and bias correction", arXiv:1906.04721, section
4.2, with means measured on data (appendix D), as in NNCF's `FastBiasCorrection` and `BiasCorrection`. The error is that
of the layer's own result, before an activation or an Add that a runtime fuses with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.accuracy.recovery.pipeline import Feeds, PlacedModel, quantized_layers
from harness.graph.constant_edits import replace_constants, with_own_biases
from harness.graph.load import save_to_folder
from harness.graph.segmented_run import measure_layer_shifts
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process

MAX_SAMPLES = 16
"""Largest number of samples; the activations of all samples are in memory at the same time."""


class FastBiasCorrection:
    """Correction of each layer's bias by the mean error of its results on the float model's activations."""

    keeps_function = False
    sequential = False

    def apply(self, placed: PlacedModel, batches: Sequence[Feeds], folder: Path) -> PlacedModel | None:
        """Correct the biases of the quantized layers, adding biases where there are none.

        See `RecoveryStep.apply` for arguments. The result is None if no layer can have a bias.
        """
        layers = quantized_layers(placed)
        model, biases = with_own_biases(placed.model, layers)
        axes = {node.name: 1 if node.op.startswith("Conv") else -1 for node in layers if node.name in biases}
        if not axes:
            return None
        files = (
            save_to_folder(placed.reference, folder / "reference"),
            replace(placed, model=model).export(folder / "uncorrected.onnx"),
        )
        what = f"bias correction of {model.source}"
        samples = batches[:MAX_SAMPLES]
        shifts = call_in_helper_process(
            what, measure_layer_shifts, *files, axes, samples, self.sequential, factor=RUNTIME_FACTOR
        )
        values = {biases[name]: model.constant_array(biases[name]) for name in shifts}
        corrected = {biases[name]: values[biases[name]] - shift for name, shift in shifts.items()}
        return replace(placed, model=replace_constants(model, corrected))


class SequentialBiasCorrection(FastBiasCorrection):
    """Correction of each layer's bias, in graph order, by its mean error on the results of corrected earlier layers."""

    sequential = True
