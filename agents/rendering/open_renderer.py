"""From chat settings to a renderer: the chat template decides what they leave open, then the renderer is built."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.chat_template import OBSERVATION, SYSTEM, RenderError
from turngym.agents.rendering.memory import Example
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.rendering.skills import Skills
from turngym.agents.rendering.template_dialect import with_dialect
from turngym.core.errors import TurngymError
from turngym.core.redaction import brief
from turngym.core.resolve import checked
from turngym.core.spec import changed
from turngym.core.tools import Tools
from turngym.envs.channels import ToolChannel, make_channel

THOUGHT = "turngymthought"


def open_renderer(
    tokenizer: Any,
    settings: ChatSettings,
    tool: Tools,
    *,
    history: Literal["template", "append"] | None = None,
    stop_ids: Sequence[int] = (),
    examples: Sequence[Example] = (),
    skills: Skills | None = None,
) -> ChatRenderer:
    """The renderer of `settings`, which `complete_settings` has completed; `history` overrides theirs.

    Raises RenderError if the chat template cannot do what they ask.
    """
    channel: Any = make_channel(settings.channel, tool)
    calls = isinstance(channel, ToolChannel)
    return ChatRenderer(
        tokenizer,
        tool=tool if calls else None,
        thinking=settings.thinking,
        observation_role="user" if settings.observation_role == "auto" else settings.observation_role,
        history=history or settings.history,
        stop_ids=stop_ids,
        dialect=channel.dialect if calls else None,
        thoughts=channel.dialect.thoughts if calls else channel.thoughts,
        memory=settings.remembers,
        examples=examples,
        skills=skills,
    )


def renderer_of(
    model: Any,
    tokenizer: Any,
    settings: ChatSettings,
    tool: Tools,
    examples: Sequence[Example] = (),
    skills: Skills | None = None,
) -> ChatRenderer:
    """The `ChatRenderer` that a model was trained with; its generation config may name further end tokens."""
    return open_renderer(tokenizer, settings, tool, stop_ids=end_ids(model), examples=examples, skills=skills)


def end_ids(model: Any) -> tuple[int, ...]:
    """The ids that end an answer by the model's generation config, beside the tokenizer's own.

    Raises RenderError for an eos_token_id that is no id of the model.
    """
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    # transformers allows one id, a list of ids, or none, and does not look at what a stranger's file has in their place
    ids = () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    config = getattr(model, "config", None)
    size = getattr(getattr(config, "get_text_config", lambda: config)(), "vocab_size", None)
    for token in ids:
        if type(token) is not int or token < 0 or (size is not None and token >= size):
            valid = "whole numbers from 0" if size is None else f"0 to {size - 1}"
            raise RenderError(
                f"eos_token_id in the model's generation_config.json is {brief(eos, 80)}; {brief(token, 80)} is no "
                f"id of the model; valid: {valid}"
            )
    return ids


def complete_settings(settings: ChatSettings, tokenizer: Any, tool: Tools) -> ChatSettings:
    """`settings` with what the tokenizer's chat template decides: the dialect, and the role of observations.

    In the tool channel observations go into role `tool` if the template shows them there. In the text channel they are
    `user` messages, unless the template drops earlier thoughts for those and keeps them around tool results: role
    `tool` then keeps an episode one growing text instead of one prompt for each turn.

    Raises RenderError if the template knows no tools, writes unknown calls, or shows observations in no role.
    """
    settings = with_dialect(checked(settings), tokenizer, tool)
    if settings.observation_role != "auto":
        return settings
    as_user, as_tool = (_segments(settings, role, tokenizer, tool) for role in ("user", "tool"))
    prefers_tool = as_tool is not None and (as_user is None or settings.channel.startswith("tool") or as_tool < as_user)
    return changed(settings, observation_role="tool" if prefers_tool else "user")


def _segments(settings: ChatSettings, role: str, tokenizer: Any, tool: Tools) -> int | None:
    """How many segments a short episode with thoughts needs, its observations in `role`; None if the template refuses
    it."""
    settings = changed(settings, observation_role=role)
    channel = make_channel(settings.channel, tool)
    action = tool.templates[0] if len(tool.tags) > 1 else tool.sample("look")
    thought = None if settings.thinking is False else THOUGHT
    try:
        renderer = open_renderer(tokenizer, settings, tool)
        thread = renderer.open(SYSTEM, OBSERVATION)
        for _ in range(2):
            renderer.write(thread, renderer.template.fit(channel.format(action, thought)))
            renderer.observe(thread, OBSERVATION)
    except RenderError:
        return None
    # the channel cannot express the environment's example action
    except TurngymError:
        return 1
    return len(thread.segments)
