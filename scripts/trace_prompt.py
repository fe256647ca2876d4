"""What stood in the prompt of a turn, as the model read it.

An agent with token ids leaves them in the trace, so its prompt is decoded to the letter: template, system message and
what its memory keeps of past turns. Where there are none (endpoints), the chat messages are built again from the texts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from turngym.agents.models import load_tokenizer
from turngym.agents.named_agent import chat_settings
from turngym.agents.play_spec import EvalSpec, Model, ModelChat, OpenAI
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.memory import ALL, Memory, PastTurn, chat_messages, without
from turngym.core.episode import Episode, Turn
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.nested import at
from turngym.core.plugins import need
from turngym.core.provenance import CONFIG_FILE
from turngym.core.settings import read_toml
from turngym.core.spec import read
from turngym.core.trace import read_specs
from turngym.core.user_files import user_path
from turngym.envs.channels import split_thought
from turngym.envs.guard import listed

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, special tokens included."""


def load_decoder(folder: str | Path) -> Decode:
    """The decoder of the tokenizer in `folder`. Raises TurngymError."""
    need("transformers", "--tokenizer", "train")
    tokenizer = load_tokenizer(folder)
    return lambda ids: str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Finds the prompts of the episodes of one trace."""

    decode: Decode | None
    """None where no tokenizer is known."""
    memory: Memory = ALL
    """What an agent without token ids was shown of past turns."""

    @classmethod
    def of(cls, trace: Path, tokenizer: Path | None = None) -> Prompts:
        """Uses `tokenizer`, else that of the model that the trace names, if it is there."""
        specs = [read(EvalSpec, table, str(trace)) for table in read_specs(trace).values()]
        agent = specs[0].agent if specs else None
        # a student in training has no weights of a folder
        folder = agent.folder if isinstance(agent, Model) and agent.weights else _student_beside(trace)
        if tokenizer is None and folder and (user_path(folder) / "tokenizer_config.json").is_file():
            tokenizer = user_path(folder)
        memory = ALL
        if isinstance(agent, OpenAI):
            chat = ModelChat(memory=agent.chat.memory)
            memory = chat_settings(chat, ChatSettings(), specs[0].play.env.id).remembers
        return cls(decode=None if tokenizer is None else load_decoder(tokenizer), memory=memory)

    def whole(self, episode: Episode, turn: Turn) -> str:
        """The prompt of a turn. Raises TurngymError where its ids are recorded and no tokenizer is known."""
        if not turn.response_length:
            return self._messages(episode, turn)
        if self.decode is None:
            raise TurngymError("--prompt: no tokenizer is known for these token ids; name its folder with --tokenizer")
        return self.decode(episode.segments[turn.segment][: turn.response_span[0]].tolist())

    def added(self, episode: Episode, turn: Turn) -> tuple[str, bool] | None:
        """What the prompt has behind the response before, and whether nothing stands before it; None if unknown."""
        if not turn.response_length:
            return (self._messages(episode, turn), True)
        if self.decode is None:
            return None
        before = episode.turns[turn.index - 1] if turn.index else None
        same = before is not None and before.segment == turn.segment
        start = before.response_span[1] if before is not None and same else 0
        return self.decode(episode.segments[turn.segment][start : turn.response_span[0]].tolist()), not same

    def _messages(self, episode: Episode, turn: Turn) -> str:
        if turn.finish == "scripted":
            return "(a scripted agent reads no prompt)"
        past = [
            PastTurn(
                observation=earlier.observation,
                response=earlier.response,
                action=earlier.action,
                listing=listed(earlier.admissible or ()),
                thought=split_thought(earlier.response)[0] or "",
            )
            for earlier in episode.turns[: turn.index]
        ]
        first = episode.turns[0]
        task = without(first.observation, listed(first.admissible or ()))
        messages = chat_messages(self.memory, episode.system or "", task, past, turn.observation, turn.admissible)
        return "\n\n".join(f"[{message['role']}]\n{message['content']}" for message in messages)


def _student_beside(trace: Path) -> str:
    """The student of the training run in whose folder a trace lies; "" where there is none."""
    for folder in trace.absolute().parents[:2]:
        if (folder / CONFIG_FILE).is_file():
            try:
                return str(at(read_toml(folder / CONFIG_FILE), "models.student") or "")
            except SettingsError:
                return ""
    return ""
