"""Conversion of the objects of a Python program (models, data, metrics, searchers) to entries of an experiment."""

from __future__ import annotations

import inspect
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from harness.accuracy.data.arrays import UNNAMED_ARRAY, array_kind, count_samples, is_array_data
from harness.accuracy.metrics.labelled import source_digest
from harness.base.errors import MAX_COUNT, EvaluationFailed, UserError
from harness.base.text import safe_file_name
from harness.graph.io.files import to_proto, write_model
from harness.plugins.api import Accuracy
from harness.plugins.registry import call_plugin, register_object


def model_mapping(
    model: Any,
    folder: Path,
    *,
    calibration: Any = None,
    metric: Any = None,
    test: tuple[Any, Any] | None = None,
    preprocess: Any = None,
    example_inputs: Any = None,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a model in the form of an experiment file; for the arguments see `harness.qdq.autotune`.

    Args:
        folder: Folder in which the objects are stored as files.
        sizes: Values of `shapes` and `dims`.

    Raises:
        UserError: An object is of an unsupported type.
    """
    described: dict[str, Any] = {"use": save_program_model(model, folder, example_inputs)}
    if calibration is not None:
        data = data_mapping(calibration, folder / "calibration")
        described["calibration"] = {"data": data, **({"samples": MAX_COUNT} if data["use"] in ("npz", "npy") else {})}
    if preprocess is not None:
        described["preprocess"] = plugin_mapping("preprocess", preprocess)
    described |= {key: dict(given) if isinstance(given, Mapping) else given for key, given in sizes.items() if given}
    if metric is not None:
        described["evaluator"] = evaluator_mapping(metric, test, folder)
    return described


def save_program_model(model: Any, folder: Path, example_inputs: Any = None) -> str:
    """Return the name of a model for an experiment, and write an object to a file first.

    Args:
        model: A path, `zoo:NAME` or `assets:PATH`, which is returned; serialized ONNX, an `onnx.ModelProto`, or a
            `torch.nn.Module`.
        example_inputs: Inputs of a PyTorch module: a tensor, a tuple of them, or a mapping of keyword arguments.

    Raises:
        UserError: The type is unsupported, a PyTorch module has no inputs, or a package for its export is missing.
    """
    if isinstance(model, str | Path):
        return str(model)
    folder.mkdir(parents=True, exist_ok=True)
    torch = sys.modules.get("torch")  # imported if the model is a module of it
    if torch is not None and isinstance(model, torch.nn.Module):
        if example_inputs is None:
            raise UserError(
                "model: a PyTorch module needs example_inputs, a tensor or a tuple of the inputs of one call"
            )
        by_name = isinstance(example_inputs, dict)
        args = () if by_name else example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        names, training = example_inputs if by_name else None, model.training
        model.eval()
        try:
            program = torch.onnx.export(model, args, kwargs=names, dynamo=True, verbose=False)
        except ImportError as error:
            raise UserError(
                f"model: the export of a PyTorch module needs onnxscript: pip install onnxscript ({error})"
            ) from error
        finally:
            model.train(training)
        return str(write_model(program.model_proto, folder / f"{safe_file_name(type(model).__name__)}.onnx"))
    path = folder / "model.onnx"
    if isinstance(model, bytes):
        path.write_bytes(model)
        return str(path)
    try:
        return str(write_model(to_proto(model), path))
    except TypeError as error:
        raise UserError(f"model: {error}; a path, bytes and a torch.nn.Module can be used too") from error


def plugin_mapping(key: str, plugin: Any) -> dict[str, Any]:
    """Return a plug-in in the form of an experiment file, and register a class of the program under a name.

    Args:
        key: Name of the argument, for messages.
        plugin: Name, mapping or class.

    Raises:
        UserError: It is none of them, or the mapping has no name.
    """
    if isinstance(plugin, str):
        return {"use": plugin}
    if isinstance(plugin, Mapping):
        if not isinstance(plugin.get("use"), str):
            raise UserError(f'{key}: a mapping needs the name of a plug-in, {{"use": NAME, "params": {{...}}}}')
        return dict(plugin)
    if not hasattr(plugin, "__qualname__"):
        raise UserError(f"{key}: a name, a mapping or a class, but got {type(plugin).__name__}")
    return {"use": register_object(plugin)}


def evaluator_mapping(metric: Any, test: tuple[Any, Any] | None, folder: Path) -> dict[str, Any]:
    """Return an evaluator in the form of an experiment file, and register an object of the program under a name.

    Args:
        metric: Name, function or evaluator, see `harness.qdq.autotune`.
        test: Inputs and their labels, or None.
        folder: Folder in which inputs and labels are stored as files.

    Raises:
        UserError: The object is not an evaluator, or `test` is not a pair.
    """
    if isinstance(metric, str | Mapping):
        described = plugin_mapping("metric", metric)
    elif hasattr(metric, "score"):
        described = {"use": register_object(_factory_of(metric))}
    elif not callable(metric):
        raise UserError(f"metric: a function, an evaluator or the name of one, but got {type(metric).__name__}")
    else:
        values, mode = (("run",), "without") if test is None else (("outputs", "labels"), "with")
        with suppress(ValueError):  # some built-in functions have no signature
            signature = inspect.signature(metric)
            try:
                signature.bind(*values)
            except TypeError as error:
                name = getattr(metric, "__qualname__", type(metric).__name__)
                raise UserError(
                    "metric: a function (outputs, labels) with test=(inputs, labels), a function (run) without test, "
                    f"but got {name}{signature} {mode} test"
                ) from error
        if test is None:
            described = {"use": register_object(_factory_of(_FunctionEvaluator(metric), metric))}
        else:
            described = {"use": "metric", "params": {"function": register_object(metric)}}
    if test is None:
        return described
    if not isinstance(test, tuple | list) or len(test) != 2:
        raise UserError(f"test: a pair (inputs, labels), but got {type(test).__name__}")
    samples, labels = test
    data = data_mapping(samples, folder / "test")
    rows = _to_array(labels, "labels")
    if is_array_data(data) and rows.shape[:1] != (count := count_samples(data),):
        raise UserError(f"test: {count} inputs, but {len(rows) if rows.ndim else 'one number as'} labels")
    np.save(folder / "labels.npy", rows)
    return described | {
        "params": {**described.get("params", {}), "data": {**data, "labels": str(folder / "labels.npy")}}
    }


class _FunctionEvaluator:
    """Evaluator that calls a metric function with `run`, a function from inputs to outputs of the engine."""

    metric, higher_is_better = "metric", True

    def __init__(self, function: Callable[[Any], float]) -> None:
        self._function = function
        self.fingerprint = source_digest(function)

    def score(self, infer: Any) -> Any:
        name = getattr(self._function, "__qualname__", type(self._function).__name__)
        try:
            value = call_plugin(f"metric {name}", lambda: float(self._function(infer)))
        except UserError as error:
            raise EvaluationFailed(str(error)) from error
        return Accuracy(metrics={self.metric: value})


def _factory_of(evaluator: Any, named: Any = None) -> Any:
    """Return a factory without parameters that returns the evaluator and has the name of its class or function."""

    def factory() -> Any:
        return evaluator

    source = type(evaluator) if named is None else named
    factory.__module__, factory.__qualname__ = source.__module__, source.__qualname__
    vars(factory).update(metric=evaluator.metric, higher_is_better=evaluator.higher_is_better)
    return factory


def data_mapping(samples: Any, stem: Path) -> dict[str, Any]:
    """Return data in the form of an experiment file, and write arrays to a file.

    Args:
        samples: An array, a mapping of input names to arrays, an iterable of either, a file or folder of files, or a
            data mapping. Batches whose samples differ in shape become a folder with a file for each batch.
        stem: Path of the file without suffix, or of the folder.

    Raises:
        UserError: The type is unsupported, there are no samples, or they have different numbers of axes.
    """
    if isinstance(samples, Mapping) and isinstance(samples.get("use"), str):
        return dict(samples)
    if isinstance(samples, str | Path):
        return {"use": array_kind(Path(samples)), "path": str(samples)}
    if not (isinstance(samples, Mapping) or hasattr(samples, "__array__")):
        if not isinstance(samples, Iterable):
            raise UserError(f"{stem.name}: an array, batches of arrays or a file, but got {type(samples).__name__}")
        return _save_batches(_batch_arrays(samples, stem.name), stem)
    if isinstance(samples, Mapping) and any(map(_differ_in_shape, samples.values())):
        return _save_batches(_batch_arrays(_split_samples(samples, stem.name), stem.name), stem)
    return _save_arrays(samples, stem)


def _save_batches(batches: Sequence[Mapping[str, np.ndarray[Any, Any]]], stem: Path) -> dict[str, Any]:
    shapes = [{name: array.shape[1:] for name, array in batch.items()} for batch in batches]
    if all(each == shapes[0] for each in shapes):
        return _save_arrays({name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}, stem)
    if stem.exists():
        shutil.rmtree(stem)
    saved = [_save_arrays(batch, stem / f"{number:06}") for number, batch in enumerate(batches)]
    return {"use": saved[0]["use"], "path": str(stem)}


def _save_arrays(samples: Any, stem: Path) -> dict[str, Any]:
    """Write an array, or a mapping of arrays by the name of the input, to a file; see `data_mapping`."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(samples, Mapping) and UNNAMED_ARRAY not in samples:
        path = stem.with_suffix(".npz")
        arrays: dict[str, Any] = {name: _to_array(array, stem.name, name) for name, array in samples.items()}
        np.savez(path, **arrays)
    else:
        path = stem.with_suffix(".npy")
        np.save(path, _to_array(samples[UNNAMED_ARRAY] if isinstance(samples, Mapping) else samples, stem.name))
    return {"use": path.suffix.removeprefix("."), "path": str(path)}


def _differ_in_shape(samples: Any) -> bool:
    try:
        return isinstance(samples, list | tuple) and len({np.shape(sample) for sample in samples}) > 1
    except ValueError:  # a sample is no array; `_to_array` reports it
        return False


def _split_samples(samples: Mapping[str, Any], what: str) -> list[dict[str, Any]]:
    """Return a batch for each sample of a mapping of input names to samples.

    Raises:
        UserError: Inputs have different numbers of samples.
    """
    counts = {name: len(array) for name, array in samples.items()}
    if len(set(counts.values())) != 1:
        raise UserError(f"{what}: every input has as many samples as the others, but their numbers are {counts}")
    return [
        {name: _to_array(array[i], what, name)[None] for name, array in samples.items()}
        for i in range(next(iter(counts.values())))
    ]


def _batch_arrays(batches: Iterable[Any], what: str) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Return batches, each an array or a mapping of arrays, as arrays by the name of the input, "" for the only one.

    Raises:
        UserError: There are none, or a batch differs from the first one in its inputs or in the number of axes.
    """
    found = [batch if isinstance(batch, Mapping) else {UNNAMED_ARRAY: batch} for batch in batches]
    if not found:
        raise UserError(f"{what}: there are no samples")
    for number, batch in enumerate(found, start=1):
        if batch.keys() != found[0].keys():
            inputs, first = (", ".join(map(repr, each)) for each in (batch, found[0]))
            raise UserError(f"{what}: batch {number} has the inputs {inputs}, but batch 1 has {first}")
    arrays = [{name: _to_array(array, what, name) for name, array in batch.items()} for batch in found]
    for number, named in enumerate(arrays, start=1):
        for name, array in named.items():
            if not array.ndim:
                raise UserError(
                    f"{what}: a batch{_of_input(name)} is a single number; its first axis counts the samples"
                )
            if array.ndim != arrays[0][name].ndim:
                raise _other_shape(
                    what, f"batch {number}{_of_input(name)}", array.shape, "batch 1", arrays[0][name].shape
                )
    return arrays


def _to_array(value: Any, what: str, name: str = "") -> np.ndarray[Any, Any]:
    """Return samples as an array; raise `UserError` if they have different shapes or are no numbers."""
    try:
        array = np.asarray(value)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = [np.shape(sample) for sample in value] if isinstance(value, Sequence) else []
        for number, shape in enumerate(shapes, start=1):
            if shape != shapes[0]:
                raise _other_shape(what, f"sample {number}{_of_input(name)}", shape, "sample 1", shapes[0]) from error
        raise UserError(f"{what}: the samples{_of_input(name)} cannot be read as an array: {error}") from error
    if array.dtype.hasobject:
        raise UserError(f"{what}: the samples{_of_input(name)} are objects of Python, not numbers of one shape")
    return array


def _other_shape(what: str, item: str, shape: Sequence[int], first: str, first_shape: Sequence[int]) -> UserError:
    sizes = [" x ".join(map(str, each)) or "a single number" for each in (shape, first_shape)]
    return UserError(
        f"{what}: {item} is {sizes[0]}, but {first} is {sizes[1]}; pad or cut the samples to one size, or give samples "
        "of different length as batches of one, each an array whose first axis is 1"
    )


def _of_input(name: str) -> str:
    return f" of input {name!r}" if name else ""
