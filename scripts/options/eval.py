"""Options of `turngym eval`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from turngym.agents.agent_options import AgentOptions
from turngym.agents.executor.open_workers import WorkerOptions
from turngym.agents.sglang.options import PolicyServer


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Play every task of a panel and score it."""

    panel: str | None = None
    """Name (newest version), full name, or path of a manifest; `turngym panel list` shows them."""
    preset: str | None = None
    """A published set-up by name (turnopd, verl-agent, react, search-r1); `--preset list` shows what they set. Options
    that are given beside it take the place of its values."""
    rescore: Path | None = None
    """Play nothing: the table of this trace, or of the evaluation in this folder, computed again; with --out a
    results.json of it."""
    compare: tuple[Path, Path] | None = None
    """Play nothing: two traces, results files or folders of evaluations of the same tasks, their differences paired by
    task, and the settings that differ."""
    different_settings: bool = False
    """--compare: also where settings differ that change the game and not the player (turns, arguments of gym.make,
    temperature, preset); by default that is refused."""
    player: Annotated[AgentOptions, tyro.conf.arg(name=""), tyro.conf.OmitArgPrefixes] = field(
        default_factory=AgentOptions
    )
    samples: int = 4
    """Episodes per task."""
    out: Path | None = None
    """Folder for results.json, trace.jsonl and config.toml; an interrupted evaluation with the same folder goes on."""
    limit: int | None = None
    """Play only the first so many tasks of the panel."""
    seed: int = 0
    """Same seed, same episodes, whatever --slots and --workers."""
    data: str | None = None
    """Folder of the data; by default where the environment looks for it (for ALFWorld: $ALFWORLD_DATA)."""
    max_turns: int | None = None
    """Turns before an episode is cut; by default the preset's limit, else the panel's, else the environment's (50)."""
    show_admissible: Literal["on", "off"] | None = None
    """Whether every observation ends with the list of admissible actions; by default as the preset says, else not."""
    env_kwargs: str = "{}"
    """Further arguments for gym.make as JSON, for example '{"engine": "textworld"}'."""
    servers: Annotated[PolicyServer, tyro.conf.arg(name="")] = field(default_factory=PolicyServer)
    workers: Annotated[WorkerOptions, tyro.conf.arg(name="")] = field(default_factory=WorkerOptions)
    verify: bool = True
    """Check every task's hash against the panel before anything is played."""
