"""Targets from judges: scores on every token of their turn, and advantages of a teacher that has read the hint."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import judged as tools
import numpy as np
import pytest
from numpy.typing import NDArray

from turngym.core.episode import Episode, Status, TopK
from turngym.trainers.algorithm import PrivilegedText, Scorers
from turngym.trainers.algorithms.judge_targets import HintTargets, TurnScore, up_to_rejection
from turngym.trainers.batch import pack
from turngym.trainers.judged_episodes import HintedTurns, ScoredTurns, judge_episodes
from turngym.trainers.privileged import batch_turns
from turngym.trainers.targets import TargetError

Make = Callable[..., Episode]
NOBODY: Any = None


@pytest.fixture
def scored(make_episode: Make) -> list[Episode]:
    """A: turns of 2, 1 and 3 tokens, the last without a next state. B: one turn of 2 tokens, its only one."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])], number=0)
    b = make_episode([([5, 6], [20, 21])], number=1)
    return [tools.with_texts(a, ["a", "b", "c"]), tools.with_texts(b, ["d"])]


def test_scores_are_advantages_on_every_token_of_their_turn(scored: list[Episode]) -> None:
    votes = [tools.boxed(1, 1, 0), tools.boxed(-1, -1, -1)]
    judged, _ = judge_episodes(scored, tools.Says(lambda request: votes[request.turn]), "score")
    kept = ScoredTurns()(judged)
    batch = pack(kept)
    assert batch.label_N.tolist() == [10, 11, 12, 20, 21]
    targets = TurnScore()(batch, kept, Scorers(student=NOBODY))
    assert targets.advantage_N is not None
    assert targets.advantage_N.tolist() == [1.0, 1.0, -1.0, 0.0, 0.0]
    assert np.isfinite(targets.advantage_N).all()


def test_turns_of_the_batch_come_in_its_order(scored: list[Episode]) -> None:
    error = replace(scored[0], status=Status.ERROR_ENV)
    episodes = [error, scored[1], scored[0]]
    found = [(e.task.task_id, t.index, s.start, s.stop) for e, t, s in batch_turns(pack(episodes), episodes)]
    assert found == [("task/1", 0, 0, 2), ("task/0", 0, 2, 4), ("task/0", 1, 4, 5), ("task/0", 2, 5, 8)]
    late = replace(scored[0], turns=(replace(scored[0].turns[0], excluded="x"), *scored[0].turns[1:]))
    found = [(t.index, s.start, s.stop) for _, t, s in batch_turns(pack([scored[0], late]), [scored[0], late])]
    assert found == [(0, 0, 2), (1, 2, 3), (2, 3, 6), (1, 6, 7), (2, 7, 10)]


@dataclass(slots=True)
class Table:
    """Scores a position by its id and index: log-probability -(id + position / 100); notes what it was asked."""

    short: int = 0
    value: float = 0.0
    tail: float | None = None
    ids: int = 1000
    """Size of the vocabulary."""
    asked: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def logprobs(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[NDArray[np.int64]]
    ) -> list[NDArray[np.float32]]:
        self.asked += [(row.tolist(), where.tolist()) for row, where in zip(ids, positions, strict=True)]
        found = [
            np.array([self.value - int(row[p]) - p / 100 for p in where], np.float32)
            for row, where in zip(ids, positions, strict=True)
        ]
        return [*found[:-1], found[-1][: len(found[-1]) - self.short]]

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        k = min(k, self.ids)
        return [
            TopK(
                ids=np.tile(np.arange(k, dtype=np.int32), (len(where), 1)),
                logp=np.tile(np.log(np.full(k, 0.5 / k)), (len(where), 1)).astype(np.float32),
                tail=None if self.tail is None else np.full(len(where), self.tail, np.float32),
            )
            for where in positions
        ]


