"""Old names of options, accepted for one release with a warning."""

from __future__ import annotations

import ast
import errno
import inspect
import json
import shutil
import signal
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING
from functools import cache
from itertools import pairwise, zip_longest
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin

import tyro

from turngym.agents.options import AgentOptions
from turngym.agents.presets import preset_table
from turngym.agents.worlds.worlds import EmbeddedWorld, TinyRecipe
from turngym.envs.core.errors import TurngymError, no_room
from turngym.envs.core.settings import Setting, from_table, read_toml
from turngym.envs.core.tables import table_text

OPTIONS: Mapping[str, str] = {
    "batch": "slots",
    "make": "env-kwargs",
    "blunders": "mistakes",
    "optimiser": "optimizer",
    "optimizer.passes": "optimizer.ppo-epochs",
    "lpt": "lm-loss",
    "turnopd.reliable-count": "turnopd.n-min",
    "turnopd.reliable-share": "turnopd.n-min-share",
}
"""Old name -> name, without dashes; a name also stands for the group of options below it (`optimiser.lr`)."""
VALUES: Mapping[tuple[str, str], str] = {("on-invalid", "penalise"): "penalize"}
"""(name, old value) -> value."""
SWITCHES = frozenset({"packing"})
"""Options that were switches (`--packing`, `--no-packing`) and now have values: on, off and others."""


def current(argv: Sequence[str], options: Mapping[str, str] = OPTIONS) -> list[str]:
    """`argv` with today's names in place of old ones; every old one is warned of (FutureWarning)."""
    argv = list(_switches(argv))
    words: list[str] = []
    name = ""
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            written, equals, value = word.partition("=")
            name = _name(written, options)
            words.append(f"--{name}{equals}{_renamed_value(name, value)}" if equals else f"--{name}")
        else:
            words.append(_renamed_value(name, word))
            name = ""
    return words


def _switches(argv: Sequence[str]) -> Iterator[str]:
    """Old switches with the value that each stood for."""
    for word, after in zip_longest(argv, argv[1:]):
        plain = word.removeprefix("--").removeprefix("no-")
        no, alone = word.startswith("--no-"), after is None or after.startswith("--")
        if not word.startswith("--") or plain not in SWITCHES or not (no or alone):
            yield word
            continue
        _warn(word, f"--{plain} {'off' if no else 'on'}")
        yield from (f"--{plain}", "off" if no else "on")


def _name(written: str, options: Mapping[str, str]) -> str:
    plain = written.removeprefix("--").replace("_", "-")
    now = plain
    for old, new in options.items():
        if now == old or now.startswith(old + "."):
            now = new + now.removeprefix(old)
    if now == plain:
        return written.removeprefix("--")
    _warn(written, f"--{now}")
    return now


def _renamed_value(name: str, value: str) -> str:
    now = VALUES.get((name.replace("_", "-"), value))
    if now is None:
        return value
    _warn(f"--{name} {value}", f"--{name} {now}")
    return now


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will not be accepted any more", FutureWarning, stacklevel=4)


# Says how an endpoint's actions are written where nobody chose.


def say_channel(player: AgentOptions) -> None:
    """One line on standard error for `openai:MODEL` without `--channel`."""
    if player.agent.startswith("openai:") and player.channel == "auto":
        print(
            f"turngym: {player.agent} writes actions as text, which every endpoint can (--channel text); "
            "--channel tool offers it the environment's tool",
            file=sys.stderr,
        )


# How a command ends when it is stopped or the system fails it: one line, which says what is kept only where it is.


class Terminated(KeyboardInterrupt):
    """SIGTERM: whatever ends well on Ctrl-C ends well on it, too."""


