"""LocalScorer: a frozen model in this process that scores given ids (teachers, reference policies)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from turngym.envs.episode import TopK
from turngym.trainers.config import Packing
from turngym.trainers.models.lm_head import project, topk
from turngym.trainers.models.model import ModelError, head, hidden_states
from turngym.trainers.models.packing import lines_of
from turngym.trainers.models.prefix_sharing import group_states, prefix_groups

Ids = Sequence[NDArray[np.int32]]
Positions = Sequence[NDArray[np.int64]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScorer:
    """Implements `Scorer` and `SupportScorer` with micro-batches; holds [chunk, V] logits at most, never [B, T, V].

    Each of `ids` is one row; its `positions` must lie in 1..len-1, else ModelError. No gradient.
    """

    model: nn.Module
    vocab_size: int | None = None
    """Use only the first ids, when teacher and student are padded to different sizes."""
    temperature: float = 1.0
    """Scores are log-softmax(logits / temperature): the `distill_temperature`."""
    max_tokens: int = 8192
    """Padded tokens per forward pass."""
    chunk: int = 1024
    """Positions that go through the head at a time."""
    packing: Packing = "off"
    """Whether several short rows share a line; needs a model that keeps them apart (`packing.resolved`)."""
    share_prefixes: bool = False
    """Read what neighboring rows begin with only once (`prefix_sharing`); needs `supports_prefix_sharing(model)`."""

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        def score(states: Tensor, rows: list[int]) -> list[TopK]:
            best, logp = topk(
                states, head(self.model), k, chunk=self.chunk, temperature=self.temperature, vocab=self.vocab_size
            )
            sizes = [len(positions[row]) for row in rows]
            # one copy off the device for all rows, not one for each
            pairs = zip(best.cpu().split(sizes), logp.cpu().split(sizes), strict=True)
            return [TopK(ids=i.numpy().astype(np.int32), logp=p.numpy()) for i, p in pairs]

        return self._score(ids, positions, score)

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        _check_positions(ids, positions)
        labels = [np.asarray(row, np.int64)[where][:, None] for row, where in zip(ids, positions, strict=True)]
        return [column[:, 0] for column in self.gather(ids, positions, labels)]

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
        def score(states: Tensor, rows: list[int]) -> list[NDArray[np.float32]]:
            wanted = torch.from_numpy(np.concatenate([np.asarray(support[row], np.int64) for row in rows]))
            found = project(
                states,
                head(self.model),
                wanted[:, 0].to(states.device),  # project() wants a label; this column of the result is not read
                wanted.to(states.device),
                chunk=self.chunk,
                temperature=self.temperature,
                vocab=self.vocab_size,
            )
            assert found.topk_logp_NK is not None
            return [part.numpy() for part in found.topk_logp_NK.cpu().split([len(positions[row]) for row in rows])]

        return self._score(ids, positions, score)

    @torch.no_grad()
    def _score(self, ids: Ids, positions: Positions, score: Callable[[Tensor, list[int]], list[T]]) -> list[T]:
        """Run micro-batches of rows of similar length; results return to the order of `ids`."""
        _check_positions(ids, positions)
        found: dict[int, T] = {}
        for rows, states in self._states(ids, positions):
            found.update(zip(rows, score(states, rows), strict=True))
        return [found[row] for row in range(len(ids))]

    def _states(self, ids: Ids, positions: Positions) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (row numbers, hidden states [P, D] that predict their positions, row after row)."""
        alone = list(range(len(ids)))
        if self.share_prefixes:
            # a row that shares nothing needs no mask of L x L: it goes into a padded batch instead
            groups = [group for group in prefix_groups(ids, self.max_tokens) if len(group.rows) > 1]
            alone = sorted(set(alone).difference(*(group.rows for group in groups)))
            for group in groups:
                states = group_states(self.model, ids, group)
                places = [group.indices(member, _before(positions[row])) for member, row in enumerate(group.rows)]
                yield list(group.rows), states[torch.from_numpy(np.concatenate(places)).to(states.device)]
        for lines in lines_of(self.packing, self.model)([len(ids[row]) for row in alone], self.max_tokens):
            rows = [alone[place] for place in lines.rows]
            states = hidden_states(self.model, *lines.filled([ids[row] for row in rows]))
            where = [start + _before(positions[row]) for start, row in zip(lines.starts, rows, strict=True)]
            yield rows, states[torch.from_numpy(np.concatenate(where)).to(states.device)]


def _before(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the tokens at `positions` are predicted."""
    return np.asarray(positions, np.int64) - 1


def _check_positions(ids: Ids, positions: Positions) -> None:
    for number, (row, where) in enumerate(zip(ids, positions, strict=True)):
        if len(where) and (where.min() < 1 or where.max() >= len(row)):
            raise ModelError(
                f"row {number}: positions {int(where.min())}..{int(where.max())} must lie in 1..{len(row) - 1}: an id "
                "is scored from the ids before it"
            )
