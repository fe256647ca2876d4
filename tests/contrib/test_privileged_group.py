"""sdar, rlsd, skill-sd, opid and agent-opsd: their formulas on numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp, log, nan
from typing import Any

import numpy as np
import pytest
import torch
from test_judge_targets import Table
from test_token_losses import close, tokens

from turngym.core.episode import Episode
from turngym.trainers.algorithm import PrivilegedText, Scorers, TokenLosses, Tokens
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.contrib import agent_opsd, opid, rlsd, sdar, skill_sd
from turngym.trainers.contrib.agent_opsd import Believed, belief_moves, turn_factors
from turngym.trainers.contrib.opid import Added
from turngym.trainers.contrib.privileged_group import PrivilegedAdvantage, PrivilegedGroupConfig, WithPrivileged
from turngym.trainers.contrib.rlsd import Directed, directed_advantage
from turngym.trainers.contrib.sdar import Gated, gated_likelihood
from turngym.trainers.contrib.skill_sd import Distilled, importance_k3
from turngym.trainers.group_advantage import GroupAdvantage
from turngym.trainers.privileged import PrivilegedLogprobs
from turngym.trainers.token_losses import PolicyGradient

Make = Callable[..., Episode]
NOTHING: Any = None


def test_the_gate_opens_where_the_told_policy_finds_a_token_likelier() -> None:
    logp = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    told = torch.tensor([-1.0, -1.0, -4.0], requires_grad=True)
    loss, gate = gated_likelihood(logp, told, 5.0)
    # sigmoid of 0, 5 and -5
    close(gate, [0.5, 0.99330715, 0.00669285])
    close(loss, [0.0, 0.99330715, -0.00669285])
    loss.sum().backward()
    # that of -g log p: neither the gate nor the told policy learns
    assert logp.grad is not None
    close(logp.grad, [-0.5, -0.99330715, -0.00669285])
    assert told.grad is None


def fixed(value: float) -> Callable[[Tokens], TokenLosses]:
    return lambda given: TokenLosses(
        loss_n=torch.full_like(given.logp_n, value), diagnostics={"clipped": torch.ones_like(given.logp_n)}
    )


def test_the_gated_term_counts_where_something_was_told() -> None:
    # logp_n: log(1/4) - 0.7 for a ratio of 1
    own = log(0.25) - 0.7
    given = tokens([1.0, 1.0], extra={"told_logp": torch.tensor([own + 1.0, own]), "told": torch.tensor([1.0, 0.0])})
    given = replace(given, logp_n=given.logp_n.clone().requires_grad_())
    found = Gated(loss=fixed(3.0), coef=0.5, beta=5.0)(given)
    close(found.loss_n.detach(), [3.0 + 0.5 * 0.99330715, 3.0])
    close(found.diagnostics["gate"], [0.99330715, nan])
    close(found.diagnostics["told_gap"], [1.0, nan])
    close(found.diagnostics["clipped"], [1.0, 1.0])
    assert not found.diagnostics["told_gap"].requires_grad


def test_k3_weighted_by_who_sampled() -> None:
    logp = torch.tensor([-1.0, -2.0, -31.0, -1.0], requires_grad=True)
    told = torch.tensor([-2.0, -1.0, -1.0, -2.0], requires_grad=True)
    ratio = torch.tensor([0.0, 0.5, 0.0, 12.0])
    loss = importance_k3(logp, told, ratio)
    far = exp(20.0) - 1.0 - 30.0  # d = -30: -d is cut at 20
    close(loss, [0.36787944, 1.6487213 * 0.7182818, far, 22026.467 * 0.36787944])
    loss[:2].sum().backward()
    assert logp.grad is not None
    # rho (1 - exp(-d)) without the ratio's own gradient
    close(logp.grad[:2], [1.0 - 0.36787944, 1.6487213 * (1.0 - 2.7182817)])
    assert told.grad is None
    # fresh tokens: the ratio's gradient adds k3 itself
    fresh = torch.tensor([-1.0], requires_grad=True)
    importance_k3(fresh, torch.tensor([-2.0]), fresh - fresh.detach()).sum().backward()
    assert fresh.grad is not None
    close(fresh.grad, [0.36787944 + 1.0 - 0.36787944])


def test_the_divergence_counts_where_something_was_told_and_by_the_sampling_ratio() -> None:
    own = log(0.25) - 0.7
    extra = {"told_logp": torch.tensor([log(2.0) + own - 1.0, own, own - 1.0]), "told": torch.tensor([1.0, 0.0, 1.0])}
    given = tokens([2.0, 1.0, nan], extra=extra)
    both = given.sampled_logp_n.clone().requires_grad_(), given.logp_n.clone().requires_grad_()
    given = replace(given, sampled_logp_n=both[0], logp_n=both[1])
    found = Distilled(loss=fixed(3.0), coef=0.5)(given)
    # d = 1; twice as likely as when it was drawn, and 1 where nobody noted it
    close(found.loss_n.detach(), [3.0 + 0.5 * 2 * 0.36787944, 3.0, 3.0 + 0.5 * 0.36787944])
    close(found.diagnostics["told_k3"], [2 * 0.36787944, nan, 0.36787944])
    close(found.diagnostics["told_gap"], [-1.0, nan, -1.0])
    assert not any(values.requires_grad for values in found.diagnostics.values())
    found.loss_n.sum().backward()
    assert given.sampled_logp_n.grad is not None
    # the ratio learns, too, also where the present policy stands in for who sampled
    close(given.sampled_logp_n.grad, [0.36787944, 0.0, 0.5 * 0.36787944])


def test_an_advantage_is_directed_to_tokens_in_line_with_it() -> None:
    advantage = np.array([1.0, 1.0, -1.0, -1.0, 2.0, 0.0, 1.0])
    gap = np.array([0.1, 1.0, 0.1, -1.0, 0.0, 1.0, -900.0])
    found = directed_advantage(advantage, gap, lam=0.5, eps=0.2)
    np.testing.assert_allclose(found, [1.05258546, 1.1, -0.95241871, -1.1, 2.0, 0.0, 0.9], atol=1e-8)
    np.testing.assert_allclose(directed_advantage(advantage, gap, lam=0.0, eps=0.2), advantage)
    wide = directed_advantage(np.array([1.0, 1.0]), np.array([900.0, -900.0]), lam=1.0, eps=1.0)
    np.testing.assert_allclose(wide, [2.0, exp(-20.0)])


def logps(gap: list[float]) -> PrivilegedLogprobs:
    student = np.full(len(gap), -3.0, np.float32)
    return PrivilegedLogprobs(
        student_N=student, privileged_N=student + np.array(gap, np.float32), where_N=np.ones(len(gap), np.bool_)
    )


def test_the_directed_share_fades() -> None:
    advantage, gap = np.array([1.0]), logps([1.0])
    found = [
        float(Directed(lam=0.5, eps=0.2, fade=fade)(advantage, gap, NOTHING, step)[0])
        for fade, step in ((100, 25), (100, 100), (100, 200), (0, 200), (1, 1))
    ]
    np.testing.assert_allclose(found, [1.075, 1.0, 1.0, 1.1, 1.0])
    near = Directed(lam=0.5, eps=0.2, fade=0)(np.array([2.0]), logps([0.1]), NOTHING, 1)
    np.testing.assert_allclose(near, [2 * 1.05258546], atol=1e-6)


def test_a_log_ratio_is_added() -> None:
    found = Added(w_told=0.25)(np.array([1.0, -1.0]), logps([2.0, 0.0]), NOTHING, 1)
    np.testing.assert_allclose(found, [1.5, -1.0])


def test_a_belief_moves_with_the_turns() -> None:
    np.testing.assert_allclose(belief_moves(np.array([log(3), -log(3), 0.0]), 0.5), [0.25, -0.25, 0.0], atol=1e-9)
    np.testing.assert_allclose(belief_moves(np.array([log(3)]), 0.75), [0.15], atol=1e-9)
    # sure of success or failure it hardly moves: the prior is cut to 1e-4, a belief to 1e-6
    for prior, least in ((0.0, 1e-4), (1.0, 1 - 1e-4)):
        np.testing.assert_allclose(belief_moves(np.array([0.0]), prior), [0.0], atol=1e-12)
        np.testing.assert_allclose(belief_moves(np.array([-800.0]), prior), [1e-6 - least], atol=1e-12)
        np.testing.assert_allclose(belief_moves(np.array([800.0]), prior), [1 - 1e-6 - least], atol=1e-12)
    # what was gained beyond the cut must be lost again first
    np.testing.assert_allclose(belief_moves(np.array([100.0, -100.0]), 0.5), [0.499999, -0.499999], atol=1e-9)


def test_turns_count_by_how_they_moved_the_belief() -> None:
    moves = np.array([0.1, 0.2, 0.6])  # mean 0.3, deviation 0.216025, z -0.925816, -0.462908, 1.388725
    found = turn_factors(moves, 1.0, lam=0.5, eps=0.2)
    np.testing.assert_allclose(found, [0.9074184, 0.9537092, 1.1], atol=1e-6)
    np.testing.assert_allclose(turn_factors(moves, -1.0, lam=0.5, eps=0.2), [1.0925816, 1.0462908, 0.9], atol=1e-6)
    np.testing.assert_allclose(turn_factors(moves, 0.0, lam=0.5, eps=0.2), 1.0)
    np.testing.assert_allclose(turn_factors(np.array([0.4]), 1.0, lam=0.5, eps=0.2), 1.0)
    np.testing.assert_allclose(turn_factors(np.array([0.0, 2e-6]), 1.0, lam=1.0, eps=0.2), [0.9, 1.1], atol=1e-9)
    np.testing.assert_allclose(turn_factors(moves, 1.0, lam=1.0, eps=0.1), [0.9074184, 0.9537092, 1.1], atol=1e-6)


@pytest.fixture
def group(make_episode: Make) -> list[Episode]:
    """One group: A failed (turns of 2 and 1 tokens), B succeeded (turns of 1 and 2); and C of another, a success."""
    a = make_episode([([1, 2], [10, 11]), ([3], [12])], number=0, group=7, episode_return=0.0)
    b = make_episode([([5], [20]), ([6], [21, 22])], number=1, group=7, success=True, episode_return=1.0)
    c = make_episode([([5], [20])], number=2, group=8, success=True, episode_return=1.0)
    return [a, b, c]


def test_a_belief_is_of_its_episode_and_begins_with_its_group(group: list[Episode]) -> None:
    batch = pack(group)
    assert batch.label_N.tolist() == [10, 11, 12, 20, 21, 22, 20]
    half = log(3) / 2
    gap = logps([half, half, -log(3), log(3), half, half, 5.0])
    advantage = np.array([-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 4.0])
    found = Believed(lam=0.5, eps=0.05)(advantage, gap, batch, 1)
    # A: moves 1/4, -1/4 from 1/2: z 1, -1. B: 1/2 to 3/4 to 9/10: moves .25, .15: z 1, -1. C: one turn, no contrast
    np.testing.assert_allclose(found, [-0.975, -0.975, -1.025, 1.025, 0.975, 0.975, 4.0], atol=1e-5)
    np.testing.assert_allclose(advantage, [-1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 4.0])
    # from 1/2 gaps of 1 and 3 move it by .231 and .251, from 9/10 by .061 and .037
    gaps = logps([0.5, 0.5, 3.0, *([0.0] * 27)])
    for wins, factor in ((1, 0.975), (9, 1.025)):
        members = [group[0], *(replace(group[1], sample=n) for n in range(1, wins + 1))]
        count = 3 * len(members)
        logp = PrivilegedLogprobs(
            student_N=gaps.student_N[:count], privileged_N=gaps.privileged_N[:count], where_N=gaps.where_N[:count]
        )
        found = Believed(lam=0.5, eps=0.05)(np.ones(count), logp, pack(members), 1)
        np.testing.assert_allclose(found[:3], [factor, factor, 2.0 - factor], atol=1e-4)


@pytest.mark.parametrize(("others", "first"), [(9, True), (9, False)])
def test_a_prior_is_that_of_the_group_whatever_else_is_in_the_batch(
    group: list[Episode], others: int, first: bool
) -> None:
    """From 1/2 gaps of 1 and 3 move a belief by .231 and .251; from the batch's 10/11 by .057 and .033."""
    own, strangers = group[:2], [replace(group[2], sample=n, group=9) for n in range(others)]
    batch = pack([*strangers, *own] if first else [*own, *strangers])
    gap = np.zeros(batch.tokens)
    start = others if first else 0
    gap[start : start + 3] = [0.5, 0.5, 3.0]
    found = Believed(lam=0.5, eps=0.05)(np.ones(batch.tokens), logps(gap.tolist()), batch, 1)
    np.testing.assert_allclose(found[start : start + 3], [0.975, 0.975, 1.025], atol=1e-4)


