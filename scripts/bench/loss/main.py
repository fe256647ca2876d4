"""Top-K reverse KL against cross-entropy and a loss on all logits: time and peak memory; whole models on a GPU.

First part: the head and the loss alone, by number of supervised tokens, at the vocabulary of Qwen3. Every loss has the
same random hidden states and heads, runs forward and backward in a process of its own, and both reverse KLs include
the teacher's head. "Matrix products alone" is what no loss can do without.

Second part (--student): one training step of OPD, teacher's scores and student's update, by the trainer's own code on
models of real shapes with random weights; its share of the bf16 matmul rate that the same device reaches.

Examples:
    turngym bench loss
    turngym bench loss --device cuda --student 1.7B --teacher 8B
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import tyro

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.tables import Table, print_table
from turngym.scripts.bench.loss.head import LOSSES, HeadCost, HeadJob, measure
from turngym.scripts.bench.loss.models import ModelJob, measure_models, models_table

PEERS = ("cross-entropy, all logits", "reverse KL, all logits")
OURS = "reverse KL top-K, turngym"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossBench:
    """Sizes of both parts."""

    tokens: tuple[int, ...] = (256, 1024, 2048)
    """Supervised tokens; one row of the table each."""
    vocab: int = 151_936
    """Size of the vocabulary."""
    width: int = 1024
    """Width of the hidden states, student and teacher alike."""
    k: int = 50
    """Ids of the teacher's support."""
    chunk: int = 256
    """Rows of logits that exist at a time in our losses (`--head-chunk`)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of hidden states and heads; auto: float32 on a CPU, bfloat16 on a GPU. Log-probabilities are float32 anyway."""
    device: str = "cpu"
    """`cpu` or `cuda`."""
    threads: int = 1
    """Threads of torch on the CPU."""
    repeats: int = 2
    """Of each loss; the fastest counts."""
    student: str | None = None
    """Shape of the second part's student (tiny, 0.6B, 1.7B, 4B, 8B, ...); by default the part is left out."""
    teacher: str | None = None
    """Shape of its teacher; by default the student's."""
    episodes: int = 8
    """Episodes of the second part's step."""
    length: int = 8192
    """Tokens of each; half of them are the student's own."""
    micro_tokens: int = 8192
    """Tokens per forward and backward pass."""
    checkpointing: bool = True
    """Recompute activations."""
    json: Path | None = None
    """Also write all figures here."""


def head_table(found: dict[tuple[int, str], HeadCost]) -> Table:
    """One line per loss and number of tokens, with ratios to cross-entropy on all logits."""
    header = ["loss", "tokens", "seconds", "of cross-entropy", "peak MB", "of cross-entropy"]
    rows = []
    for (tokens, name), cost in sorted(found.items(), key=lambda item: (item[0][0], list(LOSSES).index(item[0][1]))):
        base = found[tokens, PEERS[0]]
        times = f"{cost.seconds / base.seconds:.2f}x"
        rows.append(
            [
                *(name, f"{tokens:,}", f"{cost.seconds:.3f}", times),
                *(f"{cost.megabytes:,.0f}", f"{cost.megabytes / base.megabytes:.2f}x"),
            ]
        )
    return header, rows


def main(argv: Sequence[str]) -> int:
    """Run `turngym bench loss`; the exit status is 1 if our loss needs more memory than the one on all logits."""
    options = tyro.cli(LossBench, args=list(argv), prog="turngym bench loss", description=__doc__)
    check_device(options.device)
    on_cpu = options.device == "cpu"
    dtype = options.dtype if options.dtype != "auto" else "float32" if on_cpu else "bfloat16"
    print(
        f"{os.cpu_count()} cores, load average before {os.getloadavg()[0]:.1f}, {options.device}, {dtype}", flush=True
    )
    found = {}
    for tokens in options.tokens:
        for name in LOSSES:
            job = HeadJob(
                loss=name,
                tokens=tokens,
                vocab=options.vocab,
                width=options.width,
                k=options.k,
                chunk=options.chunk,
                dtype=dtype,
                device=options.device,
                threads=options.threads,
                repeats=options.repeats,
            )
            found[tokens, name] = cost = measure(job)
            print(f"  {tokens:>6,} {name:<36} {cost.seconds:8.3f} s {cost.megabytes:8,.0f} MB", flush=True)
    print_table(head_table(found), f"vocabulary {options.vocab:,}, width {options.width:,}, top {options.k}")
    figures = {"head": [{"tokens": t, "name": n, **asdict(cost)} for (t, n), cost in found.items()]}
    if options.student is not None:
        job_of_models = ModelJob(
            student=options.student,
            teacher=options.teacher or options.student,
            episodes=options.episodes,
            length=options.length,
            micro_tokens=options.micro_tokens,
            head_chunk=options.chunk,
            k=options.k,
            checkpointing=options.checkpointing,
            device=options.device,
            threads=options.threads,
        )
        step = measure_models(job_of_models)
        print_table(models_table(job_of_models, step), "one step of OPD on random weights")
        figures["models"] = [asdict(step)]
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return _verdict(found, max(options.tokens, default=0))


def _verdict(found: dict[tuple[int, str], HeadCost], tokens: int) -> int:
    if not found:
        return 0
    ours = found[tokens, OURS]
    for peer in PEERS:
        other = found[tokens, peer]
        less, time = other.megabytes / ours.megabytes, ours.seconds / other.seconds
        print(f"{tokens:,} tokens: {OURS} takes {time:.2f}x the time and 1/{less:.1f} of the memory of {peer}")
    smaller = ours.megabytes < found[tokens, PEERS[1]].megabytes
    print(f"target: less memory than on all logits at {tokens:,} tokens: {'met' if smaller else 'MISSED'}")
    return 0 if smaller else 1


def check_device(device: str) -> None:
    """Raise TurngymError for a GPU that torch does not see."""
    import torch

    if device != "cpu" and not torch.cuda.is_available():
        raise TurngymError(f"--device {device}: torch sees no GPU here; valid: cpu")
