"""Recordings are complete, continue after an interruption, and are refused with other inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import qdq, save_chain

from harness.base.errors import UserError
from harness.base.progress import NullProgress
from harness.config.sections import Confirmation, TurnSchedule
from harness.graph.builder import GraphBuilder
from harness.measure.records import Failed, Measured
from harness.replay.record_table import most_influential, neighbours, record, sensitivity
from harness.replay.replay import Landscape
from harness.run.prepare.study_task import STUDY_LIMITS, make_study
from harness.run.search.loop import COLD_START_EVALUATIONS
from harness.runtimes.replay import BenchmarkTable, read_table
from harness.workers.sandbox import InProcess
from search.space import Dimension, Edge, Placement, Space

PARAMS = {"seed": 5, "noise": 0.0}


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    builder = GraphBuilder("net", seed=1)
    x = builder.input("x", (1, 3, 8, 8))
    for _ in range(3):
        x = builder.op("Add", builder.op("Relu", builder.conv(x, 3, 3, pad=1)), x)
    builder.output(builder.op("GlobalAveragePool", builder.conv(x, 4, 1)))
    return builder.save(tmp_path / "net.onnx")


class Listening(NullProgress):
    """Stores the messages."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def recorded(model: Path, out: Path, dimensions: int = 2, search: int = 0, **params: Any) -> BenchmarkTable:
    study = make_study(str(model), backend="simulated", params={**PARAMS, **params})
    return read_table(record(study, out, dimensions, NullProgress(), search=search))


def inside(table: BenchmarkTable) -> set[str]:
    """Return the digests of the placements that a table enumerates."""
    subspace = table.subspace
    return {subspace.full_space.digest(subspace.to_full_space(p)) for p in subspace.placements()}


def fail_builds(monkeypatch: pytest.MonkeyPatch, fails: Callable[[str], bool]) -> None:
    """Let builds of placements fail whose digest a function chooses."""
    build = InProcess.build

    def some(self: InProcess, candidate: Any, *args: Any) -> Any:
        return Failed(stage="build", reason="gone") if fails(candidate.digest) else build(self, candidate, *args)

    monkeypatch.setattr(InProcess, "build", some)


def outcome_of(table: BenchmarkTable, digest: str) -> Measured:
    outcome = table.rows[digest].outcome
    assert isinstance(outcome, Measured)
    return outcome


def screened(table: BenchmarkTable) -> set[str]:
    """Return the digests of the anchors of a table and of their neighbours."""
    space = table.subspace.full_space
    anchors = [Placement(anchor) for anchor in table.metadata.anchors.values()]
    return {space.digest(p) for anchor in anchors for p in (anchor, *neighbours(space, anchor))}


def test_table_is_complete_and_varies_most_sensitive_dimensions_around_best(model, tmp_path):
    study, observer = make_study(str(model), backend="simulated", params=PARAMS), Listening()
    table = read_table(record(study, tmp_path / "t.parquet", 2, observer))
    facts, space = table.metadata, table.subspace.full_space
    assert (facts.model, facts.source, facts.dialect, facts.precision) == ("net", str(model), "openvino", "int8")
    assert facts.backend["name"] == "simulated"
    assert len(facts.varied) == 2
    assert set(facts.anchors) == {"float", "all", "linear"}
    assert len(facts.sensitivity) == len(facts.dimensions) > 3
    assert {"cpu", "packages"} <= set(facts.environment)
    for digest, row in table.rows.items():
        assert space.digest(Placement(row.choices)) == digest
        outcome = outcome_of(table, digest)
        assert len(outcome.samples_ms) in (7, 20), "one of the fastest has a sample for each turn of the confirmation"
        assert list(set(outcome.samples_ms)) == pytest.approx([outcome.info["truth_ms"]], rel=1e-6)
    assert sorted(row.number for row in table.rows.values()) == list(range(len(table.rows)))
    latency_ms = {digest: outcome_of(table, digest).samples_ms[0] for digest in screened(table)}
    assert latency_ms[space.digest(Placement(facts.base))] == min(latency_ms.values())
    least = min(facts.sensitivity[name] for name in facts.varied)
    assert all(value <= least for name, value in facts.sensitivity.items() if name not in facts.varied)
    assert not list(tmp_path.glob("*.recording"))
    assert not [text for text in observer.said if "float model takes" in text or "optimum" in text]


