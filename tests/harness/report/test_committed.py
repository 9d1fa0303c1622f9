"""Reports of the committed results: the records give the tables that are committed, in every form."""

import shutil
import subprocess
from pathlib import Path

import pytest

from harness.report.load.results import load
from harness.report.render import write_tables

RESULTS = Path(__file__).resolve().parents[3] / "results"
FOLDERS = sorted(path.parents[1] for path in RESULTS.glob("*/report/main.md"))
QUICK = [folder for folder in FOLDERS if sum(path.stat().st_size for path in folder.rglob("*.json*")) < 800_000]
"""The folders that are read in a second or two."""
PAGES = sorted(RESULTS.glob("*/report/index.html"))


def named(path: Path) -> str:
    return path.relative_to(RESULTS).parts[0]


@pytest.mark.parametrize("folder", QUICK, ids=named)
def test_the_tables_are_those_of_the_records(folder, tmp_path):
    write_tables(load(folder), tmp_path)
    committed = {path.name: path for path in folder.glob("report/*.md") if path.name != "cost.md"}
    assert committed
    assert [name for name, path in committed.items() if path.read_bytes() != (tmp_path / name).read_bytes()] == []


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
@pytest.mark.parametrize("folder", QUICK, ids=named)
def test_every_table_compiles(folder, tmp_path):
    write_tables(load(folder), tmp_path)
    files = sorted(tmp_path.glob("*.tex"))
    assert files
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
    assert len(text.encode()) < 5_000_000
    browser.open(page)
    assert browser.run("document.querySelectorAll('#table-main tbody tr').length") > 0
    assert browser.run("document.querySelectorAll('canvas.graph').length") > 0
    assert browser.errors == []
