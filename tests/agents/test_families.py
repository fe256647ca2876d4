"""Real families' chat templates: the dialect is learned from the template, and what was sampled stays as it was."""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import DoorEnv
from families import FAMILIES, family_tokenizer

from turngym.agents.playing.agent import system_message
from turngym.agents.rendering.chat_settings import ChatSettings, describe
from turngym.agents.rendering.chat_template import RenderError
from turngym.agents.rendering.open_renderer import complete_settings, open_renderer
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.template_dialect import dialect_of_template, with_dialect
from turngym.agents.rendering.token_history import TokenHistory
from turngym.core.tools import ToolSpec, tool_call
from turngym.envs.channels import ToolChannel, make_channel
from turngym.envs.guard import ActionGuard
from turngym.envs.tool_calls import CALL_ID
from turngym.scripts.examples.oven import OvenEnv

TOOL = ToolSpec(
    name="alfworld_step", description="Act.", argument="action", argument_description="what", examples=("look",)
)
ACTIONS = ("look", "go to shelf 1", 'take "mug 1" from the desk\'s top', "look")
OBSERVATIONS = ("You see a desk.", "Nothing happens.\n- look", "On it: {'x'}", "<b>done</b>")


@cache
def opened(name: str, channel: str = "tool", **settings: Any) -> tuple[ChatRenderer, Any, ChatSettings]:
    tokenizer = family_tokenizer(name)
    chat = complete_settings(ChatSettings(channel=channel, **settings), tokenizer, TOOL)
    return open_renderer(tokenizer, chat, TOOL), make_channel(chat.channel, TOOL), chat


def played(renderer: ChatRenderer, responses: Sequence[str]) -> TokenHistory:
    """An episode of sampled responses; the last prompt stands. The ids that were sampled are checked."""
    thread = renderer.open("Play.", "You are in a room.")
    for response, observation in zip(responses, OBSERVATIONS, strict=False):
        ids = renderer.template.encode(response)
        if renderer.template.end_id is not None:
            ids = np.append(ids, np.int32(renderer.template.end_id)).astype(np.int32)
        assert renderer.respond(thread, ids) == response
        start, stop = thread.response_span
        assert thread.buffer.view()[start:stop].tolist() == ids.tolist()
        renderer.observe(thread, observation)
    # whether it grew or began a new segment: what stands is the template's own rendering of the whole conversation
    assert renderer.template.decode(thread.buffer.view().tolist()) == renderer.template.render(thread.messages)
    return thread


def test_every_template_that_knows_tools_is_read_in_its_own_dialect() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(with_dialect(ChatSettings(channel="tool"), family_tokenizer(name), TOOL) for name in FAMILIES)
    learned = {name: dialect_of_template(family_tokenizer(name), TOOL) for name in FAMILIES}
    assert {name: (found.dialect.name, found.exact) for name, found in learned.items()} == {
        name: (dialect, True) for name, dialect in FAMILIES.items()
    }


@pytest.mark.parametrize("name", FAMILIES)
def test_a_demonstration_is_what_the_template_itself_writes(name: str) -> None:
    renderer, channel, _ = opened(name)
    opening = renderer.template.opening("Play.", "You are in a room.")
    prompt = renderer.template.render(opening)
    arguments: Any = {"action": "go to shelf 1"}
    texts = []
    for given in (arguments, json.dumps(arguments)):
        for identity in (CALL_ID, "functions.alfworld_step:0"):
            call = {"type": "function", "id": identity, "function": {"name": "alfworld_step", "arguments": given}}
            message = {"role": "assistant", "content": "", "tool_calls": [call]}
            result = {"role": "tool", "content": "ok", "name": "alfworld_step", "tool_call_id": identity}
            try:
                texts.append(renderer.template.render([*opening, message, result]))
            except RenderError:  # arguments in the form that this template does not take
                continue
    call = channel.format("go to shelf 1")
    if name == "nemotron3":  # its prompt opens a thought that its own history writes in another way
        assert any(call in text for text in texts)
        return
    written = prompt + renderer.template.fit(call)
    assert any(text.startswith(written) for text in texts), (written[-200:], texts)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_episode_of_calls_is_one_growing_text(name: str) -> None:
    renderer, channel, chat = opened(name)
    fit = renderer.template.fit
    assert chat.observation_role == "tool"
    assert renderer.append_only
    thread = played(renderer, [fit(channel.format(action)) for action in ACTIONS])
    assert len(thread.segments) == 1
    shown = renderer.template.decode(thread.buffer.view().tolist())
    for action in ACTIONS[:2]:
        assert channel.parse(fit(channel.format(action))).action == action
        assert fit(channel.format(action)) in shown


KEEPS_THOUGHTS = dict.fromkeys(FAMILIES, 1) | {"deepseek_v3": 5, "mistral": 5}
"""Segments of an episode of five prompts with thoughts: these two templates have no place for earlier thoughts."""


