"""A teacher with another tokenizer: spans of text, what is the same token, the targets and the loss in numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runs import save_tiny
from torch import tensor

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.open_renderer import open_renderer
from turngym.agents.rendering.renderer import TextEpisodes
from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.core.episode import Episode, Status, TopK, Turn
from turngym.core.errors import TurngymError
from turngym.core.task import Task, Verdict
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.channels import make_channel
from turngym.scripts import train
from turngym.trainers.algorithm import Scorers, Targets, Tokens
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import opd
from turngym.trainers.batch import pack
from turngym.trainers.contrib.other_vocabulary import (
    Beginnings,
    KnownPlaces,
    OtherVocabulary,
    Piece,
    Pieces,
    _Said,
    _Span,
    divided,
    of_other_vocabulary,
    shared_ids,
    split_alike,
    text_spans,
    token_ends,
    without_end,
)
from turngym.trainers.lm_head import MIN_LOGP
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import VocabularyError, tiny_qwen3
from turngym.trainers.optimizer_step import Forward, accumulate
from turngym.trainers.run import build_trainer
from turngym.trainers.run_config import DistillConfig
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.targets import SampledAdvantage, StudentTopK, TargetError, TeacherTopK, rows, support_kl
from turngym.trainers.token_losses import SupportKL

torch.set_num_threads(1)
TOOL = ALFWorldEnv.tool
MINE = ("go ", "to ", "shelf", "é", "Do it.", "look", "<action>", "</action>", "You see ", "nothing", "lamp", "g")
THEIRS = ("go to ", "shelf", "sh", "elf", "Do it.", "look", "<action>", "</action>", "You see ", "nothing", "desk")


# Spans.


def test_spans_end_where_both_sides_have_an_end() -> None:
    #   text      g o _ t o _ s h e l f
    #   student   [     ][  ][        ]        ends 3 6 11
    #   teacher   [          ][  ][  ]         ends 6 8 11
    assert text_spans([3, 6, 11], [6, 8, 11]) == [(0, 2, 0, 1), (2, 3, 1, 3)]
    assert text_spans([2, 4], [2, 4]) == [(0, 1, 0, 1), (1, 2, 1, 2)]
    # the student's second token ends within a character; a token without text belongs to what it follows
    assert text_spans([1, -1, 2, 2], [1, 2]) == [(0, 1, 0, 1), (1, 4, 1, 2)]
    assert text_spans([0, 3], [3]) == [(0, 2, 0, 1)]
    # what is behind the last shared end is in no span
    assert text_spans([2, 5], [2, 4]) == [(0, 1, 0, 1)]
    assert text_spans([-1], [-1]) == []


def test_a_token_that_ends_within_a_character_has_no_end() -> None:
    parts = [b"a", b"\xc3", b"\xa9b"]
    assert token_ends(lambda ids: b"".join(parts[i] for i in ids).decode("utf-8", "replace"), [0, 1, 2]) == [1, -1, 3]


def test_a_span_of_the_same_ids_on_both_sides_is_cut_in_tokens() -> None:
    shared = np.array([5, 6, 7, -1])
    assert split_alike((0, 2, 0, 2), [6, 7], [1, 2], shared) == [(0, 1, 0, 1), (1, 2, 1, 2)]
    assert split_alike((1, 3, 2, 4), [5, 6, 7], [0, 0, 1, 2], shared) == [(1, 2, 2, 3), (2, 3, 3, 4)]
    assert split_alike((1, 3, 1, 3), [5, 6, 7], [0, 2, 1], shared) == [(1, 3, 1, 3)]
    assert split_alike((0, 1, 0, 1), [7], [3], shared) == [(0, 1, 0, 1)]
    assert split_alike((0, 2, 0, 1), [5, 6], [0], shared) == [(0, 2, 0, 1)]


def test_the_id_that_ends_a_response_is_no_part_of_its_text() -> None:
    renderer: Any = SimpleNamespace(stop_ids=(1, 2))
    assert without_end((7, 1, 8, 2), renderer) == (7, 1, 8)
    assert without_end((7, 1, 8), renderer) == (7, 1, 8)
    assert without_end((), renderer) == ()


# The same token.


def test_tokens_of_one_string_are_shared() -> None:
    mine, theirs = build_phrase_tokenizer(MINE), build_phrase_tokenizer(THEIRS)
    shared = shared_ids(mine, theirs, len(theirs) + 3)
    shared_id = {name: int(shared[number]) for name, number in theirs.get_vocab().items()}
    for name in ("shelf", "Do it.", "<action>", "<|end|>", "<0x41>", "nothing"):
        assert shared_id[name] == mine.get_vocab()[name]
    assert [shared_id[name] for name in ("go to ", "sh", "elf", "desk")] == [-1] * 4
    assert shared[len(theirs) :].tolist() == [-1] * 3
    # the ids that end a response are the same by their role
    ended = shared_ids(mine, theirs, len(theirs), (7, theirs.get_vocab()["desk"]))
    assert ended[theirs.get_vocab()["desk"]] == 7
    assert shared_ids(mine, mine, len(mine), (None, 3)).tolist() == list(range(len(mine)))
    assert shared_ids(mine, mine, len(mine)).tolist() == list(range(len(mine)))


def test_ordinary_tokens_of_one_text_are_shared_under_another_name() -> None:
    class Named:
        """Ids 0, 1, ... with the given names and texts; the first is the letter a. A text begins without a space."""

        def __init__(self, names: list[str], texts: list[str], special: list[int], added: list[int]) -> None:
            self.names, self.texts, self.all_special_ids, self.added_tokens_decoder = names, texts, special, added

        def get_vocab(self) -> dict[str, int]:
            return {name: number for number, name in enumerate(self.names)}

        def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
            assert (text, add_special_tokens) == ("a", False)
            return {"input_ids": [0]}

        def decode(self, ids: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
            assert not skip_special_tokens
            assert not clean_up_tokenization_spaces
            return "".join(self.texts[number] for number in ids).removeprefix(" ")

    # one text; a byte that repeats another id's; a special token of each kind; part of a character; no text
    mine = Named(
        ["a", "▁go", "<0x67>", "g", "<e>", "\xc3", "x", "<f>"],
        ["a", " go", "g", "g", "<e>", "\ufffd", "", "<f>"],
        [4],
        [7],
    )
    theirs = Named(
        ["a", "G", "e", "\xa9", "Ġgo", "y", "f", "go"], ["a", "g", "<e>", "\ufffd", " go", "", "<f>", "go"], [], []
    )
    assert shared_ids(mine, theirs, 8).tolist() == [0, 3, -1, -1, 1, -1, -1, -1]


# Which ids begin with a piece of text.

TEXTS = {
    "shelf 1": 10,
    "shelf 2": 11,
    "shelf 10": 12,
    "shelf": 13,
    "s": 14,
    "desk 1": 15,
    "go to ": 16,
    " ": 17,
    "_": 18,
}


def test_a_piece_of_text_belongs_to_the_ids_that_begin_with_it() -> None:
    begin = Beginnings(TEXTS, [13, 14])
    # the shortest first
    assert begin.ids("shelf", False) == begin.longer("shelf", False) == (13, 10, 11, 12)
    assert begin.ids("shelf 1", False) == (10, 12)
    # the teacher would have said a token that it has by that token
    assert begin.ids("shelf", True) == begin.longer("shelf", True) == (10, 11, 12)
    assert begin.ids("s", True) == (10, 11, 12)
    assert begin.longer("shelf 3", True) == ()


def test_a_piece_with_which_no_id_begins_belongs_to_its_longest_beginning() -> None:
    begin = Beginnings(TEXTS, [13, 14])
    assert begin.ids("shelves", False) == (14,)
    assert begin.ids("shelf 3", True) == (13,)
    assert begin.ids("desk 11", True) == (15,)
    assert begin.ids("lamp", True) == ()


def test_a_piece_is_divided_among_a_limited_number_of_ids() -> None:
    begin = Beginnings({f"x{number}": number for number in range(200)}, [])
    # the shortest first, and in the order of the alphabet
    first = (*range(10), *range(10, 64))
    assert begin.ids("x", False) == first
    begin = Beginnings({f"x{number}": number for number in range(200)}, [0, 1])
    assert begin.ids("x", True) == (*first[2:], 64, 65)


# What the teacher might have said. Its ids 0 to 7, of which the student has the last three as 13, 16 and 5 (no text).

THEIR = {0: " shelf", 1: "shelf", 2: " ", 3: "1", 4: "2", 5: "shelf", 6: "go to "}
SAME = np.array([-1, -1, -1, -1, -1, 13, 16, 5])


def pieces(shared: Any = SAME, texts: Any = None) -> Pieces:
    begin = Beginnings(TEXTS, [number for number in shared.tolist() if number >= 0])
    return Pieces(begin=begin, shared=shared, texts=THEIR if texts is None else texts)


def likely(*pairs: tuple[int, float], tail: float | None = None) -> TopK:
    ids, q = zip(*pairs, strict=True)
    rest: Any = None if tail is None else np.log(np.float32(tail))
    return TopK(ids=np.array(ids, np.int32), logp=np.log(np.array(q, np.float32)), tail=rest)


def span(text: str, mine: tuple[int, ...], theirs: tuple[int, ...]) -> Any:
    where: Any = {"first": 0, "count": len(mine), "row": 0, "start": 0, "stop": len(theirs), "exact": False}
    return _Span(**where, text=text, ends=(mine, theirs))


def said(*tokens: tuple[int, float, TopK]) -> Any:
    ids, q, tops = zip(*tokens, strict=True)
    return _Said(ids=np.array(ids, np.int32), logq=np.log(np.array(q, np.float32)), top=tops)


def masses(parts: list[Piece]) -> list[tuple[float, tuple[int, ...]]]:
    return [(round(math.exp(piece.logq), 5), piece.ids) for piece in parts]


def test_where_one_token_of_both_was_said_its_alternatives_are_the_same_tokens_or_pieces() -> None:
    # the same token and the student's longer ones that begin so; an own piece; the end, which has no text
    parts, _ = pieces().exact(likely((5, 0.4), (6, 0.3), (1, 0.2), (7, 0.05)))
    assert masses(parts) == [(0.4, (13, 10, 11, 12)), (0.3, (16,)), (0.2, (10, 11, 12)), (0.05, (5,))]
    assert [piece.exact for piece in parts] == [True, True, False, True]
    # a token that is no text and not the student's, and a text with which none of its tokens begins
    assert pieces(texts={3: "z"}).exact(likely((0, 0.5), (3, 0.5)))[0] == []
    # the first id is an id like all others
    assert masses(pieces(shared=np.array([0]), texts={}).exact(likely((0, 0.5)))[0]) == [(0.5, (0,))]


def test_a_token_of_the_student_may_be_several_of_the_teacher() -> None:
    # "shelf 1" is [shelf][ ][1]: 0.5 * 1 * 0.6; the teacher might have left it for "go to " at once, or for "2" later
    there = said(
        (1, 0.5, likely((1, 0.5), (6, 0.3))), (2, 1.0, likely((2, 1.0))), (3, 0.6, likely((3, 0.6), (4, 0.4), (7, 0.1)))
    )
    parts, _ = pieces().by_text(span("shelf 1", (7,), (5, 6, 7)), 0, 10, there)
    assert masses(parts) == [(0.3, (10,)), (0.3, (16,)), (0.2, (11,))]


def test_several_tokens_of_the_student_may_be_one_of_the_teacher() -> None:
    # "shelf 1" is the teacher's one token; its likeliest are "shelf 1", "shelf 2", "desk 1"
    texts = {0: "shelf 1", 1: "shelf 2", 2: "desk 1", 3: "sh"}
    begin = Beginnings({"shelf": 13, " ": 17, "1": 18, "2": 19, "desk": 20}, [])
    these = Pieces(begin=begin, shared=np.full(4, -1), texts=texts)
    there = said((0, 0.5, likely((0, 0.5), (1, 0.3), (2, 0.1), (3, 0.02))))
    where = span("shelf 1", (5, 6, 7), (7,))
    # the student has only beginnings of them, but for "sh", with which "shelf" begins
    assert masses(these.by_text(where, 0, 13, there)[0]) == [(0.5, (13,)), (0.3, (13,)), (0.1, (20,)), (0.02, (13,))]
    # given "shelf", only two are possible; given "shelf ", the number is all that is left
    assert masses(these.by_text(where, 1, 17, there)[0]) == [(0.625, (17,)), (0.375, (17,))]
    assert masses(these.by_text(where, 2, 18, there)[0]) == [(0.625, (18,)), (0.375, (19,))]


def test_ids_that_both_have_are_pieces_only_within_a_token_of_the_teacher() -> None:
    # [go to][ shelf] against "go to ", "shelf"
    texts = {0: "go to", 1: " shelf", 2: " desk 1", 3: " s", 4: "elf", 5: "shelf", 6: "go to ", 7: "go to s"}
    alone = np.array([-1, -1, -1, -1, -1, 13, -1, -1])
    first, then = likely((0, 0.8), (5, 0.1), (6, 0.04), (7, 0.02)), likely((1, 0.5), (2, 0.25), (3, 0.1), (5, 0.05))
    there, where = said((0, 0.8, first), (1, 0.5, then)), span("go to shelf", (6, 11), (5, 11))
    parts, _ = pieces(alone, texts).by_text(where, 0, 16, there)
    # what was said; "shelf" at once, as one token of both; "go to " and "go to s"; " desk 1" and " s" stay in the token
    expected = [(0.4, (16,)), (0.1, (13, 10, 11, 12)), (0.04, (16,)), (0.02, (16,)), (0.2, (16,)), (0.08, (16,))]
    assert masses(parts) == expected
    assert [piece.exact for piece in parts[:3]] == [False, True, False]
    # behind "go to " follows whatever began with it: 0.4 + 0.02 + 0.2 + 0.08 = 0.7
    every = (14, 13, 10, 11, 12)
    parts, _ = pieces(alone, texts).by_text(where, 1, 13, there)
    assert masses(parts) == [(0.57143, (13,)), (0.02857, every), (0.28571, (15,)), (0.11429, every)]
    # [sh][elf 1] against "shelf 1": where both begin a token, the teacher would have said the shared "shelf" itself
    texts = {0: "sh", 1: "elf 1", 2: "elf", 5: "shelf"}
    there = said((0, 0.5, likely((0, 0.5))), (1, 0.5, likely((1, 0.5), (2, 0.4))))
    parts, _ = pieces(alone, texts).by_text(span("shelf 1", (7,), (2, 7)), 0, 10, there)
    assert masses(parts) == [(0.25, (10,)), (0.2, (10, 11, 12))]


def test_what_no_piece_stands_for_is_added_up() -> None:
    """The teacher's own tail and all that is no text of the student, before a span's text is left or on the way."""
    _, rest = pieces().exact(likely((5, 0.4), (6, 0.3), tail=0.3))
    assert math.exp(rest) == pytest.approx(0.3)
    _, rest = pieces(texts={3: "z"}).exact(likely((0, 0.5), (3, 0.25), (5, 0.125), tail=0.125))
    assert math.exp(rest) == pytest.approx(0.5 + 0.25 + 0.125)
    assert math.isnan(pieces().exact(likely((5, 0.4)))[1])
    # "shelf 1" is [shelf][ ][1]; id 7 is no text, and " " none of the likeliest: its share of the tail is not left over
    there = said(
        (1, 0.5, likely((1, 0.5), (6, 0.3), tail=0.2)),
        (2, 0.5, likely((3, 0.25), tail=0.75)),
        (3, 0.6, likely((3, 0.6), (4, 0.2), (7, 0.1), tail=0.1)),
    )
    where = span("shelf 1", (7,), (5, 6, 7))
    parts, rest = pieces().by_text(where, 0, 10, there)
    assert masses(parts) == [(0.15, (10,)), (0.3, (16,)), (0.125, (13,)), (0.05, (11,))]
    assert math.exp(rest) == pytest.approx(0.2 + 0.5 * 0.25 + 0.25 * (0.1 + 0.1), rel=1e-5)
    total = sum(math.exp(piece.logq) for piece in parts) + math.exp(rest)
    assert total == pytest.approx(1.0, rel=1e-5)
    # within a token of the teacher nobody knows what else is possible
    assert pieces().by_text(span("shelf 1", (5, 7), (5, 6, 7)), 1, 10, there)[1] == pytest.approx(log(1e-7))
    assert math.isnan(
        pieces().by_text(where, 0, 10, said((1, 0.5, likely((1, 0.5))), *[(2, 0.5, there.top[1])] * 2))[1]
    )


def test_what_begins_or_ends_within_a_character_is_not_compared() -> None:
    likeliest = likely((1, 0.5), (6, 0.3))
    there = said((1, 0.5, likeliest), (2, 0.5, likeliest), (3, 0.5, likeliest))
    assert pieces().by_text(span("ab", (-1, 2), (1, 2, 2)), 0, 10, there)[0] == []
    assert pieces().by_text(span("ab", (-1, 2), (1, 2, 2)), 1, 10, there)[0] == []
    # a token without text
    assert pieces().by_text(span("ab", (2, 2), (1, 2, 2)), 1, 10, there)[0] == []
    # where the teacher's token begins within a character its alternatives are no text, but what was said is known
    parts, _ = pieces().by_text(span("ab", (2,), (-1, 2)), 0, 10, said((1, 0.5, likeliest), (2, 0.5, likeliest)))
    assert masses(parts) == [(0.25, (10,)), (0.3, (16,))]
    # what is no text is left over: at the second token all but the 0.5 of what was said
    full = likely((1, 0.5), (6, 0.3), tail=0.2)
    _, rest = pieces().by_text(span("ab", (2,), (-1, 2)), 0, 10, said((1, 0.5, full), (1, 0.5, full)))
    assert math.exp(rest) == pytest.approx(0.2 + 0.5 * 0.5)


# One row.


def test_a_piece_is_divided_as_the_student_divides_it() -> None:
    own = {1: log(0.1), 2: log(0.3), 3: log(0.2)}
    row = divided([Piece(logq=log(0.4), ids=(1, 2)), Piece(logq=log(0.1), ids=(3,))], own)
    assert [*row] == [1, 2, 3]
    np.testing.assert_allclose(np.exp([*row.values()]), [0.1, 0.3, 0.1], rtol=1e-6)
    # an id that says several pieces has the sum of its parts
    row = divided(
        [Piece(logq=log(0.2), ids=(3,)), Piece(logq=log(0.5), ids=(2, 3)), Piece(logq=log(0.1), ids=(3,))], own
    )
    np.testing.assert_allclose(np.exp([row[3], row[2]]), [0.5, 0.3], rtol=1e-6)
    # one id alone has what the teacher said, to the last bit
    assert divided([Piece(logq=-0.1234567891, ids=(3,))], {}) == {3: -0.1234567891}


@pytest.mark.parametrize("form", ["topk", "forward"])
def test_divergence_and_gradient_are_those_over_the_pieces(form: str) -> None:
    # ids 0 and 1 say one piece, 2 another, the rest is the tail
    logits = tensor([0.3, -0.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)
    row = divided([Piece(logq=log(0.6), ids=(0, 1)), Piece(logq=log(0.3), ids=(2,))], dict(enumerate(logp.tolist())))
    loss = support_kl(DistillConfig(form=form, importance=(1.0, 1.0)))  # type: ignore[arg-type]
    by_id = loss(tokens([0.0], logp[None, :3], [[*row.values()]])).loss_n
    (slope,) = torch.autograd.grad(by_id.sum(), logits)
    logp = logits.log_softmax(-1)
    grouped = torch.stack([logp[:2].logsumexp(-1), logp[2]])[None]
    by_piece = loss(tokens([0.0], grouped, [[log(0.6), log(0.3)]])).loss_n
    (same,) = torch.autograd.grad(by_piece.sum(), logits)
    torch.testing.assert_close(by_id, by_piece)
    torch.testing.assert_close(slope, same)
    assert slope.abs().min() > 0.01


# The loss.


def tokens(logp: list[float], support: Any, teacher: Any, **more: Any) -> Tokens:
    def column(values: Any) -> Any:
        return values if torch.is_tensor(values) else tensor(values).double()

    given: dict[str, Any] = {
        "logp_n": column(logp),
        "sampled_logp_n": column(logp),
        "behavior_logp_n": column(logp),
        "topk_logp_nK": column(support),
        "teacher_logp_nK": column(teacher),
        "off_policy_n": torch.zeros(len(logp), dtype=torch.bool),
        "entropy_n": torch.zeros(len(logp)),
        "extra": {},
    }
    return Tokens(**{**given, **more})


def test_an_empty_place_is_impossible_for_the_student_too() -> None:
    # one place of the second row is empty, and all of the third
    student = [[log(0.2), log(0.3)], [log(0.5), log(0.4)], [log(0.4), log(0.2)]]
    teacher = [[log(0.4), log(0.3)], [log(0.1), MIN_LOGP], [MIN_LOGP, MIN_LOGP]]
    losses = KnownPlaces(loss=SupportKL())(tokens([log(0.2), log(0.5), log(0.4)], student, teacher))
    full = 0.2 * log(0.2 / 0.4) + 0.5 * log(0.5 / 0.3)
    half = 0.5 * log(0.5 / 0.1) + 0.5 * log(0.5 / 0.9)
    np.testing.assert_allclose(losses.loss_n, [full, half, 0.0], atol=1e-6)
    # tails as they were summed; in a row without places all is in the tail, whatever the student's ids are
    tails = {"tail_n": tensor([0.5, 0.5, 0.4]).double().log(), "teacher_tail_n": tensor([0.3, 0.9, 1.0]).double().log()}
    with_tails = KnownPlaces(loss=SupportKL())(tokens([log(0.2), log(0.5), log(0.4)], student, teacher, **tails))
    np.testing.assert_allclose(with_tails.loss_n, [full, half, 0.0], atol=1e-6)


# A whole batch.


@dataclass
class Table:
    """Id i has log-probability `slope` times i; the likeliest ids are `best`, whatever the position."""

    slope: float
    best: list[int]
    tail: float | None = None
    asked: list[Any] = field(default_factory=list)

    def logprobs(self, ids: Any, positions: Any) -> list[Any]:
        self.asked.append(("logprobs", [row[where].tolist() for row, where in zip(ids, positions, strict=True)]))
        return [(self.slope * row[where]).astype(np.float32) for row, where in zip(ids, positions, strict=True)]

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        self.asked.append(("topk", [row[where].tolist() for row, where in zip(ids, positions, strict=True)]))
        top = np.array(self.best[:k], np.int32)
        tails = [None if self.tail is None else np.full(len(w), log(self.tail), np.float32) for w in positions]
        return [
            TopK(ids=np.tile(top, (len(w), 1)), logp=np.tile(self.slope * top, (len(w), 1)), tail=tail)
            for w, tail in zip(positions, tails, strict=True)
        ]

    def gather(self, ids: Any, positions: Any, support: Any) -> list[Any]:
        rows = list(zip(ids, positions, support, strict=True))
        self.asked.append(("gather", [row[where].tolist() for row, where, _ in rows]))
        return [TopK(ids=wanted, logp=(self.slope * wanted).astype(np.float32)) for _, _, wanted in rows]


@pytest.fixture
def scorers() -> Any:
    """The student finds id i as likely as e^(-0.02 i), the teacher as e^(-0.01 i)."""
    return Scorers(student=Table(-0.02, []), teacher=Table(-0.01, []))  # type: ignore[arg-type]


@cache
def writer(words: tuple[str, ...]) -> TextEpisodes:
    tokenizer, system = build_phrase_tokenizer(words), "Do it."
    settings = ChatSettings(system=system, observation_role="user")
    renderer = open_renderer(tokenizer, settings, TOOL)
    return TextEpisodes(
        renderer=renderer, channel=make_channel("text", TOOL), tool=TOOL, system=system, max_context=300
    )


def episode(responses: list[str], words: Any = MINE, number: int = 0) -> Episode:
    turns = tuple(
        Turn(
            index=index,
            observation="You see nothing",
            admissible=None,
            response=text,
            action=None,
            verdict=Verdict.OK,
            reward=0.0,
        )
        for index, text in enumerate(responses)
    )
    texts_alone = Episode(
        task=Task(env_id="toy", task_id=f"toy/{number}", sha256="0" * 64, split="toy", category="toy"),
        seed=0,
        sample=0,
        group=number,
        segments=(),
        turns=turns,
        status=Status.COMPLETED,
        success=True,
        episode_return=1.0,
    )
    written = writer(words).write(texts_alone)
    logs = [np.full(turn.response_length, -0.5, np.float32) for turn in written.turns]
    return replace(written, turns=tuple(replace(t, logprobs=p) for t, p in zip(written.turns, logs, strict=True)))


def other(target_fn: Any, words: Any = THEIRS, **more: Any) -> OtherVocabulary:
    mine, theirs = writer(MINE), writer(words)
    sizes = len(mine.renderer.template.tokenizer), len(theirs.renderer.template.tokenizer)
    return OtherVocabulary(target_fn, student=mine.renderer, reader=theirs, sizes=sizes, **more)


ID = build_phrase_tokenizer(MINE).get_vocab()
THEIR_ID = build_phrase_tokenizer(THEIRS).get_vocab()


def test_the_targets_of_an_episode() -> None:
    played = [episode(["go to shelf", "look"]), episode(["look"], number=1)]
    batch = pack(played)
    names = ["go ", "to ", "shelf", "<|end|>", "look", "<|end|>", "look", "<|end|>"]
    assert batch.label_N.tolist() == [ID[name] for name in names]
    teacher = Table(
        -0.01, [THEIR_ID["shelf"], THEIR_ID["go to "], THEIR_ID["desk"], THEIR_ID["<0x7A>"], THEIR_ID["sh"]]
    )
    student = Table(-0.02, [])
    targets = other(TeacherTopK(5))(batch, played, Scorers(student=student, teacher=teacher))  # type: ignore[arg-type]
    # its likeliest at every one of its tokens; it is among them where it matters, so nothing more was asked
    read = [THEIR_ID[n] for n in ("go to ", "shelf", "<|end|>", "look", "<|end|>")]
    assert teacher.asked == [("topk", [read, [THEIR_ID["look"], 1]])]
    # nothing had to be divided: each piece belongs to one id of the student
    assert student.asked == []
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    q = {name: -0.01 * THEIR_ID[name] for name in ("shelf", "go to ", "desk", "<0x7A>", "sh")}
    d, sh = ID["<0x64>"], ID["<0x73>"]
    exact = [ID["shelf"], ID["go "], d, ID["<0x7A>"], sh]
    within = np.logaddexp(q["go to "], -math.inf)
    # at "go " its own text is what was said; at "to " nothing else goes on from there
    assert targets.topk_ids_NK.tolist() == [
        [ID["go "], ID["shelf"], d, ID["<0x7A>"], sh],
        [ID["to "]] * 5,  # empty places
        *[exact] * 6,
    ]
    rows = [[within, q["shelf"], q["desk"], q["<0x7A>"], q["sh"]], [0.0, *[MIN_LOGP] * 4]]
    rows += [[q["shelf"], q["go to "], q["desk"], q["<0x7A>"], q["sh"]]] * 6
    np.testing.assert_allclose(targets.topk_logp_NK, rows, atol=1e-6)
    assert targets.log["vocabulary/exact"] == pytest.approx(6 / 8)
    assert targets.log["vocabulary/merged"] == pytest.approx(2 / 8)
    assert targets.log["vocabulary/lost"] == pytest.approx(0.0)
    both = math.exp(q["shelf"]) + math.exp(q["<0x7A>"])
    text = math.exp(q["go to "]) + math.exp(q["desk"]) + math.exp(q["sh"])
    assert targets.log["vocabulary/exact_mass"] == pytest.approx(both * 7 / 8, rel=1e-5)
    assert targets.log["vocabulary/text_mass"] == pytest.approx((text * 7 + 1) / 8, rel=1e-5)


def test_ids_that_share_a_piece_have_it_in_the_students_proportions() -> None:
    # "ta" begins three words of the student, "bl" none, and behind "ta" it goes on to "table" and "tables"
    ours, words = (*MINE, "take", "table", "tables"), (*THEIRS, "ta", "bl", "bx")
    mine, theirs = writer(ours), writer(words)
    own, ids = mine.renderer.template.tokenizer.get_vocab(), theirs.renderer.template.tokenizer.get_vocab()
    played = [episode(responses, ours, n) for n, responses in enumerate((["look", "take"], ["look"], ["look"]))]
    batch = pack(played)
    best = [ids["ta"], ids["bl"], ids["<0x62>"], ids["bx"]]
    teacher, student = Table(-0.01, best), Table(-0.02, [])
    target_fn = OtherVocabulary(TeacherTopK(4), student=mine.renderer, reader=theirs, sizes=(len(own), len(ids)))
    targets = target_fn(batch, played, Scorers(student=student, teacher=teacher))  # type: ignore[arg-type]
    assert student.asked == [("gather", [batch.label_N[batch.episode_N == number].tolist() for number in range(3)])]
    rows = as_dicts(targets)
    p = {name: math.exp(-0.02 * own[name]) for name in ("take", "table", "tables")}
    ta, bl, b = (math.exp(-0.01 * ids[name]) for name in ("ta", "bl", "<0x62>"))
    for name in p:
        assert rows[0][own[name]] == pytest.approx(log(ta * p[name] / sum(p.values())), rel=1e-4)
    assert rows[0][own["<0x62>"]] == pytest.approx(log(bl + b + math.exp(-0.01 * ids["bx"])), rel=1e-4)
    assert batch.label_N[2] == own["take"]
    # "tab" begins both, too
    part = ta * (bl + b) * p["table"] / (p["table"] + p["tables"])
    assert rows[2][own["table"]] == pytest.approx(log(part), rel=1e-4)


class Likely(Table):
    """A table in which all of the likeliest ids have the log-probability `slope`."""

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        tops = super().topk(ids, positions, k)
        return [replace(top, logp=np.full_like(top.logp, self.slope)) for top in tops]


@pytest.mark.parametrize(("logq", "asked"), [(-4.5, True), (-4.7, False)])
def test_a_piece_that_is_hardly_ever_said_is_not_divided(logq: float, asked: bool) -> None:
    ours, words = (*MINE, "take", "table"), (*THEIRS, "ta")
    mine, theirs = writer(ours), writer(words)
    own, ids = mine.renderer.template.tokenizer.get_vocab(), theirs.renderer.template.tokenizer.get_vocab()
    played = [episode(["look"], ours)]
    # the letter z, however unlikely, is one token of both; e^-4.7 is less than a hundredth
    student, teacher = Table(-0.02, []), Likely(logq, [ids["ta"], ids["<0x7A>"], ids["look"]])
    target_fn = OtherVocabulary(TeacherTopK(3), student=mine.renderer, reader=theirs, sizes=(len(own), len(ids)))
    rows = as_dicts(target_fn(pack(played), played, Scorers(student=student, teacher=teacher)))  # type: ignore[arg-type]
    assert bool(student.asked) == asked
    assert own["<0x7A>"] in rows[0]
    assert len(rows[0]) == 2 + asked


def as_dicts(targets: Targets) -> list[dict[int, float]]:
    """The log-probability of each id of each row."""
    assert targets.topk_ids_NK is not None
    assert targets.topk_logp_NK is not None
    rows = zip(targets.topk_ids_NK.tolist(), targets.topk_logp_NK.tolist(), strict=True)
    return [{number: logp for number, logp in zip(*row, strict=True) if logp > MIN_LOGP} for row in rows]


def test_the_tails_of_an_episode() -> None:
    """The teacher's own, what has no place in the row, and all of it where no span holds the token."""
    played = [episode(["go to shelf", "\u00e9"]), episode(["look"], number=1)]
    batch = pack(played)
    names = ("shelf", "go to ", "<|pad|>")
    teacher, student = Table(-0.01, [THEIR_ID[name] for name in names], tail=0.01), Table(-0.02, [])
    scorers: Any = Scorers(student=student, teacher=teacher)  # type: ignore[arg-type]
    targets = other(TeacherTopK(3))(batch, played, scorers)
    assert targets.topk_ids_NK is not None
    assert targets.topk_tail_N is not None
    mass = dict(zip(batch.label_N.tolist(), np.exp(targets.topk_tail_N).tolist(), strict=True))
    assert mass[ID["look"]] == pytest.approx(0.01)
    assert math.log(mass[ID["to "]]) == pytest.approx(log(1e-7))
    assert not other(TeacherTopK(3))(batch, played, replace(scorers, teacher=Table(-0.01, teacher.best))).topk_tail_N


