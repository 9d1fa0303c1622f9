"""Check of a Q/DQ file before an engine is built: rules of the dialect, and the compiler if it is installed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from harness.base.errors import CandidateError, UserError, suggest_names
from harness.graph.io.model_reader import refuse_damage
from harness.graph.qdq.file_checks import CHECKED_DIALECTS, QDQProblem, find_qdq_problems
from harness.graph.qdq.qdq_graph import read_qdq_graph
from harness.insight.compiled import SCOPE_NOTE, explain_compilation
from harness.insight.model_report import open_static_file
from harness.runtimes.rtx_compile.compiler import DEFAULT_TARGET, TARGETS, Compilation, compile_file, require_target


@dataclass(frozen=True, slots=True, kw_only=True)
class FileVerdict:
    """Verdict on a file.

    Attributes:
        dialect: Dialect whose rules were applied.
        target: Compute capability, as a key of `TARGETS`.
        problems: Violations of the rules.
        compilation: Verdict of the compiler; None if it did not run.
        reason: Why the compiler did not run; "" if it did.
    """

    dialect: str
    target: str
    problems: tuple[QDQProblem, ...]
    compilation: Compilation | None
    reason: str = ""

    @property
    def is_refused(self) -> bool:
        """Return whether the rules or the compiler refuse the file."""
        rules = any(problem.level == "refused" for problem in self.problems)
        return rules or (self.compilation is not None and self.compilation.refusal is not None)

    def lines(self) -> Iterator[str]:
        """Yield the verdict as text."""
        counts = Counter(problem.level for problem in self.problems)
        totals = ", ".join(f"{count} {level}" for level, count in counts.items())
        yield f"Rules of dialect {self.dialect} at {self.target}: {totals or 'nothing is refused'}"
        for problem in self.problems:
            yield f"  {problem.level}, {problem.rule}: {problem}"
        made = self.compilation
        if made is None:
            yield f"Compiler: not asked: {self.reason}"
            return
        built = f"built, {len(made.kernels)} kernels" if made.refusal is None else str(made.refusal)
        yield f"TensorRT-RTX {made.version} for {made.target}: {built}"
        for text in made.warnings:
            yield f"  warning: {text}"
        yield SCOPE_NOTE

    def data(self) -> dict[str, Any]:
        """Return the verdict as JSON values."""
        return {**asdict(self), "is_refused": self.is_refused, "note": SCOPE_NOTE}


def check_file(
    use: str, dialect: str, target: str, *, shapes: Mapping[str, str], dims: Mapping[str, int]
) -> FileVerdict:
    """Return the verdict on a model file.

    Args:
        use: ONNX file, `zoo:NAME` or `assets:PATH`.
        dialect: One of `CHECKED_DIALECTS`.
        target: Key of `TARGETS`.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
        dims: Sizes of dynamic dimensions by symbol.

    Raises:
        UserError: The model cannot be read, or the dialect or the target is unknown.
    """
    if dialect not in CHECKED_DIALECTS:
        raise UserError(f"--dialect {dialect}: no rules about files; {suggest_names(dialect, CHECKED_DIALECTS)}")
    require_target(target)
    with open_static_file(use, shapes, dims) as (path, _):
        with refuse_damage(use):
            problems = tuple(find_qdq_problems(read_qdq_graph(path), TARGETS[target], CHECKED_DIALECTS[dialect]))
        compilation, reason = None, ""
        try:
            compilation = compile_file(path, target)
        except (UserError, CandidateError) as error:
            reason = str(error)
    return FileVerdict(dialect=dialect, target=target, problems=problems, compilation=compilation, reason=reason)


def hand_over_lines(path: Path, command: str, shapes: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Yield the compiler's report on a file, if it is installed, and the command that builds an engine elsewhere.

    Args:
        command: Command that builds the engine on a machine with a GPU.
        shapes: Static shapes of dynamic inputs by name, such as {"images": "1x3x224x224"}.
    """
    try:
        with open_static_file(str(path), shapes, {}) as (file, _):
            yield from explain_compilation(file, compile_file(file, DEFAULT_TARGET)).summary()
    except (UserError, CandidateError) as error:
        yield f"Not compiled on this machine: {error}"
    yield f"On a machine with a GPU and TensorRT: {command}"
