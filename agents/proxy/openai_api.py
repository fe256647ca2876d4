"""Reads requests in the form of the OpenAI API and says exactly what is wrong with a bad one.

A field that would change nothing is ignored; one that asks for another distribution or form than the policy's own, or
for an answer that is not given, is refused, because the policy learns from what it draws; the rest is counted as
ignored. Headers are looked up by the names that are written here (`X-Session-Id`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from turngym.agents.proxy.api_errors import UNSUPPORTED, ApiError, invalid
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.proxy.sessions import Feedback
from turngym.agents.proxy.turn_records import ROLES, ChatMessage, ToolCall, check_arguments
from turngym.core.errors import did_you_mean
from turngym.core.redaction import excerpt, first_letters
from turngym.core.strict_json import JsonError, strict_json


def read_messages(messages: Any, settings: ProxySettings) -> tuple[ChatMessage, ...]:
    """The messages, with role system for developer and text content. Raises ApiError that names message and field."""
    if not isinstance(messages, list) or not messages:
        raise invalid(f"messages is {shown(messages)}; it must be a list of at least one message", "messages")
    if len(messages) > settings.max_messages:
        raise invalid(f"{len(messages)} messages; at most {settings.max_messages} are read", "messages")
    return tuple(_message(message, f"messages[{index}]") for index, message in enumerate(messages))


def shown(value: Any) -> str:
    """A value that the client sent, cut to fit in an error text."""
    return excerpt(json.dumps(value, ensure_ascii=True, default=str), 77)


def _message(message: Any, where: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(f"{where} is {shown(message)}; it must be an object with role and content", where)
    role = message.get("role")
    if role not in ROLES:
        hint = did_you_mean(str(role), ROLES)
        raise invalid(f"{where}.role is {shown(role)}; valid: {', '.join(ROLES)}.{hint}", f"{where}.role")
    if message.get("function_call") is not None:
        field = f"{where}.function_call"
        raise invalid(
            f"{field} is {shown(message['function_call'])}; this server reads the newer form: send tool_calls", field
        )
    entries = message.get("tool_calls")
    if entries is not None and not isinstance(entries, list):
        raise invalid(f"{where}.tool_calls is {shown(entries)}; it must be a list of calls", f"{where}.tool_calls")
    calls = tuple(_call(entry, f"{where}.tool_calls[{index}]") for index, entry in enumerate(entries or ()))
    if calls and role != "assistant":
        raise invalid(f"{where} has tool calls, but its role is {role}; only the assistant calls", where)
    content = message.get("content")
    if content is None and role != "assistant":
        raise invalid(f"{where} has no content", f"{where}.content")
    call_id = message.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise invalid(f"{where}.tool_call_id is {shown(call_id)}; it must be text", f"{where}.tool_call_id")
    return ChatMessage(
        role="system" if role == "developer" else role,
        content="" if content is None else _content(content, f"{where}.content"),
        tool_calls=calls,
        tool_call_id=call_id or "",
    )


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where} is {shown(content)}; it must be text or a list of text parts", where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, dict) else part
        if kind not in (None, "text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise invalid(f"{where}[{index}] is {shown(part)}; this policy reads text parts only", f"{where}[{index}]")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if arguments is None:
        arguments = ""
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(name, str) or not name or not isinstance(arguments, str):
        raise invalid(f'{where} is {shown(call)}; it must have function: {{"name", "arguments" as JSON text}}', where)
    try:
        check_arguments(arguments)
    except JsonError as error:
        field = f"{where}.function.arguments"
        raise invalid(f"{field}: {str(error).removeprefix('the body ')}", field) from None
    call_id = call.get("id", "")
    return ToolCall(id=call_id if isinstance(call_id, str) else "", name=name, arguments=arguments)


SESSION = "X-Session-Id"
MAX_SESSION_ID = 256


def read_session(fields: Mapping[str, Any], headers: Mapping[str, str]) -> str | None:
    """The session's id, None without one: the header, else `session_id`, `metadata.session_id`,
    `metadata.conversation_id`, `conversation` (an id, or an object with one), `conversation_id`.

    Raises ApiError for one that is no short text.
    """
    metadata = fields.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise invalid(f"metadata is {shown(metadata)}; it must be an object", "metadata")
    conversation = fields.get("conversation")
    candidates = {
        "session_id": headers.get(SESSION) or fields.get("session_id"),
        "metadata.session_id": (metadata or {}).get("session_id"),
        "metadata.conversation_id": (metadata or {}).get("conversation_id"),
        "conversation": conversation.get("id") if isinstance(conversation, dict) else conversation,
        "conversation_id": fields.get("conversation_id"),
    }
    for name, value in candidates.items():
        if value is not None:
            return _short(value, name)
    return None


def _short(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or len(value) > MAX_SESSION_ID:
        raise invalid(f"{name} is {shown(value)}; it must be text of 1 to {MAX_SESSION_ID} letters", name)
    return value


WHOLE = "this server draws from the policy's whole distribution, which it learns by"
NEWER = "this server reads the newer form, tools and tool_choice"
GRAMMARS = "this server has no grammars"
TEMPLATE = "the trainer sets the chat template and its switches"
DRAWN = "this server gives log-probabilities of what was drawn alone"
TEXT = "this policy writes text alone"

NEUTRAL: Mapping[str, tuple[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("top_p", "repetition_penalty", "typical_p", "length_penalty"), (WHOLE, (1,))),
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "min_tokens"), (WHOLE, (0,))),
    **dict.fromkeys(("use_beam_search", "ignore_eos"), (WHOLE, (False,))),
    **dict.fromkeys(("stop_token_ids", "bad_words", "logits_processors"), (WHOLE, ([],))),
    "top_k": (WHOLE, (-1, 0)),
    "logit_bias": (WHOLE, ({},)),
    **dict.fromkeys(("allowed_token_ids", "custom_logit_processor"), (WHOLE, ())),
    "best_of": (WHOLE, (1,)),
    "functions": (NEWER, ([],)),
    "function_call": (NEWER, ("none", {})),
    "tool_choice": ("the policy decides itself whether it calls", ("auto", "none")),
    "response_format": (GRAMMARS, ({"type": "text"}, {})),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "regex", "ebnf"),
        (GRAMMARS, ({}, [])),
    ),
    **dict.fromkeys(("chat_template", "chat_template_kwargs"), (TEMPLATE, ({},))),
    "add_generation_prompt": (TEMPLATE, (True,)),
    **dict.fromkeys(("continue_final_message", "echo"), (TEMPLATE, (False,))),
    "top_logprobs": (DRAWN, (0,)),
    # 0 asks for those of the prompt's own ids
    "prompt_logprobs": (DRAWN, ()),
    "modalities": (TEXT, (["text"], [])),
    "audio": (TEXT, ({},)),
    "web_search_options": ("this server searches nothing", ()),
}
"""Fields that ask for another distribution, or for another form of prompt or answer: why they are not done, and the
values that change nothing."""


USED = (
    *("messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "stop"),
    *("tools", "seed", "logprobs", "return_token_ids", "n"),
    *("session_id", "turn_type", "session_done", "conversation", "conversation_id", "metadata", "user"),
    *NEUTRAL,
)
HARMLESS = ("store", "service_tier", "prompt_cache_key", "safety_identifier")
"""Fields that change nothing about a completion, so that ignoring them is not reported."""
TURN_TYPE, SESSION_DONE = "X-Turn-Type", "X-Session-Done"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A request within the limits; None where the client left a choice to the server."""

    messages: tuple[ChatMessage, ...]
    session_id: str | None
    """The client's own id; None if the client names no session."""
    main: bool
    """Whether the turn is trained on."""
    client: str = ""
    """The name of the client's key; "" where all clients share one, or none is asked for."""
    user: str = ""
    """OpenAI's `user`, or `metadata.user_id`: only conversations of the same user are matched by their history."""
    user_agent: str = ""
    """The client's User-Agent, at most 60 printable characters, for the log."""
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
    """Whether the answer contains the ids of prompt and response, in vLLM's fields."""


