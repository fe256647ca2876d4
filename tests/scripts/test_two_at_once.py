"""Two processes on one folder or file: the second is told who writes there, and a killed one leaves no lock.

The other kinds of work are started twice, and killed, by `tests/bench/killed_work.py`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from turngym.agents.evaluation.evaluate import evaluate
from turngym.core.errors import TurngymError
from turngym.core.files import LOCK, FolderInUseError, locked_file, locked_folder

TURNGYM = [sys.executable, "-m", "turngym"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}


def test_a_lock_is_for_one_and_goes_with_its_holder(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    with locked_folder(folder):
        assert (folder / LOCK).is_file()
        with pytest.raises(FolderInUseError, match=rf"b is in use by process {os.getpid()} on "), locked_folder(folder):
            pass
        with locked_file(folder / "t.jsonl"), locked_folder(None), locked_file(None):
            assert (folder / ".t.jsonl.lock").is_file()
            (folder / "kept").touch()
    assert [path.name for path in folder.iterdir()] == ["kept"]
    with locked_folder(tmp_path / "c" / "d"):
        pass
    assert not (tmp_path / "c").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name in (".", "/"):
        with pytest.raises(TurngymError, match="is a folder"):
            locked_file(name)
    for place in (locked_folder(tmp_path / "file" / "x"), locked_file(tmp_path / "file" / "x")):
        with pytest.raises(TurngymError, match=r"x cannot be written: a file is where a folder"), place:
            pass


def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
    """As an orphaned worker would after kill -9 of its parent."""
    code = """if True:
        import os, sys, time
        from turngym.core.files import locked_folder
        with locked_folder(sys.argv[1]):
            if not os.fork():
                print("ready", flush=True)
                time.sleep(60)
                os._exit(0)
            time.sleep(60)
    """
    words = [sys.executable, "-c", code, str(tmp_path / "x")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"ready\n"
            with pytest.raises(FolderInUseError), locked_folder(tmp_path / "x"):
                pass
            holder.kill()
            holder.wait()
            with locked_folder(tmp_path / "x"):
                pass
        finally:
            os.killpg(holder.pid, signal.SIGKILL)


@contextmanager
def held(words: list[str], lock: Path, begun: Path | None = None) -> Iterator[int]:
    """The command in a process that is stopped in the middle (where `begun` has something in it), then killed."""
    with subprocess.Popen(words, env=QUIET, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as holder:
        deadline = time.monotonic() + 120
        while not (lock.exists() and lock.stat().st_size and (begun is None or _size(begun))):
            if holder.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(holder.stderr.read().decode() if holder.stderr else "")
            time.sleep(0.002)
        holder.send_signal(signal.SIGSTOP)
        try:
            yield holder.pid
        finally:
            holder.kill()
            holder.wait()
        assert lock.exists()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_a_rollout_into_the_trace_of_an_evaluation(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rollout = [*TURNGYM, "rollout", "--tasks", "2", "--out", str(trace), "--append"]
    words = [*TURNGYM, "eval", "--panel", "alfworld-quickstart", "--samples", "3", "--out", str(tmp_path)]
    with held(words, tmp_path / ".trace.jsonl.lock", trace) as pid:
        done = subprocess.run(rollout, env=QUIET, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, f"process {pid}" in done.stderr, "turngym eval" in done.stderr) == (2, True, True)


@pytest.mark.long
def test_a_second_pretraining_is_refused_in_one_line_and_touches_nothing(tmp_path: Path) -> None:
    words = [*TURNGYM, "pretrain", "--steps", "1", "--out", str(tmp_path / "out")]
    with held(words, tmp_path / "out" / LOCK) as pid:
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        done = subprocess.run(words, env=QUIET, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 2
        last = done.stderr.strip().splitlines()[-1]
        assert f"is in use by process {pid} on " in last
        assert "pretrain" in last
        assert "Traceback" not in done.stderr
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_two_calls_in_one_process(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "out"), pytest.raises(FolderInUseError):
        evaluate("alfworld-quickstart", "expert", samples=1, limit=1, out=tmp_path / "out", progress=False)
