"""Kills commands with SIGKILL, or starts them a second time on a folder in use, and checks what their files are worth.

After a kill, everything that was finished must be whole and the command must be able to go on. A second start must be
refused with a message that names the first process, and must not touch a file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tally import Tally

from turngym.core.files import LOCK
from turngym.core.trace import episode_to_json, read_trace

# --- Commands in processes of their own

IMPORTED = (
    *(f"turngym.scripts.{verb}" for verb in ("main", "rollout", "eval", "index", "train", "model")),
    *("turngym.envs", "turngym.agents.model_agent", "torch", "safetensors.torch", "torch.optim"),
    *("transformers.models.qwen3.modeling_qwen3", "transformers.models.auto.modeling_auto"),
)
_CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True, slots=True)
class Done:
    """Exit status and standard error of a command that has ended."""

    returncode: int
    stderr: str


class Started:
    """A `turngym` command in a process of its own.

    Processes are forked from a server that has imported torch and the verbs once, so that a command starts at once.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        _CONTEXT.set_forkserver_preload(list(IMPORTED))
        handle, name = tempfile.mkstemp(prefix="turngym-fault-")
        os.close(handle)
        self._log = Path(name)
        self._process = _CONTEXT.Process(target=_run_command, args=(list(argv), name))
        self._process.start()

    def over(self) -> bool:
        return self._process.exitcode is not None

    def stop(self) -> bool:
        """Suspends the process, which keeps its locks. Returns False if it has already ended."""
        if self._process.pid is None or self.over():
            return False
        os.kill(self._process.pid, signal.SIGSTOP)
        # the signal is delivered asynchronously
        wait(lambda: _process_state(self._process.pid) in "TZ", self, 10)
        return not self.over() and _process_state(self._process.pid) != "Z"

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def terminate(self, seconds: float) -> Done:
        """Asks the process to end, as SIGTERM does, and kills it after `seconds`."""
        self._process.terminate()
        return self.end(seconds)

    def end(self, seconds: float | None = None) -> Done:
        """Waits until the process ends, and kills it after `seconds`."""
        self._process.join(seconds)
        if not self.over():
            self._process.kill()
            self._process.join()
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        self._log.unlink(missing_ok=True)
        return Done(int(self._process.exitcode or 0), said)


def wait(ready: Callable[[], bool], process: Started, seconds: float = 120.0) -> None:
    """Waits until `ready()` is true, the process has ended or `seconds` have passed."""
    end = time.monotonic() + seconds
    while not ready() and not process.over() and time.monotonic() < end:
        time.sleep(0.005)


def _process_state(pid: int | None) -> str:
    """Returns the state letter of /proc: T for stopped, Z for ended. Without /proc it is always T."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
    except OSError:
        return "T" if not Path("/proc/self").exists() else "Z"


def _run_command(argv: list[str], log: str) -> None:
    """Runs the command in the forked process; its standard error goes to the file `log`."""
    sys.stdout.flush()
    for number, place in ((1, os.devnull), (2, log)):
        opened = os.open(place, os.O_WRONLY)
        os.dup2(opened, number)
        os.close(opened)
    sys.argv = ["turngym", *argv]
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    from turngym.scripts.main import main

    sys.exit(main(argv))


# --- Killed at a random moment

BAD_AFTER_KILL = ("lost", "damaged", "cannot go on")
ONE_THREAD = {**os.environ, "OMP_NUM_THREADS": "1"}
ROLLOUT = ("rollout", "--agent", "expert", "--slots", "2", "--env-kwargs", '{"config": "small"}')
EVAL = (
    *("eval", "--panel", "alfworld-quickstart", "--agent", "expert"),
    *("--samples", "1", "--limit", "40", "--slots", "2"),
)
RECORDS = """if True:
    import sys
    from pathlib import Path
    from turngym.agents.proxy.turn_records import TurnRecorder
    recorder = TurnRecorder(Path(sys.argv[1]))
    for number in range(10**9):
        recorder.write({"kind": "trained", "step": number, "sessions": ["x" * 2000]})
        print(number, flush=True)
