"""Builds a model for inspection on one runtime, lets it run, and explains what became of it; and compares two."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import registry, zoo
from harness.api import Candidate, SupportsLayers
from harness.config.sections import PluginSpec
from harness.errors import CandidateError, UserError
from harness.explain.fusion import FusionReport, explain_layers
from harness.explain.layer_timing import time_layers
from harness.graph.io.files import digest_file
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.paths import resolve_path
from harness.timing.provenance import format_options

__all__ = ["PrecisionChange", "compare_reports", "explain_model"]

_NONE: Mapping[str, str] = MappingProxyType({})
_NO_DIMS: Mapping[str, int] = MappingProxyType({})
DEFAULT_TIMING_RUNS = 50
"""Inferences that the time of each layer is the mean of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """One linear operator that runs otherwise in another model."""

    name: str
    before: str
    after: str


def explain_model(
    use: str,
    backend: PluginSpec,
    runs: int = DEFAULT_TIMING_RUNS,
    shapes: Mapping[str, str] = _NONE,
    dims: Mapping[str, int] = _NO_DIMS,
) -> FusionReport:
    """Explain what a runtime makes of a model.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`; Q/DQ or float.
        backend: Benchmarker with parameters; `profile: true` is added where it has that parameter.
        runs: Inferences.
        shapes: Static shapes of dynamic inputs.
        dims: Sizes of dynamic dimensions by symbol.

    Raises:
        UserError: The model or the runtime cannot be used, or the runtime does not tell its layers.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-explain-") as work:
        path = _runtime_file(use, Path(work))
        path = copy_with_static_inputs(path, InputSizes(shapes=shapes, dims=dims), Path(work) / "static.onnx")
        params = dict(backend.params)
        if "profile" in registry.plugin_signature("benchmarker", backend.use).parameters:
            params.setdefault("profile", True)
        made: Any = registry.create_plugin("benchmarker", backend.use, params)
        if not isinstance(made, SupportsLayers):
            raise UserError(f"backend {backend.use!r} does not tell what became of a model: it has no layers()")
        try:
            return _explain_file(made, backend.use, path, Path(work), runs)
        except CandidateError as error:
            raise UserError(f"{use} on {backend.use}: {error}") from error


def compare_reports(before: FusionReport, after: FusionReport) -> tuple[PrecisionChange, ...]:
    """The linear operators that run otherwise, in the order of the first model; those of one model alone as ""."""
    names = [*before.precision, *(name for name in after.precision if name not in before.precision)]
    pairs = ((name, before.precision.get(name, ""), after.precision.get(name, "")) for name in names)
    return tuple(PrecisionChange(name=name, before=old, after=new) for name, old, new in pairs if old != new)


def _explain_file(made: Any, use: str, path: Path, work: Path, runs: int) -> FusionReport:
    candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
    found = time_layers(made, candidate, work, runs)
    facts: Mapping[str, Any] = made.describe()
    dialect = load_dialect(dialect_name_for(made, use, facts))
    return explain_layers(
        found.layers,
        read_qdq_graph(path),
        runtime=_runtime_label(facts),
        quantize_outputs=dialect.quantize_outputs,
        whole_ms=found.whole_ms,
    )


def _runtime_label(facts: Mapping[str, Any]) -> str:
    """Name, version and options, without that of the profile, which is asked for here."""
    options = {name: value for name, value in facts.get("options", {}).items() if name != "profile"}
    return ", ".join(filter(None, (f"{facts['name']} {facts['version']}", format_options(options))))


def _runtime_file(use: str, work: Path) -> Path:
    if use.startswith("zoo:"):
        return zoo.write_model(use.removeprefix("zoo:"), work / "model.onnx")
    return resolve_path(use, Path.cwd())
