"""Time of long journals: opened to continue, read for the finalists, and a whole `qdq report`.

Run with `QDQ_LINES=1000000 pytest tests/benchmarks/test_journal_benchmark.py --benchmark-enable -s`; it prints rows for
docs/explanation/reliability.md. Figures to reach at a million lines: opened in 10 s; the report streams, so it stays
below 1 GiB. Each is taken in a process of its own. All evaluations of the journal were scored: no journal costs the
report more.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from long_results import write_long_results

pytestmark = pytest.mark.slow
LINES = int(os.environ.get("QDQ_LINES", "100000"))
HEAD = """
import json, resource, sys, time
from pathlib import Path
from harness.report.render import report_text, write_report
from harness.results.search_log import Goal
from harness.results.journal import Journal, read_journal
from harness.results.search_log import state_at_budgets
folder, path = Path(sys.argv[1]), Path(sys.argv[2])
goal = Goal(metric="top1", reference=0.8, max_drop=0.02)
def mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
before, wall, cpu = mib(), time.perf_counter(), time.process_time()
"""
WORKS = {
    "decoded by json.loads": "[None for line in path.open() if not json.loads(line)]",
    "read with checksums and validation": "for entry in read_journal(path): pass",
    "opened to continue": "with Journal(path, {}) as journal: journal.elapsed_s",
    "finalists chosen": "state_at_budgets(read_journal(path), goal, [50, 10**9], 3)",
    "whole report": "report_text(*write_report(folder))",
}
TAIL = "print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu, before, mib()]))"


@pytest.fixture(scope="module")
def journal(tmp_path_factory):
    return write_long_results(tmp_path_factory.mktemp("long"), LINES // 2)


@pytest.mark.parametrize("work", WORKS)
def test_journal_read_time_of_long_search(benchmark, work, request):
    if benchmark.disabled:
        pytest.skip("tests/harness/report/test_long_journal.py reads a long one; enable benchmarks to take its time")
    path: Path = request.getfixturevalue("journal")
    command = [sys.executable, "-c", f"{HEAD}{WORKS[work]}\n{TAIL}", str(path.parents[2]), str(path)]

    def run() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    wall_s, cpu_s, before_mib, most_mib = json.loads(benchmark.pedantic(run, rounds=1).splitlines()[-1])
    benchmark.extra_info |= {"lines": LINES, "wall_s": wall_s, "cpu_s": cpu_s, "most_mib": most_mib}
    what = f"a journal of {LINES:,} lines ({path.stat().st_size / 1e6:.0f} MB): {work}"
    figures = f"{wall_s:.1f} s, {cpu_s:.2f} of processor time, {most_mib:.0f} MiB at most, {before_mib:.0f} before it"
    print(f"\n| {what} | {figures} |")
