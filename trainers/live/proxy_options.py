"""Options of `turngym serve proxy`: what it serves, how it learns, what answers meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from turngym.agents.agent_options import JudgeOptions
from turngym.agents.proxy.config import ProxySettings
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.servers.server_options import TrainServers
from turngym.core.settings import Count, Needs, Port, Processes, settings_of
from turngym.trainers.algorithm import find_algorithm
from turngym.trainers.algorithms.opd import OpdConfig
from turngym.trainers.algorithms.opd_hints import OpdHintsConfig
from turngym.trainers.algorithms.prm_opd import PrmOpdConfig
from turngym.trainers.algorithms.prm_rl import PrmRlConfig
from turngym.trainers.algorithms.turnopd import TurnOpdConfig
from turngym.trainers.lora import LoraConfig
from turngym.trainers.run_config import DistillConfig, OptimizerConfig, RunConfig
from turngym.trainers.train_config import BY_FORM, PlayConfig, config_class, keys_of

ALGORITHMS = ("prm-rl", "opd-hints", "prm-opd", "opd", "turnopd")
"""Algorithms that can learn from sessions."""
LEARNING = (
    *("algorithm", "teacher", "serve_from", "swap_wait", "batch_turns", "staleness", "importance_cap", "order"),
    *(f"run.{item.name}" for item in settings_of(RunConfig) if item.name != "seed"),
    *(f"{name}.*" for name in ("optimizer", "lora", "distill", *(find_algorithm(one).table for one in ALGORITHMS))),
    *("judge*", "teacher_server", "weight_*", "when_busy", "teacher_dtype"),
)
"""Settings that a proxy which only records does not read."""


def readers() -> dict[str, tuple[str, ...]]:
    """The settings that only some of the algorithms read, with these."""
    found = {}
    for setting in {item.key: item for name in ALGORITHMS for item in settings_of(config_class(name))}.values():
        by = tuple(name for name in ALGORITHMS if setting.key in keys_of(name))
        # a proxy plays nothing
        if len(by) < len(ALGORITHMS) and setting.group is not PlayConfig:
            found[f"run.{setting.key}" if setting.group is RunConfig else setting.key] = by
    return found


READERS = readers()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeProxy:
    """What to serve, and how it learns."""

    student: Path
    """Folder of the model that answers and learns."""
    out: Path
    """Folder of the run: records, judged sessions, checkpoints, metrics. An existing one goes on."""
    algorithm: Literal["prm-rl", "opd-hints", "prm-opd", "opd", "turnopd"] = "prm-rl"
    """What is trained; opd and turnopd need no judge but a --teacher."""
    train: bool = True
    """--no-train only serves and records; clients then choose the temperature of main turns too."""
    teacher: Path | None = None
    """Folder of the teacher of opd and turnopd, and of opd-hints and prm-opd instead of the student before training."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other address needs a key in TURNGYM_PROXY_KEY, or --client-keys."""
    client_keys: Path | None = None
    """File with a line for each client, its name and its key. Clients then have sessions of their own, and an equal
    part of --proxy.max-waiting and --proxy.max-sessions each. Without it all clients are one."""
    hosts: tuple[str, ...] = ()
    """Names under which clients may ask beside localhost and 127.0.0.1: those of a reverse proxy, for example."""
    port: Port = 8080
    """Port to listen on; 0 takes a free one."""
    drain: float = 30.0
    """Seconds that accepted requests get to finish when the server is stopped."""
    serve_from: Literal["auto", "process", "copy", "student"] = "auto"
    """What answers while the student learns: a copy of it in a `process` of its own (CPU), a `copy` in this process, or
    the `student` itself, which takes no further memory; requests then wait for every update. auto: process on the CPU,
    copy on an accelerator. Servers (--policy-server) answer during updates unless this is student."""
    swap_wait: float = 0.5
    """Seconds that answers being drawn get to end when new weights come; then they are interrupted and continued by
    the new ones. Not for servers: they have --when-busy."""
    batch_turns: Count = 16
    """Turns that a training step waits for; whole sessions are taken, at most --run.episodes of them."""
    staleness: int | None = None
    """Most updates that a turn may be behind the student when it is trained on; older ones are left out. With it the
    probability ratio new / old of a token counts for at most --importance-cap. By default turns of any age count."""
    importance_cap: float = 2.0
    """With --staleness: truncated importance sampling."""
    order: Literal["oldest", "newest"] = "oldest"
    """Which of the sessions that are ready a step takes first."""
    proxy: ProxySettings = field(default_factory=ProxySettings)
    run: RunConfig = field(default_factory=lambda: RunConfig(steps=10_000, eval_every=0))
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters learn in place of the weights; what answers gets them merged in."""
    distill: DistillConfig = field(default_factory=DistillConfig)
    prm_rl: PrmRlConfig = field(default_factory=PrmRlConfig)
    opd_hints: OpdHintsConfig = field(default_factory=OpdHintsConfig)
    prm_opd: PrmOpdConfig = field(default_factory=PrmOpdConfig)
    opd: OpdConfig = field(default_factory=OpdConfig)
    turnopd: TurnOpdConfig = field(default_factory=TurnOpdConfig)
    judging: Annotated[JudgeOptions, tyro.conf.arg(name="")] = field(default_factory=JudgeOptions)
    servers: Annotated[TrainServers, tyro.conf.arg(name="")] = field(
        default_factory=lambda: TrainServers(when_busy="retract")
    )
    device: str = "auto"
    """`cpu`, `cuda`, ...; auto: cuda where there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the student's weights."""
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision of the teacher and of the student before training."""
    threads: Processes = 0
    """Threads of torch on the CPU; 0 leaves its default."""
    needs: ClassVar[Needs] = (
        (LEARNING, "to train (no --no-train)", lambda proxy: proxy.train),
        (("run.eval_every", "run.reward"), "an environment, as `turngym train` has one", lambda proxy: False),
        (
            ("judge_strict", "judge_repeats", "judge_every"),
            "an environment, as `turngym train` has one",
            lambda proxy: False,
        ),
        *(
            ((key,), f"--algorithm {' or '.join(readers)}", lambda proxy, readers=readers: proxy.algorithm in readers)
            for key, readers in READERS.items()
        ),
        *BY_FORM,
        (("importance_cap",), "--staleness", lambda proxy: proxy.staleness is not None),
        (
            ("swap_wait",),
            "a model that answers here (no --policy-server)",
            lambda proxy: not proxy.servers.policy_server,
        ),
    )

    @property
    def own(self) -> Any:
        """The settings of the algorithm."""
        return getattr(self, find_algorithm(self.algorithm).table)


def named(settings: ProxySettings, student: Path, chat: ChatSettings) -> ProxySettings:
    """`settings` with name and answer length from the model's folder where they are not set."""
    path = student.resolve()
    folder = path.parent.name if path.name == "model" else path.name
    name = folder if settings.name is None else settings.name
    return replace(settings, name=name, max_tokens=settings.max_tokens or chat.max_new_tokens)
