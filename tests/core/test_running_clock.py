"""A clock that stops with the process, and calls of other people's code that are measured by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from turngym.agents.playing.timed_calls import TimedCalls, attempt
from turngym.core import running_clock


def test_time_in_which_nothing_ran_counts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stood = [0.0], [9.0, 0.0, 0.0, 0.0]

    class Lock:
        """A lock that is never free. Waits take as long as they may, the first of them in a stopped machine."""

        def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
            if blocking:
                clock[0] += timeout + (stood.pop(0) if stood else 0.0)
            return False

    for name, value in {"_stood": 0.0, "_looked": 0.0, "_looks": True}.items():
        monkeypatch.setattr(running_clock, name, value)
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=time.sleep))
    assert not running_clock.acquired(Lock(), running_clock.now() + 1.0)  # type: ignore[arg-type]
    assert clock[0] == pytest.approx(10.0)
    assert running_clock.now() == pytest.approx(1.0)


def test_the_clock_goes_on_while_nobody_asks_and_stops_with_the_process() -> None:
    code = (
        "import time; from turngym.core.running_clock import now\n"
        "ran, began = now(), time.monotonic(); time.sleep(2.5); print(now() - ran, flush=True)\n"
        "input(); print(time.monotonic() - began - (now() - ran))"
    )
    words = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert float(child.stdout.readline()) > 1.0
        child.send_signal(signal.SIGSTOP)
        time.sleep(3.0)
        child.send_signal(signal.SIGCONT)
        assert float(child.communicate("\n", timeout=60)[0]) > 2.0


def test_where_no_thread_can_be_had_all_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def start(_: threading.Thread) -> None:
        raise RuntimeError

    for name, value in {"_stood": 0.0, "_looked": 0.0, "_looks": False}.items():
        monkeypatch.setattr(running_clock, name, value)
    monkeypatch.setattr(running_clock, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(threading.Thread, "start", start)
    began = running_clock.now()
    for clock[0] in (100.0, 200.0):
        assert running_clock.now() - began == clock[0]


def test_a_call_that_is_late_is_given_up_all_the_same() -> None:
    gate = threading.Event()
    calls = TimedCalls(0.3, "the step")
    assert "took more than 0.3 s" in calls.call(gate.wait).failure
    gate.set()
    calls.close()


def test_a_call_leaves_the_working_folder_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    attempt(lambda: os.chdir("other"))
    assert Path.cwd() == tmp_path


def test_threads_of_others_keep_no_command_alive() -> None:
    code = (
        "import threading, time; from turngym.scripts import command, main; command.THREADS_WAIT = 0.1\n"
        "def verb(argv=None): threading.Thread(target=time.sleep, args=(999,), name='theirs').start(); return 3\n"
        "main.main = verb; command.command()"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 3
    assert "the thread theirs goes on" in done.stderr
