"""Comparison of the results of the original and the prepared version of a model.

It runs in the helper process: neither version is trusted, and ONNX Runtime may crash.

Outputs are compared end to end first. If the result is not conclusive (an output deviates, or is an index, a boolean or
a constant, which shows little of the nodes before it), every node is compared separately: each node of the prepared
model reads the values that the original computed. A node that then agrees was not changed by preparation: it only
amplified rounding, as ArgMax, TopK, NonMaxSuppression, Round and casts to integers do near a tie.
"""

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
from onnx import TensorProto, helper, numpy_helper

from harness.base.random_inputs import MAX_INPUT_ELEMENTS, InputTypes
from harness.graph.passes.normalize import name_nodes
from harness.graph.passes.static_shapes import static_types
from harness.graph.protos import iter_graphs, iter_nodes, replace_field, tensors_read

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
        joined = {}
        for name, first in runs[0].items():  # a result without an axis of samples is the same for all
            is_sample = isinstance(first, np.ndarray) and first.shape[:1] == (1,)
            joined[name] = np.concatenate([run[name] for run in runs]) if is_sample else first
        return joined

    def compute_tensors(self, names: Sequence[str], feeds: Feeds) -> Values:
        """Run the model with some tensors of the main graph as its outputs, and return their values by name.

        The outputs of `proto` are replaced. `RunFailed` is raised for a name that the graph lacks.
        """
        replace_field(self.proto.graph.output, [onnx.ValueInfoProto(name=name) for name in names])
        return self.run_samples(self.open_session(), feeds)

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
        outputs = [onnx.ValueInfoProto(name=_OWN_PREFIX + name) for name in made if name in wanted]
        replace_field(graph.output, outputs)
        session = self.open_session()
        runs = [self.run(session, {**feeds, **given}) for _ in range(times)]
        return [{name.removeprefix(_OWN_PREFIX): value for name, value in run.items()} for run in runs]


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


# Smallest signal-to-noise ratio of equal models. In FP32, a folded BatchNormalization has more than 110 dB, a changed
# operator less than 60 dB. With 11 or 8 significant bits, one rounding gives 70 or 52 dB, and roundings add up.
FP32_THRESHOLD_DB = 80.0
_THRESHOLD_DB_BY_DTYPE = {TensorProto.FLOAT16: 40.0, TensorProto.BFLOAT16: 25.0}
_ROUNDING_DB_BY_THRESHOLD = {FP32_THRESHOLD_DB: 144.0, 40.0: 66.0, 25.0: 48.0}  # of a value to half its last digit
_ROUNDING_MARGIN_DB = 20.0
_SENTINEL_MAGNITUDE = 1e30  # larger equal values, such as the -3.4e38 of attention masks, are no part of the signal
MAX_LOCAL_ELEMENTS = 500_000_000  # of intermediate results, which the comparison of nodes holds in memory twice


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceVerdict:
    """Result of a comparison.

    Attributes:
        change: Description of a difference; "" if none was found.
        unchecked: Reason why the comparison is not complete; "" if it is.
    """

    change: str = ""
    unchecked: str = ""


def compare_runs(task: ComparisonTask) -> EquivalenceVerdict:
    """Run both versions on random inputs; return the verdict on their outputs and, if necessary, on single nodes."""
    try:
        original = ModelVersion(task.original, task)
        runs = accepted_runs(original, task)
    except RunFailed as error:
        return EquivalenceVerdict(unchecked=f"ONNX Runtime cannot run the original: {error}")
    verdict, limit_db = EquivalenceVerdict(), threshold_db(original.proto)
    try:
        prepared = ModelVersion(task.prepared, task)
        session = prepared.open_session()
        for before, feeds in runs:
            after = prepared.run(session, feeds)
            deviations = {name: deviation_db(value, after.get(name)) for name, value in before.items()}
            failing = {name: found_db for name, found_db in deviations.items() if found_db < limit_db}
            if failing or not deviations or not all(map(is_informative, before.values())):
                verdict = _compare_uninformative(task, feeds, before, failing, limit_db)
            if verdict != EquivalenceVerdict():
                break
    except RunFailed as error:
        if error.not_implemented:
            return EquivalenceVerdict(unchecked=f"ONNX Runtime cannot run the prepared model: {error}")
        return EquivalenceVerdict(change=f"the prepared model does not run in ONNX Runtime: {error}")
    return verdict


