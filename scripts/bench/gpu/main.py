"""One training step of the paper's shapes on one device, phase by phase, against `turngym plan`; it checks itself.

Models have random weights. Episodes are played in a real environment: its observations are what is read, what the
student says is drawn from it and counts, what is done is a random admissible action. Then a teacher scores the episodes
and the student is updated, by the trainer's own code. Last comes `turngym bench loss` on the same device.

The checks: log-probabilities noted at sampling are the trainer's (to 0.06 in bfloat16, 1e-4 in float32), the loss is
finite and the weights move, episodes have the turns asked for, memory stays below what `plan` says. The exit status
is 1 where one fails. On a CPU the same code runs with tiny shapes and without figures of memory.

A server is measured beside the local engine in a second call, by wall clock: the first one writes the student
(`--save`), `turngym serve policy` serves that folder, and `--policy-server` names it.

Examples:
    turngym bench gpu --json gpu.json                          # H200, 1.7B student, 8B teacher, 64 episodes of 30 turns
    turngym bench gpu --save student --policy-server 127.0.0.1:30000 --loss-tokens
    turngym bench gpu --device cpu --student tiny --teacher tiny --episodes 4 --turns 3 --response 8 --loss-tokens
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tyro

from turngym.agents.playing.environments import EnvOptions, env_maker
from turngym.agents.sglang.open_servers import TOLERANCE
from turngym.envs.core.tables import print_table
from turngym.envs.guard import guard_of
from turngym.scripts.bench.gpu.measure import Phase, StepFigures, StepJob, measure
from turngym.scripts.bench.loss import main as loss
from turngym.trainers.plan import Chip, Estimate, Workload, chip_named, estimate, shape_named

GAP = {"bfloat16": 0.06, "float32": 1e-4}
"""Most nats between a log-probability at sampling and the trainer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuBench:
    """Sizes of the step."""

    student: str = "1.7B"
    """Shape of the student (tiny, 0.6B, 1.7B, 4B, 8B, ...)."""
    teacher: str = "8B"
    """Shape of the teacher."""
    device: str = "cuda"
    """`cuda` or `cpu`."""
    chip: str = "H200"
    """What the plan is made for: A100-40, A100-80, H100, H200 or H20."""
    episodes: int = 64
    """Played side by side."""
    turns: int = 30
    """Of each."""
    response: int = 100
    """Ids that the student says per turn."""
    system: int = 300
    """Ids before the first observation, the same in every episode."""
    micro_tokens: int = 8192
    """Tokens per forward and backward pass."""
    head_chunk: int = 1024
    """Rows of logits that exist at a time."""
    k: int = 50
    """Ids of the teacher's support."""
    checkpointing: bool = True
    """Recompute activations."""
    threads: int = 4
    """Of torch on the CPU."""
    env: EnvOptions = field(
        default_factory=lambda: EnvOptions(split="generated", env_kwargs='{"config": "small"}', on_invalid="noop")
    )
    """What is played; `--env.split valid_unseen --env.env-kwargs "{}" --env.data DIR` takes the real games."""
    loss_tokens: tuple[int, ...] = (256, 1024, 2048)
    """Of `turngym bench loss --tokens`; none leave it out."""
    save: Path | None = None
    """Folder of the student's weights: written if it has none, else read."""
    policy_server: str = ""
    """SGLang servers that play the weights of `--save`, measured too."""
    json: Path | None = None
    """Also write all figures here."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that must hold."""

    what: str
    holds: bool
    found: str


def checks(found: StepFigures, job: StepJob, turns: int, plan: Estimate | None) -> list[Check]:
    """All of them; those about memory only with a plan."""
    most = GAP[job.dtype]
    listed = [
        Check(f"log-probabilities at sampling are the trainer's to {most:g}", found.gap <= most, f"{found.gap:.1e}"),
        Check("the loss is finite", math.isfinite(found.loss), f"{found.loss:.4f}"),
        Check("the weights have moved", found.moved, str(found.moved)),
        Check(f"episodes have {turns} turns", found.turns == turns * found.episodes, f"{found.turns} in all"),
    ]
    if found.served is not None:
        holds = found.served_gap <= TOLERANCE["auto"]
        listed.append(Check("the server's log-probabilities are the trainer's", holds, f"{found.served_gap:.1e}"))
    if plan is not None:
        peak = max(phase.peak for phase in (found.rollout, found.teacher, found.update))
        held = f"{peak / 1e9:.1f} of {plan.peak / 1e9:.1f} GB"
        listed.append(Check("memory is at most what is planned", peak <= plan.peak, held))
    return listed


