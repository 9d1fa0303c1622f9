"""Execution of the original and the prepared version of a model in ONNX Runtime without graph optimizations."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from harness.base.random_inputs import MAX_INPUT_ELEMENTS, InputTypes
from harness.graph.passes.normalize import name_nodes
from harness.graph.protos import iter_graphs, replace_field, tensors_read

_OWN_PREFIX = "qdq.own."
_NUMPY_DTYPE_NAMES = {"float": "float32", "double": "float64", "string": "object"}
READABLE_TYPES = frozenset(
    "bool double float float16 int8 int16 int32 int64 string uint8 uint16 uint32 uint64 undefined".split()  # noqa: SIM905
)
"""Element types of which NumPy has arrays; "undefined" is that of an output without a known type, or of a map."""
_ORT_ERROR_PREFIX = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (This is an invalid model\. )?")
_MAX_SINGLE_THREAD_BYTES = 4_000_000  # smaller models run in one thread
MAX_ERROR_CHARS = 200
ALL_DRAWS = (0, 1, 2)

Feeds = Mapping[str, npt.NDArray[Any]]
Values = dict[str, Any]
"""Arrays by tensor name; lists of arrays for sequences, None for an empty optional."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonTask:
    """Two versions of a model and the inputs to compare them on.

    Attributes:
        original: File or serialized original model.
        prepared: File or serialized prepared model.
        inputs: Element type and shape of each input of the prepared model.
        widened: Inputs with one sample in the original and `samples` in the prepared model.
        samples: Number of samples of the prepared model.
        draws: Kinds of random inputs, in the order in which they are tried; see `iter_random_inputs`.
    """

    original: Path | bytes
    prepared: Path | bytes
    inputs: InputTypes
    widened: frozenset[str] = frozenset()
    samples: int = 1
    draws: tuple[int, ...] = ALL_DRAWS


class RunFailed(Exception):
    """Failure to run a version of a model, with the error of ONNX Runtime.

    Attributes:
        not_implemented: Whether ONNX Runtime lacks an operator or type of the model.
    """

    def __init__(self, error: Exception | str) -> None:
        text = " ".join(str(error).split())
        super().__init__(_ORT_ERROR_PREFIX.sub("", text)[:MAX_ERROR_CHARS])
        self.not_implemented = type(error).__name__ == "NotImplemented"


@dataclass(slots=True)
class ModelVersion:
    """Version of a model in a comparison; methods raise `RunFailed` if ONNX Runtime is missing or fails.

    Attributes:
        source: File or serialized model.
        proto: Parsed model without its external data.
    """

    source: Path | bytes
    task: ComparisonTask
    proto: onnx.ModelProto = field(init=False)

    def __post_init__(self) -> None:
        """Parse the model, name its nodes and remove unread initializers.

        ONNX Runtime refuses names that are not unique, and takes quadratic time to remove initializers.
        """
        if isinstance(self.source, Path):
            self.proto = onnx.load(self.source, load_external_data=False)
        else:
            self.proto = onnx.load_from_string(self.source)
        graph = self.proto.graph
        name_nodes(graph)
        read = {name for node in graph.node for name in tensors_read(node)}
        read.update(value.name for value in (*graph.input, *graph.output))
        unread = [tensor for tensor in graph.initializer if tensor.name not in read]
        if unread:
            replace_field(graph.initializer, [tensor for tensor in graph.initializer if tensor.name in read])

    def open_session(self) -> Any:
        """Return a session of ONNX Runtime on the CPU without graph optimizations."""
        try:
            import onnxruntime
        except ImportError as error:
            raise RunFailed(f"it is not installed ({error})") from error
        raw = self.proto.SerializeToString()
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        if isinstance(self.source, Path):
            entry = "session.model_external_initializers_file_folder_path"
            options.add_session_config_entry(entry, str(self.source.parent))
        elif len(raw) < _MAX_SINGLE_THREAD_BYTES:
            options.intra_op_num_threads = 1
        try:
            return onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions have no other common base
            raise RunFailed(error) from error

    def run(self, session: Any, feeds: Feeds, names: Sequence[str] | None = None) -> Values:
        """Run one inference in a session of `open_session`, and return outputs by name, by default all.

        Outputs of types that NumPy lacks are left out.
        """
        kinds = {value.name: value.type for value in session.get_outputs()}
        readable = {f"tensor({kind})" for kind in READABLE_TYPES}
        names = [n for n in names or kinds if kinds[n] in readable or not kinds[n].startswith("tensor(")]
        try:
            return dict(zip(names, session.run(names, dict(feeds)), strict=True)) if names else {}
        except Exception as error:
            raise RunFailed(error) from error

    def run_samples(self, session: Any, feeds: Feeds) -> Values:
        """Run the original sample by sample if the prepared model takes several, and join the results.

        Args:
            session: Session of this version; see `open_session`.
            feeds: Inputs by name, for all samples of the prepared model.
        """
        widened = self.task.widened
        if not widened:
            return self.run(session, feeds)
        runs = [
            self.run(session, {name: v[i : i + 1] if name in widened else v for name, v in feeds.items()})
            for i in range(self.task.samples)
        ]
        return {name: _join_samples([run[name] for run in runs]) for name in runs[0]}

    def compute_tensors(self, names: Sequence[str], feeds: Feeds) -> Values:
        """Run the model with some tensors of the main graph as its outputs, and return their values by name.

        The outputs of `proto` are replaced. `RunFailed` is raised for a name that the graph lacks.
        """
        return self.run_samples(self._open_session_with_outputs(names), feeds)

    def _open_session_with_outputs(self, outputs: Sequence[str]) -> Any:
        replace_field(self.proto.graph.output, [onnx.ValueInfoProto(name=name) for name in outputs])
        return self.open_session()

    def compute_nodes_separately(
        self, values: Values, feeds: Feeds, wanted: Collection[str], times: int = 1
    ) -> list[Values]:
        """Run every node on given values instead of the results of other nodes; this changes `proto`.

        Args:
            values: Value of each tensor, which its readers get.
            feeds: Inputs of the model by name.
            wanted: Names of the results to return.
            times: Number of runs in one session, in which random numbers differ from run to run.

        Returns:
            The results by name for each run.
        """
        graph, made = self.proto.graph, []
        for node in graph.node:
            for slot, name in enumerate(node.output):
                if name in values:
                    made.append(name)
                    node.output[slot] = _OWN_PREFIX + name
        read = {name for node in graph.node for name in tensors_read(node)}
        given = {name: values[name] for name in made if name in read}
        for name, value in given.items():
            kind = helper.np_dtype_to_tensor_dtype(value.dtype)
            graph.input.append(helper.make_tensor_value_info(name, kind, value.shape))
        session = self._open_session_with_outputs([_OWN_PREFIX + name for name in made if name in wanted])
        runs = [self.run(session, {**feeds, **given}) for _ in range(times)]
        return [{name.removeprefix(_OWN_PREFIX): value for name, value in run.items()} for run in runs]


