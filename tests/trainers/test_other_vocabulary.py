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

from turngym.agents.rendering.chat_settings import ChatSettings, build_phrase_tokenizer, open_renderer
from turngym.agents.rendering.renderer import TextEpisodes
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.channels import make_channel
from turngym.envs.core.episode import Episode, Status, TopK, Turn
from turngym.envs.core.errors import TurngymError
from turngym.envs.core.task import Task, Verdict
from turngym.scripts import train
from turngym.trainers.algorithm import BuildContext, Scorers, Targets, Tokens
from turngym.trainers.algorithms import opd
from turngym.trainers.batch import pack
from turngym.trainers.config import DistillConfig
from turngym.trainers.lm_head import MIN_LOGP
from turngym.trainers.losses import SupportKL
from turngym.trainers.metrics import read_metrics
from turngym.trainers.models import VocabularyError, tiny_qwen3
from turngym.trainers.optimizer_step import Forward, accumulate
from turngym.trainers.other_vocabulary import (
    SPAN,
    Merged,
    OtherVocabulary,
    SpanLoss,
    of_other_vocabulary,
    shared_ids,
    span_row,
    split_alike,
    text_spans,
    token_ends,
    without_end,
)
from turngym.trainers.run import build_trainer
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.targets import SampledAdvantage, StudentTopK, TargetError, TeacherTopK, rows

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
    assert split_alike([(0, 2, 0, 2)], [6, 7], [1, 2], shared) == [(0, 1, 0, 1), (1, 2, 1, 2)]
    assert split_alike([(0, 1, 0, 1), (1, 3, 1, 3)], [5, 6, 7], [0, 2, 1], shared) == [(0, 1, 0, 1), (1, 3, 1, 3)]
    assert split_alike([(0, 1, 0, 1)], [7], [3], shared) == [(0, 1, 0, 1)]
    assert split_alike([(0, 2, 0, 1)], [5, 6], [0], shared) == [(0, 2, 0, 1)]


def test_the_id_that_ends_a_response_is_no_part_of_its_text() -> None:
    renderer: Any = SimpleNamespace(stop_ids=(1, 2))
    assert without_end((7, 1, 8, 2), renderer) == (7, 1, 8)
    assert without_end((7, 1, 8), renderer) == (7, 1, 8)
    assert without_end((), renderer) == ()


# The same token.


def test_tokens_of_one_string_are_shared() -> None:
    mine, theirs = build_phrase_tokenizer(MINE), build_phrase_tokenizer(THEIRS)
    shared = shared_ids(mine, theirs, len(theirs) + 3)
    found = {name: int(shared[number]) for name, number in theirs.get_vocab().items()}
    for name in ("shelf", "Do it.", "<action>", "<|end|>", "<0x41>", "nothing"):
        assert found[name] == mine.get_vocab()[name]
    assert [found[name] for name in ("go to ", "sh", "elf", "desk")] == [-1] * 4
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


# One row.

SHARED = np.array([4, -1, 2, -1, 0])
TOP = TopK(ids=np.array([1, 0, 3, 2], np.int32), logp=np.log(np.array([0.4, 0.3, 0.2, 0.05], np.float32)))


def row(ids: list[int], ranked: list[int], merged: Merged | None = None, top: TopK = TOP) -> Any:
    found, logp, mass = span_row(top, SHARED, np.array(ranked, np.int64), merged)
    assert logp.dtype == np.float32
    assert found.tolist() == ids
    return np.exp(logp), mass


def test_shared_ids_keep_their_probability_and_the_others_go_by_rank() -> None:
    q, mass = row([4, 2, 7, 9], [7, 9, 8])
    np.testing.assert_allclose(q, [0.3, 0.05, 0.4, 0.2], rtol=1e-6)
    assert mass == pytest.approx((0.35, 0.6))
    # the student has only one id without a partner: the teacher's second is left to the tail
    q, mass = row([4, 2, 7, 0], [7])
    np.testing.assert_allclose(q, [0.3, 0.05, 0.4, 0.0], rtol=1e-6)
    assert mass == pytest.approx((0.35, 0.4))
    q, mass = row([4, 2, 0, 0], [])
    assert mass == pytest.approx((0.35, 0.0))


def test_the_first_id_is_an_id_like_all_others() -> None:
    top = TopK(ids=np.array([4, 1], np.int32), logp=np.log(np.array([0.5, 0.3], np.float32)))
    q, mass = row([0, 7], [7], top=top)
    np.testing.assert_allclose(q, [0.5, 0.3], rtol=1e-6)
    assert mass == pytest.approx((0.5, 0.3))