def end_on_sigterm() -> None:
    """SIGTERM raises Terminated, whatever this process inherited; verbs that serve or train install their own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def status(error: KeyboardInterrupt) -> int:
    """As shells count it: 128 and the number of the signal."""
    return 128 + (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)


def what_is_kept(verb: str, argv: Sequence[str]) -> str:
    """What is on disk after `verb` was stopped, and how to go on with it; "" where that is not known."""
    out = _out(argv)
    if verb == "train" and out is not None:
        steps = sorted(path.name for path in (out / "checkpoints").glob("step_*"))
        return f"; continue from {steps[-1]} with --resume" if steps else "; there is no checkpoint to continue from"
    if verb in ("eval", "rollout"):
        if out is None:
            return "; without --out nothing is kept"
        trace = out / "trace.jsonl" if verb == "eval" else out
        more = "the same command plays the others" if verb == "eval" else "--append plays the others"
        return f"; episodes that had ended are in {trace}: {more}" if trace.is_file() else "; no episode had ended"
    return ""


def system_failure(error: Exception) -> str | None:
    """One line for a failure of the system that nothing below has explained; None for what is no such thing."""
    if no_room(error):
        where = getattr(error, "filename", None)
        return f"no room left on the disk{'' if where is None else f' for {where}'}: make room and run it again"
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get((error.name or "").partition(".")[0])):
        return f"this needs {error.name}: pip install 'turngym[{extra}]'"
    if isinstance(error, OSError) and error.errno in PLACES:
        where = error.filename if error.filename is not None else "a file"
        return f"{where}: {error.strerror}"
    return None


PLACES = (
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EIO),
    *(errno.ENAMETOOLONG, errno.ELOOP, errno.EMFILE, errno.ENFILE, errno.EBUSY, errno.ETXTBSY, errno.ESTALE),
)
"""What says that a file or folder cannot be used as asked."""
EXTRAS = {
    **dict.fromkeys(("torch", "transformers", "safetensors", "jinja2", "tensorboard", "matplotlib"), "train"),
    **dict.fromkeys(("flask", "waitress", "httpx"), "serve"),
    "faiss": "dense",
    "pyarrow": "parquet",
    "peft": "lora",
    "ray": "ray",
    "openai": "endpoint",
    "textworld": "alfworld",
}
"""Extra by optional package."""


def _out(argv: Sequence[str]) -> Path | None:
    for place, word in enumerate(argv):
        name, equals, value = word.partition("=")
        if name == "--out":
            following = argv[place + 1 : place + 2]
            return Path(value) if equals else Path(following[0]) if following else None
    return None


# From a command line and a configuration file to settings: flags override the file, old names are warned of.

T = TypeVar("T")
CONFIG = "--config"


def parse(cls: type[T], argv: Sequence[str], *, prog: str, description: str) -> T:
    """Options of class `cls` from `argv`, which may name a configuration file with `--config FILE`.

    A setting outside its range is explained, and the exit status is 2. Raises SettingsError for a file that sets what
    does not exist, or to what it cannot be.
    """
    words, files = take_option(current(argv), CONFIG)
    if not files:
        return tyro.cli(cls, args=words, prog=prog, description=_with_config(description))
    path = Path(files[-1])
    default = from_table(cls, read_toml(path), str(path), missing=tyro.MISSING)
    return tyro.cli(cls, args=words, prog=prog, description=_with_config(description), default=default)


def take_option(argv: Sequence[str], name: str) -> tuple[list[str], list[str]]:
    """`argv` without every `name VALUE` and `name=VALUE`, and the values. TurngymError where one has no value."""
    rest: list[str] = []
    values: list[str] = []
    words = iter(argv)
    for word in words:
        if word == name:
            value = next(words, None)
            if value is None or value.startswith("--"):
                raise TurngymError(f"{name} needs a value")
            values.append(value)
        elif word.startswith(f"{name}="):
            values.append(word.removeprefix(f"{name}="))
        else:
            rest.append(word)
    return rest, values


def _with_config(description: str) -> str:
    return f"{description} --config FILE reads options from a TOML file; those given here override it."


def flag(key: str) -> str:
    """The option that sets `key` (`grpo_kd.kl_coef`)."""
    return f"--{key.replace('_', '-')}"


def name_of(word: str) -> str:
    """The option that a word of a command line names, in dashes and without its value."""
    return word.partition("=")[0].replace("_", "-")


def is_option(word: Any) -> bool:
    """Whether a word of a command line names an option, rather than being a value (as negative numbers are)."""
    return len(word) > 2 and word.startswith("--")


# Help for many settings on one screen: a line for each, grouped, the ones that everybody needs first.

LEFT = 36
"""Columns of the options themselves."""


def width() -> int:
    """Columns to write in: those of the terminal, 80 to 120."""
    return min(max(shutil.get_terminal_size((100, 24)).columns, 80), 120)


def section(title: str, settings: Sequence[Setting], *, whole: bool = False) -> Iterator[str]:
    """A title and a line for each setting; `whole` explains each in all its words."""
    if settings:
        yield ""
        yield f"{title}:"
    for setting in settings:
        yield from _lines(setting, whole)


def _lines(setting: Setting, whole: bool) -> Iterator[str]:
    left = f"  {flag(setting.key)} {_default_text(setting)}".rstrip()
    text, start = describe(setting), max(LEFT, len(left) + 1)
    if not whole:
        room = width() - start
        yield f"{left:<{start}}{textwrap.shorten(text, room, placeholder=' ...')}".rstrip() if room > 12 else left
        return
    rows = textwrap.wrap(text, width() - LEFT) or [""]
    yield f"{left:<{LEFT}}{rows.pop(0)}" if start == LEFT else left
    yield from (f"{'':<{LEFT}}{row}" for row in rows)


def describe(setting: Setting) -> str:
    """What a setting does, with the values that it takes."""
    text = docs_of(setting.group).get(setting.name, "")
    return f"{text} ({', '.join(choices)})" if (choices := _choices(setting.type)) else text


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return [str(item) for item in get_args(kind)]
    found = [choice for item in get_args(kind) for choice in _choices(item)] if get_origin(kind) is not tuple else []
    return list(dict.fromkeys(found))


def _default_text(setting: Setting) -> str:
    value = setting.default
    if value is MISSING:
        return "(required)"
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, bool):
        return "(on)" if value else ""
    if isinstance(value, tuple):
        return " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


@cache
def docs_of(cls: type[Any]) -> Mapping[str, str]:
    """What stands under each field of a dataclass, as one line; nothing where there is no source to read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for field, following in pairwise(body):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[field.target.id] = " ".join(str(following.value.value).split())
    return found


