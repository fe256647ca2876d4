"""Second starts on the place of work that runs: they must be turned away, told who works there, and touch nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from turngym.envs.core.files import LOCK
from turngym.scripts.bench.faults.kills import (
    EVAL,
    QUIET,
    RECORDS,
    ROLLOUT,
    begun,
    index_words,
    train_argv,
    write_corpus,
)
from turngym.scripts.bench.faults.processes import Started, wait
from turngym.scripts.bench.faults.tally import Tally

BAD = ("both wrote", "touched", "traceback")
HELD = "is in use by process"


def doubles(folder: Path, tries: int) -> Iterator[Tally]:
    """`tries` second starts of each kind of work."""
    for name, attempt in KINDS.items():
        tally = Tally(what=f"started twice: {name}", bad=BAD)
        for trial in range(tries):
            place = folder / f"{name.replace(' ', '_')}_{trial}"
            place.mkdir(parents=True)
            tally.count(*attempt(place))
        yield tally


def _trace(place: Path) -> tuple[str, str]:
    out = place / "t.jsonl"
    return _twice(place, [*ROLLOUT, "--tasks", "400", "--out", str(out)], partial(begun, out), "--append")


def _evaluation(place: Path) -> tuple[str, str]:
    return _twice(place, [*EVAL, "--out", str(place / "eval")], partial(begun, place / "eval" / "trace.jsonl"))


def _index(place: Path) -> tuple[str, str]:
    words = index_words(write_corpus(place / "c.jsonl"), place / "index")
    return _twice(place, words, partial(begun, place / ".index.lock"))


def _training(place: Path) -> tuple[str, str]:
    return _twice(place, train_argv(place / "run"), partial(begun, place / "run" / LOCK), "--resume")


def _records(place: Path) -> tuple[str, str]:
    """In this process while another one writes."""
    from turngym.agents.proxy.config import ProxyError
    from turngym.agents.proxy.turn_records import Recorder

    words = [sys.executable, "-c", RECORDS, str(place)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=QUIET) as first:
        assert first.stdout is not None
        first.stdout.readline()
        try:
            Recorder(place).close()
        except ProxyError as error:
            return ("turned away", "") if HELD in str(error) else ("traceback", str(error))
        finally:
            first.kill()
    return "both wrote", ""


KINDS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "trace": _trace,
    "evaluation": _evaluation,
    "index": _index,
    "proxy records": _records,
    "training": _training,
}
"""Each starts in an empty folder and says what came of the second start."""


def _twice(place: Path, words: Sequence[str], ready: Callable[[], bool], *more: str) -> tuple[str, str]:
    """The second start, with `more` (what lets it go on with work that is there), while the first stands still."""
    first = Started(words)
    try:
        wait(ready, first)
        if not first.stop():
            return "had ended", "so nothing was started twice"
        before = _contents(place)
        second = Started([*words, *more]).end(600)
        after = _contents(place)
    finally:
        first.kill()
    if "Traceback" in second.stderr:
        return "traceback", second.stderr[-300:]
    if second.returncode != 2 or HELD not in second.stderr:
        return "both wrote", f"status {second.returncode}: {second.stderr[-300:]}"
    touched = sorted(str(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    return ("touched", ", ".join(touched)) if touched else ("turned away", "")


def _contents(place: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in place.rglob("*") if path.is_file()}
