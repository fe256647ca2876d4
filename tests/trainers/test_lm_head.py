"""Chunked projection: the dense numbers and gradients, without the dense tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turngym.trainers.batch import pack
from turngym.trainers.lm_head import Projected, project, topk
from turngym.trainers.losses import bin_reverse_kl
from turngym.trainers.microbatch import micro_batches
from turngym.trainers.ranks import SINGLE
from turngym.trainers.token_weights import trajectory_weights

N, D, V, K = 13, 5, 11, 4


def inputs(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = {"hidden": (N, D), "weight": (V, D), "bias": (V,)}
    values = {name: torch.randn(*shape, generator=generator, dtype=dtype) for name, shape in draw.items()}
    values["label"] = torch.randint(V, (N,), generator=generator)
    values["ids"] = torch.stack([torch.randperm(V, generator=generator)[:K] for _ in range(N)])
    return values


def as_function(weight):
    """The head as a callable, which is left to autograd."""
    return lambda hidden: hidden @ weight.T


FORMS = (lambda weight: weight, as_function)


def test_two_positions_by_hand():
    for form in FORMS:
        # logits (0, ln 3) and (ln 2, 0)
        weight = form(torch.tensor([[0.0, math.log(2)], [math.log(3), 0.0]]))
        out = project(torch.eye(2), weight, torch.tensor([1, 1]), torch.tensor([[0, 1], [1, 0]]), entropy=True, chunk=1)
        torch.testing.assert_close(out.logp_N.exp(), torch.tensor([3 / 4, 1 / 3]))
        assert out.topk_logp_NK is not None
        assert out.entropy_N is not None
        torch.testing.assert_close(out.topk_logp_NK.exp(), torch.tensor([[1 / 4, 3 / 4], [1 / 3, 2 / 3]]))
        entropy = [-(p * math.log(p) + (1 - p) * math.log(1 - p)) for p in (1 / 4, 1 / 3)]
        torch.testing.assert_close(out.entropy_N, torch.tensor(entropy))
        assert not out.entropy_N.requires_grad


def test_a_masked_id_has_no_share_in_the_entropy_nor_in_its_gradient():
    logits = torch.tensor([[-math.inf, 0.0, math.log(3.0)]], requires_grad=True)
    out = project(logits, lambda hidden: hidden, torch.tensor([1]), entropy=True, entropy_gradient=True)
    wanted = -(0.25 * math.log(0.25) + 0.75 * math.log(0.75))
    torch.testing.assert_close(out.entropy_N, torch.tensor([wanted]))
    (gradient,) = torch.autograd.grad(out.entropy_N.sum(), logits)
    # -p (log p + H)
    low = -0.25 * (math.log(0.25) + wanted)
    torch.testing.assert_close(gradient, torch.tensor([[0.0, low, -low]]))
    # unless it is asked for, it is a number without a gradient
    logged = project(logits, lambda hidden: hidden, torch.tensor([1]), entropy=True).entropy_N
    assert logged is not None
    assert not logged.requires_grad


def test_temperature_by_hand():
    for form in FORMS:
        # logits (0, ln 9) at temperature 2 are (0, ln 3)
        weight = form(torch.tensor([[0.0], [math.log(9)]]))
        out = project(torch.ones(1, 1), weight, torch.tensor([1]), temperature=2.0)
        torch.testing.assert_close(out.logp_N.exp(), torch.tensor([3 / 4]))
        ids, logp, tail = topk(torch.ones(1, 1), weight, 1, temperature=2.0)
        assert ids.tolist() == [[1]]
        torch.testing.assert_close(logp.exp(), torch.tensor([[3 / 4]]))
        torch.testing.assert_close(tail.exp(), torch.tensor([1 / 4]))


def test_vocab_cuts_padding_off():
    for form in FORMS:
        weight = form(torch.tensor([[0.0], [math.log(3)], [50.0]]))
        out = project(torch.ones(1, 1), weight, torch.tensor([1]), vocab=2)
        torch.testing.assert_close(out.logp_N.exp(), torch.tensor([3 / 4]))
        assert topk(torch.ones(1, 1), weight, 5, vocab=2)[0].tolist() == [[1, 0]]


def test_low_precision_logits_are_normalized_in_single():
    for form in FORMS:
        x = inputs(torch.float32)
        out = project(x["hidden"].bfloat16(), form(x["weight"].bfloat16()), x["label"], x["ids"], entropy=True)
        assert out.logp_N.dtype == out.topk_logp_NK.dtype == out.entropy_N.dtype == torch.float32
        logits = (x["hidden"].bfloat16() @ x["weight"].bfloat16().T).float()
        torch.testing.assert_close(out.logp_N, logits.log_softmax(-1).gather(1, x["label"][:, None])[:, 0])


def test_topk_is_sorted_detached_and_of_the_full_softmax():
    x = inputs()
    head = torch.nn.Linear(D, V).double()
    ids, logp, tail = topk(x["hidden"].requires_grad_(), head, K, chunk=3)
    dense = head(x["hidden"]).log_softmax(-1)
    best = dense.topk(K)
    assert torch.equal(ids, best.indices)
    torch.testing.assert_close(logp, best.values.detach())
    torch.testing.assert_close(tail.exp() + logp.exp().sum(-1), torch.ones(len(tail)).double())
    assert not logp.requires_grad
    assert not tail.requires_grad
    assert (logp.diff(dim=1) <= 0).all()


class Watch(TorchDispatchMode):
    """The most rows of any matrix of `width` columns that an operator makes, forward or backward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.rows = width, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.ndim == 2 and leaf.shape[1] == self.width:
                self.rows = max(self.rows, leaf.shape[0])
        return out


