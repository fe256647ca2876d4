"""Alive after one failure: lines are whole or absent, background threads go on, and every wait has an end."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from turngym.agents.executor.errors import ExecutorError
from turngym.agents.executor.processes import LocalWorkers
from turngym.agents.proxy.turn_records import Recorder, RecordProblem, iter_records
from turngym.envs.core import room
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


def test_a_server_that_learns_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(room, "FIRST_WAIT", 0.01)
    writing, tries = room.RoomToWrite(), []

    def write() -> str:
        tries.append(writing.waiting)
        if len(tries) <= 3:
            raise OSError(28, "No space left on device")
        return "written"

    assert writing(write) == "written"
    assert len(tries) == 4
    assert writing.waiting == 0
    # said once, and not for every try
    assert capsys.readouterr().err.count("no room: ") == 1
    # no other failure is waited for
    with pytest.raises(KeyError):
        writing(lambda: {}["x"])
    # a server that ends does not wait
    tries.clear()
    threading.Timer(0.05, writing.close).start()
    monkeypatch.setattr(room, "FIRST_WAIT", 600.0)
    with pytest.raises(OSError, match="No space"):
        writing(write)
    assert len(tries) == 2


@pytest.mark.long
def test_a_checkpoint_and_a_row_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `serve proxy` trains with: each write of a run fails twice, and the run is as it is with room."""
    toy = pytest.importorskip("toy_run")
    from turngym.trainers import checkpoint, metrics

    monkeypatch.setattr(room, "FIRST_WAIT", 0.001)
    failures = {"row": 0, "checkpoint": 0}

    def failing(name: str, write: Callable[..., Any]) -> Callable[..., Any]:
        def twice(*given: Any, **named: Any) -> Any:
            failures[name] += 1
            if failures[name] % 3:
                raise OSError(28, "No space left on device")
            return write(*given, **named)

        return twice

    monkeypatch.setattr(metrics.LineFile, "append", failing("row", LineFile.append))
    monkeypatch.setattr(checkpoint, "_write_optimizer", failing("checkpoint", checkpoint._write_optimizer))
    trainer = toy.trainer(tmp_path / "run", steps=4)
    trainer.writing = room.RoomToWrite()
    assert trainer.train().step == 4
    steps = [row["step"] for row in metrics.iter_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert steps == [1, 2, 3, 4]
    assert failures["row"] >= 12
    assert failures["checkpoint"] >= 3
    assert not list((tmp_path / "run" / "checkpoints").glob(".writing_*"))


def test_no_room_for_what_workers_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = LocalWorkers(1)
    try:
        small = tmp_path / "small"
        small.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # real writes fail, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(ExecutorError, match=r"no room for what workers are given, 0.1 MB, in .*set TMPDIR"):
                workers.share(b"x" * 100_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert [path for path in small.rglob("*") if path.is_file()] == []
        assert workers.share(b"x" * 100_000).read_bytes() == b"x" * 100_000
    finally:
        workers.close()


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
