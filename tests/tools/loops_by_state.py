"""Two detectors of loops on the same episodes: what each would leave, and what those turns would have taught.

python tests/tools/loops_by_state.py RUN/rollouts/*.jsonl --student STUDENT --teacher TEACHER --env turngym/WebShop-v0

`turns` is LoopStop's: the same action on the same observation for the third time. `states` also sees circles of many
observations and repetitions in other words: an episode loops where a turn finds the environment in the same state for
the third time; the recorded responses are played again for it. KL is that of the student to the teacher, over the
student's 50 likeliest ids and all others as one, in nats a token: behind such a place, and at all other tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turngym.agents.models import load_model
from turngym.agents.playing.env_maker import EnvSpec, env_maker
from turngym.agents.playing.rollout import STATES, Job, rollout
from turngym.agents.playing.scripted import ReplayAgent
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.loops import LOOP, loop_end
from turngym.core.strict_json import json_object
from turngym.core.tables import print_table
from turngym.core.trace import read_episodes
from turngym.trainers.batch import RolloutBatch, pack
from turngym.trainers.scorer import LocalScorer

FloatN = NDArray[np.float64]


def states_of(episode: Episode, make_env: EnvSpec) -> list[str]:
    """The hash of the environment's state before each turn of an episode that is played again.

    Raises TurngymError where it comes out otherwise: another environment, or other settings.
    """
    job = Job(task_id=episode.task.task_id, sample=episode.sample, seed=episode.seed, states=True)
    played = rollout([job], make_env, ReplayAgent([episode]), max_turns=episode.depth)[0]
    if [turn.observation for turn in played.turns] != [turn.observation for turn in episode.turns]:
        raise TurngymError(f"{episode.task.task_id} goes otherwise in {make_env.env_id} with {dict(make_env.kwargs)}")
    states: list[str] = played.meta[STATES]
    return states


def state_end(states: Sequence[str]) -> int | None:
    """How many turns there are up to the one that is taken in the same state for the `LOOP`-th time; None where none
    is."""
    seen: Counter[str] = Counter()
    for turn, state in enumerate(states, 1):
        seen[state] += 1
        if seen[state] == LOOP:
            return turn
    return None


def divergence(batch: RolloutBatch, student: LocalScorer, teacher: LocalScorer) -> FloatN:
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


def compare(
    episodes: Sequence[Episode], ends_of: Mapping[str, Sequence[int | None]], batch: RolloutBatch, kl_N: FloatN
) -> list[list[str]]:
    """A line of the table for each detector; `ends_of` has where it ends each of `episodes`."""
    lines = []
    for name, found in ends_of.items():
        ends = [found[source] for source in batch.source_E]
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
    parser.add_argument("--env", required=True)
    parser.add_argument("--env-kwargs", default="{}")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of one forward pass")
    options = parser.parse_args(argv)
    make_env = env_maker(options.env, **json_object("--env-kwargs", options.env_kwargs))
    episodes = [episode for path in options.traces for episode in read_episodes(path)]
    ends = {
        "turns": [loop_end(episode.turns) for episode in episodes],
        "states": [state_end(states_of(episode, make_env)) for episode in episodes],
    }
    models = (load_model(Path(folder), dtype="float32", device="cpu") for folder in (options.student, options.teacher))
    student, teacher = (LocalScorer(model=model, max_tokens=options.max_tokens, chunk=256) for model in models)
    batch = pack(episodes)
    head = ["detector", "episodes that loop", "and win", "turns behind", "KL behind", "elsewhere", "ratio"]
    print_table((head, compare(episodes, ends, batch, divergence(batch, student, teacher))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
