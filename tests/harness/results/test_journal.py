"""Journals survive truncation at any byte and a full disk, and reject files of other runs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stored import JOURNAL_HEADER, write_lines

from harness.base.errors import UserError
from harness.base.files import facts_digest
from harness.measure.records import Failed, Measured, Proposal, TrialResult, decode_line, encode_line
from harness.results.journal import Journal, JournalEntry, read_journal
from harness.results.lines import seal_line

FINGERPRINT = {"model": "abc", "seed": 1}


def proposal(number, duplicate_of=None):
    return Proposal(number=number, choices=(0, 1), digest=f"d{number}", origin="searcher", duplicate_of=duplicate_of)


def result(number, value=1.5):
    outcome = Measured(samples_ms=(value, value + 0.1), build_s=0.2, measure_s=0.3, metrics={"map": 0.5})
    return TrialResult(number=number, outcome=outcome, elapsed_s=1.0 + number)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "j.jsonl"


def write(path, count):
    with Journal(path, FINGERPRINT) as journal:
        for number in range(count):
            journal.append(proposal(number))
            journal.append(result(number))


finite = st.floats(allow_nan=False, allow_infinity=False)
latency_ms = st.floats(0, exclude_min=True, allow_infinity=False)
duration_s = st.floats(0, allow_infinity=False)
text = st.text(st.characters(codec="utf-8"))
outcomes = st.one_of(
    st.builds(
        Measured,
        status=st.just("measured"),
        samples_ms=st.lists(latency_ms, min_size=1).map(tuple),
        build_s=duration_s,
        measure_s=duration_s,
        metrics=st.dictionaries(text, finite),
        per_item=st.lists(finite).map(tuple),
        rebuilt_ms=st.lists(st.lists(latency_ms).map(tuple)).map(tuple),
        info=st.dictionaries(text, st.lists(st.none() | st.booleans() | st.integers(0, 9) | text)),
    ),
    st.builds(Failed, status=st.just("failed"), stage=text, reason=text, log_tail=text, wall_s=duration_s),
)


@given(
    st.builds(TrialResult, kind=st.just("result"), number=st.integers(0, 10**6), outcome=outcomes, elapsed_s=duration_s)
)
def test_lines_survive_a_round_trip(line):
    assert decode_line(encode_line(line)) == line


def test_lone_surrogates_of_messages_are_replaced():
    line = TrialResult(number=0, outcome=Failed(stage="build", reason="a\ud800b 😀"), elapsed_s=1.0)
    assert decode_line(encode_line(line)).outcome.reason == "a?b 😀"


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"kind":"result","number":1}', '{"kind":"proposal","colour":1}', "[" * 100_000, "{"]
)
def test_foreign_lines_are_rejected(text):
    with pytest.raises(ValueError, match="journal line"):
        decode_line(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("samples_ms", [-1.0]), ("samples_ms", [0.0]), ("samples_ms", ["1.0"]), ("samples_ms", [float("nan")]),
        ("samples_ms", [float("inf")]), ("samples_ms", 1.0), ("build_s", -1.0), ("build_s", "1"), ("saved", -1),
        ("warmup", 0.5), ("metrics", {"map": float("nan")}), ("per_item", [None]), ("rebuilt_ms", [[-1.0]]),
    ],
)  # fmt: skip
def test_invalid_values_are_rejected_with_their_field(field, value):
    body = json.loads(encode_line(result(0)))
    body["outcome"] = {"status": "measured", "samples_ms": [1.0], "build_s": 1.0, "measure_s": 1.0, field: value}
    with pytest.raises(ValueError, match=field):
        decode_line(json.dumps(body))


def test_journal_truncated_at_any_byte_keeps_complete_lines(path):
    write(path, 3)
    data = path.read_bytes()
    for cut in range(data.index(b"\n") + 1, len(data)):
        path.write_bytes(data[:cut])
        complete = data[: data.rindex(b"\n", 0, cut) + 1].count(b'"kind":"result"')
        assert sum(entry.result is not None for entry in read_journal(path)) == complete
        with Journal(path, FINGERPRINT) as journal:
            assert sum(entry.result is not None for entry in journal.entries) == complete
            number = len(journal.entries)
            journal.append(proposal(number))
            journal.append(result(number))
        assert list(read_journal(path))[-1] == JournalEntry(proposal=proposal(number), result=result(number))


def test_a_file_cut_within_its_header_is_restarted(path):
    path.write_bytes(b'{"kind":"hea')
    with Journal(path, FINGERPRINT) as journal:
        assert journal.entries == ()
    assert list(read_journal(path)) == []


def test_results_may_arrive_in_another_order(path):
    with Journal(path, FINGERPRINT) as journal:
        for line in (proposal(0), proposal(1), proposal(2, duplicate_of=0), result(1), result(0)):
            journal.append(line)
    assert [(e.proposal.number, e.result) for e in read_journal(path)] == [(0, result(0)), (1, result(1)), (2, None)]


def test_other_fingerprint_is_rejected_with_differing_keys(path):
    backend = {"name": "openvino", "version": "2026.3", "options": {"threads": 1}}
    with Journal(path, {"backend": backend}):
        pass
    with pytest.raises(UserError, match=r"(?s)started with something else.*--out") as caught:
        Journal(path, {"backend": {**backend, "version": "2026.4"}, "ranges": "ab"})
    assert str(caught.value).splitlines()[1:-1] == ["  backend.version: '2026.3' -> '2026.4'", "  ranges: None -> 'ab'"]


def test_a_tuple_equals_its_list_in_the_fingerprint(path):
    for _ in range(2):
        with Journal(path, {"sizes": (1, 2)}) as journal:
            assert journal.entries == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"kind":"header","schema":99}\n', "schema 99, this version reads schema 3"),
        ("hello\n", "line 1: not a log"),
        ("[1]\n", "not a journal"),
        ('{"kind":"result"}\n', "not a journal"),
    ],
)
def test_files_that_are_no_journal_are_rejected(path, content, message):
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        Journal(path, FINGERPRINT)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{}", "line 3: not a journal line"),
        (encode_line(proposal(5)), "line 3: proposal 5, but expected 1"),
        (encode_line(result(5)), "line 3: an outcome without its proposal"),
    ],
)
@pytest.mark.parametrize("chained", [True, False])
def test_damaged_lines_are_named(path, line, message, chained):
    header = json.dumps({"kind": "header", "schema": 3 if chained else 2, "fingerprint": {}})
    write_lines(path, [header, encode_line(proposal(0)), line], chained=chained)
    with pytest.raises(UserError, match=message):
        list(read_journal(path))


def test_second_result_of_proposal_is_rejected(path):
    with Journal(path, FINGERPRINT) as journal:
        for line in (proposal(0), result(0), result(0)):
            journal.append(line)
    with pytest.raises(UserError, match="line 4: an outcome without its proposal"):
        list(read_journal(path))


FULL = """
import resource, sys
from pathlib import Path
from harness.base.errors import UserError
from harness.measure.records import Failed, Proposal, TrialResult
from harness.results.lines import seal_line
from harness.results.journal import Journal

