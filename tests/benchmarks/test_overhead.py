"""Harness time outside build, sampling and evaluation, read from committed journals; `qdq report` prints the same.

Figure to reach: at most 5 % of a run on ResNet-50 and on the six-layer encoder. ModelOpt's tool spends 27 to 85 %.
"""

from pathlib import Path

import pytest

from harness.report.tables.searchers import cost_frame
from harness.results.folder import load

pytestmark = pytest.mark.slow
RESULTS = Path(__file__).parents[2] / "results" / "latency_cpu"


@pytest.mark.skipif(not RESULTS.exists(), reason="results/latency_cpu is not there")
@pytest.mark.parametrize("model", ["resnet50", "encoder6"])
def test_harness_share_of_search_time_is_at_most_5_percent(model):
    cost = cost_frame(load(RESULTS))
    part = cost[cost["task"].str.startswith(f"{model}-")]
    share = part["harness_s"].sum() / part["total_s"].sum()
    print(f"{model}: {share:.1%} of {part['total_s'].sum():.0f} s")
    assert share <= 0.05