def _compare_uninformative(
    task: ComparisonTask, feeds: Feeds, before: Values, failing: dict[str, float], limit_db: float
) -> EquivalenceVerdict:
    """Return the verdict on models whose outputs are not conclusive; `failing` are those that deviate, in dB."""
    original = ModelVersion(task.original, task)
    session = original.open_session()
    once, again = (original.run_samples(session, feeds) if failing else {} for _ in range(2))
    varying = [name for name in failing if deviation_db(once[name], again[name]) < limit_db]
    stable = [name for name in failing if name not in varying]
    change = _first_changed_node(original, ModelVersion(task.prepared, task), feeds, limit_db)
    if change is None and not before:
        return EquivalenceVerdict(unchecked="NumPy lacks the types of its outputs")
    if change is None:
        change = f"output {stable[0]!r}{_describe_deviation(failing[stable[0]], limit_db)}" if stable else ""
    if varying and not change:
        return EquivalenceVerdict(unchecked=f"outputs that change from run to run: {', '.join(varying)}")
    return EquivalenceVerdict(change=change)


def _first_changed_node(original: ModelVersion, prepared: ModelVersion, feeds: Feeds, limit_db: float) -> str | None:
    """Describe the first node whose results differ on equal inputs, "" if none does, or None if this is unknown."""
    graph = prepared.proto.graph
    # Weights may be nodes (PaddlePaddle); folding changes them, so they are compared together with their readers.
    nodes = (node for node in original.proto.graph.node if node.op_type != "Constant")
    producers = {name: node for node in nodes for name in node.output if name}
    made = {name for node in graph.node for name in node.output}
    folded = {t.name: t for t in graph.initializer if t.name in producers and t.data_location != TensorProto.EXTERNAL}
    names = [name for name in producers if name in made or name in folded]
    types = static_types(graph)
    if sum(math.prod(types[name].shape) for name in names if name in types) > MAX_LOCAL_ELEMENTS:
        return None
    norms = {n: node.input[0] for n, node in producers.items() if node.op_type == "BatchNormalization"}
    try:
        values = original.compute_tensors([*names, *({*norms.values()} & producers.keys() - {*names})], feeds)
        arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
        own = prepared.compute_nodes_separately({n: v for n, v in arrays.items() if n in made}, feeds, arrays)[0]
        own |= {name: numpy_helper.to_array(tensor) for name, tensor in folded.items()}
        found = {name: (deviation_db(value, own[name]), limit_db) for name, value in values.items() if name in own}
        found = {name: figures for name, figures in found.items() if figures[0] < limit_db}
        for name in found.keys() & norms.keys() & {n for n, x in norms.items() if x in arrays}:
            found[name] = (found[name][0], normalization_db(arrays[norms[name]], arrays[name], limit_db))
        found = {name: figures for name, figures in found.items() if figures[0] < figures[1]}
        if found and not original.task.widened:
            # In 16 bits ONNX Runtime rounds less between adjacent nodes, and random numbers vary.
            alone, again = original.compute_nodes_separately(arrays, feeds, found, times=2)
            found = {
                name: figures
                for name, figures in found.items()
                if deviation_db(alone[name], own[name]) < figures[1] <= deviation_db(alone[name], again[name])
            }
    except RunFailed:
        return None
    if not found:
        return ""
    name = next(iter(found))
    node = producers[name]
    return f"node {node.name!r} ({node.op_type}, output {name!r}){_describe_deviation(*found[name])}"


