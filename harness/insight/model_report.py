"""Report of `qdq explain MODEL`: precision and fusion of operators on a runtime, and the difference of two models.

It is derived from the layers of a built engine: their kinds, and their times without disturbances.
"""

from __future__ import annotations

import re
import statistics
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from harness import zoo
from harness.base.errors import CandidateError, UserError
from harness.base.files import read_json
from harness.base.paths import resolve_path
from harness.config.sections import PluginSpec
from harness.graph.io.digests import digest_file
from harness.graph.model import Model
from harness.graph.passes.dimension_sizes import InputSizes
from harness.graph.passes.static_shapes import copy_with_static_inputs
from harness.graph.qdq.qdq_graph import QUANTIZE, QDQGraph, read_qdq_graph
from harness.graph.rules.dialects import dialect_name_for, load_dialect
from harness.measure.provenance import count_cores, format_options
from harness.measure.records import Failed
from harness.plugins import registry
from harness.plugins.api import Candidate, Layer, SupportsLayers
from harness.results.deploy_folder import FACTS_FILE, bundle_model
from harness.results.task_files import EdgeFusion
from harness.workers.engines import as_outcome
from harness.workers.helper_process import RUNTIME_FACTOR, call_in_helper_process
from search.space import Resolved

Kind = Literal["compute", "qdq", "reformat", "other"]

COMPUTE_PATTERN = re.compile(
    r"(conv(olution|transpose)?$|qlinearconv|gemm|matmul|matrixmultiply|matrixmultiplication|fullyconnected|"
    r"deconvolution|attention|lstm|gru)",
    re.IGNORECASE,
)
QDQ_PATTERN = re.compile(r"(fakequantize|quantizelinear|^de?quantize|^scale$)", re.IGNORECASE)
REFORMAT_PATTERN = re.compile(r"(reorder|reformat|^convert$|^cast$|^transpose$|nopreformat)", re.IGNORECASE)
# Precisions that only Q/DQ pairs cause, in the names of OpenVINO, ONNX Runtime and TensorRT.
LOW_PRECISIONS = frozenset({
    "int8", "uint8", "i8", "u8", "fp8", "f8e4m3", "f8e4m3fn", "f8e5m2", "float8e4m3fn", "float8e5m2", "int4", "uint4",
    "i4", "u4", "fp4",
})  # fmt: skip
MAX_TIMED_ENGINES = 3
MAX_QUIET_STRETCH = 1.1
LAYER_TIMING_RUNS = 50
DEFAULT_BACKEND = "openvino"
RECORDED_OPTIONS = ("threads", "streams", "precision", "optimization", "optimization_level", "typing", "activation")
"""Options of a record that are used; others may name files, and a shipped folder may come from a stranger."""
FINDING_TITLES = {
    "float operator": "Linear operators that are quantized in the file and run in float",
    "unfused node": "Q or DQ nodes that run as separate layers",
    "reformat": "Layers that only change layout or type",
}


def is_low_precision(precision: str) -> bool:
    """Return whether a layer computes on quantized data."""
    return precision.lower() in LOW_PRECISIONS


def classify_layer(layer: Layer, pairs: Collection[str], nodes: Collection[str]) -> Kind:
    """Return the kind of a layer.

    A layer whose origin consists of Q/DQ nodes alone is an unfused pair, whatever its type ("Subgraph" in OpenVINO,
    "Scale" in TensorRT). A layer without a node of the model was added by the runtime.

    Args:
        pairs: Names of the model's Q/DQ nodes.
        nodes: Names of its other nodes.
    """
    if QDQ_PATTERN.search(layer.kind) or (layer.origin and all(name in pairs for name in layer.origin)):
        return "qdq"
    if COMPUTE_PATTERN.search(layer.kind):
        return "compute"
    # A Transpose or Cast of the model itself is no reformat.
    is_added = re.search("reorder|reformat", layer.kind, re.IGNORECASE) or not any(n in nodes for n in layer.origin)
    return "reformat" if REFORMAT_PATTERN.search(layer.kind) and is_added else "other"


def time_layers(benchmarker: Any, candidate: Candidate, workdir: Path, runs: int) -> tuple[tuple[Layer, ...], float]:
    """Build a candidate in this process, run it, and return the layers with mean times and the median of an inference.

    Runtimes report means, in which an interruption adds to the layer that it falls in. An engine whose mean is 10 %
    above its median is therefore built and timed again, up to three times; the times with the smallest ratio of mean
    and median are returned. The benchmarker is a `harness.plugins.api.SupportsLayers`.

    Raises:
        CandidateError: The candidate cannot be built or run.
    """
    best_stretch = float("inf")
    found: tuple[tuple[Layer, ...], float] = ((), 0.0)
    for number in range(MAX_TIMED_ENGINES):
        folder = workdir / str(number)
        folder.mkdir(parents=True, exist_ok=True)
        artifact = benchmarker.build(candidate, folder)
        with benchmarker.open(artifact) as probe:
            readings_ms = probe.sample(runs)
            whole_ms = statistics.median(readings_ms)
            stretch = statistics.fmean(readings_ms) / whole_ms
            if stretch < best_stretch:
                best_stretch, found = stretch, (tuple(benchmarker.layers(artifact)), whole_ms)
        if stretch < MAX_QUIET_STRETCH:
            break
    return found


