"""Check of models: comparison of their outputs in the runtime with those of a reference execution of the file."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from harness.base.errors import EvaluationFailed, UserError
from harness.base.files import explain_write_errors, read_json
from harness.base.progress import NullProgress, Observer
from harness.base.random_inputs import feeds_digest
from harness.config.sections import Limits, PluginSpec
from harness.graph.io.digests import IR_SUFFIX, digest_file
from harness.graph.qdq.reduce_model import (
    ModelGraph,
    find_exact_outputs,
    find_index_outputs,
    find_random_tensors,
    write_7bit_copy,
)
from harness.measure.provenance import count_cores, machine_lacks_vnni
from harness.measure.records import MAIN_BENCHMARKER, Failed
from harness.plugins import registry
from harness.plugins.api import Array, Candidate, capabilities_of
from harness.results.artifacts import FinalistSet
from harness.results.manifest import write_record
from harness.results.output_check import CHECK_FILE_NAME, OutputCheck, encode_check, not_checked
from harness.run.prepare.float_baseline import available_precisions
from harness.run.prepare.task import Task
from harness.run.verify.dynamic_check import resize_array
from harness.run.verify.output_comparison import (
    LOCALIZATION_LIMIT_S,
    Outputs,
    SuspectModel,
    compare_float,
    compare_with_file,
    find_fault,
    require_outputs,
    write_report,
)
from harness.runtimes.onnxruntime import unfused_execution
from harness.runtimes.openvino import float_execution
from harness.runtimes.shape_set import SampleSizes
from harness.workers.engines import Engines, WorkerSpec, as_outcome
from harness.workers.sandbox import open_engines
from search.space import edges_digest

CHECK_SAMPLE_COUNT = 4
MAX_REPORTS = 3
"""Largest number of wrong models of a task that are reduced to small ones; usually all show the same fault."""
REPORT_FOLDER_NAME = "wrong_result"
"""Folder of small models that show a fault, in the folder of a task."""
FILE_SEARCH_LIMIT_S = 20.0
"""Time limit of the search for the operator of a wrong result in a written file, for which the user waits."""
REFERENCE_THREADS = 4
FLOAT_REFERENCE_LABEL = "the float model in ONNX Runtime"
_IR_REASON = "an OpenVINO IR, whose operators were not compared one by one"
_SATURATION_REASON = "this processor adds products of 8-bit integers in 16 bits; the result is right with"
SATURATION_REASONS: Mapping[Literal["weights", "data"], str] = {
    "weights": f"{_SATURATION_REASON} weights of 7 bits (reduce_range: true)",
    "data": f"{_SATURATION_REASON} data of 7 bits; leave products of two activations float",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """Inputs and limits of the comparison of quantized forms of one float model.

    Attributes:
        float_file: File of the float model in FP32.
        floats: File of the float model by name of each benchmarker of the engines.
        feeds: Calibration samples; the first `CHECK_SAMPLE_COUNT` are used, and the first one resized to the inputs if
            none of them has their sizes.
        folder: Folder of the record `runtime_check.json` and of small models.
        work: Scratch folder, created at the first use.
        limits: Limits of the process that runs ONNX Runtime.
        saturates: Whether the processor adds products of 8-bit integers in 16 bits.
        search_limit_s: Time limit of the search for the operator of a wrong result.
        sizes: See `harness.run.prepare.task.Task`.
    """

    float_file: Path
    floats: Mapping[str, Path]
    feeds: Iterable[Mapping[str, Array]]
    folder: Path
    work: Path
    limits: Limits
    saturates: bool = False
    search_limit_s: float = LOCALIZATION_LIMIT_S
    sizes: SampleSizes | None = None


def make_check_plan(task: Task, folder: Path, limits: Limits, saturates: bool) -> CheckPlan:
    """Return the check plan of a task, with `check` in the task's scratch folder; see `CheckPlan` for the arguments."""
    return CheckPlan(
        float_file=task.float_file,
        floats={name: task.runtime_input_file(task.float_file, name) for name in task.benchmarkers},
        feeds=task.feeds,
        folder=folder,
        work=task.work / "check",
        limits=limits,
        saturates=saturates,
        sizes=task.sizes,
    )


class _ComparedPart(NamedTuple):
    """Part of the models of a task that is compared.

    Attributes:
        outputs: Names of the tensors that are its outputs; none: the part is the whole model.
        drawn: By sample, values of tensors that are inputs of the part.
        skipped: Names of outputs that are not compared.
    """

    outputs: tuple[str, ...] = ()
    drawn: tuple[Mapping[str, Array], ...] = ()
    skipped: frozenset[str] = frozenset()


