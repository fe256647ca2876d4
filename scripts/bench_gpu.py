"""One training step of the paper's shapes on one device, phase by phase, against `turngym plan`; it checks itself.

Models have random weights and episodes are made up: a random observation, then a response that the student samples. A
teacher scores them and the student is updated, by the trainer's own code. What environments cost is measured by
`turngym bench rollout`.

The checks: log-probabilities noted at sampling are the trainer's (to 0.06 in bfloat16, 1e-4 in float32), the loss is
finite and the weights move, memory stays below what `plan` says. The exit status is 1 where one fails. On a CPU the
same code runs with tiny shapes and without figures of memory.

Examples:
    turngym bench gpu --json gpu.json                          # H200, 1.7B student, 8B teacher, 64 episodes of 30 turns
    turngym bench gpu --device cpu --student tiny --teacher tiny --episodes 4 --turns 3 --response 8
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch

from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.numbers import Count, Million, Processes
from turngym.core.protocols import Policy
from turngym.core.spec import Spec
from turngym.core.tables import print_table
from turngym.core.task import Task, Verdict
from turngym.scripts.bench_episodes import made_up_turns, random_ids
from turngym.scripts.options import read_options
from turngym.trainers.model_shapes import shape_named
from turngym.trainers.training_costs import Chip, CostEstimate, StepWorkload, chip_named, estimate


class GpuBench(Spec):
    """Sizes of the step."""

    student: str = "1.7B"
    """Shape of the student (tiny, 0.6B, 1.7B, 4B, 8B, ...)."""
    teacher: str = "8B"
    """Shape of the teacher."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    chip: str = "H200"
    """What the plan is made for: A100-40, A100-80, H100, H200 or H20."""
    episodes: Million = 64
    """Episodes that are played side by side."""
    turns: Count = 30
    """Turns of each episode."""
    observation: Count = 140
    """Ids of each observation."""
    response: Count = 100
    """Ids that the student says per turn."""
    system: Count = 300
    """Ids before the first observation, the same in every episode."""
    micro_tokens: Count = 8192
    """Tokens per forward and backward pass."""
    head_chunk: Count = 1024
    """Rows of logits that exist at a time."""
    k: Count = 50
    """Ids of the teacher's support."""
    checkpointing: bool = True
    """Recompute activations in the backward pass, but for what attention gives."""
    threads: Processes = 4
    """Threads of torch on the CPU."""
    json: Path | None = None
    """Also write all figures here."""

    @property
    def on_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Precision of the weights that play and of the teacher's, as `turngym train` has it with `--rollout-dtype
        bfloat16 --teacher-dtype bfloat16 --autocast bfloat16` on a GPU."""
        return "float32" if self.on_cpu else "bfloat16"

    @property
    def vocab(self) -> int:
        """Ids that both models know."""
        return min(shape_named(self.student).vocab, shape_named(self.teacher).vocab)


def play(policy: Policy, bench: GpuBench) -> list[Episode]:
    """All episodes, side by side; responses are sampled at temperature 1."""
    rng, observation, response = np.random.default_rng(0), (bench.observation,) * 2, (bench.response,) * 2
    histories = [random_ids(rng, bench.system, bench.vocab)] * bench.episodes
    played: list[list[Turn]] = [[] for _ in histories]
    ends, start = [0] * bench.episodes, time.perf_counter()
    asked = made_up_turns(rng, bench.turns, histories, bench.vocab, observation, response)
    for number, turn in enumerate(asked):
        answers = policy.generate(turn.requests(number, temperature=1.0))
        for row, (prompt, answer) in enumerate(zip(turn.prompts, answers, strict=True)):
            played[row].append(
                Turn(
                    index=number,
                    observation="",
                    admissible=None,
                    response="",
                    action=None,
                    verdict=Verdict.MALFORMED,
                    reward=0.0,
                    prompt_span=(ends[row], len(prompt)),
                    response_span=(len(prompt), len(prompt) + len(answer.ids)),
                    logprobs=np.asarray(answer.logprobs, np.float32),
                )
            )
            ends[row] = len(prompt) + len(answer.ids)
            turn.answers.append(answer.ids)
        print(f"  turn {number + 1} of {bench.turns} after {time.perf_counter() - start:.1f} s", flush=True)
    return [
        Episode(
            task=Task(env_id="bench", task_id=f"episode{row}", sha256="made up", split="train", category="made up"),
            seed=0,
            sample=0,
            group=row,
            segments=(np.concatenate((turn.prompts[row], turn.answers[row])),),
            turns=tuple(turns),
            status=Status.COMPLETED,
            success=False,
            episode_return=0.0,
        )
        for row, turns in enumerate(played)
    ]


# --- One training step of OPD by the trainer's own code


def training_step(
    bench: GpuBench, student: Any, teacher: Any
) -> tuple[Callable[[list[Episode]], Any], Callable[[list[Episode], Any], Any]]:
    """The two halves of a step: episodes -> the teacher's targets; episodes and targets -> `UpdateResult`.

    On a GPU the update runs in bfloat16 autocast.
    """
    from turngym.trainers.algorithm import Scorers
    from turngym.trainers.algorithm_spec import BuildContext
    from turngym.trainers.algorithms import opd
    from turngym.trainers.batch import pack
    from turngym.trainers.optimizer_step import Forward, make_optimizer
    from turngym.trainers.optimizer_step import update as take_step
    from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
    from turngym.trainers.scorer import LocalScorer

    tokens, chunk = bench.micro_tokens, bench.head_chunk
    run = RunConfig(max_turns=4, micro_tokens=tokens, head_chunk=chunk)
    optimizer = make_optimizer(student, OptimizerConfig())
    algorithm = opd.build(opd.OpdConfig(), BuildContext(run=run, distill=DistillConfig(top_k=bench.k)))
    scorer = LocalScorer(model=teacher, max_tokens=tokens, chunk=chunk, vocab_size=bench.vocab)
    forward = Forward(
        micro_tokens=tokens, head_chunk=chunk, autocast=not bench.on_cpu, gradient_checkpointing=bench.checkpointing
    )

    def score(episodes: list[Episode]) -> Any:
        return algorithm.target_fn(pack(episodes), episodes, Scorers(student=scorer, teacher=scorer))

    def update(episodes: list[Episode], targets: Any) -> Any:
        batch = pack(episodes)
        return take_step(
            student,
            optimizer,
            batch,
            targets=targets,
            weight_N=algorithm.weight(batch, step=1, total_steps=1),
            token_loss=algorithm.token_loss,
            forward=forward,
            lr=1e-6,
        )

    return score, update


# --- The step in its phases

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Time, memory and work of one part of the step."""

    seconds: float
    """Wall clock on a GPU, CPU seconds on a CPU."""
    peak: float
    """Peak bytes allocated on the GPU; nan on a CPU."""
    tokens: int
    """Tokens sampled, or of the episodes."""
    flops: float = math.nan
    """Operations of the model itself: recomputation takes time but is not counted; nan where tokens are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """Everything that was measured."""

    phases: Mapping[str, Phase]
    """`rollout`, `teacher`, `update`."""
    tokens: int
    """Tokens of all episodes."""
    fed: int
    """Prompt ids that the engine computed."""
    gap: float
    """Largest difference between a log-probability at sampling and the trainer's, nats, in the first episodes."""
    loss: float
    moved: bool
    """Whether the update changed the weights."""
    matmul: float
    """Operations per second of large products on the same device."""


def measure(bench: GpuBench) -> StepFigures:
    """Plays, scores and updates; the log-probabilities of two episodes are compared."""
    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.models import set_torch_variables
    from turngym.trainers.model_shapes import random_model

    set_torch_variables()
    student: Any = random_model(shape_named(bench.student), dtype=torch.float32, device=bench.device)
    engine = LocalEngine(student, max_batch=bench.episodes, dtype=bench.dtype)
    episodes, seconds, peak = _timed(bench, partial(play, engine, bench))
    tokens = sum(len(episode.segments[0]) for episode in episodes)
    sampled = sum(turn.response_length for episode in episodes for turn in episode.turns)
    phases = {"rollout": Phase(seconds=seconds, peak=peak, tokens=sampled)}
    print(f"  rollout: {seconds:.2f} s", flush=True)
    fed, gap = engine.fed_tokens, _gap(student, episodes[:2], bench)
    del engine
    dtype = torch.float32 if bench.on_cpu else torch.bfloat16
    teacher = random_model(shape_named(bench.teacher), dtype=dtype, device=bench.device, seed=1)
    score, update = training_step(bench, student, teacher)
    before = next(student.parameters()).detach().flatten()[:4096].clone()
    # the first step is not timed: it loads kernels and allocates the optimizer's state
    update(episodes[:1], score(episodes[:1]))
    targets, seconds, peak = _timed(bench, lambda: score(episodes))
    flops = shape_named(bench.teacher).forward_flops(tokens, tokens / len(episodes) / 2, sampled)
    phases["teacher"] = Phase(seconds=seconds, peak=peak, tokens=tokens, flops=flops)
    print(f"  teacher: {seconds:.2f} s", flush=True)
    result, seconds, peak = _timed(bench, lambda: update(episodes, targets))
    # forward, and backward twice that
    flops = 3 * shape_named(bench.student).forward_flops(tokens, tokens / len(episodes) / 2, sampled)
    phases["update"] = Phase(seconds=seconds, peak=peak, tokens=tokens, flops=flops)
    print(f"  update: {seconds:.2f} s", flush=True)
    after = next(student.parameters()).detach().flatten()[:4096]
    return StepFigures(
        phases=phases,
        tokens=tokens,
        fed=fed,
        gap=gap,
        loss=result.loss,
        moved=not result.skipped and bool((after != before).any()),
        matmul=matmul_rate(bench.device),
    )


def _timed(bench: GpuBench, work: Callable[[], Result]) -> tuple[Result, float, float]:
    """Calls `work`; returns its result, its seconds and its peak of memory."""
    if not bench.on_cpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = clock(not bench.on_cpu)
    result = work()
    seconds = clock(not bench.on_cpu) - start
    return result, seconds, math.nan if bench.on_cpu else float(torch.cuda.max_memory_allocated())


def clock(cuda: bool) -> float:
    """Reads a clock in seconds: wall time after all work on the GPU has finished, or CPU time of this process."""
    if not cuda:
        return time.process_time()
    # the calls that start kernels return before the kernels have finished
    torch.cuda.synchronize()
    return time.perf_counter()


def matmul_rate(device: str) -> float:
    """Operations per second of the fastest of eight square matrix products: bfloat16 on a GPU, float32 on a CPU."""
    on_cpu = device == "cpu"
    size = 1024 if on_cpu else 8192
    left = torch.randn(size, size, device=device, dtype=torch.float32 if on_cpu else torch.bfloat16)
    best = float("inf")
    for _ in range(8):
        begin = clock(not on_cpu)
        left @ left
        best = min(best, clock(not on_cpu) - begin)
    return 2.0 * size**3 / best


def _gap(student: Any, episodes: Sequence[Episode], bench: GpuBench) -> float:
    """Largest difference between the engine's log-probabilities and the float32 model's of the same ids, in nats."""
    from turngym.trainers.scorer import LocalScorer

    ids = [episode.segments[0] for episode in episodes]
    places = [np.concatenate([np.arange(*turn.response_span) for turn in episode.turns]) for episode in episodes]
    ours = LocalScorer(model=student, max_tokens=bench.micro_tokens, chunk=bench.head_chunk).logprobs(ids, places)
    noted = [np.concatenate([turn.logprobs for turn in episode.turns]) for episode in episodes]
    return max(float(np.abs(scored - recorded).max()) for scored, recorded in zip(ours, noted, strict=True))


# --- The command

GAP = {"bfloat16": 0.06, "float32": 1e-4}
"""Most nats between a log-probability at sampling and the trainer's."""
LIBRARIES = 0.2e9
"""Bytes that cuBLAS keeps whatever the model is; models of the smallest shapes take less than that in all."""


@dataclass(frozen=True, slots=True)
class StepCheck:
    """One condition that a step must meet."""

    what: str
    holds: bool
    found: str


def checks(measured: StepFigures, bench: GpuBench, plan: CostEstimate | None) -> list[StepCheck]:
    """Returns all checks; the check of memory needs a plan."""
    gap, most = measured.gap, GAP[bench.dtype]
    listed = [
        StepCheck(f"log-probabilities at sampling are the trainer's to {most:g}", gap <= most, f"{gap:.1e}"),
        StepCheck("the loss is finite", math.isfinite(measured.loss), f"{measured.loss:.4f}"),
        StepCheck("the weights have moved", measured.moved, str(measured.moved)),
    ]
    if plan is not None:
        peak = max(phase.peak for phase in measured.phases.values())
        planned_peak = plan.peak + LIBRARIES
        held = f"{peak / 1e9:.1f} of {planned_peak / 1e9:.1f} GB"
        listed.append(StepCheck("memory is at most what is planned", peak <= planned_peak, held))
    return listed


def planned(bench: GpuBench) -> CostEstimate:
    """The estimate of `turngym plan` for a step of these sizes."""
    work = StepWorkload(
        episodes=bench.episodes,
        turns=bench.turns,
        observation=bench.observation + round(bench.system / bench.turns),
        response=bench.response,
        micro_tokens=bench.micro_tokens,
        head_chunk=bench.head_chunk,
        checkpointing=bench.checkpointing,
        slots=bench.episodes,
        rollout_dtype=bench.dtype,
        teacher_dtype=bench.dtype,
        precision="float32" if bench.on_cpu else "autocast",
    )
    return estimate(shape_named(bench.student), shape_named(bench.teacher), chip_named(bench.chip), 1, work)


HEADER = ["phase", "seconds", "peak GB", "tokens/s", "share of large products"]


def table_rows(measured: StepFigures, plan: CostEstimate | None, chip: Chip) -> list[list[str]]:
    """The table's lines; shares are of what the same device reaches in large products, and of the chip's peak."""
    lines = []
    for name, phase in measured.phases.items():
        speed = phase.flops / phase.seconds
        peak = "" if plan is None else f", {speed / chip.flops:.0%} of {chip.name}'s"
        share = "-" if math.isnan(speed) else f"{speed / 1e12:.2f} TFLOP/s, {speed / measured.matmul:.0%}{peak}"
        held = "-" if math.isnan(phase.peak) else f"{phase.peak / 1e9:.1f}"
        lines.append([name, f"{phase.seconds:.2f}", held, f"{phase.tokens / phase.seconds:,.0f}", share])
    if plan is not None:
        for name, seconds, bytes_held in (
            ("planned: rollout", plan.rollout_s, plan.rollout),
            ("planned: teacher", plan.teacher_s, plan.scoring),
            ("planned: update", plan.update_s, plan.update),
        ):
            lines.append([name, f"{seconds:.2f}", f"{(plan.states + bytes_held) / 1e9:.1f}", "-", "-"])
    return lines


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench gpu`; the exit status is 1 where a check fails."""
    bench = read_options(GpuBench, argv, prog="turngym bench gpu", about=__doc__)
    if not bench.on_cpu and not torch.cuda.is_available():
        raise TurngymError(f"--device {bench.device}: torch sees no GPU here; valid: cpu")
    torch.set_num_threads(bench.threads)
    measured = measure(bench)
    plan = None if bench.on_cpu else planned(bench)
    name = bench.device if bench.on_cpu else torch.cuda.get_device_name()
    title = (
        f"{bench.student} student, {bench.teacher} teacher on {name}: {bench.episodes} episodes of {bench.turns} "
        f"turns, {measured.tokens:,} tokens, {measured.fed:,} read to play"
    )
    print_table((HEADER, table_rows(measured, plan, chip_named(bench.chip))), title)
    listed = checks(measured, bench, plan)
    for check in listed:
        print(f"{'ok' if check.holds else 'FAILED':>6}  {check.what}: {check.found}", flush=True)
    if bench.json is not None:
        figures = {
            "device": name,
            "cpus": os.cpu_count(),
            "step": asdict(measured),
            "plan": None if plan is None else asdict(plan),
            "checks": [asdict(check) for check in listed],
        }
        bench.json.write_text(json.dumps(figures, indent=1) + "\n")
    return int(not all(check.holds for check in listed))
