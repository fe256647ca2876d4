"""Serve a policy to any OpenAI client and train it on what they do with it.

Examples:
    turngym serve proxy --student models/student --out runs/live --judge http://127.0.0.1:9000/v1
    turngym serve proxy --student models/student --out runs/live --algorithm opd-hints --port 8081
    turngym serve proxy --student models/student --out runs/log --no-train

Clients take http://127.0.0.1:8080/v1 as their base URL and name their conversation in the header X-Session-Id; turns
with a session are trained on unless X-Turn-Type says side. Every finished turn is written to OUT/records.jsonl, every
judged session to OUT/sessions.jsonl (read it with `turngym trace`). --judge auto means words here: it looks for words
of failure or thanks in the next message and needs no model; a judge model or endpoint sees far more. SIGTERM or Ctrl-C
answers what was accepted, saves and ends; the same command goes on from there. A second one ends at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from turngym.agents.judges.make_judge import JudgeOptions
from turngym.agents.proxy.settings import ProxySettings
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.sglang.options import TrainServers
from turngym.envs.core import TurngymError

try:
    from turngym.trainers.algorithms.opd import OpdConfig
    from turngym.trainers.algorithms.opd_hints import OpdHintsConfig
    from turngym.trainers.algorithms.prm_rl import PrmRlConfig
    from turngym.trainers.algorithms.turnopd import TurnOpdConfig
    from turngym.trainers.config import DistillConfig, OptimizerConfig, RunConfig
except ImportError as error:
    raise TurngymError(f"the proxy needs torch and transformers: pip install 'turngym[train]' ({error})") from error

KEY = "TURNGYM_PROXY_KEY"
"""Environment variable with the key that clients must send; on a command line everybody could read it."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProxy:
    """What to serve, and how it learns."""

    student: Path
    """Folder of the model that answers and learns."""
    out: Path
    """Folder of the run: records, judged sessions, checkpoints, metrics. An existing one goes on."""
    algorithm: Literal["prm-rl", "opd-hints", "opd", "turnopd"] = "prm-rl"
    """What is trained; opd and turnopd need no judge but a --teacher."""
    train: bool = True
    """--no-train only serves and records; clients then choose the temperature of main turns too."""
    teacher: Path | None = None
    """Folder of the teacher of opd and turnopd, and of opd-hints instead of the student before training."""
    host: str = "127.0.0.1"
    """Address to listen on; another than this one needs a key in TURNGYM_PROXY_KEY."""
    port: int = 8080
    """Port to listen on; 0 takes a free one."""
    drain: float = 30.0
    """Seconds that accepted requests get to finish when the server is stopped."""
    batch_turns: int = 16
    """Turns that a training step waits for; whole sessions are taken, at most --run.episodes of them."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    run: RunConfig = field(default_factory=lambda: RunConfig(steps=10_000, eval_every=0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    prm_rl: PrmRlConfig = field(default_factory=PrmRlConfig)
    opd_hints: OpdHintsConfig = field(default_factory=OpdHintsConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    turnopd: TurnOpdConfig = field(default_factory=TurnOpdConfig)
    judging: Annotated[JudgeOptions, tyro.conf.arg(name="")] = field(default_factory=JudgeOptions)
    servers: Annotated[TrainServers, tyro.conf.arg(name="")] = field(default_factory=TrainServers)
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the teacher and of the student before training."""
    threads: int = 0
    """Threads of torch on the CPU; 0 leaves its default."""


def main(argv: Sequence[str]) -> int:
    return serve(parse(argv))


def parse(argv: Sequence[str]) -> ServeProxy:
    """Options from the command line; a setting outside its range is explained, and the exit status is 2."""
    return tyro.cli(ServeProxy, args=list(argv), prog="turngym serve proxy", description=__doc__)


def serve(config: ServeProxy) -> int:
    """Serve until a signal, or until training fails (status 1)."""
    from turngym.agents.proxy.http.app import create_app
    from turngym.scripts.serve.draining import DrainingServer
    from turngym.scripts.serve.fronts import proxy_front
    from turngym.scripts.serve.proxy_build import build

    key = os.environ.get(KEY) or None
    if key is None and config.host not in LOOPBACK:
        raise TurngymError(f"--host {config.host} opens the policy to the network: set a key in {KEY} first")
    if config.batch_turns < 1:
        raise TurngymError(f"--batch-turns is {config.batch_turns}; a training step needs at least 1")
    service, training = build(config)
    try:
        app = create_app(service, api_key=key, more_health=None if training is None else training.health)
        server = DrainingServer(proxy_front(app), host=config.host, port=config.port, drain=config.drain)
        server.stop_on_signals()
        print(f"ready: {server.url}, model {service.name!r}, {_what(config)}", flush=True)
        if training is not None:
            training.start(on_failure=server.stop)
        server.run()
    finally:
        if training is not None:
            training.stop()
        service.close()
    turns = service.health()["turns"]
    print(f"served {turns['main']} main and {turns['side']} side turns", flush=True)
    print("stopped; everything accepted was answered" if server.drained else "stopped before all was answered")
    if training is not None and training.error:
        print(f"training failed: {training.error}", file=sys.stderr)
        return 1
    return 0


def named(settings: ProxySettings, student: Path, chat: ChatSettings) -> ProxySettings:
    """`settings` with what the model's folder says."""
    path = student.resolve()
    folder = path.parent.name if path.name == "model" else path.name
    name = folder if settings.name is None else settings.name
    return replace(settings, name=name, max_tokens=settings.max_tokens or chat.max_new_tokens)


def _what(config: ServeProxy) -> str:
    if not config.train:
        return "records only"
    return f"trains with {config.algorithm} whenever {config.batch_turns} turns of ended sessions are ready"
