"""What a told policy finds of the student's tokens: rows that go on from each other, who reads, and silence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_judge_targets import Table

from turngym.core.episode import Episode
from turngym.trainers.algorithm import PrivilegedText, Scorers
from turngym.trainers.batch import pack
from turngym.trainers.privileged import privileged_logprobs, reader_of
from turngym.trainers.targets import TargetError

Make = Callable[..., Episode]


def told(episode: Episode, prompts: dict[int, list[int]]) -> Episode:
    turns = [
        replace(turn, hint_prompt_ids=np.array(prompts[turn.index], np.int32) if turn.index in prompts else None)
        for turn in episode.turns
    ]
    return replace(episode, turns=tuple(turns))


@pytest.fixture
def pair(make_episode: Make) -> list[Episode]:
    """A: turns of 2, 1 and 1 tokens, told at the opening (9), the second nothing. B: one turn of 2, told."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12]), ([4], [13])], number=0)
    b = make_episode([([1, 2], [20, 21])], number=1)
    return [told(a, {0: [1, 2, 9], 2: [1, 2, 9, 10, 11, 3, 12, 4]}), told(b, {0: [1, 2, 9]})]


def test_prompts_that_go_on_from_each_other_are_one_row(pair: list[Episode]) -> None:
    batch, reader = pack(pair), Table(value=0.5)
    assert batch.label_N.tolist() == [10, 11, 12, 13, 20, 21]
    found = privileged_logprobs(batch, pair, Scorers(student=Table(), reference=reader), PrivilegedText())
    # the tokens of the untold turn are read and not scored
    assert reader.asked == [([1, 2, 9, 10, 11, 3, 12, 4, 13], [3, 4, 8]), ([1, 2, 9, 20, 21], [3, 4])]
    assert found.where_N.tolist() == [True, True, False, True, True, True]
    student = [-10.02, -11.03, -12.05, -13.07, -20.02, -21.03]
    np.testing.assert_allclose(found.student_N, student, atol=1e-5)
    # half a nat more, and one position later: the text has one token
    np.testing.assert_allclose(found.gap_N, [0.49, 0.49, 0.0, 0.49, 0.49, 0.49], atol=1e-5)


def test_a_prompt_that_differs_anywhere_has_its_own_row(pair: list[Episode]) -> None:
    other = [told(pair[0], {0: [1, 2, 9], 2: [1, 2, 8, 10, 11, 3, 12, 4]}), pair[1]]
    reader = Table()
    privileged_logprobs(pack(other), other, Scorers(student=Table(), reference=reader), PrivilegedText())
    assert [len(row) for row, _ in reader.asked] == [5, 9, 5]
    # another attempt with the same ids is another episode
    twice = [pair[1], replace(pair[1], sample=1)]
    reader = Table()
    privileged_logprobs(pack(twice), twice, Scorers(student=Table(), reference=reader), PrivilegedText())
    assert len(reader.asked) == 2


def test_who_reads() -> None:
    student, teacher, initial = Table(), Table(), Table()
    everybody = Scorers(student=student, teacher=teacher, reference=initial)
    assert reader_of(PrivilegedText(reader="live"), everybody) is student
    assert reader_of(PrivilegedText(), everybody) is teacher
    assert reader_of(PrivilegedText(), replace(everybody, teacher=None)) is initial
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        reader_of(PrivilegedText(), Scorers(student=student))
    needs = [
        PrivilegedText(reader=who).needs_reference(has_teacher=other)
        for who in ("initial", "live")
        for other in (False, True)
    ]
    assert needs == [True, False, False, False]


def test_without_a_text_nobody_is_asked(pair: list[Episode]) -> None:
    silent: list[Any] = [told(episode, {}) for episode in pair]
    reader = Table()
    found = privileged_logprobs(pack(silent), silent, Scorers(student=Table(), reference=reader), PrivilegedText())
    assert not reader.asked
    assert not found.where_N.any()
    assert not found.gap_N.any()
