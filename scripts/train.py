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
from collections.abc import Iterator, Sequence
from typing import Any

from turngym.core.errors import TurngymError, UnknownSettingError
from turngym.core.plugins import installed
from turngym.core.resolve import Layer, Resolved, merged
from turngym.core.setting import Setting, settings_of
from turngym.core.settings import read_toml, whole_toml
from turngym.scripts.options import COMMAND_LINE, CONFIG, HELP, HELP_ALL, PRINT, Verb, list_presets, pop_option, width

try:
    from turngym.trainers.algorithm_spec import BUILT_IN, GROUP, find_algorithm
    from turngym.trainers.train_config import (
        DEFAULT,
        Method,
        TrainConfig,
        config_class,
        option_name,
        require_setting,
        resolve_training,
        who_reads,
    )
    from turngym.trainers.training_layers import training_layers
except ImportError as error:
    raise TurngymError(f"training needs torch and transformers: pip install 'turngym[train]' ({error})") from error

ALGORITHM = "--algorithm"
FIRST = (
    *("models.student", "method.teacher", "models.out", "play.env", "evaluation.panel", "run.steps"),
    *("run.episodes", "play.env.max_turns", "method.temperature", "optimizer.lr", "lora.rank", "chat.max_new_tokens"),
    *("play.env.split", "play.preset", "play.traces", "method.demonstrations", "method.expert", "method.judge"),
    *("method.reward", "run.eval_every", "run.seed", "models.resume", "models.device"),
)
"""What most need, and --help shows beside the algorithm's own; --help-all shows all."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym train` with `argv` (without the verb itself); under `torchrun` as one of several processes."""
    if list_presets(argv):
        return 0
    run = resolved(argv, fetch=True)
    # not before: help and mistakes are said without waiting for all that trains
    from turngym.trainers.distributed import open_ranks
    from turngym.trainers.metrics import read_metrics
    from turngym.trainers.progress import updated
    from turngym.trainers.run import run_training

    with open_ranks() as ranks:
        result = run_training(run.spec, ranks, command=("turngym", "train", *argv), resolved=run)
        if ranks.rank == 0:
            took = f"{result.step} steps in {result.train_seconds:.0f} s of training"
            steps = [row for row in read_metrics(result.model.parents[2]) if row["kind"] == "train"]
            if not any(map(updated, steps)):
                print(f"{took}, none of which made an update: the model in {result.model} is as it was")
            else:
                print(f"{took}; model in {result.model}")
    return 0


def resolved(argv: Sequence[str], *, fetch: bool = False) -> Resolved[TrainConfig]:
    """The settings of a run, and who gave them. Help and `--print` print, and end the process.

    `fetch` as in `training_layers`.

    Raises TurngymError for a setting that does not exist, that cannot have its value, or that nothing would read.
    """
    others, file = pop_option(argv, CONFIG)
    table = {} if file is None else read_toml(file, provenance=True)
    name, words = _algorithm(others, str(table.get("algorithm", "")))
    if any(word in (*HELP, HELP_ALL) for word in words):
        print("\n".join(help_lines(name, __doc__ or "", whole=HELP_ALL in words)))
        raise SystemExit(0)
    name = name or DEFAULT
    values = _verb(name).given([word for word in words if word != PRINT]).get(config_class(name), {})
    layers = [] if file is None else [Layer(name=file, table=table, asked=True)]
    run = resolve_training(name, [*layers, Layer(name=COMMAND_LINE, table=values, asked=True)], fetch=fetch)
    if PRINT in words:
        print(whole_toml(run), end="")
        raise SystemExit(0)
    return run


def _verb(algorithm: str) -> Verb[TrainConfig]:
    """The command line of an algorithm."""

    def means(cls: Any, name: str, where: str) -> Setting:
        try:
            return require_setting(algorithm, name, where)
        except UnknownSettingError:
            # not a SettingsError, for which the switch `--no-NAME` would be tried
            if ("." in name or name in Method.__struct_fields__) and (owner := who_reads(name)):
                option = f"--{name.replace('_', '-')}"
                raise TurngymError(f"{algorithm} has no option {option}. {owner}") from None
            raise

    return Verb(
        name=f"turngym train {algorithm}",
        about="",
        own=config_class(algorithm),
        means=means,
        named=option_name,
        usual=merged([layer.table for layer in training_layers({})]),
        last_counts=True,
    )


def _algorithm(words: Sequence[str], written: str) -> tuple[str, list[str]]:
    """The algorithm that the words name, else the one `written` in a file ("" without any), and the other words."""
    others, named = pop_option(words, ALGORITHM)
    if others and not others[0].startswith("-"):
        if named is not None:
            raise TurngymError(f"{others[0]} and {ALGORITHM} {named} are two algorithms; valid: one")
        named, others = others[0], others[1:]
    return written if named is None else named, others


def help_lines(algorithm: str, usage: str, *, whole: bool = False) -> Iterator[str]:
    """The help of an algorithm's options, or of all algorithms where none is named."""
    if not algorithm:
        yield from _algorithms(usage)
        return
    spec, verb, settings = find_algorithm(algorithm), _verb(algorithm), settings_of(config_class(algorithm))
    line = f"usage: turngym train {algorithm} --student FOLDER --out FOLDER [options]"
    yield from textwrap.wrap(line, width(), subsequent_indent="  ", break_on_hyphens=False)
    yield from ("", *textwrap.wrap(f"{spec.name}: {spec.help}", width()))
    first = [settings[path] for path in FIRST if path in settings]
    yield from ("", *verb.section("What most need", first, whole=whole))
    tables = (f"method.{spec.table}.", "method.distill.", "method.lm_loss.")
    others = {path: setting for path, setting in settings.items() if setting not in first and path != "algorithm"}
    own = {path: others.pop(path) for path in list(others) if path.startswith(tables)}
    yield from ("", *verb.section("Algorithm", list(own.values()), whole=whole))
    for group in dict.fromkeys(path.partition(".")[0] for path in others) if whole else ():
        inside = [setting for path, setting in others.items() if path.partition(".")[0] == group]
        yield from ("", *verb.section(group.capitalize(), inside, whole=True))
    hint = (
        f"{CONFIG} FILE reads settings from a TOML file, as the config.toml of another run; options override it. "
        f"{PRINT} shows all settings with where each comes from, and trains nothing. (on) is turned off by --no-NAME."
    )
    yield from ("", *textwrap.wrap(hint if whole else f"{HELP_ALL} lists all options. {hint}", width()))


def _algorithms(usage: str) -> Iterator[str]:
    yield "usage: turngym train ALGORITHM --student FOLDER --out FOLDER [options]"
    yield from ("", *usage.strip().splitlines(), "", "Algorithms:")
    for name in (*BUILT_IN, *installed(GROUP)):
        rows = textwrap.wrap(find_algorithm(name).help, max(width() - 17, 20))
        yield f"  {name:<14} {rows[0]}"
        yield from (f"{'':17}{row}" for row in rows[1:])
    hint = "Another one is named as package.module:NAME. `turngym train ALGORITHM --help` lists its options."
    yield from ("", *textwrap.wrap(hint, width()))
