"""Report of `qdq explain MODEL`: precision and fusion of operators on a runtime, and the difference of two models."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness import zoo
from harness.base.errors import CandidateError, UserError
from harness.base.files import read_json
from harness.base.paths import resolve_path
from harness.config.sections import PluginSpec
from harness.graph.io.digests import digest_file
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.insight.compiled import CompiledReport, explain_compilation
from harness.insight.fusion import FusionReport, explain_layers
from harness.insight.layers import is_low_precision, open_profiled, time_layers_isolated
from harness.measure.provenance import count_cores, format_options
from harness.plugins import registry
from harness.plugins.api import Candidate, SupportsLayers
from harness.results.deploy_folder import FACTS_FILE, bundle_model

_NONE: Mapping[str, str] = MappingProxyType({})
_NO_DIMS: Mapping[str, int] = MappingProxyType({})
DEFAULT_TIMING_RUNS = 50
DEFAULT_BACKEND = "openvino"
RECORDED_OPTIONS = ("threads", "streams", "precision", "optimization", "optimization_level", "typing", "activation")
"""Options of a record that are used; others may name files, and a shipped folder may come from a stranger."""
FINDING_TITLES = {
    "float operator": "Linear operators that are quantized in the file and run in float",
    "unfused node": "Q or DQ nodes that run as separate layers",
    "reformat": "Layers that only change layout or type",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionChange:
    """Linear operator whose precision differs between two models; "" if a model does not have it."""

    name: str
    before: str
    after: str


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
    recorded: Mapping[str, Any] = {}
    bundle_model(file)
    try:
        recorded = _read_runtime(file)
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


def _read_runtime(file: Path) -> Mapping[str, Any]:
    """Return the record of the benchmarker that measured a model, or {} if there is none.

    Raises:
        UserError: A record is damaged.
    """
    if not file.is_file():  # zoo:NAME
        return {}
    folder = file.absolute().parent
    record, key = folder / FACTS_FILE, "runtime"
    if not record.is_file() and folder.name == "models":
        record, key = folder.parent / "task.json", "backend"
    if not record.is_file():
        return {}
    facts = read_json(record)
    runtime: Any = facts.get(key) if isinstance(facts, dict) else None
    if not (isinstance(runtime, dict) and isinstance(runtime.get("options", {}), dict)):
        raise UserError(f"{record}: {key}: not the record of a backend; choose one by --backend")
    return dict(runtime)


def explain_model(
    use: str,
    backend: PluginSpec,
    runs: int = DEFAULT_TIMING_RUNS,
    shapes: Mapping[str, str] = _NONE,
    dims: Mapping[str, int] = _NO_DIMS,
) -> FusionReport:
    """Return the precision, fusion and time of a model's layers on a runtime.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`; Q/DQ or float.
        backend: Benchmarker with parameters; `profile: true` is added if it has that parameter.
        runs: Number of inferences, of whose layer times the mean is taken.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
        dims: Sizes of dynamic dimensions by symbol.

    Raises:
        UserError: The model or the runtime cannot be used, or the runtime does not report layers.
    """
    with open_static_file(use, shapes, dims) as (path, work):
        if not isinstance(open_profiled(backend), SupportsLayers):
            raise UserError(f"backend {backend.use!r} does not report the layers of a model: it has no layers()")
        try:
            return _explain_file(backend, path, work, runs)
        except CandidateError as error:
            raise UserError(f"{use} on {backend.use}: {error}") from error


def compile_report(
    use: str, backend: PluginSpec, shapes: Mapping[str, str] = _NONE, dims: Mapping[str, int] = _NO_DIMS
) -> CompiledReport:
    """Return what a compiler makes of a model; arguments and errors are those of `explain_model`."""
    compiler = registry.create_plugin("benchmarker", backend.use, backend.params)
    with open_static_file(use, shapes, dims) as (path, _):
        try:
            return explain_compilation(path, compiler.compile(path))
        except CandidateError as error:
            raise UserError(f"{use} on {backend.use}: {error}") from error


@contextmanager
def open_static_file(use: str, shapes: Mapping[str, str], dims: Mapping[str, int]) -> Iterator[tuple[Path, Path]]:
    """Yield the file of a model with static inputs, and a scratch folder, which is removed on exit.

    For the arguments see `explain_model`.

    Raises:
        UserError: The model is missing, or a size is not given.
    """
    with tempfile.TemporaryDirectory(prefix="qdq-explain-") as folder:
        work, sizes = Path(folder), InputSizes(shapes=shapes, dims=dims)
        yield copy_with_static_inputs(_runtime_file(use, work), sizes, work / "static.onnx"), work


def compare_reports(
    before: FusionReport | CompiledReport, after: FusionReport | CompiledReport
) -> tuple[PrecisionChange, ...]:
    """Return the linear operators whose precision differs, in the order of the first model."""
    names = [*before.precision, *(name for name in after.precision if name not in before.precision)]
    pairs = ((name, before.precision.get(name, ""), after.precision.get(name, "")) for name in names)
    return tuple(PrecisionChange(name=name, before=old, after=new) for name, old, new in pairs if old != new)


def _explain_file(backend: PluginSpec, path: Path, work: Path, runs: int) -> FusionReport:
    candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
    found, facts = time_layers_isolated(backend, candidate, work, runs)
    dialect = load_dialect(dialect_name_for(open_profiled(backend), backend.use, facts))
    return explain_layers(
        found.layers,
        read_qdq_graph(path),
        runtime=_runtime_label(facts),
        quantize_outputs=dialect.quantize_outputs,
        whole_ms=found.whole_ms,
    )


def _runtime_label(facts: Mapping[str, Any]) -> str:
    """Return name, version and options, without the option of the profile, which is set here."""
    options = {name: value for name, value in facts.get("options", {}).items() if name != "profile"}
    return ", ".join(filter(None, (f"{facts['name']} {facts['version']}", format_options(options))))


def _runtime_file(use: str, work: Path) -> Path:
    if use.startswith("zoo:"):
        return zoo.write_model(use.removeprefix("zoo:"), work / "model.onnx")
    return resolve_path(use, Path.cwd())


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
            yield f"  {_format_ms(finding.time_ms)}  {finding.name}: {finding.reason}"
        if len(entries) > top:
            yield f"  and {len(entries) - top} more"
    timed = sorted((layer for layer in found.layers if layer.time_ms), key=lambda layer: -(layer.time_ms or 0.0))
    yield f"Where the time goes ({sum(layer.time_ms or 0.0 for layer in timed):.3f} ms in all layers):"
    for layer in timed[:top]:
        mark = "*" if is_low_precision(layer.precision) else " "
        suffix = f" (+{found.fused[layer.name]} Q/DQ nodes)" if layer.name in found.fused else ""
        yield f"  {_format_ms(layer.time_ms)} {mark} {layer.kind} {layer.precision} {layer.name}{suffix}"


def change_lines(
    before: FusionReport, after: FusionReport, changes: Sequence[PrecisionChange], top: int
) -> Iterator[str]:
    """Yield text lines about the differences of a second model."""
    yield f"Difference: {before.low} -> {after.low} linear operators quantized, " + (
        f"{len(before.layers)} -> {len(after.layers)} layers, {before.whole_ms:.3f} -> {after.whole_ms:.3f} ms"
    )
    for kind, title in FINDING_TITLES.items():
        counts = [sum(finding.kind == kind for finding in found.findings) for found in (before, after)]
        yield f"  {title}: {counts[0]} -> {counts[1]}"
    for change in changes[:top]:
        yield f"  {change.name}: {change.before or 'absent'} -> {change.after or 'absent'}"
    if len(changes) > top:
        yield f"  and {len(changes) - top} more"


def report_data(found: FusionReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return asdict(found)


def _format_ms(time_ms: float | None) -> str:
    return "        -" if time_ms is None else f"{time_ms:6.3f} ms"