def test_search_option_finds_faster_base_placement(model, tmp_path):
    def best_ms(table: BenchmarkTable) -> float:
        return min(outcome_of(table, digest).info["truth_ms"] for digest in table.rows)

    rugged = {"effect": 0.2}
    plain = recorded(model, tmp_path / "plain.parquet", dimensions=1, **rugged)
    searched = recorded(model, tmp_path / "searched.parquet", dimensions=1, search=60, **rugged)
    assert best_ms(searched) < best_ms(plain)
    fixed = searched.subspace.full_space.digest(Placement(searched.metadata.base))
    assert outcome_of(searched, fixed).info["truth_ms"] == best_ms(searched), "the others are fixed at the best known"
    assert set(searched.metadata.anchors) == {"float", "all", "linear"}, "the found placement is no initial placement"
    recorded(model, tmp_path / "searched.parquet", dimensions=1, search=60, **rugged)


class Cut(Exception):
    """Interruption of a recording."""


def test_interrupted_recording_resumes(model, tmp_path, monkeypatch):
    whole = recorded(model, tmp_path / "whole.parquet", dimensions=3)
    built: list[str] = []

    def count(digest: str) -> bool:
        built.append("" if len(built) == 17 else digest)
        if not built[-1]:
            raise Cut
        return False

    fail_builds(monkeypatch, count)
    with pytest.raises(Cut):
        recorded(model, tmp_path / "cut.parquet", dimensions=3)
    assert not (tmp_path / "cut.parquet").exists()
    resumed = recorded(model, tmp_path / "cut.parquet", dimensions=3)
    once = Counter(built[6:])  # before, the noise floor has built the float model six times
    assert len(once) == len(whole.rows) + 1
    assert min(once[digest] for digest in inside(whole)) >= 2, "the fastest 16 are read again: all eight of them"
    float_model = whole.subspace.full_space.digest(whole.subspace.full_space.float_placement())
    assert max(once[digest] for digest in once if digest != float_model) <= 3, "with the fastest of the first phase"
    assert {d: r.choices for d, r in resumed.rows.items()} == {d: r.choices for d, r in whole.rows.items()}
    built.clear()
    recorded(model, tmp_path / "cut.parquet", dimensions=3)
    assert not built


def test_low_outlier_is_remeasured_in_final_selection(model, tmp_path, monkeypatch):
    true = recorded(model, tmp_path / "true.parquet", dimensions=3)
    truth = {digest: outcome_of(true, digest).info["truth_ms"] for digest in inside(true) - screened(true)}
    chosen = max(truth, key=truth.__getitem__)
    lucky: list[float] = []
    sample = InProcess.sample

    def once_ten_times_faster(self: InProcess, handle: int, *args: Any) -> Any:
        found = sample(self, handle, *args)
        if lucky or self._engines[handle].artifact.info["truth_ms"] != truth[chosen]:
            return found
        lucky.append(truth[chosen])
        return replace(found, latency_ms=tuple(value / 10 for value in found.latency_ms))

    monkeypatch.setattr(InProcess, "sample", once_ten_times_faster)
    monkeypatch.setattr("harness.replay.record_table.FASTEST_PER_COMPARISON", 1)
    table = recorded(model, tmp_path / "lucky.parquet", dimensions=3)
    assert lucky
    assert outcome_of(table, chosen).samples_ms == pytest.approx([truth[chosen]] * 20, rel=1e-6)


def test_placement_that_fails_to_rebuild_is_recorded_as_failed(model, tmp_path, monkeypatch):
    table = recorded(model, tmp_path / "true.parquet", dimensions=3)
    fastest = table.subspace.to_full_space(list(table.subspace.placements())[Landscape(table).optimum])
    gone, builds = table.subspace.full_space.digest(fastest), list[str]()

    def fails(digest: str) -> bool:
        builds.append(digest)
        return digest == gone and builds.count(gone) > 1

    fail_builds(monkeypatch, fails)
    table = recorded(model, tmp_path / "gone.parquet", dimensions=3)
    outcome = table.rows[gone].outcome
    assert isinstance(outcome, Failed)
    assert outcome.reason.startswith("it was measured once and failed in the confirmation")
    assert outcome.wall_s > 0
    assert sorted(row.number for row in table.rows.values()) == list(range(len(table.rows)))


def test_changed_machine_speed_is_reported(model, tmp_path, monkeypatch):
    """Rows that were timed before seem faster than the optimum."""
    sample = InProcess.sample

    def slower_at_the_end(self: InProcess, handle: int, *args: Any) -> Any:
        found = sample(self, handle, *args)
        late = list(tmp_path.glob("*.recording/table-final-selection-*.jsonl"))
        return replace(found, latency_ms=tuple(2 * value for value in found.latency_ms)) if late else found

    monkeypatch.setattr(InProcess, "sample", slower_at_the_end)
    study, observer = make_study(str(model), backend="simulated", params=PARAMS), Listening()
    alone = study.experiment.sampling.model_copy(update={"interleave": "never"})
    study = study._replace(experiment=study.experiment.model_copy(update={"sampling": alone}))
    record(study, tmp_path / "t.parquet", 1, observer)
    pace = [text for text in observer.said if "the float model takes" in text]
    assert pace
    assert all(text.startswith("net-simulated-int8 final selection: the float model takes") for text in pace)
    assert all(text.endswith("record the table anew with `sampling.interleave: always`") for text in pace)
    beaten = [text for text in observer.said if "of the table's optimum" in text]
    assert beaten
    assert beaten[0].endswith("use more --dimensions, or --search 200")


