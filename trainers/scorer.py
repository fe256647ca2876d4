"""LocalScorer: a frozen model in this process that scores given ids (teachers, reference policies)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turngym.envs.episode import TopK
from turngym.trainers.model import ModelError, head, hidden_states, length_batches, vocabulary_size

Ids = Sequence[NDArray[np.int32]]
Positions = Sequence[NDArray[np.int64]]


class SupportScorer(Protocol):
    """A scorer that can also look up ids which somebody else chose (`support="student"`)."""

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        """Log-probabilities of `support` [P, K] at each of the P positions: float32 [P, K]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScorer:
    """Implements `Scorer` and `SupportScorer` with micro-batches; holds [chunk, V] logits at most, never [B, T, V]."""

    model: nn.Module
    vocab_size: int | None = None
    """Use only the first ids, when teacher and student are padded to different sizes."""
    temperature: float = 1.0
    """Scores are log-softmax(logits / temperature): the `distill_temperature`."""
    max_tokens: int = 8192
    """Padded tokens per forward pass."""
    chunk: int = 1024
    """Positions that go through the head at a time."""

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        k = min(k, self.vocab_size or vocabulary_size(self.model))
        found: list[TopK | None] = [None] * len(ids)
        for row, logp in self._rows(ids, positions):
            parts = [part.topk(k, dim=-1) for part in logp]
            top_ids = torch.cat([part.indices for part in parts]) if parts else torch.zeros(0, k)
            top_logp = torch.cat([part.values for part in parts]) if parts else torch.zeros(0, k)
            found[row] = TopK(ids=top_ids.cpu().numpy().astype(np.int32), logp=top_logp.cpu().numpy())
        return [item for item in found if item is not None]

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        labels = [np.asarray(row, np.int64)[where][:, None] for row, where in zip(ids, positions, strict=True)]
        return [column[:, 0] for column in self.gather(ids, positions, labels)]

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        found: list[NDArray[np.float32] | None] = [None] * len(ids)
        for row, logp in self._rows(ids, positions):
            wanted = torch.as_tensor(support[row], dtype=torch.int64)
            parts, start = [], 0
            for part in logp:
                parts.append(part.gather(1, wanted[start : start + len(part)].to(part.device)).cpu())
                start += len(part)
            found[row] = torch.cat(parts).numpy() if parts else np.zeros(wanted.shape, np.float32)
        return [item for item in found if item is not None]

    @torch.no_grad()
    def _rows(self, ids: Ids, positions: Positions) -> Iterator[tuple[int, Iterator[Tensor]]]:
        """Yield (row number, its log-probabilities in chunks [<= chunk, V], float32)."""
        _check_positions(ids, positions)
        weight, bias = head(self.model, self.vocab_size)
        for batch in length_batches([len(row) for row in ids], self.max_tokens):
            states = hidden_states(self.model, [ids[row] for row in batch])
            for line, row in enumerate(batch):
                before = torch.from_numpy(np.asarray(positions[row], np.int64) - 1).to(states.device)
                yield row, self._log_softmax(states[line, before], weight, bias)

    @torch.no_grad()
    def _log_softmax(self, states: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[Tensor]:
        for part in states.split(self.chunk) if len(states) else ():
            logits = nn.functional.linear(part, weight, bias).float() / self.temperature
            yield logits.log_softmax(dim=-1)


def _check_positions(ids: Ids, positions: Positions) -> None:
    for number, (row, where) in enumerate(zip(ids, positions, strict=True)):
        if len(where) and not (0 < where.min() and where.max() < len(row)):
            raise ModelError(
                f"row {number}: positions {int(where.min())}..{int(where.max())} must lie in 1..{len(row) - 1}: an id is "
                "scored from the ids before it"
            )
