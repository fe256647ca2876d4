"""Reads a chat completion request and says exactly what is wrong with a bad one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from turngym.agents.proxy.conversation.messages import ChatMessage
from turngym.agents.proxy.errors import ApiError, invalid
from turngym.agents.proxy.http.identity import SESSION, Headers, client_name, read_session, read_user
from turngym.agents.proxy.http.read_messages import read_messages, shown
from turngym.agents.proxy.http.refused_fields import check_sampling
from turngym.agents.proxy.settings import ProxySettings
from turngym.envs.common.strict_json import JsonError, strict_json
from turngym.envs.suggest import did_you_mean

USED = (
    *("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "stop"),
    *("tools", "tool_choice", "seed", "logprobs", "return_token_ids", "n"),
    *("session_id", "turn_type", "session_done", "conversation", "conversation_id", "metadata", "user"),
    *("top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias"),
    "response_format",
)
HARMLESS = ("store", "parallel_tool_calls", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields that change nothing about a completion, so that ignoring them is not reported."""
TURN_TYPE, SESSION_DONE = "X-Turn-Type", "X-Session-Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request within the limits; None where the client left a choice to the server."""

    messages: tuple[ChatMessage, ...]
    session_id: str | None
    """As the client names it; None where it names none."""
    main: bool
    """Whether the turn is trained on."""
    user: str = ""
    """Whom a conversation without a name belongs to, as far as the client says."""
    client: str = ""
    """What the client calls itself, to name it in the log."""
    done: bool
    """Whether the session ends with this turn."""
    stream: bool = False
    usage_in_stream: bool = False
    max_tokens: int | None = None
    temperature: float = 1.0
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    seed: int | None = None
    logprobs: bool = False
    token_ids: bool = False
    """Whether the answer brings the ids of prompt and response, in the fields that vLLM has."""
    ignored: tuple[str, ...] = ()
    """Fields that ask for something this engine does not do."""


def read_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError (400)."""
    try:
        fields = strict_json(body)
    except JsonError as error:
        raise invalid(f"{error}; it must be a JSON object with messages") from None
    if not isinstance(fields, dict):
        raise invalid(f"the body is {_kind(fields)}; it must be a JSON object with messages")
    return fields


def read_request(fields: Mapping[str, Any], headers: Headers, settings: ProxySettings, name: str) -> ChatRequest:
    """The request; headers win over fields of the body. `name` is the only model there is.

    Raises:
        ApiError: 400 with the field at fault, 404 for a model that is not served.
    """
    _check_model(fields.get("model"), name)
    _integer(fields, "n", 1, 1)
    session = read_session(fields, headers)
    matched = settings.unnamed == "match"
    turn_type = headers.get(TURN_TYPE) or fields.get("turn_type") or ("main" if session or matched else "side")
    if turn_type not in ("main", "side"):
        raise invalid(f"turn type {shown(turn_type)} is unknown; valid: main, side", "turn_type")
    if turn_type == "main" and session is None and not matched:
        raise invalid(f"a main turn needs a session: set the header {SESSION} or session_id", "session_id")
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid(f"stream_options is {_kind(options)}; it must be an object", "stream_options")
    stream, token_ids = _boolean(fields, "stream"), _boolean(fields, "return_token_ids")
    if stream and token_ids:
        raise invalid("return_token_ids is not for streams: leave one of the two out", "return_token_ids")
    tools = _tools(fields.get("tools"), settings)
    check_sampling(fields)
    choice = fields.get("tool_choice")
    ignored = [name for name in fields if name not in USED and name not in HARMLESS and fields[name] is not None]
    return ChatRequest(
        messages=read_messages(fields.get("messages"), settings),
        session_id=session,
        main=turn_type == "main",
        user=read_user(fields),
        client=client_name(headers),
        done=read_done(fields, headers),
        stream=stream,
        usage_in_stream=bool((options or {}).get("include_usage")),
        max_tokens=_integer(fields, "max_completion_tokens", 1) or _integer(fields, "max_tokens", 1),
        temperature=_temperature(fields.get("temperature")),
        stop=_stop(fields.get("stop")),
        tools=() if choice == "none" else tools,
        seed=_integer(fields, "seed", -(2**63), 2**63 - 1),
        logprobs=_boolean(fields, "logprobs"),
        token_ids=token_ids,
        ignored=tuple(ignored),
    )


def read_done(fields: Mapping[str, Any], headers: Headers) -> bool:
    """Whether the client says that the session is over."""
    said = headers.get(SESSION_DONE)
    if said is not None:
        if said.strip().lower() not in ("1", "true", "yes", "0", "false", "no", ""):
            raise invalid(f"{SESSION_DONE} is {shown(said)}; valid: 1 or 0, true or false", "session_done")
        return said.strip().lower() in ("1", "true", "yes")
    return _boolean(fields, "session_done")


def _check_model(model: Any, name: str) -> None:
    if model is None or model == name:
        return
    if not isinstance(model, str):
        raise invalid(f"model is {_kind(model)}; it must be text", "model")
    hint = did_you_mean(model, [name])
    text = f"the model {shown(model)} does not exist; this server has {name!r}.{hint}"
    raise ApiError(404, text, param="model", code="model_not_found")


def _tools(tools: Any, settings: ProxySettings) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > settings.max_tools:
        raise invalid(f"tools is {_kind(tools)}; it must be a list of at most {settings.max_tools} functions", "tools")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise invalid(
                f'tools[{place}] is {shown(tool)}; it must be {{"type": "function", "function": {{...}}}}',
                f"tools[{place}]",
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{place}].function has no name", f"tools[{place}].function.name")
    return tuple(tools)


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(text, str) and text for text in stops):
        raise invalid(f"stop is {shown(stop)}; it must be a text or a list of at most 4 texts, none empty", "stop")
    return tuple(stops)


def _temperature(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 2:
        raise invalid(f"temperature is {shown(value)}; it must be a number from 0 to 2", "temperature")
    return float(value)


def _integer(fields: Mapping[str, Any], name: str, low: int, high: int = 2**31) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    # True is an int in Python, but not in JSON
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        valid = str(low) if low == high else f"a whole number from {low} to {high}"
        raise invalid(f"{name} is {shown(value)}; it must be {valid}", name)
    return value


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise invalid(f"{name} is {shown(value)}; it must be true or false", name)
    return bool(value)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
