"""How commands end: stopped by a signal, failed by the system, or asked for what is not there."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from turngym.core.errors import TurngymError
from turngym.core.trace import read_trace
from turngym.scripts import main as command
from turngym.scripts.main import VERBS, Group, exit_status, main, resume_hint, system_failure

TURNGYM = [sys.executable, "-m", "turngym"]
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}
STUDENT = Path(command.__file__).parents[1] / "agents" / "worlds" / "checkpoints" / "alfworld" / "student"


def deaf() -> None:
    """As a script's `command &` starts it, and a careless launcher."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def tiny_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


def run(*words: str, before: Callable[[], None] | None = None) -> subprocess.CompletedProcess[str]:
    # a child whose files may not grow would leave cut bytecode behind
    env = QUIET if before is None else {**QUIET, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run([*TURNGYM, *words], capture_output=True, text=True, env=env, timeout=120, preexec_fn=before)


def failed_in_one_line(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert words in done.stderr.splitlines()[-1]


def test_a_long_rollout_ends_on_sigterm_whatever_it_inherited(tmp_path: Path) -> None:
    out = tmp_path / "t.jsonl"
    words = ["rollout", "--agent", "expert", "--tasks", "2000", "--slots", "1", "--out", str(out)]
    with subprocess.Popen(
        [*TURNGYM, *words], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=QUIET, preexec_fn=deaf
    ) as process:
        try:
            for _ in range(1200):
                # the settings, then an episode
                if out.exists() and out.read_bytes().count(b"\n") > 1:
                    break
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == 143
    assert said.splitlines()[-1] == (
        f"turngym rollout: stopped; episodes that had ended are in {out}: --append plays the others"
    )
    episodes, problems = read_trace(out)
    assert episodes
    assert not problems


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        # while the command itself is imported: as soon as Python looks for its first module
        (
            "class Finder:\n"
            "    def find_spec(self, name, *more):\n"
            "        if name == 'turngym.scripts.main': os.kill(os.getpid(), SIGNAL)\n"
            "sys.meta_path.insert(0, Finder())",
            None,
            "turngym: stopped\n",
        ),
        # and when all is said, once more
        (
            "import atexit, turngym.scripts.main as verbs\n"
            "verbs.main = lambda: 3\n"
            "atexit.register(os.kill, os.getpid(), SIGNAL)",
            3,
            "",
        ),
    ],
    ids=["before", "after"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_either_end_is_no_traceback(number: int, code: str, status: int | None, said: str) -> None:
    program = f"import os, sys\nSIGNAL = {int(number)}\n{code}\nfrom turngym.scripts.command import command\ncommand()"
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, env=QUIET, timeout=60)
    assert (done.returncode, done.stderr) == (128 + number if status is None else status, said)


def test_resume_hint_is_only_said_where_it_is(tmp_path: Path) -> None:
    run_folder, trace = tmp_path / "run", tmp_path / "t.jsonl"
    assert resume_hint("turngym train", ["--out", str(run_folder)]) == "; there is no checkpoint to continue from"
    for name in ("step_000002", "step_000010"):
        (run_folder / "checkpoints" / name).mkdir(parents=True)
    assert resume_hint("turngym train", [f"--out={run_folder}"]) == "; continue from step_000010 with --resume"
    assert resume_hint("turngym rollout", []) == resume_hint("turngym eval", []) == "; without --out nothing is kept"
    assert resume_hint("turngym rollout", ["--out", str(trace)]) == "; no episode had ended"
    trace.touch()
    assert resume_hint("turngym rollout", ["--out", str(trace)]).startswith(f"; episodes that had ended are in {trace}")
    # another `rollout`
    assert resume_hint("turngym bench rollout", []) == resume_hint("turngym train", ["--out"]) == ""
    assert [exit_status(KeyboardInterrupt(*given)) for given in ((), (signal.SIGTERM,))] == [130, 143]


def test_failures_of_the_system_are_told_from_our_own_mistakes() -> None:
    assert system_failure(PermissionError(errno.EACCES, "Permission denied", "/x")) == "/x: Permission denied"
    # of a folder of the system, in which a file is gone when it is asked for
    assert system_failure(OSError(errno.EINVAL, "Invalid argument", "/x")) == "/x: Invalid argument"
    assert system_failure(OSError(errno.ENOSPC, "No space left on device", "/x")) == (
        "no room left on the disk for /x: make room and run it again"
    )
    assert system_failure(RuntimeError("I/O error: No space left on device (os error 28)")) is not None
    # what Path.resolve raises up to Python 3.12
    assert system_failure(RuntimeError("Symlink loop from '/x'")) == "Symlink loop from '/x'"
    missing = ModuleNotFoundError("No module named 'faiss'", name="faiss")
    assert system_failure(missing) == "this needs faiss: pip install 'turngym[dense]'"
    assert system_failure(ModuleNotFoundError("No module named 'x'", name="x")) is None
    assert system_failure(ValueError("disk")) is None
    assert system_failure(ConnectionResetError(errno.ECONNRESET, "reset")) is None


def test_a_system_failure_is_one_line_and_a_mistake_of_ours_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(error: Exception) -> Callable[..., int]:
        def main(argv: object) -> int:
            raise error

        return main

    monkeypatch.setattr("turngym.scripts.panel.main", fail(PermissionError(errno.EROFS, "Read-only file system", "/x")))
    assert command.main(["panel"]) == 2
    assert capsys.readouterr().err == "turngym panel: /x: Read-only file system\n"
    monkeypatch.setattr("turngym.scripts.panel.main", fail(ValueError("ours")))
    assert command.main(["panel"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("Traceback")
    assert said.endswith("ValueError: ours\n")


@pytest.mark.parametrize("words", [("panel", "show", "x" * 5000), ("no" * 2500,), ("trace", "print", "/x" * 2500)])
def test_a_word_without_end_is_a_line_still(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    first = capsys.readouterr().err.splitlines()[0]
    assert words[-1][:40] in first
    assert words[-1][:400] not in first


def test_a_working_folder_that_is_gone_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["study", "list"]) == 2
    assert capsys.readouterr().err.startswith("turngym study list: the working folder")


def test_an_address_with_a_password_says_where_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    for words, where in ((("panel", "show"), "an argument"), (("panel", "verify", "x", "--data"), "--data")):
        assert main([*words, "http://me:secret@host/"]) == 2
        said = capsys.readouterr().err
        assert f"{where} is" in said
        assert "secret" not in said


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            ("eval", "--panel", "alfworld-quickstart", "--agent", "expert", "--limit", "3", "--out", "full"),
            marks=pytest.mark.long,
        ),
        ("index", "build", "--corpus", "c.jsonl", "--out", "full"),
    ],
)
def test_a_full_disk_is_one_line(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [f'{{"id": "{row}", "contents": "word{row} {"x" * 40}"}}\n' for row in range(600)]
    Path("c.jsonl").write_text("".join(rows))
    failed_in_one_line(run(*words, before=tiny_files), "no room left on the disk")


@pytest.mark.long
def test_an_unknown_argument_of_an_environment_is_one_line() -> None:
    done = run("rollout", "--agent", "expert", "--tasks", "1", "--env-kwargs", '{"spilt": "generated"}')
    failed_in_one_line(done, "turngym/ALFWorld-v0 takes no argument 'spilt'. Did you mean 'split'")


def test_a_model_without_torch_names_the_extra() -> None:
    code = f"""if True:
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in ("torch", "transformers"):
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
        sys.meta_path.insert(0, Missing())
        from turngym.scripts.main import main
        sys.exit(main(["rollout", "--agent", {str("model:" + str(STUDENT))!r}, "--tasks", "1"]))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=QUIET, timeout=120)
    failed_in_one_line(done, "pip install 'turngym[train]'")


def test_output_that_nobody_reads_any_more_is_no_failure(tmp_path: Path) -> None:
    assert run("rollout", "--agent", "expert", "--tasks", "2", "--out", str(tmp_path / "t.jsonl")).returncode == 0
    shell = f"{sys.executable} -m turngym trace print {' '.join([str(tmp_path / 't.jsonl')] * 400)} --turns | head -1"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env=QUIET, timeout=120)
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("rollout", "--help")])
def test_short_output_that_nobody_reads_is_no_failure_either(words: tuple[str, ...]) -> None:
    """It fits into a buffer, so the pipe is found broken only at the end."""
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "turngym", *words], stdout=write, stderr=subprocess.PIPE, env=QUIET, timeout=120
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_is_no_failure(closed: str, tmp_path: Path) -> None:
    code = (
        "from turngym.scripts.main import main\nstatus = main(['--version'])\n"
        # no file gets the number of a stream, into which children write
        "with open('number', 'w') as file: print(status, file.fileno() > 2, file=file)"
    )
    words = ["bash", "-c", f'"$@" {closed}', "x", sys.executable, "-c", code]
    run = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert (run.returncode, run.stderr) == (0, "")
    assert (tmp_path / "number").read_text() == "0 True\n"


def test_metrics_that_are_no_text_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "kind": "train"}\n\xff\xfe{}\n{"step": 2}\n')
    from turngym.trainers.metrics import read_metrics

    with pytest.raises(TurngymError, match=r"metrics\.jsonl, line 2 is no JSON"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    "row", ['{"loss": 1.5, "step": 1}', '{"step": 1, "kind": "train", "tokens": "12"}', '{"kind": "train"}', "null"]
)
def test_metrics_of_another_program_are_one_line(row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text(row + "\n")
    assert main(["report", str(tmp_path)]) == 2
    assert f"{tmp_path / 'metrics.jsonl'}, line 1" in capsys.readouterr().err


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_torchrun_divides_training_alone(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the verb's module is loaded; process 0 says it, and the others say nothing."""
    begun: list[str] = []
    monkeypatch.setattr(command.importlib, "import_module", lambda name: begun.append(name) or NOTHING)
    monkeypatch.setattr(command, "LEAD", 0.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    before = signal.getsignal(signal.SIGTERM)
    words, module = [verb], VERBS[verb]
    if isinstance(module, Group):
        below, module = next(iter(module.verbs.items()))
        words.append(below)
    try:
        status = main([*words, "--x"])
        said = capsys.readouterr().err
        if verb == "train":
            assert (status, begun, said) == (0, ["turngym.scripts.train"], "")
            return
        assert (status, begun) == (2, [])
        (line,) = said.splitlines()
        assert line.startswith(f"turngym {' '.join(words)}: torchrun has started 2 processes, but only `turngym train`")
        monkeypatch.setenv("RANK", "1")
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert (ended.value.code, capsys.readouterr().err, begun) == (2, "", [])
        # one process is no division
        monkeypatch.setenv("WORLD_SIZE", "1")
        assert (main(words), begun) == (0, [module])
    finally:
        signal.signal(signal.SIGTERM, before)


NOTHING = types.SimpleNamespace(main=lambda argv: 0)
