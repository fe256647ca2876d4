"""Training from a script or notebook: `train("turnopd", student=..., teacher=..., out=..., env=..., steps=50)`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turngym.envs.common.settings import read_toml
from turngym.trainers.assembly import run_training
from turngym.trainers.distributed.processes import world_of
from turngym.trainers.train_config import train_config
from turngym.trainers.trainer import RunResult

DEFAULT = "turnopd"


def train(
    algorithm: str | None = None,
    *,
    config: Path | str | Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> RunResult:
    """Train a student as `turngym train` does: same settings, defaults, progress and resumption.

    Args:
        algorithm: a name (`turnopd`), `package.module:NAME`, or an entry point of `turngym.algorithms`; by default the
            one that `config` names, else turnopd.
        config: a TOML file, or its content: settings that `settings` override. A run's own `config.toml` repeats it.
        progress: show a bar.
        settings: what `turngym train ALGORITHM --help` lists, under the same names with underscores: `student` and
            `out` must be given, `resume=True` goes on. A group (`optimizer`, the algorithm's own) is a dict or an
            object of its class. Where several processes train (`torchrun`), each of them calls this.

    Raises:
        SettingsError: a setting that does not exist, or has a value that it cannot have.
        TurngymError: models, environment or folder that do not fit.
    """
    table = dict(read_toml(config) if isinstance(config, str | Path) else config or {})
    named = algorithm or table.get("algorithm") or DEFAULT
    merged = _merged(table, settings) | {"algorithm": named}
    found = train_config(str(named), merged, f"train({named!r})")
    # settings are read before: a mistake in them is said at once, without waiting for other processes
    with world_of(timeout=found.models.process_timeout) as world:
        return run_training(found, world, progress=progress, command=_command(str(named), settings))


def _merged(table: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """`table` with `settings` on top; of two tables of one name the settings in them are merged."""
    merged = dict(table)
    for name, value in settings.items():
        below = merged.get(name)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[name] = _merged(below, value) if both else value  # type: ignore[arg-type]
    return merged


def _command(algorithm: str, settings: Mapping[str, Any]) -> str:
    """The call as it stands in the run's provenance."""
    return f"train({', '.join([repr(algorithm), *(f'{name}={value!r}' for name, value in settings.items())])})"
