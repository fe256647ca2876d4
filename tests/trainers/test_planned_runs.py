"""`turngym plan --config` against the trainer of the same settings: its models, their bytes, its rows and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_runs import save_tiny

from turngym.agents.models import model_config
from turngym.agents.presets import presets
from turngym.core.rollout_request import RolloutRequest
from turngym.core.spec import changed
from turngym.scripts.plan import notes_of_run, of_run
from turngym.trainers.algorithm_spec import BUILT_IN, find_algorithm
from turngym.trainers.batch import pack
from turngym.trainers.model_shapes import shape_of
from turngym.trainers.run import build_trainer
from turngym.trainers.train_config import train_config
from turngym.trainers.training_costs import CHIPS, estimate

TEXT = {"files": [__file__], "documents": 1, "max_length": 16}
ALFWORLD = {"env": "turngym/ALFWorld-v0", "split": "generated", "max_turns": 3, "episodes": 2, "device": "cpu"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = ("<action>", "</action>", "Do the task.")
    return save_tiny(tmp_path_factory.mktemp("model"), words=words, width=16, length=16384, new_tokens=4)


def settings(model: Path, out: Path, algorithm: str, **more: Any) -> dict[str, Any]:
    reads = find_algorithm(algorithm).reads
    table: dict[str, Any] = {"algorithm": algorithm, "student": str(model), "out": str(out), **ALFWORLD}
    table |= {"teacher": str(model)} if "teacher" in reads else {}
    table |= {"lm_loss": TEXT} if "text" in reads else {}
    table |= {"judge": "episode"} if algorithm == "opid" else {}
    return table | more


def weights(models: list[Any]) -> int:
    """Bytes of the weights of these models, each counted once."""
    parameters = [parameter for one in {id(one): one for one in models}.values() for parameter in one.parameters()]
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


SEVERAL = ("sft", "opd", "grpo", "ppo", "ppo-kd", "grpo-minillm", "opd-hints", "guided-opd", "sdar")
"""Algorithms of which each needs other models."""
ADAPTERS = {"lora": {"rank": 2}}
KL = {"grpo": {"kl_coef": 0.1}}


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        *((name, {}) for name in SEVERAL),
        *(pytest.param(name, {}, marks=pytest.mark.long) for name in BUILT_IN if name not in SEVERAL),
        ("gigpo", ADAPTERS),
        ("gigpo", {**ADAPTERS, "teacher_dtype": "bfloat16"}),
        ("grpo", {**KL, **ADAPTERS, "reference_every": 1}),
        ("grpo", KL),
        ("grpo", {**KL, "dtype": "bfloat16"}),
        ("opd", {"staleness": 1}),
        ("opd-hints", {"teacher": "none"}),
        ("ppo", {"ppo": {"critic": {"kind": "head"}}}),
    ],
)
def test_a_plan_holds_the_models_of_the_trainer(
    model: Path, tmp_path: Path, algorithm: str, more: dict[str, Any]
) -> None:
    table = settings(model, tmp_path / "run", algorithm, **more)
    planned, trainer = of_run(table), build_trainer(train_config(algorithm, table, "test"))
    work, shape = planned.work, shape_of(model_config(model))
    reference: Any = trainer.reference
    teacher: Any = trainer.teacher
    shared = reference is not None and reference.model is trainer.model
    assert work.reference == ("none" if reference is None else "base" if shared else "own")
    assert (planned.teacher is not None) == (teacher is not None)
    assert work.critic == ("none" if trainer.algorithm.critic is None else trainer.algorithm.critic.kind)
    assert work.plays == (trainer.algorithm.imitates is None)
    scorers = [one.model for one in (teacher, reference) if one is not None and one.model is not trainer.model]
    ours = estimate(shape, shape if planned.teacher else None, CHIPS["H100"], 1, work)
    without = changed(work, reference="none", teacher_dtype="float32")
    alone = estimate(shape, None, CHIPS["H100"], 1, without)
    assert ours.states - alone.states == weights(scorers)


@pytest.mark.parametrize("memory", ["all", "window:1", "react", "preset"])
def test_a_plan_counts_the_rows_and_tokens_of_the_trainer(model: Path, tmp_path: Path, memory: str) -> None:
    """Made of what the episodes said and saw; a first observation is longer than the others, so to two fifths."""
    how = {"preset": "verl-agent"} if memory == "preset" else {"memory": memory}
    table = settings(model, tmp_path / "run", "grpo", grpo={"n": 2}, max_new_tokens=4, **how)
    work, trainer = of_run(table).work, build_trainer(train_config("grpo", table, "test"))
    episodes = trainer.source(RolloutRequest(step=1, episodes=2, max_turns=3, group=2))
    batch = pack(episodes)
    assert batch.rows == 2 * len(work.row_lengths)
    assert (work.turns, work.response) == (3, 4)
    assert batch.tokens <= 2 * 3 * 4
    lengths = [len(segment) for segment in episodes[0].segments]
    seen = (lengths[0] - 4) if memory != "all" else (lengths[0] - 12) // 3
    planned = changed(work, observation=seen)
    assert len(batch.input_ids_M) == pytest.approx(2 * planned.tokens, rel=0.4)


@pytest.mark.parametrize("preset", sorted({(one.name, one.env_id) for one in presets()}))
def test_a_plan_plays_as_the_preset_says(preset: tuple[str, str]) -> None:
    name, env = preset
    work = of_run({"algorithm": "grpo", "env": env, "preset": name}).work
    chat = next(one for one in presets() if (one.name, one.env_id) == preset).table["agent"]["chat"]
    memory = chat["memory"]
    assert work.memory == ":".join(str(memory[key]) for key in ("kind", "turns") if key in memory)
    assert (len(work.row_lengths) == 1) == (memory["kind"] == "all")


def test_the_learning_rate_follows_algorithm_and_adapters(model: Path, tmp_path: Path) -> None:
    found: dict[tuple[str, bool], float] = {}
    for algorithm in ("sft", "grpo", "opd"):
        for more in ({}, {"lora": {"rank": 2}}):
            table = settings(model, tmp_path, algorithm, **more)
            found[algorithm, bool(more)] = train_config(algorithm, table, "test").optimizer.lr
            assert f"learning rate: {found[algorithm, bool(more)]:g}, the usual one" in notes_of_run(table)[0]
    assert found == {
        ("sft", False): 1e-5,
        ("sft", True): 1e-4,
        **dict.fromkeys([("grpo", False), ("opd", False)], 1e-6),
        **dict.fromkeys([("grpo", True), ("opd", True)], 1e-5),
    }
    given = settings(model, tmp_path, "sft", optimizer={"lr": 3e-4, "lr_warmup": 2})
    assert train_config("sft", given, "test").optimizer.lr == 3e-4
    assert "as given" in notes_of_run(given)[0]


def test_what_a_plan_does_not_count_is_said(model: Path, tmp_path: Path) -> None:
    how = {"lora": {"rank": 2, "targets": ["q_proj"]}, "grpo": {"n": 2, "refill": 3}, "optimizer": {"minibatches": 7}}
    table = settings(model, tmp_path, "grpo", **how)
    updates, left_out = notes_of_run(table)
    # a minibatch has an episode at least, and a step two of them
    assert "Updates: 2 a step" in updates
    assert of_run(table).work.updates == 2
    assert "--lora.targets" in left_out
    assert "3 further rounds" in left_out
    assert len(notes_of_run(settings(model, tmp_path, "grpo", grpo={"n": 2}))) == 1