class RuntimeChecker:
    """Checker of the models of one task; a context manager, because it opens a worker process for ONNX Runtime.

    Earlier checks are read from the record of the plan's folder, unless model, runtime or samples have changed.
    """

    def __init__(self, plan: CheckPlan, engines: Engines, observer: Observer) -> None:
        self._plan = plan
        self._engines = engines
        self._observer = observer
        self._stack = ExitStack()
        self._floats: dict[str, Outputs | Failed] = {}
        self._path = plan.folder / CHECK_FILE_NAME
        self._basis = {
            "model_sha256": digest_file(plan.float_file),
            "backend": dict(engines.describe()),
            "inputs_sha256": feeds_digest(self._feeds),
        }
        body: dict[str, Any] = read_json(self._path) if self._path.exists() else {}
        if {key: body.get(key) for key in self._basis} != self._basis:  # of another float model or runtime
            body = {}
        self._record = {key: OutputCheck(**each) for key, each in body.get("checks", {}).items()}

    def __enter__(self) -> RuntimeChecker:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def recorded_check(self, candidate: Candidate) -> OutputCheck | None:
        """Return the earlier check of a model in the main runtime, or None if it was not checked."""
        return self._record.get(f"{candidate.digest} {MAIN_BENCHMARKER}")

    def check(
        self, candidate: Candidate, benchmarker: str = MAIN_BENCHMARKER, *, name: str = "", again: bool = False
    ) -> OutputCheck:
        """Compare the outputs of a model in the runtime with those of its file, or return the recorded check.

        A new check is written to the record. A model that fails to build or run gets the verdict "not checked".

        Args:
            benchmarker: Name of the runtime among those of the engines.
            name: Name of the model in messages; "": its digest.
            again: Whether a model that could not be checked is tried once more.

        Raises:
            UserError: The disk is full.
        """
        key = f"{candidate.digest} {benchmarker}"
        known = self._record.get(key)
        if known is not None and not (again and known.verdict == "not checked"):
            return known
        started_s = time.monotonic()
        found = as_outcome("check", lambda: self._run_check(candidate, benchmarker))
        if isinstance(found, Failed):
            found = not_checked(found.reason)
        facts = self._engines.describe(benchmarker)
        operators = self._random[2] and f"compared with equal random values of {self._random[2]}"
        found = replace(
            found,
            runtime=f"{facts['name']} {facts['version']}",
            reason="; ".join(filter(None, (found.reason, operators if found.verdict != "not checked" else ""))),
            seconds=round(time.monotonic() - started_s, 3),
        )
        self._record[key] = found
        write_record(
            self._path, {**self._basis, "checks": {each: encode_check(one) for each, one in self._record.items()}}
        )
        if found.is_wrong:
            self._observer.say(f"{name or candidate.digest}: {found}")
        return found

    @property
    def compares_all_outputs(self) -> bool:
        """Return whether every output of the float model is compared as it is.

        Raises:
            EvaluationFailed: The float model does not run in ONNX Runtime.
        """
        outputs = require_outputs(self._float_outputs(""), FLOAT_REFERENCE_LABEL)[0]
        whole = not self._part.skipped and not self._part.outputs
        return whole and all(array.dtype.kind == "f" for array in outputs.values())

    def check_rows(self, table: FinalistSet, again: bool = False) -> None:
        """Check the unchecked rows of a table, and report those that cannot be checked.

        Args:
            again: Whether rows that could not be checked are tried once more.

        Raises:
            UserError: The disk is full.
        """
        before = sum(each.seconds for each in self._record.values())
        with self._observer.work("compare with the files", len(table.rows)) as step:
            for row in table.rows:
                found = self.check(table.candidate(row), row.benchmarker, name=row.id, again=again)
                step.advance(row.id)
                if found.verdict == "not checked":
                    self._observer.say(f"{row.id}: {found}")
        total = sum(each.seconds for each in self._record.values())
        if total > before:
            self._observer.say(f"comparison of {len(self._record)} models with their files: {total:.0f} s")

    def check_written(self, candidate: Candidate, benchmarker: str) -> OutputCheck:
        """Check a file, see `check`; "refused" if it does not build, or does not run though the float model does."""
        found = self.check(candidate, benchmarker)
        if found.is_wrong and candidate.digest != edges_digest(()):
            own = self.check(replace(candidate, digest=edges_digest(())), benchmarker)
            return replace(found, float_verdict=own.verdict if own.is_wrong else "")
        if found.verdict != "not checked":
            return found
        outputs = self._run(candidate.source(), self._feeds, benchmarker)
        if not isinstance(outputs, Failed) or outputs.stage == "timeout":
            return found
        float_fails = isinstance(self._run(self._plan.floats[benchmarker], self._feeds, benchmarker), Failed)
        if float_fails and outputs.stage != "build":
            return found
        return replace(found, verdict="refused", reason=outputs.reason, float_verdict="refused" if float_fails else "")

    def _run_check(self, candidate: Candidate, benchmarker: str) -> OutputCheck:
        path = candidate.source()
        if candidate.digest == edges_digest(()):
            floats = require_outputs(self._float_outputs(""), FLOAT_REFERENCE_LABEL)
            outputs = require_outputs(self._float_outputs(benchmarker), "the engine")
            return compare_float(floats, outputs, **self._scope(benchmarker))
        found = self._judge(path, benchmarker)
        if path.suffix == IR_SUFFIX:
            return replace(found, reason=_IR_REASON) if found.is_wrong else found
        if found.is_wrong and self._plan.saturates:
            target = self._scratch / "narrow.onnx"
            for reduced, remedy in SATURATION_REASONS.items():
                if write_7bit_copy(path, target, reduced) and not self._judge(target, benchmarker).is_wrong:
                    return replace(found, verdict="saturates", reason=remedy)
        if found.is_wrong or found.is_suspect:
            return self._locate_fault(found, path, candidate.digest, benchmarker)
        return found

    def _scope(self, benchmarker: str) -> dict[str, Any]:
        """Return the float precision of a benchmarker, the outputs that are not compared, and groups of samples."""
        shapes = [tuple(array.shape for array in sample.values()) for sample in self._feeds]
        return {
            "precision": str(self._engines.describe(benchmarker).get("float_precision", "")),
            "skipped": self._part.skipped,
            "groups": [] if self._part.outputs else shapes,
        }

    def _judge(self, path: Path, benchmarker: str) -> OutputCheck:
        """Return the check of a file against its reference execution: ONNX in ONNX Runtime, an IR in OpenVINO in float.

        Raises:
            EvaluationFailed: The file does not run in one of them.
        """
        floats, own = require_outputs(self._float_outputs(""), FLOAT_REFERENCE_LABEL), self._float_outputs(benchmarker)
        is_ir = path.suffix == IR_SUFFIX
        if is_ir:
            worker = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: float_execution()}, workdir=self._scratch)
            with open_engines(worker, self._plan.limits) as engines:
                reference = _run_model(engines, path, self._fixed_feeds)
        else:
            reference = self._reference(*self._compared_part(path))
        return compare_with_file(
            floats,
            require_outputs(reference, "its file in ONNX Runtime"),
            require_outputs(self._run(*self._compared_part(path), benchmarker), "the engine"),
            None if isinstance(own, Failed) else own,
            exact=frozenset() if is_ir else find_exact_outputs(path),
            **self._scope(benchmarker),
        )

    @cached_property
    def _random(self) -> tuple[tuple[str, ...], tuple[str, ...], str]:
        return find_random_tensors(self._plan.float_file)

    @cached_property
    def _part(self) -> _ComparedPart:
        """Return the part of the models that is compared.

        Every model gets the same values, those of one run of the float model, in place of the results of random
        operators; the inputs of these operators are compared too. If all outputs depend on indices, the tensors that
        the indices are computed from are compared instead.

        Raises:
            EvaluationFailed: The float model does not run in ONNX Runtime, or has only random outputs.
        """
        results, sources, operators = self._random
        path, target, part = self._plan.float_file, self._scratch / "float.onnx", _ComparedPart()
        if results:
            graph = ModelGraph(path)
            kept = (value.name for value in graph.proto.graph.output if value.name not in results)
            if not (outputs := tuple(dict.fromkeys([*kept, *sources]))):
                raise EvaluationFailed(f"every output is the result of a random operator ({operators})")
            inputs = graph.write_submodel(target, results)
            read = [{name: sample[name] for name in inputs} for sample in self._fixed_feeds]
            drawn = require_outputs(self._reference(target, read), FLOAT_REFERENCE_LABEL)
            if drawn[0].keys() != set(results):
                raise EvaluationFailed(f"no values can replace those of {operators}, which are no tensors")
            part = _ComparedPart(outputs=outputs, drawn=tuple(map(graph.with_types, drawn)))
        floats, feeds = self._write_part(part, path, target)
        skipped, indexed = find_index_outputs(floats)
        found = require_outputs(self._reference(floats, feeds), FLOAT_REFERENCE_LABEL)
        if indexed and not any(a.dtype.kind == "f" and name not in skipped for name, a in found[0].items()):
            return part._replace(outputs=indexed)
        return part._replace(skipped=skipped)

    def _compared_part(self, path: Path) -> tuple[Path, Sequence[Mapping[str, Array]]]:
        """Return the file, or a copy of the part of it that is compared, with its inputs.

        Raises:
            EvaluationFailed: The file lacks a tensor whose values would be replaced.
        """
        if path.suffix != IR_SUFFIX:
            return self._write_part(self._part, path, self._scratch / "cut.onnx")
        if self._part.drawn:
            raise EvaluationFailed(f"an OpenVINO IR, in which no values can replace those of {self._random[2]}")
        return path, self._fixed_feeds

    def _write_part(self, part: _ComparedPart, path: Path, target: Path) -> tuple[Path, Sequence[Mapping[str, Array]]]:
        if not part.outputs:
            return path, self._feeds
        graph = ModelGraph(path)
        drawn = part.drawn or ({},) * len(self._fixed_feeds)
        if not graph.producer.keys() >= drawn[0].keys():
            raise EvaluationFailed(f"no values can replace those of {self._random[2]}, whose results have other names")
        inputs = graph.write_submodel(target, part.outputs, graph.with_types(drawn[0]))
        given = ({**sample, **values} for sample, values in zip(self._fixed_feeds, drawn, strict=True))
        return target, [{name: sample[name] for name in inputs} for sample in given]

    def _locate_fault(self, found: OutputCheck, path: Path, digest: str, benchmarker: str) -> OutputCheck:
        """Return the check with the operator that differs; without one, a suspect model counts as right."""
        if found.is_wrong and sum(bool(each.model) for each in self._record.values()) >= MAX_REPORTS:
            return replace(
                found,
                reason=f"its operator is not searched for: only those of the first {MAX_REPORTS} wrong results are",
            )
        part, feeds = self._compared_part(path)
        if self._plan.sizes is not None:
            feeds = list(filter(self._plan.sizes.fit, feeds))
        suspect = SuspectModel(
            path=part,
            feeds=feeds,
            output=found.output,
            most_db=found.noise_db or 0.0,
            proven=found.is_wrong,
            reference=self._reference,
            engine=lambda file, feeds: self._run(file, feeds, benchmarker),
            work=self._scratch,
            limit_s=self._plan.search_limit_s,
        )
        fault = as_outcome("reduce", lambda: find_fault(suspect))
        if isinstance(fault, Failed):
            return replace(found, reason=f"the search for its operator failed: {fault.reason}")
        if fault is None:
            ended = "the search for its operator ran out of time"
            reason = ended if suspect.is_out_of_time else "no single operator reproduces it"
            return replace(found, reason=reason) if found.is_wrong else found
        file = self._plan.folder / REPORT_FOLDER_NAME / f"{digest}.onnx"
        with explain_write_errors(file):
            write_report(fault, file, self._engines.describe(benchmarker))
        model = str(file.relative_to(self._plan.folder))
        return replace(found, verdict="wrong result", operator=fault.operator, model=model)

    @cached_property
    def _feeds(self) -> Sequence[Mapping[str, Array]]:
        found, sizes = tuple(islice(self._plan.feeds, CHECK_SAMPLE_COUNT)), self._plan.sizes
        if sizes is None or any(map(sizes.fit, found)):
            return found
        return *found, _resize(found[0], sizes)

    @cached_property
    def _fixed_feeds(self) -> Sequence[Mapping[str, Array]]:
        """Return the samples at the sizes of the inputs, for files that have no form with dynamic axes."""
        sizes = self._plan.sizes
        return self._feeds if sizes is None else [_resize(sample, sizes) for sample in self._feeds]

    @cached_property
    def _scratch(self) -> Path:
        self._plan.work.mkdir(parents=True, exist_ok=True)
        return self._plan.work

    def _float_outputs(self, benchmarker: str) -> Outputs | Failed:
        """Return the outputs of the float model in a runtime, or in the reference execution if `benchmarker` is ""."""
        if benchmarker not in self._floats:
            self._floats[benchmarker] = (
                self._run(*self._compared_part(self._plan.floats[benchmarker]), benchmarker)
                if benchmarker
                else self._reference(*self._compared_part(self._plan.float_file))
            )
        return self._floats[benchmarker]

    def _run(self, path: Path, feeds: Sequence[Mapping[str, Array]], benchmarker: str) -> Outputs | Failed:
        return _run_model(self._engines, path, feeds, benchmarker)

    def _reference(self, path: Path, feeds: Sequence[Mapping[str, Array]]) -> Outputs | Failed:
        try:
            return _run_model(self._reference_engines, path, feeds)
        except UserError as error:
            return Failed(stage="start", reason=str(error))

    @cached_property
    def _reference_engines(self) -> Engines:
        """Return ONNX Runtime in a worker process, started at the first use."""
        use = unfused_execution(threads=min(REFERENCE_THREADS, count_cores()))
        worker = WorkerSpec(benchmarkers={MAIN_BENCHMARKER: use}, workdir=self._scratch, sizes=self._plan.sizes)
        return self._stack.enter_context(open_engines(worker, self._plan.limits))


