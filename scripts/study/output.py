"""The written study: Markdown, one CSV per table, and the records, from which all of it can be made again."""

from __future__ import annotations

import csv
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.settings import provenance
from turngym.envs.core.tables import Table, markdown, write_json
from turngym.scripts.study.estimates import by_world
from turngym.scripts.study.merge import Study
from turngym.scripts.study.records import Record, from_json, to_json
from turngym.scripts.study.tables import regimes, study_tables
from turngym.scripts.study.verdict import verdict

DATA = "study.json"
ABOUT = {
    "overview": "Mean success in percent over seeds and tasks: Same-Step and Least-Time.",
    "regime": "Signs that depth can pay, in vanilla OPD's own full-depth steps (`turngym study regime`).",
    "accuracy": "Mean of the last four evaluations, percent. Intervals: 95 %, over seeds and tasks, which are crossed "
    "(with one seed over tasks alone). Same-Step: after so many steps. Least-Time: within the least wall clock that "
    "any main method needed for all of its steps, seed by seed; Least-CPU the same by CPU seconds. `*`: the interval "
    "of the difference is clear of zero.",
    "cost": "All steps, evaluations excluded, mean over seeds; CPU seconds are those of the training process.",
    "to-target": "The first evaluation at OPD's Same-Step accuracy or above from which on the mean of the rest stays "
    "there too (means over seeds), as a share of what all of OPD's steps cost. `-`: none.",
    "categories": "Mean success by category at Least-Time, percent, 95 % over seeds and tasks.",
    "phases": "Seconds of training by phase, mean over seeds.",
    "depth": "Caps off probes (where every step is a probe: of those), horizons after the last step, and shares of the "
    "deepest third of each step's turns, means over steps and seeds.",
}


def made_by(command: str) -> dict[str, Any]:
    """Where records come from that `command` makes now; whose machine it is, is nobody's business."""
    return {name: value for name, value in provenance(command).items() if name != "host"}


def write_study(study: Study, out: Path) -> str:
    """Write study.md, the tables as CSV, and study.json into `out`; returns the Markdown. The same bytes every time."""
    records, tables = study.records, study_tables(study.records)
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables.items():
        write_csv(out / f"{name}.csv", table)
    text = render(records, tables)
    (out / "study.md").write_text(text, encoding="utf-8")
    write_json(out / DATA, {"made_by": study.made_by, "records": [to_json(record) for record in records]})
    return text


def render(records: Sequence[Record], tables: Mapping[str, Table]) -> str:
    """All tables, world by world, and what they say about the aims."""
    worlds = by_world(records)
    cells = f"{len(records)} cells; methods: " + "; ".join(
        f"{name}: {about}" for name, about in dict.fromkeys((record.method, record.about) for record in records)
    )
    parts = ["# Study", cells + "."]
    for name in ("overview", "regime"):
        parts += [f"## {name.capitalize()}", ABOUT[name], markdown(tables[name])]
    gates = regimes(worlds)
    for world, rows in worlds.items():
        parts += [f"## {world}", verdict(world, rows, gates.get(world))]
        for kind in ("accuracy", "cost", "to-target", "categories", "phases", "depth"):
            parts += [f"### {world}: {kind.replace('-', ' ')}", ABOUT[kind], markdown(tables[f"{world}-{kind}"])]
    return "\n\n".join(parts) + "\n"


def write_csv(path: Path, table: Table) -> None:
    """A table as CSV, cells as they are shown."""
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([table[0], *table[1]])


def read_study(path: Path) -> Study:
    """The content of a study.json, as it is or compressed by gzip. Raises TurngymError where it is none."""
    try:
        data = path.read_bytes()
        values: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
        rows, made = values["records"], values.get("made_by", [])
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TurngymError(f"{path} is not a study.json with records") from error
    except OSError as error:
        raise TurngymError(f"cannot read {path}: {error.strerror}") from error
    return Study(
        records=[from_json(row, f"{path}, record {number}") for number, row in enumerate(rows)],
        # older files say one command
        made_by=[made] if isinstance(made, dict) else made,
    )
