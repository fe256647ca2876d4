"""The embedded search worlds of the quickstart: the expert, the panels, and what training may not see."""

from __future__ import annotations

from collections import Counter

import gymnasium as gym
import pytest
from late import late

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents.worlds import load_world
from turngym.envs.panels import load_panel, verify_panel
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.questions import assert_disjoint
from turngym.envs.search.sources import open_source

WORLD = load_world("search")


def base_env(split: str) -> SearchEnv:
    base = gym.make(WORLD.env_id, split=split, max_turns=WORLD.max_turns, **WORLD.make).unwrapped
    assert isinstance(base, SearchEnv)
    return base


def test_the_expert_needs_half_of_the_turns_and_searches_only_what_it_has_read() -> None:
    env = base_env(WORLD.split)
    for task in env.task_ids()[::720]:
        read, _ = env.reset(options={"task": task})
        turns, over = 0, False
        while not over:
            action = env.expert_action()
            assert action is not None
            assert action.partition(">")[2].rpartition("<")[0] in read
            observation, _, over, _, _ = env.step(action)
            read += observation
            turns += 1
        assert env.success
        assert turns <= WORLD.max_turns // 2


@pytest.mark.parametrize(
    ("name", "families"),
    late(
        [
            ("search-quickstart", {"popqa-like": 20, "2wiki-like": 60, "musique-like": 20}),
            (
                "search-world-eval",
                dict.fromkeys(("popqa-like", "nq-like", "2wiki-like", "hotpot-like", "musique-like"), 40),
            ),
        ],
        "search-quickstart",
    ),
)
def test_panels_are_what_the_generator_makes(name: str, families: dict[str, int]) -> None:
    panel = load_panel(name)
    assert Counter(task.category for task in panel.tasks) == families
    env = panel.make_env()
    assert verify_panel(panel, env) == []
    env.close()


@pytest.mark.long
@pytest.mark.parametrize(("name", "config"), [("search-quickstart", "tiny"), ("search-world-eval", "full")])
def test_no_panel_question_is_in_training(name: str, config: str) -> None:
    panel = load_panel(name)
    everything = open_source(config=config, split="all").questions
    train = [question for question in everything.values() if question.split == "train"]
    evaluation = [everything[task] for task in panel.task_ids]
    assert {question.split for question in evaluation} == {"eval"}
    assert_disjoint(train, evaluation)
    trained = {(answer, hop) for question in train for answer in question.golden_answers for hop in question.hops}
    held = {
        (question.golden_answers[0], question.hops[-1]) for question in evaluation if " or " not in question.question
    }
    assert not trained & held
