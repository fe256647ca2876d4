"""Agents on ALFWorld: experts always win generated games, random players do not; tokens and text agree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gymnasium as gym
import pytest

import turngym.envs
from turngym.agents.judges.env_judges import ExpertJudge
from turngym.agents.judges.hinted_prompts import HintedObservations
from turngym.agents.judges.judges import expert_hint
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, HumanAgent, RandomAgent, named_player
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.skills import HINT_HEAD
from turngym.core.episode import Status
from turngym.trainers.judged_episodes import requests

assert turngym.envs


def make(**options: Any) -> Any:
    return lambda: gym.make("turngym/ALFWorld-v0", disable_env_checker=True, **options)


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    env = make(part="eval")()
    ids = env.unwrapped.task_ids()[:12]
    env.close()
    return [Job(task_id=task_id, group=group) for group, task_id in enumerate(ids)]


def test_experts_win_every_game_and_random_players_hardly_any(jobs: list[Job]) -> None:
    assert all(e.success for e in rollout(jobs, make(), ExpertAgent()))
    searching = rollout(jobs, make(), ExpertAgent(expert=named_player("searching"), noise=0.2))
    assert all(e.success and e.meta["goal_rate"] == 1.0 for e in searching)
    lost = rollout(jobs, make(max_turns=20), RandomAgent())
    assert sum(e.success for e in lost) <= 1
    assert all(t.verdict.value == "ok" for e in lost for t in e.turns)


def test_hints_come_from_the_expert_who_demonstrates(jobs: list[Job]) -> None:
    searching = named_player("searching")
    noisy = ExpertAgent(expert=searching, noise=0.3)
    hinted = rollout(jobs[:6], lambda: HintedObservations(make()(), 1.0, searching), noisy)
    turns = [turn for episode in hinted for turn in episode.turns if turn.origin == "demonstration"]
    assert len(turns) > 20
    assert all(turn.observation.endswith(HINT_HEAD + expert_hint(turn.action or "")) for turn in turns)
    other = rollout(jobs[:6], lambda: HintedObservations(make()(), 1.0), noisy)
    wrong = [t for e in other for t in e.turns if t.origin == "demonstration"]
    assert any(expert_hint(turn.action or "") not in turn.observation for turn in wrong), "who sees all does otherwise"


def test_a_strict_expert_judge_has_no_neutral_scores(jobs: list[Job], make_tokenizer: Any) -> None:
    agent = ExpertAgent(ChatRenderer(make_tokenizer()), noise=0.7)
    played = rollout(jobs[:4], make(channel="text", max_turns=10), agent)
    episodes = [replace(e, turns=tuple(replace(t, origin="policy") for t in e.turns)) for e in played]
    asked = [request for episode in episodes for request in requests(episode, "score")]
    lenient, strict = (
        [judgment.votes[0] for judgment in ExpertJudge(make_env=make(channel="text"), strict=strict).judge(asked)]
        for strict in (False, True)
    )
    assert any("boxed{0}" in (vote or "") for vote in lenient)
    assert strict == [vote and vote.replace("boxed{0}", "boxed{-1}") for vote in lenient]


def test_a_person_sees_choices_and_quits_cleanly(jobs: list[Job]) -> None:
    lines = iter(["", "?", "?no such", "!", "look", "dance", "q"])
    said: list[tuple[str, str]] = []
    agent = HumanAgent(lambda: next(lines), lambda text, kind: said.append((kind, text)))
    episode = rollout(jobs[:1], make(), agent, slots=1)[0]
    assert (episode.depth, episode.status) == (2, Status.TRUNCATED_DEPTH)
    assert [t.verdict.value for t in episode.turns] == ["ok", "inadmissible"]
    assert episode.meta["error"] == "the player quit"
    kinds = [kind for kind, _ in said]
    assert kinds[:5] == ["note", "observation", "list", "list", "note"]
    assert "look" in said[2][1].split("\n")
    assert said[3][1] == "Nothing possible contains 'no such'."
