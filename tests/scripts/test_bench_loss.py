"""`turngym bench loss`: its losses agree with each other, its memory is that of the loss, and its table is honest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs turngym[train]")

from turngym.envs.core.errors import TurngymError  # noqa: E402
from turngym.scripts.bench.loss import main as bench  # noqa: E402
from turngym.scripts.bench.loss.head import LOSSES, HeadCost, HeadJob, _inputs, measure  # noqa: E402
from turngym.scripts.bench.loss.models import ModelJob, made_up_episodes, measure_models  # noqa: E402
from turngym.trainers.batch import pack  # noqa: E402


def job(loss: str, tokens: int = 40, vocab: int = 300, k: int = 300) -> HeadJob:
    return HeadJob(
        loss=loss,
        tokens=tokens,
        vocab=vocab,
        width=16,
        k=k,
        chunk=16,
        dtype="float32",
        device="cpu",
        threads=1,
        repeats=1,
    )


def gradient(name: str) -> tuple[float, torch.Tensor]:
    given = _inputs(job(name))
    value = LOSSES[name](given)
    value.backward()
    assert given.hidden.grad is not None
    return float(value.detach()), given.hidden.grad


@pytest.mark.parametrize(
    ("ours", "peer"),
    [
        ("reverse KL top-K, turngym", "reverse KL, all logits"),
        ("cross-entropy, turngym", "cross-entropy, all logits"),
    ],
)
def test_what_is_compared_computes_the_same(ours: str, peer: str) -> None:
    """With the whole vocabulary as support, ours is the loss on all logits: value and gradient."""
    (value, slope), (other, other_slope) = gradient(ours), gradient(peer)
    assert value == pytest.approx(other, abs=1e-5)
    torch.testing.assert_close(slope, other_slope, atol=1e-6, rtol=1e-3)


@pytest.mark.long
def test_memory_is_that_of_the_loss() -> None:
    """Logits of 512 x 20,000 in fp32 take 41 MB; a loss on all of them holds several copies, ours a chunk."""
    full = measure(job("reverse KL, all logits", tokens=512, vocab=20_000, k=10))
    ours = measure(job("reverse KL top-K, turngym", tokens=512, vocab=20_000, k=10))
    assert full.megabytes > 3 * 41
    assert ours.megabytes < full.megabytes / 4


def test_a_loss_that_cannot_run_says_so() -> None:
    with pytest.raises(TurngymError, match="no such loss on 40 x 300 failed"):
        measure(job("no such loss"))


def test_table_gives_ratios_to_cross_entropy() -> None:
    costs = {(8, name): HeadCost(seconds=2.0, megabytes=10.0, loss=0.0) for name in LOSSES}
    costs[8, "cross-entropy, all logits"] = HeadCost(seconds=1.0, megabytes=40.0, loss=0.0)
    rows = bench.head_table(costs)[1]
    assert rows[1] == ["cross-entropy, all logits", "8", "1.000", "1.00x", "40", "1.00x"]
    assert rows[-1] == ["reverse KL top-K, turngym", "8", "2.000", "2.00x", "10", "0.25x"]


def test_a_step_on_a_shape_counts_its_tokens_and_operations() -> None:
    done = measure_models(
        ModelJob(
            student="tiny",
            teacher="tiny",
            episodes=2,
            length=64,
            micro_tokens=64,
            head_chunk=32,
            k=5,
            checkpointing=False,
            device="cpu",
            threads=1,
        )
    )
    assert done.tokens == 128
    # 128 tokens x 2 layers x (2 x 164,160 parameters + 4 x 128 x 32 of context) + 64 predicted x 2 x 600 x 128
    assert done.teacher_flops == 128 * 2 * (2 * 164_160 + 4 * 128 * 32) + 64 * 2 * 600 * 128
    assert done.update_flops == 3 * done.teacher_flops
    assert done.share > 0


def test_made_up_episodes_are_half_supervised() -> None:
    batch = pack(made_up_episodes(3, 64, vocab=50))
    assert (batch.episodes, len(batch.input_ids_M), batch.tokens) == (3, 192, 96)


@pytest.mark.long
def test_the_command_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "loss.json"
    status = bench.main(["--tokens", "64", "--vocab", "2000", "--width", "16", "--repeats", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    assert [row["name"] for row in found["head"]] == list(LOSSES)
    assert status in (0, 1)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(TurngymError, match="torch sees no GPU here; valid: cpu"):
        bench.main(["--device", "cuda"])
