"""Clients that talk to a proxy at the same time, and whether its records hold what they were answered."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.envs.core.errors import TurngymError

STUDENT = CHECKPOINTS / "alfworld" / "student"
WORD = re.compile(r"client [0-9]+ session [0-9]+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What is served, and what clients do with it."""

    student: Path = STUDENT
    """Folder of the model."""
    sessions: int = 64
    """Clients that talk at the same time."""
    turns: int = 6
    """Turns of a session."""
    seconds: float = 60.0
    """How long clients begin new sessions."""
    think: float = 0.0
    """Seconds that a client waits between two turns."""
    out: Path | None = None
    """Folder of the run; a temporary one by default."""


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    answers: dict[str, list[str]] = field(default_factory=dict)
    """Session id -> the answers it got, in order."""
    seconds: list[float] = field(default_factory=list)
    refused: Counter[int] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


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


def talk(load: Load, url: str, pid: int, tally: Tally) -> tuple[list[float], dict[str, Any], float]:
    """(server's memory in MB over time, /healthz while clients are busy, seconds)."""
    import httpx

    began = time.perf_counter()
    http = httpx.Client(base_url=url, timeout=300, limits=httpx.Limits(max_connections=None))
    clients = [
        threading.Thread(target=_client, args=(load, http, number, began + load.seconds, tally))
        for number in range(load.sessions)
    ]
    for client in clients:
        client.start()
    memory: list[float] = []
    health: dict[str, Any] = {}
    while any(client.is_alive() for client in clients):
        time.sleep(min(2.0, load.seconds / 20))
        memory.append(megabytes(pid))
        if time.perf_counter() < began + load.seconds:
            health = http.get(url.removesuffix("/v1") + "/healthz").json()
    spent = time.perf_counter() - began
    http.close()
    return memory, health, spent


def _client(load: Load, http: Any, number: int, until: float, tally: Tally) -> None:
    session = 0
    while time.perf_counter() < until and not tally.errors:
        name = f"client {number} session {session}"
        messages = [{"role": "system", "content": "You are in a house."}]
        for turn in range(load.turns):
            time.sleep(load.think)
            messages.append({"role": "user", "content": f"{name} turn {turn}"})
            headers = {"X-Session-Id": name, "X-Session-Done": "1" if turn == load.turns - 1 else "0"}
            reply = _ask(http, messages, headers, tally)
            if reply is None:
                return
            messages.append(reply)
            with tally.lock:
                tally.answers.setdefault(name, []).append(reply["content"])
        session += 1


def _ask(http: Any, messages: list[Any], headers: dict[str, str], tally: Tally) -> Any:
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
                tally.errors.append(answer.text[:300])
                return None
        time.sleep(float(answer.headers.get("Retry-After", 1)))
    with tally.lock:
        tally.seconds.append(time.perf_counter() - began)
    return answer.json()["choices"][0]["message"]


def check(out: Path, tally: Tally) -> list[str]:
    """What is wrong with the records, given what the clients saw."""
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


def megabytes(pid: int) -> float:
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
