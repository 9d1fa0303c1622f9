"""Report of `qdq explain MODEL`: precision and fusion of operators on a runtime, and the difference of two models."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import zoo
from harness.base.errors import CandidateError, UserError
from harness.base.files import read_json
from harness.base.paths import resolve_path
from harness.config.sections import PluginSpec
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.insight.layers import (
    FusionReport,
    explain_layers,
    is_low_precision,
    open_profiled,
    time_layers_isolated,
)
from harness.measure.provenance import count_cores, format_options
from harness.plugins import registry
from harness.plugins.api import SupportsLayers
from harness.results.deploy_folder import FACTS_FILE, bundle_model

DEFAULT_BACKEND = "openvino"
RECORDED_OPTIONS = ("threads", "streams", "precision", "optimization", "optimization_level", "typing", "activation")
"""Options of a record that are used; others may name files, and a shipped folder may come from a stranger."""
FINDING_TITLES = {
    "float operator": "Linear operators that are quantized in the file and run in float",
    "unfused node": "Q or DQ nodes that run as separate layers",
    "reformat": "Layers that only change layout or type",
}


def choose_backend(file: Path, use: str | None, params: Mapping[str, Any]) -> PluginSpec:
    """Return the backend of a report, with the options of the measurement for a shipped or exported model.

    Args:
        file: The model; its runtime is read from `ship.json` in its folder, or from `task.json` of its task.
        use: Name of the backend; None: that of the record, or `DEFAULT_BACKEND` without one.
        params: Parameters, which replace recorded ones. Recorded options are used only for the recorded backend, if
            it has such a parameter, and threads only as far as this machine has cores.

    Raises:
        UserError: The folder to deploy is damaged; or another record is, and `use` is None.
    """
    bundle_model(file)
    folder = file.absolute().parent
    record, key = folder / FACTS_FILE, "runtime"
    if not record.is_file() and folder.name == "models":
        record, key = folder.parent / "task.json", "backend"
    recorded: Mapping[str, Any] = {}
    if file.is_file() and record.is_file():  # neither for zoo:NAME
        try:
            facts = read_json(record)
            runtime: Any = facts.get(key) if isinstance(facts, dict) else None
            if not (isinstance(runtime, dict) and isinstance(runtime.get("options", {}), dict)):
                raise UserError(f"{record}: {key}: not the record of a backend; choose one by --backend")
            recorded = runtime
        except UserError:
            if use is None:
                raise
    name = recorded.get("name")
    if name not in {plugin.name for plugin in registry.installed_plugins("benchmarker")}:
        name = None
    use = use or name or DEFAULT_BACKEND
    if use != name:
        return PluginSpec(use=use, params=dict(params))
    known = registry.plugin_signature("benchmarker", use).parameters
    options = recorded.get("options", {})
    own = {option: options[option] for option in RECORDED_OPTIONS if option in options and option in known}
    for option in ("threads", "streams"):  # in this order: there are at most as many streams as threads
        most = count_cores() if option == "threads" else {"threads": 1, **own, **params}["threads"]
        if isinstance(own.get(option), int) and isinstance(most, int):
            own[option] = min(own[option], most)
    return PluginSpec(use=use, params={**own, **params})


def explain_model(
    use: str,
    backend: PluginSpec,
    runs: int = 50,
    shapes: Mapping[str, str] = MappingProxyType({}),
    dims: Mapping[str, int] = MappingProxyType({}),
) -> FusionReport:
    """Return the precision, fusion and time of a model's layers on a runtime.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`; Q/DQ or float.
        backend: Benchmarker with parameters; `profile: true` is added if it has that parameter.
        runs: Number of inferences, of whose layer times the mean is taken.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
        dims: Sizes of dynamic dimensions by symbol.
    """
    with open_static_file(use, shapes, dims) as (path, work):
        profiled = open_profiled(backend)
        if not isinstance(profiled, SupportsLayers):
            raise UserError(f"backend {backend.use!r} does not report the layers of a model: it has no layers()")
        try:
            layers, whole_ms, facts = time_layers_isolated(backend, path, work, runs)
        except CandidateError as error:
            raise UserError(f"{use} on {backend.use}: {error}") from error
        options = {name: value for name, value in facts.get("options", {}).items() if name != "profile"}
        return explain_layers(
            layers,
            read_qdq_graph(path),
            runtime=", ".join(filter(None, (f"{facts['name']} {facts['version']}", format_options(options)))),
            quantize_outputs=load_dialect(dialect_name_for(profiled, backend.use, facts)).quantize_outputs,
            whole_ms=whole_ms,
        )


@contextmanager
def open_static_file(use: str, shapes: Mapping[str, str], dims: Mapping[str, int]) -> Iterator[tuple[Path, Path]]:
    """Yield the file of a model with static inputs, and a scratch folder, which is removed on exit.

    For the arguments see `explain_model`.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-explain-") as folder:
        work, sizes = Path(folder), InputSizes(shapes=shapes, dims=dims)
        is_zoo, name = use.startswith("zoo:"), use.removeprefix("zoo:")
        path = zoo.write_model(name, work / "model.onnx") if is_zoo else resolve_path(use, Path.cwd())
        yield copy_with_static_inputs(path, sizes, work / "static.onnx"), work


