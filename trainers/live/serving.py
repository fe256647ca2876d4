"""What answers a proxy's clients while the student learns, and how it gets new weights."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from turngym.agents.executor.engine_process import EngineProcess
from turngym.agents.local_engine.engine import LocalEngine
from turngym.agents.local_engine.positions import position_limit
from turngym.agents.play_spec import Servers
from turngym.agents.proxy.api_errors import ProxyError
from turngym.agents.proxy.engine_queue import EngineQueue
from turngym.agents.servers.open_servers import eval_policy, train_policy
from turngym.agents.servers.policy import ServerPolicy
from turngym.agents.servers.server_options import Here, ServersOf
from turngym.agents.servers.weights import SyncedPolicy
from turngym.core.protocols import WeightSource
from turngym.core.user_files import user_path
from turngym.trainers.live.proxy_options import AnyProxy, LearningProxy
from turngym.trainers.lora import add_adapters
from turngym.trainers.rollout_order import frozen_copy
from turngym.trainers.scorer import ModelWeights


@dataclass(slots=True, kw_only=True)
class Serving:
    """The engine that answers, and how it gets new weights."""

    engine: LocalEngine | EngineProcess | SyncedPolicy | ServerPolicy
    """`weights_changed(version)` tells it that there are new ones."""
    kind: str
    """`process`, `copy`, `student` or `servers`."""
    live: bool
    """Whether it answers while the student learns."""
    weights: WeightSource
    """Weights of the model in training."""
    copy: Any = None
    """The model that the engine runs, if it is a copy."""
    patience: float = 0.5
    """Seconds that responses being drawn get to end; then they are interrupted and continued by the new weights."""
    clock: Callable[[], float] = time.monotonic
    swaps: int = field(default=0, init=False)
    last_pause: float = field(default=0.0, init=False)
    """Seconds for which requests waited at the last swap, `patience` included."""
    longest_pause: float = field(default=0.0, init=False)

    def publish(self, version: int, queue: EngineQueue) -> None:
        """Put the student's weights as they are now in place, as `version`; `queue` is in front of the engine.

        Adapters are merged before the queue is paused, so that a copy waits for the copying alone. Called in the
        trainer's thread between two updates. Raises ProxyError where the copy has other parameters.
        """
        assert not isinstance(self.engine, ServerPolicy), "servers that get no weights serve without training"
        if self.copy is None:
            self.engine.weights_changed(version)
            return
        new, parameters = dict(self.weights.named_weights()), dict(self.copy.named_parameters())
        if new.keys() != parameters.keys():
            odd = sorted(new.keys() ^ parameters.keys())
            raise ProxyError(f"the model in training and its serving copy differ in parameters: {', '.join(odd[:3])}")
        began = self.clock()
        queue.pause(self.patience)
        try:
            with torch.no_grad():
                for name, value in new.items():
                    parameters[name].copy_(value)
            self.engine.weights_changed(version)
        finally:
            queue.resume()
        self.swaps += 1
        self.last_pause = self.clock() - began
        self.longest_pause = max(self.longest_pause, self.last_pause)

    def close(self) -> None:
        """End what is not in this process; to be called when nothing is generated any more."""
        if isinstance(self.engine, EngineProcess | SyncedPolicy):
            self.engine.close()

    def as_json(self) -> dict[str, Any]:
        names = () if self.copy is None else ("swaps", "last_pause", "longest_pause")
        counts = {f"{name}_s" if "pause" in name else name: getattr(self, name) for name in names}
        return {"from": self.kind, "version": self.engine.policy_version, **counts}


def open_engine(
    config: AnyProxy, model: Any, tokenizer: Any, max_length: int | None, batch: int, vocab_size: int | None
) -> Serving:
    """Open what answers: the model in this process, a copy of it, or servers that get its weights as it learns.

    If adapters are trained, `model` gets them here, after it has been copied: the copy keeps the ordinary weights.
    Raises TurngymError if the model cannot be served or adapted as the options say.
    """
    kind = _kind(config, model)
    served = frozen_copy(model) if kind in ("process", "copy") else None
    learning = config if isinstance(config, LearningProxy) else None
    if learning is not None and learning.lora is not None:
        add_adapters(model, learning.lora, base=str(user_path(config.student).resolve()), seed=config.seed)
    engine: LocalEngine | EngineProcess | SyncedPolicy | ServerPolicy
    live, weights = kind != "student", ModelWeights(model)
    settings = {"tokenizer": tokenizer, "max_length": max_length, "max_batch": batch, "vocab_size": vocab_size}
    if isinstance(config.engine, Servers):
        engine = eval_policy(config.engine, config.student, tokenizer, max_length)
    elif isinstance(config.engine, ServersOf):
        assert learning is not None
        live = learning.serve_from != "student"
        # what servers draw is scored by the student, whose positions they may be started beyond
        most = max_length or position_limit(model.config)
        engine = train_policy(
            config.engine, model, tokenizer, most, config.out, weights=weights, vocab_size=vocab_size, live=live
        )
    elif kind == "process":
        engine = EngineProcess(served, threads=config.threads or torch.get_num_threads(), **settings)
    else:
        engine = LocalEngine(model if served is None else served, **settings)
    return Serving(
        engine=engine,
        kind=kind,
        live=live,
        weights=weights,
        copy=served,
        patience=0.0 if learning is None else learning.swap_wait,
    )


def _kind(config: AnyProxy, model: Any) -> str:
    if not isinstance(config.engine, Here):
        return "servers"
    if not isinstance(config, LearningProxy):
        return "student"
    if config.serve_from != "auto":
        return config.serve_from
    return "process" if next(model.parameters()).device.type == "cpu" else "copy"
