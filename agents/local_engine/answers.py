"""What was drawn for the rows of a batch: ids and log-probabilities noted, and which of them end their row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from turngym.agents.local_engine.batch import Row
from turngym.agents.local_engine.model import EngineError
from turngym.agents.local_engine.sampling import StopText, draw, greedy


class Answers:
    """Draws one id per row and keeps the rows' books; finished rows are passed over.

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
            numbers = [0.0 if row.finish else row.uniform[len(row.tokens)] for row in rows]
            ids, logprobs = draw(logits, temperature, torch.from_numpy(np.array(numbers)).to(logits.device))
        # one transfer per step, since each waits for the device; float64 holds ids and float32 exactly
        both = torch.stack((ids.double(), logprobs.double())).cpu().numpy()
        if not np.isfinite(both[1]).all():
            raise _not_finite(rows, both[1])
        for row, token, logprob in zip(rows, both[0].astype(np.int64).tolist(), both[1].tolist(), strict=True):
            if not row.finish:
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