# `--preset list`: what the published set-ups set, for every verb that has the option.


def list_presets(argv: Sequence[str]) -> bool:
    """Print the table if `argv` asks for it; whether it did."""
    if "list" not in take_option(argv, "--preset")[1]:
        return False
    print(table_text(preset_table(), "presets (docs/presets.md says where they come from)"), end="")
    return True


# Options of `turngym train` that put it into an embedded world, and that make and distill its tiny models.


def train_words(world: EmbeddedWorld, split: str | None = None) -> list[str]:
    """What is played."""
    given = world.settings(split)
    words = ["--env", given["env"], "--split", given["split"], "--env-kwargs", json.dumps(given["env_kwargs"])]
    return [*words, "--max-turns", str(given["max_turns"])]


def distill_words(world: EmbeddedWorld, split: str | None = None) -> list[str]:
    """Distillation with the tiny models."""
    recipe = world.distill
    words = [*train_words(world, split), "--episodes", str(recipe.episodes), "--micro-tokens", "2048"]
    words += ["--threads", "1", "--optimizer.lr", str(recipe.lr), "--optimizer.lr-warmup", str(recipe.warmup)]
    words += ["--optimizer.schedule", "cosine", "--optimizer.weight-decay", "0"]
    return [*words, "--eval-every", "10", "--eval-samples", "1"]


def sft_words(world: EmbeddedWorld, recipe: TinyRecipe) -> list[str]:
    """The supervised fine-tuning that makes a tiny model."""
    low, high = recipe.noise
    words = ["--algorithm", "sft", "--expert", world.expert, "--noise", str(low), str(high)]
    words += ["--mistakes", str(recipe.mistakes), "--steps", str(recipe.steps), "--seed", str(recipe.seed)]
    words += ["--episodes", str(recipe.episodes), "--optimizer.lr", str(recipe.lr)]
    words += ["--optimizer.schedule", "cosine", "--optimizer.lr-warmup", str(min(20, recipe.steps // 5))]
    words += ["--optimizer.betas", "0.9", "0.95", "--checkpoint-every", "50", "--micro-tokens", "2048"]
    words += ["--sft.weight", recipe.weight, "--threads", "1"]
    if recipe.players:
        words += ["--players", recipe.players, "--loop-after", str(recipe.loop_after)]
        words += ["--loop-slips", str(recipe.loop_slips), "--sft.train-on", "both"]
    return [*words, *train_words(world)]
