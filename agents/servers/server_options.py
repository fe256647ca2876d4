"""Options of the commands that use model servers: which servers play and teach, and how new weights get to them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from turngym.agents.servers.server_connection import Busy, ServerError
from turngym.core.secrets import refuse_credentials
from turngym.core.settings import IN_FILE, Above0, Needs, Share, Threads, read_by


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServer:
    """Servers (SGLang, vLLM) that play."""

    policy_server: str = ""
    """Address of a server that plays. `turngym serve policy` starts one; several with commas in between, or that of
    SGLang's router. Which kind it is, is asked. By default the model plays in this process."""
    server_parallel: Threads = field(default=64, metadata=IN_FILE)
    """Most requests in flight on each server."""
    server_deadline: Above0 = field(default=600.0, metadata=IN_FILE)
    """Seconds for one response, with retries and waiting for a server that restarts."""
    needs: ClassVar[Needs] = (
        (("server_parallel", "server_deadline"), "--policy-server", lambda servers: bool(servers.policy_server)),
    )

    def __post_init__(self) -> None:
        refuse_credentials("", asdict(self))


BY_SYNC: Needs = (
    (("weight_folder",), "--weight-sync disk", lambda servers: servers.weight_sync == "disk"),
    (("weight_address",), "--weight-sync gloo or nccl", lambda servers: servers.weight_sync != "disk"),
)
"""What each way of new weights has for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainServers(PolicyServer):
    """Servers (SGLang, vLLM) that play and teach while this process trains."""

    teacher_server: str = field(default="", metadata=read_by("teacher"))
    """Address of servers with the teacher. --teacher then names its folder: its vocabulary, and what the servers must
    compute."""
    weight_sync: Literal["disk", "gloo", "nccl"] = "disk"
    """How new weights get to servers that play. Through a folder that both sides see (adapters alone where they are
    trained and a vLLM server loads them), or by broadcast (`nccl` between GPUs; `gloo` with SGLang alone)."""
    weight_folder: Path | None = field(default=None, metadata=IN_FILE)
    """disk: where new weights are written; by default OUT/weights. The newest two are kept."""
    weight_address: str = field(default="127.0.0.1", metadata=IN_FILE)
    """gloo, nccl: where the servers reach this machine."""
    when_busy: Busy = "wait"
    """What new weights do to answers in flight. These finish first (`wait`), pause and are continued by the new weights
    (`retract`), or are interrupted and continued (`abort`). Turns record which weights sampled what."""
    needs: ClassVar[Needs] = (
        (
            ("server_parallel", "server_deadline"),
            "--policy-server or --teacher-server",
            lambda servers: bool(servers.policy_server or servers.teacher_server),
        ),
        (
            ("weight_sync", "weight_folder", "weight_address", "when_busy"),
            "--policy-server",
            lambda servers: bool(servers.policy_server),
        ),
        *BY_SYNC,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunServers(TrainServers):
    """Servers of a training run, and a server of the run's own."""

    engine: Literal["local", "sglang", "vllm"] = "local"
    """What plays. This process, or a server that the run starts beside itself, on the same GPU. It sleeps during
    updates, and ends with the run."""
    engine_python: str | None = None
    """The Python that has that server installed. By default the one that trains."""
    engine_memory: Share | None = field(default=0.4, metadata=IN_FILE)
    """Share of the GPU's memory for the server of --engine; None: its own choice."""
    engine_more: tuple[str, ...] = field(default=(), metadata=IN_FILE)
    """Further arguments of that server, as they stand: --engine-more=--max-num-seqs --engine-more=64."""
    needs: ClassVar[Needs] = (
        (
            ("server_parallel", "server_deadline"),
            "--policy-server, --teacher-server or --engine",
            lambda servers: servers.elsewhere or bool(servers.teacher_server),
        ),
        (
            ("weight_sync", "weight_folder", "weight_address", "when_busy"),
            "--policy-server or --engine",
            lambda servers: servers.elsewhere,
        ),
        *BY_SYNC,
        (("engine_python", "engine_memory", "engine_more"), "--engine", lambda servers: servers.engine != "local"),
    )

    def __post_init__(self) -> None:
        super(RunServers, self).__post_init__()
        if self.engine != "local" and self.policy_server:
            raise ServerError(f"--engine {self.engine} starts a server of its own: leave --policy-server out")

    @property
    def elsewhere(self) -> bool:
        """Whether another process than this one plays."""
        return self.engine != "local" or bool(self.policy_server)