def read_json(body: Callable[[], bytes]) -> dict[str, Any]:
    """The JSON object that `body` gives; nothing else holds its bytes while it is parsed. Raises ApiError (400)."""
    try:
        fields = strict_json(body())
    except JsonError as error:
        raise invalid(f"{error}; it must be a JSON object with messages") from None
    if not isinstance(fields, dict):
        raise invalid(f"the body is {_kind(fields)}; it must be a JSON object with messages")
    return fields


def ignored_fields(fields: Mapping[str, Any]) -> list[str]:
    """Fields of a completion's request that this server neither honors nor refuses."""
    return [name for name in fields if name not in USED and name not in HARMLESS and fields[name] is not None]


def no_such_model(asked: str, name: str) -> ApiError:
    """The error of a request for another model than `name`."""
    text = f"the model {shown(asked)} does not exist; this server has {name!r}.{did_you_mean(asked, [name])}"
    return ApiError(404, text, param="model", code="model_not_found")


def read_request(
    fields: Mapping[str, Any], headers: Mapping[str, str], settings: ProxySettings, name: str, client: str = ""
) -> ChatRequest:
    """The request as far as this server honors it; headers win over fields of the body.

    Raises ApiError: 400 with the field at fault, 404 for a model that is not served.

    Args:
        headers: by name, capitalized as in `User-Agent`.
        settings: limits of messages and tools, and what a turn without a session id is.
        client: name of the client's key; "" where all clients share one, or none is asked for.
    """
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise invalid(f"model is {_kind(model)}; it must be text", "model")
    if model not in (None, name):
        raise no_such_model(model, name)
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
    temperature = fields.get("temperature")
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if temperature is not None and not (is_number and 0 <= temperature <= 2):
        raise invalid(f"temperature is {shown(temperature)}; it must be a number from 0 to 2", "temperature")
    stream, token_ids = _boolean(fields, "stream"), _boolean(fields, "return_token_ids")
    if stream and token_ids:
        raise invalid("return_token_ids is not for streams: leave one of the two out", "return_token_ids")
    tools = _tools(fields.get("tools"), settings)
    for field, (why, neutral) in NEUTRAL.items():
        value = fields.get(field)
        # True equals 1
        harmless = any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in neutral)
        if value is not None and not harmless:
            valid = f", or send {shown(neutral[0])}" if neutral else ""
            raise invalid(f"{field} is {shown(value)}; {why}: leave {field} out{valid}", field, UNSUPPORTED)

    # A header wins. An answer in the conversation may end with a stop text of the request.
    done = headers.get(SESSION_DONE, "").strip().lower()
    if done not in ("1", "true", "yes", "0", "false", "no", ""):
        raise invalid(f"{SESSION_DONE} is {shown(done)}; valid: 1 or 0, true or false", "session_done")
    stop, messages = _stop(fields.get("stop")), []
    for message in read_messages(fields.get("messages"), settings):
        ends = [text for text in stop if message.content.strip().endswith(text)]
        messages.append(replace(message, end=max(ends, key=len)) if ends and message.role == "assistant" else message)
    user = fields.get("user") or (fields.get("metadata") or {}).get("user_id")
    user_agent = headers.get("User-Agent") or "a client without a name"
    return ChatRequest(
        messages=tuple(messages),
        session_id=session,
        main=turn_type == "main",
        client=client,
        user="" if user is None else _short(user, "user"),
        user_agent="".join(char if char.isprintable() else " " for char in first_letters(user_agent, 60)).strip(),
        done=done in ("1", "true", "yes") if SESSION_DONE in headers else _boolean(fields, "session_done"),
        stream=stream,
        usage_in_stream=bool((options or {}).get("include_usage")),
        max_tokens=_integer(fields, "max_completion_tokens", 1) or _integer(fields, "max_tokens", 1),
        temperature=1.0 if temperature is None else float(temperature),
        stop=stop,
        tools=() if fields.get("tool_choice") == "none" else tools,
        seed=_integer(fields, "seed", -(2**63), 2**63 - 1),
        logprobs=_boolean(fields, "logprobs"),
        token_ids=token_ids,
    )


