"""One training step in its three phases on one device: playing, the teacher's scores, the update."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from turngym.envs.core.episode import Episode
from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.gpu.play import begin, play
from turngym.scripts.bench.loss.models import clock, made_up_episodes, make_step, matmul_rate
from turngym.trainers.plan import ModelShape

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepJob:
    """Sizes of the step; precisions as `turngym train` has them with `--rollout-dtype bfloat16 --teacher-dtype bfloat16
    --autocast bfloat16` on a GPU, float32 throughout on a CPU."""

    student: ModelShape
    teacher: ModelShape
    device: str
    response: int
    system: int
    micro_tokens: int
    head_chunk: int
    k: int
    checkpointing: bool
    folder: Path | None = None
    """Where the student lies, or will lie, for servers."""
    policy_server: str = ""
    """Servers that play it, too."""

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Of the weights that play and of the teacher's."""
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def vocab(self) -> int:
        """Ids that both models know."""
        return min(self.student.vocab, self.teacher.vocab)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one part of the step took."""

    seconds: float
    """Of the GPU, or CPU seconds."""
    peak: float
    """Most bytes on the GPU meanwhile; nan on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Everything that was measured."""

    rollout: Phase
    served: Phase | None
    """The same episodes' environments, played by a server."""
    teacher: Phase
    update: Phase
    episodes: int
    turns: int
    tokens: int
    """Of all episodes."""
    sampled: int
    """By the student."""
    fed: int
    """Prompt ids that the engine computed."""
    gap: float
    """Largest difference between a log-probability at sampling and the trainer's, nats, in the first episodes."""
    served_gap: float
    """The same of the server's; 0 without one."""
    loss: float
    moved: bool
    """Whether the update changed the weights."""
    matmul: float
    """Operations per second of large products on the same device."""
    teacher_flops: float
    update_flops: float
    """Of the models: what is computed again takes time and counts for nothing."""


def measure(job: StepJob, envs: Sequence[Any], task_ids: Sequence[str]) -> StepFigures:
    """Play one episode in each of `envs`, score and update; the log-probabilities of two episodes are compared."""
    import torch

    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.trainers.plan import random_model

    student = student_of(job)
    engine = LocalEngine(student, max_batch=len(envs), dtype=job.dtype)
    rows = begin(envs, task_ids, job.vocab, job.system)
    episodes, rollout = _timed(job, partial(play, engine, rows, job.response, job.vocab))
    fed = engine.fed_tokens
    gap = _gap(student, episodes[:2], job)
    del engine
    served, served_gap = _served(job, student, envs, task_ids)
    dtype = torch.float32 if job.on_cpu else torch.bfloat16
    teacher = random_model(job.teacher, dtype=dtype, device=job.device, seed=1)
    step = make_step(
        student,
        teacher,
        micro_tokens=job.micro_tokens,
        head_chunk=job.head_chunk,
        k=job.k,
        checkpointing=job.checkpointing,
        vocab=job.vocab,
    )
    before = next(student.parameters()).detach().flatten()[:4096].clone()
    # loads kernels and allocates the optimizer's state
    step(made_up_episodes(1, min(1024, job.micro_tokens), job.vocab))
    targets, scored = _timed(job, lambda: step.score(episodes))
    result, updated = _timed(job, lambda: step.update(episodes, targets))
    lengths = [len(episode.segments[0]) for episode in episodes]
    sampled = sum(turn.response_length for episode in episodes for turn in episode.turns)
    context = float(np.mean(lengths)) / 2
    flops = [shape.forward_flops(sum(lengths), context, sampled) for shape in (job.student, job.teacher)]
    first = next(student.parameters()).detach().flatten()[:4096]
    return StepFigures(
        rollout=rollout,
        served=served,
        served_gap=served_gap,
        teacher=scored,
        update=updated,
        episodes=len(episodes),
        turns=sum(len(episode.turns) for episode in episodes),
        tokens=sum(lengths),
        sampled=sampled,
        fed=fed,
        gap=gap,
        loss=result.loss,
        moved=not result.skipped and bool((first != before).any()),
        matmul=matmul_rate(job.device),
        teacher_flops=flops[1],
        update_flops=3 * flops[0],
    )


def student_of(job: StepJob) -> Any:
    """The student of random weights, in `job.folder` too where there is one; what lies there already is taken."""
    import torch

    from turngym.agents.models import load_policy
    from turngym.agents.worlds import load_world
    from turngym.trainers.models import load_model
    from turngym.trainers.plan import random_model

    if job.folder is not None and (job.folder / "config.json").exists():
        return load_model(job.folder, dtype="float32", device=job.device)
    student: Any = random_model(job.student, dtype=torch.float32, device=job.device)
    if job.folder is not None:
        student.save_pretrained(job.folder)
        # a server wants one, though ids go in and out
        load_policy(load_world("alfworld").checkpoint("student"))[1].save_pretrained(job.folder)
    return student


def _served(job: StepJob, student: Any, envs: Sequence[Any], task_ids: Sequence[str]) -> tuple[Phase | None, float]:
    from transformers import AutoTokenizer

    from turngym.agents.sglang.client import PolicyServer
    from turngym.agents.sglang.open_servers import eval_policy

    if not job.policy_server:
        return None, 0.0
    if job.folder is None:
        raise TurngymError("--policy-server needs --save: the folder with the weights that the server has")
    tokenizer = AutoTokenizer.from_pretrained(job.folder)
    policy = eval_policy(PolicyServer(policy_server=job.policy_server), job.folder, tokenizer, None)
    try:
        rows = begin(envs, task_ids, job.vocab, job.system)
        start = time.perf_counter()
        episodes = play(policy, rows, job.response, job.vocab)
        seconds = time.perf_counter() - start
    finally:
        policy.fleet.close()
    return Phase(seconds, float("nan")), _gap(student, episodes[:2], job)


def _timed(job: StepJob, work: Callable[[], Result]) -> tuple[Result, Phase]:
    import torch

    if not job.on_cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = clock(not job.on_cpu)
    result = work()
    seconds = clock(not job.on_cpu) - start
    return result, Phase(seconds, float("nan") if job.on_cpu else float(torch.cuda.max_memory_allocated()))


def _gap(student: Any, episodes: Sequence[Episode], job: StepJob) -> float:
    """Between what the engine noted and what the float32 model says of the same ids."""
    from turngym.trainers.scorer import LocalScorer

    ids = [episode.segments[0] for episode in episodes]
    places = [np.concatenate([np.arange(*turn.response_span) for turn in episode.turns]) for episode in episodes]
    ours = LocalScorer(model=student, max_tokens=job.micro_tokens, chunk=job.head_chunk).logprobs(ids, places)
    noted = [np.concatenate([turn.logprobs for turn in episode.turns]) for episode in episodes]
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, noted, strict=True))
