"""Training from Python in a few lines, and an algorithm of another package by every name it may have."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import loo
import numpy as np
import pytest
import torch
from late import late
from metric_columns import known_metric
from tiny_runs import columns, command, untimed

from turngym.core.errors import SettingsError, TurngymError
from turngym.core.nested import at
from turngym.core.setting import settings_of
from turngym.core.settings import read_toml
from turngym.scripts import train as verb
from turngym.trainers import AlgorithmSpec, FixedDepth, OptimizerConfig, RunConfig, Targets, train
from turngym.trainers.algorithm import TokenLosses
from turngym.trainers.algorithm_spec import BUILT_IN, find_algorithm
from turngym.trainers.checked_parts import PARTS
from turngym.trainers.metrics import MetricsLog, read_metrics
from turngym.trainers.token_weights import Static
from turngym.trainers.train_config import config_class

torch.set_num_threads(1)
SMALL_RUN: dict[str, Any] = {"steps": 2, "episodes": 4, "max_turns": 3, "threads": 1, "device": "cpu"}
QUIET: dict[str, Any] = {"tracker": None, "eval_every": 0, "progress": False}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's algorithm as a package, installed with an entry point: `my_loo:ALGORITHM`, also called `loo`."""
    shutil.copy(loo.__file__, tmp_path / "my_loo.py")
    info = tmp_path / "my_loo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-loo\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turngym.algorithms]\nloo = my_loo:ALGORITHM\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize(
    ("env_kwargs", "text"),
    [
        ({"max_turns": 2}, "max_turns"),
        ({"split": "generated_unseen"}, "split"),
        ({"channel": "tool"}, "channel"),
    ],
)
def test_the_environment_is_told_nothing_twice(
    models: Path, tmp_path: Path, env_kwargs: dict[str, Any], text: str
) -> None:
    with pytest.raises(TurngymError, match=text):
        train(
            "grpo",
            student=models / "student",
            out=tmp_path / "run",
            env="turngym/ALFWorld-v0",
            split="generated",
            env_kwargs=env_kwargs,
            **(SMALL_RUN | QUIET),
        )
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_train_in_a_few_lines_is_what_the_command_does(models: Path, tmp_path: Path) -> None:
    result = train(
        "turnopd",
        student=models / "student",
        teacher=models / "teacher",
        out=tmp_path / "door",
        env="turngym/ALFWorld-v0",
        env_kwargs={"on_invalid": "noop"},
        optimizer=OptimizerConfig(lr=1e-2),
        turnopd={"depth": {"h_min": 1}},
        **(SMALL_RUN | QUIET),
    )
    assert result.step == 2
    assert (result.model / "config.json").exists()
    more = ("--steps", "2", "--eval-every", "0", "--optimizer.lr", "1e-2", "--turnopd.depth.h-min", "1")
    verb.main(command(models, tmp_path / "verb", "turnopd", *more))
    assert untimed(tmp_path / "door") == untimed(tmp_path / "verb")
    train(config=tmp_path / "door" / "config.toml", out=tmp_path / "again", progress=False)
    assert untimed(tmp_path / "again") == untimed(tmp_path / "door")
    assert "train('turnopd', student=" in (tmp_path / "door" / "config.toml").read_text()
    with pytest.raises(TurngymError, match="already holds a run"):
        train(config=tmp_path / "door" / "config.toml", progress=False)
    assert train(config=tmp_path / "door" / "config.toml", progress=False, resume=True).step == 2


def test_what_cannot_be_is_refused_in_a_line() -> None:
    for settings, text in (
        ({"student": "s"}, "out must be given"),
        (
            {"student": "s", "out": "o", "stpes": 3},
            r"train\('opd'\): there is no setting 'stpes'\. Did you mean 'steps'",
        ),
        ({"student": "s", "out": "o", "grpo": {"n": 2}}, r"no setting grpo\. It belongs to grpo\."),
        ({"student": "s", "out": "o", "optimizer": "fast"}, "optimizer is 'fast'; valid: a table of settings"),
        (
            {"student": "s", "out": "o", "optimizer": RunConfig()},
            "optimizer is .*RunConfig.*; valid: a table of settings",
        ),
        ({"student": "s", "out": "o", "steps": True}, "steps is True; valid: a whole number"),
    ):
        with pytest.raises(SettingsError, match=text):
            train("opd", **settings)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("name", late(("loo", "my_loo:ALGORITHM"), "loo"))
