"""Every option that an algorithm accepts is read: each algorithm trains a step, and who asks its settings is recorded.

A read is an access from the code of the project. What copies, compares, checks, writes or fingerprints a whole group of
settings reads nothing of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import command, save_tiny

from turngym.envs.core.errors import TurngymError
from turngym.envs.core.needed import needed_keys
from turngym.envs.core.settings import Setting, SettingsError, settings_of
from turngym.scripts import train
from turngym.trainers.algorithm import BUILT_IN
from turngym.trainers.ranks import SINGLE
from turngym.trainers.run import run_training
from turngym.trainers.train_config import config_class, in_file_of, keys_of, train_config

torch.set_num_threads(1)
ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("__post_init__", "__eq__", "__hash__", "__repr__")
WHOLE = {
    "fingerprint": "trainers/run_config.py",
    "of_adapters": "trainers/identity.py",
    "of_rollouts": "trainers/identity.py",
    "open_demonstrations": "trainers/open_demonstrations.py",
}
"""Functions that take whole groups (`asdict`) to write them down, with their file."""
NEEDED = {
    (key, needed): name
    for name in reversed(BUILT_IN)
    for key, needed in needed_keys(config_class(name))
    if key in keys_of(name)
}
"""(setting, what it needs) and an algorithm that has it."""
UNSEEN: Mapping[str, str] = {
    **dict(NEEDED.keys()),
    "executor": "with --workers 1 or more, or several processes",
    **dict.fromkeys(("turnopd.depth.p", "turnopd.depth.cov_base"), "once enough episodes succeed"),
    "turnopd.depth.probe_interval": "after the warm-up",
    **dict.fromkeys(("loopstop.rho", "loopstop.probe_share", "loopstop.probe_interval"), "once episodes loop"),
    "distill.form": "with --opd-hints.form topk",
    "reference_rate": "with --reference-every",
    "process_timeout": "under torchrun",
    "judge_timeout": "by judges that take time",
    "lm_loss.column": "with parquet files",
    **dict.fromkeys(("luffy.prefix.steps", "luffy.prefix.share"), "with other strategies"),
}
"""Settings that need another one, which this test does not give. That they are read is looked up in the code."""


def code_of(frame: Any) -> tuple[str, str]:
    return frame.f_code.co_filename, frame.f_code.co_name


def is_read(frame: Any) -> bool:
    """Whether the access from `frame` is one of the project's own code, and of this one setting or to use them all."""
    file, name = code_of(frame)
    if name in CHECKS:
        return False
    while file.endswith("dataclasses.py"):
        if name not in ("asdict", "_asdict_inner", "<listcomp>", "<dictcomp>", "<genexpr>"):
            return False
        frame = frame.f_back
        file, name = code_of(frame)
        if not file.endswith("dataclasses.py") and (name in CHECKS or file.endswith(WHOLE.get(name, "-"))):
            return False
    # parsers and writers of settings are in scripts and in envs/core
    return any(f"/{room}/" in file for room in ("trainers", "agents")) and "/site-packages/" not in file


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> set[tuple[type[Any], str]]:
    """(group, name) of every setting that is read."""
    found: set[tuple[type[Any], str]] = set()
    names = {setting.group: {item.name for item in fields(setting.group)} for setting in every_setting()}

    def recorder(self: Any, name: str) -> Any:
        group = type(self)
        if name in names.get(group, ()) and is_read(sys._getframe(1)):
            found.add((group, name))
        return object.__getattribute__(self, name)

    for group in names:
        monkeypatch.setattr(group, "__getattribute__", recorder)
    return found


def every_setting() -> list[Setting]:
    return [setting for name in BUILT_IN for setting in settings_of(config_class(name))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("student", "teacher")):
        save_tiny(folder / name, seed=seed)
    return folder


@pytest.mark.parametrize("algorithm", BUILT_IN)
def test_every_accepted_option_is_read(
    algorithm: str, models: Path, tmp_path: Path, reads: set[tuple[type[Any], str]]
) -> None:
    cls = config_class(algorithm)
    settings = [setting for setting in settings_of(cls) if setting.name != "algorithm"]
    keys = {setting.key for setting in settings}
    words = ["--steps", "1", "--eval-limit", "1", "--eval-samples", "1", "--panel", "alfworld-generated-eval"]
    words += ["--lm-loss.files", __file__, "--lm-loss.documents", "1"] if "lm_loss.files" in keys else []
    own = f"--{cls.section.replace('_', '-')}"
    words += [f"{own}.n", "2"] if f"{cls.section}.n" in keys else []
    words += [f"{cls.section}.filter_groups = false"] if f"{cls.section}.filter_groups" in keys else []
    run_training(train.parse(command(models, tmp_path / "run", algorithm, *words)), SINGLE, progress=False)
    unread = {setting.key for setting in settings if (setting.group, setting.name) not in reads}
    unseen = {key for key in unread if key in UNSEEN or key.startswith("demonstrator.")}
    assert unread == unseen, f"{algorithm} accepts what it does not read: {sorted(unread - unseen)}"


def test_what_needs_something_else_is_read_in_the_code() -> None:
    keys = {setting.key: setting for setting in every_setting()}
    assert not UNSEEN.keys() - keys.keys()
    asked = set()
    for room in ("trainers", "agents"):
        for path in (ROOT / room).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            asked |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {key for key in UNSEEN if keys[key].name not in asked}


