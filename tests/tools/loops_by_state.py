"""Two detectors of loops on the same episodes: what each would leave, and what those turns would have taught.

python tests/tools/loops_by_state.py RUN/rollouts/*.jsonl --student STUDENT --teacher TEACHER

`turns` is LoopStop's: the same action on the same observation for the third time. `states` also sees circles of many
observations and repetitions in other words: an episode loops where a turn finds the environment in the same state for
the third time. Episodes need their states: `train gigpo` with `anchor = "state"` plays such ones, and learns nothing
where the learning rate is 0. KL is that of the student to the teacher, over the student's 50 likeliest ids and all
others as one, in nats a token: behind such a place, and at all other tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turngym.agents.models import load_model
from turngym.agents.playing.rollout import STATES
from turngym.envs.core.episode import Episode
from turngym.envs.core.loops import LOOP, loop_end
from turngym.envs.core.tables import print_table
from turngym.envs.core.trace import read_episodes
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.scorer import LocalScorer


def state_end(episode: Episode) -> int | None:
    """How many turns there are up to the one that is taken in the same state for the `LOOP`-th time; None where none
    is."""
    seen: Counter[str] = Counter()
    for turn, state in enumerate(episode.meta[STATES], 1):
        seen[state] += 1
        if seen[state] == LOOP:
            return turn
    return None


DETECTORS: dict[str, Callable[[Episode], int | None]] = {
    "turns": lambda episode: loop_end(episode.turns),
    "states": state_end,
}


def divergence(batch: RolloutBatch, student: LocalScorer, teacher: LocalScorer) -> NDArray[np.float64]:
    """KL(student || teacher) [N], nats, over the student's 50 likeliest ids and all others as one."""
    rows = [batch.input_ids_M[start:stop].astype(np.int32) for start, stop in pairwise(batch.row_offsets)]
    places = batch.position_M[batch.predictor_N] + 1
    positions = [places[batch.row_N == row] for row in range(len(rows))]
    own = student.topk(rows, positions, 50)
    other = teacher.gather(rows, positions, [row.ids for row in own])
    kl = []
    for p, q in zip(own, other, strict=True):
        inside = (np.exp(p.logp) * (p.logp - q.logp)).sum(1)
        kl.append(inside + np.exp(p.tail) * (p.tail - q.tail))
    found = np.empty(batch.tokens)
    for row, values in enumerate(kl):
        found[batch.row_N == row] = values
    return found


def compare(episodes: Sequence[Episode], batch: RolloutBatch, kl_N: NDArray[np.float64]) -> list[list[str]]:
    lines = []
    for name, end in DETECTORS.items():
        ends = [end(episodes[source]) for source in batch.source_E]
        end_E = np.array([np.iinfo(np.int64).max if at is None else at for at in ends])
        behind_N = batch.turn_N >= end_E[batch.episode_N]
        left = sum(episodes[source].depth - at for source, at in zip(batch.source_E, ends, strict=True) if at)
        inside, outside = kl_N[behind_N].mean() if behind_N.any() else np.nan, kl_N[~behind_N].mean()
        loops = sum(at is not None for at in ends)
        won = sum(episodes[source].success for source, at in zip(batch.source_E, ends, strict=True) if at)
        share = left / sum(episodes[source].depth for source in batch.source_E)
        figures = [f"{share:.0%}", f"{inside:.3f}", f"{outside:.3f}", f"{inside / outside:.2f}"]
        lines.append([name, f"{loops} of {len(ends)}", str(won), *figures])
    return lines


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+")
    parser.add_argument("--student", required=True)
    parser.add_argument("--teacher", required=True)
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one forward pass")
    options = parser.parse_args(argv)
    episodes = [episode for path in options.traces for episode in read_episodes(path)]
    if missing := [episode for episode in episodes if STATES not in episode.meta]:
        parser.error(f"{len(missing)} of {len(episodes)} episodes have no states")
    models = (load_model(Path(folder), dtype="float32", device="cpu") for folder in (options.student, options.teacher))
    student, teacher = (LocalScorer(model=model, max_tokens=options.max_tokens, chunk=256) for model in models)
    batch = pack(episodes)
    head = ["detector", "episodes that loop", "and win", "turns behind", "KL behind", "elsewhere", "ratio"]
    print_table((head, compare(episodes, batch, divergence(batch, student, teacher))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
