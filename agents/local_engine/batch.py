"""Requests under way in the local engine, and the batch of those that are being decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.dense.segments import Segment, segments
from turngym.agents.local_engine.model import EngineError, bias
from turngym.agents.local_engine.sampling import StopText, draw, greedy
from turngym.agents.local_engine.slots import Moves
from turngym.envs.protocols import Generation, Sampling, Watch

_MOVE = 8
"""Steps of one row without attention that cost as much as exchanging two rows of the cache, about."""


@dataclass(slots=True)
class Row:
    """One request under way: the checked request, its random numbers, and what was drawn so far."""

    session: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    uniform: NDArray[np.float64]
    """[room] numbers in [0, 1): the most that may be drawn; empty for a prompt that fills the context."""
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    """Empty while the row is being decoded."""
    watch: Watch | None = None

    @property
    def length(self) -> int:
        """Ids so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    def fed(self) -> NDArray[np.int32]:
        """The ids whose K/V exist: the last id was drawn but never fed."""
        return np.concatenate((self.prompt, np.array(self.tokens[:-1], np.int32)))

    def generation(self, policy_version: int) -> Generation:
        ids, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Generation(ids=ids, logprobs=logprobs, finish=self.finish, policy_version=policy_version)


class Batch:
    """The rows being decoded, row i in cache slot i, with their control tensors [B] on the device.

    A finished row stays where it is until the engine closes ranks; where a pass cannot leave it out it is fed to the
    trash row.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        """The ids to feed next."""
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.temperature = torch.empty(0, device=device)
        self.cells: Tensor | None = None
        """int64: slots of the rows that go on; None for all."""
        self.longest = 0
        """Ids of the longest row that goes on, the one to be fed included."""
        self.idle: list[int] = []
        """Slots of finished rows, ascending."""
        self.wasted = 0
        """Steps of finished rows since ranks were last closed."""
        self._targets: Tensor | None = None
        self._steps: Tensor | int = 1
        self._segments: tuple[Segment, ...] | None = None
        self._planned = 0
        self._bias: Tensor | None = None

    @property
    def going(self) -> list[Row]:
        """The rows that go on."""
        return [row for row in self.rows if not row.finish] if self.idle else self.rows

    def going_temperature(self) -> Tensor:
        """Of the rows that go on."""
        return self.temperature if self.cells is None else self.temperature[self.cells]

    def extend(self, rows: list[Row], tokens: Tensor) -> None:
        """Rows just prefilled, in slot order, and their first drawn ids."""
        device = tokens.device
        positions = torch.tensor([len(row.prompt) for row in rows], device=device)
        self.rows = [*self.rows, *rows]
        self.tokens = torch.cat((self.tokens, tokens))
        self.positions = torch.cat((self.positions, positions))
        self.temperature = torch.cat((self.temperature, temperatures(rows, device)))
        self._changed()

    def advance(self, tokens: Tensor) -> None:
        """One id was fed and the next drawn, for every row that went on."""
        if self.cells is None:
            self.tokens = tokens
        else:
            self.tokens[self.cells] = tokens
        self.positions = self.positions + self._steps
        self.longest += 1
        self.wasted += len(self.idle)

    def finish(self) -> list[Row]:
        """Take note of rows that have finished since; returns them."""
        done = [slot for slot, row in enumerate(self.rows) if row.finish]
        if len(done) == len(self.idle):
            return []
        known = set(self.idle)
        self.idle, self._targets, self._segments = done, None, None
        # a finished row stands still at a position that the cache has
        self.positions[done] = 0
        self._steps = torch.tensor([0 if row.finish else 1 for row in self.rows], device=self.tokens.device)
        self.cells = self._steps.nonzero()[:, 0]
        self.longest = max((row.length for row in self.rows if not row.finish), default=0)
        return [self.rows[slot] for slot in done if slot not in known]

    def worth_closing(self) -> bool:
        """Whether the finished rows have cost as much as it takes to move others into their slots."""
        going = len(self.rows) - len(self.idle)
        return bool(self.idle and going) and self.wasted >= _MOVE * sum(slot < going for slot in self.idle)

    def targets(self, trash: int) -> Tensor:
        """int64 [B]: the cache row that takes each row's next key, `trash` for a finished one."""
        if self._targets is None:
            self._targets = torch.arange(len(self.rows), device=self.tokens.device)
            if self.idle:
                self._targets[self.idle] = trash
        return self._targets

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive [B, 1, 1, longest]: every row sees its own past and the id that is fed."""
        if self._bias is None or self._bias.shape[1] < self.longest:
            # room for the steps to come, each of which shows one more position of every row
            columns = torch.arange(self.longest + 64, device=self.tokens.device)
            self._bias = bias(columns > self.positions[:, None], dtype)
        else:
            self._bias.scatter_(1, self.positions[:, None], 0.0)
        return self._bias[:, None, None, : self.longest]

    def segments(self, call: float) -> tuple[Segment, ...]:
        """Which rows read how many keys in the next step; `call` as in `segments.segments`."""
        if self._segments is None:
            lengths = [0 if row.finish else row.length for row in self.rows]
            self._segments, self._planned = segments(lengths, call), self.longest
        return tuple(segment.grown(self.longest - self._planned) for segment in self._segments)

    def keep(self, moves: Moves) -> None:
        """Only the rows that have not finished go on; `moves` says where they went."""
        moved = dict(zip(moves[1], moves[0], strict=True))
        gone = set(self.idle)
        staying = [slot for slot in range(len(self.rows)) if slot not in gone]
        order = sorted(staying, key=lambda slot: moved.get(slot, slot))
        self.rows = [self.rows[slot] for slot in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.tokens.device)
        self.tokens, self.positions = self.tokens[index], self.positions[index]
        self.temperature = self.temperature[index]
        self._changed()

    def _changed(self) -> None:
        self.longest = max((row.length for row in self.rows), default=0)
        self.idle, self.wasted, self._steps = [], 0, 1
        self._targets = self._bias = self._segments = self.cells = None


def temperatures(rows: list[Row], device: torch.device) -> Tensor:
    """float32 [B]."""
    return torch.tensor([row.sampling.temperature for row in rows], device=device)


def take(pending: deque[Row], batch: Batch, free: int) -> list[Row]:
    """Remove up to `free` rows of different sessions from `pending`; a session's second request waits for its first."""
    busy = {row.session for row in batch.rows if not row.finish}
    chosen: list[Row] = []
    waiting: list[Row] = []
    while pending and len(chosen) < free:
        row = pending.popleft()
        (waiting if row.session in busy else chosen).append(row)
        busy.add(row.session)
    # extendleft reverses what it is given, and requests of one session must stay in order
    pending.extendleft(reversed(waiting))
    return chosen


