"""Sizes of dynamic inputs: the batch is 1, a symbol has one size everywhere, other symbols are asked for once."""

import logging
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

import pytest
from onnx_models import normal

from harness.base.errors import UserError
from harness.cli.main import main
from harness.compat.modelopt_autotune.region_inspect import main as region_inspect
from harness.config.experiment import parse_experiment
from harness.graph.builder import GraphBuilder
from harness.graph.load import load
from harness.insight.region_report import inspect_regions
from harness.run.prepare.model_loader import open_model

Shape = tuple[int | str | None, ...]


def saved(folder: Path, inputs: Mapping[str, Shape]) -> Path:
    """Write a model with one Relu behind each input."""
    g = GraphBuilder("g")
    for name, shape in inputs.items():
        g.output(g.op("Relu", g.input(name, shape), name=f"relu_{name}"), shape, name=f"{name}_out")
    return g.save(folder / "m.onnx")


def shapes(path: Path, **sizes: Mapping[str, str] | Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    model = load(path, **sizes)  # type: ignore[arg-type]
    return {name: model.types[name].shape for name in model.inputs}


LSTM: Mapping[str, Shape] = {"states": ("batch", "time", 8), "cells": (3, "batch", 8)}


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        *(
            ({"x": (symbol, 3)}, {"x": (1, 3)})
            for symbol in ("batch", "batch_size", "N", "n", "bs", "unk__12", "input_dynamic_axes_1", None, "?")
        ),
        ({"x": ("batch", 4), "states": (3, "batch", 4)}, {"x": (1, 4), "states": (3, 1, 4)}),
        ({"x": ("N", 4), "y": (2, "N")}, {"x": (1, 4), "y": (2, 1)}),
        ({"x": ("batch", 4), "y": ("2*batch", 4)}, {"x": (1, 4), "y": (2, 4)}),
    ],
)
def test_dynamic_batch_is_set_to_1_with_one_warning(inputs, expected, tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert shapes(saved(tmp_path, inputs)) == expected
    (line,) = caplog.messages
    assert "set to 1" in line
    (name,) = re.findall(r"--dim (\S+)=8", line)  # which works
    assert any(8 in shape for shape in shapes(saved(tmp_path, inputs), dims={name: 8}).values())


@pytest.mark.parametrize(
    ("inputs", "asked"),
    [
        (LSTM, ["time=128"]),
        ({"x": ("batch", "N", 3)}, ["N=128"]),  # points of a cloud, not the batch
        ({"x": ("batch", "time"), "mask": ("batch", "past + time"), "cache": (2, "past")}, ["time=128", "past=128"]),
        ({"x": ("batch", 3, "h", "w")}, ["h=224", "w=224"]),
        ({"x": ("time", "batch", 8)}, ["time=128"]),
        ({"x": ("batch", "seq len")}, ["seq len=128"]),
    ],
)
def test_missing_symbol_sizes_are_requested_with_options(inputs, asked, tmp_path, capsys):
    path = saved(tmp_path, inputs)
    with pytest.raises(SystemExit):
        main(["inspect", "regions", str(path)])
    said = capsys.readouterr().err
    options = shlex.split(said[said.index("--dim") :])
    assert options == [word for each in asked for word in ("--dim", each)]
    main(["inspect", "regions", str(path), *options])
    assert region_inspect(["-m", str(path), *options]) == 0


def test_unnamed_dimensions_are_requested_by_shape(tmp_path, capsys):
    path = saved(tmp_path, {"x": ("batch", "time"), "y": (None, None, "time")})
    with pytest.raises(SystemExit):
        main(["inspect", "regions", str(path)])
    said = capsys.readouterr().err
    options = shlex.split(said[said.index("--dim") :])
    assert options == ["--dim", "time=128", "--shape", "y:1x128x128"]
    main(["inspect", "regions", str(path), *options])


def test_suggested_sizes_are_valid_for_the_model(tmp_path):
    """A sum with 64 position embeddings takes no sequence of 128; a convolution says its channels."""
    g = GraphBuilder("g")
    x, image = g.input("x", ("batch", "time", 8)), g.input("image", (None, None, None, None))
    g.output(g.op("Add", g.op("Relu", x), g.const([[0.0] * 8] * 16)), name="sum")
    g.output(g.op("Conv", image, g.const(normal(4, 2, 1, 1))), name="conv")
    with pytest.raises(UserError, match=r"--dim time=16 --shape image:1x2x224x224"):
        load(g.save(tmp_path / "m.onnx"))


def test_one_symbol_has_one_size(tmp_path):
    path = saved(tmp_path, LSTM)
    assert shapes(path, dims={"time": 5, "batch": 2}) == {"states": (2, 5, 8), "cells": (3, 2, 8)}
    assert shapes(path, shapes={"states": "4x5x8"}) == {"states": (4, 5, 8), "cells": (3, 4, 8)}
    assert shapes(path, shapes={"states": "4x5x8"}, dims={"time": 5})["cells"] == (3, 4, 8)
    with pytest.raises(UserError, match=r"shapes\.states: dimension 'time'.* 6 and 5: .*6 is from dims\.time"):
        shapes(path, shapes={"states": "4x5x8"}, dims={"time": 6})
    with pytest.raises(UserError, match=r"shapes\.cells: dimension 'batch'.* 4 and 2: .*4 is from shapes\.states"):
        shapes(path, shapes={"states": "4x5x8", "cells": "3x2x8"})


def test_sizes_of_symbol_expressions(tmp_path):
    path = saved(tmp_path, {"past": ("batch", "p"), "x": ("batch", "s"), "mask": ("batch", "p + s")})
    assert shapes(path, dims={"p": 3, "s": 4})["mask"] == (1, 7)
    assert shapes(path, dims={"s": 4}, shapes={"mask": "1x9"})["past"] == (1, 5)
    with pytest.raises(UserError, match=r"'p \+ s' is 9 \(shapes\.mask\), but p = 3 \(dims\.p\), s = 4"):
        shapes(path, dims={"s": 4, "p": 3}, shapes={"mask": "1x9"})


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"tme": 5}, r"dims\.tme: no input has such a dimension; did you mean 'time'"),
        ({"time": -1}, r"dims\.time: a size is an integer of at least 0, but got -1"),
        ({"batch": 0, "time": 5}, r"dims\.batch: a size is an integer of at least 1, but got 0"),
    ],
)
def test_invalid_dims_are_refused(dims, message, tmp_path):
    with pytest.raises(UserError, match=message):
        shapes(saved(tmp_path, LSTM), dims=dims)
    with pytest.raises(UserError, match=r"shapes\.states: a shape .* '0x5x8': a batch has at least 1 sample"):
        shapes(saved(tmp_path, LSTM), shapes={"states": "0x5x8"})


@pytest.mark.parametrize("option", ["time", "=3", "time=", "time=x", "time=-1"])
def test_invalid_dim_options_are_refused(option, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["inspect", "regions", str(saved(tmp_path, LSTM)), "--dim", option])
    assert "--dim time=128" in capsys.readouterr().err


def test_dims_in_experiments_and_python_interface(tmp_path):
    path = saved(tmp_path, LSTM)
    experiment = parse_experiment(f"experiment: e\nmodels: [{{use: {path}, dims: {{time: 16}}}}]", "e.yaml")
    model = open_model(experiment.models[0], tmp_path)
    assert model.types["states"].shape == (1, 16, 8)
    assert inspect_regions(str(path), {}, dims={"time": 16}).model.types["states"].shape == (1, 16, 8)
    with pytest.raises(UserError, match=r"models\.0\.dims\.time: .*greater than or equal to 0"):
        parse_experiment("experiment: e\nmodels: [{use: a.onnx, dims: {time: -1}}]", "e.yaml")
