"""Pickles agents for workers; local engines are replaced by numbers and sent apart, because they hold weights."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable, Mapping
from functools import _lru_cache_wrapper, lru_cache
from typing import Any

from turngym.agents.executor.core import ExecutorError


def pack(content: Any) -> tuple[bytes, list[Any]]:
    """`content` pickled, and the local engines found in it, in the order of their numbers."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL)
    try:
        pickler.dump(content)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise ExecutorError(
            f"this cannot be sent to workers: {error}. Environments are sent as EnvSpec(id, kwargs) or another "
            "picklable callable; agents must be picklable, and clients of an engine server must be as their address"
        ) from error
    return buffer.getvalue(), pickler.engines


def unpack(data: bytes, engines: Mapping[int, Any]) -> Any:
    """What `pack` was given, with `engines` in the places of its own."""
    return _Unpickler(io.BytesIO(data), engines).load()


class _Pickler(pickle.Pickler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.engines: list[Any] = []

    def persistent_id(self, obj: Any) -> int | None:
        local = sys.modules.get(
            "turngym.agents.local_engine.engine"
        )  # not imported: then no engine exists, and torch need not be loaded
        if local is None or not isinstance(obj, local.LocalEngine):
            return None
        for number, engine in enumerate(self.engines):
            if engine is obj:
                return number
        self.engines.append(obj)
        return len(self.engines) - 1

    def reducer_override(self, obj: Any) -> Any:
        """lru_caches (renderers have many) arrive empty; objects with `for_workers` say how their copy is made."""
        if hasattr(type(obj), "for_workers"):
            return obj.for_workers()
        if isinstance(obj, _lru_cache_wrapper):
            return _empty_cache, (obj.__wrapped__, obj.cache_parameters()["maxsize"])
        return NotImplemented


def _empty_cache(function: Callable[..., Any], size: int | None) -> Any:
    return lru_cache(size)(function)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, engines: Mapping[int, Any]) -> None:
        super().__init__(file)
        self._engines = engines

    def persistent_load(self, number: Any) -> Any:
        return self._engines[number]
