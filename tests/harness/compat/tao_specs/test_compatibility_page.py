"""docs/reference/compatibility.md names a test for every row, and the test is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/reference/compatibility.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| Option", "|---"))]


def test_every_row_names_a_test_or_a_dash():
    assert len(ROWS) > 50
    assert [row for row in ROWS if "`" not in row.split("|")[3] and row.split("|")[3].strip() != "-"] == []


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(\S+\.py::\w+)`", PAGE))))
def test_every_test_that_is_named_exists(name):
    file, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / "tests/harness" / file).read_text(encoding="utf-8")