def open_profiled(backend: PluginSpec) -> Any:
    """Return the benchmarker of a backend, with per-layer counters switched on if it has that parameter."""
    params = dict(backend.params)
    if "profile" in registry.plugin_signature("benchmarker", backend.use).parameters:
        params.setdefault("profile", True)
    return registry.create_plugin("benchmarker", backend.use, params)


def read_layers(backend: PluginSpec, candidate: Candidate, workdir: Path) -> tuple[Layer, ...] | Failed:
    """Return the layers of a candidate's engine with their times; none if the runtime does not report layers.

    Args:
        backend: Backend with the parameters of the engines that are compared; counters are switched on here.
    """
    params = {name: value for name, value in backend.params.items() if name != "profile"}
    backend = backend.model_copy(update={"params": params})
    if not isinstance(open_profiled(backend), SupportsLayers):
        return ()
    return as_outcome("build", lambda: time_layers_isolated(backend, candidate.source(), workdir, LAYER_TIMING_RUNS)[0])


def time_layers_isolated(
    backend: PluginSpec, path: Path, workdir: Path, runs: int
) -> tuple[tuple[Layer, ...], float, Mapping[str, Any]]:
    """Return the layers and the time of a file by `time_layers` in the helper process, and the facts of the runtime.

    Raises:
        CandidateError: The candidate cannot be built or run.
        UserError: The process crashed or exceeded a limit.
    """
    what = f"{path.name}: the build and run on {backend.use}"
    return call_in_helper_process(what, _time_layers, backend, path, workdir, runs, factor=RUNTIME_FACTOR)


def _time_layers(
    backend: PluginSpec, path: Path, workdir: Path, runs: int
) -> tuple[tuple[Layer, ...], float, Mapping[str, Any]]:
    made = open_profiled(backend)
    candidate = Candidate(digest=digest_file(path)[:16], edges=(), source=lambda: path)
    return *time_layers(made, candidate, workdir, runs), dict(made.describe())


