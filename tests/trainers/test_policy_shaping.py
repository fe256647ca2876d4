"""LUFFY's shaping functions: values by hand, gradients, and what the clip and the clamp stop."""

from __future__ import annotations

from math import exp, log, sqrt

import numpy as np
import pytest
import torch

from turngym.trainers.algorithms.luffy import Reshape, off_policy_loss, on_policy_loss

P = torch.tensor([0.9, 0.5, 0.02], dtype=torch.float64)
OLD = torch.tensor([0.8, 0.6, 0.02], dtype=torch.float64)

OFF = {
    "no_reshape": [0.9, 0.5, 0.02],
    "logp": [0.3 * log(0.9), 0.3 * log(0.5), 0.3 * log(0.02)],
    "p_logp": [0.9 + 0.3 * log(0.9), 0.5 + 0.3 * log(0.5), 0.02 + 0.3 * log(0.02)],
    "square_root": [sqrt(0.9), sqrt(0.5), sqrt(0.02)],
    "pow": [0.9**0.7, 0.5**0.7, 0.02**0.7],
    "p_div_p_a": [0.9 / 1.0, 0.5 / 0.6, 0.02 / 0.12],
}
ON = {
    "no_reshape": [0.9 / 0.8, 0.5 / 0.6, 1.0],
    "logp": [log(0.9 / 0.8), log(0.5 / 0.6), 0.0],
    "p_logp": [0.9 / 0.8 + 0.3 * log(0.9 / 0.8), 0.5 / 0.6 + 0.3 * log(0.5 / 0.6), 1.0],
    "square_root": [sqrt(0.9 / 0.8), sqrt(0.5 / 0.6), 1.0],
    "pow": [(0.9 / 0.8) ** 0.7, (0.5 / 0.6) ** 0.7, 1.0],
    "p_div_p_a": [0.9 / (0.8 / 0.9), (0.5 / 0.6) / (0.6 / 0.7), 1.0],
}


def shape(name: str) -> Reshape:
    return Reshape(shape=name, a=0.1, w=0.3, e=0.7)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*OFF])
def test_values_by_hand(name: str) -> None:
    np.testing.assert_allclose(shape(name).off_policy(P.log()), OFF[name], rtol=1e-9)
    np.testing.assert_allclose(shape(name).on_policy(P.log(), OLD.log()), ON[name], rtol=1e-9)


@pytest.mark.parametrize("name", [*OFF])
def test_gradients(name: str) -> None:
    logp = P.log().requires_grad_()
    advantage = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: off_policy_loss(x, advantage, shape(name)), logp)
    assert torch.autograd.gradcheck(lambda x: on_policy_loss(x, OLD.log(), advantage, shape(name), None)[0], logp)


def test_shaping_lifts_the_gradient_of_unlikely_tokens() -> None:
    logp = torch.tensor([log(1e-3)], dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(off_policy_loss(logp, torch.ones(1), shape("no_reshape")).sum(), logp)
    (shaped,) = torch.autograd.grad(off_policy_loss(logp, torch.ones(1), shape("p_div_p_a")).sum(), logp)
    assert float(plain) == pytest.approx(-1e-3)
    assert float(shaped) == pytest.approx(-1e-3 * 0.1 / 0.101**2)


def test_clip_and_clamp_stop_the_gradient() -> None:
    logp = P.log().requires_grad_()
    advantage = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    loss, clipped = on_policy_loss(logp, OLD.log(), advantage, shape("no_reshape"), (0.1, 0.1))
    np.testing.assert_allclose(loss.detach(), [-1.1, 0.9, -1.0])
    assert clipped.tolist() == [True, True, False]
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    np.testing.assert_allclose(gradient, [0.0, 0.0, -1.0])
    loss = off_policy_loss(logp, torch.ones(3), shape("no_reshape"), (0.1, 0.6))
    np.testing.assert_allclose(loss.detach(), [-0.6, -0.5, -0.1])
    (gradient,) = torch.autograd.grad(loss.sum(), logp)
    np.testing.assert_allclose(gradient, [0.0, -0.5, 0.0])


def test_a_dual_clip_holds_with_and_without_a_clip() -> None:
    ratio, advantage = torch.tensor([4.0, 4.0, 2.0]), torch.tensor([-1.0, 1.0, -1.0])
    for clip, gain in (((0.2, 0.3), -1.3), (None, -4.0)):
        loss, clipped = on_policy_loss(ratio.log(), torch.zeros(3), advantage, shape("no_reshape"), clip, 3.0)
        np.testing.assert_allclose(loss, [3.0, gain, 2.0], rtol=1e-6)
        assert clipped.tolist() == [True, clip is not None, False]


def test_the_side_of_the_clip_and_of_the_clamp() -> None:
    ratio, advantage = torch.tensor([1.5, 0.5, 0.9, 0.9, 0.5, 1.5]), torch.tensor([0.5, -0.5, -0.5, 0.5, 0.5, -0.5])
    plain = shape("no_reshape")
    loss, clipped = on_policy_loss(ratio.log(), torch.zeros(6), advantage, plain, (0.2, 0.3))
    np.testing.assert_allclose(loss, [-0.65, 0.4, 0.45, -0.45, -0.25, 0.75], rtol=1e-6)
    assert clipped.tolist() == [True, True, False, False, False, False]
    loss, clipped = on_policy_loss(ratio.log(), torch.zeros(6), advantage, plain, None)
    np.testing.assert_allclose(loss, -advantage * ratio, rtol=1e-6)
    assert not clipped.any()
    for bounds, wanted in (((None, 0.6), [-0.6, -0.5, -0.02]), ((0.1, None), [-0.9, -0.5, -0.1])):
        np.testing.assert_allclose(off_policy_loss(P.log(), torch.ones(3), plain, bounds), wanted)


@pytest.mark.parametrize("name", [*OFF])
def test_gradients_reach_the_policy_alone(name: str) -> None:
    logp, old, advantage = (value.clone().requires_grad_() for value in (P.log(), OLD.log(), torch.ones(3).double()))
    loss, _ = on_policy_loss(logp, old, advantage, shape(name))
    (loss.sum() + off_policy_loss(logp, advantage, shape(name)).sum()).backward()
    assert logp.grad is not None
    assert old.grad is None
    assert advantage.grad is None


def test_extreme_log_probabilities_stay_finite() -> None:
    logp = torch.tensor([-200.0, 0.0, -200.0])
    old = torch.tensor([0.0, -200.0, -200.0])
    for name in OFF:
        ratio = shape(name).on_policy(logp, old)
        assert ratio.isfinite().all(), name
    assert float(shape("no_reshape").on_policy(logp, old)[1]) == pytest.approx(exp(20.0), rel=1e-5)