def _join_samples(results: list[Any]) -> Any:
    """Join the results for single samples along the first axis; a result without such an axis is the same for all."""
    first = results[0]
    return np.concatenate(results) if isinstance(first, np.ndarray) and first.shape[:1] == (1,) else first


def accepted_runs(original: ModelVersion, task: ComparisonTask) -> list[tuple[Values, Feeds]]:
    """Run the original on random inputs of several kinds.

    Returns:
        Pairs of results and inputs. For a model with branches, all accepted inputs, because each branch may need other
        ones; else the first inputs with a result that is not constant, if there are any.

    Raises:
        RunFailed: The model accepts none of the inputs.
    """
    session, accepted, problem = original.open_session(), [], RunFailed("no inputs could be drawn")
    branches = any(node.op_type == "If" for graph in iter_graphs(original.proto.graph) for node in graph.node)
    for feeds in iter_random_inputs(task.inputs, task.draws):
        try:
            accepted.append((original.run_samples(session, feeds), feeds))
        except RunFailed as error:
            problem = error
            continue
        if not branches and any(map(is_informative, accepted[-1][0].values())):
            return accepted[-1:]
    if not accepted:
        raise problem
    return accepted if branches else accepted[:1]


def is_informative(value: Any) -> bool:
    """Return whether a result is a float array with different finite values, so that its equality is conclusive."""
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        return False
    finite = value[np.isfinite(value)]
    return bool(finite.size > 1 and finite.min() < finite.max())


def iter_random_inputs(inputs: InputTypes, draws: Sequence[int] = ALL_DRAWS) -> Iterator[Feeds]:
    """Yield random inputs of several kinds.

    Args:
        inputs: Element type and shape of each input.
        draws: Kinds. 0: normal floats, integers 0 and 1 (all values for 8 bits); 1: floats from 0 to 1, integers 0;
            2: floats from 1 to 2, integers 1.

    Raises:
        RunFailed: An input is too large, or of a type that NumPy lacks.
    """
    for draw in draws:
        rng = np.random.default_rng(draw)
        yield {name: _random_input(rng, draw, name, inputs[name]) for name in sorted(inputs)}


def _random_input(
    rng: np.random.Generator, draw: int, name: str, declared: tuple[str, tuple[int, ...]]
) -> npt.NDArray[Any]:
    kind, shape = declared
    if math.prod(shape) > MAX_INPUT_ELEMENTS:
        raise RunFailed(f"input {name!r} has {math.prod(shape):,} elements")
    try:
        dtype = np.dtype(_NUMPY_DTYPE_NAMES.get(kind, kind))
    except TypeError as error:
        raise RunFailed(f"input {name!r} is of type {kind}, which NumPy lacks") from error
    if dtype.kind == "O":
        return np.full(shape, "text", dtype=object)
    if dtype.kind == "f":
        return np.asarray(rng.random(shape) + draw - 1 if draw else rng.standard_normal(shape)).astype(dtype)
    if dtype.kind in "iu" and dtype.itemsize == 1 and not draw:
        return np.asarray(rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max + 1, shape)).astype(dtype)
    return np.asarray(np.full(shape, draw - 1) if draw else rng.integers(0, 2, shape)).astype(dtype)
