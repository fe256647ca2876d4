"""Settings of `turngym serve proxy`: what it serves, and how it learns, if it does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs

from turngym.agents.play_spec import Servers
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.servers.server_options import Here, ServersOf
from turngym.core.errors import SettingsError, did_you_mean
from turngym.core.nested import at
from turngym.core.numbers import Count, NotNegative, Number
from turngym.core.resolve import Layer, merged, resolve
from turngym.core.spec import Spec, Unread, changed, expand, needing
from turngym.core.task import MAX_TURNS
from turngym.trainers.algorithm_spec import find_algorithm
from turngym.trainers.learning_rate import usual_lr
from turngym.trainers.lora import LoraConfig
from turngym.trainers.run_config import LoopConfig, OptimizerConfig, RunConfig, Stale
from turngym.trainers.train_config import Learns, Method, with_method

ALGORITHMS = ("prm-rl", "opd-hints", "prm-opd", "opd", "turnopd")
"""Algorithms that can learn from sessions."""
DEFAULT = "prm-rl"
READ_TABLES = frozenset({"teacher", "frozen", "reference", "distill", "judge", "dual_clip"})
"""What they read besides their own settings; an environment, its expert and its rewards a proxy has not."""


class RecordingProxy(Spec):
    """A proxy that serves and records."""

    student: Path
    """Folder of the model that answers and learns."""
    out: Path
    """Folder of the run: records, judged sessions, checkpoints, metrics. An existing one goes on."""
    train: bool = True
    """--no-train only serves and records; clients then choose the temperature of main turns too."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other address needs a key in TURNGYM_PROXY_KEY, or --client-keys."""
    client_keys: Path | None = None
    """File with a line for each client, its name and its key. Clients then have sessions of their own, and an equal
    part of --proxy.max-waiting and --proxy.max-sessions each. Without it all clients are one."""
    hosts: tuple[str, ...] = ()
    """Names under which clients may ask beside localhost and 127.0.0.1: those of a reverse proxy, for example."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    """Port to listen on; 0 takes a free one."""
    drain: NotNegative = 30.0
    """Seconds that accepted requests get to finish when the server is stopped."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    seed: Number = 0
    """Fixes what is drawn."""
    engine: Here | Servers = Here()
    """What answers: this process, or servers (--policy-server)."""
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights."""
    threads: Annotated[int, Meta(ge=0, le=1024)] = 0
    """Threads of torch on the CPU; 0 leaves its default."""


class ProxyLoop(LoopConfig):
    """What the loop does."""

    steps: Count = 10_000
    """Training steps K_total."""
    max_turns: Count = MAX_TURNS
    """Full depth of a session, in turns."""
    temperature: NotNegative = 1.0
    """Sampling temperature of main turns."""


class LearningProxy(RecordingProxy, Learns, kw_only=True):
    """A proxy whose clients train the model."""

    algorithm: str
    """What is trained; opd and turnopd need no judge but a --teacher."""
    method: Method = Method()
    engine: Here | ServersOf = Here()  # type: ignore[assignment]
    """What answers: this process, or servers (--policy-server), which get the model's new weights."""
    serve_from: Literal["auto", "process", "copy", "student"] = "auto"
    """What answers while the student learns: a copy of it in a `process` of its own (CPU), a `copy` in this process, or
    the `student` itself, which takes no further memory; requests then wait for every update. auto: process on the CPU,
    copy on an accelerator. Servers (--policy-server) answer during updates unless this is student."""
    swap_wait: NotNegative = 0.5
    """Seconds that answers being drawn get to end when new weights come; then they are interrupted and continued by
    the new ones. Not for servers: they have --when-busy."""
    batch_turns: Count = 16
    """Turns that a training step waits for; whole sessions are taken, at most --run.episodes of them."""
    staleness: Stale | None = None
    """Most updates that a turn may be behind the student when it is trained on; older ones are left out. With it the
    probability ratio new / old of a token counts for at most --importance-cap. By default turns of any age count."""
    order: Literal["oldest", "newest"] = "oldest"
    """Which of the sessions that are ready a step takes first."""
    run: ProxyLoop = field(default_factory=ProxyLoop)
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig | None = None
    """Adapters learn in place of the weights; what answers gets them merged in."""

    def unread(self) -> Unread:
        if not isinstance(self.engine, Here):
            yield from needing("a model that answers here (no --policy-server)", "swap_wait")

    @property
    def loop(self) -> RunConfig:
        """All that the loop reads."""
        overrides = {"reference": self.part("reference"), "seed": self.seed, "eval_every": 0}
        return RunConfig(**{**structs.asdict(self.run), **overrides})


AnyProxy = RecordingProxy | LearningProxy


def proxy_class(algorithm: str | None) -> type[Any]:
    """The class of the settings of a proxy; None: it learns nothing."""
    if algorithm is None:
        return RecordingProxy
    if algorithm not in ALGORITHMS:
        hint = did_you_mean(algorithm, ALGORITHMS)
        raise SettingsError(f"algorithm is {algorithm}; valid for a proxy: {', '.join(ALGORITHMS)}.{hint}")
    return with_method(LearningProxy, algorithm, READ_TABLES)


def proxy_config(algorithm: str | None, layers: Sequence[tuple[str, Mapping[str, Any]]]) -> AnyProxy:
    """The settings of a proxy from tables with short names, and who gives them, the last one on top.

    Raises SettingsError for a setting that does not exist, that cannot have its value, or that nothing would read.
    """
    cls = proxy_class(algorithm)
    usual: dict[str, Any] = {"engine": {"when_busy": "retract"}}
    chosen = {"train": False} if algorithm is None else {"algorithm": algorithm}
    asked_layers = [Layer(name=where, table=expand(cls, table, where), asked=True) for where, table in layers]
    if algorithm is not None:
        values = merged([layer.table for layer in asked_layers])
        rate = usual_lr(find_algorithm(algorithm), adapters=isinstance(at(values, "lora"), Mapping))
        usual |= {"optimizer": {"lr": rate}, "method": {"judge": {"kind": "words"}}}
    config: AnyProxy = resolve(
        cls, [Layer(name="default", table=usual), *asked_layers, Layer(name="command line", table=chosen, asked=True)]
    ).spec
    return config


def named(settings: ProxySettings, student: Path, chat: ChatSettings) -> ProxySettings:
    """`settings` with name and answer length from the model's folder where they are not set."""
    path = student.resolve()
    folder = path.parent.name if path.name == "model" else path.name
    name = folder if settings.name is None else settings.name
    return changed(settings, name=name, max_tokens=settings.max_tokens or chat.max_new_tokens)
