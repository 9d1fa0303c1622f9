"""Our rules about Q/DQ in files against the verdicts of NVIDIA's compiler on small models, recorded or asked."""

import importlib.util
from collections.abc import Mapping

import pytest
from compiler_cases import Case, ask_compiler, cases, read_verdicts

from harness.graph.qdq.file_checks import QDQProblem, find_qdq_problems
from harness.graph.qdq.qdq_graph import QDQGraph
from harness.graph.rules.dialects import TENSORRT, TENSORRT_RTX, Dialect

SM89 = (8, 9)
CASES = {case.name: case for case in cases()}
VERDICTS = read_verdicts()
REFUSED_BY_COMPILER = {name for name, verdict in VERDICTS.items() if verdict in ("parser", "builder")}
PRODUCTS = ("Conv", "Gemm", "MatMul")
STRICTER: Mapping[str, str] = {
    "Gemm int4 int8-axis1-scale=0.01": "INT4 is for weights; INT4 data of a Gemm are no case for a rule"
}
"""Cases that we refuse and the compiler of TensorRT-RTX takes, with the reason."""


def judge(dialect: Dialect) -> dict[str, tuple[QDQProblem, ...]]:
    return {name: tuple(find_qdq_problems(QDQGraph(case.build()), SM89, dialect)) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def rtx():
    return judge(TENSORRT_RTX)


def refused(found: dict[str, tuple[QDQProblem, ...]]) -> set[str]:
    return {name for name, problems in found.items() if any(each.level == "refused" for each in problems)}


def test_every_case_has_a_verdict():
    assert CASES.keys() == VERDICTS.keys()
    assert len(CASES) >= 400


def test_checks_refuse_all_models_that_the_compiler_refuses(rtx):
    assert REFUSED_BY_COMPILER - refused(rtx) == set()


def test_checks_are_stricter_on_few_known_models(rtx):
    ours = refused(rtx)
    assert ours - REFUSED_BY_COMPILER == set(STRICTER)
    assert len(STRICTER) <= 0.02 * len(ours)


def test_pairs_without_effect_run_in_float_kernels(rtx):
    idle = {name for name, found in rtx.items() if any(each.level == "no effect" for each in found)} - refused(rtx)
    known = {name for name in idle if VERDICTS[name] != "built"}
    assert {VERDICTS[name] for name in known} == {"float"}
    direct = {name for name, case in CASES.items() if case.operator.startswith(PRODUCTS) and is_asked(case)}
    assert {name for name in direct if VERDICTS[name] == "float"} - idle == set()


def is_asked(case: Case) -> bool:
    """Return whether data and weight have a pair that nothing separates from the product."""
    return all(pair.storage and not pair.between for pair in case.pairs)


def test_tensorrt_checks_are_stricter_and_report_no_effects(rtx):
    plain = judge(TENSORRT)
    assert refused(rtx) < refused(plain)
    assert {each.level for found in plain.values() for each in found} == {"refused"}
    more = refused(plain) - refused(rtx)
    assert {each.rule for name in more for each in plain[name]} == {"uint8"}


@pytest.mark.skipif(importlib.util.find_spec("tensorrt_rtx") is None, reason="needs the extra rtx")
def test_installed_compiler_agrees_with_recorded_verdicts():
    asked = [CASES[name] for name in sorted(CASES)[::25]]
    assert {case.name: found for case, found in ask_compiler(asked)} == {
        case.name: VERDICTS[case.name] for case in asked
    }
