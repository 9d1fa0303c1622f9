"""The copy of a run that optuna-dashboard shows: complete, once, and never in the way."""

import fcntl

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from harness.measure.records import Failed, Measured, Proposal
from harness.results.search_log import Goal
from harness.run.search.loop import TrialEvent
from harness.run.search.optuna_mirror import mirror_to_optuna
from search.synthetic_problem import synthetic_space

SPACE = synthetic_space(6, groups=2)
GOAL = Goal(metric="top1", reference=0.8, max_drop=0.02)


def trial(number: int, evaluations: int | None = None, **outcome) -> TrialEvent:
    measured = {"samples_ms": (4.0 - number / 10,) * 3, "build_s": 1.0, "measure_s": 1.0, **outcome}
    return TrialEvent(
        proposal=Proposal(number=number, choices=(1, 0, 1, 0, 0, 1), digest=f"d{number}", origin="searcher"),
        outcome=Failed(stage="build", reason="no") if outcome.get("failed") else Measured(**measured),
        evaluations=number + 1 if evaluations is None else evaluations,
        best_ms=None,
        resumed=False,
    )


def studies(path):
    storage = JournalStorage(JournalFileBackend(str(path)))
    return {name: optuna.load_study(study_name=name, storage=storage) for name in optuna.get_all_study_names(storage)}


def test_mirror_contains_every_trial_with_attributes(tmp_path):
    path = tmp_path / "optuna.journal"
    watch = mirror_to_optuna(path, "task/tpe-0", SPACE, GOAL, fresh=True)
    watch(trial(0, metrics={"top1": 0.79}))
    watch(trial(1, failed=True))
    watch(trial(2, evaluations=2))  # a duplicate: it cost nothing
    watch(trial(3, evaluations=3, metrics={"top1": 0.5}))
    study = studies(path)["task/tpe-0"]
    assert [t.state.name for t in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert study.best_trial.number == 0, "the faster one breaks the bound"
    assert study.best_value == pytest.approx(4.0)
    first = study.trials[0]
    assert sum(first.params.values()) == 3
    assert set(first.params) == set(SPACE.groups)
    assert (first.user_attrs["digest"], first.user_attrs["top1"]) == ("d0", 0.79)
    assert study.trials[1].user_attrs["reason"] == "no"


def test_mirror_of_resumed_search_adds_missing_trials(tmp_path):
    path = tmp_path / "optuna.journal"
    first = mirror_to_optuna(path, "a", SPACE, Goal(), fresh=True)
    first(trial(0))
    other = mirror_to_optuna(path, "b", SPACE, Goal(), fresh=True)
    other(trial(0))
    first(trial(1))
    path.write_bytes(path.read_bytes() + b'{"op_code": 4, "torn')
    again = mirror_to_optuna(path, "a", SPACE, Goal(), fresh=False)
    for number in range(4):
        again(trial(number))
    found = studies(path)
    assert [t.user_attrs["digest"] for t in found["a"].trials] == ["d0", "d1", "d2", "d3"]
    assert len(found["b"].trials) == 1


def test_fresh_search_replaces_its_study(tmp_path):
    path = tmp_path / "optuna.journal"
    mirror_to_optuna(path, "a", SPACE, Goal(), fresh=True)(trial(0))
    mirror_to_optuna(path, "a", SPACE, Goal(), fresh=True)(trial(5, evaluations=1))
    assert [t.user_attrs["digest"] for t in studies(path)["a"].trials] == ["d5"]


def test_a_full_disk_ends_the_view_with_one_warning(tmp_path, caplog, monkeypatch):
    path = tmp_path / "optuna.journal"
    watch = mirror_to_optuna(path, "a", SPACE, Goal(), fresh=True)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fcntl, "flock", full)
    watch(trial(0))
    watch(trial(1))
    assert caplog.text.count("no further live view of a") == 1


def test_mirror_continues_study_created_by_optuna(tmp_path):
    path = tmp_path / "optuna.journal"
    storage = JournalStorage(JournalFileBackend(str(path)))
    kept = optuna.create_study(storage=storage, study_name="mine")
    kept.add_trial(optuna.trial.create_trial(value=1.0))
    optuna.delete_study(study_name="mine", storage=storage)
    study = optuna.create_study(storage=storage, study_name="a")
    study.add_trial(optuna.trial.create_trial(value=4.0, user_attrs={"digest": "d0"}))
    watch = mirror_to_optuna(path, "a", SPACE, Goal(), fresh=False)
    for number in range(3):
        watch(trial(number))
    found = studies(path)
    assert set(found) == {"a"}
    assert [t.user_attrs["digest"] for t in found["a"].trials] == ["d0", "d1", "d2"]
    assert found["a"].direction.name == "MINIMIZE"
    last = found["a"].trials[-1]
    assert last.distributions == {
        group: optuna.distributions.IntDistribution(0, len(indices)) for group, indices in SPACE.groups.items()
    }
    assert 0 <= last.duration.total_seconds() < 60


@pytest.mark.parametrize("text", [b"no json\nat all\n", b"[1]\n", b"{}\n", b'{"op_code":1,"study_id":7}\n'])
def test_damaged_mirror_file_only_warns(tmp_path, caplog, text):
    path = tmp_path / "optuna.journal"
    path.write_bytes(text)
    mirror_to_optuna(path, "a", SPACE, Goal(), fresh=False)(trial(0))
    mirror_to_optuna(tmp_path / "nowhere" / "optuna.journal", "b", SPACE, Goal(), fresh=True)(trial(0))
    assert all(f"no live view of {name}" in caplog.text for name in "ab")
