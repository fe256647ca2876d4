"""The local engine: a transformers model in this process that continues token ids, its KV cache kept across turns."""

from __future__ import annotations

import io
import pickle
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.cache import (
    LEAST,
    Held,
    Loan,
    Loans,
    Moves,
    Newcomer,
    RaggedCache,
    Segment,
    SlotTable,
    Step,
    find_loans,
    segments,
)
from turngym.agents.local_engine.model import CausalModel, EngineError, bias, choose_cache, context_limit, prefill
from turngym.agents.local_engine.sampling import Decoder, StopText, check_sampling, draw, greedy, uniforms
from turngym.envs.core.protocols import GenerateRequest, Generation, Sampling, Watch

# Requests under way in the local engine, and the batch of those that are being decoded.

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


# Bringing prompts into the cache: what a session holds is kept, what others hold is copied, the rest is fed.


def feed(
    model: CausalModel, cache: RaggedCache, held: Mapping[str, Held], rows: Sequence[Row], *, tokens: int
) -> tuple[Tensor, int]:
    """Logits [B, V] after the prompts of `rows`, and how many ids were fed; `tokens` as in `prefill`.

    Every row has its slot in `held`, in ascending order.
    """
    starts = {}
    for row in rows:
        entry = held[row.session]
        starts[entry.slot] = entry.resume(row.prompt, recurrent=model.recurrent)
        cache.resume(entry.slot, starts[entry.slot], len(entry.ids))
        # prefill saves recurrent states before the last id, whose logits the same prompt asked again needs
        entry.ids, entry.mark = entry.ids[: starts[entry.slot]], len(row.prompt) - 1
    by_slot = {held[row.session].slot: row for row in rows}
    # a recurrent state stands for a whole history and has no first part
    loans = Loans({}, {}) if model.recurrent else _loans(held, by_slot, starts)
    place = {slot: number for number, slot in enumerate(by_slot)}
    waves = [slot for slot in by_slot if slot not in loans.later], list(loans.later)
    logits: Tensor | None = None
    for slots, lent in zip(waves, (loans.now, loans.later), strict=True):
        if not slots:
            continue
        _borrow(cache, {slot: lent[slot] for slot in slots if slot in lent}, starts)
        new = [by_slot[slot].prompt[starts[slot] :] for slot in slots]
        part = prefill(model, cache, slots, [starts[slot] for slot in slots], new, tokens=tokens)
        if len(slots) == len(rows):
            logits = part
            break
        if logits is None:
            logits = part.new_empty(len(rows), part.shape[-1])
        logits[[place[slot] for slot in slots]] = part
    assert logits is not None
    if not model.recurrent:
        for row in rows:
            held[row.session].ids = row.prompt
    return logits, sum(len(row.prompt) - starts[slot] for slot, row in by_slot.items())


def _loans(held: Mapping[str, Held], by_slot: Mapping[int, Row], starts: Mapping[int, int]) -> Loans:
    newcomers = [Newcomer(slot, row.prompt) for slot, row in by_slot.items() if starts[slot] < LEAST]
    return find_loans(newcomers, held.values()) if newcomers else Loans({}, {})


def _borrow(cache: RaggedCache, loans: Mapping[int, Loan], starts: dict[int, int]) -> None:
    for slot, loan in loans.items():
        cache.reserve(slot + 1, loan.length)
        cache.copy(loan.slot, slot, loan.length)
        starts[slot] = loan.length


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


# A copy of a local engine for another process: the model and its settings once, then only weights.


def pack_engine(engine: LocalEngine) -> bytes:
    """Model, tokenizer and settings. Raises EngineError for a model that cannot be copied (a sharded one)."""
    buffer = io.BytesIO()
    try:
        torch.save((engine.model, engine.settings()), buffer)
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        kind = type(engine.model).__name__
        raise EngineError(
            f"the model ({kind}) cannot be copied into worker processes: {error}; play in this process (--workers 0) "
            "or let an engine server generate"
        ) from error
    return buffer.getvalue()


def unpack_engine(payload: bytes) -> LocalEngine:
    """The engine that `pack_engine` described; without its accelerator, on the CPU."""
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
