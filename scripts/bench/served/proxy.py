"""Load the training proxy with many sessions at once: lost turns, crossed sessions, leaks, rates.

Examples:
    turngym bench proxy
    turngym bench proxy --sessions 64 --seconds 120 --no-train

A server in a process of its own serves the tiny model and trains on what comes; `--sessions` clients talk to it at a
time, each with an id of its own in every message, and begin a new session when one is done. Afterwards the records are
read: every turn a client was answered must be there once, in its own session, with only its own id in its messages.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from turngym.scripts.bench.served.clients import Load, Tally, check, started, talk


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchProxy:
    """How hard the proxy is worked."""

    load: Annotated[Load, tyro.conf.arg(name="")] = field(default_factory=Load)
    train: bool = True
    """Train meanwhile."""


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(BenchProxy, args=list(argv), prog="turngym bench proxy", description=__doc__)
    if config.load.out is not None:
        return bench(config, config.load.out)
    with tempfile.TemporaryDirectory() as folder:
        return bench(config, Path(folder))


def bench(config: BenchProxy, out: Path) -> int:
    """Run the load and check the records; 0 if nothing was lost, crossed or leaked."""
    server, url = _start(config, out)
    tally = Tally()
    try:
        memory, health, spent = talk(config.load, url, server.pid, tally)
    finally:
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=300)[0]
    problems = [*tally.errors[:5], *check(out, tally)]
    if "everything accepted was answered" not in said:
        problems.append(f"the server did not end cleanly: {said[-500:]!r}")
    if memory and memory[-1] > 1.15 * memory[len(memory) // 2] + 20:
        problems.append(f"memory grew in the second half: {memory[len(memory) // 2]:.0f} to {memory[-1]:.0f} MB")
    for line in _report(config.load, tally, memory, health, spent):
        print(line)
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "no lost turn, no crossed session, no leak")
    return 1 if problems else 0


def _start(config: BenchProxy, out: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "turngym.scripts", "serve", "proxy", "--student", str(config.load.student)]
    command += ["--out", str(out), "--port", "0", "--threads", "1", "--run.no-tensorboard", "--optimizer.lr", "1e-5"]
    return started([*command, *(("--batch-turns", "64") if config.train else ("--no-train",))])


def _report(load: Load, tally: Tally, memory: list[float], health: dict[str, Any], spent: float) -> list[str]:
    times = sorted(tally.seconds) or [0.0]
    engine, training = health.get("engine", {}), health.get("training", {})
    lines = [
        f"{load.sessions} clients, {spent:.0f} s: {len(tally.answers):,} sessions, {len(times):,} turns, "
        f"{len(times) / spent:.1f} turns/s, {sum(tally.refused.values())} refusals {dict(tally.refused)}",
        f"seconds per turn: median {times[len(times) // 2]:.2f}, 99 % {times[int(0.99 * (len(times) - 1))]:.2f}, "
        f"worst {times[-1]:.2f}",
        f"engine: {engine.get('batches')} batches, largest {engine.get('largest_batch')}, "
        f"{engine.get('generated_tokens', 0) / spent:.0f} tokens/s",
        f"server's memory: {memory[0]:.0f} MB at the start, {memory[len(memory) // 2]:.0f} half way, "
        f"{memory[-1]:.0f} at the end",
    ]
    if training:
        lines.append(
            f"training: {training['step']} steps, {training.get('turns_trained', 0):,} turns trained on, "
            f"{training['ready_turns']:,} ready, {training['to_judge']} to judge"
        )
    return lines
