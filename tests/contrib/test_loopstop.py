"""LoopStop: what a loop is, what it teaches, when episodes leave it, and that a run does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from turngym.agents.worlds import load_world
from turngym.core.episode import SHORT, Episode, Status
from turngym.core.loops import loop_end
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.trace import read_trace
from turngym.trainers import train
from turngym.trainers.algorithm import DepthPlan, DepthState
from turngym.trainers.batch import pack
from turngym.trainers.contrib.loopstop import LoopDepth, LoopStats, LoopStopConfig, loop_stats
from turngym.trainers.metrics import read_metrics
from turngym.trainers.recorded_source import RecordedSource

MakeEpisode = Callable[..., Episode]
ROOM, DOOR, WALL = ("room", "look"), ("room", "open door"), ("wall", "look")


def said(make_episode: MakeEpisode, *answers: tuple[str, str | None], number: int = 0) -> Episode:
    """An episode of one token a turn that gives these (observation, action)."""
    episode = make_episode([([1], [2])] * len(answers), number=number)
    turns = zip(episode.turns, answers, strict=True)
    return replace(episode, turns=tuple(replace(turn, observation=seen, action=act) for turn, (seen, act) in turns))


@pytest.mark.parametrize(
    ("answers", "end"),
    [
        ([ROOM, ROOM], None),
        ([ROOM, ROOM, ROOM, ROOM], 3),
        # there and back again, and a slip in between
        ([DOOR, WALL, DOOR, WALL, ROOM, DOOR, WALL], 6),
        # another action in the same room, or the same action elsewhere
        ([ROOM, DOOR, ROOM, WALL, DOOR, WALL], None),
        # what could not be read is one action
        ([("?", None), ("?", None), ("?", None)], 3),
        ([], None),
    ],
)
def test_where_a_loop_closes(make_episode: MakeEpisode, answers: Sequence[tuple[str, str]], end: int | None) -> None:
    assert loop_end(said(make_episode, *answers).turns) == end


def test_what_loops_teach_by_hand(make_episode: MakeEpisode) -> None:
    looping, free = said(make_episode, ROOM, *[WALL] * 5), said(make_episode, DOOR, ROOM, number=1)
    # turns 4 and 5 come after the third WALL; the batch has its episodes in another order than they came in
    batch = pack([free, looping])
    kl = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 0.5, 0.25])
    assert loop_stats(batch, [free, looping], kl) == (0.375, 3.5, 1)
    again = replace(looping, sample=2)
    both = loop_stats(pack([free, looping, again]), [free, looping, again], np.concatenate([kl, kl[2:]]))
    assert both == (0.375, 3.9, 2)
    depth = LoopDepth(h_max=9, config=LoopStopConfig(min_loops=1))
    learned = depth.learn(depth.start(), depth.plan(depth.start(), 1), batch, [free, looping], kl)
    assert (learned.loop_ratio, learned.hbar, learned.probes) == (0.375 / 3.5, 9.0, 1)
    stopped = pack([free])
    found = loop_stats(stopped, [free], kl[:2])
    assert (np.isnan(found.loop_kl), found.rest_kl, found.loops) == (True, 1.5, 0)


def test_a_run_of_the_controller_by_hand() -> None:
    depth = LoopDepth(h_max=48)
    state = depth.start()
    # nothing is known: all episodes go on
    assert depth.plan(state, 1) == DepthPlan(cap=48, probe=True, full_depth=True)
    state = depth.update(state, LoopStats(0.1, 0.4, 4))
    assert state.loop_ratio == pytest.approx(0.25)
    shares = [depth.plan(state, step).loop_share for step in range(2, 18)]
    assert shares == [1.0] * 6 + [0.75] + [1.0] * 7 + [0.75] + [1.0]
    assert depth.plan(state, 16) == DepthPlan(cap=48, probe=True, full_depth=True, loop_share=0.75)
    assert depth.plan(state, 15) == DepthPlan(cap=48, full_depth=True, loop_share=1.0)
    # a step without loops to measure, or with too few, changes nothing
    assert depth.update(state, LoopStats(float("nan"), 0.4, 0)) == state
    assert depth.update(state, LoopStats(9.0, 0.4, 3)) == state
    state = depth.update(state, LoopStats(0.8, 0.4, 4))
    assert state.loop_ratio == pytest.approx(0.7 * 0.25 + 0.3 * 2.0)
    # loops that teach as much as other turns are played, and all episodes measure them
    state = depth.update(state, LoopStats(0.8, 0.4, 4))
    assert state.loop_ratio == pytest.approx(1.1425)
    assert (depth.plan(state, 25).loop_share, depth.plan(state, 25).probe) == (0.0, True)
    # the raw KL may be negative, and a batch that has none says nothing
    assert depth.update(depth.start(), LoopStats(-0.1, 0.4, 4)).loop_ratio == 0.0
    assert depth.update(depth.start(), LoopStats(0.1, 0.0, 4)) == depth.start()


def test_recorded_episodes_end_where_they_loop(make_episode: MakeEpisode) -> None:
    recorded = [said(make_episode, ROOM, *[WALL] * 5, number=number) for number in range(3)]
    asked = RolloutRequest(step=1, episodes=3, max_turns=6, plan=PlayPlan(leave_loops=2))
    played = RecordedSource(episodes=recorded, cut=True)(asked)
    assert [episode.depth for episode in played] == [6, 4, 4]
    assert [episode.meta.get(SHORT) for episode in played] == [None, 4, 4]


@pytest.mark.long
def test_a_run_leaves_its_loops(tmp_path: Path) -> None:
    """The shipped pair with loops: all go on in step 1, none in step 2, and in step 3 half of the episodes."""
    world = load_world("alfworld-loops")
    pair = {"student": world.checkpoint("student"), "teacher": world.checkpoint("teacher")}
    play = {**world.settings(), "max_turns": 16, "episodes": 16, "keep_rollouts": 3, "eval_every": 0, "threads": 1}
    own = {"probe_interval": 3, "probe_share": 0.5, "min_loops": 1}
    train("loopstop", **pair, **play, out=tmp_path / "run", steps=3, loopstop=own, tracker=None, progress=False)
    ends = []
    for step in (1, 2, 3):
        episodes = read_trace(tmp_path / "run" / "rollouts" / f"step_{step:06d}.jsonl")[0]
        ends.append([loop_end(episode.turns) for episode in episodes])
        left = [SHORT in episode.meta for episode in episodes]
        # an episode that may leave a loop never goes on in it; a loop that closes as the episode ends is no reason
        free = {1: 16, 2: 0, 3: 8}[step]
        assert not any(left[:free])
        for episode, end, gone in zip(episodes[free:], ends[-1][free:], left[free:], strict=True):
            assert gone == (end is not None and episode.status is Status.TRUNCATED_DEPTH)
            assert end is None or episode.depth == end
    assert any(end is not None and end < 16 for end in ends[1])
    rows = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert 0 < rows[0]["depth/loop_ratio"] < 1
    assert rows[0].get("depth/left_loops") is None
    assert rows[1]["depth/left_loops"] == sum(end is not None for end in ends[1]) / 16
    # none went on in a loop, so nothing was measured
    assert rows[1]["depth/loop_ratio"] == rows[0]["depth/loop_ratio"] != rows[2]["depth/loop_ratio"]
    assert DepthState(hbar=16.0).loop_ratio is None
