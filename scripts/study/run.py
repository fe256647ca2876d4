"""Runs the cells of a study: a file in, a folder of training runs, tables and figures out.

Several processes and machines may run one study in one folder. Each cell has a lock; a cell that was killed goes on
from its last checkpoint, and one that is done is kept.

Examples:
    turngym study run turnopd-short --out runs/short
    turngym study run mine.toml --out runs/mine --parallel 2
    turngym study run mine.toml --out runs/mine --set 'seeds = [0, 1, 2]'   # adds what is missing
    turngym study run mine.toml --print                                     # the commands of its cells
    turngym study run paper-turnopd --processes 8 --parallel 1              # a node with 8 GPUs
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from turngym.agents.evaluation.packed import pack_result
from turngym.agents.evaluation.packed_file import SUFFIX
from turngym.agents.evaluation.results import AVERAGE
from turngym.agents.play_spec import OnPanel
from turngym.core.clean_keys import recorded_command
from turngym.core.errors import TurngymError, first_few
from turngym.core.nested import differing, flat
from turngym.core.numbers import Threads
from turngym.core.resolve import PROVENANCE
from turngym.core.setting import Positional
from turngym.core.settings import read_toml, toml_of, write_toml_text
from turngym.core.spec import Spec, Unread, needing
from turngym.core.whole_files import write_json
from turngym.scripts.jobs import Board, RunJob, Runner
from turngym.scripts.model import average, evaluate_average
from turngym.scripts.options import read_options
from turngym.scripts.result_table import write_table
from turngym.scripts.study.cells import LAST, Cell, cells_of
from turngym.scripts.study.show import write_tables
from turngym.scripts.study.study_file import Study, find_study, read_study_file
from turngym.scripts.study.texts import heldout_nats, text_path, write_text
from turngym.trainers import content_hashes
from turngym.trainers.study.portable import counts, last_names, with_paths
from turngym.trainers.study.records import (
    DATA,
    Record,
    Records,
    made_by,
    read_record,
    read_records,
    record_of_run,
    write_records,
)
from turngym.trainers.train_config import TrainConfig

POLL = 2.0
"""Seconds between two looks at cells that run elsewhere."""


class RunOptions(Spec):
    """Which study is run, where, and how many cells at a time."""

    file: Positional[str]
    """A study file, or the name of one that comes along (`turngym study list`)."""
    out: Path | None = None
    """Folder of the cells and, under tables/, of the report; by default runs/NAME. Machines may share it."""
    set: tuple[str, ...] = ()
    """A setting in TOML that overrides the file's, for example 'train.steps = 12'; may be given several times."""
    parallel: Threads = 2
    """Cells at a time in this process, one thread each."""
    ray: str | None = None
    """Address of a Ray cluster that shares the folder (auto, HOST:PORT), or `start` for one on this machine: cells run
    as its tasks; by default as processes of this machine."""
    processes: Threads = 1
    """Processes that train a cell together, under torchrun: one for each GPU of a node. Then give --parallel 1."""
    pack: bool = False
    """Pack the last evaluation of every cell into OUT/results, and make the page of them in OUT/results-table."""
    print: bool = False
    """Print the commands of the cells, and run nothing."""

    @property
    def folder(self) -> Path:
        return self.out or Path("runs") / find_study(self.file).stem

    def unread(self) -> Unread:
        if self.print:
            yield from needing("to run (no --print)", "parallel", "ray", "pack")


def main(argv: Sequence[str]) -> int:
    """Run `turngym study run` with `argv` (without the verb itself)."""
    options = read_options(RunOptions, argv, prog="turngym study run", about=__doc__)
    if options.print:
        study = read_study_file(options.file, options.set)
        print(f"# {study.title}\n{_commented(study.file.about)}")
        for cell in cells_of(study, options.folder):
            cell = replace(cell, processes=options.processes)
            print(f"# {cell.name}: {cell.about}\n{cell.command}\n{_commented(cell.toml)}")
        return 0
    records = _run(options, recorded_command(["turngym", "study", "run", *argv]))
    tables = options.folder / "tables"
    print(write_tables(records, tables))
    print(f"written to {tables}")
    return 0


