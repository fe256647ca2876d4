"""TurnOPD against vanilla OPD, TCOD, its ablations, sweeps and fixed depths, in embedded worlds: tables with intervals.

Every world x method x seed is a cell: a `turngym train` in a process of its own, with a lock, so that several processes
and machines can share one --out. A cell that is done is never run again; one that was killed goes on where it was.

Examples:
    turngym study turnopd --short
    turngym study turnopd --worlds alfworld --methods main ablation --seeds 0 1 2
    turngym study turnopd --no-run
    turngym study turnopd --methods fixed-12 --no-base --seeds 3 --out runs/more
    turngym study turnopd --data runs/study/tables/study.json runs/more/tables/study.json --out runs/merged
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import tyro

from turngym.envs.core.errors import TurngymError
from turngym.scripts.study.grid import CellRunner, cells_of
from turngym.scripts.study.merge import Study, merge_studies
from turngym.scripts.study.options import StudyOptions, shortened
from turngym.scripts.study.output import made_by, read_study, write_study
from turngym.scripts.study.records import Record, read_record, write_record


def main(argv: Sequence[str]) -> int:
    """Run `turngym study turnopd` with `argv` (without the verb itself)."""
    about = (__doc__ or "").split("\n")[0]
    options = shortened(tyro.cli(StudyOptions, args=list(argv), prog="turngym study turnopd", description=about))
    if options.data:
        study = merge_studies({str(path): read_study(path) for path in options.data})
    else:
        command = shlex.join(["turngym", "study", "turnopd", *argv])
        study = Study(records=run_cells(options), made_by=[made_by(command)])
    tables = options.out / "tables"
    print(write_study(study, tables))
    print(f"written to {tables}")
    return 0


def run_cells(options: StudyOptions) -> list[Record]:
    """Run what is to be run; the records of all cells that are done, whoever ran them."""
    cells = cells_of(options)
    if options.run:
        CellRunner(cells=cells, finish=write_record, parallel=options.parallel).run()
    records = [read_record(cell.job.folder) for cell in cells if cell.done]
    if not records:
        raise TurngymError(f"no cell in {options.out} is done: there is nothing to put into tables")
    return records