@pytest.mark.parametrize("name", FAMILIES)
def test_which_templates_keep_thoughts_around_tool_results(name: str) -> None:
    renderer, channel, _ = opened(name)
    fit = renderer.template.fit
    thread = played(renderer, [fit(channel.format(action, "hm, so")) for action in ACTIONS])
    assert len(thread.segments) == KEEPS_THOUGHTS[name]
    assert channel.parse(fit(channel.format("look", "hm, so"))).thought == "hm, so"


@pytest.mark.parametrize("name", FAMILIES)
def test_whatever_is_sampled_stays_and_the_next_prompt_is_the_template_s(name: str) -> None:
    renderer, channel, _ = opened(name)
    call = renderer.template.fit(channel.format("look"))
    other = renderer.template.fit(channel.dialect.write("alfworld_stop", {"action": "x"}))
    strange = [f"Let me see. {call}", call + "\n" + channel.format("inventory"), "I give up", call[:-3] + "?"]
    for response in (other, *strange):
        played(renderer, [call, response, call])


def test_content_that_a_template_refuses_loses_its_special_tokens_and_nothing_else() -> None:
    """GPT-OSS's template raises where its channels stand in content; the episode goes on in a new segment."""
    renderer = ChatRenderer(family_tokenizer("gpt_oss"))
    thread = played(renderer, ["<|channel|>analysis<|message|>hm<|end|>", "go on"])
    assert len(thread.segments) > 1
    shown = renderer.template.decode(thread.buffer.view().tolist())
    assert "<|start|>assistant<|channel|>final<|message|>analysishm<|end|>" in shown


@pytest.mark.parametrize("name", FAMILIES)
def test_thoughts_and_tags_in_the_text_channel(name: str) -> None:
    renderer, channel, chat = opened(name, channel="text")
    fit = renderer.template.fit
    thread = played(renderer, [fit(channel.format(action, "hm")) for action in ACTIONS])
    texts = [fit(channel.format(action, "hm")) for action in ACTIONS]
    assert [channel.parse(text).action for text in texts] == list(ACTIONS)
    assert channel.parse(texts[0]).thought == "hm"
    # nothing that ends a response stands in one, behind its thought (GPT-OSS) or elsewhere
    assert not set(renderer.stop_ids) & set(renderer.template.encode(texts[0]).tolist())
    style = {"gpt_oss": "text:harmony", "gemma4": "text:gemma", "cohere": "text:cohere", "mistral_args": "text:mistral"}
    assert chat.channel == style.get(name, "text")
    assert 1 <= len(thread.segments) <= len(ACTIONS) + 1


def test_roles_are_chosen_for_what_the_template_keeps() -> None:
    roles = {name: opened(name, channel="text")[2].observation_role for name in (*FAMILIES, "phi3")}
    assert {name for name, role in roles.items() if role == "tool"} == {"qwen3", "qwen3_5", "nemotron3"}
    assert opened("qwen3", channel="text", observation_role="user")[2].observation_role == "user"
    # with thinking switched off there is nothing to keep
    assert opened("qwen3", channel="text", thinking=False)[2].observation_role == "user"
    line = describe(opened("glm")[2])
    assert line == "chat: channel tool:glm, observations as tool messages, thinking as the template has it"


def test_ids_of_a_long_episode_with_thoughts_depend_on_the_role() -> None:
    """30 turns: with role user every turn is a prompt of its own, and ids grow with the square of the turns."""
    sizes = {}
    for role in ("user", "tool"):
        renderer, channel, _ = opened("qwen3", channel="text", observation_role=role)
        thread = renderer.open("Play.", "You are in a room.")
        for turn in range(30):
            renderer.write(thread, channel.format(f"go to shelf {turn}", "hm " * 20))
            renderer.observe(thread, "You arrive. " * 5)
        sizes[role] = (len(thread.segments), sum(segment.size for segment in thread.segments))
    assert sizes["tool"][0] == 1
    assert sizes["user"][0] == 31
    assert sizes["user"][1] > 8 * sizes["tool"][1]


def test_templates_without_tools_name_the_text_channel() -> None:
    with pytest.raises(RenderError, match=r"use the text channel"):
        opened("phi3")
    renderer, channel, chat = opened("phi3", channel="tool:hermes")
    assert (chat.channel, chat.observation_role, renderer.describes_tool) == ("tool:hermes", "user", False)
    assert isinstance(channel, ToolChannel)


def test_an_unknown_dialect_is_shown_and_not_played() -> None:
    tokenizer = family_tokenizer("llama3")
    source = tokenizer.chat_template
    try:
        tokenizer.chat_template = source.replace('{"name": "', "CALL ").replace('", "parameters": ', " WITH ")
        with pytest.raises(RenderError, match=r"not known here: .*CALL alfworld_step"):
            complete_settings(ChatSettings(channel="tool"), tokenizer, TOOL)
    finally:
        tokenizer.chat_template = source


