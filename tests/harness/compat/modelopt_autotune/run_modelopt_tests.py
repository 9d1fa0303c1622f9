"""Run ModelOpt's own tests of its autotuner against our modules under its import names, and print how many pass.

`python tests/harness/compat/modelopt_autotune/run_modelopt_tests.py` fetches the files of a release from GitHub into a
temporary folder; `--folder FOLDER` takes files that are there already. By design a test fails that has a pattern cache
on disk, whose signatures are not ours.
"""

import argparse
import importlib
import pkgutil
import sys
import tempfile
import types
import urllib.request
from pathlib import Path
from typing import Any

import onnx
import pytest

RELEASE = "0.47.0"
URL = "https://raw.githubusercontent.com/NVIDIA/Model-Optimizer/{ref}/tests/{path}"
OURS, THEIRS = "harness.compat.modelopt_autotune", "modelopt.onnx.quantization.autotune"
TESTS = (
    "autotune_config", "autotuner", "insertion_points", "pattern_cache", "region", "region_inspect", "region_pattern",
    "region_search",
)  # fmt: skip
HELPER = "_test_utils/onnx/quantization/autotune/models.py"
OPSET = 21  # ONNX's latest operator set is often newer than the one that ONNX Runtime has


def fetch(ref: str, folder: Path) -> None:
    """Write the test files of a commit, branch or tag to a folder."""
    paths = {f"test_{name}.py": f"unit/onnx/quantization/autotune/test_{name}.py" for name in TESTS}
    for target, path in {**paths, HELPER: HELPER}.items():
        file = folder / target
        file.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(URL.format(ref=ref, path=path), timeout=60) as answer:
            file.write_bytes(answer.read())


def install_names() -> None:
    """Make our modules importable under ModelOpt's names, whether or not ModelOpt is installed."""
    ours = importlib.import_module(OURS)
    names = {THEIRS: ours}
    for module in pkgutil.iter_modules(ours.__path__):
        names[f"{THEIRS}.{module.name}"] = importlib.import_module(f"{OURS}.{module.name}")
    points: Any = names[f"{THEIRS}.insertion_points"]
    for name in ("graph_utils", "graph_indexing"):  # where the releases have the function
        made: Any = types.ModuleType(f"modelopt.onnx.quantization.{name}")
        made.get_tensor_consumer_node_indices = points.get_tensor_consumer_node_indices
        names[made.__name__] = made
    for name in ("modelopt", "modelopt.onnx", "modelopt.onnx.quantization"):
        package = types.ModuleType(name)
        package.__path__ = []
        names[name] = package
    sys.modules.update(names)
    for name, child in names.items():
        parent, _, last = name.rpartition(".")
        if parent and names[parent] is not ours:
            setattr(names[parent], last, child)


class Counter:
    """Count of the tests and of those that pass."""

    passed = total = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (not report.passed and report.when == "setup"):
            self.total += 1
            self.passed += report.passed


def run(folder: Path) -> Counter:
    """Run the tests of a folder and count them."""
    install_names()
    sys.path.insert(0, str(folder))
    make_model, opsets = onnx.helper.make_model, [onnx.helper.make_opsetid("", OPSET)]
    onnx.helper.make_model = lambda graph, **given: make_model(graph, **{"opset_imports": opsets, **given})
    counter = Counter()
    pytest.main([str(folder), "-q", "--rootdir", str(folder), "-p", "no:cacheprovider"], plugins=[counter])
    return counter


def main() -> None:
    parser = argparse.ArgumentParser(description="Run ModelOpt's tests of its autotuner against our modules.")
    parser.add_argument("--ref", default=RELEASE, help="commit, branch or tag (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="folder with the test files (default: fetch them)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if options.folder is None:
            fetch(options.ref, folder)
        found = run(folder.resolve())
    print(f"{found.passed} of {found.total} pass")


if __name__ == "__main__":
    main()
