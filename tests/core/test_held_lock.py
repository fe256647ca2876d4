"""A step that holds the interpreter lock ends its process, and nothing else does."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from late import late

from turngym.core.trace import read_episodes

HOLDING = {
    "pattern": "re.match('(a+)+$', 'a' * 60 + 'b')",
    "sum": "sum(range(10**13))",
    "power": "7 ** (3 ** 24)",
    "foreign code": "ctypes.PyDLL(None).sleep(600)",
}
ENV = """
import ctypes, re
from collections.abc import Sequence
from turngym.envs import Outcome, TextEnv, register
from turngym.core import Task, ToolSpec, content_hash

class Holds(TextEnv):
    env_id = "tests/Holds-v0"
    tool = ToolSpec(name="go", description="Go.", argument="action", argument_description="go")
    instructions = "Go."

    def __init__(self, *, split="train", render_mode=None):
        super().__init__(render_mode=render_mode)
        self.split, self._task = split, "0"

    def task_ids(self):
        return ("0", "1", "holds")

    def _begin(self, task_id):
        self._task = task_id
        return "Go."

    def _apply(self, action):
        if self._task == "holds":
            HOLDING
        return Outcome(observation="Done.", reward=1.0, terminated=True)

    @property
    def task(self):
        sha256 = content_hash(self._task)
        return Task(env_id=self.env_id, task_id=self._task, sha256=sha256, split=self.split, category="")

    def admissible(self):
        return ("go",)

    @property
    def success(self):
        return True

    def _get_state(self):
        return 0

    def _set_state(self, state):
        pass

    def expert_action(self):
        return "go"

register(Holds.env_id, Holds)
"""
RUN = """
import sys
import turngym.core.lock_watch as watch
from turngym.scripts.main import main
watch.LOCK_SECONDS = 0.5
sys.exit(main(sys.argv[1:]))
"""


def words(folder: Path, *more: str) -> list[str]:
    tasks = ["--task", "0", "1", "holds"]
    out = ["--out", str(folder / "out.jsonl")]
    return ["rollout", "--env", "holds_env:tests/Holds-v0", "--agent", "expert", *tasks, *out, *more]


def finished(folder: Path) -> set[str]:
    return {episode.task.task_id for episode in read_episodes(folder / "out.jsonl") if episode.success}


@pytest.mark.parametrize("what", late(HOLDING, "sum"))
def test_a_step_that_holds_the_lock_ends_this_process(what: str, tmp_path: Path) -> None:
    (tmp_path / "holds_env.py").write_text(ENV.replace("HOLDING", HOLDING[what]))
    argv = [sys.executable, "-c", RUN, *words(tmp_path, "--workers", "0", "--slots", "1", "--step-timeout", "0.5")]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    said = [line for line in done.stderr.splitlines() if "interpreter lock" in line]
    assert len(said) == 1
    assert "the environment's step or reset took more than 0.5 s" in said[0]
    assert "--workers 1 or more" in said[0]
    assert finished(tmp_path) == {"0", "1"}


@pytest.mark.long
def test_a_worker_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "holds_env.py").write_text(ENV.replace("HOLDING", HOLDING["sum"]))
    more = ["--workers", "1", "--step-timeout", "1", "--retries", "1"]
    argv = [sys.executable, "-m", "turngym.scripts", *words(tmp_path, *more)]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.stderr.count("holds Python's interpreter lock") == 2
    assert finished(tmp_path) == {"0", "1"}
    statuses = {episode.task.task_id: episode.status.value for episode in read_episodes(tmp_path / "out.jsonl")}
    assert statuses["holds"] == "error_engine"


CALM = """
import sys, threading, time
import turngym.core.lock_watch as watch
from turngym.agents.playing.timed_calls import TimedCalls
watch.LOCK_SECONDS = 0.5
calls = TimedCalls(0.5, "the step")
"""


def calm(body: str, *signals: tuple[float, signal.Signals]) -> subprocess.CompletedProcess[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", CALM + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for pause, number in signals:
        time.sleep(pause)
        child.send_signal(number)
    out, err = child.communicate(timeout=60)
    return subprocess.CompletedProcess([], child.returncode, out, err)


def test_a_step_that_only_hangs_is_given_up() -> None:
    done = calm("print(calls.run([lambda: time.sleep(5)] * 3)[2].failure)")
    assert (done.returncode, done.stdout) == (0, "the step took more than 0.5 s\n"), done.stderr


@pytest.mark.long
def test_many_short_steps_take_as_long_as_they_take() -> None:
    done = calm("print(len(calls.run([lambda: time.sleep(0.1)] * 30)))")
    assert (done.returncode, done.stdout) == (0, "30\n"), done.stderr


@pytest.mark.long
def test_what_holds_the_lock_between_steps_is_nobodys_business() -> None:
    done = calm("import ctypes; calls.call(int); ctypes.PyDLL(None).sleep(3); print(calls.call(int).value)")
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


@pytest.mark.long
def test_a_process_that_was_stopped_goes_on() -> None:
    body = "print('ready', flush=True); calls = TimedCalls(20.0, 'the step'); watch.LOCK_SECONDS = -18.5; "
    body += "print(calls.call(lambda: time.sleep(1.0) or 7).value)"
    done = calm(body, (1.0, signal.SIGSTOP), (3.0, signal.SIGCONT))
    assert (done.returncode, done.stdout) == (0, "ready\n7\n"), done.stderr


@pytest.mark.long
def test_another_watch_follows_one_that_was_ended() -> None:
    body = "calls.call(int); import os; os.kill(watch.LockWatch._child.pid, 9); time.sleep(0.5); calls.call(int); "
    body += "calls.call(int); print(watch.LockWatch._child.exit_status(0.0))"
    done = calm(body)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.long
def test_a_watch_that_was_stopped_keeps_no_step() -> None:
    body = "watch.TELLING = 0.5; calls.call(int); import os; first = watch.LockWatch._child; os.kill(first.pid, 19)\n"
    body += "for _ in range(20000):\n    calls.call(int)\n    if watch.LockWatch._child is not first: break\n"
    body += "print(watch.LockWatch._child is not first, os.path.exists(f'/proc/{first.pid}'))"
    done = calm(body)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


@pytest.mark.long
def test_a_forked_process_is_watched_by_its_own() -> None:
    body = "import os; calls.call(int); first = watch.LockWatch._child.pid\n"
    body += "if os.fork():\n    print(os.waitstatus_to_exitcode(os.wait()[1]), calls.call(int).value)\n"
    body += "else:\n    again = TimedCalls(0.5, 'x'); again.call(int); os._exit(watch.LockWatch._child.pid == first)\n"
    done = calm(body)
    assert (done.returncode, done.stdout) == (0, "0 0\n"), done.stderr