def test_a_dialect_that_is_read_but_not_written_letter_by_letter() -> None:
    tokenizer = family_tokenizer("llama3")
    source = tokenizer.chat_template
    try:
        tokenizer.chat_template = source.replace('{"name": "', '{ "name" : "')
        found = dialect_of_template(tokenizer, TOOL)
        assert (found.dialect.name, found.exact) == ("llama", False)
        with pytest.warns(UserWarning, match="read as llama, but"):
            assert with_dialect(ChatSettings(channel="tool"), tokenizer, TOOL).channel == "tool:llama"
    finally:
        tokenizer.chat_template = source


def followed(name: str) -> bool:
    """Whether a model that calls a tool of its own making finds the right one by what the refusal says."""
    tool = DoorEnv.tool
    tokenizer = family_tokenizer(name)
    chat = complete_settings(ChatSettings(channel="tool"), tokenizer, tool)
    renderer, channel = open_renderer(tokenizer, chat, tool), make_channel(chat.channel, tool)
    assert isinstance(channel, ToolChannel)
    guard = ActionGuard(DoorEnv(), channel=channel)
    observation, _ = guard.reset(options={"task": "doors/1"})
    thread = renderer.open("Play.", observation)
    renderer.write(thread, renderer.template.fit(channel.dialect.write("dor", {"action": "open door 1"})))
    refusal, _, _, _, info = guard.step(channel.dialect.write("dor", {"action": "open door 1"}))
    assert (info["verdict"], "<" in refusal) == ("malformed", False)
    renderer.observe(thread, refusal)
    shown = renderer.template.decode(thread.buffer.view().tolist())
    named = "the tool is door" in shown
    right = channel.dialect.write(refusal.partition("the tool is ")[2].split(".")[0], {"action": "open door 1"})
    return named and bool(guard.step(right)[4]["success"])


def row(name: str) -> str:
    """A family's line in docs/chat_models.md, found out here."""
    renderer, channel, chat = opened(name)
    fit = renderer.template.fit
    plain = played(renderer, [fit(channel.format(action)) for action in ACTIONS])
    thoughtful = played(renderer, [fit(channel.format(action, "hm, so")) for action in ACTIONS])
    text, said, text_chat = opened(name, channel="text")
    spoken = played(text, [text.template.fit(said.format(action, "hm")) for action in ACTIONS])
    return (
        f"| {name} | `{chat.channel}` | {len(plain.segments)} | {len(thoughtful.segments)} | "
        f"{'yes' if followed(name) else 'no'} | `{text_chat.channel}`, {text_chat.observation_role} | "
        f"{len(spoken.segments)} |"
    )


def test_the_table_of_families_says_what_is_measured() -> None:
    page = (Path(__file__).parents[2] / "docs" / "chat_models.md").read_text(encoding="utf-8")
    rows = [row(name) for name in FAMILIES]
    missing = [line for line in rows if line not in page]
    assert not missing, "\n".join(rows)


TYPED = (
    tool_call("read_recipe", dish="cake"),
    tool_call("heat", degrees=180, fan=True),
    tool_call("heat", degrees=-20),
    tool_call("bake", dish="cake"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_typed_calls_of_several_tools_are_written_and_kept_as_the_template_has_them(name: str) -> None:
    tools, tokenizer = OvenEnv.tool, family_tokenizer(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chat = complete_settings(ChatSettings(channel="tool"), tokenizer, tools)
    renderer, channel = open_renderer(tokenizer, chat, tools), make_channel(chat.channel, tools)
    assert isinstance(channel, ToolChannel)
    assert channel.dialect.name == FAMILIES[name]
    assert renderer.describes_tool
    responses = [renderer.template.fit(channel.format(action)) for action in TYPED]
    assert [channel.parse(response).action for response in responses] == list(TYPED)
    # an int and a truth value stand in the history as they were sampled
    assert len(played(renderer, responses).segments) == 1


def test_who_has_no_functions_is_told_the_tools_in_words() -> None:
    tools, guard = OvenEnv.tool, ActionGuard(OvenEnv())
    for name, told in (("phi3", True), ("qwen3", False)):
        renderer = open_renderer(family_tokenizer(name), ChatSettings(channel="tool:hermes"), tools)
        channel = make_channel("tool:hermes", tools)
        assert (tools.said in system_message(guard, channel, renderer)) == told
        # an endpoint gets them beside its messages
        assert tools.said not in system_message(guard, channel, None)
    for channel in (None, make_channel("text", tools)):
        assert tools.said in system_message(guard, channel, None)
