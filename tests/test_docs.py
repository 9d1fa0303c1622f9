"""README and docs say what is true today."""

import inspect
import re
import shlex
from importlib.metadata import entry_points, version
from pathlib import Path

import pytest
import yaml
from cheap_runs import cheap_runs  # noqa: F401
from small import save_chain
from typer.testing import CliRunner

from harness.cli.main import COMMANDS, app
from harness.config.experiment import parse_experiment, to_yaml

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
QUICK_RUN = {
    "initial": ["float", "linear"],
    "baselines": ["linear"],
    "sampling": {"warmup_ms": 1, "min_samples": 3, "max_ms": 5},
    "confirmation": {"builds": 3, "rounds": 2, "candidates": 1},
}
BLOCKS = [
    pytest.param(source, block, id=f"{page.stem}: {source}")
    for page in PAGES
    for source, block in re.findall(
        r"<!-- (results/\S+\.md) -->\n(.*?)<!-- end -->", page.read_text(encoding="utf-8"), flags=re.DOTALL
    )
]


@pytest.mark.parametrize(("source", "block"), BLOCKS)
def test_tables_shown_are_those_of_committed_runs(source, block):
    table = (ROOT / source).read_text(encoding="utf-8").partition("\n\n")[0]
    assert block.strip() == table.strip()


def test_readme_has_at_most_150_lines():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    experiments = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    assert [len(shown.splitlines()) for shown in experiments] == [10]


def test_evidence_of_the_readme_is_that_of_committed_runs():
    """Each cell is a column of the linked table and its mean; the second column is the best of the fixed rows."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[[^\]]+\]\((results/\S+/overview\.md)\) \|(.+)\|$", page, flags=re.MULTILINE)
    assert 5 <= len(rows) <= 7
    for source, cells in rows:
        table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in (ROOT / source).read_text().splitlines()]
        shown = dict(re.findall(r"`(\w+)` ([^|]+?) \|", f"{cells}|"))
        means = [dict(zip(table[0], row, strict=True)) for row in table if row[:1] == ["geometric mean"]]
        (found,) = [mean for mean in means if shown.items() <= mean.items()]
        fixed = [
            name
            for name in table[0][3:]
            if not name.startswith(("float", "modelopt", "auto")) or name == "modelopt_ptq"
        ]
        assert float(shown[next(iter(shown))].split()[0]) == max(float(found[name].split()[0]) for name in fixed)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem)
def test_documentation_avoids_forbidden_words(page):
    """Code and tables of committed runs are left out."""
    text = page.read_text(encoding="utf-8")
    prose = re.sub(r"<!-- results/.*?<!-- end -->|```.*?```|`[^`]+`", "", text, flags=re.DOTALL)
    listed = (ROOT / "tests/forbidden_words.txt").read_text(encoding="utf-8").splitlines()
    words = [word for word in listed if word and not word.startswith("#")]
    assert re.findall(rf"\b(?:{'|'.join(words)})\b", prose, flags=re.IGNORECASE) == []


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, by GitHub's rule."""
    titles = re.findall(r"^#+ (.*)", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.stem)
def test_relative_links_and_anchors_resolve(page):
    for target, _, fragment in re.findall(r"\]\((?!https?:)([^)#\s]*)(#([^)]+))?\)", page.read_text(encoding="utf-8")):
        there = page.parent / target if target else page
        assert there.exists(), target
        assert not fragment or fragment in anchors(there), f"{target}#{fragment}"


