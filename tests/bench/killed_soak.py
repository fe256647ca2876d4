"""Kills a trainer, a server and the client that plays through it at random moments, while all three work.

Whatever is killed is started again with the same command. In the end the training run and the evaluation must be equal
to those of a trainer and a client that nobody killed, and the server's records must be whole.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from killed_work import Done, Started
from tally import Tally

from turngym.agents import load_world
from turngym.agents.proxy.turn_records import RecordProblem, iter_records
from turngym.envs.core.trace import read_trace
from turngym.trainers.checkpoint import list_checkpoints
from turngym.trainers.metrics import iter_metrics

STEPS = 6
WORKERS = ("training", "client")
BAD_AFTER_SOAK = ("differs", "cannot go on", "damaged")
KILLS_A_ROUND = 8
"""About so many kills fall into one run of trainer and client; then both begin anew in an empty folder."""


def soak(folder: Path, kills: int, seed: int) -> Iterator[Tally]:
    """Yields the tally of rounds with `kills` kills in all: each round's training, evaluation and records."""
    rng, tally = np.random.default_rng([seed, 77]), Tally(what="kill -9 while all work", bad=BAD_AFTER_SOAK)
    wanted, calm, seconds = run_round(folder / "calm", 0, 0.0, rng)
    wrong = [f"{name} without kills: {done.stderr[-300:]}" for name, done in wanted.items() if done.returncode]
    for note in wrong:
        tally.count("cannot go on", note)
    number = 0
    while kills and not wrong:
        place, now = folder / f"round_{number}", min(kills, KILLS_A_ROUND)
        ended, found, _ = run_round(place, now, seconds / KILLS_A_ROUND, rng)
        for name in WORKERS:
            if ended[name].returncode:
                tally.count("cannot go on", f"round {number}, {name}: {ended[name].stderr[-300:]}")
            elif found[name] != calm[name]:
                tally.count("differs", f"round {number}, {name}: {difference(calm[name], found[name])}")
            else:
                tally.count(f"{name} equal")
        tally.count("records whole" if found["server"] == [] else "damaged", f"round {number}: {found['server']}")
        tally.count("killed", times=now)
        kills, number = kills - now, number + 1
        shutil.rmtree(place)
    yield tally


def run_round(
    place: Path, kills: int, pause: float, rng: np.random.Generator
) -> tuple[dict[str, Done], dict[str, Any], float]:
    """Trains and evaluates once, with `kills` kills `pause` seconds apart on average.

    Returns how trainer and client ended, what came out, and the seconds that it took.
    """
    place.mkdir(parents=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    argv = {"training": train_argv(place / "run"), "client": client_argv(place / "eval", port)}
    argv["server"] = server_argv(place / "server", port)
    began, running = time.monotonic(), {name: Started(words) for name, words in argv.items()}
    ended: dict[str, Done] = {}
    due = began + rng.exponential(pause)
    while len(ended) < len(WORKERS):
        time.sleep(0.02)
        for name in [name for name in WORKERS if name not in ended and running[name].over()]:
            ended[name] = running[name].end()
        if kills and time.monotonic() >= due:
            # a worker that has ended is started again: it must find that all is done
            victim = str(rng.choice(sorted(running)))
            running[victim].kill()
            ended.pop(victim, None)
            running[victim] = Started(again(argv[victim]) if victim == "training" else argv[victim])
            kills, due = kills - 1, time.monotonic() + rng.exponential(pause)
    running["server"].kill()
    return ended, outcome(place), time.monotonic() - began


def again(argv: list[str]) -> list[str]:
    """What goes on with a training run that was killed; before its first checkpoint, as it says, begins it anew."""
    out = Path(argv[argv.index("--out") + 1])
    if list_checkpoints(out):
        return [*argv, "--resume"]
    shutil.rmtree(out, ignore_errors=True)
    return argv


def outcome(place: Path) -> dict[str, Any]:
    """What trainer, client and server leave behind, without times."""
    run = place / "run"
    weights = run / "checkpoints" / f"step_{STEPS:06d}" / "model" / "model.safetensors"
    learned: list[Any] = []
    if weights.exists():
        losses = {row["step"]: row["loss"] for row in iter_metrics(run) if row["kind"] == "train"}
        learned = [sorted(losses.items()), hashlib.sha256(weights.read_bytes()).hexdigest()]
    trace = place / "eval" / "trace.jsonl"
    episodes = {
        one.task.task_id: (one.success, [turn.response for turn in one.turns], one.status.value)
        for one in read_trace(trace)[0]
    }
    problems = [str(one) for one in iter_records(place / "server") if isinstance(one, RecordProblem)]
    return {
        "training": learned,
        "client": sorted(episodes.items()),
        "server": problems,
    }


def difference(wanted: Any, found: Any) -> str:
    """The first place in which two outcomes differ."""
    pairs = zip(json.dumps(wanted), json.dumps(found), strict=False)
    at = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
    return f"{json.dumps(wanted)[at : at + 80]} is {json.dumps(found)[at : at + 80]}"


def train_argv(out: Path) -> list[str]:
    world = load_world("alfworld")
    argv = [
        "train",
        "opd",
        "--student",
        str(world.checkpoint("student")),
        "--teacher",
        str(world.checkpoint("teacher")),
    ]
    argv += [
        "--out",
        str(out),
        "--steps",
        str(STEPS),
        "--episodes",
        "4",
        "--checkpoint-every",
        "1",
        "--eval-every",
        "0",
    ]
    argv += ["--env-kwargs", '{"config": "small"}', "--max-turns", "8", "--optimizer.lr", "1e-3", "--threads", "1"]
    return [*argv, "--no-tensorboard"]


def server_argv(out: Path, port: int) -> list[str]:
    argv = ["serve", "proxy", "--student", str(load_world("alfworld").checkpoint("student")), "--out", str(out)]
    return [*argv, "--no-train", "--port", str(port), "--threads", "1", "--proxy.name", "tiny"]


def client_argv(out: Path, port: int) -> list[str]:
    argv = ["eval", "--panel", "alfworld-quickstart", "--agent", "openai:tiny", "--limit", "12", "--samples", "1"]
    argv += [
        "--system",
        "You are in a house. Do the task.",
        "--base-url",
        f"http://127.0.0.1:{port}/v1",
        "--temperature",
        "0",
        "--max-turns",
        "10",
        "--slots",
        "1",
    ]
    # a killed server is away for as long as it takes to start
    return [*argv, "--request-retries", "1000", "--channel", "text", "--max-new-tokens", "12", "--out", str(out)]
