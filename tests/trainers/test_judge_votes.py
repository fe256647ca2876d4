"""Reading a judge's votes: boxes, hints, majorities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents.judges.votes import HintVote, choose_hint, majority, read_hint, read_score

BOX = r"\boxed"


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (BOX + "{1}", 1.0),
        (BOX + "{-1}", -1.0),
        (BOX + "{0}", 0.0),
        (f"at first {BOX}{{1}}, but then {BOX}{{-1}}.", -1.0),
        (f"{BOX}{{1}} then cut {BOX}{{-1", None),
        (f"{BOX}{{1}} then odd {BOX}" + r"{\frac{1}{2}}", None),
        (f"{BOX}{{1}} then open {BOX}" + r"{\text{-1}", None),
        (f"{BOX}{{1}} and {BOX}{{2}}", None),
        (BOX + "{+1}", 1.0),
        (BOX + "{+-1}", None),
        (BOX + "{ 1 }", 1.0),
        (f"{BOX}{{1}} but {BOX} {{-1}}", -1.0),
        (f"{BOX}{{1}} but {BOX}" + r"{\mathbf{ \text {- 1}}}", -1.0),
        *((f"{BOX}{{1}} but {BOX}{{{minus}1}}", -1.0) for minus in "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"),
        (BOX + "{1.0}", None),
        (BOX + "{}", None),
        (BOX + "{11}", None),
        (BOX + r"{\text{1}}", 1.0),
        (BOX + r"{\text{1}\text{-1}}", None),
        *((BOX + rf"{{\{face}1}}", None) for face in ("textminus", "textendash ", "mathminus", "textless")),
        *((BOX + rf"{{\{face}{{-1}}}}", -1.0) for face in ("text", "textbf", "textnormal", "mathrm", "mathtt")),
        *((f"{BOX}{{1}} but {other}{{-1}}", None) for other in (r"\Boxed", r"\fbox", "boxed", "\boxed", "BOXED ")),
        (f"{BOX}{{1}}, the boxed number.", 1.0),
        (f"<think>perhaps {BOX}{{1}}</think>It failed: {BOX}{{-1}}", -1.0),
        (f"<think>perhaps {BOX}{{1}}</think>It failed.", None),
        (f"<think>perhaps {BOX}{{1}}, or", None),
        (f"It failed: {BOX}{{-1}} <think>or", None),
        (f"perhaps {BOX}{{1}}</think>It failed.", None),
        *((f"{style}perhaps {BOX}{{1}}, or", None) for style in ("[THINK]", "<mm:think>", "<thought>", "<reasoning>")),
        ("boxed{1}", None),
        ("1", None),
        ("", None),
    ],
)
def test_the_last_box_counts_or_none_does(text: str, score: float | None) -> None:
    assert read_score(text) == score


@pytest.mark.parametrize(
    ("text", "score", "hint"),
    [
        (r"[HINT_START] open the door first [HINT_END] \boxed{1}", 1.0, "open the door first"),
        (r"[HINT_START]a[HINT_END] or [HINT_START]b" "\nc[HINT_END] \\boxed{1}", 1.0, "b\nc"),
        (r"[HINT_START]a [HINT_START]b[HINT_END] c[HINT_END]\boxed{1}", 1.0, "b"),
        (r"[HINT_END] x [HINT_START] y \boxed{1}", 1.0, None),
        *(
            (rf"[HINT_START]a[HINT_END], rather {mark}b[HINT_END] \boxed{{1}}", 1.0, None)
            for mark in ("[hint_start]", "[HINT START]", "[ Hint-Start ]", "[HINTSTART]")
        ),
        (r"\boxed{1} no, \boxed{-1}", -1.0, None),
        (r"<think>[HINT_START]tried[HINT_END]</think>\boxed{1}", 1.0, None),
        (r"[HINT_START]said[HINT_END] \boxed{0}", None, "said"),
        (r"[HINT_START][HINT_END]\boxed{1}", 1.0, ""),
    ],
)
def test_hints_are_the_last_block_and_zero_is_no_vote(text: str, score: float | None, hint: str | None) -> None:
    assert read_hint(text) == HintVote(score=score, hint=hint)


@pytest.mark.parametrize(
    ("votes", "score"),
    [((1, 1, -1), 1), ((1, -1), 0), ((1, -1, 0), 0), ((-1, -1, 1, 1, 0), 0), ((0, 0, 1), 0), ((-1,), -1), ((), 0)],
)
def test_majority_by_hand(votes: tuple[float, ...], score: float) -> None:
    assert majority(votes) == score


def vote(score: float | None, hint: str | None) -> HintVote:
    return HintVote(score=score, hint=hint)


def test_longest_hint_of_more_than_ten_characters_among_the_yes_votes() -> None:
    ten, eleven, other = "0123456789", "0123456789a", "bbbbbbbbbbb"
    assert choose_hint([vote(1.0, ten)]) is None
    assert choose_hint([vote(1.0, eleven)]) == eleven
    assert choose_hint([vote(1.0, other), vote(1.0, eleven)]) == other
    assert choose_hint([vote(1.0, eleven), vote(1.0, other + "b"), vote(1.0, eleven)]) == other + "b"
    assert choose_hint([vote(-1.0, eleven * 3), vote(None, eleven * 2), vote(1.0, eleven), vote(1.0, None)]) == eleven
    assert choose_hint([]) is None


@given(st.text(), st.sampled_from(["1", "-1", "0"]))
def test_any_text_before_a_box_changes_nothing(text: str, number: str) -> None:
    assert read_score(f"{text}\\boxed{{{number}}}") == float(number)


@given(st.text())
def test_rubbish_is_no_vote_and_never_an_error(text: str) -> None:
    assert read_score(text) in (None, 1.0, -1.0, 0.0)
    read = read_hint(text)
    assert read.score in (None, 1.0, -1.0)
    assert read.hint is None or read.hint == read.hint.strip()


@given(st.lists(st.sampled_from([1.0, -1.0, 0.0]), max_size=9))
def test_majority_is_symmetric_and_indifferent_to_order(votes: list[float]) -> None:
    assert majority(votes) == majority(votes[::-1]) == -majority([-vote for vote in votes])
    if majority(votes):
        assert votes.count(majority(votes)) > max(votes.count(x) for x in (1.0, -1.0, 0.0) if x != majority(votes))