def test_every_command_shown_exists():
    pages = "\n".join(path.read_text(encoding="utf-8") for path in PAGES)
    shown = set(re.findall(r"^(?:\$ )?qdq ((?:bench |inspect )?[a-z-]+)", pages, flags=re.MULTILINE))
    assert {"run", "report", "inspect regions", "autotune"} <= shown
    assert shown <= set(COMMANDS)
    listed = re.findall(
        r"^\| `qdq ((?:bench |inspect )?[a-z-]+)",
        (ROOT / "docs/reference/commands.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert set(listed) == set(COMMANDS)
    help_text = CliRunner().invoke(app, ["--help", "--all"]).output
    assert all(f" {command.partition(' ')[0]} " in help_text for command in COMMANDS)


@pytest.mark.slow
def test_every_command_of_the_tutorial_runs(tmp_path, monkeypatch):
    """The budget and the measurements are smaller than those of the page."""
    page = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    (experiment,) = re.findall(r"```yaml\n(.*?)```", page, flags=re.DOTALL)
    commands = re.findall(r"^\$ qdq (.+)", page, flags=re.MULTILINE)
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shorter = {
        "use: openvino,": "use: 'here:OpenVINO', label: openvino,",
        "count: 40": "count: 8",
        "initial: [float, all, linear]": "initial: [float, linear]",
        "baselines: [all, linear]": "baselines: [linear]",
        "evaluations: [10]": "evaluations: [3]",
        "{max_ms: 50}": "{warmup_ms: 5, min_samples: 3, max_ms: 10}",
        "rounds: 6, candidates: 2": "rounds: 2, candidates: 1",
    }
    for shown, ours in shorter.items():
        assert shown in experiment
        experiment = experiment.replace(shown, ours)
    (tmp_path / "detector.yaml").write_text(experiment, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(commands) == 8
    for command in commands:
        done = CliRunner().invoke(app, shlex.split(command))
        assert done.exit_code == 0, f"{command}: {done.output}"
    values = {}
    exec(program, values)
    assert values["detections"].ndim == 3


def test_the_programs_of_the_python_page_run(tmp_path, monkeypatch):
    """The measurements are shorter, and the runtime is in this process."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference/python.md").read_text(), flags=re.DOTALL)
    save_chain(tmp_path / "model.onnx", (8, 12))
    monkeypatch.chdir(tmp_path)
    shorter = {
        '"use": "openvino"': '"use": "here:OpenVINO"',
        "evaluations=25": f"evaluations=4, progress=False, **{QUICK_RUN}",
        "0, 12, 200": "0, 12, 40",
        "(200,": "(40,",
    }
    values = {}
    for program in programs:
        for shown, ours in shorter.items():
            program = program.replace(shown, ours)
        exec(program, values)
    assert values["result"].complete
    assert (tmp_path / "model-int8.onnx").exists()
    assert values["made"].pairs == values["made"].edges > 0


def test_test_files_named_in_the_docs_exist():
    named = {
        name
        for page in PAGES
        for name in re.findall(r"`(?:\S*?)([\w/]*test_\w+\.py)\b", page.read_text(encoding="utf-8"))
    }
    files = [str(path) for path in (ROOT / "tests").rglob("test_*.py")]
    assert [
        name for name in sorted(named) if not any(file.endswith(f"/{name.removeprefix('tests/')}") for file in files)
    ] == []


def test_experiments_shown_in_the_docs_are_valid():
    for page in (ROOT / "README.md", ROOT / "docs/reference/experiment.md"):
        shown = re.findall(r"```yaml\n(experiment:.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        assert shown, page.name
        for text in shown:
            assert parse_experiment(text, page.name).models


def test_documented_experiment_defaults_match_code():
    page = (ROOT / "docs/reference/experiment.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(experiment: shortest\n.*?)```", page, flags=re.DOTALL)
    shortest = parse_experiment("experiment: shortest\nmodels: [net.onnx]", "shortest")
    assert parse_experiment(shown, "docs") == shortest
    written, whole = yaml.safe_load(shown), yaml.safe_load(to_yaml(shortest))
    for one, other in ((written, whole), (written["models"][0], whole["models"][0])):
        assert one.keys() == other.keys()
        sections = {key for key, value in other.items() if isinstance(value, dict)}
        assert {key: set(one[key]) for key in sections} == {key: set(other[key]) for key in sections}


def test_documented_searcher_settings_match_code():
    page = (
        (ROOT / "docs/reference/searchers.md")
        .read_text(encoding="utf-8")
        .partition("## Settings")[2]
        .partition("\n## ")[0]
    )
    shown = {
        name: yaml.safe_load(f"{{{settings}}}")
        for name, settings in re.findall(r"^\| `(\w+)` \| (?:`([^`]+)`|none)", page, flags=re.MULTILINE)
    }
    made = {point.name: inspect.signature(point.load()).parameters for point in entry_points(group="qdq.searchers")}
    assert shown == {
        name: {
            key: list(setting.default) if isinstance(setting.default, tuple) else setting.default
            for key, setting in settings.items()
            if key not in {"space", "seed"}
        }
        for name, settings in made.items()
    }


def test_the_citations_are_valid_and_of_this_version():
    """Required keys by the schema of CFF 1.2.0 (citation-file-format.github.io)."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"authors", "cff-version", "message", "title"} <= cited.keys()
    assert (cited["cff-version"], cited["type"]) == ("1.2.0", "software")
    assert all({"name"} <= author.keys() or {"family-names"} <= author.keys() for author in cited["authors"])
    assert cited["version"] == version("qdq-bench")
    (entry,) = re.findall(
        r"```bibtex\n@\w+\{\S+,\n(.*?)\n\}\n```", (ROOT / "docs/results/comparisons.md").read_text(), re.S
    )
    fields = dict(re.findall(r"^  (\w+) = \{(.*)\},$", entry, re.MULTILINE))
    assert fields["title"] == cited["title"]
    assert fields["author"] == f"{{{cited['authors'][0]['name']}}}"
    assert cited["version"] in fields["note"]


def test_glossary_terms_are_unique_with_meaning_and_source():
    page = (ROOT / "docs/glossary.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in row.split("|")[1:-1]] for row in re.findall(r"^\| (?!term \|).+", page, re.MULTILINE)
    ]
    terms = [term for term, _, _ in rows]
    assert 35 <= len(terms) == len(set(terms)) <= 50
    assert [term for term, meaning, source in rows if not (meaning.endswith(".") and source)] == []


@pytest.mark.parametrize("path", sorted((ROOT / "experiments").glob("*.yaml")), ids=lambda path: path.name)
def test_committed_experiments_are_valid_and_called_like_their_file(path):
    assert parse_experiment(path.read_text(encoding="utf-8"), path.name).experiment == path.stem


@pytest.mark.parametrize("folder", sorted(ROOT.glob("results/*/experiment.yaml")), ids=lambda path: path.parent.name)
def test_committed_results_are_of_the_committed_experiment(folder):
    source = ROOT / "experiments" / f"{folder.parent.name.removesuffix('_again')}.yaml"  # a run and its repetition
    stored = parse_experiment(folder.read_text(encoding="utf-8"), str(folder))
    assert stored == parse_experiment(source.read_text(encoding="utf-8"), str(source))
