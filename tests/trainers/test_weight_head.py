"""The head that is one matrix: the numbers of the dense formula, and a single gradient of the weight in memory."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from turngym.trainers import lm_head as weight_head
from turngym.trainers.lm_head import Projected, own_gradient, project, weight_of
from turngym.trainers.model_shapes import SHAPES
from turngym.trainers.training_costs import logits_bytes

torch.set_num_threads(1)
N, D, V, K = 13, 5, 11, 4


def inputs(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor, Tensor]:
    """Hidden states, weight and bias that want a gradient; labels; ids, of which the first is the label."""
    draw = torch.Generator().manual_seed(3)
    leaves = [torch.randn(*shape, generator=draw, dtype=dtype).requires_grad_() for shape in ((N, D), (V, D), (V,))]
    ids = torch.stack([torch.randperm(9, generator=draw)[:K] for _ in range(N)])
    return leaves, ids[:, 0].clone(), ids


def by_autograd(weight: Tensor, bias: Tensor | None) -> Any:
    """The same head as a function, which is left to autograd."""
    return lambda hidden: torch.nn.functional.linear(hidden, weight, bias)


def loss(found: Projected, entropy: bool = True) -> Tensor:
    """Depends on everything, each position in another way."""
    assert found.topk_logp_NK is not None
    scale = torch.arange(1, N + 1) / N
    value = (found.logp_N * scale).sum() + (found.topk_logp_NK.exp() * found.topk_logp_NK * scale[:, None]).sum()
    if entropy:
        assert found.entropy_N is not None
        value = value + (found.entropy_N**2 * scale).sum()
    if found.tail_N is not None:
        value = value + (found.tail_N.exp() * found.tail_N * scale).sum()
    return value


@pytest.mark.parametrize(
    ("chunk", "temperature", "vocab"), [(1, 2.0, None), (4, 1.0, 9), (4, 2.0, 9), (13, 2.0, None), (100, 1.0, None)]
)
@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("matrix", [True, False])
def test_values_and_gradients_are_those_of_the_dense_formula(
    chunk: int, temperature: float, vocab: int | None, entropy: bool, tail: bool, matrix: bool
) -> None:
    leaves, label, ids = inputs()
    hidden, weight, bias = leaves
    wanted = {
        "temperature": temperature,
        "chunk": chunk,
        "vocab": vocab,
        "entropy": True,
        "entropy_gradient": entropy,
        "tail": tail,
    }
    head = (weight, bias) if matrix else by_autograd(weight, bias)
    found = project(hidden, head, label, ids, **wanted)  # type: ignore[arg-type]
    logp = ((hidden @ weight.T + bias)[:, :vocab] / temperature).log_softmax(-1)
    total = -(logp.exp() * logp).sum(-1)
    others = logp.scatter(1, ids, -math.inf).logsumexp(-1) if tail else None
    label_N = logp.gather(1, label[:, None])[:, 0]
    dense = Projected(logp_N=label_N, topk_logp_NK=logp.gather(1, ids), entropy_N=total, tail_N=others)
    assert found.entropy_N is not None
    assert found.entropy_N.requires_grad == entropy
    assert (found.tail_N is not None) == tail
    for name in ("logp_N", "topk_logp_NK", "entropy_N", *(["tail_N"] if tail else [])):
        torch.testing.assert_close(getattr(found, name), getattr(dense, name))
    here, there = (torch.autograd.grad(loss(each, entropy), leaves) for each in (found, dense))
    for mine, exact in zip(here, there, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("chunk", [4, 100])
def test_gradcheck(chunk: int) -> None:
    leaves, label, ids = inputs()

    def value(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        how: Any = {"chunk": chunk, "temperature": 0.8, "entropy_gradient": True, "tail": True}
        return loss(project(hidden, (weight, bias), label, ids, **how))

    assert torch.autograd.gradcheck(value, tuple(leaves))


@pytest.mark.parametrize("only", ["entropy", "label", "support", "tail"])
def test_a_loss_may_use_one_column_alone(only: str) -> None:
    leaves, label, ids = inputs()
    hidden, weight, bias = leaves

    def column(head: Any) -> Tensor:
        found = project(hidden, head, label, ids, chunk=4, entropy_gradient=True, tail=True)
        columns = {
            "entropy": found.entropy_N,
            "label": found.logp_N,
            "support": found.topk_logp_NK,
            "tail": found.tail_N,
        }
        return columns[only].sum()  # type: ignore[union-attr]

    here = torch.autograd.grad(column((weight, bias)), leaves)
    there = torch.autograd.grad(column(by_autograd(weight, bias)), leaves)
    for mine, exact in zip(here, there, strict=True):
        torch.testing.assert_close(mine, exact)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_rest_its_own(frozen: int) -> None:
    leaves, label, ids = inputs()
    exact = torch.autograd.grad(loss(project(leaves[0], tuple(leaves[1:]), label, ids), entropy=False), leaves)  # type: ignore[arg-type]
    leaves[frozen].requires_grad_(False)
    loss(project(leaves[0], (leaves[1], leaves[2]), label, ids, chunk=4), entropy=False).backward()
    for number, (leaf, wanted) in enumerate(zip(leaves, exact, strict=True)):
        assert (leaf.grad is None) == (number == frozen)
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted)


def test_an_id_of_probability_0_has_no_share_in_entropy_or_gradients() -> None:
    hidden, weight = torch.zeros(1, 2, requires_grad=True), torch.zeros(3, 2)
    bias = torch.tensor([0.0, float("-inf"), 0.0], requires_grad=True)
    for chunk in (1, 10):
        found = project(hidden, (weight, bias), torch.tensor([0]), chunk=chunk, entropy_gradient=True)
        assert found.entropy_N is not None
        torch.testing.assert_close(found.entropy_N, torch.tensor([0.6931472]))
        (slope,) = torch.autograd.grad(found.entropy_N.sum() + found.logp_N.sum(), bias)
        torch.testing.assert_close(slope, torch.tensor([0.5, 0.0, -0.5]))


@pytest.mark.parametrize("into_grad", [False, True])
def test_gradients_of_two_passes_add_up_in_the_weight(into_grad: bool) -> None:
    leaves, label, ids = inputs()
    hidden, weight, bias = leaves
    for half in (slice(0, 6), slice(6, N)):
        found = project(hidden[half], (weight, bias), label[half], ids[half], chunk=4, into_grad=into_grad)
        found.logp_N.sum().backward()
    exact = torch.autograd.grad(project(hidden, by_autograd(weight, bias), label, ids).logp_N.sum(), leaves)
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, wanted)


def test_autocast_multiplies_in_bfloat16_and_sums_in_the_weights_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_head, "SLICE", 3)  # a weight of several slices
    leaves, label, ids = inputs(torch.float32)
    hidden, weight, bias = leaves
    found = []
    for head in ((weight, bias), by_autograd(weight, bias)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = project(hidden, head, label, ids, chunk=4, entropy_gradient=True)
        found.append([value.logp_N, *torch.autograd.grad(loss(value), leaves)])
    assert {part.dtype for part in found[0]} == {torch.float32}
    for mine, other in zip(*found, strict=True):
        # both round their products to 8 bits, sums in another order
        torch.testing.assert_close(mine, other, atol=0.05, rtol=0.02)
    exact = project(hidden, (weight, bias), label, ids)
    assert (found[0][0] - exact.logp_N).abs().max() > 1e-4


def test_backward_under_autocast_is_the_same() -> None:
    slopes = []
    for inside in (False, True):
        leaves, label, ids = inputs(torch.float32)
        found = project(leaves[0], (leaves[1], leaves[2]), label, ids, chunk=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            found.logp_N.sum().backward()
        slopes.append([leaf.grad for leaf in leaves])
    for one, other in zip(*slopes, strict=True):
        assert torch.equal(one, other)


def test_precisions_that_do_not_fit_are_an_error_and_not_lowered() -> None:
    leaves, label, _ = inputs(torch.float32)
    with pytest.raises(RuntimeError, match="dtype"):
        project(leaves[0].bfloat16(), leaves[1], label)


def test_which_heads_are_one_matrix() -> None:
    plain, hooked, replaced = nn.Linear(D, V), nn.Linear(D, V), nn.Linear(D, V)
    pair = weight_of(plain)
    assert pair is not None
    assert pair[0] is plain.weight
    assert pair[1] is plain.bias
    assert weight_of(plain.weight) == (plain.weight, None)
    hooked.register_forward_hook(lambda module, given, found: 2 * found)
    replaced.forward = lambda hidden: 2 * hidden  # type: ignore[method-assign]

    class Adapted(nn.Linear):
        pass

    class Sharded(Tensor):
        pass

    assert weight_of(hooked) is None
    assert weight_of(replaced) is None
    assert weight_of(Adapted(D, V)) is None
    assert weight_of(plain.forward) is None
    assert weight_of(torch.zeros(V, D).as_subclass(Sharded)) is None
    for register in ("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"):
        watched = nn.Linear(D, V)
        getattr(watched, register)(lambda *_: None)
        assert weight_of(watched) is None


def test_a_hooked_head_computes_what_its_hook_says() -> None:
    head, label = nn.Linear(D, V), torch.zeros(N, dtype=torch.int64)
    hidden = torch.randn(N, D)
    head.register_forward_hook(lambda module, given, found: 2 * found)
    exact = (2 * (hidden @ head.weight.T + head.bias)).log_softmax(-1)[:, 0]
    torch.testing.assert_close(project(hidden, head, label, chunk=4).logp_N, exact)


def test_a_gradient_that_somebody_watches_is_left_to_autograd() -> None:
    weight = nn.Parameter(torch.zeros(3, 2))
    assert own_gradient(weight) is None
    weight.grad = torch.ones(3, 2)
    assert own_gradient(weight) is weight.grad
    seen: list[Tensor] = []
    handle = weight.register_hook(seen.append)
    assert own_gradient(weight) is None
    project(torch.ones(1, 2), weight, torch.tensor([0]), into_grad=True).logp_N.sum().backward()
    assert len(seen) == 1
    handle.remove()
    weight.register_post_accumulate_grad_hook(lambda _: None)
    assert own_gradient(weight) is None
    part = nn.Parameter(torch.zeros(3, 2)) * 2
    assert own_gradient(part) is None


class Alive(TorchDispatchMode):
    """What operators have made and is alive at once, at most: arrays of at least `size` numbers, and their bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.now, self.most = size, 0, 0
        self.bytes_now, self.bytes_most = 0, 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self.known | given and storage.nbytes() >= self.size * leaf.element_size():
                    self.known.add(storage._cdata)
                    self._count(1, storage.nbytes())
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return found

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self._count(-1, -size)

    def _count(self, arrays: int, size: int) -> None:
        self.now += arrays
        self.bytes_now += size
        self.most, self.bytes_most = max(self.most, self.now), max(self.bytes_most, self.bytes_now)


