"""The tail bin where teacher and student are sure: float32 against float64, for tails of 1e-1 to 1e-12."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import toy_run as toy
from torch import Tensor

from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.algorithm import Algorithm, Scorers
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.algorithms import opd
from turngym.trainers.batch import pack
from turngym.trainers.contrib import guided_opd
from turngym.trainers.lm_head import MIN_TAIL_LOGP, project, topk
from turngym.trainers.losses import bin_forward_kl, bin_reverse_kl
from turngym.trainers.optimizer_step import Forward, accumulate
from turngym.trainers.run_config import DistillConfig, RunConfig
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)
V, K = 400, 7
TAILS = [10.0**-power for power in range(1, 13)]
FORMS = {"one matrix": lambda: torch.eye(V), "a function": lambda: lambda hidden: hidden}


def rows(tails: list[float], seed: int, offset: float = 31.0) -> Tensor:
    """Logits [12, V], float32: the first K ids hold all but each of `tails`."""
    draw = torch.Generator().manual_seed(seed)
    inside = torch.randn(len(TAILS), K, generator=draw, dtype=torch.float64).mul(0.5).log_softmax(-1)
    outside = torch.randn(len(TAILS), V - K, generator=draw, dtype=torch.float64).log_softmax(-1)
    tail = torch.tensor(tails, dtype=torch.float64)[:, None]
    return (torch.cat([inside + torch.log1p(-tail), outside + tail.log()], dim=-1) + offset).float()


def exact(student: Tensor, teacher: Tensor, ids: Tensor, forward: bool = False) -> Tensor:
    """The KL over K ids and the bin, in float64, of the very same logits."""

    def bins(logits: Tensor) -> Tensor:
        logp = logits.double().log_softmax(-1)
        others = logp.scatter(1, ids, -torch.inf).logsumexp(-1, keepdim=True)
        return torch.cat([logp.gather(1, ids), others], dim=-1)

    p, q = bins(student), bins(teacher)
    return (q.exp() * (q - p) if forward else p.exp() * (p - q)).sum(-1)


STUDENTS = {"less": [tail / 100 for tail in TAILS], "more": [3 * tail for tail in TAILS], "much": [0.2] * len(TAILS)}
"""The student's tail beside the teacher's."""


@pytest.mark.parametrize("mass", STUDENTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("chunk", [5, 1000])
def test_divergence_and_gradient_in_single_are_those_in_double(form: str, mass: str, forward: bool, chunk: int) -> None:
    """Where 1 less a sum is off by 5 to 12 % of the gradient, or has no digit left."""
    student, teacher, head = rows(STUDENTS[mass], 1), rows(TAILS, 2), FORMS[form]()
    ids, q, q_tail = topk(teacher, head, K, chunk=chunk)
    assert {tuple(sorted(row)) for row in ids.tolist()} == {tuple(range(K))}
    hidden = student.clone().requires_grad_()
    found = project(hidden, head, ids[:, 0], ids, chunk=chunk, tail=True)
    assert found.topk_logp_NK is not None
    loss = (bin_forward_kl if forward else bin_reverse_kl)(found.topk_logp_NK, q, found.tail_N, q_tail)
    (slope,) = torch.autograd.grad(loss.sum(), hidden)

    twin = student.double().requires_grad_()
    wanted = exact(twin, teacher, ids, forward)
    (right,) = torch.autograd.grad(wanted.sum(), twin)
    torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
    off = (slope.double() - right).norm(dim=-1) / right.norm(dim=-1)
    assert off.max() < 1e-4
    # and the ids outside get their own share of it, small as it is
    outside = (slope.double() - right)[:, K:].norm(dim=-1) / right[:, K:].norm(dim=-1)
    assert outside.max() < 1e-3
    # the tails themselves
    for tail_N, given in ((q_tail, TAILS), (found.tail_N, STUDENTS[mass])):
        assert tail_N is not None
        torch.testing.assert_close(tail_N.double().exp(), torch.tensor(given).double(), rtol=1e-4, atol=0)


def test_without_the_tail_there_is_no_digit_left() -> None:
    """What the other tests would not notice if they could not fail."""
    student, teacher = rows(STUDENTS["much"], 1), rows(TAILS, 2)
    ids, q, _ = topk(teacher, torch.eye(V), K)
    found = project(student, torch.eye(V), ids[:, 0], ids)
    assert found.topk_logp_NK is not None
    off = (bin_reverse_kl(found.topk_logp_NK, q).double() - exact(student, teacher, ids)).abs()
    assert off[:3].max() < 1e-3
    assert off[5] > 0.005
    assert off[11] > 2.0


@pytest.mark.parametrize("form", FORMS)
def test_no_other_id_and_none_that_is_possible(form: str) -> None:
    """The whole vocabulary as support, ids that a mask forbids: the least tail, without a gradient or a NaN."""
    logits, head = rows(TAILS, 3), FORMS[form]()
    every = torch.arange(V).repeat(len(logits), 1)
    hidden = logits.clone().requires_grad_()
    whole = project(hidden, head, every[:, 0], every, tail=True)
    assert whole.topk_logp_NK is not None
    assert whole.tail_N is not None
    assert whole.tail_N.tolist() == [MIN_TAIL_LOGP] * len(logits)
    (slope,) = torch.autograd.grad(whole.tail_N.sum(), hidden, retain_graph=True)
    assert slope.abs().max() == 0  # a least value is a constant
    theirs = topk(rows(TAILS, 4), head, V)
    loss = bin_reverse_kl(whole.topk_logp_NK, theirs[1], whole.tail_N, theirs[2])
    (slope,) = torch.autograd.grad(loss.sum() + whole.tail_N.sum(), hidden)
    assert slope.isfinite().all()
    assert topk(logits, head, V)[2].tolist() == [MIN_TAIL_LOGP] * len(logits)
    if form == "a function":
        masked = logits.clone()
        masked[:, K:] = -torch.inf
        hidden = masked.requires_grad_()
        found = project(hidden, head, every[:, 0], every[:, :K], tail=True)
        assert found.tail_N is not None
        (slope,) = torch.autograd.grad(found.tail_N.sum(), hidden)
        assert found.tail_N.tolist() == [MIN_TAIL_LOGP] * len(logits)
        assert slope.abs().max() == 0


RUN = RunConfig(steps=10, episodes=12, max_turns=6)


def built(**distill: Any) -> Algorithm:
    given = BuildContext(run=RUN, distill=DistillConfig(top_k=K, temperature=0.5, **distill))
    if distill.pop("guided", False):
        return guided_opd.build(guided_opd.GuidedOpdConfig(), given)
    return opd.build(opd.OpdConfig(), given)


@pytest.mark.parametrize("distill", [{}, {"support": "student"}, {"form": "forward"}])
@pytest.mark.parametrize("capped", [False, True], ids=["one matrix", "a function"])
def test_a_sure_teacher_trains_in_single_as_in_double(distill: dict[str, Any], capped: bool) -> None:
    """From its scores to the student's gradient, at distillation temperature 0.5: loss within 1e-4, gradient 1e-3."""
    algorithm = built(**distill)

    def pair(seed: int, sharpness: float) -> tuple[Any, Any]:
        model = toy.tiny(seed, sharpness)
        if capped:  # a head that is no plain matrix
            model.config.final_logit_softcapping = 200.0
        twin = toy.tiny(seed, sharpness).double()
        twin.config = model.config
        return model, twin

    student, teacher = pair(1, 12.0), pair(2, 22.0)
    episodes = toy.Sampled(student[0])(RolloutRequest(step=1, episodes=12, max_turns=6))
    batch = pack(episodes)
    weight_N = np.full(batch.tokens, 1.0 / batch.tokens)
    found = []
    for mine, theirs in zip(student, teacher, strict=True):
        scorers = Scorers(
            student=LocalScorer(model=mine, temperature=0.5), teacher=LocalScorer(model=theirs, temperature=0.5)
        )
        targets = algorithm.target_fn(batch, episodes, scorers)
        mine.zero_grad()
        loss, columns = accumulate(
            mine,
            batch,
            targets=targets,
            weight_N=weight_N,
            token_loss=replace(algorithm.token_loss, importance=None),  # type: ignore[type-var]
            forward=Forward(distill_temperature=0.5),
        )
        slope = torch.cat([parameter.grad.double().flatten() for parameter in mine.parameters()])
        found.append((targets, loss, columns["loss"], slope))
    (targets, loss, loss_N, slope), (_, right, right_N, exact_slope) = found
    assert targets.topk_tail_N is not None
    # the teacher of this test is one that is sure
    assert np.quantile(targets.topk_tail_N, 0.3) < np.log(1e-6)
    assert loss == pytest.approx(right, rel=1e-4)
    np.testing.assert_allclose(loss_N, right_N, rtol=2e-4, atol=1e-5)
    assert (slope - exact_slope).norm() < 1e-3 * exact_slope.norm()
