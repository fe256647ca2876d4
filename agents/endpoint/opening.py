"""Opens the agent that `openai:MODEL` names, from the options of agents."""

from __future__ import annotations

from typing import Any, Literal

from turngym.agents.agent import AgentError
from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.client import Address
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.endpoint.parameters import ChatParameters
from turngym.agents.endpoint.usage import Prices
from turngym.agents.environments import json_object
from turngym.envs.channels import make_channel
from turngym.envs.core import ToolSpec

MAX_TOKENS = 4096
"""Where the caller does not say: room for a thought, and an end to an answer that has none."""
RESERVED = ("model", "messages", "tools", "stream", "n", "temperature", "seed", "max_tokens", "max_completion_tokens")


def open_endpoint(
    model: str,
    options: EndpointOptions,
    tool: ToolSpec,
    *,
    channel: str,
    temperature: float,
    thinking: Literal["auto", "on", "off"],
    max_tokens: int | None,
    max_context: int | None,
    memory: str,
    slots: int,
) -> EndpointAgent:
    """The agent; nothing is sent yet. Raises AgentError for settings that cannot be."""
    if max_tokens is not None and max_tokens < 1:
        raise AgentError(f"--max-new-tokens is {max_tokens}; an answer needs at least 1")
    parameters = ChatParameters(
        model=model,
        temperature=temperature,
        max_tokens=MAX_TOKENS if max_tokens is None else max_tokens,
        max_context=max_context,
        send_stop=options.send_stop,
        send_seed=options.send_seed,
        reasoning_back=options.reasoning_back,
        token_ids=options.token_ids,
        memory=memory,
        extra=_extra(options.extra_body, thinking),
    )
    return EndpointAgent(
        Address.of(options.base_url, options.key_env),
        parameters,
        # text: it works at every endpoint, and a trace of it reads the same whoever played
        make_channel("text" if channel == "auto" else channel, tool),
        tool,
        deadline=options.request_deadline,
        retries=options.request_retries,
        parallel=slots,
        prices=Prices.of(options.price_in, options.price_cached, options.price_out),
    )


def _extra(text: str, thinking: str) -> dict[str, Any]:
    extra = json_object("--extra-body", text)
    taken = [name for name in RESERVED if name in extra]
    if taken:
        raise AgentError(f"--extra-body sets {', '.join(taken)}: agents and their other options say that")
    if thinking != "auto":
        # where vLLM and SGLang take variables of the chat template
        given = extra.get("chat_template_kwargs")
        known = given if isinstance(given, dict) else {}
        extra["chat_template_kwargs"] = {**known, "enable_thinking": thinking == "on"}
    return extra
