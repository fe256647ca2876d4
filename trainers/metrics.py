"""The metrics of a run: one JSON line per training step or evaluation, handed on to what shows them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from turngym.core.disk_space import at_once
from turngym.core.errors import TurngymError
from turngym.core.line_file import LineFile
from turngym.core.redaction import brief, excerpt, without_keys
from turngym.core.setting import kind_of
from turngym.core.user_files import json_object, json_of, library_path
from turngym.core.whole_files import written_whole
from turngym.trainers.run_config import Tensorboard, Trackio, Wandb

TITLES = {"wandb": "Weights & Biases", "trackio": "trackio"}


@dataclass(frozen=True, slots=True)
class Sink:
    """Shows numbers of a run somewhere.

    What it shows after a kill and `--resume` is what metrics.jsonl has, each step once. Some sinks can be cleared when
    a run is resumed, and are given the rows again. Others only ever grow (`grows`), and count their steps: those get a
    row once a checkpoint holds it, so that no resumed run writes it twice.
    """

    write: Callable[[Mapping[str, Any]], object]
    """One row: `step`, `kind`, numbers, lists of numbers."""
    close: Callable[[], object]
    again: Callable[[Mapping[str, Any]], bool] = lambda row: False
    """Whether a row of the file must be written again when the run is resumed."""
    grows: bool = False


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a row, without its step; each is of one row of a step."""
    # lists (numbers by turn) have no place in a curve; metrics.jsonl keeps them, and the time of an evaluation
    left_out = {"step"} if row["kind"] == "train" else {"step", "time/train_s"}
    return {
        name: value
        for name, value in row.items()
        if name not in left_out and isinstance(value, int | float) and math.isfinite(value)
    }


