"""What tests of whole runs share, wherever they stand."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Reports without their plots, which take longer than a simulated run; the tests of the report look at those."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("harness.report.render"), "draw_plots", lambda *_, **__: [])
        yield
