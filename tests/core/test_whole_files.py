"""Files on disks that are full, without locks, or changed by others: whole, guarded, or said to be neither."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from small_disk import small_disk

from turngym.core.files import FolderInUseError, locked_file, locked_folder, new_folder
from turngym.core.trace import TraceWriter, read_trace
from turngym.core.whole_files import atomic_write, written_whole
from turngym.scripts.main import main


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.jsonl"
    words = ["--split", "generated", "--agent", "random", "--tasks", "3", "--max-turns", "20", "--out", str(path)]
    assert main(["rollout", *words]) == 0
    return path


@pytest.mark.parametrize("verb", ["filter", "parquet"])
def test_a_full_disk_leaves_no_partial_file(trace: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(trace.parent.iterdir())
    out = trace.parent / "out"
    capsys.readouterr()
    with small_disk(3000):
        assert main(["trace", verb, str(trace), "--out", str(out)]) == 2
    assert "out cannot be written: " in capsys.readouterr().err
    assert set(trace.parent.iterdir()) == before
    assert main(["trace", verb, str(trace), "--out", str(out)]) == 0
    if verb == "filter":
        assert len(read_trace(out)[0]) == 3
        assert out.read_bytes() == trace.read_bytes()


def test_a_new_folder_is_whole_or_not_there(tmp_path: Path) -> None:
    left = tmp_path / ".x.unfinished" / "left by a killed process"
    left.mkdir(parents=True)

    def broken_off() -> None:
        with new_folder(tmp_path / "x") as scratch:
            (scratch / "a").touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert list(tmp_path.iterdir()) == []
    left.mkdir(parents=True)
    with new_folder(tmp_path / "x") as scratch:
        (scratch / "a").touch()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "x"]


def test_what_is_written_replaces_a_file_at_the_end_or_never(tmp_path: Path) -> None:
    path = tmp_path / "a" / "x.json"
    path.parent.mkdir()
    path.write_text("old")

    def broken_off() -> None:
        with written_whole(path) as scratch:
            scratch.write_text("half")
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        broken_off()
    assert [(found.name, found.read_text()) for found in path.parent.iterdir()] == [("x.json", "old")]
    with atomic_write(path) as file:
        file.write("new")
    assert [(found.name, found.read_text()) for found in path.parent.iterdir()] == [("x.json", "new")]


def test_two_that_write_one_file_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with atomic_write(path) as first:
        first.write("first")
        with atomic_write(path) as second:
            second.write("the second")
        assert path.read_text() == "the second"
    assert [(found.name, found.read_text()) for found in tmp_path.iterdir()] == [("x.json", "first")]


def test_no_clock_takes_a_file_from_who_is_writing_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    with written_whole(path) as scratch:
        scratch.write_text("slow")
        os.utime(scratch, (0, 0))
        with atomic_write(path) as other:
            other.write("other")
    assert path.read_text() == "slow"


def test_without_locks_a_marker_is_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = locked_folder(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"cannot be locked here .*\.turngym\.lock\.held"):
        held.__enter__()
    assert (tmp_path / "run" / ".turngym.lock.held").is_file()
    second = locked_folder(tmp_path / "run")
    with warnings.catch_warnings(action="ignore"), pytest.raises(FolderInUseError, match=f"process {os.getpid()} on"):
        second.__enter__()
    held.__exit__(None, None, None)
    assert not (tmp_path / "run").exists()
    # the marker of a killed process is no lock
    path = tmp_path / "t.jsonl"
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    host = os.uname().nodename
    (tmp_path / ".t.jsonl.lock.held").write_text(f"{gone.pid}\n{host}\n")
    with warnings.catch_warnings(action="ignore"), locked_file(path), TraceWriter(path) as writer:
        assert writer.path == path
    assert not list(tmp_path.glob(".t.jsonl*"))