def test_the_text_of_a_span_begins_where_the_one_before_ended() -> None:
    # "look" is one token of both; "go to " and "to to to " are one of the teacher, "lamp" is four
    words = (*THEIRS, "to to to ", "go on", "to be")
    ids = build_phrase_tokenizer(words).get_vocab()
    played = [episode(["lookgo to to to to lamp"])]
    batch = pack(played)
    names = ["look", "go ", "to ", "to ", "to ", "to ", "lamp", "<|end|>"]
    assert batch.label_N.tolist() == [ID[name] for name in names]
    teacher = Table(-0.01, [ids["go on"], ids["to be"], ids["go to "], ids["desk"]])
    scorers: Any = Scorers(student=Table(-0.02, []), teacher=teacher)  # type: ignore[arg-type]
    rows = as_dicts(other(TeacherTopK(4), words)(batch, played, scorers))
    q = {name: -0.01 * ids[name] for name in ("go on", "to be", "go to ", "to to to ", "desk")}
    # behind "go " the teacher says "to " or "on"; behind "to " it says "to " or "be"
    known = np.logaddexp(q["go to "], q["go on"])
    assert rows[2] == {ID["to "]: approx(q["go to "] - known), ID["<0x6F>"]: approx(q["go on"] - known)}
    known = np.logaddexp(q["to to to "], q["to be"])
    assert rows[4] == {ID["to "]: approx(q["to to to "] - known), ID["<0x62>"]: approx(q["to be"] - known)}
    assert rows[5] == {ID["to "]: approx(0.0)}
    # l, a, m, p; each of the four tokens might have come in the place of any
    letters = [-0.01 * ids[f"<0x{ord(letter):02X}>"] for letter in "lamp"]
    four = np.logaddexp.reduce([q[name] for name in ("go on", "to be", "go to ", "desk")])
    begun = [four + sum(letters[:count]) for count in (1, 2, 3)]
    assert rows[6][ID["<0x6C>"]] == approx(np.logaddexp.reduce(begun))


