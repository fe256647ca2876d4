"""Every number of every verb has a range: what is outside is one line, before anything is played."""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

import turngym.scripts
from turngym.core import spec
from turngym.core.errors import TurngymError
from turngym.core.settings import Range, read_toml
from turngym.core.spec import SettingsError
from turngym.scripts import eval, rollout, serve_proxy, train
from turngym.scripts.main import main
from turngym.trainers.algorithm import BUILT_IN
from turngym.trainers.live.proxy_options import ALGORITHMS, proxy_class
from turngym.trainers.train_config import config_class, train_config

LEAVES = ("turngym.scripts.main", "turngym.scripts.study.main", "turngym.scripts.serve", "turngym.scripts.bench")
"""Modules whose `main` only finds the verb."""


class Asked(Exception):
    """Holds the settings classes that a verb asks for."""


def classes() -> Iterator[tuple[str, type[Any]]]:
    """(verb, settings class) of every verb, as it reads them."""
    patched = pytest.MonkeyPatch()

    def asked(kinds: Any, argv: Any, *, prog: str, **more: Any) -> Any:
        raise Asked(list(kinds) if isinstance(kinds, dict) else [kinds], prog)

    yield from ((f"turngym train {name}", config_class(name)) for name in BUILT_IN)
    yield from (("turngym serve proxy", proxy_class(name)) for name in (None, *ALGORITHMS))
    try:
        for module in pkgutil.walk_packages(turngym.scripts.__path__, "turngym.scripts."):
            if module.name in LEAVES or "examples" in module.name or module.name.endswith(("__main__", "bootstrap")):
                continue
            verb = importlib.import_module(module.name)
            # of a package of verbs, `main` is the module that finds them
            if not callable(getattr(verb, "main", None)) or verb in (train, serve_proxy):
                continue
            if verb in (eval, rollout):
                yield from ((verb.VERB.name, kind) for kind in (verb.VERB.own, verb.VERB.spec))
                continue
            for name in ("read_options", "run_verb"):
                patched.setattr(verb, name, asked, raising=False)
            with pytest.raises(Asked) as caught:
                verb.main([])
            kinds, prog = caught.value.args
            yield from ((prog, one) for one in kinds)
    finally:
        patched.undo()


def holds(kind: Any, number: type) -> bool:
    return kind is number or any(holds(one, number) for one in get_args(kind))


ALL = {(verb, cls.__name__, path): one for verb, cls in classes() for path, one in spec.settings_of(cls).items()}


def test_all_verbs_are_here() -> None:
    verbs = {place[0] for place in ALL}
    for verb in ("eval", "play", "report", "plan", "train grpo", "serve proxy", "bench gpu", "study plan", "trace"):
        assert f"turngym {verb}" in verbs


def outside(item: Any) -> Iterator[float]:
    """Values that no number of the setting may have: each is a type that it could be read as."""
    if holds(item.type, float):
        yield math.nan
        yield -math.inf
        if item.range is None or item.range.most is None or item.range.most < math.inf:
            yield math.inf
    if holds(item.type, int) and "seed" not in item.name:
        yield 10**30
    if item.type is not float or item.range is not None:  # a Spec's float without a note may be any finite number
        yield -1 if item.range is None or item.range.least > -1 else -math.inf


def test_no_option_takes_a_number_outside_its_range() -> None:
    numbers = {place: one for place, one in ALL.items() if holds(one.type, int) or holds(one.type, float)}
    numbers = {place: one for place, one in numbers.items() if not one.free}
    assert len(numbers) > 600
    for place, one in numbers.items():
        count = len(one.default) if isinstance(one.default, tuple) and one.default else 1
        for value in outside(one):
            with pytest.raises(TurngymError):
                spec.read_word(one, [str(value)] * count, str(place))
        for value in one.default if isinstance(one.default, tuple) else (one.default,):
            if isinstance(value, int | float) and not isinstance(value, bool):
                assert spec.read_word(one, [str(value)] * count, str(place)) == (
                    (value,) * count if isinstance(one.default, tuple) else value
                )


