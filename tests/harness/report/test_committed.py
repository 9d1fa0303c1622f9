"""Reports of the committed results folders: LaTeX that compiles, pages that open."""

import shutil
import subprocess
from pathlib import Path

import pytest

RESULTS = Path(__file__).resolve().parents[3] / "results"
REPORTS = sorted(path.parent for path in RESULTS.glob("*/report/main.md"))
PAGES = [path for folder in REPORTS if (path := folder / "index.html").exists()]


def named(path: Path) -> str:
    return path.relative_to(RESULTS).parts[0]


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
@pytest.mark.parametrize("report", REPORTS, ids=named)
def test_every_table_compiles(report, tmp_path):
    files = sorted(report.glob("*.tex"))
    assert files
    for path in files:
        shutil.copy(path, tmp_path)
    inputs = "".join(f"\\input{{{path.stem}}}\\clearpage\n\n" for path in files)
    (tmp_path / "all.tex").write_text(
        f"\\documentclass{{article}}\\usepackage{{booktabs,graphicx}}\\begin{{document}}\\tiny\n{inputs}\\end{{document}}\n"
    )
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "-no-shell-escape", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, errors="replace")
    assert done.returncode == 0, done.stdout[-800:]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_the_page_opens_offline_without_an_error(page, browser, outside_addresses):
    text = page.read_text(encoding="utf-8")
    assert outside_addresses(text) == []
    if named(page) == "quickstart":
        assert len(text.encode()) < 5_000_000
    browser.open(page)
    assert browser.run("document.querySelectorAll('#table-main tbody tr').length") > 0
    assert browser.run("document.querySelectorAll('canvas.graph').length") > 0
    assert browser.errors == []