def planned(bench: GpuBench, found: StepFigures, job: StepJob) -> Estimate:
    """What `turngym plan` says of a step of these sizes."""
    length = found.tokens / found.turns
    work = Workload(
        episodes=found.episodes,
        turns=bench.turns,
        observation=max(1, round(length - bench.response)),
        response=bench.response,
        micro_tokens=bench.micro_tokens,
        head_chunk=bench.head_chunk,
        checkpointing=bench.checkpointing,
        slots=found.episodes,
        rollout_dtype=job.dtype,
        teacher_dtype=job.dtype,
        precision="float32" if job.on_cpu else "autocast",
    )
    return estimate(job.student, job.teacher, chip_named(bench.chip), 1, work)


def rows(found: StepFigures, plan: Estimate | None, chip: Chip) -> list[list[str]]:
    """The table's lines; shares are of what the same device reaches in large products, and of the chip's peak."""
    lines = [["rollout", *_cells(found.rollout), _rate(found.sampled, found.rollout), "-"]]
    if found.served is not None:
        lines.append(["rollout, server", *_cells(found.served), _rate(found.sampled, found.served), "-"])
    for name, phase, flops in (
        ("teacher", found.teacher, found.teacher_flops),
        ("update", found.update, found.update_flops),
    ):
        done = flops / phase.seconds
        peak = "" if plan is None else f", {done / chip.flops:.0%} of {chip.name}'s"
        share = f"{done / 1e12:.2f} TFLOP/s, {done / found.matmul:.0%}{peak}"
        lines.append([name, *_cells(phase), _rate(found.tokens, phase), share])
    if plan is not None:
        for name, seconds, held in (
            ("planned: rollout", plan.rollout_s, plan.rollout),
            ("planned: teacher", plan.teacher_s, plan.scoring),
            ("planned: update", plan.update_s, plan.update),
        ):
            lines.append([name, f"{seconds:.2f}", f"{(plan.states + held) / 1e9:.1f}", "-", "-"])
    return lines


def _cells(phase: Phase) -> list[str]:
    return [f"{phase.seconds:.2f}", "-" if math.isnan(phase.peak) else f"{phase.peak / 1e9:.1f}"]


def _rate(tokens: int, phase: Phase) -> str:
    return f"{tokens / phase.seconds:,.0f}"


HEADER = ["phase", "seconds", "peak GB", "tokens/s", "share of large products"]


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench gpu`; the exit status is 1 where a check fails."""
    bench = tyro.cli(GpuBench, args=list(argv), prog="turngym bench gpu", description=__doc__)
    import torch

    loss.check_device(bench.device)
    torch.set_num_threads(bench.threads)
    job = StepJob(
        student=shape_named(bench.student),
        teacher=shape_named(bench.teacher),
        device=bench.device,
        response=bench.response,
        system=bench.system,
        micro_tokens=bench.micro_tokens,
        head_chunk=bench.head_chunk,
        k=bench.k,
        checkpointing=bench.checkpointing,
        folder=bench.save,
        policy_server=bench.policy_server,
    )
    make = env_maker(bench.env.env, **{**bench.env.kwargs(), "max_turns": bench.turns})
    envs = [make() for _ in range(bench.episodes)]
    try:
        found = measure(job, envs, guard_of(envs[0]).task_ids())
    finally:
        for env in envs:
            env.close()
    plan = None if job.on_cpu else planned(bench, found, job)
    name = bench.device if job.on_cpu else torch.cuda.get_device_name()
    size = f"{found.episodes} episodes, {found.turns} turns, {found.tokens:,} tokens, {found.fed:,} read to play"
    title = f"{bench.student} student, {bench.teacher} teacher on {name}: {size}"
    print_table((HEADER, rows(found, plan, chip_named(bench.chip))), title)
    listed = checks(found, job, bench.turns, plan)
    for check in listed:
        print(f"{'ok' if check.holds else 'FAILED':>6}  {check.what}: {check.found}", flush=True)
    if bench.json is not None:
        figures = {
            "device": name,
            "cpus": os.cpu_count(),
            "step": asdict(found),
            "plan": None if plan is None else asdict(plan),
            "checks": [asdict(check) for check in listed],
        }
        bench.json.write_text(json.dumps(figures, indent=1) + "\n")
    if bench.loss_tokens:
        loss.main(["--device", bench.device, "--tokens", *map(str, bench.loss_tokens)])
    return int(not all(check.holds for check in listed))
