"""Episodes that `turngym eval` played and recorded, to be played again inside other people's evaluators."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from chat_server import Recorded

from turngym.agents import evaluate
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core.episode import Episode

PANEL = "alfworld-quickstart"
OPTIONS = {"limit": 6, "max_turns": 12}


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """`result`, `folder` of an evaluation of a noisy expert that writes its actions in tags, and `recorded`.

    A module with `SPREAD = False` plays the panel's first tasks.
    """
    options = {**OPTIONS, "spread": getattr(request.module, "SPREAD", True)}
    folder = tmp_path_factory.mktemp("played")
    agent = ExpertAgent(noise=0.4, mistakes=0.3)
    result = evaluate(PANEL, agent, channel="text", samples=1, out=folder, progress=False, **options)  # type: ignore[arg-type]
    return SimpleNamespace(result=result, folder=folder, recorded=Recorded(result.episodes))


def turns_of(episode: Episode) -> list[tuple[object, ...]]:
    """What an episode says, without ids and clocks."""
    return [(t.observation, t.response, t.action, t.verdict, t.reward, t.progress, t.admissible) for t in episode.turns]


def assert_same_episodes(theirs: Path, result: object) -> None:
    """The trace `theirs` holds the episodes of `result`: same tasks, turns, verdicts, rewards, ends; any order."""
    from turngym.agents.evaluation.compare import rescore
    from turngym.core.spec import diff

    again = rescore(theirs)
    ours = {e.task.task_id: e for e in result.episodes}  # type: ignore[attr-defined]
    assert len(again.episodes) == len(ours)
    for episode in again.episodes:
        one = ours[episode.task.task_id]
        assert turns_of(episode) == turns_of(one)
        ends = [(e.task, e.status, e.success, e.score, e.episode_return, e.seed, e.sample) for e in (episode, one)]
        assert ends[0] == ends[1]
        assert (episode.system, episode.final_observation) == (one.system, one.final_observation)
    assert again.scores == result.scores  # type: ignore[attr-defined]
    differs = diff(again.spec.play, result.spec.play)  # type: ignore[attr-defined]
    # how many tasks are played may be their own option
    assert not [path for path in differs if not path.startswith("tasks.sampling.")]


@pytest.fixture(scope="session", name="assert_same_episodes")
def assert_same_episodes_fixture() -> object:
    return assert_same_episodes