def run_study(
    file: str | Path,
    out: str | Path | None = None,
    *,
    command: str = "turngym.scripts.study.run.run_study",
    **settings: Any,
) -> Records:
    """Runs the cells of a study that are missing. Returns the records of all finished cells, other processes' included.

    Args:
        file: a study file, or the name of one that comes along.
        out: folder of the study; by default runs/NAME.
        command: the caller, as recorded beside the records.
        settings: what `turngym study run --help` lists, by the same names: set, parallel, ray, pack, ...

    Raises TurngymError, before anything is run, for a file that cannot be meant, and for a folder that holds one of its
    cells with other settings; at the end, if a cell failed.
    """
    return _run(RunOptions(file=str(file), out=None if out is None else Path(out), **settings), command)


def _run(options: RunOptions, command: str) -> Records:
    study = read_study_file(options.file, options.set)
    out = options.folder
    cells = [replace(cell, processes=options.processes) for cell in cells_of(study, out)]
    worlds = {place.name: place.world for place in study.places}
    for world in worlds.values():
        if world is not None:
            world.checkpoint("student")  # whose base must be here
    packed = _packed_names(cells) if options.pack else {}
    claim(study, cells, out)
    for cell in cells:
        if cell.text is not None:
            write_text(text_path(out, cell.world, cell.text), cell.text, worlds[cell.world])
    runs = any(not cell.finished for cell in cells) or not _made_before(out)
    this_command = [made_by(command)] if runs else []

    def keep_records() -> Records:
        """Writes what is done so far, also by others: `turngym study show` reads it while a study is still running."""
        # what others have noted up to now, and what this process adds
        commands = _made_before(out)
        against = {name: method.keys.against for name, method in study.methods.items() if method.keys.against}
        records = Records(
            title=study.title,
            about=study.file.about,
            baseline=study.file.baseline,
            against=against,
            tables=study.file.tables,
            # what the file says of a method now; what its runs were is in their records
            records=[
                replace(read_record(cell.folder), group=cell.group, about=cell.about) for cell in cells if cell.recorded
            ],
            made_by=[*commands, *(made for made in this_command if made not in commands)],
        )
        if records.records:
            (out / "tables").mkdir(parents=True, exist_ok=True)
            write_records(records, out / "tables" / DATA)
        return records

    average_weights = study.evaluate.average
    if options.ray is not None:
        address = None if options.ray == "start" else options.ray
        _run_on_ray(cells, address, options.parallel, average_weights, keep_records)
    else:
        run_cells(cells, options.parallel, average_weights, keep_records)
    records = keep_records()
    if not records.records:
        raise TurngymError(f"no cell in {out} is done: there is nothing to put into tables")
    if options.pack:
        for cell in cells:
            if cell.recorded:
                _pack(cell, out / "results" / packed[cell.name])
        write_table(out / "results", out / "results-table", study.title)
    return records


def _packed_names(cells: Sequence[Cell]) -> dict[str, str]:
    """Cell -> the file of its packed evaluation. Raises TurngymError where two cells would have the same."""
    names = {cell.name: f"{cell.world}-{cell.method}-seed{cell.seed}{SUFFIX}" for cell in cells if not cell.is_start}
    owners: dict[str, str] = {}
    for cell_name, name in names.items():
        if (owner := owners.setdefault(name, cell_name)) != cell_name:
            raise TurngymError(f"--pack: {owner} and {cell_name} would both be {name}; valid: another name for one")
    return names


def _pack(cell: Cell, result: Path) -> None:
    """Packs a cell's last evaluation, unless `result` is that already: one that was played anew is packed anew."""
    if isinstance(cell.spec, TrainConfig):
        assert cell.spec.evaluation is not None, "every method is evaluated"
        panel = cell.spec.evaluation.panel
    else:
        assert isinstance(cell.spec.play.tasks, OnPanel), "so is every agent"
        panel = cell.spec.play.tasks.panel
    if not result.exists() or result.stat().st_mtime < cell.last_trace.stat().st_mtime:
        pack_result(cell.last_trace, result, panel=panel)


def _made_before(out: Path) -> Sequence[Mapping[str, Any]]:
    """Which commands have written records of the study in `out` so far."""
    return read_records(out).made_by if (out / "tables" / DATA).is_file() else []


def _commented(text: str) -> str:
    return "".join(f"#   {line}\n" for line in text.splitlines())


