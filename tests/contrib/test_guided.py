"""Guided episodes: the teacher's share by step, the forward KL on its turns, and what can be learned from, by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from math import cos, log, nan, pi
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.episode import Episode, Status
from turngym.core.task import Verdict
from turngym.trainers.algorithm import Tokens
from turngym.trainers.contrib.guided_opd import CosineGuide, GuidedLoss, supervised
from turngym.trainers.losses import bin_forward_kl
from turngym.trainers.token_losses import ClippedAdvantage, SupportKL

LN2 = log(2)
# student (1/2, 1/4 | 1/4), teacher (1/4, 1/4 | 1/2): forward 1/4 ln 1/2 + 1/2 ln 2 = 1/4 ln 2
STUDENT, TEACHER = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.25]).log()
# teacher (1/8, 1/4 | 5/8): forward 1/8 ln 1/4 + 5/8 ln 5/2, reverse 1/2 ln 4 + 1/4 ln 2/5
OTHER = torch.tensor([0.125, 0.25]).log()
FORWARD, REVERSE = -LN2 / 4 + 0.625 * log(2.5), LN2 + 0.25 * log(0.4)


def test_the_share_goes_down_in_a_cosine() -> None:
    found = [CosineGuide(total=10)(step) for step in (1, 4, 8, 9, 10)]
    assert found == pytest.approx([(1 + cos(pi / 8)) / 2, 0.5, 0.0, 0.0, 0.0], abs=1e-12)
    assert CosineGuide(total=10, start=0.6, ratio=0.4)(2) == pytest.approx(0.3)
    assert CosineGuide(total=10, start=0.6, ratio=0.3)(1) == pytest.approx(0.45)
    assert CosineGuide(total=20, start=0.6, ratio=0.3)(2) == pytest.approx(0.45)


@given(total=st.integers(1, 200), start=st.floats(0, 1), ratio=st.floats(0.01, 1))
def test_the_share_never_rises_and_ends_at_nothing(total: int, start: float, ratio: float) -> None:
    shares = [CosineGuide(total=total, start=start, ratio=ratio)(step) for step in range(1, total + 1)]
    assert all(0.0 <= later <= earlier <= start for earlier, later in itertools.pairwise(shares))
    assert shares[-1] == pytest.approx(0.0, abs=1e-12)


def test_forward_kl_by_hand() -> None:
    student = torch.stack([STUDENT, STUDENT, STUDENT]).requires_grad_()
    found = bin_forward_kl(student, torch.stack([TEACHER, OTHER, STUDENT]))
    torch.testing.assert_close(found, torch.tensor([LN2 / 4, FORWARD, 0.0]))
    found.sum().backward()
    assert student.grad is not None
    # d/d log p_v = -q_v + q' p_v / p', zero where both agree
    torch.testing.assert_close(student.grad[0], torch.tensor([-0.25 + 1.0, -0.25 + 0.5]))
    torch.testing.assert_close(student.grad[2], torch.zeros(2), atol=1e-6, rtol=0)
    # ids that one of them cannot say
    minus = torch.tensor([[0.0, 1.0]]).log()
    assert bin_forward_kl(STUDENT[None], minus).isfinite().all()
    assert bin_forward_kl(minus, TEACHER[None]).isfinite().all()
    teacher = TEACHER[None].clone().requires_grad_()
    assert not bin_forward_kl(STUDENT[None], teacher).requires_grad


@given(p=st.lists(st.floats(0.01, 1), min_size=5, max_size=5), q=st.lists(st.floats(0.01, 1), min_size=5, max_size=5))
def test_merging_ids_never_adds_divergence(p: list[float], q: list[float]) -> None:
    student, teacher = (torch.tensor([values], dtype=torch.float64) for values in (p, q))
    student, teacher = (values.log().log_softmax(-1) for values in (student, teacher))
    whole = (teacher.exp() * (teacher - student)).sum()
    found = bin_forward_kl(student[:, :3], teacher[:, :3])
    assert -1e-9 <= float(found) <= float(whole) + 1e-5


def tokens(**more: Any) -> Tokens:
    behavior = torch.tensor([0.25, 0.25, nan]).log()
    own = torch.tensor([0.5, 0.25, 0.125]).log()
    off = torch.tensor([False, False, True])
    # the temperatures differ: at that of the rollout the student's own are compared, at the other one labels imitated
    at = {"logp_n": own - torch.tensor([0.3, 0.3, 0.0]), "sampled_logp_n": own - torch.tensor([0.0, 0.0, 0.7])}
    given: dict[str, Any] = {**at, "behavior_logp_n": behavior, "off_policy_n": off}
    return Tokens(**given, entropy_n=torch.zeros(3), **more)


def test_each_turn_by_who_chose_its_words() -> None:
    rows: dict[str, Any] = {"topk_logp_nK": STUDENT.repeat(3, 1), "teacher_logp_nK": OTHER.repeat(3, 1)}
    found = GuidedLoss(loss=SupportKL())(tokens(**rows))
    torch.testing.assert_close(found.loss_n, torch.tensor([2 * REVERSE, REVERSE, FORWARD]))
    torch.testing.assert_close(found.diagnostics["guided"], torch.tensor([0.0, 0.0, 1.0]))
    torch.testing.assert_close(found.diagnostics["kl_bin"], torch.tensor([REVERSE] * 3))
    # a tail of 1/16 for the student and 1/2 for the teacher, as somebody has summed them: 1/2 log 8 for 5/8 log 5/2
    tails: dict[str, Any] = {"tail_n": torch.full((3,), 1 / 16).log(), "teacher_tail_n": torch.full((3,), 0.5).log()}
    known = GuidedLoss(loss=SupportKL())(tokens(**rows, **tails)).loss_n[2]
    torch.testing.assert_close(known, torch.tensor(-LN2 / 4 + 1.5 * LN2))
    # sampled: what the teacher said is imitated
    loss = GuidedLoss(loss=ClippedAdvantage())
    plain = loss(tokens(advantage_n=torch.tensor([-1.0, 2.0, 5.0])))
    torch.testing.assert_close(plain.loss_n, torch.tensor([2.0, -2.0, 3 * LN2]))
    half = loss(tokens(advantage_n=torch.tensor([-1.0, 2.0, 5.0]), topk_logp_nK=STUDENT.repeat(3, 1)))
    torch.testing.assert_close(half.loss_n, plain.loss_n)
    half = loss(tokens(advantage_n=torch.tensor([-1.0, 2.0, 5.0]), teacher_logp_nK=OTHER.repeat(3, 1)))
    torch.testing.assert_close(half.loss_n, plain.loss_n)


def test_gradients_stay_finite_where_the_behavior_is_unknown() -> None:
    own = torch.tensor([0.5, 0.25, 0.125]).log().requires_grad_()
    given = replace(tokens(advantage_n=torch.tensor([-1.0, 2.0, 5.0])), logp_n=own, sampled_logp_n=own)
    GuidedLoss(loss=ClippedAdvantage())(given).loss_n.sum().backward()
    assert own.grad is not None
    torch.testing.assert_close(own.grad, torch.tensor([2.0, -2.0, -1.0]))


def test_an_episode_of_refused_turns_teaches_nothing(make_episode: Callable[..., Episode]) -> None:
    def shown(**more: Any) -> Episode:
        return make_episode([([1], [2])], origins=["demonstration"], **more)

    def changed(episode: Episode, **more: Any) -> Episode:
        return replace(episode, turns=tuple(replace(turn, **more) for turn in episode.turns))

    own = make_episode([([1], [2])])
    refused, mine = changed(shown(), verdict=Verdict.INADMISSIBLE), changed(own, verdict=Verdict.INADMISSIBLE)
    left = changed(own, excluded="why")
    silent, noise = make_episode([([1], [])]), make_episode([([1], [2])], origins=["noise"])
    broken = make_episode([([1], [2])], status=Status.ERROR_ENV)
    both = make_episode([([1], [2]), ([3], [4])], origins=["noise", "policy"])
    episodes = [refused, own, mine, left, silent, noise, broken, shown(), both]
    assert supervised(episodes) == [own, mine, episodes[7], both]
