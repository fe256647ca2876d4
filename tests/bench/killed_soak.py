"""Kills a trainer, a server and the client that plays through it at random moments, while all three work.

Whatever is killed is started again with the same command. In the end the training run and the evaluation must be equal
to those of a trainer and a client that nobody killed, and the server's records must be whole.

A proxy that trains on what its client plays is killed in the same way (`learning_soak`). No two of its runs are equal,
because time decides which turns a step gets. What must hold nevertheless, `broken_promises` looks for.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from killed_work import Done, Started
from tally import Tally

from turngym.agents import load_world
from turngym.agents.models import load_tokenizer
from turngym.agents.proxy.restored_sessions import restore
from turngym.agents.proxy.session_tokens import ChatListRenderer
from turngym.agents.proxy.turn_records import iter_records
from turngym.agents.servers.weights import free_port
from turngym.core.trace import TraceProblem, read_trace
from turngym.trainers.checkpoint import list_checkpoints, read_state
from turngym.trainers.metrics import iter_metrics

STEPS = 6
WORKERS = ("training", "client")
"""Who comes to an end by itself; servers are stopped then."""
BAD_AFTER_SOAK = ("differs", "cannot go on", "damaged")
KILLS_A_ROUND = 8
"""About so many kills fall into one run of trainer and client; then both begin anew in an empty folder."""
EPISODES = 12
BATCH_TURNS = 8
"""Turns that a step of the learning proxy waits for."""
NO_SERVER = "Is the server running"
"""Said by a client that ends because no server was there when it began: it is started again, as its user would."""
STOPPED = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""How a server ends that is asked to while it still starts, after a kill at the end of a round."""
PATIENCE = 600.0
"""Seconds that a server gets to settle, and to end."""


def soak(folder: Path, kills: int, seed: int) -> Iterator[Tally]:
    """Yields the tally of rounds with `kills` kills in all: each round's training, evaluation and records."""
    rng, tally = np.random.default_rng([seed, 77]), Tally(what="kill -9 while all work", bad=BAD_AFTER_SOAK)
    calm, pause = dict[str, Any](), 0.0
    for number, now in enumerate(rounds(kills)):
        place, port = folder / f"round_{number}", free_port("127.0.0.1")
        argv = {"training": train_argv(place / "run"), "client": client_argv(place / "eval", port)}
        argv["server"] = server_argv(place / "server", port)
        ended, seconds = run_round(argv, now, pause, rng)
        found, pause = outcome(place), pause or seconds / KILLS_A_ROUND
        calm = calm or found
        for name, done in ended.items():
            if done.returncode:
                tally.count("cannot go on", f"round {number}, {name}: {done.stderr[-300:]}")
            elif name in WORKERS and number:
                same = found[name] == calm[name]
                note = f"round {number}, {name}: {difference(calm[name], found[name])}"
                tally.count(f"{name} equal" if same else "differs", note)
        tally.count("records whole" if found["server"] == [] else "damaged", f"round {number}: {found['server']}")
        tally.count("killed", times=now)
        shutil.rmtree(place)
    yield tally


def learning_soak(folder: Path, kills: int, seed: int) -> Iterator[Tally]:
    """Yields the tally of rounds with `kills` kills in all of a proxy that learns and of its client."""
    rng, tally = np.random.default_rng([seed, 78]), Tally(what="kill -9 while a proxy learns", bad=("broken",))
    pause = 0.0
    for number, now in enumerate(rounds(kills)):
        place = folder / f"learning_{number}"
        broken, seconds = learning_round(place, now, pause, rng)
        pause = pause or seconds / KILLS_A_ROUND
        tally.count("broken" if broken else "held", f"round {number}: {'; '.join(broken)}")
        tally.count("killed", times=now)
        shutil.rmtree(place)
    yield tally