def _describe_deviation(found_db: float, limit_db: float) -> str:
    if found_db == -math.inf:
        return " gives another result"
    return f" gives a result that is {found_db:.1f} dB from the original's, and at least {limit_db:g} dB are required"


def threshold_db(proto: onnx.ModelProto) -> float:
    """Return the smallest valid signal-to-noise ratio in dB: 80, but 40 with FP16 and 25 with BF16 tensors."""
    types = {value.type.tensor_type.elem_type for value in (*proto.graph.input, *proto.graph.output)}
    types.update(tensor.data_type for graph in iter_graphs(proto.graph) for tensor in graph.initializer)
    for attribute in (attribute for node in iter_nodes(proto) for attribute in node.attribute):
        if attribute.name in ("to", "dtype"):
            types.add(attribute.i)
        elif attribute.HasField("t"):
            types.add(attribute.t.data_type)
    return min(_THRESHOLD_DB_BY_DTYPE.get(kind, FP32_THRESHOLD_DB) for kind in (*types, TensorProto.FLOAT))


def normalization_db(before: npt.NDArray[Any], after: npt.NDArray[Any], limit_db: float) -> float:
    """Return the smallest valid ratio in dB for a folded BatchNormalization, at most `limit_db`.

    If a mean is far larger than the spread around it, the rounding of the input alone makes the result inexact.

    Args:
        before: Input of the BatchNormalization, with channels along axis 1.
        after: Result of the BatchNormalization.
        limit_db: `threshold_db` of the model.
    """
    axes = tuple(axis for axis in range(before.ndim) if axis != 1)
    x, y = before.astype(np.float64), after.astype(np.float64)
    spread = x.var(axis=axes)
    gain = np.divide(y.var(axis=axes), spread, out=np.zeros_like(spread), where=spread > 0)
    amplified, signal = float(((x**2).mean(axis=axes) * gain).sum()), float((y**2).mean(axis=axes).sum())
    if not (amplified > 0 and signal > 0):
        return limit_db
    rounding_db = _ROUNDING_DB_BY_THRESHOLD[limit_db] - _ROUNDING_MARGIN_DB
    return min(limit_db, rounding_db - 10 * math.log10(amplified / signal))


def deviation_db(before: Any, after: Any) -> float:
    """Return the signal-to-noise ratio of two results in dB: inf if equal, -inf if their types or shapes differ.

    NaN, infinities and integers must be equal, element by element, else it is -inf; of a list it is the lowest ratio.
    """
    if isinstance(before, np.ndarray) and isinstance(after, np.ndarray):
        if before.dtype != after.dtype or before.shape != after.shape:
            return -math.inf
        if before.dtype.kind == "f":
            return _array_db(before, after)
        return math.inf if bool((before == after).all()) else -math.inf
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        return min((deviation_db(*pair) for pair in zip(before, after, strict=True)), default=math.inf)
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        return deviation_db([np.asarray(v) for v in before.values()], [np.asarray(v) for v in after.values()])
    comparable = type(before) is type(after) and not isinstance(before, np.ndarray | list)
    return math.inf if comparable and before == after else -math.inf


def _array_db(before: npt.NDArray[Any], after: npt.NDArray[Any]) -> float:
    if np.array_equal(before, after, equal_nan=True):
        return math.inf
    x, y = before.astype(np.float64), after.astype(np.float64)
    finite = np.isfinite(x)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True) or not np.isfinite(y[finite]).all():
        return -math.inf
    x, y = x[finite], y[finite]
    signal = x[~((np.abs(x) > _SENTINEL_MAGNITUDE) & (x == y))]
    scale = float(np.abs(signal).max(initial=0.0))
    if not scale:
        return -math.inf
    noise = float(np.sum(((x - y) / scale) ** 2))
    return 10 * math.log10(float(np.sum((signal / scale) ** 2)) / noise) if noise else math.inf
