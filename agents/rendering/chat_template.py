"""A tokenizer's chat template, whose behavior is probed once, at construction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from turngym.agents.rendering.answers import AnswerForm, ContentAnswers, Message, StructuredAnswers
from turngym.agents.rendering.template_text import OBSERVATION, SYSTEM, RenderError, TemplateText
from turngym.envs.core import ToolSpec
from turngym.envs.dialects.dialect import Dialect
from turngym.envs.dialects.thoughts import THINK, Thoughts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ObservationRole = Literal["user", "tool"]

ANSWER = "turngymanswer"
USER = "turngymuser"


class ChatTemplate(TemplateText):
    """Messages to text, text to ids, ids to text, for one tokenizer and one set of template switches.

    Args:
        tokenizer: any Hugging Face tokenizer with a chat template.
        tool: described to the template (`tools=[schema]`); None leaves it out.
        thinking: `enable_thinking` of Qwen3-style templates; None leaves the template's own default.
        observation_role: role of every observation after the first (which is always `user`).
        variables: further template variables, for example `{"date_string": "26 Jul 2024"}`.
        dialect: how the model writes calls of `tool`; None: responses are content and nothing else.
        thoughts: how the model writes thoughts.

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
        dialect: Dialect | None = None,
        thoughts: Thoughts = THINK,
    ) -> None:
        if observation_role not in ("user", "tool"):
            raise RenderError(f"observation_role {observation_role!r} is unknown; valid: 'user', 'tool'")
        super().__init__(tokenizer, tool=tool, thinking=thinking, variables=variables)
        self.role = observation_role
        self.dialect, self.thoughts = dialect, thoughts
        self._probe(tool)

    def _probe(self, tool: ToolSpec | None) -> None:
        prompt = self.render(self.opening(SYSTEM, OBSERVATION))
        if OBSERVATION not in prompt:
            raise RenderError(f"the chat template of {self.name!r} does not show user messages")
        self.describes_tool = tool is not None and tool.name in prompt
        self.generation_prompt = prompt.rpartition(OBSERVATION)[2]
        """What stands between an observation and the answer."""
        self._opens_thought = prompt.rstrip().endswith(self.thoughts.opening)
        self.form: AnswerForm = ContentAnswers()
        """How responses are told to the template."""
        self.samples = self._sample_answers(tool)
        """Answers that any model of this dialect might give."""
        self.prefill = self._probe_prefill(prompt)
        """What the template puts into the assistant's mouth and what belongs to the message that it keeps."""
        # a response inside an open thought has to close it
        self._lead = f"{self.thoughts.after}{self.thoughts.closing}{self.thoughts.gap}" if self._opens_thought else ""
        self.form = self._choose_form()
        self._bare = self.samples[0]
        self._lead = self._probe_lead(prompt)
        self.samples = tuple(self.fit(answer) for answer in self.samples)
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

    def _sample_answers(self, tool: ToolSpec | None) -> tuple[str, ...]:
        if tool is not None and self.dialect is not None:
            values = (ANSWER, "go to shelf 1", 'it\'s "here"')
            return tuple(self.dialect.write(tool.name, tool.argument, value) for value in values)
        plain = (ANSWER, "<action>go to shelf 1</action>", '<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>')
        if self.thoughts is THINK:
            return plain
        return tuple(f"{self.thoughts.spoken}{text}" for text in plain[:2])

    def _probe_prefill(self, prompt: str) -> str:
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
        """Content as it stands where the template takes it; taken apart where only that shows what was said."""
        opened = f"{self.thoughts.opening}{self.thoughts.before}" if self._opens_thought else ""
        content = ContentAnswers(prefill=self.prefill or opened)
        if self.dialect is None and self.thoughts is THINK:
            return content
        apart: list[AnswerForm] = [
            StructuredAnswers(
                dialect=self.dialect,
                thoughts=self.thoughts,
                opened=self._opens_thought,
                special=self.special_tokens(),
                arguments_as_text=as_text,
            )
            for as_text in (False, True)
        ]
        # a template that marks plain text by itself would mark it twice
        forms = [*apart, content] if self.thoughts.spoken else [content, *apart]
        ranked = [self._rank(form) for form in forms]
        return forms[ranked.index(max(ranked))]

    def _rank(self, form: AnswerForm) -> int:
        """2: shows an answer with its thought exactly where it was said; 1: shows it somewhere; 0: not at all."""
        ranks = []
        thought = "" if self._opens_thought or self.thoughts is THINK else self.thoughts.write("turngymthought")
        for answer in (self._lead + self.samples[0], thought + self.samples[0]):
            history = self.opening(SYSTEM, USER)
            message = form.answer(answer)
            try:
                text = self.render([*history, message, form.observation(OBSERVATION, self.role, message)])
                exact = text.startswith(self.render(history) + answer)
            except RenderError:
                return 0
            shown = ANSWER in text and OBSERVATION in text[text.index(ANSWER) :]
            ranks.append(0 if not shown else 2 if exact else 1)
        return min(ranks)

    def _probe_delta(self) -> str:
        problem = ""
        try:
            text = self.delta_text(OBSERVATION) or ""
        except RenderError as error:
            text, problem = "", f": {error}"
        if OBSERVATION not in text:
            other = "user" if self.role == "tool" else "tool"
            raise RenderError(
                f"the chat template of {self.name!r} does not show a message of role {self.role!r} after an answer; "
                f"use observation_role={other!r}{problem}"
            )
        return text

    def _probe_lead(self, prompt: str) -> str:
        """What the template itself writes between the generation prompt and an answer without a thought."""
        history = self.opening(SYSTEM, OBSERVATION)
        try:
            text = self._shown_after(history, self._lead + self._bare)
            at = text.find(self._bare.strip(), len(prompt)) if text.startswith(prompt) else -1
            if at < 0:
                return self._lead
            # harmony's calls begin with a space of their own
            lead = text[len(prompt) : at].removesuffix(" " if self._bare.startswith(" ") else "")
            # what a template writes by itself it may refuse inside content
            self._shown_after(history, lead + self._bare)
        except RenderError:
            return self._lead
        return lead

    def _shown_after(self, history: list[Message], answer: str) -> str:
        message = self.answer(answer)
        return self.render([*history, message, self.observation(USER, message)])

    def observation(self, text: str, previous: Message | None = None) -> Message:
        """The message that tells `text` after the message `previous`."""
        return self.form.observation(text, self.role, previous)

    def answer(self, text: str) -> Message:
        return self.form.answer(text)

    def plain(self, message: Message) -> Message:
        """`message` without what a template may refuse in content: the special tokens."""
        content = str(message["content"])
        for token in self.special_tokens():
            content = content.replace(token, "")
        return {"role": message["role"], "content": content}

    def fit(self, text: str) -> str:
        """How a response that somebody wrote goes on from the generation prompt.

        Where the prompt opens a thought, the response is inside it: it does not open it again, and closes it even if
        there is none. Where the template writes something before every answer, so does the response.
        """
        opening, closing = self.thoughts.opening, self.thoughts.closing
        if self._opens_thought and closing in text and opening not in text.partition(closing)[0]:
            return text  # it was written inside the thought
        if text.startswith(opening):
            if self._opens_thought:
                return text.removeprefix(opening).removeprefix(self.thoughts.before)
            return self._lead[: self._lead.find(opening)] + text if opening in self._lead else text
        return self._lead + text

    def delta_text(self, observation: str, response: str | None = None) -> str | None:
        """What the template writes after a response: its closing, the observation and the next generation prompt.

        It depends on `response` only where the form is structured. None where the response is not shown as it was said.
        """
        history = self.opening(SYSTEM, USER)
        said = (response or self.samples[0]) if self.form.structured else self._bare
        message = self.answer(said)
        text = self.render([*history, message, self.observation(observation, message)])
        before = self.render(history) + said
        if self.form.structured and text.startswith(before):
            return text[len(before) :]
        # an answer that is shown elsewhere, or trimmed, says at least what follows one
        start = -1 if self.form.structured and response is not None else text.find(self._bare.strip())
        return None if start < 0 else text[start + len(self._bare.strip()) :]
