"""Packed rows against padded ones: share of padding, and time of a forward and backward pass, by spread of lengths.

Last column: what `--packing auto` takes. With --traces the batches are recorded episodes, one row of the table each
instead of one for each spread, and --model the student that has to learn from them.

turngym bench packing
turngym bench packing --traces episodes.jsonl --model runs/student --budgets 2048 8192
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from turngym.envs.core.episode import Episode, Status, Turn
from turngym.envs.core.task import Task, Verdict
from turngym.envs.core.trace import read_trace
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithms import sft
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.config import Packing, RunConfig
from turngym.trainers.microbatch import padding, split_by
from turngym.trainers.models import load_model, tiny_qwen3
from turngym.trainers.optimizer_step import Forward, accumulate

VOCABULARY = 512
KINDS: tuple[Packing, ...] = ("off", "on", "auto")
COLUMNS = ("padded: empty", "packed: empty", "padded s", "packed s", "ratio", "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Settings of `turngym bench packing`."""

    episodes: int = 32
    """Episodes per batch."""
    median: int = 120
    """Median length, tokens."""
    spreads: tuple[float, ...] = (0.0, 0.5, 1.0)
    """Standard deviations of the logarithm of lengths; 0.5 is what ALFWorld's episodes have, 1 is wide."""
    budgets: tuple[int, ...] = (1024, 4096)
    """Padded tokens per pass (`--micro-tokens`)."""
    width: int = 256
    """Width of the model, 4 layers."""
    traces: tuple[Path, ...] = ()
    """Recorded episodes in the place of made-up ones; each file is a batch."""
    model: Path | None = None
    """Folder of a model in the place of a random one."""
    repeats: int = 5
    """Epochs of each kind, in turns; the fastest counts."""


def main(argv: Sequence[str]) -> int:
    options = tyro.cli(Options, args=list(argv), prog="turngym bench packing", description=__doc__)
    torch.set_num_threads(1)
    model = _model(options)
    table = Table(title=f"forward and backward, one thread (made-up episodes: median {options.median} tokens)")
    for column in (*("episodes", "tokens per pass"), *COLUMNS):
        table.add_column(column, justify="right")
    for name, batch in _batches(options):
        for budget in options.budgets:
            empty = [
                padding(batch, split_by(packing, model)(batch, budget, np.arange(batch.rows))) for packing in KINDS
            ]
            padded, packed = seconds(model, batch, budget, options.repeats)
            # the same share of padding means the same passes
            taken = "packed" if empty[2] == empty[1] != empty[0] else "padded"
            row = (f"{empty[0]:.0%}", f"{empty[1]:.0%}", f"{padded:.3f}", f"{packed:.3f}", f"{padded / packed:.2f}x")
            table.add_row(name, str(budget), *row, taken)
    Console(width=110).print(table)
    return 0


def _model(options: Options) -> torch.nn.Module:
    if options.model is not None:
        return load_model(options.model)
    return tiny_qwen3(VOCABULARY, width=options.width, layers=4, heads=4, max_length=32768)


def _batches(options: Options) -> Iterator[tuple[str, RolloutBatch]]:
    for path in options.traces:
        yield path.name, pack(read_trace(path)[0])
    for spread in () if options.traces else options.spreads:
        title = f"{options.episodes}, spread {spread:g}"
        yield title, episodes(options.episodes, options.median, spread)


def episodes(count: int, median: int, spread: float) -> RolloutBatch:
    """Episodes of one turn each, lengths log-normal, every second token supervised."""
    rng = np.random.default_rng(0)
    lengths = np.clip(median * np.exp(spread * rng.standard_normal(count)), 8, 8192).astype(int)
    return pack([_episode(number, int(length), rng) for number, length in enumerate(lengths)])


def _episode(number: int, length: int, rng: np.random.Generator) -> Episode:
    turn = Turn(
        index=0,
        observation="",
        admissible=None,
        response="",
        action="",
        verdict=Verdict.OK,
        reward=0.0,
        prompt_span=(0, length // 2),
        response_span=(length // 2, length),
        logprobs=np.zeros(length - length // 2, np.float32),
    )
    return Episode(
        task=Task(env_id="bench", task_id=f"bench/{number}", sha256="0" * 64, split="bench", category="bench"),
        seed=0,
        sample=0,
        group=number,
        segments=(rng.integers(0, VOCABULARY, length).astype(np.int32),),
        turns=(turn,),
        status=Status.COMPLETED,
        success=False,
        episode_return=0.0,
    )


def seconds(model: torch.nn.Module, batch: RolloutBatch, budget: int, repeats: int) -> tuple[float, float]:
    """Least CPU seconds of this thread for padded and packed passes, taken in turns."""
    loss = sft.build(sft.SftConfig(), RunConfig()).token_loss
    weight_N = np.full(batch.tokens, 1 / batch.tokens)
    spent: dict[Packing, list[float]] = {"off": [], "on": []}
    for _ in range(repeats):
        for packing in KINDS[:2]:
            model.zero_grad()
            start = time.thread_time()
            forward = Forward(micro_tokens=budget, packing=packing)
            accumulate(model, batch, targets=Targets(), weight_N=weight_N, token_loss=loss, forward=forward)
            spent[packing].append(time.thread_time() - start)
    return min(spent["off"]), min(spent["on"])