def test_recording_with_changed_inputs_is_refused(model, tmp_path, monkeypatch):
    out = tmp_path / "t.parquet"
    recorded(model, out)
    facts = {"name": "simulated", "version": "1", "device": "another", "float_precision": "f32", "options": {}}
    with monkeypatch.context() as patch:
        patch.setattr(InProcess, "describe", lambda *_: facts)
        with pytest.raises(UserError, match=r"(?s)t\.parquet: .*backend\.device: 'simulated' -> 'another'"):
            recorded(model, out)
    with pytest.raises(UserError, match=r"(?s)t\.parquet: .*model: 'net' -> 'other'.*model_sha256"):
        recorded(save_chain(tmp_path / "other.onnx", (4,), size=8), out)


def test_failed_placements_are_recorded(model, tmp_path):
    outcomes = [row.outcome for row in recorded(model, tmp_path / "t.parquet", failure_rate=1.0).rows.values()]
    assert [outcome.status for outcome in outcomes].count("measured") == 1, "the float model"
    assert all("refuses placement" in outcome.reason for outcome in outcomes if outcome.status == "failed")


def test_consecutive_failures_do_not_stop_recording_after_success(model, tmp_path, monkeypatch):
    study = make_study(str(model), backend="simulated", params=PARAMS, precision="mixed")
    whole = read_table(record(study, tmp_path / "plain.parquet", 2, NullProgress())).subspace.full_space
    refused = {whole.digest(p) for p in neighbours(whole, whole.float_placement())}
    assert len(refused) > COLD_START_EVALUATIONS
    fail_builds(monkeypatch, refused.__contains__)
    table = read_table(record(study, tmp_path / "some.parquet", 2, NullProgress(), search=10))
    assert {table.rows[digest].outcome.stage for digest in refused} == {"build"}


def test_fidelity_is_recorded_of_every_placement_on_a_real_runtime(model, tmp_path, monkeypatch):
    monkeypatch.setattr("harness.replay.record_table.FASTEST_PER_COMPARISON", 2)
    schedule = TurnSchedule(builds=1, rounds=6, samples=3)
    monkeypatch.setattr("harness.replay.record_table.CONFIRMATION_SCHEDULE", schedule)
    floor = Confirmation(builds=3, rounds=2, samples=3)
    monkeypatch.setattr("harness.run.confirm.confirmation.NOISE_FLOOR_SCHEDULE", floor)
    limits = {**STUDY_LIMITS, "warmup_ms": 1.0, "min_samples": 7, "max_ms": 10.0}
    monkeypatch.setattr("harness.run.prepare.study_task.STUDY_LIMITS", limits)
    params = {"optimization": "all"}
    study = make_study(str(model), backend="onnxruntime", params=params, fidelity=True)
    table = read_table(record(study, tmp_path / "t.parquet", 2, NullProgress()))
    outcomes = [table.row(placement).outcome for placement in table.subspace.placements()]
    assert len(outcomes) == 4
    for outcome in outcomes:
        assert isinstance(outcome, Measured)
        assert outcome.build_s > 0
        assert len(outcome.samples_ms) >= 6
        turns = len(outcome.raw_ms)
        assert len(outcome.reference_ms) in (turns, turns + 1), (
            "in turns with the float model, also in a final selection"
        )
        assert set(outcome.metrics) == {"sqnr_db", "cosine", "kl"}
    assert table.metadata.backend["options"]["optimization"] == "all"