ROWS, WIDE, DEEP, PART = 64, 600, 32, 8


def gradients_alive(head: Any, passes: int = 1, *, dtype: torch.dtype = torch.float32, **more: Any) -> int:
    """Arrays as large as the weight that are alive at once, of those that forward and backward passes make."""
    weight = nn.Parameter(torch.randn(WIDE, DEEP, dtype=dtype))
    hidden = torch.randn(ROWS, DEEP, requires_grad=True, dtype=dtype)
    with Alive(WIDE * DEEP) as alive:
        for _ in range(passes):
            found = project(hidden, head(weight), torch.arange(ROWS), chunk=PART, entropy=True, **more)
            found.logp_N.sum().backward()
    assert weight.grad is not None
    return alive.most


def test_one_gradient_of_the_weight_is_alive_however_many_chunks_and_passes_there_are() -> None:
    assert WIDE * PART < WIDE * DEEP  # logits of a chunk do not count
    assert gradients_alive(lambda weight: weight) == 1
    assert gradients_alive(lambda weight: weight, passes=3, into_grad=True) == 1
    # what the claim is about: autograd's chunks, and a second pass that makes a gradient of its own
    assert gradients_alive(lambda weight: by_autograd(weight, None)) >= 2
    assert gradients_alive(lambda weight: weight, passes=2) == 2


