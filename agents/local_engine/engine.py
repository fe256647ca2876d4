"""The local engine: how a batch of requests becomes sampled tokens, with a model in this process.

`LocalEngine.generate` works in a loop over two kinds of passes:

1. `_admit` takes waiting requests into free rows: it finds the part of each prompt whose keys and values are in the
   cache already, feeds the rest, and draws the first token of each row.
2. `_decode` feeds the last token of every active row and draws the next one; on a GPU as one launch (`graphs.py`).

A finished row stays in its slot, idle: a pass that can skip rows leaves it out, another one writes its keys to the
scratch row of the cache. `_compact` takes idle rows out of the batch when new rows come, or when idling has cost more
than moving. A row's keys and values stay in the cache under its session, so that the next turn of an episode feeds only
what is new in the prompt. They go when the session is released, or when it was used longest ago and its slot is needed.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import cloudpickle
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.cache import (
    MIN_SHARED,
    KeyGroup,
    Moves,
    SharedPrefixes,
    SlotTable,
    Step,
    find_shared_prefixes,
    make_key_groups,
)
from turngym.agents.local_engine.graphs import Bucket, Captured, Fed
from turngym.agents.local_engine.model import (
    CausalModel,
    EngineError,
    additive_mask,
    choose_cache,
    context_limit,
    keeps_own_cache,
    prefill,
)
from turngym.agents.local_engine.sampling import check_sampling, draw, greedy, uniforms
from turngym.agents.rendering.stop_text import StopText
from turngym.core.progress import ACTIVITY
from turngym.core.protocols import GenerateRequest, Generation, Sampling, Watch

_MOVE_STEPS = 8
"""Exchanging two rows of the cache costs about as much as this many steps of one row without attention."""
_KEY_GROUP_BYTES = 200_000
"""Bytes of keys that a CPU reads in about the time of one more attention call."""


@dataclass(slots=True)
class RequestRow:
    """One request under way: the checked request, its random numbers, and what was drawn so far."""

    session: str
    prompt: NDArray[np.int32]
    sampling: Sampling
    uniform: NDArray[np.float64]
    """[R] numbers in [0, 1), one for each token that may be drawn; empty for a prompt that fills the context."""
    stop_ids: frozenset[int]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    """Finish reason; empty while the row is being decoded."""
    watch: Watch | None = None

    @property
    def length(self) -> int:
        """Number of ids so far, prompt included."""
        return len(self.prompt) + len(self.tokens)

    def generation(self, policy_version: int) -> Generation:
        ids, logprobs = np.array(self.tokens, np.int32), np.array(self.logprobs, np.float32)
        return Generation(ids=ids, logprobs=logprobs, finish=self.finish, policy_version=policy_version)


class LocalEngine:
    """Continues token ids with `model`; each turn feeds only what is new in `prompt_ids` since the session's last turn.

    A prompt that leaves no room in the context (`len(prompt_ids) >= max_length`) gives no ids and finish `length`.
    The model stays the caller's: after an update call `weights_changed(version)`. The engine also notices a change in
    place or by `load_state_dict` that nobody announced; it then drops what was cached and keeps `policy_version`.
    The engine is not thread-safe: make one call at a time.

    Args:
        model: any causal transformers model; it runs on the device it is on.
        tokenizer: only needed for stop texts.
        max_length: context limit in ids, prompt and response together; the model's own if None.
        max_batch: most rows decoded together.
        max_sessions: most sessions whose keys and values are kept (the least recently used goes first); twice
            `max_batch` if None.
        cache: `ragged` keeps keys and values across turns, an error if the model cannot; `recompute` feeds the whole
            history every turn, one row at a time, with the model's own cache (where that is right, else without one):
            slow, and right for every model; `auto` takes `ragged` if a short trial agrees with a plain pass, else
            `recompute` with a warning.
        prefill_tokens: most prompt ids (padding included) fed in one pass.
        dtype: precision of weights and caches (`float32`, `bfloat16`, `float16`); the model's own if None. In another
            precision a copy of the model generates, which takes the model's new weights before the next request.
            Recurrent states of hybrid models are always float32, as in transformers.
        policy_version: version of the weights that `model` has now, which turns record.
        vocab_size: only the first so many ids are drawn, as if the model had no others; all of the model's if None.

    Raises EngineError for a model or a setting that cannot work.
    """

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        max_length: int | None = None,
        max_batch: int = 64,
        max_sessions: int | None = None,
        cache: Literal["auto", "ragged", "recompute"] = "auto",
        prefill_tokens: int = 8192,
        dtype: str | None = None,
        policy_version: int = 0,
        vocab_size: int | None = None,
    ) -> None:
        self._model = CausalModel(model, dtype, vocab_size)
        self._dtype = dtype
        self.max_length = context_limit(self._model, max_length)
        self.max_batch = max_batch
        self.policy_version = policy_version
        self.fed_tokens = 0
        """Prompt ids fed since construction. Sampled ids are not counted."""
        self._prefill_tokens = prefill_tokens
        self._tokenizer = tokenizer
        self._stop_text = None if tokenizer is None else StopText(tokenizer)
        self._table = SlotTable(2 * max_batch if max_sessions is None else max_sessions)
        if max_batch < 1 or self._table.limit < max_batch or prefill_tokens < 1:
            raise EngineError(
                f"max_batch {max_batch} and prefill_tokens {prefill_tokens} must be at least 1, and max_sessions "
                f"{self._table.limit} at least max_batch"
            )
        self.ragged = choose_cache(self._model, cache)
        """Whether keys and values are kept across turns."""
        self._own_cache = not self.ragged and keeps_own_cache(self._model)
        self._cache = self._model.new_cache(self._table.limit, self.max_length)
        self.graphs = Captured(self._model, self._cache, Bucket(self._table.limit, self.max_length))
        """The decode step as CUDA graphs, where it can be captured."""
        self._stamp: int | None = self._model.weights_stamp()

    @property
    def model(self) -> Any:
        return self._model.source

    @property
    def vocab_size(self) -> int | None:
        """Only the first so many ids are drawn; None: all of the model's."""
        return self._model.drawn

    @property
    def stamp(self) -> int:
        """A number that changes when the weights change, announced or not."""
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
            "vocab_size": self.vocab_size,
        }

    @property
    def sessions(self) -> tuple[str, ...]:
        """Sessions whose keys and values are in the cache."""
        return tuple(self._table.held)

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Continue every request; results in their order, each depending on its request alone (up to rounding).

        Raises EngineError for an invalid request, before any work, and for logits that are not finite.
        """
        return self.stream(requests, [None] * len(requests))

    def stream(self, requests: Sequence[GenerateRequest], watches: Sequence[Watch | None]) -> list[Generation]:
        """`generate` that calls each request's watch with every id drawn; one that returns False ends its row."""
        rows = [self._row(index, request) for index, request in enumerate(requests)]
        for row, watch in zip(rows, watches, strict=True):
            row.watch = watch
        stamp = self._model.weights_stamp()
        if stamp != self._stamp:
            self._table.clear()
            self._model.follow()
            self._stamp = stamp
        try:
            with self._model.evaluating(inference=self.ragged):
                self._run([row for row in rows if not row.finish])
        except BaseException:
            # rows may be half moved, and a NaN may lie in the cache: nothing cached can be trusted
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
        # The weights are read at the next request, not here: a sharded model is only whole while it plays.
        self._stamp = None
        self.policy_version = version

    def _row(self, index: int, request: GenerateRequest) -> RequestRow:
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
        row = RequestRow(request.session, prompt, sampling, uniform, frozenset(sampling.stop_ids))
        row.finish = "" if room else "length"
        return row

    def _run(self, rows: list[RequestRow]) -> None:
        if not self.ragged:
            for row in rows:
                self._run_alone(row)
            return
        pending, batch, captured = deque(rows), Batch(self._model.device), self.graphs.usable()
        while pending or batch.active_count:
            free = self.max_batch - batch.active_count
            # decoding rows stand still while others prefill, so a full batch waits until a quarter of it is free
            refill = pending and (not batch.active_count or 4 * free >= self.max_batch)
            chosen = take(pending, batch, free) if refill else []
            if chosen:
                self._compact(batch)
                self._admit(chosen, batch)
            else:
                self._decode(batch, captured)
            for row in batch.mark_finished():
                # the last token was drawn but never fed
                fed = np.array(row.tokens[:-1], np.int32)
                self._table.held[row.session].ids = np.concatenate((row.prompt, fed))
            # A recurrent state would absorb the ids that an idle row is fed, and a sliding window would move past the
            # row's own ids: such models compact at once.
            skips_idle_rows = self._model.native and not captured
            if not self._model.full_attention or (batch.should_compact() and not skips_idle_rows):
                self._compact(batch)

    def _run_alone(self, row: RequestRow) -> None:
        """Decode one row with the model's own cache, if it has one that is right (`cache="recompute"`)."""
        past: Any = None
        temperature = temperatures([row], self._model.device)
        while not row.finish:
            fed = np.concatenate((row.prompt, np.array(row.tokens, np.int32)))
            self.fed_tokens += len(row.prompt) if not row.tokens else 0
            logits, past = self._model.plain(fed, past, cached=self._own_cache)
            self._draw([row], logits[None], temperature)

    def _admit(self, rows: list[RequestRow], batch: Batch) -> None:
        """Bring `rows` into the batch: feed what is new in their prompts and draw their first ids."""
        moves = self._table.admit([row.session for row in rows], len(batch.rows))
        held = self._table.held
        self._cache.reserve(len(self._table.owner), 1)
        # rows being decoded are longer than their `ids`, but they are not among those that move
        self._cache.relocate(moves, max(len(entry.ids) for entry in held.values()))
        # row i of the batch must lie in slot i, and admit() hands slots out in its own order
        rows.sort(key=lambda row: held[row.session].slot)
        logits = self._feed(rows)
        batch.extend(rows, self._draw(rows, logits, temperatures(rows, logits.device)))

    def _feed(self, rows: Sequence[RequestRow]) -> Tensor:
        """Bring the prompts of `rows` (ascending slots) into the cache; logits [B, V] after each prompt.

        What the session itself holds is kept, a prefix that another slot holds is copied, and the rest is fed.
        """
        model, cache, held = self._model, self._cache, self._table.held
        starts = {}
        for row in rows:
            entry = held[row.session]
            starts[entry.slot] = entry.resume(row.prompt, recurrent=model.recurrent)
            cache.resume(entry.slot, starts[entry.slot], len(entry.ids))
            # prefill saves recurrent states before the last id, whose logits the same prompt asked again needs
            entry.ids, entry.saved_at = entry.ids[: starts[entry.slot]], len(row.prompt) - 1
        by_slot = {held[row.session].slot: row for row in rows}
        # a recurrent state stands for a whole history, so a part of it cannot be copied
        pending = [] if model.recurrent else [slot for slot in by_slot if starts[slot] < MIN_SHARED]
        prompts = {slot: by_slot[slot].prompt for slot in pending}
        shared = find_shared_prefixes(prompts, held.values()) if prompts else SharedPrefixes({}, {})
        index_of = {slot: number for number, slot in enumerate(by_slot)}
        # Rows that take over a prefix of another row of this batch are fed after it, in a second wave.
        waves = [slot for slot in by_slot if slot not in shared.later], list(shared.later)
        logits: Tensor | None = None
        for slots, prefixes in zip(waves, (shared.now, shared.later), strict=True):
            if not slots:
                continue
            for slot in slots:
                if slot in prefixes:
                    source, length = prefixes[slot]
                    cache.reserve(slot + 1, length)
                    cache.copy(source, slot, length)
                    starts[slot] = length
            new = [by_slot[slot].prompt[starts[slot] :] for slot in slots]
            part = prefill(model, cache, slots, [starts[slot] for slot in slots], new, tokens=self._prefill_tokens)
            if len(slots) == len(rows):
                logits = part
                break
            if logits is None:
                logits = part.new_empty(len(rows), part.shape[-1])
            logits[[index_of[slot] for slot in slots]] = part
        assert logits is not None
        if not model.recurrent:
            for row in rows:
                held[row.session].ids = row.prompt
        self.fed_tokens += sum(len(row.prompt) - starts[slot] for slot, row in by_slot.items())
        return logits

    def _decode(self, batch: Batch, captured: bool) -> None:
        """Feed the newest id of every active row and draw the next."""
        bucket = self.graphs.reserve(len(batch.rows), batch.longest) if captured else None
        self._cache.reserve(len(self._table.owner), batch.longest)
        drawn = None if bucket is None else self.graphs.run(self._fed(batch), bucket, partial(self._logits, batch))
        if drawn is None:
            mask = batch.mask(self._model.dtype) if self._model.full_attention else None
            temperature = batch.temperature if batch.cells is None else batch.temperature[batch.cells]
            ids = self._draw(batch.active_rows, self._logits(batch, mask), temperature)
        else:
            drawn = drawn if batch.cells is None else drawn[:, batch.cells]
            ids = drawn[0].long()
            self._take(batch.active_rows, drawn)
        batch.advance(ids)

    def _fed(self, batch: Batch) -> Fed:
        """What a captured step reads."""
        numbers = [0.0 if row.finish else row.uniform[len(row.tokens)] for row in batch.rows]
        return Fed(
            tokens=batch.tokens,
            positions=batch.positions,
            write_rows=batch.write_rows(self._cache.scratch_row),
            temperature=batch.temperature,
            uniform=np.array(numbers),
            cells=batch.cells,
        )

    def _logits(self, batch: Batch, mask: Tensor | None = None) -> Tensor:
        """Feed the newest id of every active row; logits [active rows, V]. With `mask` None the model makes one."""
        positions = batch.positions[:, None]
        # On a CPU, reading keys in vain competes with one more attention call; on an accelerator launches cost more.
        on_cpu = self._model.device.type == "cpu"
        wasted_keys = _KEY_GROUP_BYTES / self._cache.position_bytes() if on_cpu else float("inf")
        step = Step(
            rows=slice(0, len(batch.rows)),
            write_rows=batch.write_rows(self._cache.scratch_row)[:, None],
            write_positions=positions,
            length=batch.longest,
            mask=mask,
            key_groups=batch.key_groups(wasted_keys) if self._model.full_attention else (),
            cells=batch.cells,
        )
        return self._model.forward(self._cache, batch.tokens[:, None], positions, step)

    def _draw(self, rows: Sequence[RequestRow], logits: Tensor, temperature: Tensor) -> Tensor:
        """Draw one id per row and record it; ids int64 [B]."""
        if all(row.sampling.temperature == 0 for row in rows):
            ids, logprobs = greedy(logits)
        else:
            numbers = [row.uniform[len(row.tokens)] for row in rows]
            ids, logprobs = draw(logits, temperature, torch.from_numpy(np.array(numbers)).to(logits.device))
        # float64 holds ids and float32 exactly
        self._take(rows, torch.stack((ids.double(), logprobs.double())))
        return ids

    def _take(self, rows: Sequence[RequestRow], drawn: Tensor) -> None:
        """Record the drawn ids, their log-probabilities (float64 [2, B]) and which of the rows they end.

        Raises EngineError for logits that were not finite.
        """
        ACTIVITY.tokens += len(rows)
        # one transfer per step, since each waits for the device
        numbers = drawn.cpu().numpy()
        if not np.isfinite(numbers[1]).all():
            bad = int(np.argmin(np.isfinite(numbers[1])))
            raise EngineError(
                f"session {rows[bad].session!r}: token {len(rows[bad].tokens)} of the response has log-probability "
                f"{numbers[1][bad]}; the model's logits are not finite (diverged weights?)"
            )
        for row, token, logprob in zip(rows, numbers[0].astype(np.int64).tolist(), numbers[1].tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
            stops = row.sampling.stop_text
            if token in row.stop_ids or (stops and self._stop_text and self._stop_text.hit(row.tokens, stops)):
                row.finish = "stop"
            elif len(row.tokens) >= len(row.uniform):
                row.finish = "length"
            if row.watch is not None and not row.watch(token, logprob):
                row.finish = row.finish or "aborted"

    def _compact(self, batch: Batch) -> None:
        """Remove finished rows from the batch; the active ones move together into slots 0, 1, 2, ..."""
        if not batch.idle:
            return
        moves = self._table.retire(batch.idle, len(batch.rows))
        self._cache.relocate(moves, max(row.length for row in batch.rows))
        batch.keep_active(moves)


class Batch:
    """The rows being decoded, row i in cache slot i, with their control tensors [B] on the device.

    A finished row idles in its slot until the engine compacts the batch; where a pass cannot leave it out, its keys go
    to the scratch row.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: list[RequestRow] = []
        self.tokens = torch.empty(0, dtype=torch.int64, device=device)
        """The ids to feed next."""
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.temperature = torch.empty(0, device=device)
        self.cells: Tensor | None = None
        """int64: slots of the active rows; None if all are active."""
        self.longest = 0
        """Number of ids of the longest active row, the one to be fed included."""
        self.idle: list[int] = []
        """Slots of finished rows, ascending."""
        self.wasted = 0
        """Steps that idle rows have taken since the batch was last compacted."""
        self._write_rows: Tensor | None = None
        self._steps: Tensor | int = 1
        self._key_groups: tuple[KeyGroup, ...] | None = None
        self._planned = 0
        self._mask: Tensor | None = None

    @property
    def active_rows(self) -> list[RequestRow]:
        return [row for row in self.rows if not row.finish] if self.idle else self.rows

    @property
    def active_count(self) -> int:
        return len(self.rows) - len(self.idle)

    def extend(self, rows: list[RequestRow], tokens: Tensor) -> None:
        """Append rows just prefilled, in slot order, and their first drawn ids."""
        device = tokens.device
        positions = torch.tensor([len(row.prompt) for row in rows], device=device)
        self.rows = [*self.rows, *rows]
        self.tokens = torch.cat((self.tokens, tokens))
        self.positions = torch.cat((self.positions, positions))
        self.temperature = torch.cat((self.temperature, temperatures(rows, device)))
        self._changed()

    def advance(self, tokens: Tensor) -> None:
        """Record that every active row was fed one id and drew the next, `tokens`."""
        if self.cells is None:
            self.tokens = tokens
        else:
            self.tokens[self.cells] = tokens
        self.positions = self.positions + self._steps
        self.longest += 1
        self.wasted += len(self.idle)

    def mark_finished(self) -> list[RequestRow]:
        """Make rows that have finished since the last call idle; returns them."""
        done = [slot for slot, row in enumerate(self.rows) if row.finish]
        if len(done) == len(self.idle):
            return []
        idle = set(self.idle)
        self.idle, self._write_rows, self._key_groups = done, None, None
        # an idle row stays at position 0, which every cache has
        self.positions[done] = 0
        self._steps = torch.tensor([0 if row.finish else 1 for row in self.rows], device=self.tokens.device)
        self.cells = self._steps.nonzero()[:, 0]
        self.longest = max((row.length for row in self.rows if not row.finish), default=0)
        return [self.rows[slot] for slot in done if slot not in idle]

    def should_compact(self) -> bool:
        """Whether the idle rows have cost as much as it takes to move active ones into their slots."""
        active = self.active_count
        return bool(self.idle and active) and self.wasted >= _MOVE_STEPS * sum(slot < active for slot in self.idle)

    def write_rows(self, scratch_row: int) -> Tensor:
        """int64 [B]: the cache row that takes each row's next key, `scratch_row` for an idle one."""
        if self._write_rows is None:
            self._write_rows = torch.arange(len(self.rows), device=self.tokens.device)
            if self.idle:
                self._write_rows[self.idle] = scratch_row
        return self._write_rows

    def mask(self, dtype: torch.dtype) -> Tensor:
        """Additive mask [B, 1, 1, longest]: every row sees its own past and the id that is fed."""
        if self._mask is None or self._mask.shape[1] < self.longest:
            # 64 columns more than needed: each later step only uncovers one more position of every row
            columns = torch.arange(self.longest + 64, device=self.tokens.device)
            self._mask = additive_mask(columns > self.positions[:, None], dtype)
        else:
            self._mask.scatter_(1, self.positions[:, None], 0.0)
        return self._mask[:, None, None, : self.longest]

    def key_groups(self, wasted_keys: float) -> tuple[KeyGroup, ...]:
        """Which rows read how many keys in the next step; `wasted_keys` as in `make_key_groups`."""
        if self._key_groups is None:
            lengths = [0 if row.finish else row.length for row in self.rows]
            self._key_groups, self._planned = make_key_groups(lengths, wasted_keys), self.longest
        return tuple(group.grown(self.longest - self._planned) for group in self._key_groups)

    def keep_active(self, moves: Moves) -> None:
        """Drop the finished rows; `moves` says where the cache moved the active ones."""
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
        """Forget what was computed for the former set of rows."""
        self.longest = max((row.length for row in self.rows), default=0)
        self.idle, self.wasted, self._steps = [], 0, 1
        self._write_rows = self._mask = self._key_groups = self.cells = None


def temperatures(rows: list[RequestRow], device: torch.device) -> Tensor:
    """Sampling temperature of each row, float32 [B]."""
    return torch.tensor([row.sampling.temperature for row in rows], device=device)


def take(pending: deque[RequestRow], batch: Batch, free: int) -> list[RequestRow]:
    """Remove up to `free` rows of different sessions from `pending`; a session's second request waits for its first."""
    busy = {row.session for row in batch.rows if not row.finish}
    chosen: list[RequestRow] = []
    waiting: list[RequestRow] = []
    while pending and len(chosen) < free:
        row = pending.popleft()
        (waiting if row.session in busy else chosen).append(row)
        busy.add(row.session)
    # extendleft reverses what it is given, and requests of one session must stay in order
    pending.extendleft(reversed(waiting))
    return chosen


# A copy of an engine for another process: the model and its settings are sent once, later only the weights.


def pack_engine(engine: LocalEngine) -> bytes:
    """Pickle model, tokenizer and settings. Raises EngineError for a model that cannot be copied (a sharded one)."""
    buffer = io.BytesIO()
    try:
        # a model class of the program itself goes along by value
        torch.save((engine.model, engine.settings()), buffer, pickle_module=cloudpickle)
    except Exception as error:
        kind = type(engine.model).__name__
        raise EngineError(
            f"the model ({kind}) cannot be copied into worker processes: {error}; play in this process (--workers 0) "
            "or let an engine server generate"
        ) from error
    return buffer.getvalue()


def unpack_engine(payload: bytes) -> LocalEngine:
    """The engine that `pack_engine` described; it runs on the CPU where the accelerator is missing."""
    model, settings = _load(payload, weights_only=False)
    return LocalEngine(model, **settings)


def pack_weights(engine: LocalEngine) -> bytes:
    """Parameters and buffers by name."""
    buffer = io.BytesIO()
    torch.save(engine.model.state_dict(), buffer)
    return buffer.getvalue()


def load_weights(engine: LocalEngine, payload: bytes, version: int) -> None:
    """Put weights from `pack_weights` in place; generations then carry `version`."""
    engine.model.load_state_dict(_load(payload, weights_only=True))
    engine.weights_changed(version)


def _load(payload: bytes, *, weights_only: bool) -> Any:
    device = None if torch.cuda.is_available() else "cpu"
    return torch.load(io.BytesIO(payload), map_location=device, weights_only=weights_only)
