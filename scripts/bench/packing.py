"""Packed rows against padded ones: share of padding, and time of a forward and backward pass, by spread of lengths.

turngym bench packing
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from rich.console import Console
from rich.table import Table

from turngym.envs.core import Task, Verdict
from turngym.envs.episode import Episode, Status, Turn
from turngym.trainers.algorithm import Targets
from turngym.trainers.algorithms import sft
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.config import RunConfig
from turngym.trainers.models.microbatch import split_rows
from turngym.trainers.models.model import tiny_qwen3
from turngym.trainers.models.packing import padding, split_packed
from turngym.trainers.run.optimizer_step import Forward, accumulate

VOCABULARY = 512


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
    repeats: int = 5
    """Epochs of each kind, in turns; the median counts."""


def main(argv: Sequence[str]) -> int:
    options = tyro.cli(Options, args=list(argv), prog="turngym bench packing", description=__doc__)
    torch.set_num_threads(1)
    model = tiny_qwen3(VOCABULARY, width=options.width, layers=4, heads=4, max_length=32768)
    table = Table(
        title=f"{options.episodes} episodes, median {options.median} tokens; forward and backward, one thread"
    )
    for column in ("spread", "tokens per pass", "padded: empty", "packed: empty", "padded s", "packed s", "ratio"):
        table.add_column(column, justify="right")
    for spread in options.spreads:
        batch = episodes(options.episodes, options.median, spread)
        for budget in options.budgets:
            empty = [padding(batch, split(batch, budget)) for split in (split_rows, split_packed)]
            padded, packed = seconds(model, batch, budget, options.repeats)
            row = (f"{spread:g}", str(budget), f"{empty[0]:.0%}", f"{empty[1]:.0%}", f"{padded:.2f}", f"{packed:.2f}")
            table.add_row(*row, f"{padded / packed:.2f}x")
    Console(width=110).print(table)
    return 0


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
    """Median CPU seconds of this thread for padded and packed passes, taken in turns."""
    loss = sft.build(sft.SftConfig(), RunConfig()).token_loss
    weight_N = np.full(batch.tokens, 1 / batch.tokens)
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for packing in (False, True):
            model.zero_grad()
            start = time.thread_time()
            forward = Forward(micro_tokens=budget, packing=packing)
            accumulate(model, batch, targets=Targets(), weight_N=weight_N, token_loss=loss, forward=forward)
            spent[packing].append(time.thread_time() - start)
    return float(np.median(spent[False])), float(np.median(spent[True]))
