"""Every option that an algorithm accepts is read: each algorithm trains a step, and who asks its settings is recorded.

A read is an access from the code of the project. What copies, compares, checks or writes a whole group of
settings reads nothing of it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import command, save_tiny

from turngym.core.errors import SettingsError
from turngym.core.nested import flat
from turngym.core.setting import Setting, fields_of, kind_of, settings_of
from turngym.core.spec import to_table
from turngym.scripts import train
from turngym.trainers.algorithm_spec import BUILT_IN, find_algorithm
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run import run_training
from turngym.trainers.run_config import DistillConfig, RunConfig
from turngym.trainers.train_config import TrainConfig, config_class, has_setting, train_config

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("__post_init__", "__eq__", "__hash__", "__repr__")
WHOLE = {
    "tables_of": "trainers/run_config.py",
    "spec_of_run": "trainers/run_spec.py",
    "unread": "trainers/train_config.py",
    "loop": "trainers/train_config.py",
}
"""Functions that take whole groups to compare, copy or write them, with their file."""
COMPOSED = (RunConfig, DistillConfig)
"""Classes that hold settings of several tables: their names are those of the settings."""
UNSEEN: Mapping[str, str] = {
    **dict.fromkeys(("processes", "actors", "ray_address", "worker_cpus", "worker_gpus"), "with --workers N or ray:N"),
    **dict.fromkeys(("retries", "worker_timeout"), "with worker processes"),
    **dict.fromkeys(("turnopd.depth.p", "turnopd.depth.cov_base"), "once enough episodes succeed"),
    "turnopd.depth.probe_interval": "after the warm-up",
    **dict.fromkeys(("loopstop.rho", "loopstop.probe_share", "loopstop.probe_interval"), "once episodes loop"),
    **dict.fromkeys(("distill.form", "distill.beta", "distill.clip"), "with other forms"),
    **dict.fromkeys(("distill.tail", "distill.importance", "distill.top_k"), "with --opd-hints.form topk"),
    **dict.fromkeys(("opd_hints.clip", "grpo.kl", "grpo_kd.kl"), "with other settings"),
    **dict.fromkeys(("luffy.a", "luffy.e", "luffy.w"), "with other shapes"),
    **dict.fromkeys(
        ("ppo_kd.student_entropy", "ppo_kd.single_step", "ppo_kd.lam", "ppo_kd.bootstrap"), "with other settings"
    ),
    **dict.fromkeys(("lm_loss.coef", "sft.mistakes", "sft.loop_after", "sft.loop_slips"), "with others"),
    "reference_rate": "with --reference-every",
    "judge_timeout": "by judges that take time",
    **dict.fromkeys(("judge_strict", "judge_repeats"), "by the judge expert"),
    "lm_loss.column": "with parquet files",
    **dict.fromkeys(("luffy.prefix.low", "luffy.prefix.steps", "luffy.prefix.share", "luffy.prefix.seed"), "others"),
    "demonstrated_tasks": "with --demonstrations",
    **dict.fromkeys(("demonstration_success", "demonstration_reward", "demonstration_fits"), "with demonstrations"),
    "expert": "where an expert plays or judges",
    **dict.fromkeys(("teacher_dtype", "shard_teacher"), "with a frozen model"),
    "dual_clip": "with a probability ratio",
}
"""Settings that need another one, which this test does not give. That they are read is looked up in the code."""


def code_of(frame: Any) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name


def is_read(frame: Any) -> bool:
    """Whether the access from `frame` is one of the project's own code, and of this one setting or to use them all."""
    file, name = code_of(frame)
    while file.endswith("dataclasses.py"):
        if name not in ("asdict", "_asdict_inner", "<listcomp>", "<dictcomp>", "<genexpr>"):
            return False
        frame = frame.f_back
        file, name = code_of(frame)
    if name == "part":
        # who asks for a setting by its name
        file, name = code_of(frame.f_back)
    if name in CHECKS or file.endswith(WHOLE.get(name, "-")):
        return False
    # parsers and writers of settings are in scripts and in core
    return any(f"/{room}/" in file for room in ("trainers", "agents")) and "/site-packages/" not in file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[type[Any] | None, str]]:
    """(owner, name) of every setting that is read; without an owner where a class holds settings of several tables."""
    found: set[tuple[type[Any] | None, str]] = set()
    owners = {owner for name in BUILT_IN for one in settings_of(config_class(name)).values() for owner in one.owners}
    names = {owner: {field.name for field in fields_of(owner)} for owner in (*owners, *COMPOSED)}

    def recorder(self: Any, name: str) -> Any:
        owner = type(self)
        if name in names.get(owner, ()) and is_read(sys._getframe(1)):
            found.add((None if owner in COMPOSED else owner, name))
        return object.__getattribute__(self, name)

    for owner in names:
        monkeypatch.setattr(owner, "__getattribute__", recorder)
    return found


