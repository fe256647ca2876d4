"""What a tokenizer's chat template does: messages to text, text to ids, ids to text.

Templates differ in more than their markers: some have no system messages, some open a thought for the model, some
rewrite or refuse earlier answers. `ChatTemplate` renders a few marked conversations once, at construction, and reads
these facts from the results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering import template_limits
from turngym.agents.rendering.answer_messages import AnswerForm, ContentAnswers, Message, StructuredAnswers
from turngym.agents.rendering.template_limits import TRUSTED, TemplateLimit
from turngym.agents.rendering.text_encoder import CACHE, Shielded, TextEncoder
from turngym.core.errors import TurngymError
from turngym.core.tools import Tools, ToolSet
from turngym.envs.tool_calls import THINK, CallDialect, Thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ObservationRole = Literal["user", "tool"]
# Markers for probing are plain letters, which no template trims, escapes or parses.
OBSERVATION = "turngymobservation"
SYSTEM = "turngymsystem"
ANSWER = "turngymanswer"
USER = "turngymuser"
FIXED_DATE = {"date_string": "26 Jul 2024"}
"""The date that Llama 3's templates fall back to without a clock."""
# This macro hides the global function of the same name that transformers passes to the template.
FIXED_CLOCK = (
    "{%- macro strftime_now(form) -%}"
    "{%- if '%Y-%m-%d' in form -%}2024-07-26{%- else -%}26 Jul 2024{%- endif -%}"
    "{%- endmacro -%}"
)
"""Prepended to templates that print today's date, which would give other tokens tomorrow."""


class RenderError(TurngymError):
    """A tokenizer or chat template that cannot show a conversation."""


class TemplateCostError(TurngymError):
    """A chat template that goes beyond the limits of `template_limits`. No `RenderError`: nobody tries another form."""


def probe_call(tool: Tools, text: str) -> tuple[str, dict[str, Any]]:
    """(name, arguments) of a call that carries `text`, for rendering: templates do not look at types."""
    first = tool.tools[0]
    return first.name, {first.arguments[0].name if first.arguments else "text": text}