GIVEN: Mapping[str, dict[str, Any]] = {
    "--panel": {"panel": "alfworld-quickstart"},
    "--examples": {"examples": "shots.txt"},
    "--also": {"also": ["turngym/Search-v0"]},
    "--lora.rank": {"lora": {"rank": 4}},
    "--staleness": {"staleness": 1},
    "--wandb or --trackio": {"wandb": True},
    "--demonstrations": {"demonstrations": "expert"},
    "--executor ray": {"executor": "ray", "workers": 2},
    "--policy-server, --teacher-server or --engine": {"policy_server": "http://127.0.0.1:1"},
    "--policy-server or --engine": {"policy_server": "http://127.0.0.1:1"},
    "--weight-sync disk": {"policy_server": "http://127.0.0.1:1"},
    "--weight-sync gloo or nccl": {"policy_server": "http://127.0.0.1:1", "weight_sync": "gloo"},
    "--workers of 1 or more, or auto": {"workers": 2},
    "--engine": {"engine": "vllm"},
    "a model as --judge": {"judge": "model:folder"},
    "a url as --judge": {"judge": "http://127.0.0.1:1/v1"},
    "--judge expert": {"judge": "expert"},
    "--distill.form jsd or mixed": {"distill": {"form": "jsd"}},
    "--distill.form sampled": {"distill": {"form": "sampled"}},
    "a --distill.form other than sampled": {"distill": {"form": "jsd"}},
    "--sft.players": {"sft": {"players": "expert:1"}},
    "--sft.noise": {"sft": {"noise": [0.0, 0.5]}},
    "an expert who plays (neither --demonstrations nor --traces)": {},
}
"""What must be given, as settings that give it."""
OTHERS: Mapping[str, dict[str, Any]] = {
    "--workers of 1 or more, or auto": {"workers": 0},
    "--weight-sync disk": {"policy_server": "http://127.0.0.1:1", "weight_sync": "gloo"},
    "--weight-sync gloo or nccl": {"policy_server": "http://127.0.0.1:1"},
    "--judge expert": {"judge": "rules"},
    "a --distill.form other than sampled": {"distill": {"form": "sampled"}},
    "an expert who plays (neither --demonstrations nor --traces)": {"traces": ["old"]},
}
"""What else must be given for the refusal, where the default already is what is needed."""
VALUES: Mapping[str, Any] = {
    "retries": 5,
    "worker_timeout": 700.0,
    "eval_limit": 2,
    "eval_samples": 2,
    "eval_temperature": 0.5,
    "examples_as": "text",
    "examples_for": "category",
    "share": 2.0,
    "lora.alpha": 8,
    "lora.targets": ["q_proj"],
    "importance_cap": 3.0,
    "log_project": "other",
    "demonstrated_tasks": True,
    "demonstration_success": True,
    "demonstration_reward": 0.5,
    "demonstration_fits": False,
    "ray_address": "auto",
    "worker_cpus": 2.0,
    "worker_gpus": 0.5,
    "server_parallel": 2,
    "server_deadline": 2.0,
    "weight_sync": "gloo",
    "weight_folder": "w",
    "weight_address": "10.0.0.1",
    "when_busy": "abort",
    "engine_python": "python3",
    "engine_memory": 0.3,
    "engine_more": ["--x"],
    "judge_votes": 5,
    "judge_temperature": 0.1,
    "judge_max_tokens": 9,
    "judge_model": "m",
    "judge_parallel": 2,
    "judge_tries": 2,
    "judge_strict": True,
    "judge_repeats": 2,
    "distill.beta": 0.25,
    "distill.clip": [0.1, 0.1],
    "distill.top_k": 3,
    "distill.tail": "raw",
    "distill.support": "student",
    "distill.importance": [0.5, 2.0],
    "sft.loop_after": 3.0,
    "sft.loop_slips": 0.5,
    "sft.noise": [0.0, 0.25],
    "sft.mistakes": 0.5,
    "sft.players": "expert:1",
    "sft.hints": 0.5,
    "sft.told": "skills:alfworld",
}
"""Another value than the default for each."""


@pytest.mark.parametrize(("key", "needed"), NEEDED)
def test_a_setting_that_nothing_would_read_is_refused(key: str, needed: str) -> None:
    algorithm = "sft" if key.startswith("demonstrat") else NEEDED[key, needed]
    option = f"--{key.replace('_', '-')} .*|--no-{key.replace('_', '-')}|--{key.replace('_', '-')}"
    # what no option sets is written as in a file
    if key in in_file_of(algorithm):
        option = rf"{re.escape(key)} = .+"
    said = f"^({option}) needs {re.escape(needed)}, without which nothing reads it$"
    with pytest.raises(TurngymError, match=said):
        made(algorithm, key, OTHERS.get(needed, {}))
    given: dict[str, Any] = {}
    for one in (one for name, one in NEEDED if name == key):
        given |= GIVEN[one]
    made(algorithm, key, given)


def made(algorithm: str, key: str, more: Mapping[str, Any]) -> None:
    """The settings of a run with another value of `key`, and `more`."""
    table, _, name = key.rpartition(".")
    given = {table: {**more.get(table, {}), name: VALUES[key]}} if table else {name: VALUES[key]}
    train_config(algorithm, {"student": "s", "out": "o", **more, **given}, "test")


def test_what_an_algorithm_does_not_read_is_no_setting_of_it_anywhere(tmp_path: Path) -> None:
    from turngym.envs.core.settings import to_table

    for name in BUILT_IN:
        table = to_table(train_config(name, {"student": "s", "out": "o"}, "test"))
        foreign = {setting.key.partition(".")[0] for setting in every_setting()} - {
            key.partition(".")[0] for key in keys_of(name)
        }
        assert not foreign & table.keys(), "config.toml has what nothing reads"
        for key in sorted(foreign):
            with pytest.raises(SettingsError, match=rf"there is no setting {key}\. It belongs to "):
                train_config(name, {"student": "s", "out": "o", key: {}}, "test")
