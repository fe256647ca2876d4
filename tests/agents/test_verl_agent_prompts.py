"""verl-agent's protocol: prompts out of a checkout, its reading of responses, what differs from an original."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.agents import evaluate, load_world, play_episodes
from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.departures import Departures
from turngym.agents.models import load_tokenizer
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.memory import Memory, PastTurn
from turngym.agents.rendering.verl_agent_prompts import FOLDER, PromptTemplates, read_templates
from turngym.core.errors import AgentError, TurngymError
from turngym.envs.channels import VerlAgentChannel, make_channel
from turngym.scripts import main as command

ALFWORLD, WEBSHOP, SEARCH = "turngym/ALFWorld-v0", "turngym/WebShop-v0", "turngym/Search-v0"
HOUSE = '''
"""A form of templates as a checkout has it, in words of this test."""
import os
os.environ["TURNGYM_TEMPLATES_WERE_RUN"] = "yes"
OTHER = 3
ALFWORLD_TEMPLATE_NO_HIS = """
Now: {current_observation}
May: [{admissible_actions}]. Braces: {{}}.
"""
ALFWORLD_TEMPLATE: str = (
    "Task: {task_description}, {step_count} done, {history_length} shown: {action_history}\\n"
    "Step {current_step}: {current_observation}" + " May: [{admissible_actions}]"
)
'''


def checkout(tmp_path: Path, name: str = "alfworld", text: str = HOUSE) -> Path:
    folder = tmp_path / "checkout" / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path / "checkout"


def test_templates_are_read_and_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGYM_TEMPLATES_WERE_RUN", raising=False)
    root = checkout(tmp_path)
    found = [read_templates(str(path), ALFWORLD) for path in (root, root / FOLDER, root / FOLDER / "alfworld.py")]
    assert found[0] == found[1] == found[2]
    import os

    assert "TURNGYM_TEMPLATES_WERE_RUN" not in os.environ
    past = [PastTurn(observation=f"saw {n}", response="", action=f"do {n}") for n in range(1, 4)]
    memory, said = Memory("verl-agent:2", found[0]), ["help", "look", "go to bed 1"]
    task = "Your task is to:  find it. "
    assert memory.prompt(task, [], "here", said) == ("\nNow: here\nMay: ['look'\n 'go to bed 1']. Braces: {}.\n")
    assert memory.prompt(task, past, "here", said) == (
        "Task: find it., 3 done, 2 shown: [Observation 2: 'saw 2', Action 2: 'do 2']\n[Observation 3: 'saw 3', "
        "Action 3: 'do 3']\nStep 4: here May: ['look'\n 'go to bed 1']"
    )
    # no history asked for: every turn is a first one
    assert "Now: here" in str(Memory("verl-agent:0", found[0]).prompt(task, past, "here", said))


def test_the_shop_cuts_its_instruction_out_and_long_histories_off() -> None:
    templates = PromptTemplates(
        kind="webshop",
        first="{task_description} | {current_observation} | {available_actions}",
        later="{task_description} | {action_history} | {current_observation} | {available_actions}",
    )
    page = "WebShop [SEP] Instruction: [SEP] a mug [SEP] Search"
    first = templates.prompt(2, "Instruction: a mug", [], page, ("search[<your keywords>]",))
    assert first == "a mug | 'Search' | 'search[<your query>]',\n'click[search]',"
    after = "Instruction: [SEP] a mug [SEP] Back to Search [SEP] b1"
    later = templates.prompt(2, "Instruction: a mug", [(page, "search[mug]")], after, ("click[b1]",))
    assert later == (
        "a mug | [Observation 1: ''Search'', Action 1: 'search[mug]'] | 'Back to Search' [SEP] 'b1' | 'click[b1]',"
    )
    long = templates.prompt(2, "Instruction: a mug", [(page + " x" * 7000, "search[mug]")], after, ("click[b1]",))
    assert long == "a mug | 'Back to Search' [SEP] 'b1' | 'click[b1]',"


def test_search_remembers_queries_and_what_they_found() -> None:
    own = read_templates("own", SEARCH)
    past = [("Question: who?", "<search>a</search>"), ("\n<information>A</information>\n", "")]
    told = own.prompt(4, "Question: who?", past, "bad", None)
    assert "Step 1:<search>a</search> <information>A</information>\n\nStep 2: bad\n" in told
    assert "The question: who?\n\nYou have taken 2 step(s)" in told


FAULTS = {
    "no such constant": ("OTHER = 'x'", "has no string constant ALFWORLD_TEMPLATE_NO_HIS; its string constants: OTHER"),
    "an f-string": ("x = 1\nALFWORLD_TEMPLATE_NO_HIS = f'{x}'", "has no string constant ALFWORLD_TEMPLATE_NO_HIS"),
    "a call": ("ALFWORLD_TEMPLATE_NO_HIS = open('x').read()", "has no string constant"),
    "no Python": ("def (", "is not a Python file that can be read"),
    "an attribute": (HOUSE.replace("Now: {current_", "{current_observation.__class__}{current_"), "a name in braces"),
    "a format": (HOUSE.replace("Now: {current_", "{current_observation:>99999}{current_"), "a name in braces"),
    "an unknown field": (HOUSE.replace("Now:", "{secret}"), "has the field 'secret'; valid: admissible_actions, curr"),
    "an open brace": (HOUSE.replace("Now:", "{"), "cannot be filled|a name in braces"),
    "nothing to act on": (HOUSE.replace("May: [{admissible_actions}]. B", "B"), "lacks the field {admissible_actions}"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_templates_are_refused_in_one_line(tmp_path: Path, fault: str) -> None:
    text, said = FAULTS[fault]
    with pytest.raises(AgentError, match=said) as error:
        read_templates(str(checkout(tmp_path, text=text)), ALFWORLD)
    assert "\n" not in str(error.value)


def test_other_refusals(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"there is no .*webshop\.py"):
        read_templates(str(checkout(tmp_path)), WEBSHOP)
    with pytest.raises(AgentError, match="there are templates of turngym/ALFWorld-v0"):
        read_templates("own", "other/Env-v0")
    for settings in (
        {"memory": "verl-agent:2"},
        {"memory": "all", "prompts": ("search", "{task_description}", "{memory_context}")},
    ):
        with pytest.raises(TurngymError, match="templates"):
            ChatSettings(**settings)  # type: ignore[arg-type]


def test_a_model_plays_with_the_prompts_of_a_checkout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, folder = checkout(tmp_path), str(load_world("alfworld").checkpoint("student"))
    words = ["eval", "--preset", "verl-agent", "--panel", "alfworld-quickstart", "--agent", f"model:{folder}"]
    words += ["--limit", "1", "--max-turns", "2", "--max-new-tokens", "8", "--threads", "1"]
    assert command.main([*words, "--prompts", str(root), "--out", str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "prompts in our own words" not in said
    assert "Not as the original (verl-agent): max_turns 2 (50); max_new_tokens 8 (512); generated tasks;" in said
    result = rescore(tmp_path / "a")
    (episode,) = result.episodes
    prompt = load_tokenizer(folder).decode(episode.segments[1][: episode.turns[1].prompt_span[1]])
    assert ", 1 done, 1 shown: [Observation 1: '-= Welcome to" in prompt
    assert "'go to desk 1'\n 'go to " in prompt
    assert result.spec.agent.chat.memory.sha256 == read_templates(str(root), ALFWORLD).sha256  # type: ignore[union-attr]
    # other words are another evaluation
    assert command.main([*words, "--out", str(tmp_path / "a")]) == 2
    assert command.main([*words[:1], *words[3:], "--prompts", "own", "--out", str(tmp_path / "b")]) == 2
    assert "prompts is a setting of agent.chat.memory = verl-agent; agent.chat.memory is all" in capsys.readouterr().err
    # the prompt of an agent without ids can be shown, too
    played = play_episodes(ALFWORLD, "expert", preset="verl-agent", tasks=1, out=tmp_path / "t.jsonl", progress=False)
    assert played.episodes[0].success


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("<think>x</think><action> Go To Bed 1 </action>", "go to bed 1", True),
        ("<think>x</think><ACTION>look</Action> tail", "look", True),
        ("<think>x<action>look</action>", "look", False),
        ("<think>去</think><action>look</action>", "look", False),
        ("<think>é</think><action>a</action><action>b</action>", "a", True),
        ("I think that I should rather go and LOOK", "that i should rather go and look"[-30:], False),
        ("<think>x</think></action><action>look", "", True),
    ],
)
def test_responses_are_read_as_there(response: str, action: str, valid: bool) -> None:
    env: Any = gym.make(ALFWORLD, channel="text:verl-agent", on_invalid="noop", invalid_cost=0.5)
    env.reset(seed=0)
    read = env.channel.parse(response)
    assert (read.action, read.reason is None) == (action, valid)
    observation, reward, *_, info = env.step(response)
    assert reward == (0.0 if valid else -0.5)
    assert (info["verdict"] == "malformed") is not valid
    assert (observation == "Nothing happens.") is (action not in ("look", "go to bed 1"))


def test_what_is_malformed_is_played_only_where_the_environment_answers() -> None:
    said = "<action>go to shelf 1</action>"
    for policy, moved in (("noop", True), ("reject", False), ("penalize", False)):
        env: Any = gym.make(ALFWORLD, channel="text:verl-agent", on_invalid=policy)
        env.reset(options={"task": "generated/small/eval/0"})
        observation, *_, info = env.step(said)
        assert ("You arrive" in observation) is moved
        assert (info["verdict"], info["env_steps"]) == ("malformed", int(moved))
    with pytest.raises(TurngymError, match="invalid_cost is -1"):
        gym.make(ALFWORLD, invalid_cost=-1)


@pytest.mark.parametrize(
    ("response", "action", "valid"),
    [
        ("<think>x</think><search> a </search>", "<search>a</search>", True),
        ("<Search>a</Search><answer>b</answer>", "<search>a</search>", False),
        ("<answer>b</answer><search>a</search>", "<search>a</search>", False),
        ("<answer>b</answer> <answer>c</answer>", "<answer>b</answer>", False),
        ("<answer>b</answer>", "<answer>b</answer>", True),
        ("neither", None, False),
    ],
)
def test_searches_are_read_as_there(response: str, action: str | None, valid: bool) -> None:
    env: Any = gym.make(SEARCH, channel="text:verl-agent", config="tiny")
    read = env.channel.parse(response)
    assert (read.action, read.reason is None) == (action, valid)


def test_the_tail_of_the_shop_is_shorter_and_experts_have_the_form() -> None:
    env: Any = gym.make(WEBSHOP, channel="text:verl-agent", profile="embedded-small")
    assert isinstance(env.channel, VerlAgentChannel)
    assert env.channel.parse("a" * 10 + "b" * 20).action == "b" * 20
    assert env.channel.stop_text == ()
    written = env.channel.format("search[Red Mug]")
    assert env.channel.parse(written).reason is None
    with pytest.raises(TurngymError, match="cannot carry"):
        env.channel.format("看")
    with pytest.raises(TurngymError, match="text:verl-agent"):
        make_channel("text:verl-agnt", env.tool)


def needs_options(env: Any, task: str) -> bool:
    env.reset(options={"task": task})
    return bool(env.unwrapped.goal.goal_options)


def test_a_win_is_all_that_is_paid_for() -> None:
    paid = []
    for reward in ("score", "success"):
        env: Any = gym.make(WEBSHOP, profile="embedded-small", reward=reward, max_turns=9)
        env.reset(options={"task": next(task for task in env.task_ids() if needs_options(env, task))})
        for _ in range(2):
            env.step(env.expert_action())
        paid.append(env.step("click[buy now]")[1])
    assert 0 < paid[0] < 1
    assert paid[1] == 0.0


@pytest.mark.long
def test_what_differs_from_the_original_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few: dict[str, Any] = {"samples": 1, "progress": False}
    plain = evaluate("alfworld-quickstart", "expert", limit=2, **few)
    assert plain.departs is not None
    assert plain.departs.all == ("generated tasks", "2 of 100 tasks, over all categories")
    helped = evaluate(
        "webshop-quickstart", "expert", limit=1, out=tmp_path / "a", max_turns=20,
        env_kwargs={"on_invalid": "reject", "reading": "lenient", "show_admissible": True, "num_prev_obs": 2}, **few,
    )  # fmt: skip
    assert helped.departs is not None
    line = helped.departs.line
    for words in (
        "max_turns 20 (12)",
        "on_invalid reject (noop)",
        "show_admissible True (False)",
        "reading lenient (strict)",
        "strict_admissible True (False)",
        "num_prev_obs 2 (0)",
        "generated tasks",
    ):
        assert words in line, line
    assert line in str(helped)
    assert rescore(tmp_path / "a").departs == helped.departs
    capsys.readouterr()
    assert command.main(["eval", "--rescore", str(tmp_path / "a")]) == 0
    assert line in capsys.readouterr().out
    # the packed result, its table and the report say it, too
    assert command.main(["result", "pack", str(tmp_path / "a"), "--out", str(tmp_path / "r" / "shop.result.xz")]) == 0
    assert command.main(["result", "table", str(tmp_path / "r"), "--out", str(tmp_path / "table")]) == 0
    assert line.partition("(")[0] in capsys.readouterr().out
    assert "Not as the original: max_turns 20 (12)" in (tmp_path / "table" / "index.html").read_text()
    assert command.main(["report", str(tmp_path / "a"), "--out", str(tmp_path / "report")]) == 0
    assert "Not as the original: max_turns 20 (12)" in (tmp_path / "report" / "report.md").read_text()
    capsys.readouterr()
    words = ["eval", "--panel", "alfworld-quickstart", "--limit", "1", "--samples", "1", "--on-invalid", "terminate"]
    assert command.main(words) == 0
    assert "on_invalid terminate (noop)" in capsys.readouterr().out
    assert Departures(preset=None, rules=(), others=()).line == "As the original"
    assert Departures(preset="verl-agent", rules=(), others=()).line == "As the original (verl-agent)"
