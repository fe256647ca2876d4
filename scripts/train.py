"""Train a student: distill it from a teacher, reinforce it, or fine-tune it on demonstrations, turn by turn.

Examples:
    turngym train turnopd --student models/student --teacher models/teacher --out runs/turnopd
    turngym train sft --student models/base --expert searching --sft.noise 0 0.5 --out runs/sft
    turngym train turnopd --student S --teacher T --out runs/turnopd --resume
    turngym train --config runs/turnopd/config.toml --out runs/again
    torchrun --nproc-per-node 8 -m turngym train turnopd ... (docs/distributed.md)
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from turngym.core.errors import TurngymError
from turngym.core.plugins import installed
from turngym.core.settings import from_table, read_toml, settings_of
from turngym.scripts.command_line import CONFIG, HELP, check_options, checked, pop_option, section, width

try:
    from turngym.agents.agent_options import DemonstrationOptions, JudgeOptions
    from turngym.agents.executor.worker_count import WorkerOptions
    from turngym.agents.servers.server_options import RunServers
    from turngym.scripts.options import list_presets
    from turngym.trainers.algorithm import BUILT_IN, GROUP, find_algorithm
    from turngym.trainers.distributed import open_ranks
    from turngym.trainers.lora import LoraConfig
    from turngym.trainers.metrics import read_metrics
    from turngym.trainers.progress import updated
    from turngym.trainers.run import run_training
    from turngym.trainers.run_config import DistillConfig, LmLossConfig, OptimizerConfig, RunConfig
    from turngym.trainers.schedule import AsyncConfig
    from turngym.trainers.train_config import (
        ChatConfig,
        ExamplesConfig,
        ModelConfig,
        PlayConfig,
        TrainConfig,
        config_class,
        in_file_of,
        keys_of,
        train_config,
        who_reads,
    )
except ImportError as error:
    raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error

ALGORITHM = "--algorithm"
DEFAULT = "turnopd"
FIRST = ("student", "teacher", "out", "env", "panel", "steps")
FOLDED: Mapping[type[Any], str] = {
    ExamplesConfig: "examples (few-shots) in the prompt",
    RunServers: "servers that play and teach",
    WorkerOptions: "processes that play",
    AsyncConfig: "Playing ahead",
    LoraConfig: "Adapters",
}
"""Groups that --help names in a line, and --help-all lists."""
TITLES: Mapping[type[Any], str] = {
    ModelConfig: "Models and machine",
    RunConfig: "Run",
    PlayConfig: "Environment and evaluation",
    ChatConfig: "Chat",
    DemonstrationOptions: "Demonstrations",
    OptimizerConfig: "Optimizer",
    JudgeOptions: "Judge",
    DistillConfig: "Loss between student and teacher",
    LmLossConfig: "Pre-training text",
}


@dataclass(frozen=True, slots=True)
class Group:
    """Settings that stand together: a class, the prefix of its options, and where its object belongs."""

    path: tuple[str, ...]
    prefix: str
    cls: type[Any]


def main(argv: Sequence[str]) -> int:
    """Run `turngym train` with `argv` (without the verb itself); under `torchrun` as one of several processes."""
    if list_presets(argv):
        return 0
    config = parse(argv)
    with open_ranks(timeout=config.models.process_timeout) as ranks:
        result = run_training(config, ranks, command=("turngym", "train", *argv))
        if ranks.rank == 0:
            took = f"{result.step} steps in {result.train_seconds:.0f} s of training"
            steps = [row for row in read_metrics(result.model.parents[2]) if row["kind"] == "train"]
            if not any(map(updated, steps)):
                print(f"{took}, none of which made an update: the model in {result.model} is as it was")
            else:
                print(f"{took}; model in {result.model}")
    return 0


def parse(argv: Sequence[str]) -> TrainConfig:
    """The settings of a run. Help is printed, and ends the process. Raises TurngymError for what does not exist.

    tyro explains a value of the wrong type on standard error and exits with status 2.
    """
    name, words, table, where = _algorithm(argv)
    if any(word in ("-h", "--help", "--help-all") for word in words):
        print("\n".join(help_lines(name, __doc__ or "", whole="--help-all" in words)))
        raise SystemExit(0)
    name = name or DEFAULT
    cls = config_class(name)
    in_file = in_file_of(name)

    def owner(option: str) -> str:
        key = option.removeprefix("--").replace("-", "_")
        head, dot, last = key.rpartition(".")
        # --luffy.no-filter-groups would turn luffy.filter_groups off
        switch = f"{head}{dot}{last.removeprefix('no_')}"
        if key in in_file:
            return f" It is set in a file: {key} = ... ({CONFIG} FILE)."
        if in_file.get(switch) is bool:
            return f" It is set in a file: {switch} = false ({CONFIG} FILE)."
        if any(other.startswith(f"{key}.") for other in in_file):
            return f" It is a table of a file: [{key}] ({CONFIG} FILE)."
        for one in (key, switch) if dot else (key,):
            own = any(f"{other}.".startswith(f"{one}.") for other in keys_of(name))
            if not own and (said := who_reads(one)):
                return f" {said}"
        return ""

    options = [setting for setting in settings_of(cls) if not setting.in_file]
    check_options(options, words, prog=f"turngym train {name}", subject=f"{name} has", owner=owner)
    if table:
        train_config(name, table, where, missing=tyro.MISSING)  # for its checks, across all groups
    # tyro reads one flat class with a field for every group of settings, and names the field where a group is invalid
    groups = {"_".join(group.path): group for group in groups_of(cls)}
    parts = []
    for field_name, group in groups.items():
        kind: Any = Annotated[group.cls, tyro.conf.arg(name=group.prefix)]  # type: ignore[name-defined]
        default = _default(group, table, where)
        parts.append((field_name, kind, field() if default is None else field(default=default)))
    flat = make_dataclass("Options", parts, frozen=True, kw_only=True)
    found: Any = tyro.cli(flat, args=words, prog=f"turngym train {name}", config=HELP, add_help=False)
    config = _assembled(cls, name, {group.path: getattr(found, key) for key, group in groups.items()})
    return checked(config, in_file)


def _algorithm(words: Sequence[str]) -> tuple[str, list[str], dict[str, Any], str]:
    """The algorithm ("" if none is named), the other words, and the table of the configuration file with its name."""
    rest, file = pop_option(words, CONFIG)
    table = {} if file is None else read_toml(Path(file))
    rest, named = pop_option(rest, ALGORITHM)
    if rest and not rest[0].startswith("-"):
        if named is not None:
            raise TurngymError(f"{rest[0]} and {ALGORITHM} {named} are two algorithms; valid: one")
        named, rest = rest[0], rest[1:]
    written = str(table.pop("algorithm", ""))
    return written if named is None else named, rest, table, "options" if file is None else file


def groups_of(cls: type[Any], path: tuple[str, ...] = (), prefix: str = "") -> Iterator[Group]:
    """The groups of a settings class; a class whose fields are all groups is only a way to them."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        kind, flat = hints[item.name], bool(item.metadata.get("flat"))
        if not is_dataclass(kind):
            continue
        below = prefix if flat else f"{prefix}{item.name}"
        here = (*path, item.name)
        inner = get_type_hints(kind)
        if flat and all(is_dataclass(inner[below.name]) for below in fields(kind)):
            yield from groups_of(kind, here, below)  # type: ignore[arg-type]
        else:
            yield Group(here, below, kind)  # type: ignore[arg-type]