@pytest.mark.parametrize("method", [sdar, rlsd, skill_sd, opid, agent_opsd])
@pytest.mark.parametrize(
    ("reader", "kl_coef", "needed"), [("initial", 0.0, True), ("live", 0.0, False), ("live", 0.1, True)]
)
def test_a_reader_must_be_there(method: Any, reader: str, kl_coef: float, needed: bool) -> None:
    """A run that lacks the initial policy is then refused before anything is played."""
    config = method.ALGORITHM.config(reader=reader, kl_coef=kl_coef)
    assert method.build(config, BuildContext()).needs_reference is needed


@pytest.mark.parametrize("method", [sdar, rlsd, skill_sd, opid, agent_opsd])
def test_groups_may_be_over_turns_as_published(method: Any, group: list[Episode]) -> None:
    """Worth 0 and 1 with two turns each, and a third attempt of one turn: means 2/5 of turns, 1/3 of episodes."""
    episodes = [*group[:2], replace(group[2], group=7, success=False, episode_return=0.0)]
    batch, scorers = pack(episodes), Scorers(student=Table(), reference=Table())
    ways = []
    for over in ("episodes", "turns"):
        built = method.build(method.ALGORITHM.config(group_over=over, kl_coef=0.0), BuildContext())
        ways.append(built.target_fn(batch, episodes, scorers).advantage_N)
    np.testing.assert_allclose(ways[0][[0, 3]], np.array([-1 / 3, 2 / 3]) / (1 / 3) ** 0.5, rtol=1e-4)
    np.testing.assert_allclose(ways[1][[0, 3]], np.array([-2 / 5, 3 / 5]) / 0.3**0.5, rtol=1e-4)


