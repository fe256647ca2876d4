"""Token losses on numbers worked out by hand: what is added to what, and what the gradient reaches."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from turngym.core.errors import SettingsError
from turngym.trainers.algorithm import Tokens
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import opd, prm_rl
from turngym.trainers.algorithms.luffy import MixedPolicyGradient, Reshape
from turngym.trainers.contrib import guided_opd
from turngym.trainers.losses import (
    SEQUENCE,
    TAILS,
    JensenShannon,
    MixedKL,
    bin_forward_kl,
    bin_reverse_kl,
    clipped_objective,
    clipped_weight,
    kl_k1,
    raw_reverse_kl,
)
from turngym.trainers.run_config import DistillConfig
from turngym.trainers.token_losses import (
    ClippedAdvantage,
    NegativeLogLikelihood,
    PolicyGradient,
    Regularized,
    SupportKL,
    TruncatedImportance,
    bounded,
    with_dual_clip,
)

LN2 = log(2)
# student (1/2, 1/4 | 1/4) against teacher (1/4, 1/4 | 1/2): 1/4 ln 2 with the bin, 1/2 ln 2 without
STUDENT, TEACHER = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.25]).log()


def tokens(ratio: list[float], **more: Any) -> Tokens:
    """Tokens sampled with probability 1/4 whose probability is now `ratio` times that (NaN: nobody noted it).

    At the distillation temperature (`logp_n`) it is another one, so that a loss that takes the wrong column shows.
    """
    given = torch.tensor(ratio)
    behavior = torch.where(given.isnan(), given, torch.full_like(given, 0.25).log())
    sampled = given.nan_to_num(nan=1.0).log() + log(0.25)
    more = {name: torch.tensor(value) if isinstance(value, list) else value for name, value in more.items()}
    own = torch.zeros(len(ratio), dtype=torch.bool)
    rest: dict[str, Any] = {"off_policy_n": own, "entropy_n": torch.zeros(len(ratio)), "logp_n": sampled - 0.7}
    return Tokens(sampled_logp_n=sampled, behavior_logp_n=behavior, **(rest | more))


def close(found: Tensor, wanted: list[float] | Tensor) -> None:
    torch.testing.assert_close(found, torch.as_tensor(wanted), equal_nan=True)


def test_likelihood_by_hand() -> None:
    close(NegativeLogLikelihood()(tokens([1.0, 1.0], logp_n=[-1.0, -2.5])).loss_n, [1.0, 2.5])


def test_support_kl_by_hand() -> None:
    rows: dict[str, Any] = {"topk_logp_nK": STUDENT.repeat(4, 1), "teacher_logp_nK": TEACHER.repeat(4, 1)}
    given = tokens([2.0, 40.0, 0.01, nan], **rows)
    found = SupportKL()(given)
    close(found.loss_n, [LN2 / 2, 10 * LN2 / 4, 0.1 * LN2 / 4, LN2 / 4])
    close(found.diagnostics["kl_bin"], [LN2 / 4] * 4)
    close(found.diagnostics["kl_raw"], [LN2 / 2] * 4)
    close(found.diagnostics["teacher_entropy"], [1.5 * LN2] * 4)
    close(found.diagnostics["clipped"], [0.0, 1.0, 1.0, 0.0])
    some = SupportKL()(replace(given, kl_mask_n=torch.tensor([True, False, False, True])))
    close(some.loss_n, [LN2 / 2, 0.0, 0.0, LN2 / 4])
    close(some.diagnostics["kl_bin"], [LN2 / 4] * 4)
    plain = SupportKL(kl=raw_reverse_kl, importance=None)(given)
    close(plain.loss_n, [LN2 / 2] * 4)
    close(plain.diagnostics["kl_bin"], [LN2 / 4] * 4)
    close(plain.diagnostics["clipped"], [0.0] * 4)
    # at a bound nothing is cut, and a range of 1 alone is no ratio
    edge = SupportKL(importance=(0.01, 2.0))(given)
    close(edge.diagnostics["clipped"], [0.0, 1.0, 0.0, 0.0])
    off = SupportKL(importance=(1.0, 1.0))(given)
    close(off.loss_n, [LN2 / 4] * 4)
    close(off.diagnostics["clipped"], [0.0] * 4)
    # with tails of 1/2 and 1/8, as somebody has summed them, in the place of what the K ids leave of 1
    tails = {"tail_n": torch.full((4,), 0.5).log(), "teacher_tail_n": torch.full((4,), 0.125).log()}
    known = SupportKL()(replace(given, **tails))
    close(known.loss_n, [3 * LN2, 15 * LN2, 0.15 * LN2, 1.5 * LN2])
    close(known.diagnostics["kl_bin"], [1.5 * LN2] * 4)
    close(known.diagnostics["kl_raw"], [LN2 / 2] * 4)
    close(known.diagnostics["teacher_entropy"], [(1.0 + 0.375) * LN2] * 4)
    close(SupportKL(kl=bin_forward_kl, importance=None)(replace(given, **tails)).loss_n, [-LN2 / 2] * 4)
    with pytest.raises(ValueError, match="top-K"):
        SupportKL()(tokens([1.0], topk_logp_nK=STUDENT[None]))
    with pytest.raises(ValueError, match="top-K"):
        SupportKL()(tokens([1.0], teacher_logp_nK=TEACHER[None]))


def test_divergences_are_measured_from_the_student() -> None:
    # student (1/2, 1/4 | 1/4), teacher (1/8, 1/4 | 5/8): with the bin ln 2 + 1/4 ln 2/5; the other way round it differs
    rows: dict[str, Any] = {"topk_logp_nK": STUDENT[None], "teacher_logp_nK": torch.tensor([[0.125, 0.25]]).log()}
    for tail in TAILS.values():
        found = SupportKL(kl=tail)(tokens([1.0], **rows)).diagnostics
        close(found["kl_bin"], [LN2 + 0.25 * log(0.4)])
        close(found["kl_raw"], [LN2])


def test_support_kl_has_its_gradient_through_the_student_alone() -> None:
    student = STUDENT.repeat(1, 1).requires_grad_()
    given = tokens([2.0], topk_logp_nK=student, teacher_logp_nK=TEACHER[None])
    found = SupportKL(kl=raw_reverse_kl)(given)
    (gradient,) = torch.autograd.grad(found.loss_n.sum(), student)
    # 2 p (log p - log q + 1): the ratio is a constant
    close(gradient[0], [2 * 0.5 * (LN2 + 1), 2 * 0.25])
    assert not any(values.requires_grad for values in found.diagnostics.values())


def test_support_kl_may_be_the_forward_kl_and_logs_the_reverse() -> None:
    teacher = torch.tensor([[0.125, 0.25]]).log()
    given = tokens([1.0], topk_logp_nK=STUDENT[None], teacher_logp_nK=teacher)
    found = SupportKL(kl=bin_forward_kl, importance=None)(given)
    # student (1/2, 1/4 | 1/4), teacher (1/8, 1/4 | 5/8)
    close(found.loss_n, [-LN2 / 4 + 0.625 * log(2.5)])
    close(found.diagnostics["kl_bin"], [LN2 + 0.25 * log(0.4)])


# m is (7/16, 1/4 | 5/16) at 1/4, (3/8, 1/4 | 3/8) at 1/2, (5/16, 1/4 | 7/16) at 3/4
JSD = {
    0.25: 0.25 * (0.25 * log(4 / 7) + 0.5 * log(8 / 5)) + 0.75 * (0.5 * log(8 / 7) + 0.25 * log(4 / 5)),
    0.5: 0.25 * log(2 / 3) + 0.5 * log(4 / 3),
    0.75: 0.75 * (0.25 * log(4 / 5) + 0.5 * log(8 / 7)) + 0.25 * (0.5 * log(8 / 5) + 0.25 * log(4 / 7)),
}


@pytest.mark.parametrize("beta", JSD)
def test_the_jensen_shannon_divergence_by_hand(beta: float) -> None:
    found = JensenShannon(beta)(STUDENT[None], TEACHER[None])
    close(found, [JSD[beta]])
    # with tails of their own: the same, as both have what the K ids leave of 1
    close(
        JensenShannon(beta)(STUDENT[None], TEACHER[None], torch.tensor([0.25]).log(), torch.tensor([0.5]).log()), found
    )
    # ids that one of them cannot say
    minus = torch.tensor([[0.0, 1.0]]).log()
    for one, other in ((STUDENT[None], minus), (minus, TEACHER[None])):
        assert 0 < float(JensenShannon(beta)(one, other)) < LN2
    # other divergences of other directions: student and teacher change places with the weight
    close(JensenShannon(1.0 - beta)(TEACHER[None], STUDENT[None]), found)


def test_the_jensen_shannon_divergence_goes_to_both_kls() -> None:
    student, teacher = torch.tensor([[0.5, 0.2]]).double().log(), torch.tensor([[0.1, 0.3]]).double().log()
    forward, reverse = bin_forward_kl(student, teacher), bin_reverse_kl(student, teacher)
    assert torch.equal(JensenShannon(0.0)(student, teacher), forward)
    assert torch.equal(JensenShannon(1.0)(student, teacher), reverse)
    tails = torch.tensor([0.5]).log(), torch.tensor([0.125]).log()
    assert torch.equal(JensenShannon(0.0)(student, teacher, *tails), bin_forward_kl(student, teacher, *tails))
    torch.testing.assert_close(JensenShannon(1e-6)(student, teacher) / 1e-6, forward, rtol=1e-4, atol=0)
    torch.testing.assert_close(JensenShannon(1 - 1e-6)(student, teacher) / 1e-6, reverse, rtol=1e-4, atol=0)


def test_the_mixed_kl_by_hand() -> None:
    student, teacher = STUDENT[None], torch.tensor([[0.125, 0.25]]).log()
    forward, reverse = -LN2 / 4 + 0.625 * log(2.5), LN2 + 0.25 * log(0.4)
    for beta in (0.0, 0.25, 1.0):
        close(MixedKL(beta)(student, teacher), [(1 - beta) * forward + beta * reverse])
    # with tails of 1/2 and 1/8: 1/8 ln 1/4 and 1/2 ln 4 for the bin
    tails = torch.tensor([0.5]).log(), torch.tensor([0.125]).log()
    forward, reverse = 0.125 * log(0.25) + 0.125 * log(0.25), 0.5 * log(4) + 0.5 * log(4)
    close(MixedKL(0.25)(student, teacher, *tails), [0.75 * forward + 0.25 * reverse])


@pytest.mark.parametrize("kl", [JensenShannon(0.3), MixedKL(0.3)])
def test_divergences_between_have_their_gradient_through_the_student_alone(kl: Any) -> None:
    student, teacher = (values[None].clone().requires_grad_() for values in (STUDENT, TEACHER))
    kl(student, teacher).sum().backward()
    assert teacher.grad is None
    assert student.grad is not None
    same = STUDENT[None].clone().requires_grad_()
    kl(same, STUDENT[None]).sum().backward()
    torch.testing.assert_close(same.grad, torch.zeros(1, 2), atol=1e-6, rtol=0)


def test_clipped_advantage_by_hand() -> None:
    given = tokens([1.5, 0.5, 1.25, nan], advantage_n=[2.0, -2.0, 1.0, 3.0])
    found = ClippedAdvantage()(given)
    close(found.loss_n, [-2 * 1.28, 2 * 0.8, -1.25, -3.0])
    close(found.diagnostics["kl_bin"], [-2.0, 2.0, -1.0, -3.0])
    close(found.diagnostics["kl_raw"], [-2.0, 2.0, -1.0, -3.0])
    close(found.diagnostics["clipped"], [1.0, 1.0, 0.0, 0.0])
    close(ClippedAdvantage(loss=PolicyGradient(clip=(0.6, 0.1)))(given).loss_n, [-2.2, 1.0, -1.1, -3.0])
    with pytest.raises(ValueError, match="advantage_N"):
        ClippedAdvantage()(tokens([1.0]))


def test_policy_gradient_by_hand() -> None:
    given = tokens(
        [1.5, 0.5, nan],
        advantage_n=[2.0, -2.0, 3.0],
        logp_n=[-1.0, -2.0, -3.0],
        reference_logp_n=[-1.0, -2.0 + LN2, -3.0 - LN2],
        entropy_n=[1.0, 2.0, 4.0],
    )
    surrogate = [-2 * 1.2, 2 * 0.8, -3.0]
    close(PolicyGradient()(given).loss_n, surrogate)
    close(PolicyGradient(clip=(0.6, 0.1))(given).loss_n, [-2.2, 1.0, -3.0])
    k3 = [0.0, 2 - 1 - LN2, 0.5 - 1 + LN2]
    found = PolicyGradient(kl_coef=0.5, entropy_coef=0.1)(given)
    close(found.loss_n, [surrogate[i] + 0.5 * k3[i] - 0.1 * [1, 2, 4][i] for i in range(3)])
    close(found.diagnostics["kl_reference"], k3)
    close(found.diagnostics["clipped"], [1.0, 1.0, 0.0])
    k1 = PolicyGradient(kl_coef=1.0, kl=kl_k1)(given).loss_n
    close(k1, [surrogate[0], surrogate[1] - LN2, surrogate[2] + LN2])
    tracked = replace(given, logp_n=given.logp_n.clone().requires_grad_())
    assert not PolicyGradient(kl_coef=0.5)(tracked).diagnostics["kl_reference"].requires_grad
    assert "kl_reference" not in PolicyGradient(kl_coef=0.5)(tokens([1.0], advantage_n=[1.0])).diagnostics
    with pytest.raises(ValueError, match="advantage_N"):
        PolicyGradient()(tokens([1.0]))


def test_tokens_of_a_sequence_are_clipped_together() -> None:
    given = tokens([2.0, 0.5, 2.0], advantage_n=[1.0, 1.0, 1.0])
    alone = [-1.2, -0.5, -1.2]
    close(PolicyGradient()(given).loss_n, alone)
    # the first two have a common ratio of sqrt(2 * 1/2) = 1
    together = replace(given, extra={SEQUENCE: torch.tensor([4, 4, 9])})
    found = PolicyGradient()(together)
    close(found.loss_n, [-1.0, -1.0, -1.2])
    close(found.diagnostics["clipped"], [0.0, 0.0, 1.0])


def test_the_weight_alone_may_be_clipped() -> None:
    given = tokens([2.0, 0.5], advantage_n=[1.0, -1.0])
    found = PolicyGradient(surrogate=clipped_weight, clip=(1.0, 0.5))(given)
    close(found.loss_n, [-1.5 * log(0.5), 0.5 * log(0.125)])


def test_where_behavior_is_unknown_the_ratio_is_one_and_keeps_its_gradient() -> None:
    sampled = torch.tensor([-1.0], requires_grad=True)
    loss = PolicyGradient()(replace(tokens([nan], advantage_n=[3.0]), sampled_logp_n=sampled)).loss_n
    close(loss.detach(), [-3.0])
    close(torch.autograd.grad(loss.sum(), sampled)[0], [-3.0])


@pytest.mark.parametrize(
    "loss",
    [
        PolicyGradient(),
        ClippedAdvantage(),
        MixedPolicyGradient(off=Reshape(), on=Reshape(shape="no_reshape")),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_dual_clip_reaches_every_policy_gradient(loss: Any) -> None:
    stale = tokens([5.0, 5.0], advantage_n=[-2.0, 0.5], logp_n=[-1.0, -1.0])
    close(loss(stale).loss_n[:1], [10.0])
    for outer in (loss, TruncatedImportance(loss=Regularized(loss=loss), cap=4.0)):
        bound: Any = with_dual_clip(outer, 2.5)
        close(bound(stale).loss_n[:1], [5.0])
        close(bound(stale).loss_n[1:], outer(stale).loss_n[1:])
        close(bound(stale).diagnostics["clipped"], [1.0, 1.0])
    assert with_dual_clip(NegativeLogLikelihood(), 2.5) == NegativeLogLikelihood()
    assert with_dual_clip(Regularized(loss=SupportKL()), 2.5) == Regularized(loss=SupportKL())


@pytest.mark.parametrize(
    "clipped",
    [
        lambda low, high: PolicyGradient(clip=(low, high)),
        lambda low, high: MixedPolicyGradient(off=Reshape(), on=Reshape(), clip=(low, high)),
    ],
)
def test_a_clip_out_of_range_is_refused_before_anything_is_played(clipped: Any) -> None:
    for low, high in ((1.5, 0.2), (-0.1, 0.2), (0.2, -0.1), (0.2, nan)):
        with pytest.raises(SettingsError, match=rf"clip is {low} and {high};"):
            clipped(low, high)
    clipped(1.0, 0.0)


def test_where_the_dual_clip_is_on() -> None:
    algorithm = prm_rl.build(prm_rl.PrmRlConfig(), BuildContext())

    def bound(setting: float | None, *, stale: bool) -> Any:
        loss: Any = bounded(algorithm, setting, stale=stale).token_loss
        return loss.dual_clip

    assert [bound(None, stale=False), bound(0, stale=False), bound(1.5, stale=False)] == [None, None, 1.5]
    assert [bound(None, stale=True), bound(0, stale=True), bound(1.5, stale=True)] == [3.0, None, 1.5]
    assert bounded(algorithm, None, stale=False) is algorithm


def test_a_dual_clip_that_no_loss_has_is_refused() -> None:
    for build in (
        lambda form: opd.build(opd.OpdConfig(), BuildContext(distill=DistillConfig(form=form))),
        lambda form: guided_opd.build(guided_opd.GuidedOpdConfig(), BuildContext(distill=DistillConfig(form=form))),
    ):
        none: Any = build("topk")
        with pytest.raises(SettingsError, match=rf"^dual_clip is 2\.0; {none.name} as it is set has no "):
            bounded(none, 2.0, stale=False)
        # by default, or switched off, it is nobody's
        for setting in (None, 0.0):
            assert bounded(none, setting, stale=True).token_loss == none.token_loss
        bounded(build("sampled"), 2.0, stale=False)


def test_mixed_policy_gradient_by_hand() -> None:
    off, on = Reshape(a=0.1), Reshape(shape="no_reshape")
    given = tokens(
        [1.5, 1.1, 0.5, 1.0],
        advantage_n=[2.0, 2.0, -2.0, 1.0],
        off_policy_n=[False, False, False, True],
        logp_n=[-9.0, -9.0, -9.0, log(0.4)],  # demonstrated tokens are scored at the distillation temperature
        reference_logp_n=[-9.0, -9.0 + LN2, -9.0, log(0.4)],
        entropy_n=[1.0, 1.0, 1.0, 3.0],
    )
    found = MixedPolicyGradient(off=off, on=on)(given)
    close(found.loss_n, [-2 * 1.2, -2 * 1.1, 2 * 0.8, -0.4 / 0.5])
    close(found.diagnostics["clipped"], [1.0, 0.0, 1.0, 0.0])
    close(found.diagnostics["off_shaped"], [nan, nan, nan, 0.8])
    tracked = replace(given, logp_n=given.logp_n.clone().requires_grad_())
    diagnostics = MixedPolicyGradient(off=off, on=on)(tracked).diagnostics
    assert not any(values.requires_grad for values in diagnostics.values())
    bounded = MixedPolicyGradient(off=off, on=on, off_clamp=(None, 0.5), clip=None, kl_coef=0.5, entropy_coef=0.1)
    k3 = 2 - 1 - LN2
    close(bounded(given).loss_n, [-3.1, -2.2 + 0.5 * k3 - 0.1, 1.0 - 0.1, -0.5 - 0.3])
    with pytest.raises(ValueError, match="advantage_N"):
        MixedPolicyGradient(off=off, on=on)(tokens([1.0]))


def test_another_loss_with_a_regularizer() -> None:
    given = tokens([1.0, 1.0], logp_n=[-1.0, -2.0], reference_logp_n=[-2.0, -2.0], entropy_n=[1.0, 5.0])
    found = Regularized(loss=NegativeLogLikelihood(), kl_coef=2.0, kl=kl_k1, entropy_coef=0.1)(given)
    close(found.loss_n, [1.0 + 2.0 - 0.1, 2.0 - 0.5])
    close(found.diagnostics["kl_reference"], [1.0, 0.0])
    k3 = exp(-1.0) - 1 + 1
    close(Regularized(loss=NegativeLogLikelihood(), kl_coef=1.0)(given).loss_n, [1.0 + k3, 2.0])


def test_truncated_importance_by_hand() -> None:
    """Ratios 4, 1.5, 0.5, unknown; A = -1: the gradient of l = -A min(r, cap) is min(r, cap) where nothing clips."""
    given = tokens([4.0, 1.5, 0.5, nan], advantage_n=[-1.0] * 4)
    sampled = given.sampled_logp_n.requires_grad_()
    wide = PolicyGradient(clip=(1.0, 0.0))
    found = TruncatedImportance(loss=wide, cap=2.0)(given)
    close(found.loss_n.detach(), [2.0, 1.5, 0.5, 1.0])
    close(torch.autograd.grad(found.loss_n.sum(), sampled)[0], [2.0, 1.5, 0.5, 1.0])
    close(found.diagnostics["truncated"], [1.0, 0.0, 0.0, nan])
    close(found.diagnostics["ratio"], [2.0, 1.5, 0.5, nan])
    # what truncates must not be a way for the gradient: mu' = p / cap is a constant
    assert not any(values.requires_grad for values in found.diagnostics.values())
    close(TruncatedImportance(loss=wide, cap=3.0)(given).loss_n[:1].detach(), [3.0])
    close(wide(given).loss_n[:1].detach(), [4.0])


@pytest.mark.parametrize(("advantage", "cap"), [(-1.0, 3.0), (1.0, 1.28)])
def test_a_ratio_that_was_truncated_at_a_bound_keeps_its_gradient(advantage: float, cap: float) -> None:
    """At the dual clip, and at the upper clip: else rounding would decide token by token."""
    ratios = torch.linspace(cap, 40.0, 2000).tolist()
    given = tokens(ratios, advantage_n=[advantage] * len(ratios))
    sampled = given.sampled_logp_n.requires_grad_()
    loss = PolicyGradient(clip=(0.2, 0.28), dual_clip=3.0)
    found = TruncatedImportance(loss=loss, cap=cap)(given)
    gradient = torch.autograd.grad(found.loss_n.sum(), sampled)[0]
    torch.testing.assert_close(gradient, torch.full_like(gradient, -advantage * cap), rtol=1e-5, atol=0.0)
    assert not found.diagnostics["clipped"].any()


def test_what_rounding_takes_off_a_ratio_at_the_lower_bound_is_not_clipped() -> None:
    ratio = torch.tensor([0.8, 0.8], dtype=torch.float64) * torch.tensor([1 - 5e-7, 1 - 1e-5], dtype=torch.float64)
    _, clipped = clipped_objective(ratio, -torch.ones(2, dtype=torch.float64), eps_low=0.2, eps_high=0.28)
    assert clipped.tolist() == [False, True]
