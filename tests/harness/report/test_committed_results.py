"""Reports of the committed results: the records give the tables that are committed, in every form."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from digests import table_digest

from harness.report.render import write_tables
from harness.results.folder import load
from harness.results.manifest import check_results

LATEX = True
RESULTS = Path(__file__).resolve().parents[3] / "results"
FOLDERS = sorted(path.parent for path in RESULTS.glob("*/experiment.yaml"))
QUICK = [folder for folder in FOLDERS if sum(path.stat().st_size for path in folder.rglob("*.json*")) < 400_000]
"""The folders that are read in a second or two."""
#: Digests of the figures of every table, by folder: `tests/recorded/digests.py` computes each from a CSV file.
DIGESTS = json.loads((Path(__file__).parents[2] / "recorded" / "committed_tables.json").read_text(encoding="utf-8"))
PAGES = sorted(RESULTS.glob("*/report/index.html"))


def named(path: Path) -> str:
    return path.relative_to(RESULTS).parts[0]


@pytest.mark.parametrize("folder", QUICK, ids=named)
def test_the_tables_are_those_of_the_records(folder, tmp_path):
    write_tables(load(folder), tmp_path)
    assert {path.stem: table_digest(path) for path in sorted(tmp_path.glob("*.csv"))} == DIGESTS[folder.name]
    committed = {path.name: path for path in folder.glob("report/*.md")}
    assert [name for name, path in committed.items() if path.read_bytes() != (tmp_path / name).read_bytes()] == []


def test_committed_folders_are_complete():
    problems = {folder.name: check_results(folder)[2] for folder in FOLDERS}
    assert {name: found for name, found in problems.items() if found} == {}


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no LaTeX here")
@pytest.mark.parametrize("folder", QUICK, ids=named)
def test_latex_tables_compile(folder, tmp_path):
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