def approx(value: float) -> Any:
    return pytest.approx(value, rel=1e-4, abs=1e-6)


def test_the_teacher_reads_again_what_it_does_not_find_likely() -> None:
    played = [episode(["look"]), episode(["go to shelf", "go "], number=1)]
    teacher = Table(-0.01, [THEIR_ID["desk"]])
    targets = other(TeacherTopK(1))(pack(played), played, Scorers(student=Table(-0.02, []), teacher=teacher))  # type: ignore[arg-type]
    # the first episode has only tokens that both have; of the second those in spans that are not such
    assert [name for name, _ in teacher.asked] == ["topk", "logprobs"]
    letters = [THEIR_ID[f"<0x{ord(letter):02X}>"] for letter in "go "]
    assert teacher.asked[1][1] == [[THEIR_ID["go to "], *letters]]
    assert targets.topk_logp_NK is not None
    np.testing.assert_allclose(targets.topk_logp_NK[2:4, 0], [-0.01 * THEIR_ID["desk"], 0.0], rtol=1e-6)


def test_a_row_keeps_its_likeliest_ids_in_their_order() -> None:
    played = [episode(["look"], (*MINE, "desk 1", "desk 2", "desk 3"))]
    mine, theirs = writer((*MINE, "desk 1", "desk 2", "desk 3")), writer(THEIRS)
    own = mine.renderer.template.tokenizer.get_vocab()
    best = [THEIR_ID["look"], THEIR_ID["desk"]]

    def targets(slope: float) -> Targets:
        scorers: Any = Scorers(student=Table(-0.5, []), teacher=Table(slope, best, tail=0.25))  # type: ignore[arg-type]
        sizes = len(own), len(THEIR_ID)
        return OtherVocabulary(TeacherTopK(2), student=mine.renderer, reader=theirs, sizes=sizes)(
            pack(played), played, scorers
        )

    divided_targets = targets(-0.01)
    # four ids for the two places of a row: what was said, and the likeliest of the three desks
    assert divided_targets.topk_ids_NK is not None
    assert divided_targets.topk_ids_NK.tolist() == [[own["look"], own["desk 1"]]] * 2
    # the other two go to the tail
    shares = np.exp(-0.5 * np.array([own[f"desk {number}"] for number in (1, 2, 3)]))
    rest = math.exp(-0.01 * THEIR_ID["desk"]) * shares[1:].sum() / shares.sum()
    np.testing.assert_allclose(np.exp(divided_targets.topk_tail_N), [0.25 + rest] * 2, rtol=1e-5)  # type: ignore[arg-type]
    # and so does a piece that is not worth being divided
    undivided = targets(log(0.005) / THEIR_ID["desk"])
    np.testing.assert_allclose(np.exp(undivided.topk_tail_N), [0.255] * 2, rtol=1e-5)  # type: ignore[arg-type]


