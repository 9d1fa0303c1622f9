"""Print the figures of each benchmark as soon as it has ended."""

from __future__ import annotations

import time

import pytest


@pytest.fixture(autouse=True)
def printed_figures(benchmark, request, capsys):
    start_s = time.perf_counter()
    yield
    if benchmark.stats:
        figures = "".join(f", {name} {value}" for name, value in benchmark.extra_info.items())
        median_ms = 1e3 * benchmark.stats.stats.median
        with capsys.disabled():
            print(f"\n{request.node.name}: median {median_ms:.3g} ms{figures} ({time.perf_counter() - start_s:.0f} s)")
