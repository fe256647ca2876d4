"""All of it at once: two training processes, two engine servers, two workers; and a member of each kind is killed.

The servers are stand-ins that speak SGLang's protocol with the tiny student behind it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang_model
from distributed_cases import command
from tiny_runs import with_file

from turngym.core.trace import read_episodes
from turngym.scripts.train import resolved
from turngym.trainers.metrics import read_metrics
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run import run_training

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")]
STUDENT = command("opd", Path())[3]
NAMES = ("loss", "grad_norm", "tokens", "success", "valid_actions", "entropy")
AHEAD = (*NAMES, "staleness_mean", "staleness_max", "gap_mean", "importance/ratio")


@dataclass(slots=True)
class Server:
    """An engine server in a process of its own, which can be killed and started again."""

    process: subprocess.Popen[str]
    url: str

    @classmethod
    def start(cls, port: str = "") -> Server:
        words = [sys.executable, sglang_model.__file__, STUDENT, *([port] if port else [])]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        return cls(process, process.stdout.readline().removeprefix("ready: ").strip())

    def again(self) -> None:
        new = Server.start(self.url.rpartition(":")[2])
        assert new.url == self.url
        self.process = new.process

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    with ExitStack() as held:
        made = [Server.start() for _ in range(2)]
        for server in made:
            held.callback(server.kill)
        yield made


def words(out: Path, servers: Sequence[Server], steps: int, *more: str) -> list[str]:
    served = ["--policy-server", ",".join(server.url for server in servers)]
    served += with_file(out.parent, ["server_deadline = 60"])
    kept = ["--keep-rollouts", str(steps), "--checkpoint-every", "1"]
    return [*command("opd", out, steps=steps, episodes=6, turns=3), *served, *kept, *more]


@contextmanager
def torchrun(line: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Two training processes; they end with the context."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with log.open("ab") as file:
        process = subprocess.Popen([*start, "-m", "turngym", "train", *line], stdout=file, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in children(process.pid):
            os.kill(pid, signal.SIGKILL)


def children(parent: int, saying: str = "") -> list[int]:
    """Ids of the processes that `parent` started and whose command line has `saying` in it, oldest first."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            above = int(stat.read_text().rpartition(")")[2].split()[1])
            line = stat.with_name("cmdline").read_text()
        except OSError:  # it has ended
            continue
        if above == parent and saying in line:
            found.append(int(stat.parent.name))
    return sorted(found)


def after(step: int, out: Path, process: subprocess.Popen[bytes], act: Callable[[list[int]], None]) -> None:
    """Do `act`, which is told the training processes, as soon as `step` is in the metrics."""
    deadline = time.monotonic() + 300
    while not (out / "metrics.jsonl").exists() or f'"step": {step},' not in (out / "metrics.jsonl").read_text():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    act(children(process.pid))


def kill_a_worker(trainers: Sequence[int]) -> None:
    os.kill(children(trainers[1], "spawn_main")[0], signal.SIGKILL)


def rows(out: Path) -> list[dict[str, Any]]:
    return [row for row in read_metrics(out) if row["kind"] == "train"]


def played(out: Path, steps: int, processes: int) -> list[Any]:
    """Ids of the episodes of every step, in the order of their tasks and samples."""
    found = []
    for step in range(1, steps + 1):
        parts = [f"step_{step:06d}.jsonl"] if processes == 1 else [f"step_{step:06d}_process_{p}.jsonl" for p in (0, 1)]
        episodes = [episode for part in parts for episode in read_episodes(out / "rollouts" / part)]
        episodes.sort(key=lambda episode: (episode.task.task_id, episode.sample))
        found.append([[ids.tolist() for ids in episode.segments] for episode in episodes])
    return found


def same(ours: Sequence[Any], theirs: Sequence[Any], names: Sequence[str]) -> None:
    assert [row["step"] for row in ours] == [row["step"] for row in theirs]
    for name in names:
        assert [row[name] for row in ours] == pytest.approx([row[name] for row in theirs], rel=1e-3, abs=1e-4), name


def timed(found: Sequence[Any]) -> None:
    for phase in ("rollout", "teacher", "update"):
        assert all(row[f"time/{phase}_s"] > 0 for row in found), phase


def test_in_turn_the_numbers_are_those_of_one_process_and_a_killed_worker_changes_none(
    servers: list[Server], tmp_path: Path
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    run_training(resolved(words(one, servers, 3)).spec, SINGLE)
    with torchrun(words(two, servers, 3, "--workers", "1"), tmp_path / "log") as process:
        after(1, two, process, kill_a_worker)
        assert process.wait(300) == 0, (tmp_path / "log").read_text()[-4000:]
    assert played(two, 3, 2) == played(one, 3, 1)
    same(rows(two), rows(one), NAMES)
    assert [row["staleness_max"] for row in rows(two)] == [0, 0, 0]
    timed(rows(two))


def test_a_step_ahead_runs_go_on_after_a_server_and_a_training_process_were_killed(
    servers: list[Server], tmp_path: Path
) -> None:
    one, two, log = tmp_path / "one", tmp_path / "two", tmp_path / "log"
    run_training(resolved(words(one, servers, 6, "--staleness", "1")).spec, SINGLE)
    line = words(two, servers, 6, "--staleness", "1", "--workers", "1")
    with torchrun(line, log) as process:
        after(2, two, process, lambda trainers: servers[1].kill())
        assert process.wait(300) != 0
    # the transfer of new weights failed; every row that was written stands
    assert servers[1].url in log.read_text()
    assert 2 <= len(rows(two)) < 6
    servers[1].again()
    with torchrun([*line, "--resume"], log) as process:
        after(4, two, process, lambda trainers: os.kill(trainers[1], signal.SIGKILL))
        assert process.wait(300) != 0
    assert 4 <= len(rows(two)) < 6
    with torchrun([*line, "--resume"], log) as process:
        assert process.wait(300) == 0, log.read_text()[-4000:]
    assert played(two, 6, 2) == played(one, 6, 1)
    same(rows(two), rows(one), AHEAD)
    assert [row["staleness_max"] for row in rows(two)] == [0, 1, 1, 1, 1, 1]
    assert all(row["gap_mean"] > 1e-6 for row in rows(two)[1:])
    timed(rows(two))
