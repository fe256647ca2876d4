"""Children of any program: they get what they are sent, never run the program again, and compute with few threads."""

from __future__ import annotations

import ast
import os
import signal
import subprocess
import sys
import threading
import time
import zipapp
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from import_graph import ROOMS

from turngym.core import child_process
from turngym.core.child_process import ChildProcess
from turngym.core.cpu_cores import threads_each

ROOT = Path(__file__).parents[2]
PROGRAM = """
from turngym.core.child_process import ChildProcess
print("RUNS", flush=True)

class Mine:
    def __init__(self, value):
        self.value = value

def doubled(pipe, mine):
    pipe.send(["doubled", type(mine).__name__, 2 * mine.value])

child = ChildProcess(doubled, Mine(21), name="child", threads=1)
print(child.receive(), flush=True)
child.end(5.0)
"""
NOTEBOOK = "import __main__\n__main__.__dict__.pop('__file__', None)\n__main__.__spec__ = None\n" + PROGRAM
"""What a kernel's main module looks like: it has no file."""


def run(*words: str, text: str | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, input=text, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


@pytest.mark.parametrize("kind", ["file", "module", "archive", "argument", "input", "notebook"])
def test_a_program_is_not_run_again_and_what_it_defines_arrives(kind: str, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    for path in (tmp_path / "program.py", tmp_path / "pkg" / "__main__.py"):
        path.write_text(PROGRAM, encoding="utf-8")
    zipapp.create_archive(tmp_path / "pkg", tmp_path / "app.pyz")
    words, text = {
        "file": (["program.py"], None),
        "module": (["-m", "pkg"], None),
        "archive": (["app.pyz"], None),
        "argument": (["-c", PROGRAM], None),
        "input": (["-"], PROGRAM),
        "notebook": (["-c", NOTEBOOK], None),
    }[kind]
    done = run(*words, text=text, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "RUNS\n['doubled', 'Mine', 42]\n"


def test_modules_are_found_where_the_program_finds_them_and_not_in_the_working_folder(tmp_path: Path) -> None:
    """A file there that is called like a module of Python would take its place."""
    (tmp_path / "beside.py").write_text("def name(pipe):\n    pipe.send(__name__)\n")
    (tmp_path / "program.py").write_text(PROGRAM.replace("doubled, Mine(21)", "beside.name").replace("42", "0"))
    program = (tmp_path / "program.py").read_text()
    (tmp_path / "program.py").write_text("import beside\n" + program)
    other = tmp_path / "elsewhere"
    other.mkdir()
    for name in ("pickle", "signal", "random"):
        (other / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    done = run("../program.py", cwd=other)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "RUNS\nbeside\n")


THREADS = """if True:
    import os
    os.environ["OMP_NUM_THREADS"] = "7"
    import torch
    torch.set_num_threads(5)

    def count(pipe):
        names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
        pipe.send([torch.get_num_threads(), [os.environ.get(name) for name in names]])
"""


@pytest.mark.long
def test_the_number_of_threads_is_said_to_torch_itself(tmp_path: Path) -> None:
    """The function's module imports torch, and sets another number, before anything else runs in the child."""
    (tmp_path / "imports_torch.py").write_text(THREADS)
    program = "import imports_torch\n" + PROGRAM.replace("doubled, Mine(21)", "imports_torch.count")
    (tmp_path / "program.py").write_text(program.replace("threads=1", "threads=2"))
    done = run("program.py", cwd=tmp_path)
    assert done.stdout == "RUNS\n[2, ['7', '2', '2', 'true']]\n", done.stderr


def test_a_share_of_the_cores_but_no_more_threads_than_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngym.core.cpu_cores.available_cores", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_each(count) for count in (0, 1, 3, 9)] == [8, 8, 2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [threads_each(count) for count in (1, 4)] == [3, 2]


def echo(pipe: Connection) -> None:
    while True:
        pipe.send(pipe.recv())


def test_what_cannot_be_sent_is_said_before_anything_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *words, **more: pytest.fail("a process was started"))
    with pytest.raises(TypeError, match="cannot pickle"):
        ChildProcess(echo, threading.Lock(), name="child", threads=1)


def test_what_cannot_be_read_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "here_only.py").write_text("def work(pipe):\n    pass\n")
    program = "import here_only, sys\nsys.path.pop(0)\n" + PROGRAM.replace("doubled, Mine(21)", "here_only.work")
    (tmp_path / "program.py").write_text(program.replace("print(child.receive(), flush=True)", "print(child.death())"))
    done = run("program.py", cwd=tmp_path)
    assert done.stderr == "child cannot read what it was sent: ModuleNotFoundError: No module named 'here_only'\n"
    assert done.stdout.endswith("ended with status 1\n")


def test_a_child_ends_with_a_program_that_forgets_it(tmp_path: Path) -> None:
    program = "import time\n" + PROGRAM.replace("pipe.send(", "import os; pipe.send(os.getpid()); time.sleep(99); (")
    done = run("-c", program.replace("child.end(5.0)", ""))
    pid = int(done.stdout.split()[-1])
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def late(pipe: Connection, seconds: float) -> None:
    time.sleep(seconds)
    pipe.send("late")


def half(pipe: Connection) -> None:
    os.write(pipe.fileno(), b"\0\0\1\0half of an answer")
    time.sleep(99)


@pytest.mark.parametrize(
    "happens",
    [
        # Ctrl-C as soon as the child is there
        "real = subprocess.Popen\ndef popen(*a, **k): real(*a, **k); raise KeyboardInterrupt\nsubprocess.Popen = popen",
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')",
    ],
    ids=["interrupted", "no working folder"],
)
def test_a_start_that_fails_leaves_no_child_that_complains(happens: str, tmp_path: Path) -> None:
    code = (
        f"import os, subprocess\nfrom turngym.core.child_process import ChildProcess\n{happens}\n"
        "try: ChildProcess(print, name='x', threads=1)\n"
        "except (KeyboardInterrupt, FileNotFoundError) as error: print(type(error).__name__)"
    )
    words = [sys.executable, "-P", "-c", code]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("KeyboardInterrupt\n", "FileNotFoundError\n")


def test_a_child_that_computes_is_waited_for_and_one_that_was_stopped_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "LOOK", 0.1)
    monkeypatch.setattr(child_process, "STANDS", 0.5)
    monkeypatch.setattr(child_process, "ENDING_SECONDS", 0.1)
    child = ChildProcess(late, 2.0, name="child", threads=1)
    assert child.receive() == "late"
    with pytest.raises(EOFError):
        child.receive()
    child.end(5.0)
    # a stop that is shorter counts for nothing
    child = ChildProcess(late, 2.0, name="child", threads=1)
    time.sleep(1.0)
    os.kill(child.pid, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (child.pid, signal.SIGCONT)).start()
    assert child.receive() == "late"
    child.end(5.0)
    child = ChildProcess(late, 99.0, name="child", threads=1)
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError, match=r"child has been stopped for 0\.5 s"):
        child.receive()
    assert child.death() == f"process {child.pid} stood still and was ended"
    assert not child_process.is_stopped(child.pid)


