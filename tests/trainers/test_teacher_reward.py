"""Rewards and advantages from a teacher's log-likelihood, on two ragged episodes by hand; the critic's loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scorers import Slope

from turngym.core.episode import Episode, Status
from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import Scorers, Targets, Tokens
from turngym.trainers.algorithms.kd_reward import (
    CriticAdvantage,
    GroupTeacherAdvantage,
    MiniLlmAdvantage,
    MixtureWeighted,
    SingleStep,
    TeacherReward,
    mixed,
    mixture_weight,
)
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.critic import explained_variance, value_loss
from turngym.trainers.run_config import RunConfig
from turngym.trainers.targets import NoTargets, SampledAdvantage, TargetError
from turngym.trainers.token_losses import PolicyGradient, with_dual_clip


class Flat:
    """A critic with fixed values."""

    def __call__(self, batch: RolloutBatch) -> Any:
        return np.array([0.5, 1.0, 1.5, 0.0, 1.0], np.float32)


def one_group(make_episode: Callable[..., Episode]) -> list[Episode]:
    """One group: A with labels 10, 11 | 12 and return 0, B with 20, 21 and return 1. Success is the other way round."""
    a = make_episode([([1, 2, 3], [10, 11]), ([4], [12])], number=0, group=7, success=True, episode_return=0.0)
    return [a, make_episode([([5, 6], [20, 21])], number=1, group=7, episode_return=1.0)]


SCORERS = Scorers(student=Slope(-0.05), teacher=Slope(-0.1), critic=Flat())  # type: ignore[arg-type]


def test_rewards_by_hand(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    batch = pack(pair)
    logp_N = np.array([-1.0, -1.1, -1.2, -2.0, -2.1])
    found, teacher_logp_N = TeacherReward(coef=2.0)(batch, SCORERS)
    np.testing.assert_allclose(found, 2.0 * logp_N, rtol=1e-6)
    np.testing.assert_allclose(teacher_logp_N, logp_N, rtol=1e-6)
    found, _ = TeacherReward(coef=2.0, student_entropy=True)(batch, SCORERS)
    np.testing.assert_allclose(found, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)


def test_group_advantages_by_hand(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    batch = pack(pair)

    def found(**options: Any) -> list[float]:
        signal = GroupTeacherAdvantage(reward=TeacherReward(), **options)
        advantage_N = signal(batch, pair, SCORERS).advantage_N
        assert advantage_N is not None
        assert len(set(advantage_N[:3])) == len(set(advantage_N[3:])) == 1
        return [float(advantage_N[0]), float(advantage_N[4])]

    # means -1.1 and -2.05; sums -3.3 and -4.1; with half the return -1.1 and -1.55
    assert found(scale="none") == pytest.approx([0.475, -0.475])
    assert found() == pytest.approx([0.475 / (0.95 / 2**0.5), -0.475 / (0.95 / 2**0.5)], rel=1e-5)
    assert found(scale="none", pool="sum") == pytest.approx([0.4, -0.4])
    assert found(scale="none", env_coef=0.5) == pytest.approx([0.225, -0.225])
    logged = GroupTeacherAdvantage(reward=TeacherReward(), pool="sum", env_coef=0.5)(batch, pair, SCORERS)
    np.testing.assert_allclose(logged.reward, [-3.3, -3.6], rtol=1e-6)
    np.testing.assert_allclose(logged.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    short = [make_episode([([1], [n])], number=n, group=0) for n in (10, 20)]  # one token each: -1 and -2
    targets = GroupTeacherAdvantage(reward=TeacherReward(), scale="none")(pack(short), short, SCORERS)
    np.testing.assert_allclose(targets.advantage_N, [0.5, -0.5], rtol=1e-6)


def test_who_has_nobody_to_be_compared_with_has_no_advantage(make_episode: Callable[..., Episode]) -> None:
    a, b = one_group(make_episode)
    lone = make_episode([([1], [30])], number=2, group=3)
    # worth 0 as it said nothing, more than any log-likelihood; and in group 9 it would be the only contrast
    silent, beside = (make_episode([([1], [])], number=n, group=g) for n, g in ((3, 7), (4, 9)))
    other = make_episode([([1], [40])], number=5, group=9)
    episodes = [silent, a, lone, b, beside, other]
    batch = pack(episodes)
    for scale, unit in (("none", 1.0), ("std", 0.95 / 2**0.5)):
        signal = GroupTeacherAdvantage(reward=TeacherReward(), scale=scale)  # type: ignore[arg-type]
        targets = signal(batch, episodes, SCORERS)
        gap = 0.475 / unit
        np.testing.assert_allclose(targets.advantage_N, [gap, gap, gap, 0.0, -gap, -gap, 0.0], rtol=1e-5)
        np.testing.assert_allclose(targets.reward, [-1.1, -3.0, -2.05, -4.0], rtol=1e-6)


def test_critic_advantages_by_hand(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    # rewards: the teacher's, and twice the return at the last token: -1, -1.1, -1.2 | -2, -0.1
    # deltas with gamma 0.5: -1, -1.35, -2.7 | -1.5, -1.1; carried by 0.25
    wanted = np.array([-1.50625, -2.025, -2.7, -1.775, -1.1])
    signal = CriticAdvantage(reward=TeacherReward(), env_coef=2.0, gamma=0.5, lam=0.5)
    targets = signal(pack(pair), pair, SCORERS)
    np.testing.assert_allclose(targets.advantage_N, (wanted - wanted.mean()) / wanted.std(ddof=1), rtol=1e-5)
    plain = replace(signal, whiten="none")(pack(pair), pair, SCORERS)
    np.testing.assert_allclose(plain.advantage_N, wanted, rtol=1e-5)
    np.testing.assert_allclose(targets.return_N, wanted + Flat()(pack(pair)), rtol=1e-5)
    np.testing.assert_allclose(targets.value_N, [0.5, 1.0, 1.5, 0.0, 1.0])
    np.testing.assert_allclose(targets.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    plain = CriticAdvantage(reward=None, env_coef=3.0, lam=1.0)(pack(pair), pair, Scorers(**_no_teacher()))
    np.testing.assert_allclose(plain.return_N, [0.0, 0.0, 0.0, 3.0, 3.0], atol=1e-6)
    assert plain.label_logp_N is None
    # discounted by 1/2 and with lambda 0: V + delta = r + V' / 2
    short = CriticAdvantage(reward=None, env_coef=3.0, gamma=0.5, lam=0.0)(pack(pair), pair, Scorers(**_no_teacher()))
    np.testing.assert_allclose(short.return_N, [0.5, 0.75, 0.0, 0.5, 3.0], atol=1e-6)


@pytest.mark.parametrize("status", [status for status in Status if not status.is_error])
def test_the_critic_goes_on_where_a_limit_cut_an_episode(make_episode: Callable[..., Episode], status: Status) -> None:
    one, other = one_group(make_episode)
    pair = [one, replace(other, status=status)]
    signal = CriticAdvantage(reward=None, env_coef=3.0, gamma=0.5, lam=0.0)
    # values 0.5 1 1.5 | 0 1, a return of 3 for the second: its last token is followed by half of its value
    more = 0.5 if status is not Status.COMPLETED else 0.0
    found = signal(pack(pair), pair, Scorers(**_no_teacher()))
    np.testing.assert_allclose(found.return_N, [0.5, 0.75, 0.0, 0.5, 3.0 + more], atol=1e-6)
    ended = replace(signal, bootstrap=False)(pack(pair), pair, Scorers(**_no_teacher()))
    np.testing.assert_allclose(ended.return_N, [0.5, 0.75, 0.0, 0.5, 3.0], atol=1e-6)


def test_minillm_advantages_by_hand(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    # rewards with twice the return at the last token: -1, -1.1, -1.2 | -2, -0.1; discounted by 1/2, over tokens left
    wanted = np.array([(-1 - 0.55 - 0.3) / 3, (-1.1 - 0.6) / 2, -1.2, (-2 - 0.05) / 2, -0.1])
    signal = MiniLlmAdvantage(reward=TeacherReward(), env_coef=2.0, gamma=0.5, whiten="none")
    found = signal(pack(pair), pair, Scorers(student=Slope(0.0), teacher=Slope(-0.1)))
    np.testing.assert_allclose(found.advantage_N, wanted, rtol=1e-5)
    np.testing.assert_allclose(found.reward, [-1.0, -1.1, -1.2, -2.0, -0.1], rtol=1e-5)
    np.testing.assert_allclose(found.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    assert found.return_N is None
    white = replace(signal, whiten="population")(pack(pair), pair, SCORERS).advantage_N
    np.testing.assert_allclose(white, (wanted - wanted.mean()) / wanted.std(), rtol=1e-5)
    assert found.topk_ids_NK is None
    # the teacher's part from the next token on, twice the return (1 for the second) at the last token as before
    single = replace(signal, support=3)(pack(pair), pair, SCORERS)
    later = [(-1.1 - 0.6) / 2, -1.2, 0.0, -2.1 + 1.0 / 2, 2.0]
    np.testing.assert_allclose(single.advantage_N, later, rtol=1e-5)
    np.testing.assert_allclose(single.reward, [-1.0, -1.1, -1.2, -2.0, -0.1], rtol=1e-5)
    np.testing.assert_allclose(single.label_logp_N, [-1.0, -1.1, -1.2, -2.0, -2.1], rtol=1e-6)
    assert single.topk_ids_NK is not None
    assert single.topk_ids_NK.shape == (5, 3)
    np.testing.assert_allclose(single.topk_logp_NK, -0.1 * single.topk_ids_NK, rtol=1e-6)


def test_the_single_step_term_is_the_reverse_kl_beside_the_surrogate() -> None:
    half, quarter = math.log(0.5), math.log(0.25)
    logp_n = torch.tensor([half, quarter], requires_grad=True)
    support_nK = torch.tensor([[half, quarter], [half, quarter]], requires_grad=True)
    tokens = Tokens(
        logp_n=logp_n,
        sampled_logp_n=logp_n,
        # drawn four times as often as now: what the ratio says of the surrogate, it does not say of the KL
        behavior_logp_n=torch.tensor([half, 0.0]),
        topk_logp_nK=support_nK,
        teacher_logp_nK=torch.tensor([[quarter, half], [half, quarter]]),
        advantage_n=torch.tensor([2.0, 0.0]),
        off_policy_n=torch.zeros(2, dtype=torch.bool),
        entropy_n=torch.ones(2),
    )
    found = SingleStep(loss=PolicyGradient(), coef=3.0)(tokens)
    # bins 0.5 0.25 0.25 against 0.25 0.5 0.25
    kl = 0.25 * math.log(2)
    assert found.loss_n.tolist() == pytest.approx([-2.0 + 3.0 * kl, 0.0], abs=1e-6)
    assert found.diagnostics["kl_bin"].tolist() == pytest.approx([kl, 0.0], abs=1e-6)
    assert found.diagnostics["clipped"].tolist() == [0.0, 0.0]
    found.loss_n.sum().backward()
    assert support_nK.grad is not None
    assert support_nK.grad[0].abs().min() > 0
    bounded: Any = with_dual_clip(SingleStep(loss=PolicyGradient(), coef=3.0), 2.0)
    assert bounded.loss.dual_clip == 2.0


def test_the_text_is_subtracted_once_from_every_rollout(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    asked: list[Any] = []

    def text(scorer: Any, step: int) -> float:
        asked.append((scorer, step))
        return 3.0

    scorers = replace(SCORERS, step=5)
    signal = CriticAdvantage(reward=TeacherReward(), env_coef=2.0, lam=0.0, text=text, text_coef=0.5)
    found = signal(pack(pair), pair, scorers)
    # 0.5 x 3 less at the last token of each: -1, -1.1, -2.7 | -2, -1.6
    np.testing.assert_allclose(found.reward, [-1.0, -1.1, -2.7, -2.0, -1.6], rtol=1e-5)
    assert asked == [(SCORERS.student, 5)]
    assert found.log == {"term/lpt": 3.0}
    without = CriticAdvantage(reward=TeacherReward(), env_coef=2.0, lam=0.0)(pack(pair), pair, scorers)
    np.testing.assert_allclose(without.reward, [-1.0, -1.1, -1.2, -2.0, -0.1], rtol=1e-5)
    assert without.log == {}


def test_the_weight_of_teacher_mixed_sampling_by_hand(make_episode: Callable[..., Episode]) -> None:
    p, q = np.log([0.5, 0.25, 0.5, 1e-12]), np.log([0.25, 0.5, 0.5, 1.0])
    # p / (0.8 p + 0.2 q): 0.5 / 0.45, 0.25 / 0.3, 1; the last log-ratio of 27.6 is cut to 20
    wanted = [1 / 0.9, 1 / 1.2, 1.0, 1 / (0.8 + 0.2 * np.exp(20.0))]
    np.testing.assert_allclose(mixture_weight(p, q, 0.2), wanted)
    np.testing.assert_allclose(mixture_weight(q, p, 0.2)[3], 1.25, rtol=1e-6)
    np.testing.assert_allclose(mixture_weight(p, q, 0.0), np.ones(4))
    pair = one_group(make_episode)
    weighed = MixtureWeighted(target_fn=SampledAdvantage(), share=0.2)(pack(pair), pair, SCORERS)
    # log q - log p is -0.05 times the label, and here the advantage too
    gap = -0.05 * np.array([10, 11, 12, 20, 21])
    np.testing.assert_allclose(weighed.advantage_N, gap / (0.8 + 0.2 * np.exp(gap)), rtol=1e-5)


def test_when_rollouts_may_be_mixed() -> None:
    signal = NoTargets()
    assert mixed(signal, 0.0, RunConfig(temperature=0.7)) is signal
    assert mixed(signal, 0.2, RunConfig()) == MixtureWeighted(target_fn=signal, share=0.2)
    with pytest.raises(SettingsError, match=r"it is 0\.7"):
        mixed(signal, 0.2, RunConfig(temperature=0.7))


def test_a_scorer_that_is_missing_or_answers_too_little(make_episode: Callable[..., Episode]) -> None:
    pair = one_group(make_episode)
    batch = pack(pair)
    with pytest.raises(TargetError, match=r"\bcritic\b"):
        CriticAdvantage(reward=None)(batch, pair, Scorers(student=Slope(0.0)))
    with pytest.raises(TargetError, match=r"\bteacher\b"):
        TeacherReward()(batch, Scorers(student=Slope(0.0)))
    nobody: Any = None
    with pytest.raises(TargetError, match=r"\bstudent\b"):
        TeacherReward(student_entropy=True)(batch, Scorers(student=nobody, teacher=Slope(-0.1)))
    advantage = np.zeros(batch.tokens, np.float32)
    for role, scorers in (("teacher", Scorers(student=Slope(0.0))), ("student", Scorers(student=nobody))):
        with pytest.raises(TargetError, match=f"needs a {role}, and none"):
            MixtureWeighted(target_fn=lambda *_: Targets(advantage_N=advantage), share=0.2)(batch, pair, scorers)
    with pytest.raises(TargetError, match="answered 4 positions; 5 were asked"):
        TeacherReward()(batch, Scorers(student=Slope(0.0), teacher=Slope(-0.1, lost=1)))
    with pytest.raises(TargetError, match=r"\bfinite\b"):
        TeacherReward()(batch, Scorers(student=Slope(0.0), teacher=Slope(float("nan"))))


def test_explained_variance_by_hand() -> None:
    returns = np.asarray([1.0, 2.0, 3.0, 6.0], np.float32)  # mean 3, variance 3.5
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.full(4, 9.0, np.float32), returns) == 0.0
    # residuals 0 0 0 4: mean 1, variance 3
    assert explained_variance(np.asarray([1, 2, 3, 2], np.float32), returns) == pytest.approx(1 - 3 / 3.5)
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, np.full(4, 2.0, np.float32)) is None


def test_value_loss_by_hand() -> None:
    value = torch.tensor([1.0, 1.0, 0.9, -1.0, 0.3], requires_grad=True)
    returns, old = torch.tensor([0.0, 2.0, 2.0, -2.0, -1.0]), torch.tensor([0.5, 0.5, 0.8, 0.0, 0.4])
    # clipped to 0.7, 0.7, 0.9, -0.2, 0.3: errors 0.7, 1.3, 1.1, 1.8, 1.3 against the plain 1, 1, 1.1, 1, 1.3
    loss = value_loss(value, returns, old, clip=0.2)
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.5 * 1.69, 0.5 * 1.21, 0.5 * 3.24, 0.5 * 1.69]))
    (gradient,) = torch.autograd.grad(loss.sum(), value)
    torch.testing.assert_close(gradient, torch.tensor([1.0, 0.0, -1.1, 0.0, 1.3]))
    plain = torch.tensor([0.5, 0.5, 0.605, 0.5, 0.845])
    torch.testing.assert_close(value_loss(value, returns, old, None), plain)


def _no_teacher() -> dict[str, Any]:
    return {"student": Slope(0.0), "critic": Flat()}
