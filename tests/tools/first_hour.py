"""A stranger's first hour with a real model: runs every command below and prints what it printed and what it cost.

python tests/tools/first_hour.py [--work FOLDER] [--page docs/first_hour.md]

The commands are those that someone would type in a clone after `python3 scripts/bootstrap.py smollm2`; they run in a
temporary folder with links to the clone's `models` and `agents`. `--work FOLDER` keeps what they leave and what they
printed, and another call runs only commands that are not there yet. It ends with one line and status 1 at the first
command that fails or prints a traceback. `--page` also writes the page of the documentation.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODEL = "models/smollm2"
WORLD = "agents/worlds/checkpoints/alfworld-smollm2"
HAND = "--reading lenient --show-admissible on"
FEW = "--limit 2 --no-spread --samples 1 --max-new-tokens 32 --threads 1"
SHORT = "--steps 2 --episodes 2 --threads 1 --lora.rank 8 --optimizer.lr 1e-3"
GAME = """--env turngym/ALFWorld-v0 --split generated --env-kwargs '{"config": "small", "on_invalid": "noop"}'"""
LONGEST, WIDTH = 5, 100
"""Lines of one command's output that the page shows, the rest is counted; longer lines are wrapped."""


@dataclass(frozen=True, slots=True)
class Step:
    title: str
    text: str
    command: str


STEPS = (
    Step(
        "What is there to play?",
        "Three environments come with generated tasks. A panel is a fixed list of them, each with its hash.",
        "turngym panel list",
    ),
    Step(
        "The model as it is",
        "Two household games of three turns, to see whether the model speaks the environment's language. It does not: "
        "nothing taught it to write its action in tags. The hints under the table say what to try.",
        f"turngym eval --panel alfworld-quickstart --agent model:{MODEL} {FEW} --max-turns 3 --out results/cold",
    ),
    Step(
        "Examples from the expert",
        "The first help is to show how it is done: two games that the environment's expert wins.",
        "turngym rollout --env turngym/ALFWorld-v0 --split generated --agent expert --tasks 2 --out shots.jsonl",
    ),
    Step(
        "The same with a hand",
        "Examples, the list of possible actions, and a lenient reading. Each is part of the result's identity.",
        f"turngym eval --panel alfworld-quickstart --agent model:{MODEL} {FEW} --max-turns 3 {HAND} "
        "--examples shots.jsonl --out results/hand",
    ),
    Step(
        "The shop",
        "A preset is a published set-up under a name. This one lists what can be clicked. `--panel search-quickstart` "
        "asks questions.",
        f"turngym eval --preset verl-agent --panel webshop-quickstart --agent model:{MODEL} {FEW} --max-turns 3 "
        "--reading lenient --out results/shop",
    ),
    Step(
        "Read an episode",
        "Every evaluation keeps its episodes, turn by turn.",
        "turngym trace print results/hand/trace.jsonl --limit 1 --turns",
    ),
    Step(
        "Read a prompt",
        "What the model read at a turn, letter by letter.",
        "turngym trace print results/cold/trace.jsonl --limit 1 --prompt",
    ),
    Step(
        "Teach it yourself",
        "Two steps of fine-tuning on demonstrations: enough to see that it runs, and what a step costs.",
        f"turngym train sft --student {MODEL} {GAME} --max-turns 6 {SHORT} --eval-every 0 --out runs/sft",
    ),
    Step(
        "Distill a teacher",
        "Two steps of on-policy distillation: the student plays, the teacher says what it would have written. The "
        "student is this model after 192 demonstrations, the teacher after 1,280; both come along, adapters of 4.8 MB. "
        "Two games of the panel are played before and after.",
        f"turngym train opd --student {WORLD}/student --teacher {WORLD}/teacher {GAME} --max-turns 6 {SHORT} "
        "--micro-tokens 1024 --head-chunk 256 --panel alfworld-quickstart --eval-every 2 --eval-limit 2 "
        "--eval-samples 1 --out runs/opd",
    ),
    Step(
        "The report",
        "Tables, figures and a page to open in a browser.",
        "turngym report sft=runs/sft opd=runs/opd --out results/report",
    ),
)


