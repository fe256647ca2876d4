"""Does serving go on while the policy learns? Seconds per turn without training and during long updates.

Examples:
    turngym bench live
    turngym bench live --update 10 --seconds 60 --serve-from student
    turngym bench live --engine sglang --policy-server http://127.0.0.1:30000

The proxy is started twice in a process of its own, over the tiny model: first it only serves and records, then it also
trains, and every update takes `--update` seconds, in which its process computes with torch, computes in Python, and
sleeps. The same clients talk to both. Afterwards the records are read as `turngym bench proxy` reads them: no turn may
be lost, no session crossed, and no session may go back to older weights. `--engine sglang` without a server starts the
stand-in of the tests (of a checkout), and says so.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from turngym.agents.worlds.world import CHECKPOINTS
from turngym.envs.core import TurngymError
from turngym.scripts.bench.proxy import BenchProxy, Tally, check, load

STUDENT = CHECKPOINTS / "alfworld" / "student"
STAND_IN = Path(__file__).resolve().parents[2] / "tests" / "support" / "sglang_model.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLive:
    """The load, and how long updates take."""

    student: Path = STUDENT
    """Folder of the model."""
    sessions: int = 8
    """Clients that talk at the same time."""
    turns: int = 6
    """Turns of a session."""
    think: float = 0.5
    """Seconds that a client waits between two turns."""
    seconds: float = 75.0
    """How long clients begin new sessions, each time."""
    update: float = 30.0
    """Seconds that an update takes at least."""
    engine: Literal["local", "sglang"] = "local"
    """Who draws: this package's engine, or SGLang servers."""
    policy_server: str = ""
    """sglang: address of a server that has the student; without one a stand-in is started."""
    serve_from: Literal["auto", "process", "copy", "student"] = "auto"
    """As for `turngym serve proxy`."""
    out: Path | None = None
    """Folder of both runs; a temporary one by default."""

    def load(self) -> BenchProxy:
        """What the clients do."""
        return BenchProxy(
            student=self.student, sessions=self.sessions, turns=self.turns, seconds=self.seconds, think=self.think
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One of the two runs."""

    name: str
    seconds: list[float]
    """Of each turn, sorted."""
    sessions: int
    refused: int
    problems: list[str]
    health: dict[str, Any]

    def at(self, share: float) -> float:
        """Seconds within which this share of the turns was answered."""
        return self.seconds[int(share * (len(self.seconds) - 1))] if self.seconds else float("nan")


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(BenchLive, args=list(argv), prog="turngym bench live", description=__doc__)
    if config.out is not None:
        return bench(config, config.out)
    with tempfile.TemporaryDirectory() as folder:
        return bench(config, Path(folder))


def bench(config: BenchLive, out: Path) -> int:
    """Both runs, and their figures; 0 if nothing was lost or crossed."""
    with _servers(config) as server:
        runs = [_run(config, out / name, name, server) for name in ("served", "trained")]
    for line in report(config, *runs):
        print(line)
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    print("\n".join(f"PROBLEM: {one}" for one in problems) or "no lost turn, no crossed session, no older weights")
    return 1 if problems else 0


def report(config: BenchLive, plain: Measured, trained: Measured) -> list[str]:
    """Both runs side by side."""
    lines = [f"{config.sessions} clients, {config.turns} turns each, {config.think:g} s between turns"]
    for run in (plain, trained):
        lines.append(
            f"{run.name:8} {len(run.seconds):6,} turns of {run.sessions:,} sessions, {run.refused} refusals; seconds "
            f"per turn: median {run.at(0.5):.3f}, 99 % {run.at(0.99):.3f}, worst {run.at(1.0):.3f}"
        )
    training, serving = trained.health.get("training", {}), trained.health.get("serving", {})
    lines.append(
        f"trained  {training.get('step', 0)} updates of {config.update:g} s while clients talked, served from "
        f"{serving.get('from')}, longest pause {serving.get('longest_pause_s', 0.0):.3f} s, "
        f"{trained.health.get('engine', {}).get('broken_off', 0)} answers continued by newer weights"
    )
    ratios = [trained.at(share) / plain.at(share) for share in (0.5, 0.99)]
    lines.append(f"with training / without: median {ratios[0]:.2f}x, 99 % {ratios[1]:.2f}x")
    return lines


def older_weights(out: Path) -> list[str]:
    """Sessions in which a turn has older weights than the turn before it."""
    newest: dict[str, int] = {}
    problems = []
    for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] != "turn":
            continue
        spans = record.get("version_spans") or [(record["version"], 0, 0)]
        versions = [newest.get(record["session"], 0), *(span[0] for span in spans)]
        if versions != sorted(versions):
            problems.append(f"session {record['session']} went back in versions: {versions}")
        newest[record["session"]] = versions[-1]
    return problems[:5]


def _run(config: BenchLive, out: Path, name: str, server: str) -> Measured:
    command = [sys.executable, "-m", "turngym.scripts.bench.live_server", str(config.update)]
    command += ["--student", str(config.student), "--out", str(out), "--port", "0", "--threads", "1"]
    command += ["--run.no-tensorboard", "--optimizer.lr", "1e-5", "--batch-turns", "8"]
    command += ["--policy-server", server] if server else []
    command += ["--serve-from", config.serve_from] if name == "trained" else ["--no-train"]
    process, url = started(command)
    tally = Tally()
    try:
        _, health, _ = load(config.load(), url, process.pid, tally)
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=300 + config.update)[0]
    problems = [*tally.errors[:5], *check(out, tally), *older_weights(out)]
    if "everything accepted was answered" not in said:
        problems.append(f"the server did not end cleanly: {said[-500:]!r}")
    return Measured(
        name=name,
        seconds=sorted(tally.seconds),
        sessions=len(tally.answers),
        refused=sum(tally.refused.values()),
        problems=problems,
        health=health,
    )


def started(command: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and the address in its first line. Raises TurngymError where it says none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"http://[^\s,]+", line)
    if found is None:
        process.kill()
        raise TurngymError(f"the server did not start: {line!r}")
    return process, found.group()


@contextmanager
def _servers(config: BenchLive) -> Iterator[str]:
    """The address of the SGLang server; "" where the local engine draws."""
    if config.engine == "local":
        yield ""
    elif config.policy_server:
        print(f"SGLang server: {config.policy_server}")
        yield config.policy_server
    elif not STAND_IN.exists():
        raise TurngymError("--engine sglang needs --policy-server; the stand-in is in a checkout's tests only")
    else:
        process, url = started([sys.executable, str(STAND_IN), str(config.student)])
        print(f"SGLang server: the stand-in of the tests ({STAND_IN.name}), not SGLang itself")
        try:
            yield url
        finally:
            process.communicate(timeout=30)
