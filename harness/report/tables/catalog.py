"""All tables of a results folder in order, with the notes that they share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from harness.base.errors import UserError
from harness.plugins.registry import installed_plugins, load_plugin
from harness.report.frames import main_frame, precision_frame, variance_frame
from harness.report.report_table import ReportTable, TableSpec
from harness.report.tables.decision import (
    DECISION,
    FASTEST,
    SHAPES,
    TOOLS,
    decision_table,
    fastest_frame,
    shape_frame,
    tool_frame,
)
from harness.report.tables.main import (
    FINALISTS,
    MAIN,
    OVERVIEW,
    PRECISION,
    build_rows,
    finalist_table,
    main_table,
    overview_frame,
    overview_table,
)
from harness.report.tables.notes import LOSS_NOTE, common_notes, early_end_notes, noise_floor_note, noise_note
from harness.report.tables.paired_choices import ABLATION, FIXED, ablation_frame, fixed_table
from harness.report.tables.searchers import (
    BUDGET,
    COST,
    PAIRS,
    SCORE,
    TARGETS,
    VARIANCE,
    VOLUME,
    budget_frame,
    cost_table,
    pair_table,
    score_frame,
    target_frame,
    volume_table,
)
from harness.report.tables.transfer import TRANSFER, TRANSFER_MODELS, transfer_tables
from harness.results.folder import Results

#: Every table of a results folder by name, in order.
SPECS: Mapping[str, TableSpec] = {
    spec.name: spec
    for spec in (
        MAIN, OVERVIEW, PRECISION, DECISION, TOOLS, FASTEST, BUDGET, FIXED, TARGETS, FINALISTS, COST, SCORE, PAIRS,
        ABLATION, SHAPES, TRANSFER, TRANSFER_MODELS, VOLUME, VARIANCE,
    )
}  # fmt: skip


def table_specs() -> Mapping[str, TableSpec]:
    """Return every table by name, in order: those of `SPECS`, then those of installed plug-ins (`qdq.tables`)."""
    plugins: dict[str, TableSpec] = {}
    for plugin in installed_plugins("table"):
        spec: Any = load_plugin("table", plugin.name)
        if not isinstance(spec, TableSpec) or spec.frame is None or spec.name != plugin.name or spec.name in SPECS:
            raise UserError(
                f"table {plugin.name!r} of {plugin.origin}: needs a TableSpec of this new name with a frame"
            )
        plugins[spec.name] = spec
    return {**SPECS, **plugins}


def build_tables(results: Results) -> Iterator[ReportTable]:
    """Yield every table that has a row, each computed on demand."""
    common, ends = list(common_notes(results.tasks)), list(early_end_notes(results))
    lossy = any(pick.loss is not None for task in results.tasks for pick in task.picks)
    warnings = tuple(filter(None, map(noise_note, results.tasks)))
    specs = table_specs()
    for table in _iter_tables(results, specs):
        if len(table.cells):
            spec, notes = specs[table.name], [table.note]
            if lossy and spec.shows_selection:
                notes.append(LOSS_NOTE)
            if spec.timed and not spec.states_noise_floor:
                notes.append(noise_floor_note(results.tasks))
            notes += [*(ends if spec.assumes_budget else ()), *common]
            doubts = (*(warnings if spec.timed else ()), *table.warnings)
            yield replace(table, note="\n".join(notes), warnings=doubts)


def _iter_tables(results: Results, specs: Mapping[str, TableSpec]) -> Iterator[ReportTable]:
    main, budgets = main_frame(results), budget_frame(results)
    yield main_table(results, main)
    yield overview_table(overview_frame(main, budgets))
    yield build_rows(PRECISION, precision_frame(main))
    yield decision_table(results, main)
    yield build_rows(TOOLS, tool_frame(results, main))
    yield FASTEST.build(fastest_frame(results, main))
    yield BUDGET.build(budgets)
    yield fixed_table(results)
    yield TARGETS.build(target_frame(results))
    yield finalist_table(results)
    yield cost_table(results)
    yield SCORE.build(score_frame(results))
    yield pair_table(results)
    yield ABLATION.build(ablation_frame(results))
    yield build_rows(SHAPES, shape_frame(results, main))
    yield from transfer_tables(results)
    yield volume_table(results)
    yield VARIANCE.build(variance_frame(results))
    yield from (spec.build(spec.frame(results)) for spec in specs.values() if spec.frame)
