"""Program of AMD Quark's child process: its INT8 configurations for processors.

Source: AMD Quark 0.13, "Quark ONNX, configuration": `U8S8_AAWS` (UINT8 activations with zero point, INT8 weights),
per channel, because one scale for each weight leaves depthwise convolutions without accuracy; with AdaQuant the
"ADAQUANT" form of the same configuration.
"""

from __future__ import annotations

import sys
from typing import Any

from tool_child import iter_batches, serve_request  # type: ignore[import-not-found]


class _Reader:
    """Batches as Quark reads them: the next one, or None after the last, and again from the start."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._request = request
        self.rewind()

    def get_next(self) -> dict[str, Any] | None:
        return next(self._batches, None)

    def rewind(self) -> None:
        self._batches = iter_batches(self._request)

    reset_iter = rewind


def quark_ptq(request: dict[str, Any]) -> None:
    """Run Quark's post-training quantization."""
    _quantize(request, "AAWS")


def quark_adaquant(request: dict[str, Any]) -> None:
    """Run the same and then AdaQuant, which trains the weights and biases of one layer after the other."""
    _quantize(request, "AAWS_ADAQUANT")


def _quantize(request: dict[str, Any], form: str) -> None:
    from quark.onnx import ModelQuantizer
    from quark.onnx.quantization.config import Config, get_default_config

    chosen = get_default_config(f"{'U8S8' if request['activation'] == 'uint8' else 'S8S8'}_{form}")
    chosen.per_channel = True
    chosen.extra_options["UseRandomData"] = False
    ModelQuantizer(Config(global_quant_config=chosen)).quantize_model(
        request["model"], request["output"], _Reader(request)
    )


if __name__ == "__main__":
    serve_request({"quark_ptq": quark_ptq, "quark_adaquant": quark_adaquant}, sys.argv[1])
