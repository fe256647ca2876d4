"""One training step of OPD on models of real shapes with random weights, by the trainer's own code."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.tables import Table
from turngym.envs.core.task import Task, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelJob:
    """What the step works on; shapes are names of `trainers.shapes.SHAPES`."""

    student: str
    teacher: str
    episodes: int
    length: int
    """Tokens per episode, half of them supervised."""
    micro_tokens: int
    head_chunk: int
    k: int
    checkpointing: bool
    device: str
    threads: int
    """Of torch on the CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStep:
    """What it cost: seconds of the accelerator, or CPU seconds of all threads.

    Operations are the model's: recomputation takes time but counts for nothing.
    """

    teacher_s: float
    update_s: float
    teacher_flops: float
    update_flops: float
    matmul_flops: float
    """Operations per second of a large bf16 (on a CPU: float32) matrix product on the same device."""
    peak_mb: float
    """Most memory of the device (on a CPU: of the process), 10^6 bytes."""
    tokens: int

    @property
    def share(self) -> float:
        """Of the device's matmul rate, teacher and update together."""
        return (self.teacher_flops + self.update_flops) / (self.teacher_s + self.update_s) / self.matmul_flops


def measure_models(job: ModelJob) -> ModelStep:
    """Make the models, warm up on one episode, then time the teacher's scores and one update.

    On a GPU: teacher in bfloat16, student in float32 with bfloat16 autocast, as `turngym train --autocast bfloat16
    --teacher-dtype bfloat16`; on a CPU both in float32.
    """
    import torch

    from turngym.trainers.plan import random_model, shape_named

    torch.set_num_threads(job.threads)
    on_cpu = job.device == "cpu"
    shapes = shape_named(job.student), shape_named(job.teacher)
    student: Any = random_model(shapes[0], dtype=torch.float32, device=job.device)
    teacher = random_model(shapes[1], dtype=torch.float32 if on_cpu else torch.bfloat16, device=job.device, seed=1)
    vocab = min(shape.vocab for shape in shapes)
    step = make_step(
        student,
        teacher,
        micro_tokens=job.micro_tokens,
        head_chunk=job.head_chunk,
        k=job.k,
        checkpointing=job.checkpointing,
        vocab=vocab,
    )
    # the first step loads kernels and allocates the optimizer's state
    step(made_up_episodes(1, min(job.length, job.micro_tokens), vocab))
    if not on_cpu:
        torch.cuda.reset_peak_memory_stats()
    teacher_s, update_s = step(made_up_episodes(job.episodes, job.length, vocab))
    tokens, predicted = float(job.episodes * job.length), job.episodes * job.length / 2
    flops = [shape.forward_flops(tokens, job.length / 2, predicted) for shape in shapes]
    return ModelStep(
        teacher_s=teacher_s,
        update_s=update_s,
        teacher_flops=flops[1],
        # the backward pass has two products for each of the forward pass
        update_flops=3 * flops[0],
        matmul_flops=matmul_rate(job.device),
        peak_mb=_peak_mb(job.device),
        tokens=int(tokens),
    )


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What one step of the trainer works with."""

    student: Any
    optimizer: Any
    algorithm: Any
    teacher: Any
    forward: Any

    def __call__(self, episodes: list[Episode]) -> tuple[float, float]:
        """Seconds of the teacher's scores and of the update."""
        begin = clock(self.forward.autocast)
        targets = self.score(episodes)
        scored = clock(self.forward.autocast)
        self.update(episodes, targets)
        return scored - begin, clock(self.forward.autocast) - scored

    def score(self, episodes: list[Episode]) -> Any:
        """The teacher's targets."""
        from turngym.trainers.algorithm import Scorers
        from turngym.trainers.batch import pack

        return self.algorithm.target_fn(pack(episodes), episodes, Scorers(student=self.teacher, teacher=self.teacher))

    def update(self, episodes: list[Episode], targets: Any) -> Any:
        """One step of the optimizer; its `UpdateResult`."""
        from turngym.trainers.batch import pack
        from turngym.trainers.optimizer_step import update

        batch = pack(episodes)
        return update(
            self.student,
            self.optimizer,
            batch,
            targets=targets,
            weight_N=self.algorithm.weight(batch, step=1, total_steps=1),
            token_loss=self.algorithm.token_loss,
            forward=self.forward,
            lr=1e-6,
        )


