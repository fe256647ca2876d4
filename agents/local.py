"""The local engine: a transformers model in this process that continues token ids and keeps its KV cache across turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.kv_cache import RaggedCache, Step
from turngym.agents.local_model import CausalModel, prefill
from turngym.agents.sampling import Decoder, StopText, check_sampling, draw, greedy, uniforms
from turngym.agents.slots import SlotTable
from turngym.envs.core import TurngymError
from turngym.envs.protocols import GenerateRequest, Generation


class EngineError(TurngymError):
    """A request that an engine cannot serve, or a model that it cannot run."""


@dataclass(slots=True)
class _Row:
    """One request under way."""

    index: int
    request: GenerateRequest
    room: int
    uniform: NDArray[np.float64]
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""


class LocalEngine:
    """Continues token ids with `model`; each turn feeds only what is new in `prompt_ids` since the session's last turn.

    A prompt that leaves no room in the context (`len(prompt_ids) >= max_length`) gives no ids and finish `length`.
    After a change of weights call `weights_changed(version)`; changes in place are also noticed by themselves.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Decoder | None = None,
        max_length: int | None = None,
        max_batch: int = 64,
        max_sessions: int | None = None,
        prefill_tokens: int = 8192,
        policy_version: int = 0,
    ) -> None:
        self._model = CausalModel(model)
        self.max_length = _context(self._model, max_length)
        self.max_batch = max_batch
        self.policy_version = policy_version
        self.prefilled_tokens = 0
        """Ids fed since construction besides the sampled ones: what the prompts cost."""
        self._prefill_tokens = prefill_tokens
        self._stop_text = None if tokenizer is None else StopText(tokenizer)
        self._table = SlotTable(2 * max_batch if max_sessions is None else max_sessions)
        if max_batch < 1 or self._table.limit < max_batch:
            raise EngineError(f"max_batch {max_batch} must be at least 1 and at most max_sessions {self._table.limit}")
        self._cache = RaggedCache()
        self._stamp = self._model.weights_stamp()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order, each depending on its request alone (ids up to rounding)."""
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        stamp = self._model.weights_stamp()
        if stamp != self._stamp:
            self._forget()
            self._stamp = stamp
        try:
            with self._model.evaluating():
                self._run([row for row in rows if not row.finish])
        except BaseException:
            self._forget()  # rows were on the move: nothing held can be trusted
            raise
        return [self._result(row) for row in rows]

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self._table.release(session)

    def weights_changed(self, version: int) -> None:
        """Drop what was computed with the old weights; later generations carry `version`."""
        self._forget()
        self._stamp = self._model.weights_stamp()
        self.policy_version = version

    def _forget(self) -> None:
        self._table.clear()

    def _row(self, index: int, request: GenerateRequest) -> _Row:
        sampling = request.sampling
        problem = check_sampling(sampling, has_tokenizer=self._stop_text is not None)
        if len(request.prompt_ids) == 0:
            problem = "prompt_ids is empty; there must be at least one id to continue"
        if problem:
            raise EngineError(f"request {index} (session {request.session!r}): {problem}")
        room = min(sampling.max_new_tokens, self.max_length - len(request.prompt_ids))
        uniform = uniforms(request.stream, max(room, 0)) if sampling.temperature > 0 else np.zeros(max(room, 0))
        return _Row(index, request, room, uniform, frozenset(sampling.stop_ids), finish="" if room > 0 else "length")

    def _result(self, row: _Row) -> Generation:
        ids, logprobs = np.array(row.tokens, np.int32), np.array(row.logprobs, np.float32)
        if not np.isfinite(logprobs).all():
            raise EngineError(
                f"session {row.request.session!r}: token {int(np.argmin(np.isfinite(logprobs)))} of the response has "
                f"log-probability {logprobs[~np.isfinite(logprobs)][0]}; the model's logits are not finite"
            )
        return Generation(ids=ids, logprobs=logprobs, finish=row.finish, policy_version=self.policy_version)

    def _run(self, rows: list[_Row]) -> None:
        pending, batch = deque(rows), _Batch(self._model.device)
        while pending or batch.rows:
            free = self.max_batch - len(batch.rows)
            if pending and (not batch.rows or 4 * free >= self.max_batch):
                self._admit(pending, batch, free)
            else:
                self._decode(batch)
            self._retire(batch)

    def _admit(self, pending: deque[_Row], batch: _Batch, free: int) -> None:
        """Move up to `free` rows into the batch, feed what is new in their prompts and draw their first ids."""
        busy = {row.request.session for row in batch.rows}
        chosen: dict[str, _Row] = {}
        waiting = []
        while pending and len(chosen) < free:
            row = pending.popleft()
            if row.request.session in busy or row.request.session in chosen:
                waiting.append(row)  # a session's second request waits for its first
            else:
                chosen[row.request.session] = row
        pending.extendleft(reversed(waiting))
        if not chosen:
            return self._decode(batch)
        moves = self._table.admit(list(chosen), len(batch.rows))
        held = self._table.held
        self._cache.reserve(len(self._table.owner), 1)
        self._cache.relocate(moves, max(len(entry.ids) for entry in held.values()))
        rows = sorted(chosen.values(), key=lambda row: held[row.request.session].slot)
        starts = [self._reuse(row) for row in rows]
        new = [row.request.prompt_ids[start:] for row, start in zip(rows, starts, strict=True)]
        slots = [held[row.request.session].slot for row in rows]
        logits = prefill(self._model, self._cache, slots, starts, new, tokens=self._prefill_tokens)
        self.prefilled_tokens += sum(len(ids) for ids in new)
        batch.extend(rows, self._sample(rows, logits, batch.temperatures(rows)))
        return None

    def _reuse(self, row: _Row) -> int:
        """How many leading ids of the prompt need no new K/V; at least the last id is always fed."""
        prompt = row.request.prompt_ids
        entry = self._table.held[row.request.session]
        start = min(entry.common(prompt), len(prompt) - 1)
        entry.ids = entry.ids[:start]
        return start

    def _decode(self, batch: _Batch) -> None:
        length = max(len(row.request.prompt_ids) + len(row.tokens) for row in batch.rows)
        self._cache.reserve(len(self._table.owner), length)
        positions = batch.positions[:, None]
        rows = batch.numbers[: len(batch.rows), None]
        step = Step(rows=slice(0, len(batch.rows)), write_rows=rows, write_positions=positions, length=length)
        logits = self._model.forward(self._cache, batch.tokens[:, None], positions, step)
        batch.advance(self._sample(batch.rows, logits, batch.temperature))

    def _sample(self, rows: list[_Row], logits: Tensor, temperature: Tensor) -> Tensor:
        """Draw one id per row, note it and what it ends; ids int64 [B] on the device."""
        if all(row.request.sampling.temperature == 0 for row in rows):
            ids, logprobs = greedy(logits)
        else:
            uniform = torch.tensor([row.uniform[len(row.tokens)] for row in rows], dtype=torch.float64)
            ids, logprobs = draw(logits, temperature, uniform.to(logits.device))
        both = torch.stack((ids.double(), logprobs.double())).tolist()
        for row, token, logprob in zip(rows, both[0], both[1], strict=True):
            row.tokens.append(int(token))
            row.logprobs.append(logprob)
            row.finish = self._finish(row)
        return ids

    def _finish(self, row: _Row) -> str:
        if row.tokens[-1] in row.stop_ids:
            return "stop"
        stops = row.request.sampling.stop_text
        if stops and self._stop_text is not None and self._stop_text.hit(row.tokens, stops):
            return "stop"
        return "length" if len(row.tokens) >= row.room else ""

    def _retire(self, batch: _Batch) -> None:
        leaving = [slot for slot, row in enumerate(batch.rows) if row.finish]
        if not leaving:
            return
        for slot in leaving:
            request = batch.rows[slot].request
            # The last id was drawn but never fed, so its K/V is missing.
            ids = [*request.prompt_ids, *batch.rows[slot].tokens[:-1]]
            self._table.held[request.session].ids = np.array(ids, np.int32)
        longest = max(len(row.request.prompt_ids) + len(row.tokens) for row in batch.rows)
        count = len(batch.rows)
        moves = self._table.retire(leaving, count)
        self._cache.relocate(moves, longest)
        batch.keep([slot for slot in range(count) if slot not in set(leaving)], moves)


class _Batch:
    """The rows being decoded, row i in cache slot i, with their control tensors on the device."""

    def __init__(self, device: torch.device) -> None:
        self.rows: list[_Row] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.temperature = torch.empty(0, device=device)
        self.numbers = torch.empty(0, dtype=torch.int64, device=device)

    def temperatures(self, rows: list[_Row]) -> Tensor:
        return torch.tensor([row.request.sampling.temperature for row in rows], device=self.temperature.device)

    def extend(self, rows: list[_Row], tokens: Tensor) -> None:
        """Rows just prefilled, in slot order, and their first drawn ids."""
        positions = torch.tensor([len(row.request.prompt_ids) for row in rows], device=tokens.device)
        self.rows = [*self.rows, *rows]
        self.tokens = torch.cat((self.tokens, tokens))
        self.positions = torch.cat((self.positions, positions))
        self.temperature = torch.cat((self.temperature, self.temperatures(rows)))
        if len(self.numbers) < len(self.rows):
            self.numbers = torch.arange(len(self.rows), device=tokens.device)

    def advance(self, tokens: Tensor) -> None:
        self.tokens = tokens
        self.positions = self.positions + 1

    def keep(self, staying: list[int], moves: tuple[list[int], list[int]]) -> None:
        """Only `staying` go on; `moves` says in which slots they now are."""
        moved = dict(zip(moves[1], moves[0], strict=True))
        order = sorted(staying, key=lambda slot: moved.get(slot, slot))
        self.rows = [self.rows[slot] for slot in order]
        index = torch.tensor(order, dtype=torch.int64, device=self.tokens.device)
        self.tokens, self.positions = self.tokens[index], self.positions[index]
        self.temperature = self.temperature[index]


def _context(model: CausalModel, wanted: int | None) -> int:
    limit = getattr(model.config, "max_position_embeddings", None)
    if wanted is None and limit is None:
        raise EngineError(f"model type {model.kind!r} states no max_position_embeddings; pass max_length=")
    if wanted is not None and limit is not None and wanted > limit:
        raise EngineError(
            f"max_length {wanted} exceeds the {limit} positions of this {model.kind!r} model; use at most {limit}"
        )
    return int(wanted if wanted is not None else limit)
