"""The engine's decode step as CUDA graphs: one launch replays the hundreds of operations of a token of all rows.

A graph repeats its operations with the shapes and the addresses of its capture. So the step reads fixed buffers and is
captured for a bucket, rows and keys rounded up. Rows beyond the batch write to the cache's scratch row, and a mask
hides the keys beyond each row's own.

- `Captured.run` fills the buffers and replays the bucket's graph, which is captured when it is first needed.
- A new graph is compared with the plain step. If one differs, or cannot be captured, the engine decodes plainly from
  then on and says so once.
- Graphs are dropped when memory that they read is allocated anew (`allocations` of cache and decoder). New weights are
  written where the old ones lie, so that an update drops none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.local_engine.cache import RaggedCache, Step
from turngym.agents.local_engine.model import CausalModel, additive_mask, logits_problem
from turngym.agents.local_engine.sampling import draw

_MOST_GRAPHS = 64
"""A further graph replaces the one that was used longest ago: each keeps memory of its own beside the shared pool."""
_KEYS = 512
"""Keys are rounded up to a multiple of this: on average a row reads half as many in vain."""


class Bucket(NamedTuple):
    """The shape of a captured step: rows 0..rows-1 of the cache, of which each reads `keys` keys."""

    rows: int
    keys: int


def bucket_of(rows: int, keys: int, most: Bucket) -> Bucket:
    """The smallest bucket for `rows` and `keys`: 1, 2, 4, 8, 16, 24, 32, 64, 96, ... rows; at most `most`."""
    unit = 1 << (rows - 1).bit_length() if rows <= 8 else 8 if rows <= 32 else 32
    return Bucket(min(-(-rows // unit) * unit, most.rows), min(-(-keys // _KEYS) * _KEYS, most.keys))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fed:
    """What a decode step over n rows of the cache reads besides keys, values and weights."""

    tokens: Tensor
    """int64 [n]: the ids that are fed."""
    positions: Tensor
    """int64 [n]: their positions; 0 in an idle row."""
    write_rows: Tensor
    """int64 [n]: the cache rows that take their keys; a new tensor whenever a row has come, gone or become idle."""
    temperature: Tensor
    """float32 [n]; fixed as long as `write_rows` is the same tensor."""
    uniform: NDArray[np.float64]
    """[n] in [0, 1): the number that draws each row's next id."""
    cells: Tensor | None
    """int64: the rows that are not idle; None means all."""


class Graph(Protocol):
    """`torch.cuda.CUDAGraph`, or what stands in for it in tests."""

    def replay(self) -> None: ...
    def pool(self) -> Any: ...


def can_capture(device: torch.device) -> bool:
    """Whether steps on `device` can be captured."""
    return device.type == "cuda"


def capture(step: Callable[[], Tensor], stream: torch.cuda.Stream, pool: Any) -> tuple[Graph, Tensor]:
    """A graph of what `step` does, in the memory `pool` of another one if not None, and the result that it fills."""
    with torch.cuda.device(stream.device):
        current = torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            step()  # libraries load their kernels at the first call, which no capture allows
        current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # a capture that fails leaves its stream the current one: the outer `with` takes it back. Other threads may use
        # the device meanwhile.
        with (
            torch.cuda.stream(current),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
        ):
            result = step()
    return graph, result


