"""What an environment lets an agent do, described once for function calling, text prompts and adapters.

    ToolSpec   one tool with one text, and that text is the action: `open door 1`
    ToolSet    several tools with typed arguments, and the call is the action, as JSON:
               {"name": "heat", "arguments": {"degrees": 220, "fan": true}}

Both have the same methods, so that nobody else asks which one it is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from turngym.core.errors import TurngymError, did_you_mean
from turngym.core.redaction import brief, excerpt

Value = str | int | float | bool
_NOUNS = {"string": "a string", "integer": "an integer", "number": "a number", "boolean": "true or false"}
_FORM = '{"name": ..., "arguments": {...}}'


class Untyped(str):
    """An argument in a dialect that writes values without their type; the argument's description says what it is."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One argument of a tool."""

    name: str
    description: str
    type: Literal["string", "integer", "number", "boolean"] = "string"
    choices: tuple[Value, ...] = ()
    """The only valid values; empty: all of the type."""
    required: bool = True
    """Whether a call must have it. One that a call may leave out may also be null, which means the same."""

    def __post_init__(self) -> None:
        if self.type not in _NOUNS:
            raise TurngymError(f"argument {self.name!r}: type is {self.type!r}; valid: {', '.join(_NOUNS)}")
        for choice in self.choices:
            if not self._typed(choice):
                raise TurngymError(f"argument {self.name!r}: the choice {choice!r} is not {_NOUNS[self.type]}")

    def schema(self) -> dict[str, Any]:
        """Its JSON Schema."""
        choices = {"enum": list(self.choices)} if self.choices else {}
        return {"type": self.type, "description": self.description, **choices}

    def read(self, value: Any) -> Value:
        """`value` in this argument's type. Raises ValueError, with a clause for the agent, if it is not valid.

        As in JSON Schema, 3.0 is an integer. An `Untyped` value is what its letters say: `3`, `True`, `true`.
        """
        if isinstance(value, Untyped):
            value = self._meant(value)
        if not self._typed(value):
            raise ValueError(f"must be {_NOUNS[self.type]}, not {_shown(value)}")
        value = int(value) if self.type == "integer" else value
        if self.choices and value not in self.choices:
            raise ValueError(f"must be one of {', '.join(map(_shown, self.choices))}, not {_shown(value)}")
        return value  # type: ignore[no-any-return]

    def _typed(self, value: Any) -> bool:
        if self.type == "string":
            return isinstance(value, str)
        if self.type == "boolean" or isinstance(value, bool):
            return self.type == "boolean" and isinstance(value, bool)
        if isinstance(value, float):
            return value.is_integer() if self.type == "integer" else math.isfinite(value)
        return isinstance(value, int)

    def _meant(self, text: Untyped) -> Any:
        bare = text.strip()
        if self.type == "string":
            return str(text)
        if self.type == "boolean":
            return {"true": True, "false": False}.get(bare.lower(), bare)
        try:
            return json.loads(bare)
        except (ValueError, RecursionError):
            return bare


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool: a function that a model may call."""

    name: str
    description: str
    arguments: tuple[Argument, ...] = ()

    def schema(self) -> dict[str, Any]:
        """The OpenAI function-calling form: `{"type": "function", "function": {...}}`."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters()}
        return {"type": "function", "function": function}

    def parameters(self) -> dict[str, Any]:
        """The JSON Schema of its arguments."""
        properties = {argument.name: argument.schema() for argument in self.arguments}
        required = [argument.name for argument in self.arguments if argument.required]
        return {"type": "object", "properties": properties, "required": required}

    def fitted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` in the order and the types of their descriptions. Invalid ones stay unchanged, behind the
        others."""
        values: dict[str, Any] = {}
        for argument in self.arguments:
            value = arguments.get(argument.name)
            if value is None and (not argument.required or argument.name not in arguments):
                continue
            try:
                values[argument.name] = argument.read(value)
            except ValueError:
                values[argument.name] = value
        described = {argument.name for argument in self.arguments}
        return values | {name: value for name, value in arguments.items() if name not in described}

    def refuse(self, arguments: Mapping[str, Any]) -> str | None:
        """Says why these `fitted` arguments are not valid, as a clause for the agent; None if they are."""
        names = [argument.name for argument in self.arguments]
        for name in arguments:
            if name not in names:
                takes = f"its arguments are {', '.join(map(_shown, names))}" if names else "it takes none"
                return f"{self.name} has no argument {_shown(name)}; {takes}"
        for argument in self.arguments:
            if argument.name not in arguments:
                if argument.required:
                    return f'the call of {self.name} lacks the argument "{argument.name}"'
                continue
            try:
                argument.read(arguments[argument.name])
            except ValueError as error:
                return f'"{argument.name}" of {self.name} {error}'
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSpec:
    """One tool with one text, which is the action."""

    name: str
    """Name of the tool, for example `alfworld_step`."""
    description: str
    argument: str
    """Name of the single string argument that carries the action."""
    argument_description: str
    examples: tuple[str, ...] = field(default=())
    """Actions in canonical form."""
    tags: tuple[str, ...] = ("action",)
    """Tags in which the text channel carries an action. With one tag, the action is what stands between the tags. With
    several, the tag is the verb and belongs to the action, as in `<search>query</search>`; a call of the tool then
    means the first of them."""
    tail: int = 30
    """Characters at the end of a response without tags that verl-agent plays as the action."""

    @property
    def tools(self) -> tuple[Tool, ...]:
        """What function calling offers."""
        argument = Argument(name=self.argument, description=self.argument_description)
        return (Tool(name=self.name, description=self.description, arguments=(argument,)),)

    @property
    def said(self) -> str:
        """What an action is, for text prompts."""
        return self.argument_description

    @property
    def named(self) -> str:
        """What may be called, for text prompts."""
        return f"the tool {self.name}"

    @property
    def templates(self) -> tuple[str, ...]:
        """Examples of actions where the tag is the verb: `<search>query</search>`, `<answer>answer</answer>`."""
        first, *verbs = self.tags
        return (f"<{first}>{self.argument}</{first}>", *(f"<{tag}>{tag}</{tag}>" for tag in verbs))

    def schemas(self) -> list[dict[str, Any]]:
        """`tools` in the OpenAI function-calling form."""
        return [tool.schema() for tool in self.tools]

    def called(self, name: str, arguments: Any) -> str:
        """The text that a call carries. Raises ValueError, with a clause for the agent, if it carries none."""
        if name != self.name:
            unknown, hint = json.dumps(excerpt(name, 80)), did_you_mean(name, [self.name])
            # the guard adds the full stop
            raise ValueError(f"there is no tool {unknown}; the tool is {self.name}.{hint}".rstrip("."))
        arguments, wanted = _opened(arguments), f'"{self.argument}"'
        if not isinstance(arguments, dict) or self.argument not in arguments:
            raise ValueError(f"the tool call lacks the argument {wanted}")
        text = arguments[self.argument]
        if not isinstance(text, str):
            raise ValueError(f"the argument {wanted} must be a string")
        # the text of a verb may be empty, as in <search></search>
        if not text.strip() and len(self.tags) == 1:
            raise ValueError(f"the argument {wanted} is empty")
        return text.strip()

    def call(self, text: str) -> tuple[str, dict[str, Any]]:
        """(name, arguments) of the call that carries `text`."""
        return self.name, {self.argument: text}

    def sample(self, text: str) -> str:
        """An action for trying out how actions travel: `text`, where any text is one."""
        return text

    def canonical(self, action: str) -> str:
        """The form in which actions are judged and played."""
        return action.strip()

    def refuse(self, action: str) -> str | None:
        """Says why an action can never be played, as a clause for the agent; None, because any text is an action."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSet:
    """Several tools with typed arguments; an action is a call of one of them, as JSON on one line."""

    tools: tuple[Tool, ...]
    examples: tuple[str, ...]
    """Actions in canonical form, at least one; `tool_call` writes them."""
    tags: ClassVar[tuple[str, ...]] = ("action",)
    """Tags in which the text channel carries an action."""
    templates: ClassVar[tuple[str, ...]] = ()
    """No tag is a verb."""

    def __post_init__(self) -> None:
        _check_names("tool", [tool.name for tool in self.tools])
        for tool in self.tools:
            _check_names(f"argument of {tool.name}", [argument.name for argument in tool.arguments])
        if not self.tools or not self.examples:
            raise TurngymError("a ToolSet needs at least one tool and one example of a call")
        for example in self.examples:
            if (wrong := self.refuse(example)) is not None or self.canonical(example) != example:
                better = f"its canonical form is {self.canonical(example)}"
                raise TurngymError(f"the example {brief(example, 120)} of a ToolSet: {wrong or better}")

    @property
    def said(self) -> str:
        """What an action is, for text prompts: the tools with their arguments, one a line."""
        functions = (json.dumps(tool.schema()["function"], ensure_ascii=False) for tool in self.tools)
        return "\n".join(("a call of one of these tools, as JSON:", *functions))

    @property
    def named(self) -> str:
        """What may be called, for text prompts."""
        return f"one of the tools {', '.join(tool.name for tool in self.tools)}"

    def schemas(self) -> list[dict[str, Any]]:
        """`tools` in the OpenAI function-calling form."""
        return [tool.schema() for tool in self.tools]

    def called(self, name: str, arguments: Any) -> str:
        """The action that a call stands for, valid or not (`refuse` judges it). Raises ValueError, with a clause for
        the agent, if the arguments are not an object."""
        arguments = _opened(arguments)
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of a call are an object: {_FORM}")
        tool = next((tool for tool in self.tools if tool.name == name), None)
        return tool_call(name, **(arguments if tool is None else tool.fitted(arguments)))

    def call(self, action: str) -> tuple[str, dict[str, Any]]:
        """(name, arguments) of an action; in an environment's `_apply`, where calls are valid, arguments have their
        types. Raises TurngymError for text that is no call."""
        try:
            return _read_call(action)
        except ValueError as error:
            raise TurngymError(str(error)) from error

    def sample(self, text: str) -> str:
        """An action for trying out how actions travel: the first example, since not any text is one."""
        return self.examples[0]

    def canonical(self, action: str) -> str:
        """The form in which actions are judged and played: arguments in their order and type, on one line."""
        try:
            return self.called(*_read_call(action))
        except ValueError:
            return action.strip()

    def refuse(self, action: str) -> str | None:
        """Says why a canonical action can never be played, as a clause for the agent; None if it is a valid call."""
        try:
            name, arguments = _read_call(action)
        except ValueError as error:
            return str(error)
        tool = next((tool for tool in self.tools if tool.name == name), None)
        if tool is None:
            return f"there is no tool {_shown(name)}; tools are {', '.join(tool.name for tool in self.tools)}"
        return tool.refuse(arguments)


Tools = ToolSpec | ToolSet
"""What an environment offers."""


def tool_call(name: str, /, **arguments: Any) -> str:
    """The action that calls the tool `name`: JSON on one line, in which no tag can stand."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    # as in JSON "\u003c" is "<", which would begin a tag of a channel or of a chat template
    return text.replace("<", "\\u003c").encode("utf-8", "replace").decode("utf-8")


def _read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Reads (name, arguments) from the JSON of a call. Raises ValueError, with a clause for the agent, for anything
    else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{_shown(text)} is no call; a call is {_FORM}") from None
    if isinstance(value, dict) and not value.keys() - {"name", "arguments"}:
        name, arguments = value.get("name"), value.get("arguments", {})
        if isinstance(name, str) and isinstance(arguments, dict):
            return name, arguments
    raise ValueError(f"{_shown(text)} is no call; a call is {_FORM}")


def _opened(arguments: Any) -> Any:
    """The arguments of a call, which may be a string of JSON; {} for every spelling of no arguments. Raises ValueError,
    with a clause, for other strings."""
    try:
        opened = json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
        return {} if opened is None else opened
    except (ValueError, RecursionError):
        raise ValueError("the arguments of the tool call are not valid JSON") from None


def _check_names(what: str, names: list[str]) -> None:
    for index, name in enumerate(names):
        # what every server, dialect and adapter takes
        if not name.isidentifier() or not name.isascii() or name.startswith("_") or len(name) > 64:
            raise TurngymError(
                f"{what}: {name!r} is no name; valid: 64 letters, digits and '_', a letter first, such as 'look_up'"
            )
        if name in names[:index]:
            raise TurngymError(f"{what}: {name!r} is there twice")


def _shown(value: object) -> str:
    """A value as JSON, cut short, safe to encode."""
    try:
        text = json.dumps(excerpt(value, 80) if isinstance(value, str) else value, ensure_ascii=False)
    # lists of a thousand levels, and what JSON has no form for
    except (TypeError, ValueError, RecursionError):
        text = brief(value, 80)
    return excerpt(text, 90).encode("utf-8", "replace").decode("utf-8")