class ChatTemplate:
    """The chat template of one tokenizer with one set of switches, and what probing it has shown.

    Args:
        tool: described to the template (`tools=schemas`); None leaves it out.
        thinking: `enable_thinking` of Qwen3-style templates; None leaves the template's own default.
        observation_role: role of every observation after the first (which is always `user`).
        dialect: how the model writes calls of `tool`; None if responses are plain content.

    Raises RenderError if the tokenizer has no chat template, or it does not show observations of that role, and here as
    in every later rendering TemplateCostError if the template costs too much.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        tool: Tools | None = None,
        thinking: bool | None = None,
        observation_role: ObservationRole = "user",
        dialect: CallDialect | None = None,
        thoughts: Thoughts = THINK,
    ) -> None:
        if observation_role not in ("user", "tool"):
            raise RenderError(f"observation_role {observation_role!r} is unknown; valid: 'user', 'tool'")
        self.tokenizer = tokenizer
        self.name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        self._tools: list[Any] | None = None if tool is None else tool.schemas()
        self._variables: dict[str, Any] = {**FIXED_DATE}
        if thinking is not None:
            self._variables["enable_thinking"] = thinking
        if not getattr(tokenizer, "chat_template", None):
            raise RenderError(
                f"tokenizer {self.name!r} has no chat template: use that of an instruction-tuned model, or set "
                "tokenizer.chat_template (ChatML is a safe choice for models that were never tuned to a format)"
            )
        try:
            self.source = str(tokenizer.get_chat_template(tools=self._tools))
            """The template's own text."""
        # several templates, none of them the default
        except ValueError as error:
            raise RenderError(f"the chat template of {self.name!r} cannot be chosen: {error}") from error
        # transformers, and servers with it, would put it in front of every prompt
        if self.source.startswith("\ufeff"):
            raise RenderError(f"the chat template {self._place()} begins with a byte order mark; save it without one")
        self._source = FIXED_CLOCK + self.source if "strftime_now" in self.source else self.source
        self.encoder = TextEncoder(tokenizer, self.source)
        """Makes ids of what the template writes and of what contents say."""
        self._special = sorted(self.encoder.special, key=len, reverse=True)
        self.spoken: frozenset[str] = frozenset()
        """Control tokens that answers are made of: those of thoughts and calls."""
        # caches per instance: one on the methods would be shared and keep every tokenizer alive
        self._decode_cached = lru_cache(CACHE)(self._decode)
        self._in_parts = False
        if not self._shows_users():
            self._in_parts = True
            # a template may also refuse a conversation without a system message
            self._in_parts = self._shows_users()
        # opening() reads the switch, so the trial itself must run with it off
        self._fold_system = False
        try:
            self._fold_system = SYSTEM not in self.render(self.opening(SYSTEM, OBSERVATION))
        except RenderError:
            self._fold_system = True
        self.role = observation_role
        self.dialect, self.thoughts = dialect, thoughts
        self._probe(tool)

    def _shows_users(self) -> bool:
        """Whether a user's content is shown. Templates of some models that also read images take lists of parts alone
        (LLaVA, SmolVLM), and show nothing of a text."""
        try:
            return OBSERVATION in self.render([{"role": "user", "content": OBSERVATION}])
        except RenderError:
            return False

    def opening(self, system: str, observation: str) -> list[Message]:
        """The messages before the first response. Without support for system messages, both go into a user message."""
        if not system:
            return [{"role": "user", "content": observation}]
        if self._fold_system:
            contents = self._shown({"role": "system", "content": system})["content"], self.encoder.shield(observation)
            return [{"role": "user", "content": Shielded("\n\n".join(contents))}]
        return [{"role": "system", "content": system}, {"role": "user", "content": observation}]

    def render(self, messages: Sequence[Message], *, generate: bool = True, tools: Sequence[Any] | None = None) -> str:
        """The whole conversation as text for `encode`; `generate` appends the generation prompt.

        What contents spell is shielded (`TextEncoder.shield`); of assistant messages `written` and `said` have done
        that. `tools` (OpenAI function schemas) replace the tool of this template.
        """
        schemas = self._tools if tools is None else tools
        visible = [self._shown(message) for message in messages]
        if self._in_parts:
            texts = [message.get("content") for message in visible]
            visible = [
                {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message
                for message, text in zip(visible, texts, strict=True)
            ]
        shielded_schemas = None if schemas is None else self.encoder.shield_all(list(schemas))
        try:
            if self.source in TRUSTED:
                text = self.tokenizer.apply_chat_template(
                    visible,
                    tools=shielded_schemas,
                    chat_template=self._source,
                    add_generation_prompt=generate,
                    tokenize=False,
                    **self._variables,
                )
            else:
                variables = {**self.tokenizer.special_tokens_map, **self._variables}
                text = template_limits.render(
                    self._source, visible, tools=shielded_schemas, generate=generate, variables=variables
                )
        except TemplateLimit as error:
            raise TemplateCostError(f"the chat template {self._place()} {error}") from error
        except ImportError as error:
            raise RenderError("chat templates need jinja2: pip install 'turngym[train]'") from error
        # templates raise anything, jinja2's own errors included
        except Exception as error:
            roles = ", ".join(message["role"] for message in messages[:8]) + ", ..." * (len(messages) > 8)
            raise RenderError(f"the chat template of {self.name!r} refuses the roles {roles}: {error}") from error
        return str(text)

    def _place(self) -> str:
        """The file that holds the template, where it is one of a folder."""
        for file in ("chat_template.jinja", "tokenizer_config.json"):
            if (Path(self.name) / file).is_file():
                return f"in {Path(self.name) / file}"
        return f"of {self.name!r}"

    def _shown(self, message: Message) -> Message:
        """`message` as the template is given it, a control token in its texts no more than text."""
        if message["role"] == "assistant":
            return message
        # instructions teach how to write thoughts and calls, in the very tokens unless they are special
        keep = self.spoken - self.encoder.special if message["role"] == "system" else frozenset[str]()
        return {key: value if key == "role" else self.encoder.shield_all(value, keep) for key, value in message.items()}

    def encode(self, text: str, after: str = "") -> NDArray[np.int32]:
        """Ids of `text` as it stands behind the text `after`, int32 [n]; no special tokens are added. Treat the array
        as read-only."""
        return self.encoder.encode(text, after)

    def written(self, text: str) -> str:
        """The response `text`, which nobody sampled, for `answer` and `encode`: only thoughts and calls are tokens."""
        return self.encoder.shield(text, self.spoken)

    def said(self, ids: Sequence[int], text: str) -> str:
        """The sampled response `ids`, decoded to `text`, for `answer`: tokens are what was sampled as such."""
        return self.encoder.shield_sampled(ids, text, self.spoken)

    def _decode(self, ids: tuple[int, ...]) -> str:
        # the cleanup would drop spaces before punctuation, so the text would differ from what was sampled
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def text_of(self, token: int) -> str:
        """The text of a token that ends a response, as templates write it: decoders put a space before some."""
        return self.encoder.ids.get(token) or self.decode([token])

    def answer_text(self, ids: Sequence[int]) -> str:
        """The text of a response: SentencePiece's decoder takes off the space that a template writes before answers."""
        text = self.decode(ids)
        if not ids or text.startswith(" ") or not self._lead.startswith(" "):
            return text
        first = self.tokenizer.convert_ids_to_tokens(int(ids[0]))
        return f" {text}" if str(first).startswith("▁") else text

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode_cached(tuple(ids))

    def _probe(self, tool: Tools | None) -> None:
        """Read the template's habits from a few renderings. Later steps use what the earlier ones have set."""
        prompt = self.render(self.opening(SYSTEM, OBSERVATION))
        if OBSERVATION not in prompt:
            raise RenderError(f"the chat template of {self.name!r} does not show user messages")
        self.describes_tool = tool is not None and all(offered.name in prompt for offered in tool.tools)
        self.generation_prompt = prompt.rpartition(OBSERVATION)[2]
        """Text between an observation and the answer."""
        self.opens_thought = prompt.rstrip().endswith(self.thoughts.opening)
        """Whether the prompt opens a thought, so that an answer begins inside it."""
        self.form: AnswerForm = ContentAnswers()
        """How responses are passed to the template."""
        self.samples = self._sample_answers(tool)
        """Answers that any model of this dialect might give."""
        self.prefill = self._probe_prefill(prompt)
        """Text that the generation prompt puts into the assistant's message and the template expects in it later."""
        # a response that begins inside an open thought has to close it
        self._lead = f"{self.thoughts.after}{self.thoughts.closing}{self.thoughts.gap}" if self.opens_thought else ""
        self.form = self._choose_form()
        self._bare = self.samples[0]
        self._lead = self._probe_lead(prompt)
        self.samples = tuple(self.fit(answer) for answer in self.samples)
        delta = self._probe_delta()
        # templates also write tokens that they put together, so that their source does not have them
        written = f"{self.source}\n{prompt}\n{delta}"
        self.encoder = TextEncoder(self.tokenizer, written)
        self.writes = frozenset(token for token in self.encoder.control if token in written)
        """Control tokens that the template writes."""
        first = self.encode(delta, after=self._bare)[:1].tolist()
        eos = getattr(self.tokenizer, "eos_token_id", None)
        # if a template closes answers with plain text, or as thoughts are closed (GPT-OSS), only the tokenizer's eos
        # can end one
        closing = self.encoder.ids.get(first[0]) if first else None
        self.end_id: int | None = first[0] if closing not in (None, self.thoughts.closing) else eos
        """The id that closes an assistant message."""
        self.end_text = "" if self.end_id is None else self.text_of(self.end_id)
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys(end for end in (self.end_id, eos) if end is not None))
        form = "".join((*self.samples, self._lead, self.prefill, self.thoughts.write("x"), self.thoughts.spoken))
        calls = () if self.dialect is None else self.dialect.stop_text
        self.spoken = frozenset(token for token in self.encoder.control if token in form or token in calls)

    def _sample_answers(self, tool: Tools | None) -> tuple[str, ...]:
        if tool is not None and self.dialect is not None:
            values = (ANSWER, "go to shelf 1", 'it\'s "here"')
            calls = [probe_call(tool, value) for value in values]
            # numbers and truth values, which templates write each in its own way
            calls += map(tool.call, tool.examples) if isinstance(tool, ToolSet) else ()
            return tuple(self.dialect.write(*call) for call in calls)
        plain = (ANSWER, "<action>go to shelf 1</action>", '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>')
        if self.thoughts is THINK:
            return plain
        return tuple(f"{self.thoughts.spoken}{text}" for text in plain[:2])

    def _probe_prefill(self, prompt: str) -> str:
        """What the generation prompt has beyond the head of an answer, if answers must repeat it; else ""."""
        history = self.opening(SYSTEM, OBSERVATION)
        try:
            closed = self.render([*history, {"role": "assistant", "content": ANSWER}], generate=False)
        except RenderError:
            return ""
        head = closed[: closed.index(ANSWER)] if ANSWER in closed else ""
        if not head or not prompt.startswith(head) or prompt == head:
            return ""
        prefill = prompt[len(head) :]
        again = [*history, {"role": "assistant", "content": prefill + ANSWER}, {"role": self.role, "content": USER}]
        try:
            return prefill if self.render(again).startswith(prompt + ANSWER) else ""
        except RenderError:
            return ""

    def _choose_form(self) -> AnswerForm:
        """Plain content if the template shows it as it was said, else the structured form that comes closest."""
        opened = f"{self.thoughts.opening}{self.thoughts.before}" if self.opens_thought else ""
        content = ContentAnswers(prefill=self.prefill or opened)
        if self.dialect is None and self.thoughts is THINK:
            return content
        structured: list[AnswerForm] = [
            StructuredAnswers(
                dialect=self.dialect,
                thoughts=self.thoughts,
                opened=self.opens_thought,
                special=self._special,
                arguments_as_text=as_text,
            )
            for as_text in (False, True)
        ]
        # a template that marks plain text by itself would mark it twice
        forms = [*structured, content] if self.thoughts.spoken else [content, *structured]
        ranked = [self._rank(form) for form in forms]
        return forms[ranked.index(max(ranked))]

    def _rank(self, form: AnswerForm) -> int:
        """How well `form` shows an answer with its thought: 2 exactly where it was said, 1 somewhere, 0 not at all."""
        ranks = []
        thought = "" if self.opens_thought or self.thoughts is THINK else self.thoughts.write("turngymthought")
        for answer in (self._lead + self.samples[0], thought + self.samples[0]):
            history = self.opening(SYSTEM, USER)
            message = form.answer(answer)
            try:
                text = self.render([*history, message, form.observation(OBSERVATION, self.role, message)])
                exact = text.startswith(self.render(history) + answer)
            except RenderError:
                return 0
            is_shown = ANSWER in text and OBSERVATION in text[text.index(ANSWER) :]
            ranks.append(0 if not is_shown else 2 if exact else 1)
        return min(ranks)

    def _probe_delta(self) -> str:
        """What the template writes after an answer. Raises RenderError if it does not show the next observation."""
        problem = ""
        try:
            text = self.delta_text(OBSERVATION) or ""
        except RenderError as error:
            text, problem = "", f": {error}"
        if OBSERVATION not in text:
            other_role = "user" if self.role == "tool" else "tool"
            raise RenderError(
                f"the chat template of {self.name!r} does not show a message of role {self.role!r} after an answer; "
                f"use observation_role={other_role!r}{problem}"
            )
        return text

    def _probe_lead(self, prompt: str) -> str:
        """What the template itself writes between the generation prompt and an answer without a thought."""
        history = self.opening(SYSTEM, OBSERVATION)
        try:
            text = self._shown_after(history, self._lead + self._bare)
            start = text.find(self._bare.strip(), len(prompt)) if text.startswith(prompt) else -1
            if start < 0:
                return self._lead
            # harmony's calls begin with a space of their own
            lead = text[len(prompt) : start].removesuffix(" " if self._bare.startswith(" ") else "")
            # a template may refuse inside content what it writes by itself, so this is tried once
            self._shown_after(history, lead + self._bare)
        except RenderError:
            return self._lead
        return lead

    def _shown_after(self, history: list[Message], answer: str) -> str:
        message = self.answer(answer)
        return self.render([*history, message, self.observation(USER, message)])

    def observation(self, text: str, previous: Message | None = None) -> Message:
        """The message that shows the observation `text` after the message `previous`."""
        return self.form.observation(text, self.role, previous)

    def answer(self, text: str) -> Message:
        """The assistant message of the response `text`."""
        return self.form.answer(text)

    def plain(self, message: Message) -> Message:
        """`message` without special tokens, which a template may refuse in content."""
        content = str(message["content"])
        for token in self._special:
            content = content.replace(token, "")
        return {"role": message["role"], "content": content}

    def fit(self, text: str) -> str:
        """Adapt a response that somebody else wrote so that it continues this template's generation prompt.

        If the prompt opens a thought, the response does not open it again, and closes it even if it has no thought. If
        the template writes something before every answer, the response begins with it.
        """
        opening, closing = self.thoughts.opening, self.thoughts.closing
        # the response was already written inside a thought
        if self.opens_thought and closing in text and opening not in text.partition(closing)[0]:
            return text
        if text.startswith(opening):
            if self.opens_thought:
                return text.removeprefix(opening).removeprefix(self.thoughts.before)
            before, has_thought, _ = self._lead.partition(opening)
            # what is for answers without a thought does not stand before one, but for the space that it begins with
            return (before if has_thought else before[: len(before) - len(before.lstrip())]) + text
        return self._lead + text

    def delta_text(self, observation: str, response: str | None = None) -> str | None:
        """What the template writes after a response: its closing, the observation and the next generation prompt.

        It depends on `response` only if the form is structured. None if the response is not shown as it was said.
        """
        history = self.opening(SYSTEM, USER)
        answer_text = (response or self.samples[0]) if self.form.structured else self._bare
        message = self.answer(answer_text)
        text = self.render([*history, message, self.observation(observation, message)])
        before = self.render(history) + answer_text
        if self.form.structured and text.startswith(before):
            return text[len(before) :]
        # an answer that is shown elsewhere or trimmed still tells what follows an answer
        start = -1 if self.form.structured and response is not None else text.find(self._bare.strip())
        return None if start < 0 else text[start + len(self._bare.strip()) :]