def test_an_algorithm_of_another_package(
    name: str, models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_algorithm(name).table == "loo"
    with pytest.raises(SystemExit):
        verb.resolved([name, "--help"])
    text = capsys.readouterr().out
    assert "--loo.cap 2" in text
    assert "Largest importance weight" in text
    with pytest.raises(TurngymError, match=r"It belongs to grpo\."):
        verb.resolved([name, "--student", "s", "--out", "o", "--grpo.n", "3"])
    out = tmp_path / "run"
    words = ["--student", str(models / "student"), "--loo.n", "2", "--episodes", "4", "--max-turns", "3"]
    words += ["--steps", "2", "--device", "cpu", "--threads", "1", "--tracker", "none", "--eval-every", "0"]
    words += ["--optimizer.minibatches", "2", "--env-kwargs", '{"on_invalid": "noop"}']
    assert verb.main([name, *words, "--out", str(out)]) == 0
    rows = untimed(out)
    assert [row["token/baseline"] for row in rows] == pytest.approx([row["reward/mean"] for row in rows])
    assert all(0.0 <= row["token/capped"] <= 1.0 for row in rows)
    assert all(known_metric(column) for row in rows for column in row)
    assert at(read_toml(out / "config.toml"), "method.loo") == {"n": 2, "cap": 2.0}
    verb.main(["--config", str(out / "config.toml"), "--out", str(tmp_path / "again")])
    assert untimed(tmp_path / "again") == rows


@pytest.mark.usefixtures("package")
def test_names_that_stand_for_no_algorithm() -> None:
    for name, text in (
        ("lo", r"unknown algorithm 'lo'.*loo.*Did you mean"),
        ("my_loo:ALGORITHMS", r"my_loo has no 'ALGORITHMS'.*Did you mean 'ALGORITHM'"),
        ("my_loo:build", "is function; valid: an AlgorithmSpec"),
        ("no_such_package:ALGORITHM", "cannot import 'no_such_package'"),
    ):
        with pytest.raises(TurngymError, match=text):
            find_algorithm(name)


def of_mine(**changes: Any) -> AlgorithmSpec:
    """The other package's algorithm with other parts: those of the spec, or of what it builds."""
    own = {name: changes.pop(name) for name in [*changes] if name in AlgorithmSpec.__dataclass_fields__}
    build = own.pop("build", lambda config, context: replace(loo.build(config, context), **{"group": 4} | changes))
    return replace(loo.ALGORITHM, build=build, **own)


def of_advantage(make: Callable[[int], Any]) -> AlgorithmSpec:
    """The other package's algorithm with the advantages that `make` makes of the number of tokens."""

    def target_fn(batch: Any, episodes: Any, scorers: Any) -> Targets:
        return Targets(advantage_N=make(batch.tokens), extra={"baseline": np.zeros(batch.tokens, np.float32)})

    return of_mine(target_fn=target_fn)


def of_log(log: Any) -> AlgorithmSpec:
    """The other package's algorithm with another log."""

    def target_fn(batch: Any, episodes: Any, scorers: Any) -> Targets:
        zeros = np.zeros(batch.tokens, np.float32)
        return Targets(advantage_N=zeros, extra={"baseline": zeros}, log=log)

    return of_mine(target_fn=target_fn)


def of_weight(make: Callable[[int], Any]) -> AlgorithmSpec:
    """The other package's algorithm with the weights that `make` makes of the number of tokens."""
    return of_mine(weight=Static(lambda batch: make(batch.tokens)))


def of_loss(make: Callable[[Any], Any]) -> AlgorithmSpec:
    """The other package's algorithm with what `make` makes of the log-probabilities as its token loss."""
    return of_mine(token_loss=lambda tokens: make(tokens.logp_n))


@dataclass(frozen=True)
class Counting:
    """A filter that keeps every episode and says `found` of them."""

    found: Any

    def __call__(self, episodes: Any) -> Any:
        return list(episodes)

    def row(self, episodes: Any) -> Any:
        return self.found


def broken(config: Any, context: Any) -> Any:
    raise ZeroDivisionError("division by zero")


def some_quickly(rows: list[tuple[AlgorithmSpec, str]]) -> list[Any]:
    """Each row begins a run; the others are long."""
    return [pytest.param(*row, marks=() if place % 3 == 0 else pytest.mark.long) for place, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("spec", "said"),
    some_quickly(
        [
            (of_mine(uses=["teacher"]), r"'loo:MINE': its uses are \['teacher'\]; valid: a frozenset of teacher"),
            (of_mine(config=int), "its config is .*int.*; valid: a Spec"),
            (of_mine(build=lambda config, context: None), "loo: its build returned NoneType; valid: an Algorithm"),
            (of_mine(build=broken), "loo: its build failed: ZeroDivisionError: division by zero"),
            (of_mine(group=0), "loo: its group is 0; valid: a whole number of at least 1"),
            (of_mine(settings={"a": {1, 2}}), "loo: its settings are no JSON"),
            *((of_mine(**{part: None}), f"loo: its {part} is None") for part in PARTS),
            (of_mine(depth=FixedDepth), "loo: its depth is <class"),
            (of_mine(target_fn=lambda *given: sys.exit(5)), "loo: its target_fn failed: SystemExit: 5"),
            (of_loss(lambda logp: 1 / 0), "the token loss failed: ZeroDivisionError"),
            (of_mine(target_fn=lambda *given: Targets(reward=[1.0])), "loo: its reward is"),  # type: ignore[arg-type]
            (of_mine(target_fn=lambda *given: None), "loo: its target_fn returned NoneType"),
            (
                of_advantage(lambda n: np.zeros(n + 1, np.float32)),
                r"loo: its advantage_N has the shape \[\d+\]; valid: ",
            ),
            (of_advantage(lambda n: np.full(n, None)), "its advantage_N holds object; valid: numbers"),
            (
                of_mine(target_fn=lambda batch, *_: Targets(topk_ids_NK=np.zeros((batch.tokens, 2), np.int64))),
                "topk_logp_NK",
            ),
            (of_log(5), "its log is 5; valid: numbers by name"),
            (of_log({"turn/mine": 1.0}), "metrics of step 1: turn/mine is 1.0"),
            (of_log({"mine": "many"}), "metrics of step 1: mine is 'many'; valid: a number"),
            (of_log({"step": 3}), "its log has 'step', a column of every run"),
            (of_mine(select=lambda episodes: None), "loo: its select gave None; valid: a list of episodes"),
            (of_mine(select=iter), "its select gave .*iterator.*; valid: a list of episodes"),
            (of_mine(select=Counting(5)), "the row of its select is 5; valid: numbers by name"),
            (of_mine(select=Counting({"loss": 1.0})), "the row of its select has 'loss', a column of every run"),
            (of_weight(lambda n: np.ones(n)), "loo: its weights sum to"),
            (of_weight(lambda n: np.full(n, np.nan)), "its weights sum to nan"),
            (of_loss(lambda logp: -logp), "the token loss gave Tensor; valid: TokenLosses"),
            (of_loss(lambda logp: TokenLosses(loss_n=-logp.mean(), diagnostics={})), r"its loss_n has the shape \[\]"),
            (of_loss(lambda logp: TokenLosses(loss_n=-logp.detach(), diagnostics={})), "its loss_n has no gradient"),
            (
                of_loss(lambda logp: TokenLosses(loss_n=-logp, diagnostics={"a": logp[None]})),
                r"its a has the shape \[1, ",
            ),
            (of_loss(lambda logp: TokenLosses(loss_n=-logp, diagnostics={"entropy": logp})), "a diagnostic 'entropy'"),
        ]
    ),
)
def test_a_part_that_does_not_fit_is_named(
    spec: AlgorithmSpec, said: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loo, "MINE", spec, raising=False)
    monkeypatch.setitem(sys.modules, "loo", loo)
    with pytest.raises(TurngymError, match=said):
        train("loo:MINE", student=models / "student", out=tmp_path / "run", **(SMALL_RUN | QUIET))


def test_a_loss_may_measure_one_form_of_the_divergence_alone(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = of_loss(lambda logp: TokenLosses(loss_n=-logp, diagnostics={"kl_bin": logp.detach()}))
    monkeypatch.setattr(loo, "MINE", spec, raising=False)
    monkeypatch.setitem(sys.modules, "loo", loo)
    train("loo:MINE", student=models / "student", out=tmp_path / "run", **(SMALL_RUN | QUIET))
    (row, *_) = untimed(tmp_path / "run")
    assert row["kl_bin"] < 0
    assert row["kl_raw"] is None


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (np.float32(0.5), 0.5),
        (np.float32("nan"), None),
        (np.int64(3), 3),
        *((value, "refused") for value in ("many", [1.0], {}, object(), 10**400, np.zeros(2))),
    ],
)
def test_a_row_that_could_not_be_read_is_not_written(value: Any, read: Any, tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, tracker=None)
    log.open(0)
    log.write({"step": 0, "kind": "eval", "eval/avg": 0.5})
    row = {"step": 1, "kind": "eval", "eval/mine": value}
    if read == "refused":
        with pytest.raises(TurngymError, match="metrics of step 1: eval/mine is"):
            log.write(row)
    else:
        log.write(row)
    found = read_metrics(tmp_path)
    assert [one["step"] for one in found] == ([0] if read == "refused" else [0, 1])
    assert found[-1].get("eval/mine") == (None if read == "refused" else read)