def test_each_token_of_a_span_has_what_the_teacher_finds_for_it() -> None:
    words = (*THEIRS, "go on")
    ids = build_phrase_tokenizer(words).get_vocab()
    two = episode(["look", "go to shelf"], number=1)
    first, second = two.turns
    # the second turn stands in a row of its own
    segments = (two.segments[0][: first.response_span[1]], two.segments[0])
    played = [episode(["look"]), replace(two, segments=segments, turns=(first, replace(second, segment=1)))]
    # "t" is a token of both, and "to " begins with it: the student says how it is divided
    teacher, student = Table(-0.01, [ids["go on"], ids["<0x74>"]]), Table(-0.02, [])
    scorers: Any = Scorers(student=student, teacher=teacher)  # type: ignore[arg-type]
    batch = pack(played)
    targets = other(SampledAdvantage(), words)(batch, played, scorers)
    # about the third row alone, for in the others nothing is to be divided
    assert batch.rows == 3
    assert ("gather", [batch.label_N[4:].tolist()]) in student.asked
    look, shelf, end, to, on = (-0.01 * ids[name] for name in ("look", "shelf", "<|end|>", "go to ", "go on"))
    # "go " begins what the teacher says and "go on", and the rest is decided at "to "
    both = np.logaddexp(to, on)
    assert targets.label_logp_N is not None
    assert targets.advantage_N is not None
    np.testing.assert_allclose(targets.label_logp_N, [look, end, look, end, both, to - both, shelf, end], rtol=1e-5)
    own = [-0.02 * ID[name] for name in ("look", "<|end|>", "look", "<|end|>", "go ", "to ", "shelf", "<|end|>")]
    np.testing.assert_allclose(targets.advantage_N, targets.label_logp_N - own, atol=1e-6)
    assert "vocabulary/exact_mass" not in targets.log


