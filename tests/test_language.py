"""Language of the code: docstrings, comments, messages and pages avoid the words of forbidden_words.txt."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTED = (ROOT / "tests/forbidden_words.txt").read_text(encoding="utf-8").splitlines()
WORDS = re.compile(
    rf"\b(?:{'|'.join(word for word in LISTED if word and not word.startswith('#'))})\b", flags=re.IGNORECASE
)
FILES = [path for package in ("harness", "search") for path in sorted((ROOT / package).rglob("*.py"))]


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a file and its strings of several words (docstrings, messages), without code."""
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.count(" ") > 1:
            yield node.lineno, re.sub(r"`[^`]*`", "", node.value)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_avoid_forbidden_words(path):
    assert [(line, found) for line, text in prose(path) if (found := WORDS.findall(text))] == []


def test_report_templates_avoid_forbidden_words():
    assets = ROOT / "harness/report/assets"
    pages = [path for pattern in ("*.j2", "*.js") for path in assets.glob(pattern) if ".min." not in path.name]
    found = {path.name: WORDS.findall(path.read_text(encoding="utf-8")) for path in pages}
    assert not any(found.values()), found


def described_names(docstring: str, section: str) -> list[str]:
    """Return the names that a section of a docstring describes, in order."""
    found = re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", docstring, flags=re.MULTILINE)
    return re.findall(r"^    (\w+): ", found[1], flags=re.MULTILINE) if found else []


def test_docstring_arguments_and_attributes_exist_in_code():
    """Attributes and arguments in docstrings have the names in the code, and start as noun phrases."""
    stale, questions = [], []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ClassDef | ast.FunctionDef) or not (text := ast.get_docstring(node)):
                continue
            where = f"{path.relative_to(ROOT)} {node.name}"
            questions += re.findall(r"^    (\w+: (?:What|Which|How|Where|Those|That) )", text, flags=re.MULTILINE)
            if isinstance(node, ast.ClassDef):
                code = "\n".join(ast.unparse(child) for child in node.body[1:])
                names = described_names(text, "Attributes")
                stale += [f"{where}: {name}" for name in names if not re.search(rf"\b{name}\b", code)]
            else:
                arguments = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
                stale += [f"{where}: {name}" for name in described_names(text, "Args") if name not in arguments]
    assert (stale, questions) == ([], [])