class Buffers:
    """What a captured step reads and writes, for at most `rows` rows; it never moves."""

    def __init__(self, rows: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.tokens = zeros(rows, dtype=torch.int64)
        self.positions = zeros(rows, dtype=torch.int64)
        self.write_rows = zeros(rows, dtype=torch.int64)
        self.temperature = zeros(rows, dtype=torch.float32)
        self.uniform = zeros(rows, dtype=torch.float64)
        self.drawn = zeros(2, rows, dtype=torch.float64)
        """Ids and log-probabilities; float64 holds both exactly."""
        self._loaded: Tensor | None = None

    def load(self, fed: Fed, scratch_row: int) -> None:
        """Take over `fed`; rows beyond it are fed what an earlier batch left there, and write to `scratch_row`."""
        count = len(fed.tokens)
        if fed.write_rows is not self._loaded:
            self.write_rows.fill_(scratch_row)
            self.write_rows[:count] = fed.write_rows
            self.temperature[:count] = fed.temperature
            self._loaded = fed.write_rows
        self.tokens[:count] = fed.tokens
        self.positions[:count] = fed.positions
        self.uniform[:count].copy_(torch.from_numpy(fed.uniform), non_blocking=True)


class Captured:
    """Decode steps of `model` over `cache` as graphs; `most` is the largest bucket."""

    def __init__(self, model: CausalModel, cache: RaggedCache, most: Bucket) -> None:
        self._model, self._cache, self._most = model, cache, most
        self.refused: str | None = None
        """Why nothing is captured any more; None as long as it can be. Set it to decode plainly."""
        self._graphs: dict[Bucket, Graph] = {}
        self._buffers: Buffers | None = None
        self._stream: Any = None
        self._place: tuple[Any, ...] = ()

    def __len__(self) -> int:
        return len(self._graphs)

    def usable(self) -> bool:
        """Whether steps are captured (while `evaluating`): on a GPU, in our own decoder, with full attention."""
        model = self._model
        return self.refused is None and can_capture(model.device) and model.full_attention and model.native

    def reserve(self, rows: int, keys: int) -> Bucket:
        """Make room in the cache for the bucket of `rows` and `keys`; returns it."""
        bucket = bucket_of(rows, keys, self._most)
        self._cache.reserve(*bucket)
        return bucket

    def run(self, fed: Fed, bucket: Bucket, plain: Callable[[], Tensor]) -> Tensor | None:
        """Next ids and their log-probabilities, float64 [2, n] until the next call; None if `plain` must be used.

        `plain` is the same step without a graph: logits [rows in `fed.cells`, V]. `bucket` is what `reserve` returned.
        """
        if self.refused is not None:
            return None
        device = self._model.device
        self._model.dense.reserve(bucket.keys)
        state = (device, self._cache.allocations, self._model.dense.allocations)
        if state != self._place:
            self._graphs.clear()
            self._buffers, self._place = Buffers(self._most.rows, device), state
        buffers = self._buffers
        assert buffers is not None
        buffers.load(fed, self._cache.scratch_row)
        graph = self._graphs.pop(bucket, None) or self._new(fed, bucket, buffers, plain)
        if graph is None:
            return None
        if len(self._graphs) >= _MOST_GRAPHS:
            self._graphs.pop(next(iter(self._graphs)))
        self._graphs[bucket] = graph
        graph.replay()
        return buffers.drawn[:, : len(fed.tokens)]

    def _step(self, bucket: Bucket, buffers: Buffers) -> Tensor:
        """Decode one token of all rows of `bucket`, from the buffers into the buffers; logits [rows, V]."""
        rows, keys = bucket
        positions = buffers.positions[:rows, None]
        hidden = torch.arange(keys, device=positions.device) > positions
        step = Step(
            rows=slice(0, rows),
            write_rows=buffers.write_rows[:rows, None],
            write_positions=positions,
            length=keys,
            mask=additive_mask(hidden, self._model.dtype)[:, None, None],
        )
        logits = self._model.forward(self._cache, buffers.tokens[:rows, None], positions, step)
        buffers.drawn[:, :rows] = torch.stack(_draw(logits, buffers))
        return logits

    def _new(self, fed: Fed, bucket: Bucket, buffers: Buffers, plain: Callable[[], Tensor]) -> Graph | None:
        """A graph whose results are those of `plain`; None if there is no such graph."""
        want = plain()
        try:
            if self._stream is None and self._model.device.type == "cuda":
                self._stream = torch.cuda.Stream(self._model.device)
            pool = next((graph.pool() for graph in self._graphs.values()), None)
            graph, logits = capture(partial(self._step, bucket, buffers), self._stream, pool)
            graph.replay()
            problem = self._problem(fed, logits, want, buffers)
        # whatever goes wrong in a capture, the plain step goes on
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem is None:
            # from here on an update of the weights must find the graphs valid
            self._model.dense.stand_still()
            return graph
        self.refused = f"a step of {bucket.rows} rows and {bucket.keys} keys: {problem}"
        self._graphs.clear()
        warnings.warn(f"the local engine decodes without CUDA graphs: {self.refused}", stacklevel=2)
        return None

    def _problem(self, fed: Fed, logits: Tensor, want: Tensor, buffers: Buffers) -> str | None:
        """Why a replay that gave `logits` [rows, V] cannot be used where the plain step gave `want`, or None."""
        got = logits[: len(fed.tokens)] if fed.cells is None else logits[fed.cells]
        # row by row: one wrong row among 64 would not show in the spread of all
        problems = (logits_problem(mine, its) for mine, its in zip(got, want, strict=True))
        if problem := next(filter(None, problems), None):
            return f"it {problem}"
        # the same logits must give the same ids, to the last bit
        if not torch.equal(buffers.drawn[:, : len(logits)], torch.stack(_draw(logits, buffers))):
            return "it drew other ids from the same logits"
        return None


def _draw(logits: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities as float64 [rows] each."""
    rows = len(logits)
    ids, logprobs = draw(logits, buffers.temperature[:rows], buffers.uniform[:rows])
    return ids.double(), logprobs.double()
