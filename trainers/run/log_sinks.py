"""Where rows of metrics go beside metrics.jsonl: tensorboard, Weights & Biases, trackio."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from turngym.envs.core import TurngymError

TITLES = {"wandb": "Weights & Biases", "trackio": "trackio"}


class LogSink(Protocol):
    """Shows numbers of a run somewhere."""

    def write(self, row: Mapping[str, Any]) -> None:
        """One row: `step`, `kind`, numbers, lists of numbers."""

    def close(self) -> None: ...


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The single numbers of a row, without its step."""
    # lists (numbers by turn) have no place in a curve; metrics.jsonl keeps them
    return {name: value for name, value in row.items() if name != "step" and isinstance(value, int | float)}


@dataclass(slots=True)
class TensorboardSink:
    """Writes scalars for tensorboard."""

    writer: Any

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row).items():
            self.writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self.writer.close()


@dataclass(slots=True)
class TrackerSink:
    """Logs to a run of wandb or trackio, which have the same methods."""

    run: Any

    def write(self, row: Mapping[str, Any]) -> None:
        self.run.log(scalars(row), step=row["step"])

    def close(self) -> None:
        self.run.finish()


def tensorboard_sink(folder: Path, step: int) -> TensorboardSink | None:
    """Scalars in `folder/tensorboard`, where those after `step` are hidden; None where tensorboard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return TensorboardSink(SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1))


def check_trackers(names: Sequence[str]) -> None:
    """Raises TurngymError for a package that is not installed, before anything is written."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise TurngymError(f"{TITLES[name]} is not installed: pip install 'turngym[{name}]'")


def tracker_sink(name: str, folder: Path, project: str) -> TrackerSink:
    """A run of `wandb` or `trackio`, named after `folder`; the same folder continues its run."""
    package = importlib.import_module(name)
    where = folder.resolve()
    # trackio knows a run by its name alone; wandb wants an id, and then takes any name
    more = {}
    if name == "wandb":
        more = {"id": hashlib.sha256(str(where).encode()).hexdigest()[:16], "dir": str(where)}
    return TrackerSink(package.init(project=project, name=where.name, resume="allow", **more))
