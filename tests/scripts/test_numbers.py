"""Every number of every verb has a range: what is outside is one line, before anything is played."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from msgspec import Meta

import turngym.scripts
from turngym.agents.evaluation.coverage import SimulatedStudy
from turngym.agents.executor.worker_count import LocalProcesses, RayActors
from turngym.agents.proxy.config import ProxySettings
from turngym.core import spec
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.setting import settings_of
from turngym.core.settings import read_toml
from turngym.scripts import serve_proxy, train
from turngym.scripts.main import main
from turngym.trainers import run_config
from turngym.trainers.algorithm_spec import BUILT_IN, find_algorithm
from turngym.trainers.algorithms import gigpo, luffy, ppo, turnopd
from turngym.trainers.live.proxy_options import ALGORITHMS, proxy_class
from turngym.trainers.train_config import config_class, train_config
from turngym.trainers.training_costs import StepWorkload


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
            # its `main` only finds the verb
            if (
                module.name == "turngym.scripts.main"
                or "examples" in module.name
                or module.name.endswith(("__main__", "bootstrap"))
            ):
                continue
            verb = importlib.import_module(module.name)
            # of a package of verbs, `main` is the module that finds them
            if not callable(getattr(verb, "main", None)) or verb in (train, serve_proxy):
                continue
            if hasattr(verb, "VERB"):
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


ALL = {(verb, cls.__name__, path): one for verb, cls in classes() for path, one in settings_of(cls).items()}


def test_all_verbs_are_here() -> None:
    verbs = {place[0] for place in ALL}
    for verb in ("eval", "play", "report", "plan", "train grpo", "serve proxy", "bench gpu", "study plan", "trace"):
        assert f"turngym {verb}" in verbs


def bounds(kind: Any) -> Iterator[Meta]:
    """The notes of the numbers in a type."""
    yield from (note for note in getattr(kind, "__metadata__", ()) if isinstance(note, Meta))
    for one in get_args(kind):
        yield from bounds(one)


def outside(item: Any) -> Iterator[float]:
    """Values that no number of the setting may have: each is a type that it could be read as."""
    notes = list(bounds(item.type))
    if holds(item.type, float):
        yield from (math.nan, -math.inf)
        if any(note.le is not None or note.lt is not None for note in notes):
            yield math.inf
    if holds(item.type, int) and "seed" not in item.name:
        yield 10**30
    least = min((-math.inf if note.ge is note.gt else note.ge or note.gt or 0 for note in notes), default=0)
    yield -1 if least > -1 else -math.inf


def test_no_option_takes_a_number_outside_its_range() -> None:
    numbers = {place: one for place, one in ALL.items() if holds(one.type, int) or holds(one.type, float)}
    numbers = {place: one for place, one in numbers.items() if not one.free}
    assert len(numbers) > 600
    for place, one in numbers.items():
        count = len(one.default) if isinstance(one.default, tuple) and one.default else 1
        for value in outside(one):
            with pytest.raises(TurngymError):
                spec.read_word(one, [str(value)] * count, str(place))
        usual = one.default if isinstance(one.default, tuple) else (one.default,)
        if usual and all(isinstance(value, int | float) and not isinstance(value, bool) for value in usual):
            assert spec.read_word(one, list(map(str, usual)), str(place)) == one.default


LINES = [
    (
        ["eval", "--panel", "alfworld-quickstart", "--samples", "0"],
        "--samples is '0'; valid: a whole number of at least 1",
    ),
    (["eval", "--panel", "alfworld-quickstart", "--noise", "1.5"], "noise is '1.5'; valid: a number of at most 1"),
    (["rollout", "--seed", "-1"], "--seed is '-1'; valid: a whole number of at least 0"),
    (["rollout", "--tasks", "99999999999"], "count is 99999999999; valid: a whole number of at most 1000000"),
    # each of them is a job in memory
    (["rollout", "--samples", "1e9"], "--samples is '1e9'; valid: a whole number of at most 1000000"),
    (["trace", "view", "x.jsonl", "--port", "70000"], "--port is '70000'; valid: a whole number of at most 65535"),
    (["serve", "retrieval", "--index", "x", "--drain", "inf"], "--drain is 'inf'; valid: a finite number"),
    (
        ["train", "opd", "--student", "x", "--out", "y", "--episodes", "9999999"],
        "--episodes is '9999999'; valid: a whole number of at most 1000000",
    ),
    (
        ["train", "opd", "--student", "x", "--out", "y", "--optimizer.betas", "0.9", "1"],
        "--optimizer.betas is '0.9 1'; valid: a number below 1",
    ),
    (["trace", "print", "a.jsonl", "--limit", "1", "--limit", "2"], "--limit is given twice"),
    (["study", "plan", "--most-seeds", "0"], "--most-seeds is '0'; valid: a whole number of at least 1"),
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
    with pytest.raises(SettingsError, match=r"c\.toml: seed is -1; valid: a whole number of at least 0"):
        train.resolved(["opd", "--config", str(tmp_path / "c.toml")])
    with pytest.raises(SettingsError, match=r"options: weight_decay is nan; valid: a number of at least 0"):
        train_config("opd", {"student": "x", "out": "y", "optimizer": {"weight_decay": math.nan}}, "options")
    assert read_toml(tmp_path / "c.toml")["seed"] == -1


WRONG: list[tuple[type[Any], dict[str, Any]]] = [
    *((turnopd.DepthConfig, {name: 0}) for name in ("h_min", "h_max", "probe_interval", "min_successes")),
    *((turnopd.DepthConfig, row) for row in ({"rho": 1.2}, {"p": 1.1}, {"p": 0.0}, {"probe_share": 0.0})),
    *((gigpo.GigpoConfig, row) for row in ({"n": 1}, {"gamma": 1.5}, {"w_step": -1.0}, {"similarity": 0.0})),
    *((ppo.PpoConfig, row) for row in ({"gamma": 1.1}, {"lam": 1.1}, {"kl_coef": math.nan})),
    *((cls.config, {"n": 1}) for cls in map(find_algorithm, ("grpo", "rloo", "atod", "sdar", "grpo-kd", "luffy"))),
    *((luffy.PrefixSchedule, row) for row in ({"high": 1.5}, {"count": 0}, {"steps": 0})),
    *((run_config.Renewed, {"reference_rate": rate, "reference_every": 1}) for rate in (0.0, 1.5)),
    (run_config.Renewed, {"reference_every": 0}),
    *((run_config.DistillConfig, row) for row in ({"top_k": 0}, {"beta": 1.1}, {"importance": (0.1, 0.9)})),
    *((run_config.CriticConfig, row) for row in ({"lr": 0.0}, {"clip": 0.0}, {"max_grad_norm": math.inf})),
    *((StepWorkload, row) for row in ({"slots": 0}, {"compute_share": 1.5}, {"start_us": -1.0}, {"reserve": 1.0})),
    *((LocalProcesses, row) for row in ({"processes": 0}, {"step_timeout": 0.0, "processes": 1})),
    (RayActors, {"worker_gpus": -1.0, "actors": 1}),
    *((ProxySettings, row) for row in ({"max_waiting": 0}, {"idle": 0.0}, {"max_tokens": 0})),
    *((SimulatedStudy, row) for row in ({"second_seeds": 1}, {"tasks": 1}, {"rate": 1.1})),
]


@pytest.mark.parametrize(("cls", "row"), WRONG)
def test_the_ranges_are_as_meant(cls: type[Any], row: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match=rf"\b{next(iter(row))} is .*; "):
        spec.read(cls, row, "options")


def test_a_range_has_its_lower_end_first() -> None:
    with pytest.raises(SettingsError, match=r"noise is 0\.5 to 0\.1"):
        train_config("sft", {"student": "x", "out": "y", "sft": {"noise": [0.5, 0.1]}}, "options")
