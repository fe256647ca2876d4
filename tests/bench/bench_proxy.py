"""Loads the training proxy with many clients at once: lost turns, crossed sessions, leaks, turns per second.

A server in a process of its own serves the tiny model and trains on what comes. `--sessions` clients talk to it at a
time, each with an id of its own in every message, and begin a new session when one is done. Afterwards the records are
read: every turn that a client was answered must be there once, in its own session, with only its own id in its
messages. The exit status is 1 if a turn was lost, sessions were mixed up, the server's memory grew or it did not end
cleanly.

Examples:
    python tests/bench/bench_proxy.py
    python tests/bench/bench_proxy.py --sessions 64 --seconds 120 --no-train
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench_server import Server

from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.numbers import Count, Million, Positive
from turngym.core.redaction import excerpt
from turngym.core.spec import Spec
from turngym.scripts.options import read_options

# --- Clients, and what the records must hold

STUDENT = CHECKPOINTS / "alfworld" / "student"
WORD = re.compile(r"client [0-9]+ session [0-9]+\b")


class BenchProxy(Spec):
    """The model that is served, and what clients do."""

    student: Path = STUDENT
    """Folder of the model."""
    sessions: Million = 64
    """Clients that talk at the same time."""
    turns: Count = 6
    """Turns of a session."""
    seconds: Positive = 60.0
    """How long clients begin new sessions."""
    think: float = 0.0
    """Seconds that a client waits before each turn."""
    out: Path | None = None
    """Folder of the run; a temporary one by default."""
    train: bool = True
    """Train while clients talk."""


@dataclass(slots=True)
class Tally:
    """What the clients received."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, list[str]] = field(default_factory=dict)
    """Session id -> the answers it got, in order."""
    seconds: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


def talk(config: BenchProxy, server: Server, tally: Tally) -> tuple[list[float], dict[str, Any], float]:
    """Runs all clients. Returns (server's memory in MB over time, last /healthz while clients were busy, seconds)."""
    import httpx

    began = time.perf_counter()
    http = httpx.Client(base_url=server.url, timeout=300, limits=httpx.Limits(max_connections=None))
    clients = [
        threading.Thread(target=_client, args=(config, http, number, began + config.seconds, tally))
        for number in range(config.sessions)
    ]
    for client in clients:
        client.start()
    memory: list[float] = []
    health: dict[str, Any] = {}
    while any(client.is_alive() for client in clients):
        time.sleep(min(2.0, config.seconds / 20))
        memory.append(server.megabytes)
        if time.perf_counter() < began + config.seconds:
            health = http.get(server.url.removesuffix("/v1") + "/healthz").json()
    spent = time.perf_counter() - began
    http.close()
    return memory, health, spent


def _client(config: BenchProxy, http: Any, number: int, until: float, tally: Tally) -> None:
    session = 0
    while time.perf_counter() < until and not tally.errors:
        name = f"client {number} session {session}"
        messages = [{"role": "system", "content": "You are in a house."}]
        for turn in range(config.turns):
            time.sleep(config.think)
            messages.append({"role": "user", "content": f"{name} turn {turn}"})
            headers = {"X-Session-Id": name, "X-Session-Done": "1" if turn == config.turns - 1 else "0"}
            reply = _post_turn(http, messages, headers, tally)
            if reply is None:
                return
            messages.append(reply)
            with tally.lock:
                tally.answers.setdefault(name, []).append(reply["content"])
        session += 1


def _post_turn(http: Any, messages: list[Any], headers: dict[str, str], tally: Tally) -> Any:
    began = time.perf_counter()
    while True:
        try:
            answer = http.post("/chat/completions", json={"messages": messages}, headers=headers)
        except Exception as error:
            with tally.lock:
                tally.errors.append(f"{type(error).__name__}: {error}")
            return None
        if answer.status_code == 200:
            break
        with tally.lock:
            tally.refused[answer.status_code] += 1
            if answer.status_code not in (429, 503):
                tally.errors.append(excerpt(answer.text, 300))
                return None
        time.sleep(float(answer.headers.get("Retry-After", 1)))
    with tally.lock:
        tally.seconds.append(time.perf_counter() - began)
    return answer.json()["choices"][0]["message"]


def check(out: Path, tally: Tally) -> list[str]:
    """Compares the records with what the clients received and returns the first ten problems."""
    found: dict[str, list[str]] = {}
    owners: dict[str, str] = {}
    problems = []
    for line in (out / "records.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if record["kind"] != "turn":
            continue
        names = set(WORD.findall(json.dumps(record["messages"])))
        name = owners.setdefault(record["session"], next(iter(names), "nobody"))
        if names != {name}:
            problems.append(f"session {record['session']} of {name} holds {sorted(names)}")
        found.setdefault(name, []).append(record["reply"]["content"])
    if len(set(owners.values())) != len(owners):
        problems.append(f"{len(owners)} sessions in the records have {len(set(owners.values()))} owners")
    for name, answers in tally.answers.items():
        if found.get(name) != answers:
            problems.append(f"{name}: {len(answers)} answers, {len(found.get(name, []))} records, or other texts")
    return problems[:10]


# --- The command


def main(argv: Sequence[str]) -> int:
    config = read_options(BenchProxy, argv, prog="bench_proxy.py", about=__doc__)
    if config.out is not None:
        return run_load(config, config.out)
    with tempfile.TemporaryDirectory() as folder:
        return run_load(config, Path(folder))


def run_load(config: BenchProxy, out: Path) -> int:
    """Runs the load and checks the records. Returns 0 if nothing was lost, mixed up or leaked."""
    command = ["-m", "turngym.scripts", "serve", "proxy", "--student", str(config.student), "--out", str(out)]
    command += ["--port", "0", "--threads", "1", "--run.no-tensorboard", "--optimizer.lr", "1e-5"]
    command += ["--batch-turns", "64"] if config.train else ["--no-train"]
    server, tally = Server(command), Tally()
    try:
        memory, health, spent = talk(config, server, tally)
    finally:
        said = server.end()
    problems = [*tally.errors[:5], *check(out, tally)]
    if "everything accepted was answered" not in said:
        problems.append(f"the server did not end cleanly: {excerpt(said, 500, end=True)!r}")
    if memory and memory[-1] > 1.15 * memory[len(memory) // 2] + 20:
        problems.append(f"memory grew in the second half: {memory[len(memory) // 2]:.0f} to {memory[-1]:.0f} MB")
    for line in _report(config, tally, memory, health, spent):
        print(line)
    print("\n".join(f"PROBLEM: {problem}" for problem in problems) or "no lost turn, no crossed session, no leak")
    return 1 if problems else 0


def _report(config: BenchProxy, tally: Tally, memory: list[float], health: dict[str, Any], spent: float) -> list[str]:
    times = sorted(tally.seconds) or [0.0]
    engine, training = health.get("engine", {}), health.get("training", {})
    lines = [
        f"{config.sessions} clients, {spent:.0f} s: {len(tally.answers):,} sessions, {len(times):,} turns, "
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
