"""Local engine against transformers' `generate`, its cache kept across turns; then whole rollouts by size and engine.

First the engine alone. All play the same made-up episodes with the same random model under greedy decoding: every turn
adds an observation, every response has its own length. The peers are `generate` with its cache carried from turn to
turn (left padding, a per-row stopping criterion; the fastest of `--keeping` counts), on a few turns `generate` on the
whole history, and for small batches transformers' continuous batching, which is given whole histories and shares their
prefixes. Seconds are CPU seconds of this process, so that other work on the machine does not decide, and the
sides take turns, so that it meets all of them.

Then whole rollouts of the embedded household, by wall clock: tokens per second by number of environments, length of
history, engine and number of processes, and the environments' share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from turngym.envs.core.tables import print_table
from turngym.scripts.bench.rollout.duel import Side, Tally, duel, positions
from turngym.scripts.bench.rollout.peers import Keeping
from turngym.scripts.bench.rollout.play import PlayBench
from turngym.scripts.bench.rollout.play import report as report_play
from turngym.scripts.bench.rollout.play import run as run_play
from turngym.scripts.bench.rollout.shapes import HALF_BILLION, LARGER, TINY, Shape, build_model


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Sizes of the episodes and of the models."""

    tiny: Shape = TINY
    """The model of the embedded quickstart, about."""
    larger: Shape = LARGER
    """One whose matrix products outweigh the overhead of each call."""
    half_billion: Shape = HALF_BILLION
    """The shape of a model of 0.5B parameters, with its vocabulary."""
    keeping: tuple[Keeping, ...] = ("packed", "static")
    """How the peer keeps its cache: holes closed after every turn, holes left (dynamic), a fixed size (static)."""
    system: int = 150
    """Ids before the first observation, the same in every episode: fed once and then copied, by the peer too."""
    observation: tuple[int, int] = (20, 30)
    """Shortest and longest observation, ids."""
    response: tuple[int, int] = (8, 20)
    """Shortest and longest response, ids."""
    threads: int = 1
    """Threads of torch."""
    seed: int = 0
    """Of the weights and the observations."""
    play: Annotated[PlayBench, tyro.conf.arg(name="play")] = field(default_factory=PlayBench)


HEADER = [
    "turns",
    "batch",
    "engine tok/s",
    "cache kept tok/s",
    "ratio",
    "whole history tok/s",
    "ratio",
    "same responses",
]


def cells(tally: Tally) -> list[str]:
    """One row of the table."""
    way, kept = tally.best
    equal = f"{tally.equal}/{tally.responses}"
    if tally.equal < tally.responses:
        # where the two best logits are so close, rounding decides
        equal += f" (gap {tally.gap:.0e})"
    return [
        str(tally.turns),
        str(tally.batch),
        f"{tally.engine.speed:.0f}",
        f"{kept.speed:.0f} ({way})",
        f"{tally.ratio(kept):.2f}x",
        *_pair(tally, tally.history),
        *_pair(tally, tally.continuous),
        equal,
    ]


def _pair(tally: Tally, side: Side) -> tuple[str, str]:
    return (f"{side.speed:.0f}", f"{tally.ratio(side):.1f}x") if side.tokens else ("-", "-")


def measure(shape: Shape, config: RolloutBench) -> list[Tally]:
    """All cells of one model."""
    model = build_model(shape, positions(config, max(shape.turns)), config.seed)
    tallies = []
    for turns in shape.turns:
        for batch in shape.batches:
            tallies.append(duel(model, shape, config, turns, batch, config.keeping))
            print("  " + "  ".join(cells(tallies[-1])), flush=True)
    return tallies


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(RolloutBench, args=list(argv), prog="turngym bench rollout", description=__doc__)
    import torch

    torch.set_num_threads(config.threads)
    shapes = {"tiny": config.tiny, "larger": config.larger, "half a billion": config.half_billion}
    for name, shape in shapes.items():
        if shape.layers:
            threads = f"{config.threads} thread{'s' if config.threads > 1 else ''}"
            print(f"{name} ({shape.layers} layers, width {shape.width}), tokens per CPU second, {threads}:", flush=True)
            print_table((HEADER, [cells(tally) for tally in measure(shape, config)]))
    if config.play.episodes:
        print(f"rollouts of {config.play.episodes} episodes, wall clock:", flush=True)
        report_play(run_play(config.play, config.threads))
    return 0
