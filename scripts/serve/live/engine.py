"""What answers the proxy's clients: the student, a copy of it, or servers; and how it gets new weights."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from turngym.agents.local_engine.child_process.engine_process import EngineProcess
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.proxy.serving_copy import ServingCopy
from turngym.agents.sglang.open_servers import eval_policy, live_policy, train_policy
from turngym.envs.core import TurngymError
from turngym.scripts.options.serve_proxy import ServeProxy
from turngym.trainers.models.lora import add_adapters
from turngym.trainers.models.weight_source import ModelWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """An engine, and who gives it weights."""

    engine: Any
    kind: str
    """`process`, `copy`, `student` or `servers`."""
    live: bool
    """Whether it answers while the student learns."""
    set_version: Callable[[int], None]
    """Called with the version of the student's weights when there are new ones."""
    copied: ServingCopy | None = None
    close: Callable[[], None] = field(default=lambda: None)

    def behind(self, queue: EngineQueue) -> Serving:
        """The same, once it is known which queue is in front of the engine."""
        if self.copied is not None:
            self.copied.queue = queue
        return self

    def as_json(self) -> dict[str, Any]:
        more = {} if self.copied is None else self.copied.as_json()
        return {"from": self.kind, "version": self.engine.policy_version, **more}


def open_engine(config: ServeProxy, model: Any, tokenizer: Any, max_length: int | None, batch: int) -> Serving:
    """What answers: the model in this process, a copy of it, or servers that get its weights as it learns.

    Where adapters are to learn, `model` gets them here: a copy is made before, and holds the ordinary weights.
    Raises TurngymError where the model cannot be served, or adapted, in the way that was asked for.
    """
    if not config.swap_wait >= 0:
        raise TurngymError(f"--swap-wait is {config.swap_wait}; valid: 0 seconds or more")
    kind = _kind(config, model)
    served = copy.deepcopy(model).requires_grad_(False) if kind in ("process", "copy") else None
    if config.train and config.lora.rank:
        add_adapters(model, config.lora, base=str(config.student), seed=config.run.seed)
    if kind == "servers":
        return _servers(config, model, tokenizer, max_length)
    settings = {"tokenizer": tokenizer, "max_length": max_length, "max_batch": batch}
    if served is None:
        engine = LocalEngine(model, **settings)
        return Serving(engine=engine, kind=kind, live=False, set_version=engine.weights_changed)
    close: Callable[[], None] = lambda: None  # noqa: E731
    copied_engine: Any
    if kind == "process":
        copied_engine = EngineProcess(served, threads=config.threads or torch.get_num_threads(), **settings)
        close = copied_engine.close
    else:
        copied_engine = LocalEngine(served, **settings)
    copied = ServingCopy(engine=copied_engine, copy=served, weights=ModelWeights(model), patience=config.swap_wait)
    return Serving(engine=copied_engine, kind=kind, live=True, set_version=copied.publish, copied=copied, close=close)


def _kind(config: ServeProxy, model: Any) -> str:
    if config.servers.policy_server:
        return "servers"
    if not config.train:
        return "student"
    if config.serve_from != "auto":
        return config.serve_from
    return "process" if next(model.parameters()).device.type == "cpu" else "copy"


def _servers(config: ServeProxy, model: Any, tokenizer: Any, max_length: int | None) -> Serving:
    if not config.train:
        fixed = eval_policy(config.servers, config.student, tokenizer, max_length)
        return Serving(engine=fixed, kind="servers", live=False, set_version=lambda _: None)
    open_ = train_policy if config.serve_from == "student" else live_policy
    engine = open_(config.servers, model, tokenizer, max_length, config.out, weights=ModelWeights(model))
    live = config.serve_from != "student"
    return Serving(engine=engine, kind="servers", live=live, set_version=engine.weights_changed, close=engine.close)
