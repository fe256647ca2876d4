"""The token ids of one conversation: a buffer per segment that is only appended to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from turngym.agents.rendering.answer_messages import Message
from turngym.core.episode import Span, Turn


class IdBuffer:
    """Token ids that are only appended to. `view()` copies nothing and stays valid while the buffer grows."""

    __slots__ = ("_data", "size")

    def __init__(self, capacity: int = 256) -> None:
        self._data = np.empty(capacity, np.int32)
        self.size = 0

    def extend(self, ids: NDArray[np.int32]) -> Span:
        """Append `ids`; returns their half-open range of positions."""
        start, stop = self.size, self.size + len(ids)
        if stop > len(self._data):
            grown = np.empty(max(stop, 2 * len(self._data)), np.int32)
            grown[:start] = self._data[:start]
            self._data = grown
        self._data[start:stop] = ids
        self.size = stop
        return start, stop

    def view(self) -> NDArray[np.int32]:
        """All ids so far, int32 [n], as a read-only view."""
        view = self._data[: self.size]
        view.setflags(write=False)
        return view

    def array(self) -> NDArray[np.int32]:
        """A copy of all ids so far, int32 [n]."""
        return self._data[: self.size].copy()


@dataclass(slots=True)
class TokenHistory:
    """The token side of one conversation, written by a `ChatRenderer` and read by the rollout driver."""

    segments: list[IdBuffer] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    """The current segment as text, joined only when it must be compared with a full rendering."""
    prompt_span: Span = (0, 0)
    response_span: Span = (0, 0)
    response: str = ""
    """The last response as text, without the id that ended it."""
    last_id: int | None = None
    """The stop id that ended the last response; None if it was cut."""
    awaiting: bool = False
    """Whether the last prompt has no response yet."""
    appendable: bool = True
    """Whether the template has shown every response so far unchanged."""

    def said(self, turns: Sequence[Turn]) -> tuple[NDArray[np.int32], ...]:
        """The ids of each segment up to its last response among `turns`; a prompt without a response is left out."""
        ends = {turn.segment: turn.response_span[1] for turn in turns}
        segments = self.segments[: max(ends, default=-1) + 1]
        return tuple(buffer.array()[: ends[number]] for number, buffer in enumerate(segments))

    @property
    def segment(self) -> int:
        return len(self.segments) - 1

    @property
    def buffer(self) -> IdBuffer:
        return self.segments[-1]