def claim(study: Study, cells: Sequence[Cell], out: Path) -> None:
    """Writes the settings of every cell beside its folder, and says which cells of the folder the file does not have.

    Raises TurngymError for the first cell that was run with other settings, or with files or code of one's own that
    have changed.
    """
    for cell in cells:
        if not cell.settings_file.is_file() or not cell.folder.exists():
            continue
        settings = {name: table for name, table in toml_of(cell.toml).items() if name != PROVENANCE}
        was, current = (with_paths(table, last_names) for table in (read_toml(cell.settings_file), settings))
        for name, (old, new) in differing(was, current).items():
            if not counts(name):
                continue
            raise TurngymError(
                f"{cell.name} in {out} was run with {name} = {old!r}, and {study.where} says {new!r}: give the method "
                f"another name, choose another --out, or remove {cell.folder}"
            )
    for cell in (cell for cell in cells if cell.recorded):
        began, content = read_record(cell.folder).contents, content_hashes.of_all(cell.settings)
        for name in (name for name in content if began.get(name, content[name]) != content[name]):
            raise TurngymError(
                f"{cell.name} in {out} was run with another content of {name}, {flat(cell.settings)[name]}: put it "
                f"back, give the new one another name, choose another --out, or remove {cell.folder}"
            )
    for cell in cells:
        # a run that goes on in a folder that was moved finds models and texts where they are now
        if not cell.finished:
            write_toml_text(cell.settings_file, cell.toml)
    expected = {cell.settings_file for cell in cells}
    # of a cell that never began there is nothing to show
    begun = (path for path in out.glob("cells/*/*.toml") if path not in expected and path.with_suffix("").is_dir())
    stray = [f"{path.parent.name}/{path.stem}" for path in sorted(begun)]
    if stray:
        listed = first_few(stray)
        print(f"turngym: kept and not shown, since {study.where} has no such cells: {listed}", file=sys.stderr)


def run_cells(
    cells: Sequence[RunJob],
    parallel: int,
    average_weights: bool,
    recorded: Callable[[], object] = lambda: None,
) -> None:
    """Runs cells, `parallel` at a time. The record of a cell is written when it has ended; starts have none. With
    `average_weights` the last checkpoints of a training are averaged and evaluated before. `recorded` is called after
    each record."""

    def finish(job: RunJob) -> None:
        if isinstance(job, Cell) and not job.is_start:
            if average_weights and job.verb == "train":
                # what a killed process left goes on
                if not (job.folder / AVERAGE / "model").exists():
                    average(job.folder, last=LAST)
                evaluate_average(job.folder)
            record = make_record(job)
            if job.heldout:
                assert isinstance(job.spec, TrainConfig)
                before = job.spec.models.student
                record = replace(record, text=(heldout_nats(before), heldout_nats(job.model)))
            write_json(job.record, asdict(record))
            recorded()

    Runner(jobs=cells, finish=finish, parallel=parallel).run()


def make_record(cell: Cell) -> Record:
    """The record of a cell whose command has ended."""
    return record_of_run(
        cell.folder,
        cell.settings,
        cell.game,
        trained=cell.verb == "train",
        world=cell.world,
        method=cell.method,
        group=cell.group,
        about=cell.about,
        seed=cell.seed,
    )


def _run_on_ray(
    cells: Sequence[Cell], address: str | None, parallel: int, average_weights: bool, recorded: Callable[[], object]
) -> None:
    """Runs cells as tasks of a Ray cluster whose machines share the folder; starts first, then the others.

    Calls `recorded` where cells have ended.
    """
    import ray

    from turngym.agents.executor.worker_count import available_cores

    starts_ray = not ray.is_initialized()
    if starts_ray:
        cores = None if address else min(parallel, available_cores())
        ray.init(address=address, num_cpus=cores, log_to_driver=False)
    failed = list[str]()
    try:
        play = ray.remote(num_cpus=1, max_retries=0)(_cell_task)
        with Board(cells) as board:
            # a cell that needs a start finds it finished
            for part in ([cell for cell in cells if cell.is_start], [cell for cell in cells if not cell.is_start]):
                waiting = [play.remote(cell, average_weights) for cell in part if not cell.finished]
                while waiting:
                    done, waiting = ray.wait(waiting, timeout=POLL)
                    board.update({cell.name for cell in part if cell.begun and not cell.finished})
                    for task in done:
                        try:
                            ray.get(task)
                        except ray.exceptions.RayError as error:
                            failed.append(str(getattr(error, "cause", error)).strip().splitlines()[-1])
                    if done:
                        recorded()
    finally:
        if starts_ray:
            ray.shutdown()
    if failed:
        raise TurngymError("; ".join(failed))


def _cell_task(cell: Cell, average_weights: bool) -> None:
    run_cells([*cell.needs, cell], 1, average_weights)