def test_no_send_and_no_half_of_an_answer_is_waited_for() -> None:
    child = ChildProcess(half, name="child", threads=1, patience=0.5)
    with pytest.raises(BlockingIOError):
        child.receive()
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(BlockingIOError):
        child.pipe.send_bytes(bytes(2**22))
    child.end()
    # more than a pipe holds, for a child that is stopped at once
    program = "from turngym.core import child_process as c\nimport os, signal, time\n"
    program += "popen = c.subprocess.Popen\n"
    program += "def stopped(*a, **k):\n    p = popen(*a, **k)\n    p.send_signal(signal.SIGSTOP)\n    return p\n"
    program += "c.subprocess.Popen = stopped\n"
    program += (
        "child = c.ChildProcess(print, bytes(2**22), name='child', threads=1, patience=0.5)\nprint(child.death())"
    )
    assert run("-c", program).stdout.endswith("was ended by SIGKILL\n")


COMMANDS = {
    "agents/server_process.py": "SGLang",
    "core/provenance.py": "git",
    "scripts/bootstrap.py": "pip and the tests",
    "scripts/jobs.py": "turngym train and turngym eval",
    "scripts/examples/turngym_scienceworld/turngym_scienceworld/simulator.py": "the end of the simulator",
}
"""Files that start programs, which are given words and no objects."""


def test_processes_are_started_in_one_place() -> None:
    found: dict[str, set[str]] = {"multiprocessing": set(), "subprocess": set(), "concurrent.futures": set()}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if any(name in text for name in found) else ():
                names = [one.name for one in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
                module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
                for name in {*names, module} & set(found):
                    # connections, threads and their futures start no process
                    if name == "subprocess" or {"get_context", "Process", "spawn", "ProcessPoolExecutor"} & set(names):
                        found[name].add(str(path.relative_to(ROOT)))
    assert found["multiprocessing"] == {"core/child_process.py"}
    assert found["subprocess"] == {"core/child_process.py", *COMMANDS}
    assert found["concurrent.futures"] == set()