def test_a_belief_of_three_turns(make_episode: Make) -> None:
    failed = make_episode([([9], [19])], number=1)
    episode = make_episode([([1], [10]), ([2], [11]), ([3], [12])], number=0, success=True)
    gap = [log(0.6 / 0.4), log(0.7 / 0.3) - log(0.6 / 0.4), log(0.99 / 0.01) - log(0.7 / 0.3)]
    pair = [replace(episode, group=1), replace(failed, group=1)]
    found = Believed(lam=0.4, eps=0.1)(np.ones(4), logps([*gap, 0.0]), pack(pair), 1)
    # moves .1, .1, .29: mean .16333, deviation .089567, z -.707106, -.707106, 1.414212
    np.testing.assert_allclose(found, [1 - 0.04 * 0.707106, 1 - 0.04 * 0.707106, 1.04, 1.0], atol=1e-5)


def test_what_is_told_reaches_targets(group: list[Episode]) -> None:
    prompt = np.array([1, 2, 9], np.int32)
    a = replace(group[0], turns=(replace(group[0].turns[0], hint_prompt_ids=prompt), group[0].turns[1]))
    episodes = [a, group[1]]
    batch = pack(episodes)
    scorers = Scorers(student=Table(), reference=Table(value=0.51), step=3)
    asked: list[tuple[Any, ...]] = []

    def change(advantage_N: Any, logp: PrivilegedLogprobs, given: RolloutBatch, step: int) -> Any:
        asked.append((advantage_N.tolist(), given is batch, step))
        return advantage_N + 10.0 * logp.gap_N

    own = GroupAdvantage(scale="none")
    found = PrivilegedAdvantage(target_fn=own, privileged=PrivilegedText(), change=change)(batch, episodes, scorers)
    assert found.advantage_N is not None
    np.testing.assert_allclose(found.advantage_N, [4.5, 4.5, -0.5, 0.5, 0.5, 0.5], atol=1e-4)
    assert found.advantage_N.dtype == np.float32
    assert asked == [([-0.5, -0.5, -0.5, 0.5, 0.5, 0.5], True, 3)]
    assert found.reward is not None
    assert found.label_logp_N is not None
    np.testing.assert_allclose(found.label_logp_N[:3], [0.51 - 10.03, 0.51 - 11.04, -12.05], atol=1e-4)
    beside = WithPrivileged(target_fn=own, privileged=PrivilegedText())(batch, episodes, scorers)
    assert beside.advantage_N is not None
    assert beside.advantage_N.tolist() == [-0.5, -0.5, -0.5, 0.5, 0.5, 0.5]
    assert beside.extra["told"].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(beside.extra["told_logp"], found.label_logp_N)
    assert beside.label_logp_N is not None
    np.testing.assert_allclose(beside.label_logp_N, found.label_logp_N)


def test_the_surrogate_and_who_is_told_what_where_are_the_settings() -> None:
    config = PrivilegedGroupConfig(clip=(0.1, 0.3), kl_coef=0.5, position="last_user", reader="initial")
    assert config.surrogate == PolicyGradient(clip=(0.1, 0.3), kl_coef=0.5)
    assert config.privileged == PrivilegedText(position="last_user", reader="initial")
