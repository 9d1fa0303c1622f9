"""Properties of a backend, and its baseline: the float model at its fastest float precision.

A CPU may report BF16 and be faster at FP32. So if the experiment does not set the precision, the float model is timed
at all of them. The fastest precision is that of the baseline and of the operators that candidates leave in float; each
other precision gets a row, for comparison. If the experiment sets the precision, that one is the baseline.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from harness.base.errors import BuildFailed, UserError
from harness.base.files import explain_write_errors
from harness.base.progress import Observer
from harness.config.sections import Confirmation, PluginSpec
from harness.graph.io.digests import digest_file
from harness.graph.load import load, save_to_folder
from harness.graph.model import Model
from harness.graph.qdq.insert import require_all_nodes
from harness.graph.qdq.space import build_space
from harness.graph.rules.dialects import Dialect, dialect_name_for, load_dialect
from harness.measure.records import MAIN_BENCHMARKER
from harness.measure.turn_log import TurnEvent, encode_turn_event, summarize_turns
from harness.plugins import registry
from harness.plugins.api import Candidate, SupportsCast, capabilities_of, require_timing
from harness.results.journal import read_matching_record
from harness.results.manifest import write_record
from harness.run.confirm.confirmation import TimedRow, confirm
from harness.workers.engines import WorkerSpec
from harness.workers.trial_pool import SpecEngineFactory
from search.space import edges_digest

BASELINE_SCHEDULE = Confirmation(builds=3, rounds=3, samples=5)
CLEAR_RATIO = 1.2
"""Ratio of the second fastest latency to the fastest from which one build decides; rebuilds change it by less."""
CAST_FOLDER_NAME = "cast"
"""Folder of cast models in the scratch folder of a task."""


def runtime_input_file(use: PluginSpec, path: Path, folder: Path) -> Path:
    """Return the file that a benchmarker builds for a model file, for instance a cast copy; it is also delivered.

    Args:
        use: The backend.
        path: File of the model.
        folder: Folder for converted files, each of which is written once.

    Returns:
        The converted file, or `path` if no conversion is needed or it fails; in the latter case the build fails too,
        with the reason.
    """
    benchmarker = registry.create_plugin("benchmarker", use.use, use.params)
    if not isinstance(benchmarker, SupportsCast):
        return path
    try:
        with explain_write_errors(folder):
            return benchmarker.cast(path, folder)
    except BuildFailed:
        return path


def cast_problems(use: PluginSpec, model: Model, precisions: Sequence[str]) -> dict[str, str]:
    """Return the reasons why candidates cannot be cast to float precisions of a backend, without a build.

    Args:
        use: The backend; if its float precision is open, each precision of the device is checked.
        model: The float model.
        precisions: Quantized precisions of the search space.

    Returns:
        Reasons by float precision; empty if all casts are possible.
    """
    made = registry.create_plugin("benchmarker", use.use, use.params)
    if not isinstance(made, SupportsCast):
        return {}
    space = build_space(model, load_dialect(dialect_name_for(made, use.use, {})), precisions=precisions)
    edges = [edge for dimension in space.dimensions for edge in dimension.edges]
    problems = {}
    with TemporaryDirectory(prefix="qdq-cast-") as scratch:
        file = save_to_folder(model, Path(scratch))
        for precision, offered in available_precisions(use).items():
            try:
                read = Path(registry.create_plugin("benchmarker", offered.use, offered.params).cast(file, file.parent))
                if read != file:
                    require_all_nodes(edges, load(read, source=model.source))
            except (BuildFailed, UserError) as error:
                problems[precision] = str(error)
    return problems


def available_precisions(use: PluginSpec) -> dict[str, PluginSpec]:
    """Return the backend at each float precision, or only by the key "" if its precision is fixed or unknown.

    Raises:
        UserError: The backend or a parameter of it is unknown.
    """
    try:
        facts = registry.create_plugin("benchmarker", use.use, use.params).describe()
    except UserError:  # the device is on another machine
        facts = {}
    return _benchmarkers_by_precision(use, facts) if facts.get("float_open", False) else {"": use}


def _benchmarkers_by_precision(use: PluginSpec, facts: Mapping[str, Any]) -> dict[str, PluginSpec]:
    return {
        precision: use.model_copy(update={"params": {**use.params, **params}})
        for precision, params in facts.get("float_params", {}).items()
    }


def select_float_baseline(
    backend: PluginSpec,
    model_file: Path,
    folder: Path,
    open_engines: SpecEngineFactory,
    observer: Observer,
    facts: Mapping[str, Any] | None = None,
) -> Mapping[str, PluginSpec]:
    """Return the backend at its fastest float precision as `MAIN_BENCHMARKER`, and at all others by precision.

    A precision that the experiment sets counts as the fastest. A backend that lists no float precisions is the only
    entry. Measured results and their readings are stored in `float.json`, so that a resumed run has the same baseline.

    Args:
        backend: Backend of the experiment.
        model_file: File of the float model.
        folder: Folder of the task.
        open_engines: Function that opens engines on the machine of the task.
        observer: Receiver of the progress.
        facts: Description of the benchmarker on the machine of the task; None: read on this machine.

    Raises:
        UserError: The stored result is of another model, runtime or device, or the float model fails.
    """
    if facts is None:
        facts = registry.create_plugin("benchmarker", backend.use, backend.params).describe()
    offered = _benchmarkers_by_precision(backend, facts)
    if not offered:
        return {MAIN_BENCHMARKER: backend}
    fastest = str(facts["float_precision"])
    if facts.get("float_open", False) and len(offered) > 1:
        basis = {"model_sha256": digest_file(model_file), "backend": dict(facts)}
        record = read_matching_record(folder / "float.json", basis)
        if record is None:
            record = _measure_precisions(offered, model_file, folder, open_engines, observer)
            write_record(folder / "float.json", {**record, **basis})
        fastest = str(record["fastest"])
    others = {precision: use for precision, use in offered.items() if precision != fastest}
    return {MAIN_BENCHMARKER: offered[fastest], **others}


def _measure_precisions(
    offered: Mapping[str, PluginSpec],
    model_file: Path,
    folder: Path,
    open_engines: SpecEngineFactory,
    observer: Observer,
) -> dict[str, Any]:
    first, *others = offered
    files = {
        name: runtime_input_file(use, model_file, folder / "work" / CAST_FOLDER_NAME) for name, use in offered.items()
    }
    rows = {
        name: TimedRow(
            name=name,
            candidate=Candidate(digest=edges_digest(()), edges=(), source=partial(Path, file)),
            benchmarker=name,
        )
        for name, file in files.items()
    }
    worker = WorkerSpec(benchmarkers={**offered, MAIN_BENCHMARKER: offered[first]}, workdir=folder / "work")
    events: list[TurnEvent] = []
    with observer.work(
        f"float at {', '.join(offered)}", BASELINE_SCHEDULE.builds * BASELINE_SCHEDULE.rounds * (len(offered) + 1)
    ) as step:
        for builds in range(1, BASELINE_SCHEDULE.builds + 1):
            for event in confirm(
                [rows[precision] for precision in others],
                rows[first],
                open_engines=lambda: open_engines(worker),
                schedule=BASELINE_SCHEDULE.model_copy(update={"builds": builds}),
                rng=np.random.default_rng(0),
                done=tuple(events),
            ):
                events.append(event)
                step.advance()
            timed = summarize_turns(events, baseline=first).rows.values()
            best, *rest = sorted(row.latency_ms.value for row in timed)
            if len(rest) == len(others) and all(latency_ms >= CLEAR_RATIO * best for latency_ms in rest):
                break
    latency_ms = {name: row.latency_ms.value for name, row in summarize_turns(events, baseline=first).rows.items()}
    fastest = min(latency_ms, key=lambda name: latency_ms[name])
    shown = ", ".join(f"{name} {value:.3f} ms" for name, value in latency_ms.items())
    observer.say(f"float model: {shown}; the baseline is {fastest}")
    return {
        "fastest": fastest,
        "latency_ms": latency_ms,
        "events": [json.loads(encode_turn_event(event)) for event in events],
    }


def dialect_use(backend: PluginSpec, facts: Mapping[str, Any]) -> str:
    """Return the name of a backend's dialect on the device that `facts` describe."""
    return dialect_name_for(registry.create_plugin("benchmarker", backend.use, backend.params), backend.use, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendProperties:
    """Properties of a backend on which its candidates depend.

    Attributes:
        emulated: Precisions that the device only emulates.
        facts: Result of the benchmarker's `describe`.
        is_in_process: Whether the benchmarker executes no model, and so runs in this process.
    """

    dialect: Dialect
    emulated: frozenset[str]
    facts: Mapping[str, Any]
    is_in_process: bool


def read_runtime(backend: PluginSpec, facts: Mapping[str, Any] | None = None) -> BackendProperties:
    """Return the properties of a backend.

    Args:
        backend: The backend.
        facts: Description of the benchmarker on another machine; None: read on this machine.

    Raises:
        UserError: The dialect of the backend is unknown, or its runtime or device is missing.
    """
    benchmarker = registry.create_plugin("benchmarker", backend.use, backend.params)
    require_timing(backend.use, benchmarker)
    facts = benchmarker.describe() if facts is None else facts
    capabilities = capabilities_of(benchmarker)
    return BackendProperties(
        dialect=load_dialect(dialect_name_for(benchmarker, backend.use, facts), facts),
        emulated=capabilities.emulated,
        facts=facts,
        is_in_process=capabilities.in_process,
    )