class Answers:
    """Draws one id per row and keeps the rows' books.

    Args:
        stop_text: None where nothing can be decoded.
    """

    def __init__(self, stop_text: StopText | None) -> None:
        self._stop_text = stop_text

    def draw(self, rows: Sequence[Row], logits: Tensor, temperature: Tensor) -> Tensor:
        """Draw one id per row, note it and whether it ends the row; ids int64 [B] on the device.

        Raises EngineError for logits that are not finite.
        """
        if all(row.sampling.temperature == 0 for row in rows):
            ids, logprobs = greedy(logits)
        else:
            numbers = [row.uniform[len(row.tokens)] for row in rows]
            ids, logprobs = draw(logits, temperature, torch.from_numpy(np.array(numbers)).to(logits.device))
        # one transfer per step, since each waits for the device; float64 holds ids and float32 exactly
        both = torch.stack((ids.double(), logprobs.double())).cpu().numpy()
        if not np.isfinite(both[1]).all():
            raise _not_finite(rows, both[1])
        for row, token, logprob in zip(rows, both[0].astype(np.int64).tolist(), both[1].tolist(), strict=True):
            self._note(row, token, logprob)
        return ids

    def _note(self, row: Row, token: int, logprob: float) -> None:
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if token in row.stop_ids or (row.sampling.stop_text and self._hit(row)):
            row.finish = "stop"
        elif len(row.tokens) >= len(row.uniform):
            row.finish = "length"
        if row.watch is not None and not row.watch(token, logprob):
            row.finish = row.finish or "aborted"

    def _hit(self, row: Row) -> bool:
        return self._stop_text is not None and self._stop_text.hit(row.tokens, row.sampling.stop_text)


def _not_finite(rows: Sequence[Row], logprobs: np.ndarray) -> EngineError:
    place = int(np.argmin(np.isfinite(logprobs)))
    row = rows[place]
    return EngineError(
        f"session {row.session!r}: token {len(row.tokens)} of the response has log-probability {logprobs[place]}; "
        "the model's logits are not finite (diverged weights?)"
    )