def test_where_all_tokens_are_those_of_both_their_probabilities_are_all_that_is_asked_for(scorers: Any) -> None:
    played = [episode(["look"])]
    other(SampledAdvantage())(pack(played), played, scorers)
    assert [name for name, _ in scorers.teacher.asked] == ["logprobs"]


def test_a_token_that_is_several_of_the_teacher_has_their_product() -> None:
    played = [episode(["shelf"])]
    # cut: nothing ended the response, though the teacher's has an end
    start = played[0].turns[0].response_span[0]
    turn = replace(played[0].turns[0], response_span=(start, start + 1), logprobs=np.zeros(1, np.float32))
    played = [replace(played[0], turns=(turn,))]
    words = tuple(word for word in THEIRS if word != "shelf")
    ids = build_phrase_tokenizer(words).get_vocab()
    # all of it is likelier than the beginning of "desk", which has no place beside it
    teacher: Any = Table(0.01, [ids["desk"]])
    scorers: Any = Scorers(student=Table(-0.02, []), teacher=teacher)  # type: ignore[arg-type]
    whole = 0.01 * (ids["sh"] + ids["elf"])
    targets = other(SampledAdvantage(), words)(pack(played), played, scorers)
    np.testing.assert_allclose(targets.label_logp_N, [whole], rtol=1e-6)  # type: ignore[arg-type]
    targets = other(TeacherTopK(1), words)(pack(played), played, scorers)
    assert targets.topk_ids_NK is not None
    assert targets.topk_ids_NK.tolist() == [[ID["shelf"]]]
    np.testing.assert_allclose(targets.topk_logp_NK, [[whole]], rtol=1e-6)  # type: ignore[arg-type]


