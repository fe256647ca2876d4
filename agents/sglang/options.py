"""Where SGLang servers play and teach, as commands and functions are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Busy = Literal["wait", "retract", "abort"]
"""What happens to responses that are being drawn when new weights come: `wait` lets them end first; `retract` holds
them and draws the rest with the new weights (histories are computed again); `abort` breaks them off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyServer:
    """SGLang servers that play."""

    policy_server: str = ""
    """Address of an SGLang server that plays (`turngym serve policy` starts one), several with commas in between, or
    that of a router; by default the model plays in this process."""
    server_parallel: int = 64
    """Requests under way at a time on each server."""
    server_deadline: float = 600.0
    """Seconds for one response, retries included; a server that is restarted is waited for that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainServers(PolicyServer):
    """SGLang servers that play and teach while this process trains."""

    teacher_server: str = ""
    """Address of SGLang servers with the teacher; --teacher then only names its folder, for the vocabulary."""
    weight_sync: Literal["disk", "gloo", "nccl"] = "disk"
    """How new weights get to the servers that play: through a folder that both sides see, or broadcast (`nccl` between
    GPUs, else `gloo`)."""
    weight_folder: Path | None = None
    """disk: where new weights are written; by default OUT/weights. The newest two stay."""
    weight_address: str = "127.0.0.1"
    """gloo, nccl: where the servers reach this machine."""
    when_busy: Busy = "wait"
    """Responses that are being drawn when new weights come are finished first (`wait`), held and finished by the new
    weights (`retract`), or broken off and continued (`abort`); turns say which ids are whose."""
