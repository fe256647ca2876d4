"""The losses that `turngym bench loss` compares, each on random hidden states, measured in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from turngym.envs.core.errors import TurngymError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadJob:
    """One loss at one size."""

    loss: str
    """A name in `LOSSES`."""
    tokens: int
    vocab: int
    width: int
    k: int
    """Ids of the support."""
    chunk: int
    """Rows of logits that may exist at a time, where a loss works in chunks."""
    dtype: str
    device: str
    threads: int
    repeats: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadCost:
    """Forward and backward of one loss: the least seconds of its repeats, and the most memory above its inputs."""

    seconds: float
    """CPU seconds of all threads, or seconds of the accelerator."""
    megabytes: float
    """10^6 bytes; gradients of hidden states and head included, which every loss has."""
    loss: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Hidden states [N, D] and heads [V, D] of student and teacher, and the sampled ids [N]."""

    hidden: Tensor
    head: Tensor
    teacher_hidden: Tensor
    teacher_head: Tensor
    label: Tensor
    job: HeadJob


def matmuls(given: Inputs) -> Tensor:
    """Only what no loss can do without: the products of the head, forward and backward, in chunks; no softmax."""
    from torch.utils.checkpoint import checkpoint

    parts = given.hidden.split(given.job.chunk)
    # a sum over few columns: a full one would add a pass over all logits to what is measured
    sums = [checkpoint(lambda rows: (rows @ given.head.T)[:, ::997].sum(), rows, use_reentrant=False) for rows in parts]
    total: Tensor = sum(sums)  # type: ignore[assignment]
    return total.float() / given.job.tokens


def cross_entropy(given: Inputs) -> Tensor:
    """What supervised fine-tuning does in most trainers: logits [N, V] in fp32."""
    from torch.nn.functional import cross_entropy

    return cross_entropy((given.hidden @ given.head.T).float(), given.label)


def full_reverse_kl(given: Inputs) -> Tensor:
    """Reverse KL on the logits of student and teacher, both [N, V] in fp32."""
    import torch

    from turngym.trainers.losses import full_reverse_kl

    with torch.no_grad():
        teacher = (given.teacher_hidden @ given.teacher_head.T).float().log_softmax(-1)
    return full_reverse_kl((given.hidden @ given.head.T).float().log_softmax(-1), teacher).mean()


def topk_reverse_kl(given: Inputs) -> Tensor:
    """Ours: the teacher's K best ids, then the student's log-probabilities there, both in chunks."""
    return _topk_reverse_kl(given, given.head)


def topk_reverse_kl_by_autograd(given: Inputs) -> Tensor:
    """The same with a head that may be anything: chunks left to autograd and recomputation."""
    return _topk_reverse_kl(given, lambda hidden: hidden @ given.head.T)


def _topk_reverse_kl(given: Inputs, head: Any) -> Tensor:
    from turngym.trainers.lm_head import project, topk
    from turngym.trainers.losses import topk_reverse_kl

    ids, logp = topk(given.teacher_hidden, given.teacher_head, given.job.k, chunk=given.job.chunk)
    own = project(given.hidden, head, given.label, ids, chunk=given.job.chunk)
    assert own.topk_logp_NK is not None  # ids were given
    return topk_reverse_kl(own.topk_logp_NK, logp).mean()


def chunked_cross_entropy(given: Inputs) -> Tensor:
    """Ours, for supervised fine-tuning and policy gradients: the label's log-probability, in chunks."""
    return _cross_entropy(given, given.head)


def cross_entropy_by_autograd(given: Inputs) -> Tensor:
    """The same with a head that may be anything."""
    return _cross_entropy(given, lambda hidden: hidden @ given.head.T)


def _cross_entropy(given: Inputs, head: Any) -> Tensor:
    from turngym.trainers.lm_head import project

    return -project(given.hidden, head, given.label, chunk=given.job.chunk).logp_N.mean()


LOSSES: dict[str, Callable[[Inputs], Tensor]] = {
    "matrix products alone": matmuls,
    "cross-entropy, all logits": cross_entropy,
    "cross-entropy, chunks by autograd": cross_entropy_by_autograd,
    "cross-entropy, turngym": chunked_cross_entropy,
    "reverse KL, all logits": full_reverse_kl,
    "reverse KL top-K, chunks by autograd": topk_reverse_kl_by_autograd,
    "reverse KL top-K, turngym": topk_reverse_kl,
}


def measure(job: HeadJob) -> HeadCost:
    """Run one job in a process of its own, so that its peak of memory is its own.

    Raises:
        TurngymError: the process ended early (out of memory, for one); its last words.
    """
    env = {**os.environ, "OMP_NUM_THREADS": str(job.threads), "MKL_NUM_THREADS": str(job.threads)}
    env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # or glibc keeps what was freed, and the peak is its book-keeping's
    command = [sys.executable, "-m", "turngym.scripts.bench.loss.head", json.dumps(asdict(job))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip()[-500:] or f"exit status {done.returncode}, no words (out of memory?)"
        raise TurngymError(f"{job.loss} on {job.tokens} x {job.vocab} failed: {words}")
    return HeadCost(**json.loads(done.stdout.splitlines()[-1]))


def _run(job: HeadJob) -> HeadCost:
    import torch

    torch.set_num_threads(job.threads)
    loss = LOSSES[job.loss]
    _once(loss, _inputs(replace(job, tokens=16, chunk=8)))  # two chunks: recomputation loads libraries of its own
    given = _inputs(job)
    before = _memory(job.device, reset=True)
    times, value = [], 0.0
    for _ in range(job.repeats):
        begin = _clock(job.device)
        value = _once(loss, given)
        times.append(_clock(job.device) - begin)
        given.hidden.grad = given.head.grad = None
    peak = _memory(job.device, reset=False)
    return HeadCost(seconds=min(times), megabytes=(peak - before) / 1e6, loss=value)


def _once(loss: Callable[[Inputs], Tensor], given: Inputs) -> float:
    value = loss(given)
    value.backward()
    return float(value.detach())


def _inputs(job: HeadJob) -> Inputs:
    import torch

    draw = torch.Generator(job.device).manual_seed(0)
    kind: Any = {"dtype": getattr(torch, job.dtype), "device": job.device, "generator": draw}

    def matrix(rows: int) -> Tensor:
        return torch.randn(rows, job.width, **kind)

    return Inputs(
        hidden=matrix(job.tokens).requires_grad_(),
        head=matrix(job.vocab).mul_(job.width**-0.5).requires_grad_(),
        teacher_hidden=matrix(job.tokens),
        teacher_head=matrix(job.vocab).mul_(job.width**-0.5),
        label=torch.randint(job.vocab, (job.tokens,), device=job.device, generator=draw),
        job=job,
    )


def _clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    import torch

    torch.cuda.synchronize()
    return time.perf_counter()


def _memory(device: str, *, reset: bool) -> float:
    """Bytes: now, if the record is reset with it, else the most since."""
    if device != "cpu":
        import torch

        if reset:
            torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.max_memory_allocated())
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return float(lines["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    print(json.dumps(asdict(_run(HeadJob(**json.loads(sys.argv[1]))))))
