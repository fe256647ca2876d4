"""Old names of options, accepted for one release with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest

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
            words.append(f"--{name}{equals}{_value(name, value)}" if equals else f"--{name}")
        else:
            words.append(_value(name, word))
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


def _value(name: str, value: str) -> str:
    now = VALUES.get((name.replace("_", "-"), value))
    if now is None:
        return value
    _warn(f"--{name} {value}", f"--{name} {now}")
    return now


def _warn(old: str, new: str) -> None:
    warnings.warn(f"{old} is now {new}; the old name will not be accepted any more", FutureWarning, stacklevel=4)