def test_a_run_whose_updates_are_all_dropped_says_so(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(loo, "MINE", of_advantage(lambda n: np.full(n, np.nan, np.float32)), raising=False)
    monkeypatch.setitem(sys.modules, "loo", loo)
    words = ["--student", str(models / "student"), "--episodes", "4", "--max-turns", "3", "--steps", "1"]
    words += ["--eval-every", "0", "--tracker", "none", "--device", "cpu", "--threads", "1"]
    assert verb.main(["loo:MINE", *words, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr()
    assert "1 steps in" in said.out
    assert "none of which made an update" in said.out
    assert "step 1: no update: the gradient was not finite" in said.err
    assert "1 of 1 steps dropped updates" in said.err.replace("\n", " ")
    assert columns(tmp_path / "run", "updates", "updates_skipped") == [(0, 1)]


def test_every_built_in_algorithm_is_found_under_its_name() -> None:
    for name in BUILT_IN:
        spec = find_algorithm(name)
        assert spec.name == name
        assert spec.table in settings_of(config_class(name))["method"].tables[0].__struct_fields__
        assert spec.help.endswith(".")


def test_new_columns_are_selected_and_others_are_left_whole() -> None:
    extra = {"weight": np.arange(4.0), "pairs": np.arange(8).reshape(4, 2)}
    targets = Targets(advantage_N=np.arange(4, dtype=np.float32), extra=extra, reward=np.ones(2))
    part = targets.select(np.array([3, 1]))
    assert part.advantage_N is not None
    assert part.advantage_N.tolist() == [3.0, 1.0]
    assert part.extra["weight"].tolist() == [3.0, 1.0]
    assert part.extra["pairs"].tolist() == [[6, 7], [2, 3]]
    assert part.reward is targets.reward
    assert part.topk_ids_NK is None
