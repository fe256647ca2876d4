"""Reverse KL on K ids: hand arithmetic, bounds, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from turngym.trainers.losses import (
    TAILS,
    bin_reverse_kl,
    importance_weight,
    raw_reverse_kl,
    renorm_reverse_kl,
    tail_logp,
    topk_entropy,
)

repeatable = settings(derandomize=True)

# student (1/2, 1/4 | 1/4), teacher (1/4, 1/4 | 1/2); a second token where the student is the teacher
STUDENT = torch.tensor([[0.5, 0.25], [0.25, 0.25]]).log()
TEACHER = torch.tensor([[0.25, 0.25], [0.25, 0.25]]).log()
LN2 = math.log(2)


def test_bin_by_hand():
    # 1/2 ln 2 + 0 + 1/4 ln(1/2)
    torch.testing.assert_close(bin_reverse_kl(STUDENT, TEACHER), torch.tensor([LN2 / 4, 0.0]))


def test_raw_by_hand():
    torch.testing.assert_close(raw_reverse_kl(STUDENT, TEACHER), torch.tensor([LN2 / 2, 0.0]))
    # student (1/4, 1/4), teacher (1/2, 1/4): 1/4 ln(1/2) is below zero
    negative = raw_reverse_kl(TEACHER[:1], STUDENT[:1])
    torch.testing.assert_close(negative, torch.tensor([-LN2 / 4]))


def test_renorm_by_hand():
    # (2/3, 1/3) against (1/2, 1/2)
    expected = 2 / 3 * math.log(4 / 3) + 1 / 3 * math.log(2 / 3)
    torch.testing.assert_close(renorm_reverse_kl(STUDENT, TEACHER), torch.tensor([expected, 0.0]))
    # rows have nothing to do with each other: (1/2, 1/2) against (2/3, 1/3)
    other = torch.cat([TEACHER[:1], STUDENT[:1]])
    back = 0.5 * math.log(3 / 4) + 0.5 * math.log(3 / 2)
    torch.testing.assert_close(renorm_reverse_kl(torch.cat([STUDENT[:1], TEACHER[:1]]), other)[1], torch.tensor(back))


@pytest.mark.parametrize("tail", ["bin", "raw", "renorm"])
def test_an_impossible_id_is_worth_nothing_and_has_no_gradient(tail):
    # logits of 4 ids, the first of the support masked: p = (0, 1/2 | 1/4, 1/4), and a row in which all of it is
    logits = torch.tensor([[-math.inf, LN2, 0.0, 0.0], [-math.inf, -math.inf, 0.0, 0.0]], requires_grad=True)
    teacher = torch.tensor([[0.25, 0.25], [0.25, 0.25]]).log()
    found = TAILS[tail](logits.log_softmax(-1)[:, :2], teacher)
    # bin: 1/2 ln 2 + 1/2 ln 1, and ln 2; raw: 1/2 ln 2, and nothing; renorm: ln 2
    wanted = {"bin": (LN2 / 2, LN2), "raw": (LN2 / 2, 0.0), "renorm": (LN2, 0.0)}[tail]
    torch.testing.assert_close(found, torch.tensor(wanted), atol=1e-6, rtol=1e-5)
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert gradient.isfinite().all()
    assert gradient[0, 0] == gradient[1, 0] == gradient[1, 1] == 0.0
    # of nearly impossible ids it is the limit: p = (1e-9, 1/2 | ...)
    near = torch.tensor([[-18.0, LN2, 0.0, 0.0]], requires_grad=True)
    close = TAILS[tail](near.log_softmax(-1)[:, :2], teacher[:1])
    torch.testing.assert_close(close, found[:1].detach(), atol=1e-5, rtol=1e-4)
    (limit,) = torch.autograd.grad(close.sum(), near)
    torch.testing.assert_close(limit, gradient[:1], atol=1e-5, rtol=1e-3)


def full_reverse_kl(student, teacher):
    """Over the whole vocabulary: what the forms on K ids approach."""
    return (student.exp() * (student - teacher)).sum(-1)


def test_direction_is_student_to_teacher():
    """The divergence is weighted by the student: where it never goes, nothing counts."""
    student, teacher = torch.tensor([[1 - 1e-6, 5e-7]]).log(), torch.tensor([[0.5, 0.25]]).log()
    torch.testing.assert_close(bin_reverse_kl(student, teacher), torch.tensor([LN2]), atol=1e-4, rtol=0)
    assert bin_reverse_kl(teacher, student).item() > 3


def test_tail_by_hand():
    torch.testing.assert_close(tail_logp(STUDENT), torch.tensor([[0.25], [0.5]]).log())
    whole = torch.tensor([[0.5, 0.5], [1.0, 1e-9]]).log()
    torch.testing.assert_close(tail_logp(whole), torch.full((2, 1), 1e-7).log(), atol=1e-3, rtol=0)


def test_a_support_that_holds_everything_has_finite_gradients():
    logits = torch.tensor([[30.0, 0.0, -30.0], [1.0, 1.0, 1.0]], requires_grad=True)
    teacher = torch.tensor([[0.0, 30.0, -30.0], [1.0, 1.0, 1.0]]).log_softmax(-1)
    for tail in TAILS.values():
        (gradient,) = torch.autograd.grad(tail(logits.log_softmax(-1), teacher).sum(), logits)
        assert gradient.isfinite().all()


def test_gradient_by_hand():
    """Over the full vocabulary d l / d z_v = p_v (log p_v - log q_v - l)."""
    z = torch.tensor([[0.3, -0.7, 1.1]], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([[0.2, 0.5, 0.3]], dtype=torch.float64).log()
    p = z.log_softmax(-1)
    loss = raw_reverse_kl(p, q)
    (gradient,) = torch.autograd.grad(loss.sum(), z)
    torch.testing.assert_close(gradient, (p.exp() * (p - q - loss[:, None])).detach())


@pytest.mark.parametrize("tail", TAILS.values(), ids=TAILS)
def test_gradients_flow_through_the_student_alone(tail):
    student = STUDENT.double().clone().requires_grad_()
    teacher = TEACHER.double().clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: tail(s, teacher.detach()), (student,))
    tail(student, teacher).sum().backward()
    assert student.grad is not None
    assert teacher.grad is None
    assert not topk_entropy(student).requires_grad


def test_importance_weight_by_hand():
    logp = torch.tensor([0.5, 0.5, 0.9, 1e-4, 0.3]).log().requires_grad_()
    behavior = torch.tensor([0.25, 0.5, 0.01, 0.5, math.nan]).log()
    weight = importance_weight(logp, behavior)
    torch.testing.assert_close(weight, torch.tensor([2.0, 1.0, 10.0, 0.1, 1.0]))
    assert not weight.requires_grad
    torch.testing.assert_close(importance_weight(logp, behavior, low=0.5, high=1.5)[0], torch.tensor(1.5))
    extreme = importance_weight(torch.tensor([0.0]), torch.tensor([-1e4]), high=1e30)
    torch.testing.assert_close(extreme, torch.tensor([20.0]).exp())


def test_topk_entropy_by_hand():
    # 1/2, 1/4, 1/4: 1.5 bits
    torch.testing.assert_close(topk_entropy(STUDENT[:1]), torch.tensor([1.5 * LN2]))


VOCAB = 9
logits = arrays("float64", (3, VOCAB), elements=st.floats(-8, 8, width=32))
moderate = arrays("float64", (3, VOCAB), elements=st.floats(-5, 5, width=32))


@repeatable
@given(logits, logits, st.integers(1, VOCAB), st.booleans())
def test_bin_lies_between_zero_and_the_full_divergence(student, teacher, k, by_student):
    """For the teacher's top K and for the student's."""
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (student, teacher))
    ids = (p if by_student else q).topk(k).indices
    binned, full = bin_reverse_kl(p.gather(1, ids), q.gather(1, ids)), full_reverse_kl(p, q)
    assert (binned >= -2e-6).all()
    assert (binned <= full + 2e-6).all()
    if k == VOCAB:
        torch.testing.assert_close(binned, full, atol=1e-9, rtol=1e-9)


# beyond +-5 the least tail mass can change from one K to the next
@repeatable
@given(moderate, moderate)
def test_more_ids_bring_bin_closer_and_the_whole_vocabulary_makes_all_forms_equal(student, teacher):
    p, q = (torch.from_numpy(x).log_softmax(-1) for x in (student, teacher))
    order = q.argsort(descending=True)
    binned = torch.stack([bin_reverse_kl(p.gather(1, order[:, :k]), q.gather(1, order[:, :k])) for k in range(1, 10)])
    assert (binned.diff(dim=0) >= -4e-6).all()
    for tail in TAILS.values():
        torch.testing.assert_close(tail(p, q), full_reverse_kl(p, q), atol=1e-9, rtol=1e-9)


@repeatable
@given(logits, st.integers(1, VOCAB))
def test_a_student_equal_to_its_teacher_has_no_divergence_and_no_gradient(values, k):
    z = torch.from_numpy(values).requires_grad_()
    p = z.log_softmax(-1)
    ids = p.topk(k).indices
    for name in ("bin", "renorm"):
        loss = TAILS[name](p.gather(1, ids), p.detach().gather(1, ids))
        (gradient,) = torch.autograd.grad(loss.sum(), z, retain_graph=True)
        torch.testing.assert_close(loss, torch.zeros_like(loss), atol=1e-9, rtol=0)
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), atol=1e-9, rtol=0)


def test_raw_has_a_gradient_at_the_teacher_itself():
    z = torch.tensor([[1.0, 0.0, -1.0]], requires_grad=True)
    p = z.log_softmax(-1)
    (gradient,) = torch.autograd.grad(raw_reverse_kl(p[:, :2], p.detach()[:, :2]).sum(), z)
    (mass,) = torch.autograd.grad(z.softmax(-1)[:, :2].sum(), z)
    torch.testing.assert_close(gradient, mass)
    assert mass[0, 0] > 0.03


@repeatable
@given(logits, logits, st.permutations(range(VOCAB)))
def test_the_order_of_the_ids_does_not_matter(student, teacher, order):
    p, q = (torch.from_numpy(x).log_softmax(-1)[:, :5] for x in (student, teacher))
    shuffled = [i for i in order if i < 5]
    for tail in TAILS.values():
        torch.testing.assert_close(tail(p, q), tail(p[:, shuffled], q[:, shuffled]))


def test_single_precision_agrees_with_double():
    generator = torch.Generator().manual_seed(0)
    p, q = (torch.randn(200, 1000, generator=generator, dtype=torch.float64).mul(3).log_softmax(-1) for _ in range(2))
    ids = q.topk(50).indices
    p, q = p.gather(1, ids), q.gather(1, ids)
    for tail in TAILS.values():
        torch.testing.assert_close(tail(p.float(), q.float()).double(), tail(p, q), atol=1e-5, rtol=1e-5)
