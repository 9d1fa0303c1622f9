"""What tests of whole runs leave out: a conftest.py or a module of tests imports the fixture."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from warm_python import WARM_PYTHON

from harness.measure.machine_noise import MachineSnapshot
from harness.workers.sandbox import InProcess


class QuietMachine:
    """Monitor of a machine on which nothing else runs."""

    def read(self) -> MachineSnapshot:
        return MachineSnapshot(at_s=0.0)


@pytest.fixture(scope="module", autouse=True)
def cheap_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave out what takes longer than a simulated run, unless the module names it: `FULL_TURNS = True` and so on.

    - FULL_TURNS: turns of a final selection and a confirmation of a minimum length, and all turns of a race
    - MONITORED: disturbances by other programs, for which turns are repeated
    - DRAWN: the plots of reports
    - ALL_FORMATS: plots as PDF, whose fonts take longer than the other formats
    - LATEX: the text of tables in LaTeX
    - REAL_TOOLS: PTQ tools in processes of their own, which import their packages for seconds
    - REAL_WORKERS: engines in worker processes, each of which takes half a second to start
    """
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "FULL_TURNS", False):
            patch.setattr("harness.run.confirm.confirmation.MIN_CONFIRMATION_TURN_MS", 1.0)
            patch.setattr("harness.run.confirm.confirmation.TURN_WARMUP_MS", 0.0)
            patch.setattr("harness.run.select.final_selection.TURNS_PER_RACING_ROUND", (4, 4, 4))
        if not getattr(request.module, "MONITORED", False):
            patch.setattr("harness.workers.sandbox.MachineMonitor", QuietMachine)
        if not getattr(request.module, "DRAWN", False):
            patch.setattr(importlib.import_module("harness.report.render"), "draw_plots", lambda *_, **__: [])
        if not getattr(request.module, "ALL_FORMATS", False):
            for module in ("plot_files", "figures"):
                patch.setattr(f"harness.report.plots.{module}.PLOT_FILE_FORMATS", ("png", "svg"))
        if not getattr(request.module, "LATEX", False):
            patch.setattr("harness.report.report_table._render_latex", lambda _: "% left out\n")
        if not getattr(request.module, "REAL_TOOLS", False):
            patch.setattr("harness.accuracy.tools.ptq._child_command", WARM_PYTHON.tool_command)
        if not getattr(request.module, "REAL_WORKERS", False):
            patch.setattr("harness.workers.sandbox.Sandbox", lambda spec, *_: InProcess(spec))
        yield