def test_ranges_in_words() -> None:
    assert [Range().refuses(value) for value in (0, 10**9, 0.0, 1e300)] == [""] * 4
    assert Range(1, 9).refuses(0) == Range(1).refuses(math.nan) == Range(1).refuses(-math.inf) == "at least 1"
    assert Range(1, 9).refuses(10) == "at most 9"
    assert Range(above=True).refuses(0.0) == Range(above=True, most=math.inf).refuses(math.nan) == "more than 0"
    assert Range().refuses(math.inf) == Range(-sys.float_info.max).refuses(math.nan) == "a finite number"
    assert Range(most=math.inf).refuses(10**400) == Range(above=True, most=math.inf).refuses(math.inf) == ""


LINES = [
    (
        ["eval", "--panel", "alfworld-quickstart", "--samples", "0"],
        "--samples is '0'; valid: a whole number of at least 1",
    ),
    (["eval", "--panel", "alfworld-quickstart", "--temperature", "nan"], "temperature is "),
    (
        ["eval", "--panel", "alfworld-quickstart", "--temperature", "-1"],
        "temperature is '-1'; valid: a number of at least 0",
    ),
    (["eval", "--panel", "alfworld-quickstart", "--noise", "1.5"], "noise is '1.5'; valid: a number of at most 1"),
    (
        ["eval", "--panel", "alfworld-quickstart", "--workers", "workers.workers is 5000; valid: at most 1,024"],
        "5000",
    ),
    (["rollout", "--seed", "-1"], "--seed is '-1'; valid: a whole number of at least 0"),
    (["rollout", "--tasks", "99999999999"], "count is 99999999999; valid: a whole number of at most 1000000000"),
    (["play", "--seed", "-1"], "--seed is -1; valid: at least 0"),
    (["plan", "--gpus", "1", "0"], "--gpus is 0; valid: at least 1"),
    (["trace", "view", "x.jsonl", "--port", "70000"], "--port is 70000; valid: at most 65,535"),
    (["serve", "retrieval", "--index", "x", "--drain", "inf"], "--drain is inf; valid: a finite number"),
    (["train", "opd", "--student", "x", "--out", "y", "--seed", "-1"], "--seed is -1; valid: at least 0"),
    (
        ["train", "opd", "--student", "x", "--out", "y", "--optimizer.weight-decay", "nan"],
        "--optimizer.weight-decay is nan; valid: at",
    ),
    (
        ["train", "opd", "--student", "x", "--out", "y", "--episodes", "9999999"],
        "--episodes is 9999999; valid: at most",
    ),
    (
        ["serve", "proxy", "--student", "x", "--out", "y", "--port", "-2"],
        "--port is '-2'; valid: a whole number of at least 0",
    ),
    (
        ["train", "opd", "--student", "x", "--out", "y", "--optimizer.betas", "0.9", "1"],
        "--optimizer.betas is 1.0; valid: less than 1",
    ),
    (
        ["train", "ppo-kd", "--student", "x", "--out", "y", "--ppo-kd.gamma", "2"],
        "--ppo-kd.gamma is 2.0; valid: at most 1",
    ),
    (["trace", "print", "a.jsonl", "--limit", "1", "--limit", "2"], "--limit is given twice"),
    (["study", "plan", "--most-seeds", "0"], "--most-seeds is 0; valid: at least 1"),
]


@pytest.mark.parametrize(("words", "said"), LINES)
def test_a_command_ends_in_one_line(words: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    assert said in line
    assert list(tmp_path.iterdir()) == []


def test_a_file_and_python_have_the_same_ranges(tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text('student = "x"\nout = "y"\nseed = -1\n')
    with pytest.raises(SettingsError, match=r"c\.toml: seed is -1; valid: at least 0"):
        train.parse(["opd", "--config", str(tmp_path / "c.toml")])
    with pytest.raises(SettingsError, match=r"options: eps is nan; valid: at least 0"):
        train_config("opd", {"student": "x", "out": "y", "optimizer": {"eps": math.nan}}, "options")
    assert read_toml(tmp_path / "c.toml")["seed"] == -1


def test_a_range_has_its_lower_end_first() -> None:
    with pytest.raises(SettingsError, match=r"noise is 0\.5 to 0\.1"):
        train_config("sft", {"student": "x", "out": "y", "sft": {"noise": [0.5, 0.1]}}, "options")
