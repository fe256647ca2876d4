"""What macOS lacks is done without: commands with a Python that has no /proc, no fork and none of Linux's own calls.

It is an emulation: `sitecustomize.py` takes away what only Linux has, in the command and in all processes that it
starts. The system below it stays Linux's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from late import late

LACKS = """
import builtins, errno, io, os, select, sys

for module, names in {
    os: "fork forkpty sched_getaffinity sched_setaffinity posix_fallocate posix_fadvise memfd_create pidfd_open "
        "eventfd splice copy_file_range setresuid O_TMPFILE O_PATH getrandom",
    select: "epoll",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)


def without(call):
    def checked(path, *more, **named):
        text = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        if text.split("/")[:2] == ["", "proc"] or text.startswith("/dev/shm"):
            raise FileNotFoundError(errno.ENOENT, "macOS has none", text)
        return call(path, *more, **named)
    return checked


for module, names in {os: "stat lstat open listdir scandir access statvfs readlink", io: "open"}.items():
    for name in names.split():
        setattr(module, name, without(getattr(module, name)))
builtins.open = io.open
"""


@pytest.fixture
def mac(tmp_path: Path) -> dict[str, str]:
    """The environment of a command, and of its children."""
    folder = tmp_path / "mac"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(LACKS, encoding="utf-8")
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}


def run(mac: dict[str, str], folder: Path, *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], env=mac, cwd=folder, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_emulation_takes_away_what_it_says(mac: dict[str, str], tmp_path: Path) -> None:
    code = "import os; print(os.path.exists('/proc'), hasattr(os, 'fork'), os.path.exists('/usr'))"
    assert run(mac, tmp_path, "-c", code).split() == ["False", "False", "True"]


@pytest.mark.long
@pytest.mark.parametrize(
    "panel",
    late(
        [f"{name}-quickstart" for name in ("alfworld", "webshop", "search")],
        "alfworld-quickstart",
        mark=pytest.mark.nightly,
    ),
)
def test_an_evaluation_is_played_in_this_process_and_in_others(panel: str, mac: dict[str, str], tmp_path: Path) -> None:
    words = ["-m", "turngym", "eval", "--panel", panel, "--limit", "2", "--samples", "1"]
    alone = run(mac, tmp_path, *words, "--workers", "0", "--out", "alone")
    others = run(mac, tmp_path, *words, "--workers", "2", "--out", "others")
    assert re.search(r"errors +│ +0 │", alone)
    assert alone == others


@pytest.mark.long
@pytest.mark.skipif(find_spec("torch") is None, reason="needs turngym[train]")
def test_a_model_is_trained_and_played(mac: dict[str, str], tmp_path: Path) -> None:
    from turngym.agents import load_world

    student, teacher = (str(load_world("alfworld").checkpoint(role)) for role in ("student", "teacher"))
    words = ["--env", "turngym/ALFWorld-v0", "--split", "generated", "--max-turns", "3", "--steps", "1"]
    words += ["--threads", "1", "--episodes", "2", "--max-new-tokens", "8", "--eval-every", "0", "--out", "run"]
    run(mac, tmp_path, "-m", "turngym", "train", "opd", "--student", student, "--teacher", teacher, *words)
    played = ["--agent", f"model:{tmp_path}/run/checkpoints/step_000001/model", "--limit", "2", "--samples", "1"]
    played += ["--max-turns", "2", "--panel", "alfworld-quickstart", "--threads", "1"]
    assert "errors" in run(mac, tmp_path, "-m", "turngym", "eval", *played)


@pytest.mark.long
@pytest.mark.skipif(find_spec("torch") is None, reason="needs turngym[train]")
def test_weights_are_shared_through_a_file_where_there_is_no_shared_memory(mac: dict[str, str], tmp_path: Path) -> None:
    code = """
import os, resource, torch
from turngym.agents.executor.engine_process import EngineError, _new_file, share_parameters
model = torch.nn.Linear(300, 300)
before = model.weight.detach().clone()
path = share_parameters(model)
assert str(path).startswith(os.environ["TMPDIR"]), path
assert path.stat().st_blocks * 512 >= 300 * 300 * 4, "a file with holes"
assert torch.equal(model.weight, before)
path.unlink()
# no room: an error that says so, and no file
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    _new_file(10_000_000)
except EngineError as error:
    assert "no room for the weights" in str(error), error
else:
    raise SystemExit("a file that has no room was made")
assert not os.listdir(os.environ["TMPDIR"])
"""
    (tmp_path / "t").mkdir()
    run({**mac, "TMPDIR": str(tmp_path / "t")}, tmp_path, "-c", code)


def test_a_machine_that_does_not_say_how_much_memory_is_free_refuses_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from turngym.agents import models

    monkeypatch.setattr(Path, "is_file", lambda path: False)
    assert models.free_bytes() == float("inf")