def chosen(config: TrainConfig) -> dict[str, Setting]:
    """The settings that the kinds of this run have: those of other kinds do not exist in it."""
    every = settings_of(type(config))
    return {path: every[path] for path in flat(to_table(config)) if path in every}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(folder / name, seed=seed)
    return folder


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_every_accepted_option_is_read(
    algorithm: str, models: Path, tmp_path: Path, reads: set[tuple[type[Any] | None, str]]
) -> None:
    own = find_algorithm(algorithm).table
    words = ["--steps", "1", "--eval-limit", "1", "--eval-samples", "1", "--panel", "alfworld-generated-eval"]
    if has_setting(algorithm, "lm_loss.files"):
        words += ["--lm-loss.files", __file__, "--lm-loss.documents", "1"]
    words += [f"--{own}.n".replace("_", "-"), "2"] if has_setting(algorithm, f"{own}.n") else []
    if has_setting(algorithm, f"{own}.filter_groups"):
        words += [f"--{own}.filter-groups".replace("_", "-"), "off"]
    config = train.resolved(command(models, tmp_path / "run", algorithm, *words)).spec
    run_training(config, SINGLE, progress=False)
    settings = chosen(config)
    read = {
        path
        for path, one in settings.items()
        if (None, one.name) in reads or any((owner, one.name) in reads for owner in one.owners)
    }
    unread = {path for path in settings.keys() - read if not one_of(path, UNSEEN)} - {"algorithm"}
    assert not unread, f"{algorithm} accepts what it does not read: {sorted(unread)}"


def one_of(path: str, names: Mapping[str, str]) -> bool:
    """Whether `path` ends with one of the names."""
    return any(f".{path}".endswith(f".{name}") for name in names)


def test_what_needs_something_else_is_read_in_the_code() -> None:
    asked = set()
    for room in ("trainers", "agents"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            asked |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # those of `Method` are asked for by name
    asked |= {"dual_clip", "expert"}
    assert not {name for name in UNSEEN if name.rpartition(".")[2] not in asked}
    every = {path for name in BUILT_IN for path in settings_of(config_class(name))}
    assert not [name for name in UNSEEN if not any(f".{path}".endswith(f".{name}") for path in every)]


def test_what_an_algorithm_does_not_read_is_no_setting_of_it_anywhere() -> None:
    names = {
        path.split(".")[1] for name in BUILT_IN for path in settings_of(config_class(name)) if path[:7] == "method."
    }
    for name in BUILT_IN:
        table = to_table(train_config(name, {"student": "s", "out": "o"}, "test"))
        foreign = {one for one in names if not has_setting(name, one)}
        assert not foreign & table["method"].keys(), "config.toml has what nothing reads"
        for key in sorted(foreign):
            with pytest.raises(SettingsError, match=rf"there is no setting {key}\. It belongs to "):
                train_config(name, {"student": "s", "out": "o", key: {}}, "test")


def test_a_name_means_the_same_in_every_algorithm() -> None:
    """`temperature` is that of rollouts, and no other one where nothing is rolled out."""
    for name in BUILT_IN:
        for key in ("temperature", "reward", "expert", "teacher", "staleness"):
            if has_setting(name, key):
                config = train_config(name, {"student": "s", "out": "o"}, "test")
                assert key in to_table(config)["method"]


def test_the_settings_that_are_legal_at_a_time_are_few() -> None:
    config = train_config("turnopd", {"student": "s", "out": "o", "teacher": "t"}, "test")
    # ten of them are arguments of gym.make, which had stood in `env_kwargs`
    assert len(chosen(config)) <= 95
    assert kind_of(type(config.engine)) == "local"