def test_only_one_chunk_of_logits_ever_exists():
    rows, width, chunk = 600, 257, 50
    hidden = torch.randn(rows, 3, requires_grad=True)
    head = torch.nn.Linear(3, width)
    seen: list[int] = []

    def counting(h: torch.Tensor) -> torch.Tensor:
        seen.append(len(h))
        return head(h)

    kept: list[int] = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        kept.append(t.numel())
        return t

    label, ids = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, 2, dtype=torch.int64)
    with Watch(width) as watch:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = project(hidden, counting, label, ids, chunk=chunk, entropy=True)
        (out.logp_N.sum() + out.topk_logp_NK.sum()).backward()
        topk(hidden, counting, 2, chunk=chunk)
    assert watch.rows == chunk
    assert set(seen) == {chunk}
    assert len(seen) == 3 * rows // chunk  # forward, again in backward, and the top K once
    # between forward and backward nothing as large as a chunk of logits is held
    assert max(kept, default=0) < chunk * width


def test_no_positions_give_empty_columns():
    out = project(torch.zeros(0, D), torch.zeros(V, D), torch.zeros(0, dtype=torch.int64))
    assert isinstance(out, Projected)
    assert (out.logp_N.shape, out.topk_logp_NK, out.entropy_N) == ((0,), None, None)


@pytest.mark.parametrize("budget", [1, 6, 9, 20, 1000])
def test_a_split_into_micro_batches_changes_nothing(ragged, make_episode, budget):
    """The weights are of the whole batch, so losses and gradients of the parts add up to the whole."""
    batch = pack([*ragged, make_episode([([1], [2, 3, 4, 5]), ([6, 7], [8])], number=2)])
    weight_N = torch.from_numpy(trajectory_weights(batch))
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(30, D, generator=generator, dtype=torch.float64, requires_grad=True)
    head = torch.randn(30, D, generator=generator, dtype=torch.float64)

    def part(ids_RL: torch.Tensor, predictor: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        # a causal stand-in for a model: the running sum of embeddings
        hidden = table[ids_RL].cumsum(1).tanh().reshape(-1, D)[predictor]
        ids, teacher, tail = topk(hidden.detach() + 0.1, head, 5)
        out = project(hidden, head, torch.from_numpy(batch.label_N)[tokens], ids, chunk=2, tail=True)
        return (weight_N[tokens] * bin_reverse_kl(out.topk_logp_NK, teacher, out.tail_N, tail)).sum()

    def total(max_tokens: int) -> tuple[float, torch.Tensor]:
        table.grad = None
        value = 0.0
        for micro in micro_batches(batch, max_tokens, SINGLE):
            columns = (micro.passed.ids_RL, micro.predictor_n, micro.tokens)
            loss = part(*map(torch.from_numpy, columns))
            loss.backward()
            value += loss.item()
        return value, table.grad.clone()

    value, gradient = total(budget)
    whole, wanted = total(10_000)
    assert value == pytest.approx(whole, rel=1e-12)
    torch.testing.assert_close(gradient, wanted)