resource.setrlimit(resource.RLIMIT_FSIZE, (4500, resource.RLIM_INFINITY))
path = Path(sys.argv[1])
try:
    with Journal(path, {"model": "abc", "seed": 1}) as journal:
        for number in range(100):
            journal.append(Proposal(number=number, choices=(0, 1), digest=f"d{number}", origin="searcher"))
            outcome = Failed(stage="build", reason="x" * 300)
            journal.append(TrialResult(number=number, outcome=outcome, elapsed_s=1.0))
except UserError as error:
    print(error)
"""


def test_full_disk_loses_only_the_partial_line(path):
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "everything measured before is safe" in done.stdout
    assert path.read_bytes().endswith(b"\n")
    with Journal(path, FINGERPRINT) as journal:
        assert [entry.proposal.number for entry in journal.entries if entry.result is not None] == list(range(7))


SEALED = [seal_line(encode_line(line), "")[0] + "\n" for line in (result(0, 9.0), proposal(0))]
EDITS = {
    "swapped": lambda lines: [lines[0], lines[2], lines[1], *lines[3:]],
    "dropped": lambda lines: [*lines[:3], *lines[5:]],
    "repeated": lambda lines: [*lines, lines[-1]],
    "changed with its own digest": lambda lines: [
        *lines[:2],
        seal_line(encode_line(result(0, 9.0)), "")[0] + "\n",
        *lines[3:],
    ],
    "of another journal": lambda lines: [lines[0], SEALED[1], *lines[2:]],
}


@pytest.mark.parametrize("kind", EDITS)
def test_edited_lines_are_refused_by_reader_and_journal(path, kind):
    write(path, 3)
    path.write_text("".join(EDITS[kind](path.read_text().splitlines(keepends=True))))
    for read in (lambda: list(read_journal(path)), lambda: Journal(path, FINGERPRINT)):
        with pytest.raises(UserError, match=r"j\.jsonl, line \d: damaged"):
            read()


def test_journal_under_another_name_is_refused(path):
    write(path, 1)
    archived, other = path.with_name("j.1.jsonl"), path.with_name("k.jsonl")
    for copy in (archived, other):
        copy.write_bytes(path.read_bytes())
    assert len(list(read_journal(archived))) == 1
    with pytest.raises(UserError, match=r"k\.jsonl, line 1: damaged: this is the file 'j'"):
        list(read_journal(other))


def test_journal_of_earlier_version_is_continued_in_its_form(path):
    header = json.dumps({"kind": "header", "schema": 2, "fingerprint": FINGERPRINT})
    write_lines(path, [header, encode_line(proposal(0)), encode_line(result(0))], chained=False)
    with Journal(path, FINGERPRINT) as journal:
        journal.append(proposal(1))
        journal.append(result(1))
    assert [entry.result for entry in read_journal(path)] == [result(0), result(1)]
    assert '"chain"' not in path.read_text()


def test_lines_of_current_schema_must_be_chained(path):
    write_lines(path, [JOURNAL_HEADER, encode_line(proposal(0))], chained=False)
    with pytest.raises(UserError, match=r"line 1: damaged: its lines are not chained"):
        list(read_journal(path))


FACTS = "{'b': frozenset({'int8', 'fp8', 'float'}), 'a': [1, 2.5, None], 'c': {'x': True}}"


def test_digests_depend_neither_on_the_process_nor_on_the_order():
    code = f"from harness.base.files import facts_digest; print(facts_digest({FACTS}))"
    command = [sys.executable, "-c", code]
    environments = [{"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)} for seed in ("1", "2")]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True, env=env) for env in environments]
    here = facts_digest({"c": {"x": True}, "a": [1, 2.5, None], "b": frozenset({"fp8", "float", "int8"})})
    assert {run.stdout.strip() for run in runs} == {here}
    assert here == "6e8a9d39542f4498"


def test_digests_of_different_facts_differ():
    assert len({facts_digest(facts) for facts in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": {1}}, {"a": {1, 2}})}) == 5