def iter_edge_fusions(resolved: Resolved, model: Model, layers: Sequence[Layer]) -> Iterator[EdgeFusion]:
    """Yield the fusion state of each quantized edge, from the precision of the layer that its consumer became.

    The state is "fused" if that layer runs in a low precision, else "not fused". It is "unknown" if no layer names the
    consumer, or the layer has no precision, and for outputs of the model.

    Args:
        resolved: Quantized edges with their precision.
        model: Model that the edges are of.
        layers: Layers of the quantized engine; those without an origin are ignored.
    """
    owner = {name: layer for layer in layers for name in layer.origin}
    names = {node.name for node in model.nodes}
    for edge, precision in resolved:
        layer = owner.get(edge.consumer) if edge.consumer in names else None
        fusion = "unknown"
        if layer is not None and layer.precision:
            fusion = "fused" if is_low_precision(layer.precision) else "not fused"
        yield EdgeFusion(
            tensor=edge.tensor,
            consumer=edge.consumer,
            slot=edge.slot,
            precision=precision,
            fusion=fusion,
            layer="" if layer is None else f"{layer.kind} ({layer.precision})",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionFinding:
    """Deviation of an engine from the Q/DQ pairs of its model.

    Attributes:
        kind: "float operator" (quantized in the file, computed in float), "unfused node" (a Q or DQ node that is a
            separate layer), or "reformat" (a layer that only changes layout or type).
        name: Name of the model's node, or of the layer if no node became it.
        reason: Probable reason, inferred from model and engine.
        time_ms: Time of its layer; None if it was not measured.
    """

    kind: str
    name: str
    reason: str
    time_ms: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FusionReport:
    """Precision and fusion of the operators of a model in an engine.

    Attributes:
        runtime: Name, version and options of the runtime.
        layers: Layers of the engine, in order.
        fused: Number of Q and DQ nodes of the file that a layer absorbed, by name of the layer.
        precision: Precision of the layer that computes a linear operator, by name of the operator; "" if unknown.
        quantized_in_file: Number of linear operators whose data and weight are quantized in the file.
        findings: Deviations, the slowest first.
        whole_ms: Median time of one inference of the profiled engine in ms.
    """

    runtime: str
    layers: tuple[Layer, ...]
    fused: dict[str, int]
    precision: dict[str, str]
    quantized_in_file: int
    findings: tuple[FusionFinding, ...]
    whole_ms: float

    @property
    def low(self) -> int:
        """Return the number of linear operators that run quantized."""
        return sum(map(is_low_precision, self.precision.values()))


def explain_layers(
    layers: Sequence[Layer], graph: QDQGraph, *, runtime: str, quantize_outputs: bool, whole_ms: float
) -> FusionReport:
    """Return the report on the operators of a file in an engine, with deviations and their reasons.

    Args:
        graph: Q/DQ structure of the file.
        runtime: Name, version and options, as text.
        quantize_outputs: Whether the runtime fuses a linear operator only if its output is quantized.
        whole_ms: Median time of one inference in ms.
    """
    layer_of = _layer_of_operator(layers, graph)
    precision = {name: layer_of[name].precision if name in layer_of else "" for name in graph.linear}
    found: list[tuple[str, str, str, Layer]] = []
    for name, (data, weight) in graph.linear.items():
        if name in layer_of and (data or weight) and not is_low_precision(precision[name]):
            reason = _float_reason(name, graph, quantize_outputs, precision)
            found.append(("float operator", name, reason, layer_of[name]))
    fused = {}
    for layer in layers:
        kind = classify_layer(layer, graph.pairs, graph.operators)
        absorbed = sum(name in graph.pairs for name in layer.origin)
        if kind == "qdq":
            name = next((origin for origin in (*layer.origin, layer.name) if origin in graph.pairs), layer.name)
            if reason := _unfused_reason(name, graph, precision):
                found.append(("unfused node", name, reason, layer))
        elif absorbed:
            fused[layer.name] = absorbed
        if kind == "reformat":
            found.append(("reformat", layer.name, f"{layer.kind} added by the runtime", layer))
    found.sort(key=lambda each: -(each[-1].time_ms or 0.0))
    return FusionReport(
        runtime=runtime,
        layers=tuple(layers),
        fused=fused,
        precision=precision,
        quantized_in_file=sum(data is not None and weight is not None for data, weight in graph.linear.values()),
        findings=tuple(
            FusionFinding(kind=kind, name=name, reason=reason, time_ms=layer.time_ms)
            for kind, name, reason, layer in found
        ),
        whole_ms=whole_ms,
    )


def _layer_of_operator(layers: Sequence[Layer], graph: QDQGraph) -> dict[str, Layer]:
    """Return the layer of each linear operator by name; if several name it, one that computes.

    Operators that no layer names are found by the names of nodes that were folded into them.
    """
    computing = [each for each in layers if classify_layer(each, graph.pairs, graph.operators) == "compute"]
    layer_of: dict[str, Layer] = {}
    for layer in layers:
        computes = layer in computing
        for origin in (*layer.origin, layer.name):
            name = origin
            while computes and name and name not in graph.operators:
                name = name.rpartition("/")[0]  # runtimes add suffixes, as in "MatMul_7/DequantizationMultiply"
            name = name or origin
            if name in graph.linear and (computes or name not in layer_of):
                layer_of[name] = layer
    left = [layer for layer in computing if layer not in layer_of.values()]
    before = -1
    while len(layer_of) > before:  # a match may leave a single candidate for another layer
        before = len(layer_of)
        for layer in left:
            named = [name for origin in (*layer.origin, layer.name) for name in graph.folded_into.get(origin, ())]
            unmatched = [name for name in dict.fromkeys(named) if name not in layer_of]
            if len(unmatched) == 1 and layer not in layer_of.values():  # two candidates are ambiguous
                layer_of[unmatched[0]] = layer
    return layer_of


def _float_reason(name: str, graph: QDQGraph, quantize_outputs: bool, precision: Mapping[str, str]) -> str:
    """Return the most reliable reason why a linear operator does not run quantized."""
    data, weight = graph.linear[name]
    if data is None or weight is None:
        return f"only its {'weight' if data is None else 'data'} is quantized in the file"
    for pair, text in graph.unfusable_reasons.items():
        if name in graph.pair_neighbours[pair][1]:
            return f"{pair}: {text}"
    readers_of_output = graph.linear_readers.get(name, ())
    if quantize_outputs and QUANTIZE not in readers_of_output:
        readers = ", ".join(dict.fromkeys(readers_of_output)) or "the model's output"
        return f"its output is not quantized (read by {readers}), and this runtime fuses only where it is"
    operator = graph.operators[name]
    alike = sum(graph.operators.get(other) == operator and is_low_precision(low) for other, low in precision.items())
    if alike:
        return f"its neighbors match no fusion pattern of the runtime; those of {alike} other {operator} do"
    return f"the runtime has no quantized kernel for {operator} with {data} data and {weight} weight"


def _unfused_reason(name: str, graph: QDQGraph, precision: Mapping[str, str]) -> str:
    """Return the reason why a Q or DQ node runs as a separate layer, or ""."""
    if name in graph.unfusable_reasons:
        return graph.unfusable_reasons[name]
    if name not in graph.pair_neighbours:
        return "added by the runtime between a quantized layer and a float one"
    source, users = graph.pair_neighbours[name]
    in_float = [user for user in users if precision.get(user) and not is_low_precision(precision[user])]
    if in_float:
        return f"its consumer {in_float[0]} runs in {precision[in_float[0]]}"
    if source.startswith("input "):
        return f"{source} is float, so a separate layer quantizes it"
    unknown = [user for user in users if not precision.get(user)]
    if unknown:
        operators = ", ".join(dict.fromkeys(graph.operators.get(user, user) for user in unknown))
        return f"no quantized kernel includes it; it is read by {operators}"
    return f"the kernel of its producer {source} does not write a quantized output"


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
