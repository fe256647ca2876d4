"""Readings: what is forgiven, what never is, and that a result says which one it was."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turngym.envs  # noqa: F401  (registers the ids)
from turngym.agents import evaluate
from turngym.agents.evaluation.compare import compare_recorded
from turngym.agents.evaluation.statistics import ScoreError
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.core.errors import TurngymError
from turngym.envs.guard import ActionGuard, guard_of
from turngym.envs.lenient_reading import read_action
from turngym.scripts.main import main

ALFWORLD, WEBSHOP, SEARCH = "turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"
MADE: dict[str, dict[str, Any]] = {ALFWORLD: {}, WEBSHOP: {"profile": "embedded-small"}, SEARCH: {"config": "tiny"}}


def made(env_id: str, **options: Any) -> ActionGuard:
    guard = guard_of(gym.make(env_id, **MADE[env_id], **options))
    guard.reset(seed=0)
    return guard


FOLDED = [
    (ALFWORLD, "<Action>Go to Desk 1</ACTION>", "go to desk 1"),
    (ALFWORLD, "<THINK>so</Think><action>LOOK</action>", "look"),
    (WEBSHOP, "<action>Search[Red Pan]</action>", "search[red pan]"),
    # a query keeps its case, tags do not
    (SEARCH, "<Search>Who wrote Hamlet</SEARCH>", "<search>Who wrote Hamlet</search>"),
]
LENIENT = [
    (ALFWORLD, "Look", "look"),
    (ALFWORLD, "I should look around first.\nAction: go to desk 1", "go to desk 1"),
    (ALFWORLD, "**My next action is:** `Go to desk 1`.", "go to desk 1"),
    (ALFWORLD, "```\ninventory\n```", "inventory"),
    (ALFWORLD, "1. look\n2. go to desk 1\nThat is my plan", "go to desk 1"),
    (ALFWORLD, "<think>I look around\nlook", "look"),
    (ALFWORLD, "<action>Action: > look</action>", "look"),
    (ALFWORLD, '{"action": "look"}', "look"),
    (ALFWORLD, '```json\n{"name": "alfworld_step", "arguments": {"action": "look"}}\n```', "look"),
    (WEBSHOP, "Action: Search[red pan]", "search[red pan]"),
    (SEARCH, "Search: capital of Portugal", "<search>capital of Portugal</search>"),
    (SEARCH, "Action: answer[Lisbon]", "<answer>Lisbon</answer>"),
]


@pytest.mark.parametrize(("env_id", "response", "action"), FOLDED)
def test_letter_case_does_not_count(env_id: str, response: str, action: str) -> None:
    assert made(env_id, channel="text").step(response)[4]["verdict"] in ("malformed", "inadmissible")
    for reading in ("folded", "lenient"):
        info = made(env_id, channel="text", reading=reading).step(response)[4]
        assert (info["action"], info["verdict"], info["reading"]) == (action, "ok", "folded")


@pytest.mark.parametrize(("env_id", "response", "action"), LENIENT)
def test_a_possible_action_is_found_in_any_form(env_id: str, response: str, action: str) -> None:
    assert made(env_id, channel="text", reading="folded").step(response)[4]["verdict"] in ("malformed", "inadmissible")
    info = made(env_id, channel="text", reading="lenient").step(response)[4]
    assert (info["action"], info["verdict"], info["reading"]) == (action, "ok", "lenient")


@pytest.mark.parametrize("channel", ["tool", "tool:glm", None])
def test_every_channel_is_forgiven(channel: str | None) -> None:
    guard = made(ALFWORLD, channel=channel, reading="lenient")
    assert guard.step("<action>Look</action>")[4]["action"] == "look"
    assert guard.read("Action: inventory").action == "inventory"


@pytest.mark.parametrize(
    ("response", "verdict", "action"),
    [
        # an action that was read is never replaced by something else that is possible
        ("look\n<action>dance</action>", "inadmissible", "dance"),
        ("<action>dance</action>\nlook", "inadmissible", "dance"),
        ("<think>look</think>I am done.", "malformed", None),
        ("I could look around, or go to desk 1 now.", "malformed", None),
        ("", "malformed", None),
    ],
)
def test_what_is_not_forgiven(response: str, verdict: str, action: str | None) -> None:
    info = made(ALFWORLD, channel="text", reading="lenient").step(response)[4]
    assert (info["verdict"], info["action"]) == (verdict, action)


def test_strict_reads_as_the_channel_does_and_says_nothing_of_it() -> None:
    guard = made(ALFWORLD, channel="text")
    assert "reading" not in guard.describe()
    assert guard.step("Action: look")[4]["verdict"] == "malformed"
    assert "reading" not in guard.step("<action>look</action>")[4]
    assert made(ALFWORLD, channel="text", reading="lenient").step("<action>look</action>")[4]["reading"] == "strict"
    with pytest.raises(TurngymError, match=r"reading is 'leniant'; .*Did you mean"):
        made(ALFWORLD, reading="leniant")


@given(st.text(alphabet='lok \n`*:<>/{}"action', max_size=40))
def test_no_text_raises_and_what_is_read_strictly_stays(text: str) -> None:
    for guard in guards():
        strict, _ = read_action(text, guard.channel, guard.base, "strict")
        lenient, found = read_action(text, guard.channel, guard.base, "lenient")
        if strict.action is not None and guard.base.check(guard.base.canonical(strict.action)) is None:
            assert (lenient, found) == (strict, "strict")


@functools.cache
def guards() -> list[ActionGuard]:
    return [made(env_id, channel="text", reading="lenient") for env_id in MADE]


def test_a_long_response_is_read_in_bounded_time() -> None:
    """Quadratic reading of these would take many minutes."""
    for guard in guards():
        for unit in ("action", "action:", "`", "\nlook at", "1. ", "<action", "{", "search[", "a" * 399 + "\n"):
            found, _ = read_action(unit * (200_000 // len(unit)), guard.channel, guard.base, "lenient")
            assert found.action is not None or found.reason


def test_a_refused_search_names_its_case() -> None:
    observation, *_, info = made(WEBSHOP).step("Search[Red Pan]")
    assert observation.startswith(
        'Invalid action: "Search[red pan]" begins with Search, which must be in lower case: search[...]. '
        'Nothing was done. Did you mean "search[red pan]"?'
    )
    assert info["verdict"] == "inadmissible"
    # the template of searches is nothing that could be done
    assert "Did you mean" not in made(WEBSHOP).step("serch[red pan]")[0]


class Talker(ExpertAgent):
    """The expert, in words of its own."""

    def respond(self, waiting: Any) -> Any:
        replies = super().respond(waiting)
        return [
            self.writer.write_text(row, f"Sure!\nAction: {reply.text}")
            for row, reply in zip(waiting, replies, strict=True)
        ]


def test_a_result_says_how_it_was_read(tmp_path: Path) -> None:
    episodes = rollout([Job(task_id="generated/small/eval/1")], lambda: gym.make(ALFWORLD, reading="lenient"), Talker())
    assert episodes[0].success
    assert episodes[0].meta["read_leniently"] == episodes[0].depth
    panel: dict[str, Any] = {"samples": 1, "limit": 2, "progress": False}
    lenient = evaluate("alfworld-quickstart", "expert", env_kwargs={"reading": "lenient"}, out=tmp_path / "a", **panel)
    assert lenient.spec.play.env.reading == "lenient"
    assert ", reading lenient (strict): 1 sample" in lenient.title
    assert json.loads((tmp_path / "a" / "results.json").read_text())["spec"]["play"]["env"]["reading"] == "lenient"
    assert 'reading = "lenient"' in (tmp_path / "a" / "spec.toml").read_text()
    with pytest.raises(TurngymError, match="reading"):
        evaluate("alfworld-quickstart", "expert", out=tmp_path / "a", **panel)
    words = ["--panel", "alfworld-quickstart", "--samples", "1", "--limit", "2", "--reading", "folded"]
    assert main(["eval", *words, "--out", str(tmp_path / "b")]) == 0
    with pytest.raises(ScoreError, match=r"reading 'lenient' and 'folded'"):
        compare_recorded(tmp_path / "a", tmp_path / "b")