def check_file(
    file: Path,
    float_file: Path,
    feeds: Iterable[Mapping[str, Array]],
    use: PluginSpec,
    *,
    quantized: bool = True,
    sizes: SampleSizes | None = None,
) -> OutputCheck:
    """Compare a written file in a runtime with its own meaning, as a run does.

    If `use` leaves the float precision open, the file is run at each one that the runtime has, and the worst result
    counts. The verdict is "not checked" if the runtime or its device is missing.

    Args:
        file: The written file, with static inputs.
        float_file: The float model from which it was made.
        feeds: Samples; the first `CHECK_SAMPLE_COUNT` are used.
        use: Benchmarker of the runtime with its parameters.
        quantized: Whether the file has Q/DQ pairs.
        sizes: Form of the float model with dynamic axes, if samples have other sizes than `file`.
    """
    plugin = registry.load_plugin("benchmarker", use.use)
    if capabilities_of(plugin).in_process or capabilities_of(plugin).compile_only:
        return not_checked(f"backend {use.use!r} runs no model")
    if sizes is not None and not capabilities_of(plugin).dynamic:
        feeds, sizes = [_resize(sample, sizes) for sample in islice(feeds, CHECK_SAMPLE_COUNT)], None
    digest = digest_file(file)[:16] if quantized else edges_digest(())
    try:
        # A runtime that reads cast files gets the file as it is.
        offered = {"": use} if hasattr(plugin, "cast") else available_precisions(use)
        benchmarkers = dict(zip([MAIN_BENCHMARKER, *list(offered)[1:]], offered.values(), strict=True))
        with tempfile.TemporaryDirectory(prefix="qdq-check-") as scratch:
            plan = CheckPlan(
                float_file=float_file,
                floats=dict.fromkeys(benchmarkers, float_file if quantized else file),
                feeds=feeds,
                folder=Path(scratch),
                work=Path(scratch),
                limits=Limits(),
                saturates=machine_lacks_vnni(),
                search_limit_s=FILE_SEARCH_LIMIT_S,
                sizes=sizes,
            )
            worker = WorkerSpec(benchmarkers=benchmarkers, workdir=plan.work, sizes=sizes)
            with (
                open_engines(worker, plan.limits) as engines,
                RuntimeChecker(plan, engines, NullProgress()) as checker,
            ):
                candidate = Candidate(digest=digest, edges=(), source=lambda: file)
                checks = {name: checker.check_written(candidate, name) for name in benchmarkers}
    except UserError as error:  # the runtime or its device is missing, or another process killed the worker
        return not_checked(str(error))
    name, found = min(checks.items(), key=lambda check: (check[1].is_usable, check[1].verdict == "right"))
    where = found.runtime if name == MAIN_BENCHMARKER else f"{found.runtime} {name}"
    return replace(found, runtime=where, model="")  # a small model is gone with the scratch folder


def _resize(sample: Mapping[str, Array], sizes: SampleSizes) -> dict[str, Array]:
    return {name: resize_array(array, sizes.shapes[name]) for name, array in sample.items()}


def runs_no_model(use: PluginSpec) -> bool:
    """Return whether a benchmarker executes no model, such as a simulation or a replay."""
    return capabilities_of(registry.load_plugin("benchmarker", use.use)).in_process


def _run_model(
    engines: Engines, path: Path, feeds: Sequence[Mapping[str, Array]], benchmarker: str = MAIN_BENCHMARKER
) -> Outputs | Failed:
    built = engines.build(Candidate(digest=path.stem, edges=(), source=lambda: path, alone=True), benchmarker)
    if isinstance(built, Failed):
        return built
    found = []
    try:
        for sample in feeds:
            outputs = engines.infer(built.handle, sample)
            if isinstance(outputs, Failed):
                return outputs
            found.append(outputs)
    finally:
        engines.release(built.handle)
    return found
