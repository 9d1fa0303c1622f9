"""What tests of whole runs share, wherever they stand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from harness.timing.workers.in_process import InProcess


@pytest.fixture(scope="module", autouse=True)
def short_turns(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns of a final selection and a confirmation without a minimum length, unless the module has FULL_TURNS."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "FULL_TURNS", False):
            patch.setattr("harness.timing.confirmation.MIN_CONFIRMATION_TURN_MS", 1.0)
            patch.setattr("harness.timing.confirmation.TURN_WARMUP_MS", 0.0)
        yield


@pytest.fixture(scope="module", autouse=True)
def undrawn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Reports without their plots, which take longer than a simulated run, unless the module has DRAWN."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "DRAWN", False):
            patch.setattr(importlib.import_module("harness.report.render"), "draw_plots", lambda *_, **__: [])
        yield


@pytest.fixture(scope="module", autouse=True)
def without_pdf(request: pytest.FixtureRequest) -> Iterator[None]:
    """Plots without PDF, whose fonts take longer than the other formats, unless the module has ALL_FORMATS."""
    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "ALL_FORMATS", False):
            for module in ("plot_files", "result_plots"):
                patch.setattr(f"harness.report.plots.{module}.PLOT_FILE_FORMATS", ("png", "svg"))
        yield


@pytest.fixture(scope="module", autouse=True)
def without_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    """Engines in this process if the module has WITHOUT_WORKERS: each worker takes half a second to start."""
    with pytest.MonkeyPatch.context() as patch:
        if getattr(request.module, "WITHOUT_WORKERS", False):
            patch.setattr("harness.timing.workers.sandbox.Sandbox", lambda spec, _: InProcess(spec))
        yield
