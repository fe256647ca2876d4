"""A tokenizer's chat template, whose behavior is probed once, at construction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.envs.core import ToolSpec, TurngymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]
ObservationRole = Literal["user", "tool"]

# plain letters: no template trims, escapes or parses them
ANSWER = "turngymanswer"
OBSERVATION = "turngymobservation"
SYSTEM = "turngymsystem"
USER = "turngymuser"
CACHE = 1 << 16

# what Llama 3's templates fall back to where they are given no clock
FIXED_DATE = {"date_string": "26 Jul 2024"}
# a macro hides the global function of the same name that transformers hands to the template
FIXED_CLOCK = (
    "{%- macro strftime_now(form) -%}"
    "{%- if '%Y-%m-%d' in form -%}2024-07-26{%- else -%}26 Jul 2024{%- endif -%}"
    "{%- endmacro -%}"
)
"""Goes before templates that print today's date: they would give other tokens tomorrow."""


class RenderError(TurngymError):
    """A tokenizer or chat template that cannot show a conversation."""


class ChatTemplate:
    """Messages to text, text to ids, ids to text, for one tokenizer and one set of template switches.

    Args:
        tokenizer: any Hugging Face tokenizer with a chat template.
        tool: described to the template (`tools=[schema]`); None leaves it out.
        thinking: `enable_thinking` of Qwen3-style templates; None leaves the template's own default.
        observation_role: role of every observation after the first (which is always `user`).
        variables: further template variables, for example `{"date_string": "26 Jul 2024"}`.

    Raises:
        RenderError: without a chat template, or where the template does not show observations of that role.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool: ToolSpec | None = None,
        thinking: bool | None = None,
        observation_role: ObservationRole = "user",
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        if observation_role not in ("user", "tool"):
            raise RenderError(f"observation_role {observation_role!r} is unknown; valid: 'user', 'tool'")
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self.role = observation_role
        self._tools: list[Any] | None = None if tool is None else [tool.schema()]
        self._variables: dict[str, Any] = {**FIXED_DATE, **(variables or {})}
        if thinking is not None:
            self._variables["enable_thinking"] = thinking
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                f"tokenizer {self.name!r} has no chat template: use that of an instruction-tuned model, or set "
                "tokenizer.chat_template (ChatML is a safe choice for models that were never tuned to a format)"
            )
        self._source = self._frozen_source()
        # per instance: a cache on the methods would be shared and keep every tokenizer alive
        self.encode = lru_cache(CACHE)(self._encode)
        self._decode_cached = lru_cache(CACHE)(self._decode)
        self._probe(tool)

    def _frozen_source(self) -> str | None:
        """The template with a clock that stands still; None where it reads no clock."""
        try:
            source = str(self.tokenizer.get_chat_template(tools=self._tools))
        except ValueError as error:  # several templates, none of them the default
            raise RenderError(f"the chat template of {self.name!r} cannot be chosen: {error}") from error
        return FIXED_CLOCK + source if "strftime_now" in source else None

    def _probe(self, tool: ToolSpec | None) -> None:
        self._fold_system = False
        # opening() reads the switch, so the trial itself must run with it off
        self._fold_system = not self._shows_system()
        prompt = self.render(self.opening(SYSTEM, OBSERVATION))
        if OBSERVATION not in prompt:
            raise RenderError(f"the chat template of {self.name!r} does not show user messages")
        self.describes_tool = tool is not None and tool.name in prompt
        self.prefill = self._probe_prefill(prompt)
        """Whether the text that the template puts into the assistant's mouth belongs to the message it keeps."""
        delta = self._probe_delta()
        end = self._encode(delta)[:1].tolist()
        eos = getattr(self.tokenizer, "eos_token_id", None)
        # an end token may have been added without being marked special
        special = set(self.tokenizer.all_special_ids) | set(getattr(self.tokenizer, "added_tokens_decoder", ()))
        # where a template closes answers with plain text, only the tokenizer's eos can end one
        self.end_id: int | None = end[0] if end and end[0] in special else eos
        """The id that closes an assistant message."""
        self.end_text = "" if self.end_id is None else self.decode([self.end_id])
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in (self.end_id, eos) if i is not None))

    def _shows_system(self) -> bool:
        try:
            return SYSTEM in self.render(self.opening(SYSTEM, OBSERVATION))
        except RenderError:
            return False

    def _probe_prefill(self, prompt: str) -> str:
        history = self.opening(SYSTEM, OBSERVATION)
        closed = self.render([*history, {"role": "assistant", "content": ANSWER}], generate=False)
        head = closed[: closed.index(ANSWER)] if ANSWER in closed else ""
        if not head or not prompt.startswith(head) or prompt == head:
            return ""
        prefill = prompt[len(head) :]
        again = [*history, {"role": "assistant", "content": prefill + ANSWER}, self.observation(OBSERVATION)]
        return prefill if self.render(again).startswith(prompt + ANSWER) else ""

    def _probe_delta(self) -> str:
        problem = ""
        try:
            text = self.render([*self.opening(SYSTEM, USER), self.answer(ANSWER), self.observation(OBSERVATION)])
        except RenderError as error:
            text, problem = "", f": {error}"
        start = text.find(ANSWER)
        if start < 0 or OBSERVATION not in text[start:]:
            other = "user" if self.role == "tool" else "tool"
            raise RenderError(
                f"the chat template of {self.name!r} does not show a message of role {self.role!r} after an answer; "
                f"use observation_role={other!r}{problem}"
            )
        return text[start + len(ANSWER) :]

    def opening(self, system: str, observation: str) -> list[Message]:
        """The messages before the first response. A template without system messages gets both in the user message."""
        if not system:
            return [{"role": "user", "content": observation}]
        if self._fold_system:
            return [{"role": "user", "content": f"{system}\n\n{observation}"}]
        return [{"role": "system", "content": system}, {"role": "user", "content": observation}]

    def observation(self, text: str) -> Message:
        return {"role": self.role, "content": text}

    def answer(self, text: str) -> Message:
        return {"role": "assistant", "content": self.prefill + text}

    def render(self, messages: Sequence[Message], *, generate: bool = True, tools: Sequence[Any] | None = None) -> str:
        """The whole conversation as text; `generate` appends the generation prompt.

        `tools` (OpenAI function schemas) stand in for the tool of this template.
        """
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=self._tools if tools is None else list(tools),
                chat_template=self._source,
                add_generation_prompt=generate,
                tokenize=False,
                **self._variables,
            )
        except ImportError as error:
            raise RenderError("chat templates need jinja2: pip install 'turngym[train]'") from error
        except Exception as error:  # templates raise whatever they like, jinja2's own errors included
            roles = ", ".join(message["role"] for message in messages)
            raise RenderError(f"the chat template of {self.name!r} refuses the roles {roles}: {error}") from error
        return str(text)

    def delta_text(self, observation: str) -> str:
        """What the template writes after a response: its closing, the observation and the next generation prompt."""
        text = self.render([*self.opening(SYSTEM, USER), self.answer(ANSWER), self.observation(observation)])
        return text[text.index(ANSWER) + len(ANSWER) :]

    def _encode(self, text: str) -> NDArray[np.int32]:
        """Ids of `text` as it stands, int32 [n]; no special tokens are added. Treat the array as read-only."""
        # the template has written the BOS already; the tokenizer would add a second one
        ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int32)
        ids.setflags(write=False)
        return ids

    def _decode(self, ids: tuple[int, ...]) -> str:
        # the cleanup drops spaces before punctuation: text that was not sampled
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode_cached(tuple(ids))