def _default(group: Group, table: Mapping[str, Any], where: str) -> Any:
    """The group as the file has it; None where nothing is given and something must be."""
    given: Any = table
    for part in group.prefix.split(".") if group.prefix else ():
        given = given.get(part, {})
    known = {setting.key.partition(".")[0] for setting in settings_of(group.cls)}
    own = {key: value for key, value in given.items() if key in known}
    needed = any(item.default is item.default_factory for item in fields(group.cls))
    return None if needed and not own else from_table(group.cls, own, where, missing=tyro.MISSING)


def _assembled(cls: type[Any], name: str, found: Mapping[tuple[str, ...], Any]) -> Any:
    """An object of `cls` from its groups by path."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {"algorithm": name} if "algorithm" in hints else {}
    for top in dict.fromkeys(path[0] for path in found):
        inner = {path[1:]: value for path, value in found.items() if path[0] == top}
        values[top] = inner[()] if () in inner else _assembled(hints[top], name, inner)
    return cls(**values)


def help_lines(algorithm: str, usage: str, *, whole: bool = False) -> Iterator[str]:
    """The help of an algorithm's options, or of all algorithms where none is named."""
    if not algorithm:
        yield from _algorithms(usage)
        return
    spec = find_algorithm(algorithm)
    every = [setting for setting in settings_of(config_class(algorithm)) if setting.name != "algorithm"]
    settings = [setting for setting in every if not setting.in_file]
    usage_line = f"usage: turngym train {algorithm} --student FOLDER --out FOLDER [options]"
    yield from textwrap.wrap(usage_line, width(), subsequent_indent="  ", break_on_hyphens=False)
    yield from ("", *textwrap.wrap(f"{spec.name}: {spec.help}", width()))
    yield from section("First", [_named(settings, name) for name in FIRST if _named(settings, name)], whole=whole)
    rest = [setting for setting in settings if setting.key not in FIRST]
    groups = dict.fromkeys(setting.group for setting in rest if not setting.table)
    tables = dict.fromkeys(setting.table.partition(".")[0] for setting in rest if setting.table)
    own = spec.table
    for table in sorted(tables, key=lambda name: name != own):
        members = [setting for setting in rest if setting.table.partition(".")[0] == table]
        yield from _folded(table, members[0].group, members, whole, own)
    for group in groups:
        yield from _folded("", group, [s for s in rest if s.group is group and not s.table], whole, own)
    kept = [setting for setting in every if setting.in_file]
    if whole:
        yield from section(f"In the file of {CONFIG} alone", kept, whole=True)
    yield ""
    more = f"{CONFIG} FILE reads options from a TOML file, such as the config.toml of another run; options override it."
    if not whole:
        folded = ", ".join(title[:1].lower() + title[1:] for title in FOLDED.values())
        more = (
            f"(on) is turned off by --no-NAME. --help-all explains every option, and lists also: {folded}, and "
            f"{len(kept)} settings that only a file has. {more}"
        )
    yield from textwrap.wrap(more, width())


def _folded(table: str, group: type[Any], members: Sequence[Any], whole: bool, own: str) -> Iterator[str]:
    if group in FOLDED and not whole:
        return
    title = f"Algorithm ({table})" if table == own else {**TITLES, **FOLDED}.get(group, table or group.__name__)
    yield from section(title, members, whole=whole)


def _named(settings: Sequence[Any], name: str) -> Any:
    return next((setting for setting in settings if setting.key == name), None)


def _algorithms(usage: str) -> Iterator[str]:
    yield "usage: turngym train ALGORITHM --student FOLDER --out FOLDER [options]"
    yield from ("", *usage.strip().splitlines(), "", "Algorithms:")
    for name in (*BUILT_IN, *installed(GROUP)):
        rows = textwrap.wrap(find_algorithm(name).help, max(width() - 17, 20))
        yield f"  {name:<14} {rows[0]}"
        yield from (f"{'':17}{row}" for row in rows[1:])
    more = "Another one is named as package.module:NAME. `turngym train ALGORITHM --help` lists its options."
    yield from ("", *textwrap.wrap(more, width()))