"""


def kills(folder: Path, tries: int, seed: int) -> Iterator[Tally]:
    """Kills each kind of work `tries` times at random moments and checks its folder each time."""
    for number, (name, attempt) in enumerate(KILLS.items()):
        rng, tally = np.random.default_rng([seed, number]), Tally(what=f"kill -9: {name}", bad=BAD_AFTER_KILL)
        for trial in range(tries):
            place = folder / f"{name.replace(' ', '_')}_{trial}"
            place.mkdir(parents=True)
            tally.count(*attempt(place, float(rng.random())))
        yield tally


def _kill_rollout(place: Path, moment: float) -> tuple[str, str]:
    out = place / "t.jsonl"
    argv = [*ROLLOUT, "--tasks", "30", "--out", str(out)]
    _kill(argv, partial(has_content, out), moment)
    before, problems = read_trace(out)
    if any(not problem.torn for problem in problems):
        return "damaged", str(problems[0])
    done = _run([*argv, "--append"])
    after = read_trace(out)[0]
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    kept = [episode_to_json(one) for one in after[: len(before)]] == [episode_to_json(one) for one in before]
    whole = kept and len({one.task.task_id for one in after}) == len(after) == 30
    return ("whole", "") if whole else ("lost", f"{len(before)} and then {len(after)} of 30 episodes")


def _kill_evaluation(place: Path, moment: float) -> tuple[str, str]:
    out, trace = place / "eval", place / "eval" / "trace.jsonl"
    argv = [*EVAL, "--out", str(out)]
    _kill(argv, partial(has_content, trace), moment)
    held = len(read_trace(trace)[0])
    done = _run(argv)
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    episodes = read_trace(trace)[0]
    unique = {(one.task.task_id, one.sample) for one in episodes}
    return ("whole", "") if len(episodes) == len(unique) == 40 >= held else ("lost", f"{len(episodes)} episodes of 40")


def _kill_index(place: Path, moment: float) -> tuple[str, str]:
    corpus, out = write_corpus(place / "c.jsonl"), place / "index"
    argv = index_argv(corpus, out)
    _kill(argv, (place / "index.building").exists, moment)
    done = Done(0, "") if out.exists() else _run(argv)
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    checked = _run(["index", "verify", str(out)])
    return ("whole", "") if checked.returncode == 0 else ("damaged", checked.stderr[-200:])


def _kill_recorder(place: Path, moment: float) -> tuple[str, str]:
    from turngym.agents.proxy.turn_records import TurnRecorder, iter_records
    from turngym.core.trace import TraceProblem

    with subprocess.Popen(
        [sys.executable, "-c", RECORDS, str(place)], stdout=subprocess.PIPE, text=True, env=ONE_THREAD
    ) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(1 + int(500 * moment))]
        process.kill()
        said += process.stdout.readlines()
    TurnRecorder(place).close()
    found = list(iter_records(place))
    damaged = sum(isinstance(one, TraceProblem) for one in found)
    steps = [one["step"] for one in found if not isinstance(one, TraceProblem)]
    acknowledged = sum(line.endswith("\n") for line in said)
    if damaged or steps[:acknowledged] != list(range(acknowledged)):
        return "lost", f"{acknowledged} said, {len(steps)} held, {damaged} damaged"
    return "whole", ""


def _kill_training(place: Path, moment: float) -> tuple[str, str]:
    from turngym.trainers.checkpoint import list_checkpoints

    out = place / "run"
    argv = train_argv(out)
    _kill(argv, lambda: bool(list_checkpoints(out)), moment)
    done = _run([*argv, "--resume"])
    if done.returncode:
        return "cannot go on", done.stderr[-200:]
    checked = _run(["model", "verify", str(out)])
    ended = list_checkpoints(out)[-1].name == "step_000006"
    return ("whole", "") if ended and checked.returncode == 0 else ("damaged", checked.stderr[-200:])


def write_corpus(path: Path) -> Path:
    """Writes 40,000 passages."""
    rows = ({"id": str(row), "contents": f"w{row % 997} w{row % 31} t{row}"} for row in range(40_000))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def index_argv(corpus: Path, out: Path) -> list[str]:
    return ["index", "build", "--corpus", str(corpus), "--out", str(out)]


def train_argv(out: Path) -> list[str]:
    from turngym.agents import load_world

    argv = ["train", "sft", "--student", str(load_world("alfworld").checkpoint("student")), "--out", str(out)]
    return [*argv, "--steps", "6", "--episodes", "2", "--checkpoint-every", "1", "--env-kwargs", '{"config": "small"}']


def has_content(path: Path) -> bool:
    """Whether the file exists and is not empty."""
    return path.exists() and path.stat().st_size > 0


KILLS = {
    "trace": _kill_rollout,
    "evaluation": _kill_evaluation,
    "index": _kill_index,
    "proxy records": _kill_recorder,
    "training": _kill_training,
}
"""Each function works in a folder, is killed at a moment in [0, 1), and returns the outcome and a note."""


def _kill(argv: Sequence[str], ready: Callable[[], bool], moment: float) -> None:
    """Starts a command and kills it `moment` seconds after `ready()`, unless it ends before."""
    process = Started(argv)
    wait(ready, process)
    time.sleep(moment)
    process.kill()


def _run(argv: Sequence[str]) -> Done:
    return Started(argv).end(600)


# --- Started twice

BAD_AFTER_SECOND_START = ("both wrote", "touched", "traceback")
HELD = "is in use by process"


def second_starts(folder: Path, tries: int) -> Iterator[Tally]:
    """Starts each kind of work a second time while the first stands still, `tries` times."""
    for name, attempt in SECOND_STARTS.items():
        tally = Tally(what=f"started twice: {name}", bad=BAD_AFTER_SECOND_START)
        for trial in range(tries):
            place = folder / f"{name.replace(' ', '_')}_{trial}"
            place.mkdir(parents=True)
            tally.count(*attempt(place))
        yield tally


def _rollout_twice(place: Path) -> tuple[str, str]:
    out = place / "t.jsonl"
    return _twice(place, [*ROLLOUT, "--tasks", "400", "--out", str(out)], partial(has_content, out), "--append")


def _evaluation_twice(place: Path) -> tuple[str, str]:
    return _twice(place, [*EVAL, "--out", str(place / "eval")], partial(has_content, place / "eval" / "trace.jsonl"))


def _index_twice(place: Path) -> tuple[str, str]:
    argv = index_argv(write_corpus(place / "c.jsonl"), place / "index")
    return _twice(place, argv, partial(has_content, place / ".index.lock"))


def _training_twice(place: Path) -> tuple[str, str]:
    return _twice(place, train_argv(place / "run"), partial(has_content, place / "run" / LOCK), "--resume")


def _recorder_twice(place: Path) -> tuple[str, str]:
    """The second writer is this process."""
    from turngym.agents.proxy.api_errors import ProxyError
    from turngym.agents.proxy.turn_records import TurnRecorder

    argv = [sys.executable, "-c", RECORDS, str(place)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ONE_THREAD) as first:
        assert first.stdout is not None
        first.stdout.readline()
        try:
            TurnRecorder(place).close()
        except ProxyError as error:
            return ("turned away", "") if HELD in str(error) else ("traceback", str(error))
        finally:
            first.kill()
    return "both wrote", ""


SECOND_STARTS = {
    "trace": _rollout_twice,
    "evaluation": _evaluation_twice,
    "index": _index_twice,
    "proxy records": _recorder_twice,
    "training": _training_twice,
}
"""Each function starts work twice in an empty folder and returns the outcome of the second start and a note."""


def _twice(place: Path, argv: Sequence[str], ready: Callable[[], bool], *more: str) -> tuple[str, str]:
    """Starts `argv`, suspends it once `ready()`, starts it again with the options `more`, and compares the files."""
    first = Started(argv)
    try:
        wait(ready, first)
        if not first.stop():
            return "had ended", "so nothing was started twice"
        before = _contents(place)
        second = Started([*argv, *more]).end(600)
        after = _contents(place)
    finally:
        first.kill()
    if "Traceback" in second.stderr:
        return "traceback", second.stderr[-300:]
    if second.returncode != 2 or HELD not in second.stderr:
        return "both wrote", f"status {second.returncode}: {second.stderr[-300:]}"
    touched = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return ("touched", ", ".join(touched)) if touched else ("turned away", "")


def _contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