def tensorboard_sink(folder: Path, step: int | None) -> Sink | None:
    """Scalars in `folder/tensorboard`; None where tensorboard is missing.

    `step` is that of the checkpoint from which a run goes on: what an earlier process wrote from there on is hidden, as
    an evaluation after that step may have been. None for a run that begins.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    events = folder / "tensorboard"
    events.mkdir(exist_ok=True)
    # its files are read in the order of their names, which begin with the second: one of this second might come later
    if any(file.name.split(".")[3] == f"{int(time.time()):010d}" for file in events.glob("events.out.tfevents.*.*")):
        time.sleep(1.0)
    writer = SummaryWriter(str(library_path(events)), purge_step=step)

    def write(row: Mapping[str, Any]) -> None:
        for name, value in scalars(row).items():
            writer.add_scalar(name, value, row["step"])
        # else a killed process takes up to ten rows with it
        writer.flush()

    return Sink(write, writer.close, lambda row: step is not None and row["step"] >= step)


def check_tracker(tracker: Tensorboard | Wandb | Trackio | None) -> None:
    """Raises TurngymError for a package that is not installed, before anything is written."""
    name = str(kind_of(type(tracker)))
    if name in TITLES and importlib.util.find_spec(name) is None:
        raise TurngymError(f"{TITLES[name]} is not installed: pip install 'turngym[{name}]'")


def wandb_sink(folder: Path, project: str, run_id: str) -> Sink:
    """A run of Weights & Biases, named after `folder`."""
    wandb = importlib.import_module("wandb")
    where = folder.resolve()
    path = library_path(where)
    run = wandb.init(project=project, name=shown(where.name), id=run_id, dir=str(path), resume="allow")
    offline = bool(getattr(run, "offline", False))
    if offline:
        # every process of a run writes a folder of its own, and the newest has all rows
        for old in (path / "wandb").glob(f"offline-run-*-{run_id}"):
            if old.resolve() != Path(run.dir).resolve().parent:
                shutil.rmtree(old)
    return Sink(lambda row: run.log(scalars(row), step=row["step"]), run.finish, lambda row: offline, not offline)


def trackio_sink(folder: Path, project: str, run_id: str) -> Sink:
    """A run of trackio, named after `folder` and `run_id`, since trackio knows a run by its name alone."""
    trackio = importlib.import_module("trackio")
    name = f"{shown(folder.resolve().name)}-{run_id[:6]}"
    remote = any(os.environ.get(variable) for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"))
    if not remote:
        importlib.import_module("trackio.sqlite_storage").SQLiteStorage.delete_run(project, name)
    run = trackio.init(project=project, name=name, resume="allow")
    return Sink(lambda row: run.log(scalars(row), step=row["step"]), run.finish, lambda row: not remote, remote)


METRICS_FILE = "metrics.jsonl"
KINDS = ("train", "eval")
Row = Mapping[str, Any]


TRACKED = "trackers.json"
"""What trackers know of the run in this folder: its id, and how many rows those that only grow were given."""


@dataclass(slots=True)
class MetricsLog:
    """Appends rows to `folder/metrics.jsonl`, flushed line by line, and hands them to the sink that `open` opens."""

    folder: Path
    tracker: Tensorboard | Wandb | Trackio | None = field(default_factory=Tensorboard)
    """What shows them."""
    writing: Callable[[Callable[[], Any]], Any] = at_once
    """Calls what appends a row, as `Trainer.writing`."""
    _sink: Sink | None = field(default=None, init=False)
    _waiting: deque[Row] = field(default_factory=deque, init=False)
    """Rows that a sink which only grows has not been given yet."""
    _tracked: dict[str, Any] = field(default_factory=dict, init=False)

    def truncate(self, step: int, evaluated: int) -> None:
        """Drop what a killed run wrote after its last checkpoint, so that a resumed run doubles no row.

        Kept are training rows up to `step` and evaluations up to `evaluated`, the last ones that the checkpoint knows.
        Says how many training rows are missing: a disk may have lost them.
        """
        path, last = self.folder / METRICS_FILE, {"train": step, "eval": evaluated}
        trained = 0
        if path.exists():
            # renamed when complete: a run killed here must not lose the rows that it had
            scratch = path.with_suffix(".writing")
            with scratch.open("w", encoding="utf-8") as file:
                for row in iter_metrics(self.folder):
                    if row["step"] <= last[row["kind"]]:
                        trained += row["kind"] == "train"
                        file.write(_line(row))
            os.replace(scratch, path)
        if trained < step:
            print(
                f"{path} has lost {step - trained} of {step} training rows; what it shows lacks them", file=sys.stderr
            )

    def open(self, step: int) -> None:
        """Start writing after `step`; sinks then show what the file has, whatever an earlier process gave them."""
        begun = (self.folder / METRICS_FILE).exists()
        self._sink = self._opened(step if begun else None)
        if self._sink is None:
            return
        for number, row in enumerate(iter_metrics(self.folder) if begun else ()):
            if self._sink.again(row):
                self._sink.write(row)
            elif self._sink.grows and number >= self._tracked.get(self._name, 0):
                self._waiting.append(row)

    @property
    def _name(self) -> str:
        return str(kind_of(type(self.tracker)))

    def _opened(self, step: int | None) -> Sink | None:
        if self.tracker is None:
            return None
        if isinstance(self.tracker, Tensorboard):
            return tensorboard_sink(self.folder, step)
        path = self.folder / TRACKED
        self._tracked = json_object(path, TurngymError) if path.exists() else {}
        # of a run and not of its folder, in which there may have been another one
        self._tracked.setdefault("id", secrets.token_hex(8))
        self._note()
        opened = wandb_sink if isinstance(self.tracker, Wandb) else trackio_sink
        return opened(self.folder, self.tracker.project, self._tracked["id"])

    def write(self, row: Row) -> None:
        """Add one row (`step`, `kind`, numbers, lists of numbers). Not-a-number is written as null.

        Raises TurngymError for a row that could not be read again: some of its values may be of other people's code.
        """
        line = _line(row)
        _checked(json_of(line), f"metrics of step {row.get('step')}")
        self.writing(lambda: self._append(line.encode()))
        if self._sink is not None and self._sink.grows:
            self._waiting.append(row)
        elif self._sink is not None:
            self._sink.write(row)

    def _append(self, line: bytes) -> None:
        with closing(LineFile(self.folder / METRICS_FILE)) as file:
            file.append(line)

    def saved(self, step: int, *, ended: bool) -> None:
        """Says that a checkpoint holds `step`: rows before it, and that of `step` if the run `ended`, are final.

        A sink that only grows gets them. The row of `step` waits for the evaluation after it, as a resumed run may have
        to play that, and Weights & Biases takes no step twice.
        """
        given = 0
        while self._sink is not None and self._waiting and (self._waiting[0]["step"] < step or ended):
            self._sink.write(self._waiting.popleft())
            given += 1
        if given:
            self._tracked[self._name] = self._tracked.get(self._name, 0) + given
            self._note()

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()
            self._sink = None

    def _note(self) -> None:
        with written_whole(self.folder / TRACKED) as scratch:
            scratch.write_text(json.dumps(self._tracked) + "\n", encoding="utf-8")


def shown(name: str) -> str:
    """A folder's name for libraries that take text. A byte that is not UTF-8 is written as `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _line(row: Row) -> str:
    # what JSON has no form for becomes a text, which no column may be
    plain = {str(name): _plain(value) for name, value in row.items()}
    return without_keys(json.dumps(plain, default=repr)) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    # json would write NaN and Infinity, which are no JSON and which other readers refuse
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _checked(row: Any, where: str) -> dict[str, Any]:
    """Returns `row`. Raises TurngymError for a value that no column may have, and for what is no row of a run: many
    programs write a file of this name."""
    if not isinstance(row, dict) or type(row.get("step")) is not int or row.get("kind") not in KINDS:
        raise TurngymError(f"{where} is {brief(row, 80)}; valid: an object with step and kind ({' or '.join(KINDS)})")
    turns: dict[str, int] = {}
    for name, value in row.items():
        by_turn = name.startswith("turn/")
        items = value if by_turn and isinstance(value, list) else [value]
        wrong = by_turn and not isinstance(value, list)
        if wrong or (name != "kind" and not all(map(_is_number, items))):
            valid = "a list of numbers" if by_turn else "a number"
            raise TurngymError(f"{where}: {excerpt(name, 80)} is {brief(value, 80)}; valid: {valid}")
        if by_turn:
            turns[name] = len(items)
    if len({*turns.values()}) > 1:
        (least, few), *_, (most, many) = sorted(turns.items(), key=lambda item: item[1])
        problem = f"{excerpt(least, 80)} has {few} turns, {excerpt(most, 80)} {many}"
        raise TurngymError(f"{where}: {problem}; valid: a number for each turn")
    return row


def _is_number(value: Any) -> bool:
    """Whether `value` is null, or a number that a float holds."""
    try:
        return value is None or (isinstance(value, int | float) and math.isfinite(value))
    # a whole number of hundreds of digits
    except OverflowError:
        return False


def read_metrics(run: Path | str) -> list[dict[str, Any]]:
    """All rows of a run, in order. A torn last line (a killed process) is skipped; another line that is no row is an
    error."""
    return list(iter_metrics(run))


def iter_metrics(run: Path | str) -> Iterator[dict[str, Any]]:
    """Reads as `read_metrics` does, one row at a time: long runs write more than one wants in memory."""
    path = Path(run) / METRICS_FILE
    if not path.is_file():
        raise TurngymError(f"no {METRICS_FILE} in {run}: not a training run")
    # bytes: a line that was torn inside a character is skipped like any other torn one
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json_of(line.decode("utf-8"))  # of bytes, json would guess an encoding
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return
                raise TurngymError(f"{path}, line {number} is no JSON: {error}") from error
            yield _checked(row, f"{path}, line {number}")
