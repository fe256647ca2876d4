"""Every option that an algorithm accepts is read: each algorithm trains a step, and who asks its settings is recorded.

A read is an access from the code of the project. What copies, compares, checks, writes or fingerprints a whole group of
settings reads nothing of it.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from other_values import other_value
from tiny_runs import command, save_tiny

from turngym.core.errors import TurngymError
from turngym.core.needed import needed_keys
from turngym.core.settings import Setting, SettingsError, settings_of
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
    # parsers and writers of settings are in scripts and in core
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
    "a player in --sft.players beside expert": {},
    "one of repeat, cycle, wander in --sft.players": {"sft": {"players": "expert:1,cycle:1"}},
    "--sft.noise": {"sft": {"noise": [0.0, 0.5]}},
    "an expert who plays (neither --demonstrations nor --traces)": {},
    "episodes that are played (no --traces)": {},
    "episodes that are played (no --traces, or a --panel)": {},
    "an endpoint as --demonstrations (openai:MODEL)": {"demonstrations": "openai:x"},
    "a model that plays here as --demonstrations (model:FOLDER)": {"demonstrations": "model:x"},
    "a model as --demonstrations (model:FOLDER, openai:MODEL)": {"demonstrations": "openai:x"},
    "--tcod.direction b2f": {"tcod": {"direction": "b2f"}},
    "an expert who plays or judges": {},
    "a teacher, or a KL to the initial policy (kl_coef above 0)": {"grpo": {"kl_coef": 0.1}},
    "a loss with a ratio (--distill.form sampled)": {"distill": {"form": "sampled"}},
    "--ppo-kd.advantage gae": {"ppo_kd": {"advantage": "gae"}},
    "ppo-kd.teacher_coef above 0": {},
    "a parquet file": {"lm_loss": {"files": ["x.txt", "y.parquet"]}},
    "L_PT in the loss (no in_reward)": {},
    "--grpo-kd.kl-coef above 0": {},
    "--opd-hints.form sampled": {"opd_hints": {"form": "sampled"}},
    "luffy.shape or on_shape p_div_p_a": {"luffy": {"shape": "pow", "on_shape": "p_div_p_a"}},
    "luffy.shape or on_shape pow": {"luffy": {"shape": "pow"}},
    "luffy.shape logp or p_logp, or on_shape p_logp": {"luffy": {"shape": "logp"}},
    "luffy.prefix.strategy linear, linear_max or reverse_linear": {"luffy": {"prefix": {"strategy": "linear"}}},
    "luffy.prefix.strategy random or fixed": {"luffy": {"prefix": {"strategy": "fixed"}}},
    "luffy.prefix.strategy random, linear_max or reverse_linear": {"luffy": {"prefix": {"strategy": "linear_max"}}},
    "--gigpo.kl-coef above 0": {},
    "--gigpo.w-step above 0": {},
    "--grpo.kl-coef above 0": {"grpo": {"kl_coef": 0.1}},
    "--turnopd.adaptive-depth": {},
    "--turnopd.weight blend": {},
    "--turnopd.weight blend or turn": {"turnopd": {"weight": "turn"}},
}
"""What must be given, as settings that give it."""
OTHERS: Mapping[str, dict[str, Any]] = {
    "--workers of 1 or more, or auto": {"workers": 0},
    "--weight-sync disk": {"policy_server": "http://127.0.0.1:1", "weight_sync": "gloo"},
    "--weight-sync gloo or nccl": {"policy_server": "http://127.0.0.1:1"},
    "--judge expert": {"judge": "rules"},
    "a --distill.form other than sampled": {"distill": {"form": "sampled"}},
    "an expert who plays (neither --demonstrations nor --traces)": {"traces": ["old"]},
    "episodes that are played (no --traces)": {"traces": ["old"]},
    "episodes that are played (no --traces, or a --panel)": {"traces": ["old"]},
    "a player in --sft.players beside expert": {"sft": {"players": "expert:1"}},
    "one of repeat, cycle, wander in --sft.players": {"sft": {"players": "expert:1,noisy:1"}},
    "an expert who plays or judges": {"traces": ["old"]},
    "--ppo-kd.advantage gae": {"ppo_kd": {"advantage": "minillm"}},
    "ppo-kd.teacher_coef above 0": {"ppo_kd": {"teacher_coef": 0.0, "env_coef": 1.0}},
    "L_PT in the loss (no in_reward)": {"lm_loss": {"in_reward": 0.5}},
    "--grpo-kd.kl-coef above 0": {"grpo_kd": {"kl_coef": 0.0}},
    "--opd-hints.form sampled": {"opd_hints": {"form": "topk"}},
    "luffy.shape or on_shape p_div_p_a": {"luffy": {"shape": "pow"}},
    "luffy.prefix.strategy random or fixed": {"luffy": {"prefix": {"strategy": "linear_max"}}},
    "luffy.prefix.strategy random, linear_max or reverse_linear": {"luffy": {"prefix": {"strategy": "fixed"}}},
    "--gigpo.kl-coef above 0": {"gigpo": {"kl_coef": 0.0}},
    "--gigpo.w-step above 0": {"gigpo": {"w_step": 0.0}},
    "--turnopd.adaptive-depth": {"turnopd": {"adaptive_depth": False}},
    "--turnopd.weight blend": {"turnopd": {"weight": "turn"}},
    "--turnopd.weight blend or turn": {"turnopd": {"weight": "trajectory"}},
}
"""What else must be given for the refusal, where the default already is what is needed."""
VALUES: Mapping[str, Any] = {
    "ppo_kd.critic.clip": 0.3,
    "demonstration_reward": 0.5,
    "demonstrations": "expert",
    "sft.players": "expert:1",
    "sft.noise": [0.0, 0.25],
    "rollout_dtype": "bfloat16",
    "gigpo.similarity": 0.5,
    "turnopd.blend_start": 0.5,
    "turnopd.blend_end": 0.5,
}
"""Settings whose other value is none of `other_value`."""


@pytest.mark.parametrize(("key", "needed"), NEEDED)
def test_a_setting_that_nothing_would_read_is_refused(key: str, needed: str) -> None:
    algorithm = NEEDED[key, needed]
    if key.startswith("demonstrat"):
        algorithm = "tcod" if "--tcod" in needed else "sft"
    elif key == "dual_clip" or "kl_coef" in needed:
        algorithm = "opd" if key == "dual_clip" else "grpo"
    option = f"--{key.replace('_', '-')} .*|--no-{key.replace('_', '-')}|--{key.replace('_', '-')}"
    # what no option sets is written as in a file
    if key in in_file_of(algorithm):
        option = rf"{re.escape(key)} = .+"
    said = f"^({option}) needs {re.escape(needed)}, without which nothing reads it$"
    with pytest.raises(TurngymError, match=said):
        made(algorithm, key, OTHERS.get(needed, {}))
    given: dict[str, Any] = {}
    for one in (one for name, one in NEEDED if name == key and (algorithm == "tcod" or "--tcod" not in one)):
        given |= GIVEN[one]
    made(algorithm, key, given)


OTHER_EXPERT, HALF = {"expert": "searching"}, {"teacher_dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("algorithm", "given", "read"),
    [
        ("sft", {"slots": 2, "traces": ["old"], "panel": "alfworld-quickstart"}, True),
        ("sft", OTHER_EXPERT, True),
        ("sft", OTHER_EXPERT | {"demonstrations": "random"}, False),
        ("luffy", OTHER_EXPERT, True),
        ("luffy", OTHER_EXPERT | {"traces": ["old"]}, False),
        ("tcod", OTHER_EXPERT, False),
        ("tcod", OTHER_EXPERT | {"tcod": {"direction": "b2f"}}, True),
        ("prm-rl", OTHER_EXPERT, False),
        ("prm-rl", OTHER_EXPERT | {"judge": "expert"}, True),
        ("prm-opd", OTHER_EXPERT, True),
        ("opd-hints", OTHER_EXPERT, True),
        ("opd-hints", OTHER_EXPERT | {"judge": "mine:Judge"}, True),
        *(
            ("opd-hints", OTHER_EXPERT | {"judge": judge}, False)
            for judge in ("rules", "skills:alfworld", "model:folder", "http://127.0.0.1:1/v1")
        ),
        ("prm-rl", HALF, True),
        ("prm-rl", HALF | {"prm_rl": {"kl_coef": 0.0}}, False),
        ("luffy", HALF, False),
        ("luffy", HALF | {"luffy": {"kl_reward_coef": 0.1}}, True),
        ("sdar", HALF | {"sdar": {"kl_coef": 0.0}}, False),
        ("sdar", HALF | {"sdar": {"kl_coef": 0.0, "reader": "initial"}}, True),
        ("opd", HALF, True),
        ("prm-opd", {"dual_clip": 2.0, "prm_opd": {"form": "topk"}}, True),
        ("opd-hints", {"dual_clip": 2.0}, True),
        ("opd-hints", {"dual_clip": 2.0, "opd_hints": {"form": "topk"}}, False),
        ("grpo", {"dual_clip": 2.0}, True),
    ],
)
def test_who_reads_what_depends_on_others(algorithm: str, given: dict[str, Any], read: bool) -> None:
    with nullcontext() if read else pytest.raises(TurngymError, match="without which nothing reads it"):
        train_config(algorithm, {"student": "s", "out": "o", **given}, "test")


def made(algorithm: str, key: str, more: Mapping[str, Any]) -> None:
    """The settings of a run with another value of `key`, and `more`."""
    setting = next(item for item in settings_of(config_class(algorithm)) if item.key == key)
    given: dict[str, Any] = {"student": "s", "out": "o", **deepcopy(dict(more))}
    *tables, name = key.split(".")
    inner = given
    for table in tables:
        inner = inner.setdefault(table, {})
    inner[name] = VALUES.get(key, other_value(setting))
    train_config(algorithm, given, "test")


def test_what_an_algorithm_does_not_read_is_no_setting_of_it_anywhere(tmp_path: Path) -> None:
    from turngym.core.settings import to_table

    for name in BUILT_IN:
        table = to_table(train_config(name, {"student": "s", "out": "o"}, "test"))
        foreign = {setting.key.partition(".")[0] for setting in every_setting()} - {
            key.partition(".")[0] for key in keys_of(name)
        }
        assert not foreign & table.keys(), "config.toml has what nothing reads"
        for key in sorted(foreign):
            with pytest.raises(SettingsError, match=rf"there is no setting {key}\. It belongs to "):
                train_config(name, {"student": "s", "out": "o", key: {}}, "test")
