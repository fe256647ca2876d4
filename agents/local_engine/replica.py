"""A copy of a local engine for another process: the model and its settings once, then only weights."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from turngym.agents.local_engine.engine import EngineError, LocalEngine


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