@dataclass(frozen=True, slots=True)
class Ran:
    step: Step
    status: int
    output: str
    seconds: float
    cpu_seconds: float
    peak_mb: float

    @property
    def cost(self) -> str:
        return f"{self.seconds:.0f} s, {self.cpu_seconds:.0f} CPU s, {self.peak_mb:,.0f} MB at most"

    @property
    def problem(self) -> str | None:
        """What is wrong with it, in one line."""
        if self.status:
            return f"`{self.step.command}` ended with status {self.status}"
        if "Traceback (most recent call last)" in self.output:
            return f"`{self.step.command}` printed a traceback"
        return None


def run(step: Step, folder: Path) -> Ran:
    """Runs a step's command as in a terminal of 80 columns. Its output goes to standard output, too, as it comes."""
    words = [sys.executable, "-m", "turngym.scripts", *shlex.split(step.command)[1:]]
    began = time.monotonic()
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={**os.environ, "COLUMNS": "80", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
    )
    lines: list[str] = []

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.replace(f"{folder}/", ""))
            print(lines[-1], end="", flush=True)

    reader = threading.Thread(target=read)
    reader.start()
    # wait4 tells the time and memory of this command and of what it started, which RUSAGE_CHILDREN mixes with others
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    reader.join()
    cpu, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1000
    return Ran(step, process.returncode, "".join(lines), time.monotonic() - began, cpu, peak)


def page(ran: list[Ran]) -> Iterator[str]:
    """The page's lines."""
    total = sum(one.cpu_seconds for one in ran)
    yield "# The first hour with a real model"
    yield ""
    yield "<!-- written by tests/tools/first_hour.py --page; do not edit -->"
    yield ""
    yield from textwrap.wrap(
        "What a newcomer types, and what this machine answered: SmolLM2-135M-Instruct on one thread of a CPU, in all "
        f"{total / 60:.0f} minutes of CPU time. `python3 scripts/bootstrap.py smollm2` makes `models/smollm2` and runs "
        "these commands as a test. Two games and two steps show how things work, not how good a model is; "
        "[a real language model](research/real_model.md) has the figures.",
        120,
    )
    for one in ran:
        yield from ("", f"## {one.step.title}", "", *textwrap.wrap(one.step.text, 120), "")
        yield from ("<!-- run by: tests/tools/first_hour.py -->", "```bash", one.step.command, "```", "")
        lines = [part for line in one.output.rstrip().splitlines() for part in textwrap.wrap(line, WIDTH) or [""]]
        more = [f"... ({len(lines) - LONGEST} more lines)"] if len(lines) > LONGEST + 1 else []
        yield from ("```text", *(lines[:LONGEST] if more else lines), *more, "```", "", f"*{one.cost}*")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, help="folder that keeps everything, and in which a later call goes on")
    parser.add_argument("--page", type=Path, help="write this page from what was printed")
    options = parser.parse_args()
    if not (ROOT / MODEL).is_dir():
        print(f"first_hour: no {MODEL} here: `python3 scripts/bootstrap.py smollm2` makes it", file=sys.stderr)
        return 1
    ran: list[Ran] = []
    with tempfile.TemporaryDirectory(prefix="turngym-hour-") as scratch:
        place = (options.work or Path(scratch)).resolve()
        for name in ("models", "agents"):
            place.mkdir(parents=True, exist_ok=True)
            (place / name).unlink(missing_ok=True)
            (place / name).symlink_to(ROOT / name)
        for step in STEPS:
            print(f"\n# {step.title}\n$ {step.command}", flush=True)
            kept = place / f"{step.title}.json"
            done = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
            if done.get("command") == step.command:
                print("(as before)", flush=True)
                ran.append(Ran(step, **done["found"]))
                continue
            ran.append(run(step, place))
            print(f"[{ran[-1].cost}]", flush=True)
            if ran[-1].problem is not None:
                print(f"first_hour: {ran[-1].problem}", file=sys.stderr)
                return 1
            found = {name: getattr(ran[-1], name) for name in ("status", "output", "seconds", "cpu_seconds", "peak_mb")}
            kept.write_text(json.dumps({"command": step.command, "found": found}), encoding="utf-8")
    cpu = sum(one.cpu_seconds for one in ran)
    print(f"\nfirst_hour: {len(ran)} commands, {sum(one.seconds for one in ran):.0f} s, {cpu:.0f} CPU s, ", end="")
    print(f"{max(one.peak_mb for one in ran):,.0f} MB at most")
    if options.page is not None:
        options.page.write_text("\n".join(page(ran)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
