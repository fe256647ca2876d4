"""LUFFY with a stronger model's demonstrations, from the command line to losses, metrics and the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from metric_columns import known_metric
from tiny_runs import with_file

from turngym.agents import load_world, play_episodes
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.nested import at
from turngym.core.rollout_request import PlayPlan, RolloutRequest
from turngym.core.trace import TraceWriter, episode_from_json, episode_to_json, read_trace
from turngym.scripts import train
from turngym.scripts.train import help_lines
from turngym.trainers.adapters.token_session import Trajectory
from turngym.trainers.batch import pack
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)
WORLD = load_world("alfworld")
STUDENT, TEACHER = WORLD.checkpoint("student"), WORLD.checkpoint("teacher")
HALF = ("luffy.prefix.low = 0.55", "luffy.prefix.high = 0.55", "luffy.prefix.count = 2")
TOKENS = (*HALF, "luffy.prefix.unit = 'tokens'")


def command(out: Path, algorithm: str, *more: str, episodes: int = 8) -> list[str]:
    words = [algorithm, "--student", str(STUDENT), "--out", str(out), "--episodes", str(episodes)]
    words += ["--env", WORLD.env_id, "--env-kwargs", json.dumps(dict(WORLD.make)), "--max-turns", "8", "--steps", "1"]
    words += ["--eval-every", "0", "--tracker", "none", "--threads", "1", "--device", "cpu"]
    if algorithm == "luffy":
        words += ["--luffy.n", "4"]
        more += ("luffy.filter_groups = false",)
    return [*words, *with_file(out.parent, more)]


def collected(words: list[str]) -> tuple[Any, list[Episode]]:
    """The trainer, and what it would train on in its first step."""
    trainer = build_trainer(train.resolved(words).spec)
    prefix = trainer.algorithm.prefix
    group = trainer.algorithm.group
    episodes = trainer.run.episodes
    request = RolloutRequest(
        step=1,
        episodes=episodes,
        max_turns=8,
        group=group,
        plan=PlayPlan(
            prefix_ratios=() if prefix is None else prefix(1, episodes // group),
            prefix_unit=trainer.algorithm.prefix_unit,
        ),
    )
    return trainer, trainer.source(request)


def test_a_model_demonstrates_and_the_student_goes_on_within_its_response(tmp_path: Path) -> None:
    out = tmp_path / "run"
    trainer, found = collected(command(out, "luffy", *TOKENS, "--demonstrations", f"model:{TEACHER}"))
    assert [e.meta.get("demonstration") for e in found] == ["used", "used", None, None] * 2
    assert all(e.meta["demonstration_exact"] for e in found if "demonstration" in e.meta)
    prefixed = [e for e in found if "demonstration" in e.meta]
    begun = [(e, turn) for e in prefixed for turn in e.turns if turn.begun]
    assert begun, "no cut fell within a response"
    for episode, turn in begun:
        assert turn.origin == "policy"
        assert 0 < turn.begun < turn.response_length
        assert turn.logprobs is not None
        assert np.isnan(turn.logprobs[: turn.begun]).all()
        assert np.isfinite(turn.logprobs[turn.begun :]).all()
        assert episode_to_json(episode_from_json(episode_to_json(episode))) == episode_to_json(episode)
        # other trainers get it as context
        row = Trajectory.of(episode)
        first, last = row.turn_spans[turn.index]
        assert not row.response_mask[first : first + turn.begun].any()
        assert row.response_mask[first + turn.begun : last].all()
        assert row.logprobs is not None
        assert np.isfinite(row.logprobs).all()
    # off-policy are the demonstrator's ids that the environment took, and what it began; nothing else
    batch = pack(found, origins=trainer.algorithm.origins)
    shown = [t for e in found for t in e.turns if t.origin == "demonstration" and t.verdict.valid]
    wanted = sum(t.response_length for t in shown) + sum(turn.begun for _, turn in begun)
    assert int(batch.off_policy_N.sum()) == wanted > 0
    own = sum(t.response_length - t.begun for e in found for t in e.turns if t.origin == "policy")
    assert int((~batch.off_policy_N).sum()) == own
    assert np.isnan(batch.behavior_logp_N[batch.off_policy_N]).all()
    assert np.isfinite(batch.behavior_logp_N[~batch.off_policy_N]).all()
    only = pack(found, origins=("policy",))
    assert not only.off_policy_N.any()
    assert only.tokens == own
    trainer.train()
    (row,) = read_metrics(out)
    assert all(known_metric(name) for name in row)
    assert (row["demonstrations/used"], row["demonstrations/exact"], row["demonstrations/failed"]) == (4, 4, 0)
    assert row["off/tokens"] == wanted
    # the student's numbers after what was begun for it are those of training
    assert row["gap_max"] < 1e-4


@contextmanager
def endpoint(**faults: Any) -> Iterator[Any]:
    from openai_fake import FakeOpenAI, served

    thought = {"content": "<action>look</action>", "reasoning_content": "where am I"}
    with served(FakeOpenAI(message=lambda body: thought, **faults)) as fake:
        yield fake


def test_an_endpoint_demonstrates_with_its_thoughts(tmp_path: Path) -> None:
    with endpoint() as fake:
        asked = (
            "--demonstrations",
            "openai:tiny",
            f"demonstrator = {{endpoint = {{base_url = '{fake.url}'}}, temperature = 0.3}}",
        )
        _, found = collected(command(tmp_path / "run", "luffy", *asked, *HALF))
        assert {body["temperature"] for body in fake.requests} == {0.3}
    first = next(e for e in found if e.meta.get("demonstration") == "used").turns[0]
    assert first.origin == "demonstration"
    assert first.response == "<think>\nwhere am I\n</think>\n\n<action>look</action>"
    assert not any(e.meta.get("demonstration_exact") for e in found)


def test_an_endpoint_that_fails_leaves_its_attempts_to_the_student(tmp_path: Path) -> None:
    from openai_fake import Fault

    def fault(number: int, body: Any) -> Fault | None:
        # one of two conversations is lost in its second turn
        said = body["messages"][1]["content"]
        first.append(said)
        lost = len(body["messages"]) == 4 and said == first[0]
        return Fault(status=500) if lost else None

    first: list[str] = []
    with endpoint(fault=fault) as fake:
        asked = (
            "--demonstrations",
            "openai:tiny",
            f"demonstrator = {{endpoint = {{base_url = '{fake.url}', request_retries = 0, handshake = false}}}}",
        )
        words = command(tmp_path / "run", "luffy", *asked)
        train.main(words)
    (row,) = read_metrics(tmp_path / "run")
    assert (row["demonstrations/used"], row["demonstrations/failed"]) == (1, 1)
    assert (row["episodes"], row["episodes_failed"]) == (8, 0)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the teacher and the expert did in eight of the student's tasks, some of it in vain."""
    path = tmp_path_factory.mktemp("traces") / "shown.jsonl"
    kwargs = {**WORLD.make, "split": "generated", "max_turns": 8}
    trainer = build_trainer(train.resolved(command(path.parent / "none", "grpo", "--grpo.n", "4", episodes=32)).spec)
    tasks = [e.task.task_id for e in trainer.source(RolloutRequest(step=1, episodes=8, max_turns=1, group=1))]
    parts: list[Path] = []
    for agent in (f"model:{TEACHER}", "expert"):
        more: dict[str, Any] = {"env_kwargs": kwargs, "progress": False, "seed": int(agent == "expert")}
        more |= {} if agent == "expert" else {"threads": 1}
        one = path.with_name(f"{len(parts)}.jsonl")
        play_episodes(WORLD.env_id, agent, tasks=tasks, samples=1, out=one, **more)
        parts.append(one)
    # a trace holds one player's episodes; files of several may be joined
    path.write_bytes(b"".join(part.read_bytes() for part in parts))
    return path


