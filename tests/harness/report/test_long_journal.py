"""A report of a journal of 40,000 lines: the same figures, in little memory, in pictures that a browser opens.

tests/benchmarks/test_journal_benchmark.py takes the time of longer ones.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pandas as pd
import pytest
from long_results import write_long_results

from harness.report.frames import curve_frame
from harness.report.plots.charts import median_steps
from harness.results.folder import load

pytestmark = pytest.mark.slow
EVALUATIONS = 20_000
REPORT = """
import json, sys
from pathlib import Path
from harness.report.render import report_text, write_report
text = report_text(*write_report(Path(sys.argv[1])))
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(json.dumps({"text": text, "mib": int(peak.split()[1]) / 2**10}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("long")
    write_long_results(folder, EVALUATIONS)
    return folder


@pytest.fixture(scope="module")
def said(folder):
    done = subprocess.run([sys.executable, "-c", REPORT, str(folder)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc: getrusage counts the parent before exec")
def test_report_memory_and_file_size_are_bounded(folder, said):
    assert said["mib"] < 300
    for path in (folder / "report").iterdir():
        assert path.stat().st_size < (10_000_000 if path.suffix == ".csv" else 3_000_000), path.name


def test_report_counts_every_evaluation(said):
    lines = [line for line in said["text"].splitlines() if "| random " in line]
    assert any(f"| {EVALUATIONS - EVALUATIONS // 997}/{EVALUATIONS} " in line for line in lines)


def test_curves_are_thinned_without_a_step_lost(folder):
    curves = curve_frame(load(folder).tasks)
    whole = curves[curves["seed"] == 0].set_index("evaluations")["speedup"]
    assert len(whole) > EVALUATIONS - 10, "all from the first incumbent on"
    places, steps = median_steps([(whole.index.to_numpy(), whole.to_numpy())])
    assert 10 < len(places) < 1000
    assert pd.Series(steps[0], index=places).reindex(whole.index).ffill().equals(whole)
    assert places[-1] == EVALUATIONS
