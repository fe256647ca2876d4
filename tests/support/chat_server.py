"""A chat-completions server on this machine that says what was recorded after the same conversation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from openai_fake import Body, FakeOpenAI, Fault, error, served

from turngym.core.episode import Episode


class Recorded:
    """Responses by what was said before them: the observations so far and the responses between them."""

    def __init__(self, episodes: Sequence[Episode]) -> None:
        self.said: dict[tuple[str, ...], str] = {}
        self.systems: set[str] = set()
        for episode in episodes:
            before: tuple[str, ...] = ()
            self.systems.add(episode.system)
            for turn in episode.turns:
                before += (turn.observation,)
                assert self.said.setdefault(before, turn.response) == turn.response, "two answers to one conversation"
                before += (turn.response,)

    def answer(self, messages: Sequence[tuple[str, str]]) -> str:
        """What was said after `messages`, (role, text) each."""
        texts = tuple(text for role, text in messages if role not in ("system", "developer"))
        assert {text for role, text in messages if role in ("system", "developer")} <= self.systems
        return self.said[texts]


@contextmanager
def chat_server(recorded: Recorded) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(base URL, requests so far) of a server that answers as `recorded` says, and 400 to everything else."""

    def answer(body: Body) -> str:
        return recorded.answer([(message["role"], _text(message["content"])) for message in body["messages"]])

    def fault(number: int, body: Body) -> Fault | None:
        try:
            answer(body)
        except (KeyError, AssertionError) as missing:
            return Fault(status=400, error=error(f"nothing was recorded after this: {missing}"))
        return None

    with served(FakeOpenAI(model="", message=lambda body: {"content": answer(body)}, fault=fault)) as fake:
        yield fake.url, fake.requests


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)
