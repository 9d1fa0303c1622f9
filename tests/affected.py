"""Print the test files for the modules that differ from the last commit, for `make check`; run it by `python -P`.

For each changed module these are the tests that import it, or else those of its nearest importers.
"""

import ast
import subprocess
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def module_of(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def affected_tests(changed: list[Path]) -> set[Path]:
    """Return the test files for changed files, which are paths from the root of the checkout."""
    graph = grimp.build_graph("harness", "search")
    imports = {path: imported_by(path) for path in (ROOT / "tests").rglob("test_*.py")}
    found = {ROOT / path for path in changed if path.name.startswith("test_")}
    for module in {module_of(path) for path in changed} & graph.modules:
        level = seen = {module}
        while level and not (tests := {path for path, names in imports.items() if names & level}):
            level = {name for each in level for name in graph.find_modules_that_directly_import(each)} - seen
            seen = seen | level
        found |= tests if level else set()
    return found


if __name__ == "__main__":
    command = ["git", "diff", "--name-only", "--diff-filter=d", "HEAD", "--", "*.py"]
    differing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    print(*sorted(path.relative_to(ROOT) for path in affected_tests([Path(name) for name in differing])))
