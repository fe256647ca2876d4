"""Traces of text alone, as endpoints and experts leave them, train a student: thoughts and turns survive as its ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai_fake import FakeOpenAI, served
from tiny_runs import save_tiny, with_file

from turngym.agents import play_episodes
from turngym.agents.models import load_policy
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.rendering.open_renderer import renderer_of
from turngym.agents.rendering.renderer import TextEpisodes
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.rollout_request import RolloutRequest
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.alfworld.env import ALFWorldEnv
from turngym.envs.channels import make_channel
from turngym.scripts import train
from turngym.trainers.metrics import read_metrics
from turngym.trainers.run import build_trainer

torch.set_num_threads(1)
SMALL = {"config": "small", "max_turns": 3}
ANSWERS = ({"content": "<action>look", "reasoning_content": "where am I"}, {"content": "<action>inventory</action>"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer that reads and writes single bytes."""
    words = ("<action>", "</action>", "<think>", "</think>", "Do the task.")
    return save_tiny(tmp_path_factory.mktemp("model"), words=words, width=16, length=16384, new_tokens=2, system=None)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, two attempts each, of three turns with thoughts, played through an endpoint."""
    path = tmp_path_factory.mktemp("traces") / "endpoint.jsonl"
    with served(FakeOpenAI(message=lambda body: ANSWERS[len(body["messages"]) > 2])) as fake:
        asked: dict[str, Any] = {"base_url": fake.url, "env_kwargs": SMALL, "progress": False}
        play_episodes("turngym/ALFWorld-v0", "openai:tiny", tasks=2, samples=2, out=path, **asked)
    return path


def command(model: Path, out: Path, algorithm: str, *more: str) -> list[str]:
    words = ["--algorithm", algorithm, "--student", str(model), "--out", str(out), "--env", "turngym/ALFWorld-v0"]
    words += ["--split", "generated", "--env-kwargs", '{"config": "small"}', "--tracker", "none"]
    words += [] if algorithm == "sft" and "--traces" in more else ["--max-turns", "3"]
    words += ["--threads", "1", "--device", "cpu", "--eval-every", "0", "--steps", "1"]
    return [*words, *with_file(out.parent, more)]


def text_of(model: Path, episode: Episode) -> str:
    tokenizer = load_policy(str(model), "cpu", "float32")[1]
    return str(tokenizer.decode(episode.segments[0], skip_special_tokens=False))


def test_sft_imitates_an_endpoint(model: Path, trace: Path, tmp_path: Path) -> None:
    words = command(model, tmp_path / "run", "sft", "--traces", str(trace), "--episodes", "4")
    trainer = build_trainer(train.resolved(words).spec)
    found = trainer.source(RolloutRequest(step=1, episodes=4, max_turns=3))
    whole = text_of(model, found[0])
    said = "<think>\nwhere am I\n</think>\n\n<action>look</action><|end|>"
    assert whole.count(said) == 1
    assert whole.count("<action>inventory</action><|end|>") == 2
    assert found[0].turns[1].observation in whole
    assert whole.index(found[0].turns[0].observation) < whole.index(said) < whole.index(found[0].turns[1].observation)
    trainer.train()
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert (row["episodes"], row["episodes_failed"]) == (4, 0)
    assert row["tokens"] == sum(turn.response_length for episode in found for turn in episode.turns) > 100
    # nothing that it would train on: no step changes the weights
    build_trainer(
        train.resolved([*words[:5], str(tmp_path / "b"), *words[6:], "--sft.train-on", "policy"]).spec
    ).train()
    assert not [row for row in read_metrics(tmp_path / "b") if row.get("tokens")]


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ids": -5}, "token 3 has id -5; the vocabulary has ids 0.."),
        ({"ids": 999_999_999}, "token 3 has id 999999999"),
        ({"logprobs": NAN}, "token 0 has log-probability nan; it must be finite and at most 0"),
        ({"logprobs": 5.0}, "token 0 has log-probability 5.0"),
    ],
)
def test_a_trace_with_senseless_numbers_is_refused_by_line_and_turn(
    model: Path, tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    played = play_episodes("turngym/ALFWorld-v0", f"model:{model}", tasks=2, env_kwargs=SMALL, progress=False)
    good, episode = played.episodes
    turn, segment = episode.turns[1], episode.segments[0].copy()
    if "ids" in change:
        segment[turn.prompt_span[0] + 3] = change["ids"]
    if "logprobs" in change:
        turn = replace(turn, logprobs=np.append(np.float32(change["logprobs"]), turn.logprobs[1:]))
    with TraceWriter(tmp_path / "t.jsonl") as writer:
        writer.write(good)
        writer.write(replace(episode, segments=(segment,), turns=(episode.turns[0], turn, *episode.turns[2:])))
    words = rf"t\.jsonl, line 2: episode {episode.task.task_id} sample 0, turn 1: {words}"
    with pytest.raises(TurngymError, match=words):
        build_trainer(
            train.resolved(command(model, tmp_path / "run", "sft", "--traces", str(tmp_path / "t.jsonl"))).spec
        )
    if change == {"ids": 999_999_999}:
        return  # a demonstrator may have another tokenizer
    shown = command(model, tmp_path / "run", "luffy", "--demonstrations", str(tmp_path / "t.jsonl"))
    with pytest.raises(TurngymError, match=words):
        build_trainer(train.resolved(shown).spec).train()


def test_a_file_of_something_else_ends_before_the_run(model: Path, tmp_path: Path) -> None:
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    words = command(model, tmp_path / "run", "sft", "--traces", str(tmp_path / "chat.jsonl"))
    with (
        pytest.warns(UserWarning, match=r"chat\.jsonl: 1 of 1 lines are damaged"),
        pytest.raises(TurngymError, match="the data set has no episodes"),
    ):
        build_trainer(train.resolved(words).spec)


def test_luffy_takes_an_endpoints_episodes_as_demonstrations(model: Path, trace: Path, tmp_path: Path) -> None:
    """A group of one attempt of the student's own and one of the endpoint's at the same task."""
    shown = [episode for episode in read_trace(trace)[0] if episode.sample == 0]
    own = play_episodes(
        "turngym/ALFWorld-v0", f"model:{model}", tasks=[e.task.task_id for e in shown], env_kwargs=SMALL, progress=False
    )
    path = tmp_path / "own.jsonl"
    with TraceWriter(path) as writer:
        for episode in own.episodes:
            writer.write(episode)
    one = tmp_path / "shown.jsonl"
    with TraceWriter(one) as writer:
        for episode in shown:
            writer.write(episode)
    two = ("--luffy.n", "2", "luffy.filter_groups = false", "--episodes", "4")
    words = command(model, tmp_path / "run", "luffy", *two)
    trainer = build_trainer(train.resolved([*words, "--traces", str(path), str(one)]).spec)
    found = trainer.source(RolloutRequest(step=1, episodes=4, max_turns=3, group=2))
    assert [e.turns[0].origin for e in found] == ["policy", "demonstration"] * 2
    assert found[0].task == found[1].task
    trainer.train()
    (row,) = [row for row in read_metrics(tmp_path / "run") if row["kind"] == "train"]
    assert row["tokens"] == sum(turn.response_length for episode in found for turn in episode.turns)
    assert row["loss"] is not None


def test_what_does_not_fit_is_left_out(model: Path, trace: Path) -> None:
    _, tokenizer = load_policy(str(model), "cpu", "float32")
    tool = ALFWorldEnv.tool
    renderer = renderer_of(load_policy(str(model), "cpu", "float32")[0], tokenizer, ChatSettings.load(model), tool)
    writer = TextEpisodes(renderer=renderer, channel=make_channel("text", tool), tool=tool)
    episode = read_trace(trace)[0][0]
    whole = writer.write(episode)
    assert whole.system == episode.system
    assert [turn.response for turn in whole.turns] == [turn.response for turn in episode.turns]
    assert all(turn.logprobs is None for turn in whole.turns)
    size = whole.turns[1].response_span[1]
    cut = replace(writer, max_context=size).write(episode)
    assert cut.turns == whole.turns[:2]
    assert np.array_equal(cut.segments[0], whole.segments[0][:size])
    assert cut.final_observation == episode.turns[2].observation
    assert replace(writer, max_context=10).write(episode) is episode
    assert writer([whole])[0] is whole
    other = replace(writer, channel=make_channel("tool", tool))
    called = other.write(episode)
    wanted = '<think>\nwhere am I\n</think>\n\n<tool_call>\n{"name": "alfworld_step", "arguments": {"action": "look"}}'
    assert called.turns[0].response == f"{wanted}\n</tool_call>"
    assert called.system.endswith(other.channel.instructions(tool))
    assert "<action>" not in called.system
    assert replace(other, system="Go.").write(episode).system == "Go."
    for name in ("text:seed", "tool:llama", "tool:gemma4"):  # thoughts and calls in a family's own words
        own = make_channel(name, tool)
        read = own.parse(replace(writer, channel=own).write(episode).turns[0].response)
        assert (read.action, read.thought) == ("look", "where am I"), name
    # and back: what an endpoint called, for a student that writes tags
    calls = replace(
        called, segments=(), turns=tuple(replace(t, prompt_span=(0, 0), response_span=(0, 0)) for t in called.turns)
    )
    again = writer.write(calls)
    assert (again.system, again.turns) == (whole.system, whole.turns)
    # an answer of which the limit left nothing is context alone
    nothing = replace(episode.turns[0], response="", finish="length")
    written = writer.write(replace(episode, turns=(nothing, *episode.turns[1:])))
    assert [turn.excluded is None for turn in written.turns] == [False, True, True]
    # what was said of the call's ids is not said of others (a prefix was longer than the response that it began)
    first = called.turns[0]
    of_ids = {"begun": first.response_length, "version_spans": ((1, 0, 3),), "hint_prompt_ids": np.arange(4)}
    again = writer.rewrite(replace(called, turns=(replace(first, **of_ids), *called.turns[1:])))
    assert again.turns == whole.turns


def test_an_experts_bare_actions_are_written_in_the_students_channel(model: Path, tmp_path: Path) -> None:
    played = play_episodes(agent="expert", tasks=1, env_kwargs=SMALL, progress=False, out=tmp_path / "t.jsonl")
    words = command(model, tmp_path / "run", "sft", "--traces", str(tmp_path / "t.jsonl"), "--episodes", "1")
    (found,) = build_trainer(train.resolved(words).spec).source(RolloutRequest(step=1, episodes=1, max_turns=3))
    assert [turn.response for turn in found.turns] == [f"<action>{t.action}</action>" for t in played.episodes[0].turns]
    assert "<action>" in found.system
    assert "<action>" not in played.episodes[0].system