def compare_precisions(before: Mapping[str, str], after: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return the linear operators whose precision differs, with both; "" if a model does not have the operator."""
    return [
        (name, before.get(name, ""), after.get(name, ""))
        for name in {**before, **after}
        if before.get(name, "") != after.get(name, "")
    ]


def report_lines(found: FusionReport, top: int) -> Iterator[str]:
    """Yield text lines: precisions of the operators, findings with reasons, and the slowest layers.

    Args:
        top: Maximum length of a list.
    """
    counts = Counter(found.precision.values())
    text = ", ".join(f"{count} {kind or 'of unnamed precision'}" for kind, count in counts.most_common())
    yield f"{found.runtime}: {len(found.layers)} layers, {found.whole_ms:.3f} ms an inference while profiled"
    quantized = f"quantized in the file {found.quantized_in_file}, in the engine {found.low}"
    yield f"Linear operators: {len(found.precision)}; {quantized}"
    yield f"  they run in: {text}"
    for kind, title in FINDING_TITLES.items():
        entries = [finding for finding in found.findings if finding.kind == kind]
        total = sum(finding.time_ms or 0.0 for finding in entries)
        yield f"{title}: {len(entries)}" + (f", {total:.3f} ms together" if entries else "")
        for finding in entries[:top]:
            time = "        -" if finding.time_ms is None else f"{finding.time_ms:6.3f} ms"
            yield f"  {time}  {finding.name}: {finding.reason}"
        if len(entries) > top:
            yield f"  and {len(entries) - top} more"
    timed = sorted((layer for layer in found.layers if layer.time_ms), key=lambda layer: -(layer.time_ms or 0.0))
    yield f"Where the time goes ({sum(layer.time_ms or 0.0 for layer in timed):.3f} ms in all layers):"
    for layer in timed[:top]:
        mark = "*" if is_low_precision(layer.precision) else " "
        suffix = f" (+{found.fused[layer.name]} Q/DQ nodes)" if layer.name in found.fused else ""
        yield f"  {layer.time_ms:6.3f} ms {mark} {layer.kind} {layer.precision} {layer.name}{suffix}"


def change_lines(before: FusionReport, after: FusionReport, top: int) -> Iterator[str]:
    """Yield text lines about the differences of a second model."""
    yield f"Difference: {before.low} -> {after.low} linear operators quantized, " + (
        f"{len(before.layers)} -> {len(after.layers)} layers, {before.whole_ms:.3f} -> {after.whole_ms:.3f} ms"
    )
    for kind, title in FINDING_TITLES.items():
        counts = [sum(finding.kind == kind for finding in found.findings) for found in (before, after)]
        yield f"  {title}: {counts[0]} -> {counts[1]}"
    changes = compare_precisions(before.precision, after.precision)
    for name, old, new in changes[:top]:
        yield f"  {name}: {old or 'absent'} -> {new or 'absent'}"
    if len(changes) > top:
        yield f"  and {len(changes) - top} more"