def test_sensitivity_is_rms_change_of_log_latency():
    choices = ("float", "int8", "fp8")
    space = Space(
        tuple(Dimension(name=n, group="p", kind="node_input", choices=choices, edges=(Edge(n, n, 0),)) for n in "abc")
    )
    effects = np.array([[0.0, -0.2, -0.4], [0.0, 0.1, 0.1], [0.0, 0.0, 0.0]])
    anchors = [space.float_placement(), Placement((1, 1, 1))]
    near = [list(neighbours(space, anchor)) for anchor in anchors]
    assert [len(set(some)) for some in near] == [6, 6]
    listed = [*anchors, *near[0], *near[1]]
    known = {space.digest(p): float(np.exp(effects[[0, 1, 2], p.choices].sum())) for p in listed}
    found = sensitivity(space, anchors, known)
    # Around float: -0.2 and -0.4; around the other: +0.2 and -0.2.
    assert found == pytest.approx([np.sqrt((0.04 + 0.16 + 0.04 + 0.04) / 4), np.sqrt(0.03 / 4), 0.0])
    influential = [most_influential(space, found, dimensions) for dimensions in (2, 4, 11)]
    assert influential == [(0,), (0, 1), (0, 1, 2)]  # of three choices each: 3 of at most 4, for instance
    assert sensitivity(space, anchors, {}).tolist() == [0.0, 0.0, 0.0]


def test_record_and_replay_commands_run(model, tmp_path, capsys):
    chosen = ["--backend", "simulated", "--param", "seed=5", "--param", "noise=0.01"]
    assert qdq("bench", "record", str(model), "--dimensions", "2", *chosen) == 0
    printed = capsys.readouterr().out
    assert "4 placements of 2 of" in printed
    assert "optimum" in printed
    order = ["--searcher", "random", "--seeds", "2", "--model", str(model)]
    assert qdq("bench", "replay", "net-simulated-int8.parquet", *order) == 0
    assert "random: 8 evaluations in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dimensions", "17"], "--dimensions: 1 to 16, but got 17"),
        (["--param", "seed"], "--param seed: NAME=VALUE, for instance --param threads=1"),
        (["--fidelity"], "cannot be scored; evaluate: the simulated benchmarker has only latencies"),
        (["mixed.yaml", "--dimensions", "1"], "--dimensions 1: nothing to enumerate, for a dimension has at least 3"),
    ],
)
def test_record_errors_end_with_one_message(model, arguments, message, capsys):
    Path("mixed.yaml").write_text("experiment: mixed\nmodels: [net.onnx]\nbackends: [simulated]\nprecision: [mixed]\n")
    given = [] if arguments[0] == "mixed.yaml" else [str(model), "--backend", "simulated"]
    assert qdq("bench", "record", *given, *arguments) == 2
    assert message in capsys.readouterr().err


def test_record_accepts_experiment_with_one_task(model, tmp_path):
    text = """
experiment: mine
models: [{use: net.onnx, calibration: {samples: 2, method: percentile}}]
backends: [{use: simulated, params: {seed: 3}}]
sampling: {min_samples: 5, max_samples: 5}
"""
    (tmp_path / "one.yaml").write_text(text)
    study = make_study(str(tmp_path / "one.yaml"))
    assert study.experiment.models[0].calibration.method == "percentile"
    assert study.experiment.sampling.max_samples == 5
    assert study.spec.backend.params == {"seed": 3}
    assert make_study(str(tmp_path / "one.yaml"), backend="openvino").spec.backend.use == "openvino"
    (tmp_path / "two.yaml").write_text(text.replace("backends: [", "backends: [openvino, "))
    with pytest.raises(
        UserError, match=r"one task, but this experiment has 2: net-openvino-int8, net-simulated-int8; k"
    ):
        make_study(str(tmp_path / "two.yaml"))


def test_like_option_measures_placements_of_other_table(model, tmp_path):
    first, out = recorded(model, tmp_path / "first.parquet"), tmp_path / "again.parquet"
    study = make_study(str(model), backend="simulated", params={**PARAMS, "base_ms": 20.0})
    again = read_table(record(study, out, None, NullProgress(), like=first, note="two at once"))
    assert inside(again) == inside(first)
    assert len(again.rows) < len(first.rows)
    assert again.metadata.sensitivity == first.metadata.sensitivity
    facts = again.metadata.environment
    assert (facts["placements_of"], facts["note"]) == ("first", "two at once")
    assert facts["noise_floor"] >= 0
    record(study, out, None, NullProgress(), like=first)  # finished
    with pytest.raises(UserError, match="varied"):
        record(study, out, None, NullProgress(), like=recorded(model, tmp_path / "small.parquet", dimensions=1))
    with pytest.raises(UserError, match="--like"):
        record(study, out, None, NullProgress(), search=9, like=first)
    fewer = read_table(record(study, tmp_path / "fewer.parquet", 1, NullProgress(), like=first))
    assert set(fewer.metadata.varied) < set(first.metadata.varied)
    assert set(fewer.rows) <= set(first.rows)
    other = replace(first, metadata=first.metadata.model_copy(update={"model_sha256": "0" * 64}))
    with pytest.raises(UserError, match="another model"):
        record(study, tmp_path / "other.parquet", None, NullProgress(), like=other)
