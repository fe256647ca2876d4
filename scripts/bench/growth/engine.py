"""Measures of the local engine: length of a history, and how many conversations go on side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from turngym.scripts.bench.growth.measure import Measure, Work

DRAWN = 32
"""Ids of a measured response."""
SAID = 25
"""Ids of the observation before it."""
HISTORY = 200
"""Ids of each history, where slots are counted."""


def _engine(slots: int, history: int) -> tuple[Any, list[Any]]:
    """An engine that has read a history of `history` ids in each of `slots` sessions, and the next requests."""
    import torch

    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.scripts.bench.rollout.shapes import TINY, build_model

    torch.set_num_threads(1)
    longest = history + SAID + DRAWN + 8
    engine = LocalEngine(build_model(TINY, longest, 0), max_batch=slots, max_length=longest)
    prompts = np.random.default_rng(0).integers(0, TINY.vocab, (slots, history + SAID)).astype(np.int32)
    engine.generate([_request(row, prompt[:history], 0, 1) for row, prompt in enumerate(prompts)])
    return engine, [_request(row, prompt, 1, DRAWN) for row, prompt in enumerate(prompts)]


def _request(row: int, prompt: Any, turn: int, drawn: int) -> Any:
    from turngym.envs.core.protocols import GenerateRequest, Sampling

    sampling = Sampling(temperature=0.0, max_new_tokens=drawn)
    return GenerateRequest(session=str(row), prompt_ids=prompt, sampling=sampling, stream=(row, turn))


def open_first(folder: Path, size: int) -> Work:
    """A whole history read at once."""
    engine, (request,) = _engine(1, size)

    def work() -> None:
        engine.release(request.session)
        engine.generate([_request(0, request.prompt_ids[:size], 0, 1)])

    return work


def open_next(folder: Path, size: int) -> Work:
    """A turn after a history that was read before: an observation and a response."""
    engine, requests = _engine(1, size)
    return lambda: engine.generate(requests)


def open_slots(folder: Path, size: int) -> Work:
    """A turn of `size` conversations."""
    engine, requests = _engine(size, HISTORY)
    return lambda: engine.generate(requests)


IDS: dict[str, Any] = {
    "per": "ids",
    "sizes": (1000, 4000, 16_000),
    "full": (1000, 8000, 64_000),
    "holds": "keys and values",
    "needs": "transformers",
}
MEASURES = (
    Measure(name="engine next turn", open=open_next, **IDS),
    Measure(name="engine history at once", open=open_first, power=2.0, **IDS),
    Measure(
        name="engine slots", open=open_slots, **{**IDS, "per": "slots", "sizes": (1, 8, 64), "full": (1, 8, 64, 256)}
    ),
)
