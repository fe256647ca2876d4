"""Does serving go on while the policy learns? Seconds per turn without training and during long updates.

Examples:
    turngym bench live
    turngym bench live --update 10 --seconds 60 --rounds 3 --serve-from student
    turngym bench live --engine sglang --policy-server http://127.0.0.1:30000

The proxy is started in a process of its own over the tiny model: in each of `--rounds` once so that it does not learn,
then once so that it does, and every update takes `--update` seconds, in which its process computes with torch, computes
in Python, and sleeps. The same clients talk to both. Afterwards the records are read as `turngym bench proxy` reads
them: no turn may be lost, no session crossed, and no session may go back to older weights. `--engine sglang` without a
server starts the stand-in of the tests (of a checkout), and says so.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from turngym.envs.core.errors import TurngymError
from turngym.scripts.bench.served.clients import Load, Tally, check, started, talk

STAND_IN = Path(__file__).resolve().parents[3] / "tests" / "support" / "sglang_model.py"
NEVER = 1_000_000_000
"""Turns that no step ever gets together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchLive:
    """The load, and how long updates take."""

    load: Annotated[Load, tyro.conf.arg(name="")] = field(
        default_factory=lambda: Load(sessions=8, think=0.5, seconds=75.0)
    )
    rounds: int = 1
    """How often each of the two is run, in turn: what else the machine does then weighs on both."""
    update: float = 30.0
    """Seconds that an update takes at least."""
    engine: Literal["local", "sglang"] = "local"
    """Who draws: this package's engine, or SGLang servers."""
    policy_server: str = ""
    """sglang: address of a server that has the student; without one a stand-in is started."""
    serve_from: Literal["auto", "process", "copy", "student"] = "auto"
    """As for `turngym serve proxy`."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.update < 0:
            raise TurngymError(
                f"--rounds is {self.rounds} and --update {self.update}; valid: at least 1, at least 0 seconds"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run, or all of a kind together."""

    name: str
    seconds: list[float]
    """Of each turn, sorted."""
    sessions: int
    refused: int
    problems: list[str]
    health: list[dict[str, Any]]
    """Of each run, as it was when clients still talked."""

    def at(self, share: float) -> float:
        """Seconds within which this share of the turns was answered."""
        return self.seconds[int(share * (len(self.seconds) - 1))] if self.seconds else float("nan")

    def numbers(self, table: str, name: str) -> list[float]:
        """One number of each run's health."""
        return [found.get(table, {}).get(name, 0) for found in self.health]


def main(argv: Sequence[str]) -> int:
    config = tyro.cli(BenchLive, args=list(argv), prog="turngym bench live", description=__doc__)
    if config.load.out is not None:
        return bench(config, config.load.out)
    with tempfile.TemporaryDirectory() as folder:
        return bench(config, Path(folder))


def bench(config: BenchLive, out: Path) -> int:
    """All runs, and their figures; 0 if nothing was lost or crossed."""
    runs: list[Measured] = []
    with _servers(config) as server:
        for number in range(config.rounds):
            for name in ("served", "trained"):
                runs.append(_run(config, out / f"{name}-{number}", name, server))
                if config.rounds > 1:
                    print(line_of(runs[-1]), flush=True)
    for line in report(config, pooled(runs, "served"), pooled(runs, "trained")):
        print(line)
    problems = [f"{run.name}: {problem}" for run in runs for problem in run.problems]
    print("\n".join(f"PROBLEM: {one}" for one in problems) or "no lost turn, no crossed session, no older weights")
    return 1 if problems else 0


def pooled(runs: Sequence[Measured], name: str) -> Measured:
    """The runs called `name` as one."""
    own = [run for run in runs if run.name == name]
    return Measured(
        name=name,
        seconds=sorted(second for run in own for second in run.seconds),
        sessions=sum(run.sessions for run in own),
        refused=sum(run.refused for run in own),
        problems=[problem for run in own for problem in run.problems],
        health=[found for run in own for found in run.health],
    )


def line_of(run: Measured) -> str:
    """Its figures."""
    return (
        f"{run.name:8} {len(run.seconds):6,} turns of {run.sessions:,} sessions, {run.refused} refusals; seconds "
        f"per turn: median {run.at(0.5):.3f}, 99 % {run.at(0.99):.3f}, worst {run.at(1.0):.3f}"
    )


def report(config: BenchLive, plain: Measured, trained: Measured) -> list[str]:
    """Both kinds of runs side by side."""
    load = config.load
    lines = [f"{load.sessions} clients, {load.turns} turns each, {load.think:g} s between turns"]
    lines += [line_of(plain), line_of(trained)]
    kinds = {found.get("serving", {}).get("from") for found in trained.health}
    lines.append(
        f"trained  {sum(trained.numbers('training', 'step'))} updates of {config.update:g} s while clients talked, "
        f"served from {', '.join(map(str, kinds))}, longest pause "
        f"{max(trained.numbers('serving', 'longest_pause_s'), default=0.0):.3f} s, "
        f"{sum(trained.numbers('engine', 'broken_off'))} answers continued by newer weights"
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
    command = [sys.executable, "-m", "turngym.scripts.bench.served.live_server", str(config.update)]
    command += ["--student", str(config.load.student), "--out", str(out), "--port", "0", "--threads", "1"]
    command += ["--run.no-tensorboard", "--optimizer.lr", "1e-5"]
    command += ["--policy-server", server] if server else []
    if name == "trained":
        command += ["--serve-from", config.serve_from, "--batch-turns", "8"]
    else:
        # a server that has had another run's weights may not be served from without its own
        command += ["--batch-turns", str(NEVER)] if server else ["--no-train"]
    process, url = started(command)
    tally = Tally()
    try:
        _, health, _ = talk(config.load, url, process.pid, tally)
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
        health=[health],
    )


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
        process, url = started([sys.executable, str(STAND_IN), str(config.load.student)])
        print(f"SGLang server: the stand-in of the tests ({STAND_IN.name}), not SGLang itself")
        try:
            yield url
        finally:
            process.communicate(timeout=30)
