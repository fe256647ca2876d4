"""Model servers as settings: which of them play and teach in a training run, and how new weights get to them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Protocol

from msgspec import Meta

from turngym.core.clean_keys import refuse_credentials
from turngym.core.nested import KIND
from turngym.core.numbers import Positive, Share
from turngym.core.spec import Spec

Parallel = Annotated[int, Meta(ge=1, le=1024)]
Busy = Literal["wait", "retract", "abort"]
"""What happens to responses in flight when new weights come: `wait` lets them end first; `retract` pauses them and
continues them with the new weights (their histories are computed again); `abort` interrupts them."""


class Limits(Protocol):
    """What every user of servers says of them."""

    @property
    def server_parallel(self) -> int:
        """Most requests in flight on each server."""

    @property
    def server_deadline(self) -> float:
        """Seconds for one response."""


class Addressed(Limits, Protocol):
    """Servers that somebody has started, and that play."""

    @property
    def policy_server(self) -> str:
        """Their addresses, with commas in between."""


# How new weights get to servers.


class WeightSync(Spec, tag_field=KIND):
    """How new weights get to servers that play."""


class Disk(WeightSync, tag="disk"):
    """Through a folder that both sides see; adapters alone where they are trained and a vLLM server loads them."""

    weight_folder: Path | None = None
    """Where new weights are written; none: OUT/weights. The newest two are kept."""


class Gloo(WeightSync, tag="gloo"):
    """By broadcast over the network, with SGLang alone."""

    weight_address: str = "127.0.0.1"
    """Where the servers reach this machine."""


class Nccl(WeightSync, tag="nccl"):
    """By broadcast between GPUs."""

    weight_address: str = "127.0.0.1"
    """Where the servers reach this machine."""


# Who plays in training.


class RunEngine(Spec, tag_field=KIND):
    """What plays the student's episodes."""


Precision = Literal["float32", "bfloat16"]


class Here(RunEngine, tag="local"):
    """This process, or worker processes beside it."""

    rollout_dtype: Precision | None = None
    """Precision that the student plays with. Of its weights and cache; by default that of its weights. bfloat16 halves
    the cache and costs a copy of the weights."""


class Synced(RunEngine):
    """Servers that get the student's weights as it learns."""

    weight_sync: Disk | Gloo | Nccl = Disk()
    """How new weights get there: through a folder (`disk`), or by broadcast (`nccl` between GPUs, `gloo` with SGLang
    alone)."""
    when_busy: Busy = "wait"
    """What new weights do to answers in flight. These finish first (`wait`), pause and are continued by the new weights
    (`retract`), or are interrupted and continued (`abort`). Turns record which weights sampled what."""
    server_parallel: Parallel = 64
    """Most requests in flight on each server."""
    server_deadline: Positive = 600.0
    """Seconds for one response, with retries and waiting for a server that restarts."""


class ServersOf(Synced, tag="servers", kw_only=True):
    """Servers that somebody has started."""

    policy_server: str
    """Address of a server that plays. `turngym serve policy` starts one; several with commas in between, or that of
    SGLang's router. Which kind it is, is asked."""

    def __post_init__(self) -> None:
        refuse_credentials("policy_server", self.policy_server)


class StartedServer(Synced):
    """A server that the run starts beside itself, on the same GPU. It sleeps during updates, and ends with the run."""

    rollout_dtype: Precision | None = None
    """Precision that the student plays with. By default the one that the model's config.json names."""
    engine_python: str | None = None
    """The Python that has that server installed; none: the one that trains."""
    engine_memory: Share | None = 0.4
    """Share of the GPU's memory for the server; none: its own choice."""
    engine_more: tuple[str, ...] = ()
    """Further arguments of that server, as they stand: --engine-more=--max-num-seqs --engine-more=64."""


class OwnSglang(StartedServer, tag="sglang"):
    """SGLang."""


class OwnVllm(StartedServer, tag="vllm"):
    """vLLM."""


AnyEngine = Here | ServersOf | OwnSglang | OwnVllm


def rollout_dtype(engine: AnyEngine) -> Precision | None:
    """The precision that the student plays with, where the run chooses it; None: that of its weights."""
    return None if isinstance(engine, ServersOf) else engine.rollout_dtype


# Who teaches.


class Teacher(Spec, tag_field=KIND):
    """Another model that teaches."""

    @classmethod
    def table_of(cls, text: str) -> dict[str, object]:
        """The teacher's folder; that a server has it is said beside it."""
        return {"teacher": text}


class TeacherHere(Teacher, tag="local"):
    """A teacher in this process."""

    teacher: Path
    """Folder of the teacher, or ORG/NAME[@REVISION]. The latter is one of the hub (extra `hub`)."""


class TeacherServed(Teacher, tag="servers"):
    """A teacher on servers."""

    teacher_server: str
    """Address of servers with the teacher; several with commas in between."""
    teacher: Path | None = None
    """The teacher's folder: its vocabulary, and what the servers must compute. None: whatever model they have."""
    server_parallel: Parallel = 64
    """Most requests in flight on each server."""
    server_deadline: Positive = 600.0
    """Seconds for one answer, with retries and waiting for a server that restarts."""

    def __post_init__(self) -> None:
        refuse_credentials("teacher_server", self.teacher_server)


AnyTeacher = TeacherHere | TeacherServed
