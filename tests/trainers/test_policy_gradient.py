"""The clipped surrogate and the KL estimators on literal numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from turngym.trainers.losses import KL_ESTIMATORS, clipped_surrogate, clipped_weight, kl_k1, kl_k2, kl_k3, sequence_logp

repeatable = settings(derandomize=True)

RATIO = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5, 1.25])
ADVANTAGE = torch.tensor([2.0, 2.0, -2.0, 2.0, -2.0, 1.0])


def test_clipped_surrogate_by_hand():
    logp = RATIO.log().requires_grad_()
    out = clipped_surrogate(logp, torch.zeros(6), ADVANTAGE)
    # within bounds -A r; above 1.28 with A > 0: -A 1.28; below 0.8 with A < 0: -A 0.8
    torch.testing.assert_close(out.loss_N, torch.tensor([-2.0, -2.56, 3.0, -1.0, 1.6, -1.25]))
    torch.testing.assert_close(out.ratio_N, RATIO)
    assert out.clipped_N.tolist() == [False, True, False, False, True, False]
    (gradient,) = torch.autograd.grad(out.loss_N.sum(), logp)
    # d loss / d logp = -A r, and nothing where clipped
    torch.testing.assert_close(gradient, torch.tensor([-2.0, 0.0, 3.0, -1.0, 0.0, -1.25]))


def test_a_dual_clip_bounds_large_ratios_under_a_negative_advantage():
    ratio, advantage = (
        torch.tensor([4.0, 4.0, 2.5, 0.5, 3.0, 24510.0]),
        torch.tensor([-2.0, 0.5, -2.0, -2.0, 0.0, -2.0]),
    )
    logp = ratio.log().requires_grad_()
    plain = clipped_surrogate(logp, torch.zeros(6), advantage)
    out = clipped_surrogate(logp, torch.zeros(6), advantage, dual_clip=3.0)
    torch.testing.assert_close(plain.loss_N, torch.tensor([8.0, -0.64, 5.0, 1.6, 0.0, 49020.0]))
    torch.testing.assert_close(out.loss_N, torch.tensor([6.0, -0.64, 5.0, 1.6, 0.0, 6.0]))
    assert out.clipped_N.tolist() == [True, True, False, True, False, True]
    assert plain.clipped_N.tolist() == [False, True, False, True, False, False]
    (gradient,) = torch.autograd.grad(out.loss_N.sum(), logp)
    torch.testing.assert_close(gradient, torch.tensor([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]))


def test_what_the_clip_stops_is_told_by_the_side_of_the_advantage():
    ratio, advantage = torch.tensor([1.5, 0.5, 0.9, 0.9, 0.5, 1.5]), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.5, -0.5])
    out = clipped_surrogate(ratio.log().requires_grad_(), torch.zeros(6), advantage)
    assert out.clipped_N.tolist() == [True, True, False, False, False, False]
    assert not out.ratio_N.requires_grad


def test_a_clipped_weight_leaves_every_token_its_gradient():
    # ratios 2, 1/2 and 5 within [3/4, 3/2]: weights 3/2, 3/4, 3/2; the last has a negative advantage
    behavior = torch.tensor([-1.0, -1.0, -2.0])
    logp = (behavior + torch.tensor([2.0, 0.5, 5.0]).log()).requires_grad_()
    advantage = torch.tensor([2.0, 4.0, -1.0])
    out = clipped_weight(logp, behavior, advantage, eps_low=0.25, eps_high=0.5)
    weight = torch.tensor([1.5, 0.75, 1.5])
    torch.testing.assert_close(out.loss_N, -weight * advantage * logp.detach())
    assert out.clipped_N.tolist() == [True, True, True]
    (gradient,) = torch.autograd.grad(out.loss_N.sum(), logp)
    torch.testing.assert_close(gradient, -weight * advantage)
    torch.testing.assert_close(out.ratio_N, torch.tensor([2.0, 0.5, 5.0]))
    # without a lower bound, and with another bound where the advantage is negative
    free = clipped_weight(logp.detach(), behavior, advantage, eps_high=9.0, dual_clip=3.0)
    torch.testing.assert_close(free.loss_N / logp.detach(), -torch.tensor([2.0, 0.5, 3.0]) * advantage)
    assert free.clipped_N.tolist() == [False, False, True]
    assert clipped_weight(logp.detach(), behavior, advantage).clipped_N.tolist() == [True, False, True]
    # the bound of 3 is for what did worse alone, however little better the other did; the advantage is a constant
    little = torch.tensor([0.5, 0.5, 0.5], requires_grad=True)
    free = clipped_weight(logp, behavior, little, eps_high=9.0, dual_clip=3.0)
    torch.testing.assert_close(free.loss_N, -torch.tensor([2.0, 0.5, 5.0]) * 0.5 * logp)
    free.loss_N.sum().backward()
    assert little.grad is None
    # a weight within its bounds is a constant, too
    torch.testing.assert_close(logp.grad, -torch.tensor([2.0, 0.5, 5.0]) * 0.5)


def test_a_sequence_has_one_ratio():
    # sequence 7: log-ratios 0.3, -0.1 and 0.4, mean 0.2; sequence 2: 0.5 alone
    behavior = torch.tensor([-1.0, -2.0, -3.0, -4.0], requires_grad=True)
    logp = (behavior.detach() + torch.tensor([0.3, -0.1, 0.5, 0.4])).requires_grad_()
    found = sequence_logp(logp, behavior, torch.tensor([7, 7, 2, 7]))
    torch.testing.assert_close(found, behavior + torch.tensor([0.2, 0.2, 0.5, 0.2]))
    # each token of the sequence moves its ratio by a third
    found[0].backward()
    torch.testing.assert_close(logp.grad, torch.tensor([1 / 3, 1 / 3, 0.0, 1 / 3]))
    assert behavior.grad is None


def test_a_wild_log_ratio_stays_finite():
    out = clipped_surrogate(torch.tensor([500.0, -500.0]), torch.zeros(2), torch.tensor([-1.0, -1.0]))
    torch.testing.assert_close(out.ratio_N, torch.tensor([20.0, -20.0]).exp())
    assert out.loss_N.isfinite().all()


def test_gradient_reaches_the_current_policy_alone():
    logp, behavior, advantage = (torch.zeros(2, requires_grad=True) for _ in range(3))
    (clipped_surrogate(logp, behavior, advantage + 1).loss_N.sum() + kl_k3(logp, behavior).sum()).backward()
    assert logp.grad is not None
    assert behavior.grad is None
    assert advantage.grad is None


def test_kl_estimators_by_hand():
    logp, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    ln2 = math.log(2)
    torch.testing.assert_close(kl_k1(logp, reference), torch.tensor([ln2, -ln2]))
    torch.testing.assert_close(kl_k2(logp, reference), torch.tensor([ln2**2 / 2, ln2**2 / 2]))
    # ratio reference / policy: 1/2 and 2
    torch.testing.assert_close(kl_k3(logp, reference), torch.tensor([0.5 - 1 + ln2, 2 - 1 - ln2]))


def test_kl_estimates_are_cut_to_ten_nats():
    logp, reference = torch.tensor([0.0, -100.0]), torch.tensor([-100.0, 0.0])
    assert kl_k1(logp, reference).tolist() == [10.0, -10.0]
    assert kl_k2(logp, reference).tolist() == pytest.approx([10.0, 10.0])
    assert kl_k3(logp, reference).tolist() == pytest.approx([10.0, 10.0])
    assert kl_k3(torch.tensor([-8.0]), torch.tensor([0.0])).tolist() == pytest.approx([10.0])
    # 9.9 is not cut: exp(2.6015) - 3.6015
    assert kl_k3(torch.tensor([-2.6015]), torch.tensor([0.0])).item() == pytest.approx(math.exp(2.6015) - 3.6015)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_gradients_reach_the_policy_alone_and_stay_finite(name):
    logp, reference = torch.tensor([-1.0, -1000.0], requires_grad=True), torch.tensor([-2.0, 0.0], requires_grad=True)
    KL_ESTIMATORS[name](logp, reference).sum().backward()
    assert reference.grad is None
    # d = log reference - log policy = -1: 1, -d and 1 - exp(d); beyond the cut that of the cut, so that descent goes on
    # to raise what the policy gives 1000 nats less than the reference
    exact = {"k1": (1.0, 1.0), "k2": (1.0, -math.sqrt(20)), "k3": (1.0 - math.exp(-1.0), 1 - 13.610868638)}[name]
    torch.testing.assert_close(logp.grad, torch.tensor(exact))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_a_policy_far_above_the_reference_is_pulled_down(name):
    logp = torch.tensor([0.0, 0.0], requires_grad=True)
    found = KL_ESTIMATORS[name](logp, torch.tensor([-50.0, -math.inf]))
    assert found.tolist() == pytest.approx([10.0, 10.0])
    found[0].backward()
    slope = {"k1": 1.0, "k2": math.sqrt(20), "k3": 1 - math.exp(-10.99998)}[name]
    torch.testing.assert_close(logp.grad, torch.tensor([slope, 0.0]))


def test_k1_and_k3_are_unbiased_over_the_policy():
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    exact = (p * (p / q).log()).sum()
    for name in ("k1", "k3"):
        torch.testing.assert_close((p * KL_ESTIMATORS[name](p.log(), q.log())).sum(), exact)


@repeatable
@given(st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3), st.floats(-2, 2)), min_size=1, max_size=8))
def test_clipping_never_lowers_the_loss_and_k2_k3_are_never_negative(rows):
    logp, behavior, advantage = torch.tensor(rows, dtype=torch.float64).T
    out = clipped_surrogate(logp, behavior, advantage)
    assert (out.loss_N >= -advantage * out.ratio_N).all()
    assert (kl_k2(logp, behavior) >= 0).all()
    assert (kl_k3(logp, behavior) >= -1e-12).all()
