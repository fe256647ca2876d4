"""The local engine: a transformers model in this process that continues token ids, its KV cache kept across turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from turngym.agents.local_engine.admission import feed
from turngym.agents.local_engine.batch import Answers, Batch, Row, take, temperatures
from turngym.agents.local_engine.kv_cache import Step
from turngym.agents.local_engine.model import CausalModel, EngineError
from turngym.agents.local_engine.probe import choose_cache, context_limit
from turngym.agents.local_engine.sampling import Decoder, StopText, check_sampling, uniforms
from turngym.agents.local_engine.slots import SlotTable
from turngym.envs.protocols import GenerateRequest, Generation, Watch

__all__ = ["EngineError", "LocalEngine"]

_CALL_BYTES = 200_000
"""Read from memory in the time that one more operation on a CPU takes, about."""


class LocalEngine:
    """Continues token ids with `model`; each turn feeds only what is new in `prompt_ids` since the session's last turn.

    A prompt that leaves no room in the context (`len(prompt_ids) >= max_length`) gives no ids and finish `length`.
    The model stays the caller's: after an update call `weights_changed(version)`. A change in place or by
    `load_state_dict` that nobody announced is noticed too (what was cached is dropped; `policy_version` stays).
    One call at a time: the engine is not for several threads.

    Args:
        model: any causal transformers model; it runs on the device it is on.
        tokenizer: only needed for stop texts.
        max_length: context limit in ids, prompt and response together; the model's own if None.
        max_batch: most rows decoded together.
        max_sessions: most sessions whose keys and values are kept (the least recently used goes first); twice
            `max_batch` if None.
        cache: `ragged` keeps keys and values across turns, an error if the model cannot; `recompute` feeds the whole
            history every turn, one row at a time, with the model's own cache: slow, and right for every model;
            `auto` takes `ragged` if a short trial agrees with a plain pass, else `recompute` with a warning.
        prefill_tokens: most prompt ids (padding included) fed in one pass.
        dtype: precision of weights and caches (`float32`, `bfloat16`, `float16`); the model's own if None. In another
            one a copy of the model generates, which takes the model's new weights before it is next asked. Recurrent
            states of hybrid models are float32 in any, as in transformers.

    Raises:
        EngineError: a model or a setting that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Decoder | None = None,
        max_length: int | None = None,
        max_batch: int = 64,
        max_sessions: int | None = None,
        cache: Literal["auto", "ragged", "recompute"] = "auto",
        prefill_tokens: int = 8192,
        dtype: str | None = None,
        policy_version: int = 0,
    ) -> None:
        self._model = CausalModel(model, dtype)
        self._dtype = dtype
        self.max_length = context_limit(self._model, max_length)
        self.max_batch = max_batch
        self.policy_version = policy_version
        self.fed_tokens = 0
        """Prompt ids fed since construction: what the histories cost besides the sampled ids."""
        self._prefill_tokens = prefill_tokens
        self._tokenizer = tokenizer
        self._answers = Answers(None if tokenizer is None else StopText(tokenizer))
        self._table = SlotTable(2 * max_batch if max_sessions is None else max_sessions)
        if max_batch < 1 or self._table.limit < max_batch or prefill_tokens < 1:
            raise EngineError(
                f"max_batch {max_batch} and prefill_tokens {prefill_tokens} must be at least 1, and max_sessions "
                f"{self._table.limit} at least max_batch"
            )
        self.ragged = choose_cache(self._model, cache)
        """Whether keys and values are kept across turns."""
        self._cache = self._model.new_cache(self._table.limit, self.max_length)
        self._stamp: int | None = self._model.weights_stamp()

    @property
    def model(self) -> Any:
        """The model as it was given."""
        return self._model.source

    @property
    def stamp(self) -> int:
        """Changes when the weights change, announced or not."""
        return self._model.weights_stamp()

    def settings(self) -> dict[str, Any]:
        """Arguments for an engine like this one around another copy of the model."""
        return {
            "tokenizer": self._tokenizer,
            "max_length": self.max_length,
            "max_batch": self.max_batch,
            "max_sessions": self._table.limit,
            "cache": "ragged" if self.ragged else "recompute",
            "prefill_tokens": self._prefill_tokens,
            "dtype": self._dtype,
            "policy_version": self.policy_version,
        }

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions whose keys and values are held."""
        return tuple(self._table.held)

    @property
    def cache_bytes(self) -> int:
        """Memory of the cache."""
        return self._cache.nbytes()

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order, each depending on its request alone (up to rounding).

        Raises EngineError for a request that makes no sense, before any work, and for logits that are not finite.
        """
        return self.stream(requests, [None] * len(requests))

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        """`generate`, each watch hearing the ids of its request as they are drawn; one that says False ends its row."""
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        for row, watch in zip(rows, watches, strict=True):
            row.watch = watch
        stamp = self._model.weights_stamp()
        if stamp != self._stamp:
            self._renew(stamp)
        try:
            with self._model.evaluating(inference=self.ragged):
                self._run([row for row in rows if not row.finish])
        except BaseException:
            # Rows were on the move, and a NaN may lie in the cache: nothing held can be trusted.
            self._table.clear()
            self._cache.clear()
            raise
        return [row.generation(self.policy_version) for row in rows]

    def release(self, session: str) -> None:
        """Forget `session`; unknown sessions are fine."""
        self._table.release(session)

    def weights_changed(self, version: int) -> None:
        """Drop what was computed with the old weights; later generations carry `version`."""
        self._table.clear()
        # not before they are asked for: a sharded model has its weights only while it plays
        self._stamp = None
        self.policy_version = version

    def _renew(self, stamp: int) -> None:
        self._table.clear()
        self._model.follow()
        self._stamp = stamp

    def _row(self, index: int, request: GenerateRequest) -> Row:
        sampling, prompt = request.sampling, np.asarray(request.prompt_ids, np.int32)
        problem = check_sampling(sampling, has_tokenizer=self._tokenizer is not None)
        if prompt.ndim != 1 or not len(prompt):
            problem = f"prompt_ids has shape {prompt.shape}; it must be a row of at least one id"
        elif not 0 <= prompt.min() <= prompt.max() < self._model.vocabulary:
            problem = (
                f"prompt_ids spans {prompt.min()}..{prompt.max()}; the model knows ids 0..{self._model.vocabulary - 1}"
            )
        if problem:
            raise EngineError(f"request {index} (session {request.session!r}): {problem}")
        room = max(min(sampling.max_new_tokens, self.max_length - len(prompt)), 0)
        uniform = uniforms(request.stream, room) if sampling.temperature > 0 else np.zeros(room)
        row = Row(request.session, prompt, sampling, uniform, frozenset(sampling.stop_ids))
        row.finish = "" if room else "length"
        return row

    def _run(self, rows: list[Row]) -> None:
        if not self.ragged:
            for row in rows:
                self._run_alone(row)
            return
        pending, batch = deque(rows), Batch(self._model.device)
        while pending or len(batch.idle) < len(batch.rows):
            going = len(batch.rows) - len(batch.idle)
            free = self.max_batch - going
            # decoding rows stand still while others prefill, so a full batch waits until a quarter of it is free
            refill = pending and (not going or 4 * free >= self.max_batch)
            chosen = take(pending, batch, free) if refill else []
            if chosen:
                self._close_ranks(batch)
                self._admit(chosen, batch)
            else:
                self._decode(batch)
            for row in batch.finish():
                self._table.held[row.session].ids = row.fed()
            # a recurrent state would take in what a finished row is fed, a window end behind it
            if not self._model.triangular or (batch.worth_closing() and not self._model.leaves_out):
                self._close_ranks(batch)

    def _run_alone(self, row: Row) -> None:
        past: Any = None
        temperature = temperatures([row], self._model.device)
        while not row.finish:
            fed = np.concatenate((row.prompt, np.array(row.tokens, np.int32)))
            self.fed_tokens += len(row.prompt) if not row.tokens else 0
            logits, past = self._model.plain(fed, past)
            self._answers.draw([row], logits[None], temperature)

    def _admit(self, rows: list[Row], batch: Batch) -> None:
        """Bring `rows` into the batch: feed what is new in their prompts and draw their first ids."""
        moves = self._table.admit([row.session for row in rows], len(batch.rows))
        held = self._table.held
        self._cache.reserve(len(self._table.owner), 1)
        # rows being decoded are longer than their `ids`, but they are not among those that move
        self._cache.relocate(moves, max(len(entry.ids) for entry in held.values()))
        # row i of the batch must lie in slot i, and admit() hands slots out in its own order
        rows.sort(key=lambda row: held[row.session].slot)
        logits, fed = feed(self._model, self._cache, held, rows, tokens=self._prefill_tokens)
        self.fed_tokens += fed
        batch.extend(rows, self._answers.draw(rows, logits, temperatures(rows, logits.device)))

    def _decode(self, batch: Batch) -> None:
        triangular = self._model.triangular
        self._cache.reserve(len(self._table.owner), batch.longest)
        positions = batch.positions[:, None]
        step = Step(
            rows=slice(0, len(batch.rows)),
            write_rows=batch.targets(self._cache.trash)[:, None],
            write_positions=positions,
            length=batch.longest,
            mask=batch.mask(self._model.dtype) if triangular else None,
            segments=batch.segments(self._call()) if triangular else (),
            cells=batch.cells,
        )
        logits = self._model.forward(self._cache, batch.tokens[:, None], positions, step)
        batch.advance(self._answers.draw(batch.going, logits, batch.going_temperature()))

    def _call(self) -> float:
        """How many keys of a row could be read while one more segment is begun."""
        # on an accelerator what is read in vain costs less than what is launched
        return _CALL_BYTES / self._cache.position_bytes() if self._model.device.type == "cpu" else float("inf")

    def _close_ranks(self, batch: Batch) -> None:
        """Finished rows leave; the others close ranks in slots 0, 1, 2, ..."""
        if not batch.idle:
            return
        moves = self._table.retire(batch.idle, len(batch.rows))
        self._cache.relocate(moves, max(row.length for row in batch.rows))
        batch.keep(moves)