def test_a_merged_span_comes_first_and_its_first_tokens_are_no_alternatives() -> None:
    # the student wrote 7 ..., the teacher 1 ...: neither is compared once more
    q, mass = row([7, 4, 2, 9], [7, 9], Merged(student=7, teacher=1, logp=log(0.36)))
    np.testing.assert_allclose(q, [0.36, 0.3, 0.05, 0.2], rtol=1e-6)
    assert mass == pytest.approx((0.35, 0.2))
    # the student's 4 is a shared id, but it is what the span begins with
    q, mass = row([4, 2, 8, 9], [8, 9], Merged(student=4, teacher=4, logp=log(0.01)))
    np.testing.assert_allclose(q, [0.01, 0.05, 0.4, 0.2], rtol=1e-6)
    assert mass == pytest.approx((0.05, 0.6))
    # as wide as the teacher's row
    q, mass = row([8, 4, 2, 7], [7, 9], Merged(student=8, teacher=4, logp=log(0.01)))
    np.testing.assert_allclose(q, [0.01, 0.3, 0.05, 0.4], rtol=1e-6)


# The loss.


def tokens(logp: list[float], support: Any, teacher: Any, back: list[int], **more: Any) -> Tokens:
    given: dict[str, Any] = {
        "logp_n": tensor(logp).double(),
        "sampled_logp_n": tensor(logp).double(),
        "behavior_logp_n": tensor(logp).double(),
        "topk_logp_nK": tensor(support).double(),
        "teacher_logp_nK": tensor(teacher).double(),
        "off_policy_n": torch.zeros(len(logp), dtype=torch.bool),
        "entropy_n": torch.zeros(len(logp)),
        "extra": {SPAN: tensor(back)},
    }
    return Tokens(**{**given, **more})


EMPTY = [MIN_LOGP, MIN_LOGP]


def test_a_span_has_the_product_of_its_tokens_probabilities() -> None:
    # a token alone, and a span of three: P = 0.5 * 0.4 * 0.9 = 0.18 and Q = 0.36, then 0.1 and 0.3, tails 0.72 and 0.34
    student = [[log(0.2), log(0.3)], [log(0.5), log(0.1)], [log(0.4), log(0.2)], [log(0.9), log(0.1)]]
    teacher = [[log(0.4), log(0.3)], [log(0.36), log(0.3)], EMPTY, EMPTY]
    given = tokens([log(0.2), log(0.5), log(0.4), log(0.9)], student, teacher, [0, 0, 1, 2])
    found = SpanLoss(loss=SupportKL())(given)
    alone = 0.2 * log(0.2 / 0.4) + 0.5 * log(0.5 / 0.3)
    span = 0.18 * log(0.18 / 0.36) + 0.1 * log(0.1 / 0.3) + 0.72 * log(0.72 / 0.34)
    np.testing.assert_allclose(found.loss_n, [alone, span, 0.0, 0.0], atol=1e-6)
    np.testing.assert_allclose(found.diagnostics["kl_bin"], [alone, span, 0.0, 0.0], atol=1e-6)


def test_the_gradient_reaches_every_token_of_a_span() -> None:
    logp = tensor([log(0.5), log(0.4)], dtype=torch.float64, requires_grad=True)
    support = torch.stack([torch.cat([logp[:1], tensor([-9.0])]), torch.cat([logp[1:], tensor([-1.0])])])
    given = tokens([0.0, 0.0], [EMPTY, EMPTY], [[log(0.1), MIN_LOGP], EMPTY], [0, 1], logp_n=logp, topk_logp_nK=support)
    SpanLoss(loss=SupportKL(importance=None))(given).loss_n.sum().backward()
    # d KL / d log P = P (log(P / Q) - log((1 - P) / (1 - Q))), P = 0.2: the same for both factors
    slope = 0.2 * (log(0.2 / 0.1) - log(0.8 / 0.9))
    assert logp.grad is not None
    np.testing.assert_allclose(logp.grad, [slope, slope], rtol=1e-6)


