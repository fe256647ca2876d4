"""`turngym trace verify`: whether every line is as it was written."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from turngym.agents.proxy.sessions.records import FILE, RecordProblem, iter_records
from turngym.envs.common.sealed_line import is_sealed
from turngym.envs.core import TurngymError
from turngym.envs.trace import TraceProblem, iter_trace

SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Verify:
    """Read every line and compare its checksum; status 1 if any is damaged (a torn last line is not)."""

    files: tyro.conf.Positional[tuple[Path, ...]]
    """Trace files (JSON lines), or the records.jsonl of a proxy."""


def verify(command: Verify) -> int:
    if not command.files:
        raise TurngymError("no file was given; name one or more trace files")
    return max(_verify(path) for path in command.files)


def _verify(path: Path) -> int:
    if not path.is_file():
        raise TurngymError(f"there is no file {path}")
    read = iter_records(path.parent) if path.name == FILE else iter_trace(path)
    whole, torn, damaged = 0, 0, list[TraceProblem | RecordProblem]()
    for item in read:
        if isinstance(item, TraceProblem) and item.torn:
            torn += 1
        elif isinstance(item, TraceProblem | RecordProblem):
            damaged.append(item)
        else:
            whole += 1
    for problem in damaged[:SHOWN]:
        print(f"{path}: line {problem.line}: {problem.reason}", file=sys.stderr)
    if len(damaged) > SHOWN:
        print(f"{path}: and {len(damaged) - SHOWN} more", file=sys.stderr)
    with path.open("rb") as file:
        unsealed = whole - sum(is_sealed(line) for line in file) + len(damaged)
    notes = [f"{len(damaged)} damaged"] if damaged else []
    notes += ["the last line is torn"] if torn else []
    notes += [f"{unsealed} without a checksum"] if unsealed > 0 else []
    print(f"{path}: {whole} lines are whole" + "".join(f", {note}" for note in notes))
    return 1 if damaged else 0