def test_under_autocast_a_lowered_weight_is_all_that_comes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_head, "SLICE", 100)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # the weight in bfloat16, and one gradient
        assert gradients_alive(lambda weight: weight) == 2


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_the_planned_bytes_are_those_that_are_alive(temperature: float, entropy_gradient: bool) -> None:
    shape = replace(SHAPES["tiny"], vocab=3000, width=8)
    weight = nn.Parameter(torch.randn(shape.vocab, shape.width))
    weight.grad = torch.zeros_like(weight)
    hidden, label = torch.randn(200, shape.width, requires_grad=True), torch.zeros(200, dtype=torch.int64)
    wanted: Any = {"chunk": 64, "temperature": temperature, "entropy_gradient": entropy_gradient, "into_grad": True}
    with Alive(64 * shape.vocab) as alive:
        loss_ = project(hidden, weight, label, label[:, None], **wanted)
        (loss_.logp_N.sum() + (loss_.entropy_N.sum() if entropy_gradient else 0)).backward()  # type: ignore[union-attr]
    assert alive.bytes_most == logits_bytes(shape, 64)


def test_a_single_chunk_is_computed_once() -> None:
    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "mm" in str(func)
            return func(*args, **(kwargs or {}))

    counts = []
    for chunk in (N, N - 1):
        leaves, label, _ = inputs()
        with Products() as products:
            project(leaves[0], leaves[1], label, chunk=chunk).logp_N.sum().backward()
        counts.append(products.count)
    assert counts == [3, 8]  # forward and two gradients; two chunks of those, each forward twice