def learning_round(place: Path, kills: int, pause: float, rng: np.random.Generator) -> tuple[list[str], float]:
    """Lets a client play through a proxy that learns. Returns what was broken, and the seconds that the client took."""
    port = free_port("127.0.0.1")
    argv = {"client": client_argv(place / "eval", port, temperature="1.0")}
    argv["server"] = learning_argv(place / "server", port)
    ended, seconds = run_round(argv, kills, pause, rng, settled=lambda: has_settled(port))
    broken = [f"{name}: {done.stderr[-300:]}" for name, done in ended.items() if done.returncode]
    return broken or broken_promises(place), seconds


def rounds(kills: int) -> list[int]:
    """The kills of each round; the first is calm and says how long one takes."""
    return [0, *(min(KILLS_A_ROUND, kills - before) for before in range(0, kills, KILLS_A_ROUND))]


def run_round(
    argv: dict[str, list[str]],
    kills: int,
    pause: float,
    rng: np.random.Generator,
    settled: Callable[[], bool] = lambda: True,
) -> tuple[dict[str, Done], float]:
    """Starts the commands of `argv`, and kills one of them `kills` times, `pause` seconds apart on average.

    When all workers have ended and the server has `settled`, it is asked to end; a server that ends by itself ends the
    round. Returns how each one ended, and the seconds that the workers took.
    """
    began, running = time.monotonic(), {name: Started(words) for name, words in argv.items()}
    ended: dict[str, Done] = {}
    due = began + rng.exponential(pause)
    workers = set(WORKERS) & argv.keys()
    while not workers <= ended.keys() and "server" not in ended:
        time.sleep(0.02)
        for name in [name for name in running if name not in ended and running[name].over()]:
            ended[name] = running[name].end()
            if NO_SERVER in ended[name].stderr:
                running[name] = Started(argv[name])
                del ended[name]
        if kills and time.monotonic() >= due:
            # a worker that has ended is started again: it must find that all is done
            victim = str(rng.choice(sorted(running)))
            running[victim].kill()
            ended.pop(victim, None)
            running[victim] = Started(again(argv[victim]) if victim == "training" else argv[victim])
            kills, due = kills - 1, time.monotonic() + rng.exponential(pause)
    seconds, end = time.monotonic() - began, time.monotonic() + PATIENCE
    while not running["server"].over() and not settled() and time.monotonic() < end:
        time.sleep(0.2)
    for name in running.keys() - ended.keys():
        done = running[name].terminate(PATIENCE)
        ended[name] = Done(0, done.stderr) if done.returncode in STOPPED else done
    return ended, seconds