MAX_TEXT = 4000
"""Most characters of a user's comment on a turn."""
NAMING = ("session_id", "metadata", "conversation", "conversation_id")
FIELDS = ("score", "text", "turn", "answer", *NAMING)


def read_feedback(fields: Mapping[str, Any], headers: Mapping[str, str]) -> tuple[Feedback, dict[str, Any]]:
    """(The feedback; the turn that is meant, as arguments of `ProxyService.feedback`.)

    Raises ApiError (400) with the field at fault.
    """
    for name in fields:
        if name not in FIELDS:
            # a name may be as long as a body
            hint = did_you_mean(name, FIELDS)
            raise invalid(
                f"the field {shown(name)} is unknown; valid: {', '.join(FIELDS[:5])}.{hint}", excerpt(name, 40)
            )
    score, text = fields.get("score"), fields.get("text")
    # True equals 1
    if isinstance(score, bool) or score not in (1, -1):
        raise invalid(f"score is {shown(score)}; it must be 1 (good) or -1 (bad)", "score")
    if text is not None and (not isinstance(text, str) or len(text) > MAX_TEXT):
        raise invalid(f"text is {shown(text)}; it must be text of at most {MAX_TEXT} letters", "text")
    session, turn, answer = read_session(fields, headers), _integer(fields, "turn", 0), fields.get("answer")
    if answer is not None and not isinstance(answer, str):
        raise invalid(f"answer is {shown(answer)}; it must be the id of an answer (chatcmpl-...)", "answer")
    if answer is None and session is None:
        raise invalid("which turn? Send answer (its id), or session_id and turn", "session_id")
    if answer is not None and turn is not None:
        raise invalid("answer names the turn already: leave turn out", "turn")
    return Feedback(score=int(score), text=text or ""), {"session_id": session, "turn": turn, "answer": answer}


def _tools(tools: Any, settings: ProxySettings) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list) or len(tools) > settings.max_tools:
        raise invalid(f"tools is {_kind(tools)}; it must be a list of at most {settings.max_tools} functions", "tools")
    for index, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise invalid(
                f'tools[{index}] is {shown(tool)}; it must be {{"type": "function", "function": {{...}}}}',
                f"tools[{index}]",
            )
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise invalid(f"tools[{index}].function has no name", f"tools[{index}].function.name")
    return tuple(tools)


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(text, str) and text for text in stops):
        raise invalid(f"stop is {shown(stop)}; it must be a text or a list of at most 4 texts, none empty", "stop")
    # every beginning of a stop text is looked for at the end of an answer
    if (longest := max(map(len, stops), default=0)) > MAX_STOP:
        raise invalid(f"stop has a text of {longest} letters; at most {MAX_STOP} are read", "stop")
    return tuple(stops)


MAX_STOP = 500
"""Letters of a stop text."""


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
