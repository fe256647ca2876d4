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
from pathlib import Path
from typing import Any

from turngym.core.errors import TurngymError
from turngym.core.plugins import installed
from turngym.core.settings import read_toml
from turngym.core.spec import Layer, Resolved, Setting, settings_of
from turngym.scripts.options import CONFIG, HELP, HELP_ALL, PRINT, help_rows, list_presets, pop, read_options, width

try:
    from turngym.trainers.algorithm import BUILT_IN, GROUP, find_algorithm
    from turngym.trainers.distributed import open_ranks
    from turngym.trainers.metrics import read_metrics
    from turngym.trainers.progress import updated
    from turngym.trainers.run import DEFAULT, run_training
    from turngym.trainers.train_config import TrainConfig, config_class, require_setting, resolve_training, who_reads
except ImportError as error:
    raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error

ALGORITHM = "--algorithm"
FIRST = ("student", "teacher", "out", "env", "panel", "steps")
SHORT: Mapping[str, str] = {
    "method": "Algorithm",
    "models": "Models and machine",
    "run": "Run",
    "play": "Environment",
    "evaluation": "Evaluation",
    "optimizer": "Optimizer",
    "chat": "Chat",
}
"""Groups that --help lists; --help-all lists all."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym train` with `argv` (without the verb itself); under `torchrun` as one of several processes."""
    if list_presets(argv):
        return 0
    found = parse(argv)
    if found is None:
        return 0
    config = found.spec
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


def parse(argv: Sequence[str]) -> Resolved[TrainConfig] | None:
    """The settings of a run; None where help, or the settings (`--print`), were asked for and printed.

    Raises TurngymError for a setting that does not exist or cannot have its value.
    """
    rest, file = pop(argv, CONFIG)
    table = {} if file is None else read_toml(Path(file))
    name, words = _algorithm(rest, str(table.pop("algorithm", "")))
    if any(word in (*HELP, HELP_ALL) for word in words):
        print("\n".join(help_lines(name, __doc__ or "", whole=HELP_ALL in words)))
        return None
    name, shown = name or DEFAULT, PRINT in words

    def find(option: str, key: str) -> Setting:
        try:
            return require_setting(name, key, "")
        except TurngymError:
            if said := who_reads(key):
                raise TurngymError(f"{name} has no option {option}. {said}") from None
            raise

    given = read_options([word for word in words if word != PRINT], find, f"turngym train {name}", config_class(name))
    layers = [Layer(name=str(file), table=table, asked=True)] if file is not None else []
    found = resolve_training(name, [*layers, Layer(name="command line", table=given, asked=True)])
    if shown:
        print(found.to_toml(), end="")
        return None
    return found


def _algorithm(words: Sequence[str], written: str) -> tuple[str, list[str]]:
    """The algorithm, `written` in a file unless the words name one ("" if none is named), and the other words."""
    rest, named = pop(words, ALGORITHM)
    if rest and not rest[0].startswith("-"):
        if named is not None:
            raise TurngymError(f"{rest[0]} and {ALGORITHM} {named} are two algorithms; valid: one")
        named, rest = rest[0], rest[1:]
    return written if named is None else named, rest


def help_lines(algorithm: str, usage: str, *, whole: bool = False) -> Iterator[str]:
    """The help of an algorithm's options, or of all algorithms where none is named."""
    if not algorithm:
        yield from _algorithms(usage)
        return
    spec, cls = find_algorithm(algorithm), config_class(algorithm)
    settings = settings_of(cls)
    usage_line = f"usage: turngym train {algorithm} --student FOLDER --out FOLDER [options]"
    yield from textwrap.wrap(usage_line, width(), subsequent_indent="  ", break_on_hyphens=False)
    yield from ("", *textwrap.wrap(f"{spec.name}: {spec.help}", width()))
    first = [one for path, one in settings.items() if path.rpartition(".")[2] in FIRST and not one.tables]
    yield from help_rows("First", cls, first, whole=whole)
    for group in [path for path in settings if "." not in path and path != "algorithm"]:
        if group in SHORT or whole:
            inside = [one for path, one in settings.items() if path.startswith(f"{group}.") or path == group]
            shown = [one for one in inside if one not in first]
            yield from help_rows(SHORT.get(group, group.capitalize()), cls, shown, whole=whole)
    yield ""
    more = (
        f"{CONFIG} FILE reads settings from a TOML file, such as the config.toml of another run; options override it. "
        f"{PRINT} shows all settings, with where each comes from, and trains nothing."
    )
    if not whole:
        more = f"(on) is turned off by --no-NAME. {HELP_ALL} explains every option. {more}"
    yield from textwrap.wrap(more, width())


def _algorithms(usage: str) -> Iterator[str]:
    yield "usage: turngym train ALGORITHM --student FOLDER --out FOLDER [options]"
    yield from ("", *usage.strip().splitlines(), "", "Algorithms:")
    for name in (*BUILT_IN, *installed(GROUP)):
        rows = textwrap.wrap(find_algorithm(name).help, max(width() - 17, 20))
        yield f"  {name:<14} {rows[0]}"
        yield from (f"{'':17}{row}" for row in rows[1:])
    more = "Another one is named as package.module:NAME. `turngym train ALGORITHM --help` lists its options."
    yield from ("", *textwrap.wrap(more, width()))