@pytest.mark.long
def test_recorded_demonstrations_are_matched_to_the_steps_tasks(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes = read_trace(recorded)[0]
    won = sum(e.success for e in episodes)
    assert 8 <= won < 16
    asked = ("--demonstrations", str(recorded), "--demonstration-success", *TOKENS)
    trainer, found = collected(command(tmp_path / "run", "luffy", *asked, episodes=48))
    known = {e.task.task_id for e in episodes if e.success}
    for episode in found:
        if "demonstration" in episode.meta:
            wanted = "used" if episode.task.task_id in known else "missing"
            assert episode.meta["demonstration"] == wanted
    said = capsys.readouterr().err
    line = f"{won} of 16 demonstrations are used; left out: {16 - won} not solved, for {len(known)} of "
    assert line in said
    # a prefix of a model that speaks alike is its ids, that of an expert is written anew
    exact = {e.meta["demonstration_exact"] for e in found if e.meta.get("demonstration") == "used"}
    assert exact <= {True, False}
    assert "used" in {e.meta.get("demonstration") for e in found}
    trainer.train()
    (row,) = read_metrics(tmp_path / "run")
    assert row["demonstrations/used"] + row["demonstrations/missing"] == 24
    assert row["demonstrations/missing"] > 0


def test_only_tasks_that_were_demonstrated_are_played(tmp_path: Path, recorded: Path) -> None:
    asked = ("--demonstrations", str(recorded), "--demonstration-success", "--demonstrated-tasks", *HALF)
    _, found = collected(command(tmp_path / "run", "luffy", *asked, episodes=48))
    assert {e.task.task_id for e in found} <= {e.task.task_id for e in read_trace(recorded)[0] if e.success}
    assert {e.meta.get("demonstration") for e in found} == {"used", None}


def test_a_filter_by_the_runs_own_reward(tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`thrift` is 10 - 0.1 per turn for sample 0: only demonstrations of at most four turns are worth 9.6."""
    asked = ("--demonstrations", str(recorded), "--demonstration-reward", "9.6", "--reward", "own_rewards:thrift")
    build_trainer(train.resolved(command(tmp_path / "run", "luffy", *asked)).spec)
    short = sum(e.depth <= 4 for e in read_trace(recorded)[0])
    assert 0 < short < 16
    assert f"{short} of 16 demonstrations are used; left out: {16 - short} worth too little" in capsys.readouterr().err


def test_what_is_longer_than_the_context_is_left_out(
    tmp_path: Path, recorded: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--demonstrations", str(recorded), "--max-context", "90")
    trainer = build_trainer(train.resolved(command(tmp_path / "run", "luffy", *asked)).spec)
    assert "longer than the context" in capsys.readouterr().err
    assert at(trainer.spec, "method.demonstrations.demonstration_fits") is True
    build_trainer(train.resolved(command(tmp_path / "run", "luffy", *asked, "demonstration_fits = false")).spec)
    assert "16 of 16 demonstrations are used, for 8 of" in capsys.readouterr().err


def test_files_that_demonstrate_nothing_are_named(tmp_path: Path, recorded: Path) -> None:
    asked = command(tmp_path / "run", "luffy", "--demonstrations", str(recorded), "--demonstration-reward", "7")
    with pytest.raises(TurngymError, match="none of its 16 episodes"):
        build_trainer(train.resolved(asked).spec)
    with pytest.raises(TurngymError, match="there is no trace file"):
        build_trainer(train.resolved(command(tmp_path / "run", "luffy", "--demonstrations", "nowhere.jsonl")).spec)
    with pytest.raises(TurngymError, match=r"unknown agent 'serching'.*Did you mean 'searching'"):
        build_trainer(train.resolved(command(tmp_path / "run", "luffy", "--demonstrations", "serching")).spec)


def test_a_run_without_the_option_has_the_experts_demonstrations(tmp_path: Path) -> None:
    _, usual = collected(command(tmp_path / "a", "luffy", *HALF, "--expert", "searching"))
    _, named = collected(command(tmp_path / "b", "luffy", *HALF, "--demonstrations", "searching"))
    assert [e.segments[0].tolist() for e in usual] == [e.segments[0].tolist() for e in named]
    assert [e.meta.get("demonstration") for e in usual] == ["used", "used", None, None] * 2


@pytest.mark.long
def test_sft_imitates_a_model_and_leaves_out_what_did_not_succeed(tmp_path: Path) -> None:
    asked = ("--demonstrations", f"model:{TEACHER}", "--demonstration-success")
    trainer, found = collected(command(tmp_path / "run", "sft", *asked, episodes=16))
    reasons = [e.meta["demonstration"] for e in found]
    assert set(reasons) == {"used", "unsolved"}
    used = [e for e in found if e.success]
    assert len(used) == reasons.count("used")
    assert {turn.origin for e in used for turn in e.turns} == {"demonstration"}
    batch = pack(found, origins=trainer.algorithm.origins)
    right = sum(turn.response_length for e in used for turn in e.turns if turn.verdict.valid)
    assert batch.tokens == right
    trainer.train()
    (row,) = read_metrics(tmp_path / "run")
    assert row["demonstrations/used"] == len(used) == row["demonstrations/exact"]
    none = ("--demonstrations", f"model:{TEACHER}", "--demonstration-reward", "7")
    with pytest.raises(TurngymError, match="none of its 2 tasks has a demonstration"):
        train.main(command(tmp_path / "other", "sft", *none, episodes=2))


def test_tcod_goes_back_from_the_end_of_a_models_demonstration(tmp_path: Path) -> None:
    asked = ("--demonstrations", f"model:{TEACHER}", "--demonstration-success", "--teacher", str(TEACHER))
    trainer = build_trainer(train.resolved(command(tmp_path / "run", "tcod", "--tcod.direction", "b2f", *asked)).spec)
    found = trainer.source(RolloutRequest(step=1, episodes=8, max_turns=8, plan=PlayPlan(demonstration_turns=1)))
    assert {e.meta["demonstration"] for e in found} == {"used", "unsolved"}
    for episode in found:
        shown = [turn.origin for turn in episode.turns].count("demonstration")
        assert (shown > 0) == (episode.meta["demonstration"] == "used")


def test_help_names_the_options_where_they_are_used() -> None:
    for algorithm, used in (("luffy", True), ("tcod", True), ("sft", True), ("grpo", False)):
        assert any(line.strip().startswith("--demonstrations") for line in help_lines(algorithm, "")) == used
    whole = [line.strip() for line in help_lines("luffy", "", whole=True)]
    assert any(line.startswith("--base-url") for line in whole)


def test_a_trace_with_a_begun_response_that_is_too_long_is_damage(tmp_path: Path, recorded: Path) -> None:
    episode = read_trace(recorded)[0][0]
    line = json.loads(episode_to_json(episode))
    assert "begun" not in line["turns"][0]
    line["turns"][0]["begun"] = 99
    path = tmp_path / "bad.jsonl"
    with TraceWriter(path) as writer:
        writer.write(episode)
    path.write_text(path.read_text() + json.dumps(line) + "\n")
    found, problems = read_trace(path)
    assert len(found) == 1
    assert "99 ids are said to be begun" in problems[0].reason
