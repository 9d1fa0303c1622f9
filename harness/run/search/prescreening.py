"""Pre-screening of candidates by NVIDIA's compiler, before a GPU builds and times them.

A candidate that the compiler refuses is recorded as a failure. A candidate with the same kernels as one that the search
has timed gets a copy of its outcome, with a reference to it in `info`. Kernels are compared by kind, implementation,
types and shapes, in order; names of tensors have no influence on latency.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from harness.base.errors import CandidateError
from harness.base.files import facts_digest
from harness.base.statistics import Interval
from harness.measure.records import Failed, Measured, Outcome
from harness.plugins.api import Candidate
from harness.results.journal import JournalEntry
from harness.runtimes.rtx_compile.compiler import Kernel, compile_file
from harness.workers.engines import Engines
from harness.workers.trial_pool import TrialFn

KERNELS, EQUAL_TO = "kernels", "equal_kernels"
"""Keys of `Measured.info`: digest of the kernels, and digest of the timed candidate with the same kernels."""
REFUSED = "pre-screening: "


class Prescreening:
    """Verdicts of the compiler on the candidates of one search.

    Args:
        target: Key of `harness.runtimes.rtx_compile.compiler.TARGETS`.
        entries: Journal of the search, with the outcomes of earlier candidates.
        reuse: Whether candidates with equal kernels share one outcome. False if accuracy is part of the objective,
            because kernels do not show the values of scales; then only refusals count.
    """

    def __init__(self, target: str, entries: Iterable[JournalEntry], *, reuse: bool) -> None:
        self._target, self._reuse, self._lock = target, reuse, threading.Lock()
        self._timed: dict[str, tuple[str, Measured]] = {}
        for entry in entries:
            if entry.result is not None:
                self._note(entry.proposal.digest, entry.result.outcome)

    def wrap(self, trial: TrialFn, engines: Engines) -> TrialFn:
        """Return a trial function that times only candidates that the compiler accepts and whose kernels are new.

        Args:
            engines: Engines of the runtime, which `trial` uses.
        """

        def attempt(candidate: Candidate, incumbent: Interval | None) -> Outcome:
            try:
                made = engines.examine(candidate, lambda path: compile_file(path, self._target))
            except CandidateError:  # no verdict: an unknown form of its log
                return trial(candidate, incumbent)
            if made.refusal is not None:
                refused = Failed(stage="build", reason=f"{REFUSED}{made.refusal}")
                return trial(candidate, incumbent) if made.refusal.crashed else refused
            digest = kernels_digest(made.kernels)
            with self._lock:
                known = self._timed.get(digest)
            if known is not None and self._reuse:
                return _refer_to(*known)
            outcome = trial(candidate, incumbent)
            if isinstance(outcome, Measured):
                outcome = replace(outcome, info={**outcome.info, KERNELS: digest})
                self._note(candidate.digest, outcome)
            return outcome

        return attempt

    def _note(self, candidate: str, outcome: Outcome) -> None:
        if isinstance(outcome, Measured) and KERNELS in outcome.info:
            with self._lock:
                self._timed.setdefault(str(outcome.info[KERNELS]), (candidate, outcome))


def _refer_to(candidate: str, timed: Measured) -> Measured:
    """Return a copy of a timed candidate's outcome for one with the same kernels, with all durations 0."""
    info = {**timed.info, EQUAL_TO: candidate}
    return replace(timed, info=info, build_s=0.0, measure_s=0.0, release_s=0.0, evaluate_s=0.0)


def kernels_digest(kernels: Iterable[Kernel]) -> str:
    """Return a digest (16 hexadecimal digits) of kind, implementation, types and shapes of the kernels, in order."""
    return facts_digest(
        [
            [
                kernel.kind,
                kernel.tactic,
                *([t.type, *t.shape] for side in (kernel.inputs, kernel.constants, kernel.outputs) for t in side),
            ]
            for kernel in kernels
        ]
    )


def count_prescreened(outcomes: Iterable[Outcome]) -> Counter[str]:
    """Count the outcomes that are "refused", "equal" (copied from a candidate with the same kernels) and "timed"."""
    return Counter(
        "equal" if isinstance(each, Measured) and EQUAL_TO in each.info
        else "refused" if isinstance(each, Failed) and each.reason.startswith(REFUSED) else "timed"
        for each in outcomes
    )  # fmt: skip
