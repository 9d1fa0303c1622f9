"""How a peer looks to the engine: a made-up one that brings files."""

from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.base.errors import BuildFailed
from harness.run.prepare.methods import BROKEN_MODEL_DIGEST, ExternalSearcherAdapter, external_model_path
from search.api import Failure, Observation, Score
from search.space import Placement


class Files:
    """Brings files with these contents; `None` is a breakdown."""

    def __init__(self, folder: Path, *contents: str | None) -> None:
        self._folder = folder
        self._contents = list(contents)
        self.told: list[float | None] = []

    def ask(self) -> Path | None:
        if not self._contents:
            return None
        content = self._contents.pop(0)
        if content is None:
            raise BuildFailed("the tool broke")
        path = self._folder / f"{len(self.told)}.onnx"
        path.write_text(content)
        return path

    def tell(self, latency_ms: float | None) -> None:
        self.told.append(latency_ms)


@pytest.fixture
def opened(tmp_path):
    def make(*contents: str | None, keep: int = 1) -> tuple[ExternalSearcherAdapter, Files]:
        files = Files(tmp_path, *contents)

        @contextmanager
        def factory():
            yield files

        return ExternalSearcherAdapter(factory, tmp_path / "models", keep), files

    return make


def tell(searcher: ExternalSearcherAdapter, placement: Placement, outcome: float | str) -> None:
    scored = Failure(stage="build", reason=outcome) if isinstance(outcome, str) else Score(objective=outcome)
    digest = searcher.space.digest(placement)
    searcher.tell(Observation(placement=placement, digest=digest, outcome=scored))


def test_models_are_numbered_and_identified_by_file_digest(opened):
    peer, files = opened("a", "b", "a")
    with peer:
        asked = []
        for latency_ms in (3.0, "refused", 3.0):
            (placement,) = peer.ask(4)
            assert peer.ask(4) == [], "one at a time"
            asked.append(placement)
            tell(peer, placement, latency_ms)
        assert peer.ask(1) == []
    assert asked == [Placement((0,)), Placement((1,)), Placement((2,))]
    first, second, third = map(peer.space.digest, asked)
    assert first == third != second
    assert files.told == [3.0, None, 3.0]
    assert peer.space.resolve(asked[0]) == ()


def test_only_the_best_model_files_are_kept(opened, tmp_path):
    peer, _ = opened("a", "b", "c", "d", keep=2)
    kept = []
    with peer:
        for latency_ms in (5.0, 4.0, 6.0, 3.0):
            (placement,) = peer.ask(1)
            candidate = peer.candidate(placement)
            assert candidate.edges == ()
            assert candidate.source().exists()
            tell(peer, placement, latency_ms)
            kept.append(external_model_path(tmp_path / "models", candidate.digest).exists())
        assert kept == [True, True, False, True]
        with pytest.raises(BuildFailed, match="stored only while it may be the best"):
            peer.candidate(Placement((2,))).source()


def test_former_incumbent_is_kept_when_proposed_again(opened, tmp_path):
    """It leads at a smaller budget, so the final selection builds it again."""
    peer, _ = opened("a", "b", "a")
    with peer:
        for latency_ms in (5.0, 4.0, 5.0):
            (placement,) = peer.ask(1)
            tell(peer, placement, latency_ms)
        assert peer.candidate(placement).source().exists()


def test_failing_external_searcher_gives_a_failed_build(opened):
    peer, files = opened("a", None, "b")
    with peer:
        tell(peer, peer.ask(1)[0], 1.0)
        (broken,) = peer.ask(1)
        assert peer.space.digest(broken) == BROKEN_MODEL_DIGEST
        with pytest.raises(BuildFailed, match="the tool broke"):
            peer.candidate(broken).source()
        tell(peer, broken, "the tool broke")
        assert peer.ask(1) == []
    assert files.told == [1.0]


def test_unknown_model_number_is_refused(opened):
    peer, _ = opened("a")
    with pytest.raises(ValueError, match=r"0 models were delivered, and none is number \(0,\)"):
        peer.space.validate(Placement((0,)))
