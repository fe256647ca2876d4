"""Requests under way in the local engine, and the batch of those that are being decoded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.slots import Moves
from turngym.envs.protocols import Generation, Sampling, Watch


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
    """The rows being decoded, row i in cache slot i, with their control tensors [B] on the device."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        """The ids to feed next."""
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.temperature = torch.empty(0, device=device)
        self.numbers = torch.empty(0, dtype=torch.int64, device=device)
        """0, 1, 2, ..."""

    def extend(self, rows: list[Row], tokens: Tensor) -> None:
        """Rows just prefilled, in slot order, and their first drawn ids."""
        device = tokens.device
        positions = torch.tensor([len(row.prompt) for row in rows], device=device)
        self.rows = [*self.rows, *rows]
        self.tokens = torch.cat((self.tokens, tokens))
        self.positions = torch.cat((self.positions, positions))
        self.temperature = torch.cat((self.temperature, temperatures(rows, device)))
        self.numbers = torch.arange(len(self.rows), device=device)

    def advance(self, tokens: Tensor) -> None:
        """One id was fed and the next drawn."""
        self.tokens = tokens
        self.positions = self.positions + 1

    def keep(self, staying: list[int], moves: Moves) -> None:
        """Only the slots `staying` go on; `moves` says where their rows went."""
        moved = dict(zip(moves[1], moves[0], strict=True))
        order = sorted(staying, key=lambda slot: moved.get(slot, slot))
        self.rows = [self.rows[slot] for slot in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.tokens.device)
        self.tokens, self.positions = self.tokens[index], self.positions[index]
        self.temperature = self.temperature[index]
        self.numbers = self.numbers[: len(order)]


def temperatures(rows: list[Row], device: torch.device) -> Tensor:
    """float32 [B]."""
    return torch.tensor([row.sampling.temperature for row in rows], device=device)


def take(pending: deque[Row], batch: Batch, free: int) -> list[Row]:
    """Remove up to `free` rows of different sessions from `pending`; a session's second request waits for its first."""
    busy = {row.session for row in batch.rows}
    chosen: list[Row] = []
    waiting: list[Row] = []
    while pending and len(chosen) < free:
        row = pending.popleft()
        (waiting if row.session in busy else chosen).append(row)
        busy.add(row.session)
    # extendleft reverses what it is given, and requests of one session must stay in order
    pending.extendleft(reversed(waiting))
    return chosen
