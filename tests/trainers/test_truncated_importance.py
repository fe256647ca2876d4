"""Truncated importance sampling by hand."""

from __future__ import annotations

import math

import pytest
import torch

from turngym.trainers.algorithm import Tokens
from turngym.trainers.losses import PolicyGradient, TruncatedImportance


def tokens(now: list[float], behavior: list[float], advantage: list[float]) -> Tokens:
    logp = torch.tensor(now, requires_grad=True)
    zeros = torch.zeros(len(now))
    return Tokens(
        logp_n=logp.detach() - 0.7,  # at another temperature
        sampled_logp_n=logp,
        behavior_logp_n=torch.tensor(behavior),
        advantage_n=torch.tensor(advantage),
        off_policy_n=zeros.bool(),
        entropy_n=zeros,
    )


def test_truncated_importance_by_hand() -> None:
    """Ratios 4, 1.5, 0.5, unknown; A = -1: the gradient of l = -A min(r, cap) is min(r, cap) where nothing clips."""
    batch = tokens(
        [math.log(0.4), math.log(0.3), math.log(0.1), -1.0],
        [math.log(0.1), math.log(0.2), math.log(0.2), math.nan],
        [-1.0] * 4,
    )
    wide = PolicyGradient(eps_low=1.0, eps_high=0.0)
    result = TruncatedImportance(loss=wide, cap=2.0)(batch)
    assert result.loss_n.tolist() == pytest.approx([2.0, 1.5, 0.5, 1.0])
    result.loss_n.sum().backward()
    assert batch.sampled_logp_n.grad is not None
    # min(r, cap) where l = r; the last token's ratio is 1 by definition
    assert batch.sampled_logp_n.grad.tolist() == pytest.approx([2.0, 1.5, 0.5, 1.0])
    assert result.diagnostics["truncated"].tolist()[:3] == [1.0, 0.0, 0.0]
    assert result.diagnostics["ratio"].tolist()[:3] == pytest.approx([2.0, 1.5, 0.5])
    assert result.diagnostics["ratio"][3].isnan()
    assert result.diagnostics["truncated"][3].isnan()
    # what truncates must not be a way for the gradient: mu' = p / cap is a constant
    assert not any(values.requires_grad for values in result.diagnostics.values())
    (half,) = TruncatedImportance(loss=wide, cap=3.0)(tokens([math.log(0.4)], [math.log(0.1)], [-1.0])).loss_n.tolist()
    assert half == pytest.approx(3.0)
    plain = wide(tokens([math.log(0.4)], [math.log(0.1)], [-1.0]))
    assert plain.loss_n.tolist() == pytest.approx([4.0])