def test_one_text_under_another_id_is_compared_as_a_span() -> None:
    played = episode(["g"])
    ids = played.segments[0].copy()
    start = played.turns[0].response_span[0]
    ids[start] = ID["<0x67>"]
    played = replace(played, segments=(ids,))
    targets = other(SampledAdvantage(), (*THEIRS, "g", "bed", "sofa"))(
        pack([played]),
        [played],
        Scorers(student=Table(-0.02, []), teacher=Table(-0.01, [])),  # type: ignore[arg-type]
    )
    assert (targets.log["vocabulary/exact"], targets.log["vocabulary/merged"]) == (0.5, 0.5)


def test_a_character_of_several_byte_tokens_is_exact_where_both_sides_have_them(scorers: Any) -> None:
    played = [episode(["\U0001f600 é"])]
    batch = pack(played)
    targets = other(SampledAdvantage())(batch, played, scorers)
    # four bytes, a space and the end; the student has é, the teacher its two bytes
    assert targets.log["vocabulary/exact"] == pytest.approx(6 / 7)


def test_a_teacher_may_read_a_history_that_it_rewrites(scorers: Any) -> None:
    played = [episode(["look", "go to shelf"]), episode(["shelf"], number=1)]

    class Rewrites:
        """Shows the second turn in a segment of its own."""

        renderer = writer(THEIRS).renderer

        def rewrite(self, given: Episode) -> Episode:
            rewritten = writer(THEIRS).rewrite(given)
            if len(rewritten.turns) < 2:
                return rewritten
            first, second = rewritten.turns
            cut = rewritten.segments[0][: first.response_span[1]]
            return replace(rewritten, segments=(cut, rewritten.segments[0]), turns=(first, replace(second, segment=1)))

    reading = other(SampledAdvantage())
    plain = reading(pack(played), played, scorers).label_logp_N
    reading.reader = Rewrites()  # type: ignore[assignment]
    np.testing.assert_array_equal(reading(pack(played), played, scorers).label_logp_N, plain)  # type: ignore[arg-type]