@pytest.fixture
def hinted(make_episode: Make) -> list[Episode]:
    """A: turns of 2, 1 (no hint) and 3 tokens; B: one of 2. Prompts with hints are longer than without."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13, 14, 15])], number=0)
    b = make_episode([([5, 6], [20, 21])], number=1)
    prompts: dict[int, list[int] | None] = {0: [1, 2, 7, 7], 1: None, 2: [1, 2, 10, 11, 3, 12, 4, 8]}
    turns = [
        replace(turn, hint_prompt_ids=None if (ids := prompts[turn.index]) is None else np.array(ids, np.int32))
        for turn in a.turns
    ]
    only = replace(b.turns[0], hint_prompt_ids=np.array([9], np.int32))
    return HintedTurns()([replace(a, turns=tuple(turns)), replace(b, turns=(only,))])


def test_the_teacher_reads_the_hint_and_the_original_response(hinted: list[Episode]) -> None:
    batch = pack(hinted)
    assert batch.label_N.tolist() == [10, 11, 13, 14, 15, 20, 21]
    teacher, student = Table(value=0.5), Table()
    targets = HintTargets(own=None)(batch, hinted, Scorers(student=student, teacher=teacher))
    assert teacher.asked == [
        ([1, 2, 7, 7, 10, 11], [4, 5]),
        ([1, 2, 10, 11, 3, 12, 4, 8, 13, 14, 15], [8, 9, 10]),
        ([9, 20, 21], [1, 2]),
    ]
    # the ids cancel; teacher positions 4 5 8 9 10 1 2, student positions 2 3 7 8 9 2 3
    assert targets.advantage_N is not None
    expected = [0.5 - shift / 100 for shift in (2, 2, 1, 1, 1, -1, -1)]
    assert targets.advantage_N.tolist() == pytest.approx(expected, abs=1e-5)
    alone = HintTargets(own=None)(batch, hinted, Scorers(student=student, reference=Table(value=0.5)))
    assert alone.advantage_N is not None
    assert alone.advantage_N.tolist() == targets.advantage_N.tolist()


def test_the_live_student_may_read_the_hint_itself(hinted: list[Episode]) -> None:
    batch, student = pack(hinted), Table()
    scorers = Scorers(student=student, teacher=Table(value=9.0), reference=Table(value=7.0))
    found = HintTargets(own=None, privileged=PrivilegedText(reader="live"))(batch, hinted, scorers).advantage_N
    assert found is not None
    # as above, without the half nat that the teacher has more
    assert found.tolist() == pytest.approx([-shift / 100 for shift in (2, 2, 1, 1, 1, -1, -1)], abs=1e-5)
    assert ([1, 2, 7, 7, 10, 11], [4, 5]) in student.asked


def test_a_wrong_number_of_log_probabilities_names_the_turn(hinted: list[Episode]) -> None:
    batch, student = pack(hinted), Table()
    with pytest.raises(TargetError, match=r"task/1 seed 0 sample 0, turn 0: .* 1 log-probabilities for .* 2 tokens"):
        HintTargets(own=None)(batch, hinted, Scorers(student=student, teacher=Table(short=1)))
    with pytest.raises(TargetError, match=r"task/0 seed 0 sample 0, turn 0: .* not all finite"):
        HintTargets(own=None)(batch, hinted, Scorers(student=student, teacher=Table(value=math.nan)))
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        HintTargets(own=None)(batch, hinted, Scorers(student=student))

    class Silent(Table):
        def logprobs(self, ids: Any, positions: Any) -> list[NDArray[np.float32]]:
            return super().logprobs(ids, positions)[:-1]

    class Holed(Table):
        def logprobs(self, ids: Any, positions: Any) -> list[NDArray[np.float32]]:
            return [np.where(np.arange(len(part)) == 1, np.nan, part) for part in super().logprobs(ids, positions)]

    with pytest.raises(TargetError, match=r"task/0 seed 0 sample 0, turn 0: .* not all finite"):
        HintTargets(own=None)(batch, hinted, Scorers(student=student, teacher=Holed()))
    with pytest.raises(TargetError, match=r"\bstudent\b"):
        HintTargets(own=None)(batch, hinted, Scorers(student=NOBODY, teacher=Table()))
    with pytest.raises(TargetError, match="answered 2 rows; 3 were asked"):
        HintTargets(own=None)(batch, hinted, Scorers(student=student, teacher=Silent()))


def test_top_k_targets_are_the_hinted_teachers(hinted: list[Episode]) -> None:
    targets = HintTargets(k=4, own=None)(pack(hinted), hinted, Scorers(student=Table(), teacher=Table()))
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    assert targets.topk_ids_NK.tolist() == [[0, 1, 2, 3]] * 7
    assert targets.topk_logp_NK == pytest.approx(math.log(0.125))
    assert targets.topk_tail_N is None


@pytest.mark.parametrize("given", [True, False])
def test_a_support_is_no_larger_than_the_vocabulary(hinted: list[Episode], *, given: bool) -> None:
    """Placeholders too are ids that the student has."""
    told = [
        replace(one, turns=tuple(replace(t, hint_prompt_ids=t.hint_prompt_ids if given else None) for t in one.turns))
        for one in hinted
    ]
    found = HintTargets(k=50, own=None)(pack(told), told, Scorers(student=Table(), teacher=Table(ids=6)))
    assert found.topk_ids_NK is not None
    assert found.topk_logp_NK is not None
    assert found.topk_ids_NK.shape == found.topk_logp_NK.shape
    assert found.topk_ids_NK.max() == (5 if given else 0)
    assert np.exp(found.topk_logp_NK).sum(axis=1) == pytest.approx(0.5)


def test_the_tail_is_of_all_ids_outside_the_support(hinted: list[Episode]) -> None:
    """Those that were asked for only to see what is rejected are outside, too."""
    none = replace(hinted[0].turns[0], hint_prompt_ids=None)
    unhinted = [replace(hinted[0], turns=(none, *hinted[0].turns[1:])), hinted[1]]
    tails = []
    for reject in (0.0, 0.1):
        scorers: Any = Scorers(student=Table(), teacher=Table(tail=math.log(0.25)))
        found = HintTargets(k=4, own=None, reject_below=reject)(pack(unhinted), unhinted, scorers).topk_tail_N
        assert found is not None
        assert found.dtype == np.float32
        tails.append(np.exp(found).tolist())
    # tokens without a hint have a placeholder; of ten ids with 0.05 each, six are added to the quarter
    half = [0.5] * 2
    assert tails[0] == pytest.approx([*half, *[0.25] * 5])
    assert tails[1] == pytest.approx([*half, *[0.55] * 5])


def test_what_follows_a_rejected_token_teaches_nothing(hinted: list[Episode]) -> None:
    batch = pack(hinted)  # responses 10 11 | 13 14 15 | 20 21
    logp = np.log(np.array([0.04, 0.9, 0.9, 0.01, 0.9, 0.06, 0.5]))
    counts = [True, False, True, True, False, True, True]
    assert up_to_rejection(batch, hinted, logp, 0.05).tolist() == counts
