"""What is said where a cold model fails: answers that are cut or cannot be read, and steps without an update."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from turngym.agents import EvalResult, evaluate
from turngym.agents.evaluation.scores import hints
from turngym.agents.playing.agent import Conversation, Reply, ResponseWriter
from turngym.agents.worlds import load_world
from turngym.scripts.main import main
from turngym.trainers.metrics import read_metrics

STUDENT = str(load_world("alfworld").checkpoint("student"))
COLD = ["--max-turns", "2", "--max-new-tokens", "1", "--threads", "1"]
"""No action fits into one token."""


def said(capsys: pytest.CaptureFixture[str]) -> str:
    found = capsys.readouterr()
    return " ".join((found.out + found.err).split())


@pytest.mark.parametrize("verb", ["eval", "rollout"])
def test_answers_that_are_cut_and_cannot_be_read_are_explained(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--panel", "alfworld-quickstart", "--limit", "2", "--no-verify"] if verb == "eval" else ["--tasks", "2"]
    words = [verb, *asked, "--samples", "1", "--agent", f"model:{STUDENT}", *COLD]
    assert main([*words, "--system", "Write <action>look</action>.", "--out", str(tmp_path / "out")]) == 0
    text = said(capsys)
    assert "answers cut % │ 100.0" in text
    assert "100 % of the answers were cut at the limit on new tokens" in text
    assert "raise --max-new-tokens" in text
    assert "100 % of the answers could not be read as an action" in text
    assert "Expected is an action in tags, as in <action>look</action>. Instead, turn 0 of " in text
    missing = [
        option
        for option in ("show-admissible on,", "channel tool;", "reading lenient;", "examples FILE")
        if f"--{option}" not in text
    ]
    assert not missing
    if verb == "eval":
        assert json.loads((tmp_path / "out" / "results.json").read_text())["scores"]["cut_rate"] == 1.0


def test_a_context_that_the_first_prompt_fills_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["eval", "--panel", "alfworld-quickstart", "--limit", "2", "--no-verify", "--samples", "1"]
    assert main([*asked, "--agent", f"model:{STUDENT}", *COLD, "--max-context", "8"]) == 0
    assert "2 of 2 episodes ended before their first answer" in said(capsys)


def said_of(result: EvalResult) -> list[str]:
    return hints(result.scores, result.episodes, result.spec)


class Talks:
    """Says something in every turn, and never an action."""

    name, writer = "talks", ResponseWriter()

    def respond(self, waiting: Sequence[Conversation]) -> list[Reply]:
        return [Reply(text="The birthplace is a town.") for _ in waiting]

    def release(self, conversation: Conversation) -> None: ...


@pytest.mark.parametrize(
    ("world", "example"),
    [
        ("alfworld", "<action>go to cabinet 1</action>"),
        ("webshop", "<action>search[red running shoes]</action>"),
        ("search", "<search>query</search>"),
    ],
)
def test_what_was_expected_is_shown_as_the_system_message_shows_it(world: str, example: str) -> None:
    """The search's system message names the tags of thoughts and of results before those of an action."""
    asked = {"samples": 1, "limit": 1, "max_turns": 1, "progress": False, "channel": "text"}
    (hint,) = said_of(evaluate(f"{world}-quickstart", Talks(), **asked))
    assert f"Expected is an action in tags, as in {example}. Instead, turn 0 of " in hint


def test_what_is_in_use_is_not_recommended() -> None:
    asked: dict[str, Any] = {"samples": 1, "limit": 1, "max_turns": 1, "progress": False, "channel": "text"}
    played = evaluate("search-quickstart", Talks(), env_kwargs={"reading": "lenient"}, **asked)
    assert played.title.endswith("1 task, max_turns 1 (8), reading lenient (strict): 1 sample")
    # a search has no list of possible actions
    other = "--on-invalid reject"
    assert f"What may help: --channel tool; --examples FILE; {other}. `turngym" in said_of(played)[0]
    asked |= {"env_kwargs": {"show_admissible": True, "on_invalid": "reject"}}
    played = evaluate("alfworld-quickstart", Talks(), **asked)
    assert "What may help: --channel tool; --reading lenient; --examples FILE. `turngym" in said_of(played)[0]
    assert ", show_admissible True (False): 1 sample" in played.title
    tags = [replace(played.episodes[0], system="Write between <search> and </search>.")]
    assert "as in <search>...</search>. Instead" in hints(played.scores, tags, played.spec)[0]


def test_an_agent_whose_answers_can_be_read_gets_no_hints() -> None:
    result = evaluate("alfworld-quickstart", "expert", samples=1, limit=2, verify=False, progress=False)
    assert (result.scores.cut_rate, said_of(result)) == (0.0, [])


def test_steps_without_contrast_say_that_nothing_was_updated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    words = ["--steps", "2", "--episodes", "4", "--grpo.n", "2", "--eval-every", "0", "--tracker", "none"]
    assert main(["train", "grpo", "--student", STUDENT, "--out", str(out), *words, "--device", "cpu", *COLD]) == 0
    text = said(capsys)
    for step in (1, 2):
        assert f"step {step}: no update: its 2 groups have no contrast (2 all alike, 0 of them solved)" in text
    assert "2 of 2 steps taught nothing, for nothing in them could be compared. No episode succeeded: teach the" in text
    assert "100 % of the student's answers could not be read" in text
    assert "100 % of the student's answers were cut at --max-new-tokens" in text
    model = out / "checkpoints" / "step_000002" / "model"
    assert f"none of which made an update: the model in {model} is as it was" in text
    assert [(row["malformed"], row["answers_cut"]) for row in read_metrics(out)] == [(1.0, 1.0)] * 2


def test_a_run_that_learns_is_not_told_what_would_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--steps", "1", "--episodes", "2", "--eval-every", "0", "--tracker", "none", "--device", "cpu"]
    out = ["--out", str(tmp_path / "run"), "--max-turns", "3", "--threads", "1"]
    assert main(["train", "sft", "--student", STUDENT, *out, *words]) == 0
    text = said(capsys)
    assert "no update" not in text
    assert "; model in " in text
