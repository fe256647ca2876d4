"""Processes that are killed where they stand: what was finished must be whole, and the rest must go on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from turngym.envs.core.trace import episode_to_json, read_trace
from turngym.scripts.bench.faults.processes import Done, Started, wait
from turngym.scripts.bench.faults.tally import Tally

BAD = ("lost", "damaged", "cannot go on")
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}
ROLLOUT = ("rollout", "--agent", "expert", "--slots", "2", "--env-kwargs", '{"config": "small"}')
EVAL = (
    "eval",
    "--panel",
    "alfworld-quickstart",
    "--agent",
    "expert",
    "--samples",
    "1",
    "--limit",
    "40",
    "--slots",
    "2",
)
RECORDS = """if True:
    import sys
    from pathlib import Path
    from turngym.agents.proxy.sessions.records import Recorder
    recorder = Recorder(Path(sys.argv[1]))
    for number in range(10**9):
        recorder.write({"kind": "trained", "step": number, "sessions": ["x" * 2000]})
        print(number, flush=True)
"""


def kills(folder: Path, tries: int, seed: int) -> Iterator[Tally]:
    """kill -9 of each kind of work, `tries` times at random moments, and what its folder is worth then."""
    for number, (name, attempt) in enumerate(KINDS.items()):
        rng, tally = np.random.default_rng([seed, number]), Tally(what=f"kill -9: {name}", bad=BAD)
        for trial in range(tries):
            place = folder / f"{name.replace(' ', '_')}_{trial}"
            place.mkdir(parents=True)
            tally.count(*attempt(place, float(rng.random())))
        yield tally


def _trace(place: Path, moment: float) -> tuple[str, str]:
    out = place / "t.jsonl"
    words = [*ROLLOUT, "--tasks", "30", "--out", str(out)]
    _kill(words, partial(begun, out), moment)
    before, problems = read_trace(out)
    if any(not problem.torn for problem in problems):
        return "damaged", str(problems[0])
    done = _run([*words, "--append"])
    after = read_trace(out)[0]
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    kept = [episode_to_json(one) for one in after[: len(before)]] == [episode_to_json(one) for one in before]
    whole = kept and len({one.task.task_id for one in after}) == len(after) == 30
    return ("whole", "") if whole else ("lost", f"{len(before)} and then {len(after)} of 30 episodes")


def _evaluation(place: Path, moment: float) -> tuple[str, str]:
    out, trace = place / "eval", place / "eval" / "trace.jsonl"
    words = [*EVAL, "--out", str(out)]
    _kill(words, partial(begun, trace), moment)
    held = len(read_trace(trace)[0])
    done = _run(words)
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    episodes = read_trace(trace)[0]
    unique = {(one.task.task_id, one.sample) for one in episodes}
    return ("whole", "") if len(episodes) == len(unique) == 40 >= held else ("lost", f"{len(episodes)} episodes of 40")


def _index(place: Path, moment: float) -> tuple[str, str]:
    corpus, out = write_corpus(place / "c.jsonl"), place / "index"
    words = index_words(corpus, out)
    _kill(words, (place / "index.building").exists, moment)
    done = Done(0, "") if out.exists() else _run(words)
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    checked = _run(["index", "verify", str(out)])
    return ("whole", "") if checked.returncode == 0 else ("damaged", checked.stderr[-200:])


def _records(place: Path, moment: float) -> tuple[str, str]:
    from turngym.agents.proxy.turn_records import Recorder, RecordProblem, iter_records

    with subprocess.Popen(
        [sys.executable, "-c", RECORDS, str(place)], stdout=subprocess.PIPE, text=True, env=QUIET
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(1 + int(500 * moment))]
        process.kill()
        said += process.stdout.readlines()
    Recorder(place).close()
    found = list(iter_records(place))
    damaged = sum(isinstance(one, RecordProblem) for one in found)
    steps = [one["step"] for one in found if not isinstance(one, RecordProblem)]
    acknowledged = sum(line.endswith("\n") for line in said)
    if damaged or steps[:acknowledged] != list(range(acknowledged)):
        return "lost", f"{acknowledged} said, {len(steps)} held, {damaged} damaged"
    return "whole", ""


def _training(place: Path, moment: float) -> tuple[str, str]:
    from turngym.trainers.checkpoint import list_checkpoints

    out = place / "run"
    words = train_argv(out)
    _kill(words, lambda: bool(list_checkpoints(out)), moment)
    done = _run([*words, "--resume"])
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    checked = _run(["model", "verify", str(out)])
    ended = list_checkpoints(out)[-1].name == "step_000006"
    return ("whole", "") if ended and checked.returncode == 0 else ("damaged", checked.stderr[-200:])


def write_corpus(path: Path) -> Path:
    """40,000 passages."""
    rows = ({"id": str(row), "contents": f"w{row % 997} w{row % 31} t{row}"} for row in range(40_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def index_words(corpus: Path, out: Path) -> list[str]:
    return ["index", "build", "--corpus", str(corpus), "--out", str(out), "--shard-rows", "4096"]


def train_argv(out: Path) -> list[str]:
    from turngym.agents.worlds import load_world

    words = ["train", "sft", "--student", str(load_world("alfworld").checkpoint("student")), "--out", str(out)]
    return [*words, "--steps", "6", "--episodes", "2", "--checkpoint-every", "1", "--env-kwargs", '{"config": "small"}']


def begun(path: Path) -> bool:
    """Whether something is in the file."""
    return path.exists() and path.stat().st_size > 0


KINDS = {
    "trace": _trace,
    "evaluation": _evaluation,
    "index": _index,
    "proxy records": _records,
    "training": _training,
}
"""Each works in a folder, is killed at a moment in [0, 1), and says what came of it."""


def _kill(words: Sequence[str], ready: Callable[[], bool], moment: float) -> None:
    """Start `words` and kill it up to a second after `ready`, or let it end if it is quicker."""
    process = Started(words)
    wait(ready, process)
    time.sleep(moment)
    process.kill()


def _run(words: Sequence[str]) -> Done:
    return Started(words).end(600)