def make_step(
    student: Any, teacher: Any, *, micro_tokens: int, head_chunk: int, k: int, checkpointing: bool, vocab: int
) -> TrainingStep:
    """A step of OPD; on a GPU the update is in bfloat16 autocast. `vocab` ids are known to both models."""
    from turngym.trainers.algorithms import opd
    from turngym.trainers.config import DistillConfig, OptimizerConfig, RunConfig
    from turngym.trainers.optimizer_step import Forward, make_optimizer
    from turngym.trainers.scorer import LocalScorer

    run = RunConfig(max_turns=4, micro_tokens=micro_tokens, head_chunk=head_chunk)
    return TrainingStep(
        student=student,
        optimizer=make_optimizer(student, OptimizerConfig()),
        algorithm=opd.build(opd.OpdConfig(), DistillConfig(top_k=k), run),
        teacher=LocalScorer(model=teacher, max_tokens=micro_tokens, chunk=head_chunk, vocab_size=vocab),
        forward=Forward(
            micro_tokens=micro_tokens,
            head_chunk=head_chunk,
            autocast=next(student.parameters()).device.type != "cpu",
            gradient_checkpointing=checkpointing,
        ),
    )


def made_up_episodes(count: int, length: int, vocab: int, turns: int = 4) -> list[Episode]:
    """Episodes of `length` random ids: each turn half observation, half response."""
    rng = np.random.default_rng(0)
    size = length // (2 * turns)
    task = Task(env_id="bench", task_id="made-up", sha256="0" * 64, split="train", category="bench")
    rows = []
    for number in range(count):
        played = tuple(
            Turn(
                index=place,
                observation="",
                admissible=None,
                response="",
                action="",
                verdict=Verdict.OK,
                reward=0.0,
                prompt_span=(2 * place * size, (2 * place + 1) * size),
                response_span=((2 * place + 1) * size, (2 * place + 2) * size),
                logprobs=np.full(size, -1.0, np.float32),
            )
            for place in range(turns)
        )
        ids = rng.integers(0, vocab, 2 * turns * size).astype(np.int32)
        rows.append(
            Episode(
                task=task,
                seed=0,
                sample=number,
                group=number,
                segments=(ids,),
                turns=played,
                status=Status.COMPLETED,
                success=False,
                episode_return=0.0,
            )
        )
    return rows


def matmul_rate(device: str, size: int = 0) -> float:
    """Operations per second of the best of a few square matrix products: bfloat16 on a GPU, float32 on a CPU."""
    import torch

    on_cpu = device == "cpu"
    size = size or (1024 if on_cpu else 8192)
    left = torch.randn(size, size, device=device, dtype=torch.float32 if on_cpu else torch.bfloat16)
    best = float("inf")
    for _ in range(8):
        begin = clock(not on_cpu)
        left @ left
        best = min(best, clock(not on_cpu) - begin)
    return 2.0 * size**3 / best


def models_table(job: ModelJob, step: ModelStep) -> Table:
    """The step in lines."""
    rate = step.tokens / (step.teacher_s + step.update_s)
    rows = [
        ["student, teacher", f"{job.student}, {job.teacher}"],
        ["tokens (half supervised)", f"{job.episodes} x {job.length:,}"],
        ["teacher's scores", f"{step.teacher_s:.2f} s, {step.teacher_flops / step.teacher_s / 1e12:.2f} TFLOP/s"],
        ["student's update", f"{step.update_s:.2f} s, {step.update_flops / step.update_s / 1e12:.2f} TFLOP/s"],
        ["tokens/s", f"{rate:,.0f}"],
        ["matmul rate of the device", f"{step.matmul_flops / 1e12:.2f} TFLOP/s"],
        ["share of it, recomputation not counted", f"{step.share:.1%}"],
        ["peak memory", f"{step.peak_mb:,.0f} MB"],
    ]
    return ["", job.device], rows


def clock(cuda: bool) -> float:
    """Seconds: of all work on the GPU that was asked for so far, or of this process's CPUs."""
    if not cuda:
        return time.process_time()
    import torch

    # kernels run on after the calls that start them have returned
    torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mb(device: str) -> float:
    if device != "cpu":
        import torch

        return torch.cuda.max_memory_allocated() / 1e6
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1.024e-3