def test_the_answer_has_a_part_for_each_row() -> None:
    played = [episode(["look"] * count, number=count) for count in (1, 2, 3)]
    answered: list[Any] = []

    def asks(batch: Any, episodes: Any, scorers: Any) -> Targets:
        ids, positions = rows(batch)
        top = scorers.teacher.topk(ids, positions, 2)
        answered.extend([[len(part.ids) for part in top], [len(part.logp) for part in top]])
        answered.append([len(part) for part in scorers.teacher.logprobs(ids, positions)])
        return Targets()

    scorers: Any = Scorers(student=Table(-0.02, [1, 2]), teacher=Table(-0.01, [1, 2]))  # type: ignore[arg-type]
    other(asks)(pack(played), played, scorers)
    assert answered == [[2, 4, 6]] * 3


def test_what_the_teacher_does_not_read_is_not_compared(scorers: Any) -> None:
    played = [episode(["look", "shelf"])]
    reading = other(SampledAdvantage())
    # room for the first turn only: the labels of the second are the student's own
    reading.reader = replace(reading.reader, max_context=14)
    targets = reading(pack(played), played, scorers)
    assert targets.label_logp_N is not None
    end, mine = -0.01 * THEIR_ID["<|end|>"], [-0.02 * ID["shelf"], -0.02 * ID["<|end|>"]]
    np.testing.assert_allclose(targets.label_logp_N, [-0.01 * THEIR_ID["look"], end, *mine], rtol=1e-6)
    assert targets.log["vocabulary/lost"] == pytest.approx(0.5)
    reading.reader = replace(reading.reader, max_context=3)
    with pytest.raises(TargetError, match="finds none of the student's responses"):
        reading(pack(played), played, scorers)
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        reading(pack(played), played, Scorers(student=scorers.student))


