"""Alive after one failure: lines are whole or absent, background threads go on, and every wait has an end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.proxy.turn_records import Recorder, RecordProblem, iter_records
from turngym.envs.core.line_file import LineFile
from turngym.retrieval import supervised
from turngym.retrieval.supervised import SupervisedThread, failures_of_threads


class Full:
    """A file whose disk has room for `room` more bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        taken = min(len(data), self.room)
        self.room -= taken
        if not taken:
            raise OSError(28, "No space left on device")
        return int(self.file.write(data[:taken]))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


@pytest.mark.parametrize("room", [0, 1, 7, 19])
def test_a_line_that_fails_is_not_in_the_file(room: int, tmp_path: Path) -> None:
    lines = LineFile(tmp_path / "a")
    assert lines.append(b"first line of twenty\n") == 0
    whole = lines.file
    lines.file = Full(whole, room)
    with pytest.raises(OSError, match="No space left"):
        lines.append(b"second line of twenty\n")
    lines.file = whole
    assert lines.append(b"third\n") == 21
    assert (tmp_path / "a").read_bytes() == b"first line of twenty\nthird\n"


def test_records_of_a_disk_that_was_full_for_a_moment(tmp_path: Path) -> None:
    recorder, told = Recorder(tmp_path), []
    for number in range(8):
        if number in (3, 4):
            recorder._lines.file = Full(recorder._lines.file, 30)
        try:
            recorder.write({"kind": "x", "i": number, "text": "a" * 100})
            told.append(number)
        except OSError:
            recorder._lines.file = recorder._lines.file.file
    recorder.close()
    found = list(iter_records(tmp_path))
    assert not [one for one in found if isinstance(one, RecordProblem)]
    assert [one["i"] for one in found if not isinstance(one, RecordProblem)] == told == [0, 1, 2, 5, 6, 7]


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("error", [OSError(28, "No space left"), Panic("rust"), KeyError("x")])
def test_a_background_thread_goes_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(supervised, "FIRST_WAIT", 0.01)
    calls, done = [], threading.Event()

    def work() -> None:
        calls.append(1)
        if len(calls) <= 2:
            raise error
        done.set()

    thread = SupervisedThread(work, "test-thread")
    thread.start()
    assert done.wait(10)
    thread.join(10)
    assert failures_of_threads()["test-thread"]["failures"] == 2
    # said once, and not for every try
    assert capsys.readouterr().err.count("test-thread: ") == 1


def test_sessions_that_could_not_be_ended_are_ended_later(make_bench: Callable[..., Any]) -> None:
    import proxy_tools as tools

    bench = make_bench()
    for name in ("a", "b"):
        bench.ask([tools.user("hello")], name)
    service, write = bench.service, bench.service.recorder.write
    gone = list(service.sessions.all())

    def full(record: Any) -> Any:
        raise OSError(28, "No space left on device")

    service.recorder.write = full
    service.sessions.expired = lambda: [gone.pop()] if gone else []
    for _ in range(2):
        with pytest.raises(OSError, match="No space"):
            service.sweep()
    service.recorder.write = write
    service.sweep()
    ends = [record for record in iter_records(service.recorder.path.parent) if record["kind"] == "end"]  # type: ignore[index]
    assert sorted(record["session"][-4:] for record in ends) == sorted({record["session"][-4:] for record in ends})
    assert len(ends) == 2


CODE = """
import signal, threading, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from turngym.agents import serving
serving.LAST_SECONDS = 0.5
serving.stop_on_signals(lambda: None)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_second_signal_ends_what_the_first_could_not(number: int) -> None:
    child = subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        os.kill(child.pid, number)
        time.sleep(1.0)
        assert child.poll() is None
        os.kill(child.pid, number)
        assert child.wait(20) == 128 + number
    finally:
        child.kill()
        child.communicate()
