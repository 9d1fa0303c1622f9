"""The experiment that a results folder holds, as far as readers need it, and the scores of its cells.

Nothing is checked against today's keys: a key that was renamed or dropped since must not make old results unreadable.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.accuracy.metrics.intervals import check_consistency, decode_accuracy
from harness.config.plan import TaskSpec
from harness.config.sections import ModelSpec, PluginSpec
from harness.config.yaml_loader import read_experiment_yaml
from harness.errors import UserError
from harness.verification.accuracy_store import read_scores

__all__ = ["StoredExperiment", "read_metric_scores", "read_stored_experiment"]

MAX_EXPERIMENT_BYTES = 4_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperiment:
    """What was to be run.

    Attributes:
        text: The YAML as it stands.
        cells: What was to be compared, in the order of the experiment; empty where the file does not tell.
        baselines: Fixed placements and PTQ tools that each cell compares with.
        searchers: By the names that journals and tables use.
        uses: Plug-in and parameters of each searcher, what it goes without among them.
        builds: Fresh builds of a confirmation; None where the file does not tell.
    """

    name: str
    description: str
    text: str
    cells: tuple[TaskSpec, ...]
    baselines: tuple[str, ...]
    searchers: tuple[str, ...]
    uses: Mapping[str, tuple[str, Mapping[str, Any]]]
    builds: int | None


def read_stored_experiment(path: Path) -> StoredExperiment:
    """Read a stored `experiment.yaml`.

    Raises:
        UserError: It cannot be read, or is no YAML mapping.
    """
    try:
        if path.stat().st_size > MAX_EXPERIMENT_BYTES:
            raise UserError(f"{path}: larger than {MAX_EXPERIMENT_BYTES} bytes, so it is no experiment")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    body = read_experiment_yaml(text, str(path))
    precisions = [str(precision) for precision in _list_at(body, "precision")] or ["int8"]
    uses = dict(_searcher_params(body))
    return StoredExperiment(
        name=str(body.get("experiment", path.parent.name)),
        description=str(body.get("description") or ""),
        text=text,
        cells=tuple(
            TaskSpec(
                model=ModelSpec.model_construct(use=model["use"], label=model["label"]),
                backend=PluginSpec.model_construct(use=backend["use"], label=backend["label"]),
                precision=precision,
                runs=(),
            )
            for model in _named_entries(body, "models")
            for backend in _named_entries(body, "backends")
            for precision in precisions
        ),
        baselines=tuple(str(name) for name in _list_at(body, "baselines")),
        searchers=tuple(uses),
        uses=uses,
        builds=_confirmation_builds(body),
    )


def read_metric_scores(cell: Path, metric: str) -> Mapping[str, Mapping[str, Any]]:
    """The evaluator's figures by row id, of a cell's folder.

    Args:
        cell: The folder.
        metric: The evaluator's own, which single images tell again.

    Raises:
        ValueError: A figure that its own record of single images denies: damage, or somebody's hand.
    """
    scores = read_scores(cell)
    for row, score in scores.items():
        if metric in score.get("metrics", {}) and (said := _score_error(score, metric)):
            raise ValueError(f"{row}: {said}")
    return scores


def _score_error(score: Mapping[str, Any], metric: str) -> str:
    try:
        return check_consistency(decode_accuracy(score), metric)
    except ValueError as error:
        return str(error)


def _searcher_params(body: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, Mapping[str, Any]]]]:
    for entry, named in zip(_list_at(body, "searchers"), _named_entries(body, "searchers"), strict=True):
        whole = entry if isinstance(entry, dict) else {}
        params, without = whole.get("params"), whole.get("without")
        name = PluginSpec.model_construct(use=named["use"], label=named["label"]).name
        own = params if isinstance(params, dict) else {}
        left = {"without": " and ".join(map(str, without))} if isinstance(without, list) and without else {}
        yield name, (str(named["use"]), {**own, **left})


def _confirmation_builds(body: Mapping[str, Any]) -> int | None:
    confirmation = body.get("confirmation")
    builds = confirmation.get("builds") if isinstance(confirmation, dict) else None
    return builds if isinstance(builds, int) else None


def _list_at(body: Mapping[str, Any], key: str) -> list[Any]:
    found = body.get(key)
    return found if isinstance(found, list) else []


def _named_entries(body: Mapping[str, Any], key: str) -> Iterator[dict[str, str | None]]:
    for entry in _list_at(body, key):
        whole = entry if isinstance(entry, dict) else {"use": entry}
        label = whole.get("label")
        yield {"use": str(whole.get("use", "")), "label": None if label is None else str(label)}