def test_only_whole_spans_are_compared(scorers: Any) -> None:
    played = episode(["go to shelf"])
    # somebody else began the response with "go "
    begun = replace(played, turns=(replace(played.turns[0], begun=1),))
    targets = other(SampledAdvantage())(pack([begun]), [begun], scorers)
    assert targets.log["vocabulary/merged"] == 0.0
    assert targets.label_logp_N is not None
    np.testing.assert_allclose(
        targets.label_logp_N, [-0.02 * ID["to "], -0.01 * THEIR_ID["shelf"], -0.01 * THEIR_ID["<|end|>"]], rtol=1e-6
    )


def test_a_teacher_asked_about_other_texts_is_refused() -> None:
    played = [episode(["look"])]

    def asks(batch: Any, episodes: Any, scorers: Any) -> Any:
        return scorers.teacher.topk([np.array([1, 2], np.int32)], [np.array([1])], 2)

    scorers: Any = Scorers(student=Table(-0.02, []), teacher=Table(-0.01, [1]))  # type: ignore[arg-type]
    with pytest.raises(TargetError, match="about other texts than the episodes"):
        other(asks)(pack(played), played, scorers)
    with pytest.raises(TargetError, match="chosen ids of the student"):
        other(StudentTopK(1))(pack(played), played, scorers)


# With one vocabulary it is OPD.


def test_with_equal_tokenizers_targets_losses_and_gradients_are_those_of_opd() -> None:
    played = [episode(["go to shelf", "look é", "\U0001f600 go"], number=n) for n in range(2)]
    batch, size = pack(played), len(build_phrase_tokenizer(MINE))
    student, teacher = tiny_qwen3(size, width=32, layers=1, heads=2, seed=1), tiny_qwen3(size, width=32, seed=2)
    scorers = Scorers(student=LocalScorer(model=student), teacher=LocalScorer(model=teacher, vocab_size=size))
    for distill in (DistillConfig(top_k=9), DistillConfig(form="sampled")):
        plain = opd.build(opd.OpdConfig(), BuildContext(distill=distill))
        mine = writer(MINE)
        across = of_other_vocabulary(plain, distill, student=mine.renderer, reader=writer(MINE), sizes=(size, size))
        results = []
        for algorithm in (plain, across):
            targets = algorithm.target_fn(batch, played, scorers)
            student.zero_grad()
            weight_N = algorithm.weight(batch, step=1, total_steps=1)
            loss_and_columns = accumulate(
                student, batch, targets=targets, weight_N=weight_N, token_loss=algorithm.token_loss, forward=Forward()
            )
            grads = [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]
            results.append((targets, loss_and_columns, grads))
        (opd_targets, (loss, columns), grads), (same_targets, (same_loss, same_columns), same_grads) = results
        for name in ("topk_ids_NK", "topk_logp_NK", "advantage_N", "label_logp_N"):
            np.testing.assert_array_equal(getattr(opd_targets, name), getattr(same_targets, name))
        assert loss == same_loss
        assert columns.keys() == same_columns.keys()
        for name in columns:
            np.testing.assert_array_equal(columns[name], same_columns[name])
        assert len(grads) == len(same_grads) > 5
        assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
        assert same_targets.log["vocabulary/exact"] == 1.0


# Runs.


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny(folder / "student", seed=0, width=16)
    save_tiny(folder / "alike", seed=1, width=16)
    words = ("go to ", "take ", "open ", "<action>", "</action>", "Do it now.")
    save_tiny(folder / "teacher", seed=2, words=words, width=16, length=4096, system="Do it now.")
    return folder


def run(models: Path, out: Path, *more: str, teacher: str = "teacher", algorithm: str = "opd") -> Any:
    words = ["--algorithm", algorithm, "--student", str(models / "student"), "--teacher", str(models / teacher)]
    words += ["--out", str(out), "--episodes", "2", "--max-turns", "2", "--steps", "2", "--eval-every", "0"]
    words += ["--tracker", "none", "--threads", "1", "--device", "cpu"]
    return build_trainer(train.resolved([*words, *more]).spec)


OTHER = ("--distill.vocabulary", "other")


def test_a_teacher_of_another_vocabulary_is_refused_unless_it_is_asked_for(models: Path, tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"--distill\.vocabulary other"):
        run(models, tmp_path / "no")
    trainer = run(models, tmp_path / "yes", *OTHER, "--env-kwargs", '{"config": "small"}')
    assert trainer.vocab_size is None
    reader = trainer.algorithm.target_fn.reader
    # the teacher's own system message and tokenizer
    assert reader.system == "Do it now."
    assert reader.max_context == 4096
    trainer.train()
    for row in read_metrics(tmp_path / "yes"):
        assert 0.0 < row["vocabulary/merged"] <= 1.0
        assert row["vocabulary/lost"] == pytest.approx(0.0)
        assert row["kl_bin"] > 0.0


def test_settings_reach_the_targets(models: Path, tmp_path: Path) -> None:
    trainer = run(models, tmp_path / "run", *OTHER, "--distill.top-k", "7")
    assert trainer.algorithm.target_fn.target_fn == TeacherTopK(7)
    assert trainer.algorithm.settings["DistillConfig"]["vocabulary"] == "other"


def test_with_one_vocabulary_the_option_changes_nothing(models: Path, tmp_path: Path) -> None:
    trainer = run(models, tmp_path / "a", *OTHER, teacher="alike")
    assert trainer.algorithm.target_fn == TeacherTopK(50)
    assert trainer.algorithm.token_loss == SupportKL()
    assert trainer.vocab_size == len(trainer.model.get_input_embeddings().weight)


def test_what_cannot_be_had_with_another_vocabulary_is_said_at_once(models: Path, tmp_path: Path) -> None:
    for more, algorithm, why in (
        (("--teacher-server", "http://127.0.0.1:9"), "opd", "other with --teacher-server"),
        (("--also", "turngym/WebShop-v0,split=train"), "opd", "other with --also"),
        (("--memory", "react"), "opd", "--memory react"),
        (("--distill.support", "student"), "opd", "other with support student; valid: support teacher"),
        ((), "guided-opd", "the teacher of guided-opd plays"),
    ):
        with pytest.raises(TurngymError, match=why):
            run(models, tmp_path / "x", *OTHER, *more, algorithm=algorithm)
