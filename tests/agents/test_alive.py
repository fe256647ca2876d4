"""Alive after one failure: lines are whole or absent, background threads go on, and every wait has an end."""

from __future__ import annotations

import os
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
from small_disk import small_disk

from turngym.agents import server_process
from turngym.agents.executor.errors import ExecutorError
from turngym.agents.executor.processes import LocalWorkers
from turngym.agents.proxy.turn_records import TurnRecorder, iter_records
from turngym.core import background_threads, disk_space, trace
from turngym.core.background_threads import SupervisedThread, failures_of_threads
from turngym.core.episode import Episode, Status
from turngym.core.line_file import LineFile
from turngym.core.task import Task
from turngym.core.trace import TraceProblem
from turngym.scripts import jobs as study_jobs


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


def test_records_of_a_disk_that_was_full_for_a_moment(tmp_path: Path) -> None:
    recorder, told = TurnRecorder(tmp_path), []
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
    assert not [one for one in found if isinstance(one, TraceProblem)]
    assert [one["i"] for one in found if not isinstance(one, TraceProblem)] == told == [0, 1, 2, 5, 6, 7]


def test_a_server_that_learns_waits_for_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk_space, "FIRST_WAIT", 0.01)
    writing, tries = disk_space.RoomToWrite(), []

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
    monkeypatch.setattr(disk_space, "FIRST_WAIT", 600.0)
    with pytest.raises(OSError, match="No space"):
        writing(write)
    assert len(tries) == 2


@pytest.mark.long
def test_a_checkpoint_and_a_row_wait_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `serve proxy` trains with: each write of a run fails twice, and the run is as it is with room."""
    toy = pytest.importorskip("toy_run")
    from turngym.trainers import checkpoint, metrics

    monkeypatch.setattr(disk_space, "FIRST_WAIT", 0.001)
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
    trainer.writing = disk_space.RoomToWrite()
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
        with small_disk(1000), pytest.raises(ExecutorError, match=r"0\.1 MB, in .*set TMPDIR"):
            workers.share(b"x" * 100_000)
        assert [path for path in small.rglob("*") if path.is_file()] == []
        # another failure is not called one of room
        workers.close()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
        with pytest.raises(ExecutorError, match=r"0\.1 MB, cannot be written in .*: No such file"):
            workers.share(b"x" * 100_000)
        monkeypatch.setattr(tempfile, "tempdir", str(small))
        assert workers.share(b"x" * 100_000).read_bytes() == b"x" * 100_000
    finally:
        workers.close()


class Panic(BaseException):
    """What a library in Rust raises."""


@pytest.mark.parametrize("error", [OSError(28, "No space left"), Panic("rust"), KeyError("x")])
def test_a_background_thread_goes_on(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background_threads, "FIRST_WAIT", 0.01)
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


FULL_LOG = """
import errno, sys, threading
from turngym.core import disk_space
from turngym.core import background_threads
background_threads.FIRST_WAIT = disk_space.FIRST_WAIT = 0.01
calls, done = [], threading.Event()
def work():
    calls.append(1)
    if len(calls) < 3: raise OSError(errno.ENOSPC, f"No space left, {len(calls)}")
    done.set()
background_threads.SupervisedThread(work, "test").start()
if not done.wait(20): sys.exit(3)
del calls[:]
disk_space.RoomToWrite()(work)
background_threads.say("a step", sys.stdout)
import os
os._exit(7)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_thread_goes_on_where_nothing_can_be_said() -> None:
    """Its log may lie on the very disk that is full."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", FULL_LOG], stdout=full, stderr=full, timeout=60, check=False)
    assert done.returncode == 7


def test_a_server_that_is_started_again_keeps_nobody_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = object.__new__(server_process.RunServer)
    command = [sys.executable, "-c", "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)"]
    own._process = server_process.ServerProcess(command=command, url="http://127.0.0.1:9", log=tmp_path / "log")
    own._lock, own._closed = threading.Lock(), threading.Event()
    starting = threading.Event()

    def start() -> None:
        own._process.start()
        starting.set()
        own._process.wait_ready(900.0)

    monkeypatch.setattr(own, "_start", start)
    monkeypatch.setattr(server_process.ServerProcess, "ended", lambda self: self._child.poll() if self._child else 1)
    watch = threading.Thread(target=own._watch, daemon=True)
    watch.start()
    assert starting.wait(20)
    os.killpg(own._process.pid, signal.SIGSTOP)
    stop = server_process.ServerProcess.stop
    monkeypatch.setattr(server_process.ServerProcess, "stop", lambda self: stop(self, 0.5))
    begun = time.monotonic()
    own.__exit__()
    assert time.monotonic() - begun < 15
    watch.join(10)
    assert not watch.is_alive()
    assert own._process.ended() in (-signal.SIGTERM, -signal.SIGKILL)


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


TASK = Task(env_id="e", task_id="t", sha256="0" * 64, split="x", category="x")


def test_a_trace_whose_lock_another_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LOCKED", 0.3)
    path = tmp_path / "t.jsonl"
    episode = Episode(
        task=TASK,
        turns=(),
        segments=(),
        seed=1,
        sample=0,
        group=0,
        status=Status.TRUNCATED_DEPTH,
        success=False,
        episode_return=0.0,
    )
    code = "import fcntl, sys; f = open(sys.argv[1], 'ab'); fcntl.flock(f, 2); print(); sys.stdin.read()"
    with trace.TraceWriter(path) as writer:
        writer.write(episode)
        words = [sys.executable, "-c", code, str(path)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            other.stdout.readline()
            with pytest.raises(trace.TraceError, match=r"held its lock for 0\.3"):
                writer.write(episode)
            threading.Timer(0.1, other.kill).start()
            monkeypatch.setattr(trace, "LOCKED", 30.0)
            writer.write(episode)
    assert len(list(trace.iter_trace(path))) == 2


SAVES = """
import signal, sys, time
def save(*_):
    open(sys.argv[1], "w").write("saved")
    sys.exit(0)
signal.signal(signal.SIGTERM, save if sys.argv[2] == "saves" else lambda *_: None)
print(flush=True)
while True: time.sleep(0.05)
"""


def test_runs_of_a_study_save_though_they_were_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study_jobs, "SAVING", 1.5)
    runs = []
    for name in ("saves", "stays"):
        words = [sys.executable, "-c", SAVES, str(tmp_path / name), name]
        runs.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        assert runs[-1].stdout is not None
        runs[-1].stdout.readline()
    os.kill(runs[0].pid, signal.SIGSTOP)
    study_jobs.stop(runs, 0.2)
    assert [run.wait(10) for run in runs] == [0, -signal.SIGKILL]
    assert (tmp_path / "saves").read_text() == "saved"
    for run in runs:
        run.communicate()


CODE = """
import signal, threading, sys, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
from turngym.agents import serving
serving.LAST_SECONDS = 0.5
serving.stop_on_signals(lambda: None)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
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