def has_settled(port: int) -> bool:
    """Whether all sessions have ended and been judged, and those that wait for a step are too few for one."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=60) as answer:
            health = json.load(answer)
    except OSError:
        return False
    training = health["training"]
    # a step that is under way took its sessions before its number is shown
    waits = health["sessions"]["open"] + training["to_judge"] + training["sessions_to_judge"]
    return bool(waits == 0 and training["ready_turns"] < BATCH_TURNS)


def broken_promises(place: Path) -> list[str]:
    """What does not hold of a proxy that learned, and of its client."""
    server, client = place / "server", place / "eval" / "trace.jsonl"
    broken, texts = list[str](), Counter[str]()
    turns, used, step = Counter[str](), dict[str, int](), 0
    for one in iter_records(server):
        if isinstance(one, TraceProblem):
            broken.append(str(one))
        elif one["kind"] == "turn" and one["main"]:
            turns[one["session"]] += 1
            texts[one["text"]] += 1
        elif one["kind"] == "resumed":
            # what steps after the checkpoint used is to be used again
            step, used = one["step"], {key: at for key, at in used.items() if at <= one["step"]}
        elif one["kind"] in ("trained", "unused"):
            again = [key for key in one["sessions"] if key in used]
            broken += [f"session {key} is used at steps {used[key]} and {one['step']}" for key in again]
            used |= dict.fromkeys(one["sessions"], one["step"])
            if one["kind"] == "trained" and one["step"] != step + 1:
                broken.append(f"step {one['step']} follows step {step}")
            step = one["step"] or step
    # what the next start of the server would go on with, and train on
    renderer = ChatListRenderer(load_tokenizer(load_world("alfworld").checkpoint("student")))
    left = restore(server, renderer, want_ended=True)
    waiting = {episode.task.task_id for episode in left.ended} | {one.key for one in left.open if one.turns}
    if wrong := (turns.keys() - used.keys()) ^ waiting:
        broken.append(f"{len(turns)} sessions, {len(used)} are used, {len(waiting)} wait; wrong: {sorted(wrong)}")
    # what it learned: a checkpoint that can be loaded, and metrics without a gap or a step told twice
    saved = [read_state(one)["step"] for one in list_checkpoints(server)[-1:]]
    told = [row["step"] for row in iter_metrics(server) if row["kind"] == "train"]
    if not step or saved != [step] or told != list(range(1, step + 1)):
        broken.append(f"{step} steps in the records, {saved} saved, {told} in the metrics")
    verified = Started(["model", "verify", str(server)]).end(PATIENCE)
    broken += [verified.stderr[-300:]] * bool(verified.returncode)
    # what was promised to its client: every answer that it got is in the records
    episodes, problems = read_trace(client)
    lost = Counter(turn.response for one in episodes for turn in one.turns) - texts
    failed = [one.status.value for one in episodes if one.status.is_error]
    if lost or failed or problems or len({one.task.task_id for one in episodes}) != EPISODES:
        broken.append(f"{len(episodes)} episodes, {failed} failed, {problems}; not in the records: {dict(lost)}")
    judged = Counter(one.task.task_id for one in read_trace(server / "sessions.jsonl")[0])
    broken += [f"session {key} is {count} lines of the trace" for key, count in judged.items() if count > 1]
    return broken


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
    problems = [str(one) for one in iter_records(place / "server") if isinstance(one, TraceProblem)]
    return {"training": learned, "client": sorted(episodes.items()), "server": problems}


def difference(wanted: Any, found: Any) -> str:
    """The first place in which two outcomes differ."""
    pairs = zip(json.dumps(wanted), json.dumps(found), strict=False)
    at = next((place for place, (one, other) in enumerate(pairs) if one != other), 0)
    return f"{json.dumps(wanted)[at : at + 80]} is {json.dumps(found)[at : at + 80]}"


def train_argv(out: Path) -> list[str]:
    world = load_world("alfworld")
    argv = ["train", "opd", "--out", str(out), "--steps", str(STEPS), "--env-kwargs", '{"config": "small"}']
    for role in ("student", "teacher"):
        argv += [f"--{role}", str(world.checkpoint(role))]
    argv += ["--episodes", "4", "--checkpoint-every", "1", "--eval-every", "0", "--max-turns", "8"]
    return [*argv, "--optimizer.lr", "1e-3", "--threads", "1", "--tracker", "none"]


def server_argv(out: Path, port: int) -> list[str]:
    argv = ["serve", "proxy", "--student", str(load_world("alfworld").checkpoint("student")), "--out", str(out)]
    return [*argv, "--no-train", "--port", str(port), "--threads", "1", "--proxy.name", "tiny"]


def learning_argv(out: Path, port: int) -> list[str]:
    argv = [word for word in server_argv(out, port) if word != "--no-train"]
    argv += ["--batch-turns", str(BATCH_TURNS), "--run.checkpoint-every", "1", "--run.temperature", "1.0"]
    return [*argv, "--proxy.idle", "5", "--optimizer.lr", "1e-4", "--run.tracker", "none"]


def client_argv(out: Path, port: int, temperature: str = "0") -> list[str]:
    argv = ["eval", "--panel", "alfworld-quickstart", "--agent", "openai:tiny", "--samples", "1"]
    argv += [
        "--system",
        "You are in a house. Do the task.",
        "--base-url",
        f"http://127.0.0.1:{port}/v1",
        "--limit",
        str(EPISODES),
        "--temperature",
        temperature,
        "--max-turns",
        "10",
        "--slots",
        "1",
    ]
    # a killed server is away for as long as it takes to start
    return [*argv, "--request-retries", "1000", "--channel", "text", "--max-new-tokens", "12", "--out", str(out)]