def test_the_importance_ratio_is_that_of_the_span() -> None:
    given = tokens(
        [log(0.5), log(0.4)],
        [[log(0.5), -9.0], [log(0.4), -9.0]],
        [[log(0.1), MIN_LOGP], EMPTY],
        [0, 1],
        sampled_logp_n=tensor([log(0.25), log(0.8)]),
        behavior_logp_n=tensor([log(0.5), log(0.4)]),
    )
    plain = SpanLoss(loss=SupportKL(importance=None))(given).loss_n
    # (0.25 * 0.8) / (0.5 * 0.4) = 1
    np.testing.assert_allclose(SpanLoss(loss=SupportKL())(given).loss_n, plain, rtol=1e-6)
    double = replace(given, behavior_logp_n=tensor([log(0.5), log(0.2)]))
    np.testing.assert_allclose(SpanLoss(loss=SupportKL())(double).loss_n, 2 * plain, rtol=1e-6)


# A whole batch.


@dataclass
class Table:
    """Id i has log-probability `slope` times i; the likeliest ids are `best`, whatever the position."""

    slope: float
    best: list[int]
    asked: list[Any] = field(default_factory=list)

    def logprobs(self, ids: Any, positions: Any) -> list[Any]:
        self.asked.append(("logprobs", [row[where].tolist() for row, where in zip(ids, positions, strict=True)]))
        return [(self.slope * row[where]).astype(np.float32) for row, where in zip(ids, positions, strict=True)]

    def topk(self, ids: Any, positions: Any, k: int) -> list[TopK]:
        self.asked.append(("topk", [row[where].tolist() for row, where in zip(ids, positions, strict=True)]))
        top = np.array(self.best[:k], np.int32)
        return [TopK(ids=np.tile(top, (len(w), 1)), logp=np.tile(self.slope * top, (len(w), 1))) for w in positions]


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
    said = Episode(
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
    found = writer(words).write(said)
    logs = [np.full(turn.response_length, -0.5, np.float32) for turn in found.turns]
    return replace(found, turns=tuple(replace(t, logprobs=p) for t, p in zip(found.turns, logs, strict=True)))


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
    teacher = Table(-0.01, [THEIR_ID["shelf"], THEIR_ID["go to "], THEIR_ID["desk"]])
    # ids that the teacher has, too, are passed over, the very first one included
    student = Table(-0.02, [0, ID["to "], ID["go "]])
    found = other(TeacherTopK(3))(batch, played, Scorers(student=student, teacher=teacher))  # type: ignore[arg-type]
    # asked where spans begin, and for the product over the one span that is not a shared token
    assert teacher.asked == [
        ("topk", [[THEIR_ID[n] for n in ("go to ", "shelf", "<|end|>", "look", "<|end|>")], [THEIR_ID["look"], 1]]),
        ("logprobs", [[THEIR_ID["go to "]]]),
    ]
    assert found.topk_ids_NK is not None
    assert found.topk_logp_NK is not None
    exact = [ID["shelf"], ID["to "], ID["go "]]
    assert found.topk_ids_NK.tolist() == [
        [ID["go "], ID["shelf"], ID["to "]],
        [0, 0, 0],
        *[exact] * 6,
    ]
    shelf, go, desk = (-0.01 * THEIR_ID[name] for name in ("shelf", "go to ", "desk"))
    rows = [[go, shelf, desk], [MIN_LOGP] * 3, *[[shelf, go, desk]] * 6]
    np.testing.assert_allclose(found.topk_logp_NK, rows, rtol=1e-6)
    assert found.extra[SPAN].tolist() == [0, 1, 0, 0, 0, 0, 0, 0]
    assert found.log["vocabulary/exact"] == pytest.approx(6 / 8)
    assert found.log["vocabulary/merged"] == pytest.approx(2 / 8)
    assert found.log["vocabulary/lost"] == pytest.approx(0.0)
    assert found.log["vocabulary/exact_mass"] == pytest.approx(math.exp(shelf))
    ranked = (math.exp(desk) + 6 * (math.exp(desk) + math.exp(go))) / 7
    assert found.log["vocabulary/rank_mass"] == pytest.approx(ranked)


def test_nobody_asks_the_student_where_all_ids_have_a_partner() -> None:
    played = [episode(["look"])]
    teacher, student = Table(-0.01, [THEIR_ID["look"], 0]), Table(-0.02, [ID["go "]])
    scorers: Any = Scorers(student=student, teacher=teacher)  # type: ignore[arg-type]
    found = other(TeacherTopK(2))(pack(played), played, scorers)
    assert found.topk_ids_NK is not None
    assert found.topk_ids_NK.tolist() == [[ID["look"], 0]] * 2
    assert student.asked == []


def test_the_tokens_of_a_span_share_what_the_two_differ_by() -> None:
    played = [episode(["go to shelf"])]
    teacher, student = Table(-0.01, []), Table(-0.02, [])
    scorers: Any = Scorers(student=student, teacher=teacher)  # type: ignore[arg-type]
    found = other(SampledAdvantage())(pack(played), played, scorers)
    go, to = -0.02 * ID["go "], -0.02 * ID["to "]
    part = (-0.01 * THEIR_ID["go to "] - go - to) / 2
    assert found.label_logp_N is not None
    shelf, end = -0.01 * THEIR_ID["shelf"], -0.01 * THEIR_ID["<|end|>"]
    np.testing.assert_allclose(found.label_logp_N, [go + part, to + part, shelf, end], rtol=1e-6)
    # each token is pushed alike, and not at all where both give the span the same probability
    np.testing.assert_allclose(found.advantage_N[:2], [part, part], rtol=1e-5)  # type: ignore[index]
    assert "vocabulary/exact_mass" not in found.log


def test_a_token_of_the_student_may_be_several_of_the_teacher() -> None:
    played = [episode(["shelf"])]
    # cut: nothing ended the response, though the teacher's has an end
    start = played[0].turns[0].response_span[0]
    turn = replace(played[0].turns[0], response_span=(start, start + 1), logprobs=np.zeros(1, np.float32))
    played = [replace(played[0], turns=(turn,))]
    words = tuple(word for word in THEIRS if word != "shelf")
    ids = build_phrase_tokenizer(words).get_vocab()
    teacher: Any = Table(-0.01, [ids["desk"]])
    scorers: Any = Scorers(student=Table(-0.02, [ID["lamp"]]), teacher=teacher)  # type: ignore[arg-type]
    whole = -0.01 * (ids["sh"] + ids["elf"])
    found = other(SampledAdvantage(), words)(pack(played), played, scorers)
    np.testing.assert_allclose(found.label_logp_N, [whole], rtol=1e-6)  # type: ignore[arg-type]
    found = other(TeacherTopK(1), words)(pack(played), played, scorers)
    assert found.topk_ids_NK is not None
    assert found.topk_ids_NK.tolist() == [[ID["shelf"]]]
    np.testing.assert_allclose(found.topk_logp_NK, [[whole]], rtol=1e-6)  # type: ignore[arg-type]


def test_one_text_under_another_id_is_compared_as_a_span() -> None:
    played = episode(["g"])
    ids = played.segments[0].copy()
    start = played.turns[0].response_span[0]
    ids[start] = ID["<0x67>"]
    played = replace(played, segments=(ids,))
    found = other(SampledAdvantage(), (*THEIRS, "g", "bed", "sofa"))(
        pack([played]),
        [played],
        Scorers(student=Table(-0.02, []), teacher=Table(-0.01, [])),  # type: ignore[arg-type]
    )
    assert (found.log["vocabulary/exact"], found.log["vocabulary/merged"]) == (0.5, 0.5)


def test_a_character_of_several_byte_tokens_is_exact_where_both_sides_have_them(scorers: Any) -> None:
    played = [episode(["\U0001f600 é"])]
    batch = pack(played)
    found = other(SampledAdvantage())(batch, played, scorers)
    # four bytes, a space and the end; the student has é, the teacher its two bytes
    assert found.log["vocabulary/exact"] == pytest.approx(6 / 7)
    assert found.extra[SPAN].tolist() == [0] * 7


def test_a_teacher_may_read_a_history_that_it_rewrites(scorers: Any) -> None:
    played = [episode(["look", "go to shelf"]), episode(["shelf"], number=1)]

    class Rewrites:
        """Shows the second turn in a segment of its own."""

        renderer = writer(THEIRS).renderer

        def rewrite(self, given: Episode) -> Episode:
            found = writer(THEIRS).rewrite(given)
            if len(found.turns) < 2:
                return found
            first, second = found.turns
            cut = found.segments[0][: first.response_span[1]]
            return replace(found, segments=(cut, found.segments[0]), turns=(first, replace(second, segment=1)))

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
        answered.extend([[len(found.ids) for found in top], [len(found.logp) for found in top]])
        answered.append([len(found) for found in scorers.teacher.logprobs(ids, positions)])
        return Targets()

    scorers: Any = Scorers(student=Table(-0.02, [1, 2]), teacher=Table(-0.01, [1, 2]))  # type: ignore[arg-type]
    other(asks)(pack(played), played, scorers)
    assert answered == [[2, 4, 6]] * 3


def test_what_the_teacher_does_not_read_is_not_compared(scorers: Any) -> None:
    played = [episode(["look", "shelf"])]
    reading = other(SampledAdvantage())
    # room for the first turn only: the labels of the second are the student's own
    reading.reader = replace(reading.reader, max_context=14)
    found = reading(pack(played), played, scorers)
    assert found.label_logp_N is not None
    end, mine = -0.01 * THEIR_ID["<|end|>"], [-0.02 * ID["shelf"], -0.02 * ID["<|end|>"]]
    np.testing.assert_allclose(found.label_logp_N, [-0.01 * THEIR_ID["look"], end, *mine], rtol=1e-6)
    assert found.log["vocabulary/lost"] == pytest.approx(0.5)
    reading.reader = replace(reading.reader, max_context=3)
    with pytest.raises(TargetError, match="finds none of the student's responses"):
        reading(pack(played), played, scorers)
    with pytest.raises(TargetError, match="no teacher was given"):
        reading(pack(played), played, Scorers(student=scorers.student))


def test_only_whole_spans_are_compared(scorers: Any) -> None:
    played = episode(["go to shelf"])
    # somebody else began the response with "go "
    begun = replace(played, turns=(replace(played.turns[0], begun=1),))
    found = other(SampledAdvantage())(pack([begun]), [begun], scorers)
    assert found.label_logp_N is not None
    np.testing.assert_allclose(
        found.label_logp_N,
        [-0.02 * ID["to "], -0.01 * THEIR_ID["shelf"], -0.01 * THEIR_ID["<|end|>"]],
        rtol=1e-6,
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
        made = of_other_vocabulary(plain, distill, student=mine.renderer, reader=writer(MINE), sizes=(size, size))
        results = []
        for algorithm in (plain, made):
            targets = algorithm.target_fn(batch, played, scorers)
            student.zero_grad()
            weight_N = algorithm.weight(batch, step=1, total_steps=1)
            found = accumulate(
                student, batch, targets=targets, weight_N=weight_N, token_loss=algorithm.token_loss, forward=Forward()
            )
            grads = [parameter.grad.clone() for parameter in student.parameters() if parameter.grad is not None]
            results.append((targets, found, grads))
        (one, (loss, columns), grads), (two, (same_loss, same_columns), same_grads) = results
        for name in ("topk_ids_NK", "topk_logp_NK", "advantage_N", "label_logp_N"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
        assert loss == same_loss
        assert columns.keys() == same_columns.keys()
        for name in columns:
            np.testing.assert_array_equal(columns[name], same_columns[name])
        assert len(grads) == len(same_grads) > 5
        assert all(torch.equal(a, b) for a, b in zip(grads, same_grads, strict=True))
        assert two.log["vocabulary/exact"] == 1.0


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
    words += ["--no-tensorboard", "--threads", "1", "--device", "cpu"]
    return build_trainer(train.parse([*words, *more]))


OTHER = ("--distill.vocabulary", "other")


def test_a_teacher_of_another_vocabulary_is_refused_unless_it_is_asked_for(models: Path, tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"different vocabularies .* --distill\.vocabulary other"):
        run(models, tmp_path / "no")
    made = run(models, tmp_path / "yes", *OTHER, "--env-kwargs", '{"config": "small"}')
    assert made.vocab_size is None
    reader = made.algorithm.target_fn.reader
    # the teacher's own system message and tokenizer
    assert reader.system == "Do it now."
    assert reader.max_context == 4096
    made.train()
    for row in read_metrics(tmp_path / "yes"):
        assert 0.0 < row["vocabulary/merged"] <= 1.0
        assert row["vocabulary/lost"] == pytest.approx(0.0)
        assert row["kl_bin"] > 0.0


def test_settings_reach_the_targets(models: Path, tmp_path: Path) -> None:
    made = run(models, tmp_path / "run", *OTHER, "--distill.top-k", "7")
    assert made.algorithm.target_fn.target_fn == TeacherTopK(7)
    assert made.algorithm.settings["vocabulary"] == "other"


def test_with_one_vocabulary_the_option_changes_nothing(models: Path, tmp_path: Path) -> None:
    made = run(models, tmp_path / "a", *OTHER, teacher="alike")
    assert made.algorithm.target_fn == TeacherTopK(50)
    assert made.algorithm.token_loss == SupportKL()
    assert made.vocab_size == len(made.model.get_input_embeddings().weight)


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
