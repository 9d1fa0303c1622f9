"""The journal survives being cut at any byte, and refuses what is not its own."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import UserError
from harness.records import Proposal, Failed, Measured, TrialResult, decode_line, encode_line
from harness.results_dir.journal import JournalEntry, Journal, append_line, read_journal

FINGERPRINT = {"model": "abc", "seed": 1}


def asked(number, duplicate_of=None):
    return Proposal(number=number, choices=(0, 1), digest=f"d{number}", origin="searcher", duplicate_of=duplicate_of)


def told(number, value=1.5):
    outcome = Measured(samples_ms=(value, value + 0.1), build_s=0.2, measure_s=0.3, metrics={"map": 0.5})
    return TrialResult(number=number, outcome=outcome, elapsed_s=1.0 + number)


def write(path, count):
    with Journal(path, FINGERPRINT) as journal:
        for number in range(count):
            journal.append(asked(number))
            journal.append(told(number))


finite = st.floats(allow_nan=False, allow_infinity=False)
outcomes = st.one_of(
    st.builds(
        Measured,
        samples_ms=st.lists(finite, min_size=1).map(tuple),
        build_s=finite,
        measure_s=finite,
        metrics=st.dictionaries(st.text(), finite),
        per_item=st.lists(finite).map(tuple),
    ),
    st.builds(Failed, stage=st.text(), reason=st.text(), log_tail=st.text(), wall_s=finite),
)


@given(st.builds(TrialResult, number=st.integers(0), outcome=outcomes, elapsed_s=finite))
def test_every_outcome_reads_back_as_written(line):
    assert decode_line(encode_line(line)) == line


@pytest.mark.parametrize("text", ["[]", "{}", '{"kind":"told","number":1}', '{"kind":"asked","colour":1}'])
def test_a_foreign_line_is_refused(text):
    with pytest.raises(ValueError, match="journal line"):
        decode_line(text)


def test_cut_at_any_byte_everything_before_the_cut_is_there(tmp_path):
    whole = tmp_path / "whole.jsonl"
    write(whole, 3)
    data = whole.read_bytes()
    header = data.index(b"\n") + 1
    for cut in range(header, len(data)):
        path = tmp_path / "cut.jsonl"
        path.write_bytes(data[:cut])
        complete = data[:cut].count(b'"kind":"told"') - (0 if data[:cut].endswith(b"\n") else _torn_told(data[:cut]))
        with Journal(path, FINGERPRINT) as journal:
            assert sum(entry.result is not None for entry in journal.entries) == complete
            number = len(journal.entries)
            journal.append(asked(number))
            journal.append(told(number))
        assert list(read_journal(path))[-1] == JournalEntry(proposal=asked(number), result=told(number))


def _torn_told(data: bytes) -> int:
    return data[data.rindex(b"\n") + 1 :].count(b'"kind":"told"')


def test_a_file_cut_inside_its_header_starts_anew(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"kind":"hea')
    with Journal(path, FINGERPRINT) as journal:
        assert journal.entries == ()
    assert list(read_journal(path)) == []


def test_another_run_is_refused_with_the_difference(tmp_path):
    path = tmp_path / "j.jsonl"
    write(path, 1)
    with pytest.raises(UserError, match=r"(?s)started with something else.*seed: 1 -> 2.*--out"):
        Journal(path, {"model": "abc", "seed": 2})


def test_of_nested_facts_only_the_leaves_that_differ_are_shown(tmp_path):
    path = tmp_path / "j.jsonl"
    backend = {"name": "openvino", "version": "2026.3", "options": {"threads": 1}}
    with Journal(path, {"backend": backend}):
        pass
    with pytest.raises(UserError) as caught:
        Journal(path, {"backend": {**backend, "version": "2026.4"}, "ranges": "ab"})
    assert str(caught.value).splitlines()[1:-1] == [
        "  backend.version: '2026.3' -> '2026.4'",
        "  ranges: None -> 'ab'",
    ]


def test_a_tuple_in_the_fingerprint_is_no_difference(tmp_path):
    path = tmp_path / "j.jsonl"
    for _ in range(2):
        with Journal(path, {"sizes": (1, 2)}) as journal:
            assert journal.entries == ()


def test_another_schema_is_refused(tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_text('{"kind":"header","schema":99}\n')
    with pytest.raises(UserError, match="schema 99, this version reads schema 1"):
        Journal(path, FINGERPRINT)


@pytest.mark.parametrize("text", ["hello\n", "[1]\n", '{"kind":"told"}\n'])
def test_what_is_no_journal_is_refused(tmp_path, text):
    path = tmp_path / "j.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match="not a journal of qdq-bench"):
        Journal(path, FINGERPRINT)


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "j.jsonl"
    write(path, 2)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + b"{}\n" + b"".join(lines[3:]))
    with pytest.raises(UserError, match="line 3: not a journal line"):
        list(read_journal(path))


FULL = """
import resource, sys
from pathlib import Path
from harness.errors import UserError
from harness.records import Failed, Told, Asked
from harness.results_dir.journal import Journal

resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
path = Path(sys.argv[1])
try:
    with Journal(path, {"model": "abc", "seed": 1}) as journal:
        for number in range(100):
            journal.append(Asked(number=number, choices=(0, 1), digest=f"d{number}", origin="searcher"))
            journal.append(Told(number=number, outcome=Failed(stage="build", reason="x" * 300), elapsed_s=1.0))
except UserError as error:
    print(error)
"""


def test_a_full_disk_in_the_middle_of_a_line_costs_that_line_alone(tmp_path):
    path = tmp_path / "j.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "everything measured before is safe: make room, then run the same command again" in done.stdout
    assert path.read_bytes().endswith(b"\n")
    with Journal(path, FINGERPRINT) as journal:
        assert [entry.proposal.number for entry in journal.entries if entry.result is not None] == list(range(7))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_said_once_and_closing_says_nothing_more(tmp_path):
    path = tmp_path / "j.jsonl"
    with (
        pytest.raises(UserError, match=r"j.jsonl: cannot be written \(No space left on device\)"),
        open("/dev/full", "ab", buffering=0) as file,
    ):
        append_line(file, "{}", path)


def test_what_was_measured_before_a_full_disk_is_read_back(tmp_path):
    path = tmp_path / "j.jsonl"
    write(path, 2)
    with path.open("ab") as file:
        file.write(b'{"kind":"told","numb')
    with Journal(path, FINGERPRINT) as journal:
        assert [entry.result for entry in journal.entries] == [told(0), told(1)]
