"""Notebooks of the documentation: they run, and the committed outputs can be shown and name no machine."""

import base64
import getpass
import json
import re
import socket
from pathlib import Path

import matplotlib as mpl
import pytest
from cheap_runs import cheap_runs  # noqa: F401

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))
MAX_BYTES = 300_000
#: Smaller amounts of work, and the runtime in this process.
SHORTER = {
    '"use": "openvino"': '"use": "here:OpenVINO"',
    '"count": 80': '"count": 8',
    '"split": "calibration"': '"split": "calibration", "count": 4',
    "max_drop=3": "max_drop=90",
    "evaluations=12": 'evaluations=3, initial=["float", "linear"], baselines=["linear"], sampling={"max_ms": 5}, '
    'confirmation={"builds": 3, "rounds": 2, "candidates": 1}',
    '"evaluations": [10, 20, 40]': '"evaluations": [3, 6]',
    "range(5)": "range(2)",
}


def cells(notebook, kind):
    return [cell for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(notebook, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(mpl.rcParams, "backend", "agg")
    values = {"__name__": "__main__"}
    for cell in cells(notebook, "code"):
        source = "".join(cell["source"])
        for shown, ours in SHORTER.items():
            source = source.replace(shown, ours)
        exec(compile(source, notebook.name, "exec"), values)
    assert values["result"].complete


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook_outputs_have_images_and_no_host_names(notebook):
    text = notebook.read_text(encoding="utf-8")
    assert len(text) < MAX_BYTES
    outputs = [output for cell in cells(notebook, "code") for output in cell["outputs"]]
    assert [output for output in outputs if output["output_type"] == "error"] == []
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert all(base64.b64decode(picture).startswith(b"\x89PNG") for picture in pictures)
    shown = re.sub(r'"image/png": "[^"]*"', "", text)
    assert re.findall(r"(?<![\w.)])/(?:home|root|tmp|work|usr|opt)/", shown) == []
    assert [
        name for name in (getpass.getuser(), socket.gethostname()) if re.search(rf"\b{re.escape(name)}\b", shown)
    ] == []
