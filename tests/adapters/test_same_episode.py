"""The same episodes through every adapter: the same ids, masks, log-probabilities and rewards as our own rollout's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slime_contract as contract

from turngym.agents.adapters.panel_sessions import PanelSessions
from turngym.agents.playing.episode_session import SessionPool
from turngym.core.episode import Episode, Status, Turn
from turngym.core.task import Verdict
from turngym.core.trace import read_trace
from turngym.envs.panels import make_panel
from turngym.trainers.adapters import datasets, openenv, skyrl, slime, trl, verl
from turngym.trainers.adapters.token_session import Trajectory, play

Played = list[dict[str, Any]]
SEED = 3


def through_session(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    opened = [sessions.open(e.task.task_id, seed=SEED, sample=e.sample) for e in episodes]
    return [_named(Trajectory.of(episode)) for episode in play(opened, replay)]


def through_trl(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    trainer = SimpleNamespace(
        args=SimpleNamespace(temperature=1.0, mask_truncated_completions=False),
        state=SimpleNamespace(global_step=0),
        accelerator=SimpleNamespace(process_index=0, num_processes=1),
        processing_class=SimpleNamespace(eos_token_id=1),
    )
    roll = trl.rollout_func(sessions, lambda _: replay, seed=SEED)
    out = roll([episode.task.task_id for episode in episodes], trainer)
    names = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "turngym_reward")
    ours = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward")
    return [dict(zip(ours, values, strict=True)) for values in zip(*(out[name] for name in names), strict=True)]


def through_verl(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    played = []
    for episode in episodes:
        session = sessions.open(episode.task.task_id, seed=SEED, sample=episode.sample)
        loop = _verl_loop(sessions, replay, episode)
        run = verl.play_async(session, loop._generate({"temperature": 1.0, "logprobs": True}, session.request))
        fields = verl.output(Trajectory.of(asyncio.run(run)))
        fields |= {"logprobs": fields["response_logprobs"], "reward": fields["reward_score"]}
        assert fields["extra_fields"]["min_global_steps"] == fields["extra_fields"]["max_global_steps"] == 5
        played.append(fields)
    return played


def through_slime(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    played = []
    for episode in episodes:
        sample = contract.Sample(index=episode.sample, prompt=episode.task.task_id)
        args = contract.SlimeArgs(replay, f"{episode.task.task_id}:{episode.sample}", seed=SEED)
        generate = slime.generate_function(sessions, post=args.post)
        sample = asyncio.run(generate(args, sample, {"temperature": 1.0, "max_new_tokens": 2000}))
        start = len(sample.tokens) - sample.response_length
        played.append(
            {
                "prompt_ids": sample.tokens[:start],
                "response_ids": sample.tokens[start:],
                "response_mask": sample.loss_mask,
                "logprobs": sample.rollout_log_probs,
                "reward": sample.reward,
            }
        )
    return played


def through_openenv(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    played = []
    for episode in episodes:
        session = sessions.open(episode.task.task_id, seed=SEED, sample=episode.sample)
        seen = openenv.first_fields(session)
        ids = list(seen["observation_ids"])
        while not seen.get("done"):
            said = replay.after(f"{episode.task.task_id}:{episode.sample}", ids)
            answer = {"response_ids": said.ids.tolist(), "logprobs": said.logprobs.tolist()}
            seen = openenv.act(session, answer)
            ids += [*answer["response_ids"], *seen["observation_ids"]]
        session.close()
        assert ids == [*seen["trajectory"]["prompt_ids"], *seen["trajectory"]["response_ids"]]
        played.append(seen["trajectory"])
    return played


def through_skyrl(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    """SkyRL keeps the ids it samples and tokenizes each observation as the template's continuation."""
    renderer = sessions.renderer
    assert renderer is not None
    played = []
    for episode in episodes:
        session = sessions.open(episode.task.task_id, seed=SEED, sample=episode.sample)
        ids: list[int] = renderer.template.encode(renderer.template.render(session.messages)).tolist()
        start, mask, logprobs, reward, done = len(ids), [], [], 0.0, False
        while not done:
            said = replay.after(f"{episode.task.task_id}:{episode.sample}", ids)
            text = renderer.template.decode(said.ids.tolist()).removesuffix(renderer.template.end_text)
            step = skyrl.step_output(session, session.step_text(text))
            told = renderer.template.delta_text(step["observations"][0]["content"]) if step["observations"] else ""
            ended = said.ids[-1] == renderer.template.end_id  # else a stop string ended it, and the template closes it
            told = told.removeprefix(renderer.template.end_text) if ended else told
            told_ids = renderer.template.encode(told).tolist()
            ids += [*said.ids.tolist(), *told_ids]
            mask += [1] * len(said.ids) + [0] * len(told_ids)
            logprobs += [*said.logprobs.tolist(), *([0.0] * len(told_ids))]
            reward, done = reward + step["reward"], step["done"]
        assert step["metadata"]["status"] == episode.status.value
        names = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward")
        played.append(dict(zip(names, (ids[:start], ids[start:], mask, logprobs, reward), strict=True)))
    return played


def through_parquet(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    import pyarrow.parquet as pq

    assert datasets.write_parquet(episodes, tmp_path / "episodes.parquet") == len(episodes)
    table = pq.read_table(tmp_path / "episodes.parquet")
    return [_named(datasets.trajectory_of(row)) for row in table.to_pylist()]


def through_datasets(sessions: SessionPool, episodes: list[Episode], replay: Any, tmp_path: Path) -> Played:
    pytest.importorskip("datasets", reason="needs the extra turngym[datasets]")
    data = datasets.to_dataset(episodes)
    assert data.features["response_ids"].feature.dtype == "int32"
    assert data[0]["messages"][0] == {"role": "system", "content": episodes[0].system}
    return [_named(datasets.trajectory_of(row)) for row in data]


def through_inspect(sessions: SessionPool, episodes: list[Episode], tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra turngym[inspect]")
    import inspect_ai
    from inspect_ai.dataset import Sample
    from inspect_ai.model import ModelAPI, ModelOutput, modelapi

    from turngym.agents.adapters.inspect_ai import play as player

    class Repeats(ModelAPI):
        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> ModelOutput:
            episode = episodes[int(self.model_name)]
            turn = episode.turns[sum(message.role == "assistant" for message in input)]
            assert [input[0].text, input[-1].text] == [episode.system, turn.observation]
            return ModelOutput.from_content(self.model_name, turn.response)

    modelapi(name="turngym-repeats")(lambda: Repeats)
    for number, episode in enumerate(episodes):
        found = _on_panel(sessions, episodes, episode, tmp_path)
        task = inspect_ai.Task(dataset=[Sample(id=episode.task.task_id, input="-")], solver=player(found))
        model = f"turngym-repeats/{number}"
        (log,) = inspect_ai.eval(task, model=model, display="none", log_dir=str(tmp_path / "logs"))
        assert log.status == "success"


def through_verifiers(sessions: SessionPool, episodes: list[Episode], tmp_path: Path) -> None:
    """The environment's own loop over a player that repeats; tests/evaluators runs the real command."""
    pytest.importorskip("verifiers.v1", reason="needs the extra turngym[verifiers]")
    from turngym.agents.adapters.verifiers import PanelData, PanelEnv, PanelTask

    for episode in episodes:
        task = episode.task
        player = _Repeater(episode)
        env = SimpleNamespace(taskset=SimpleNamespace(sessions=_on_panel(sessions, episodes, episode, tmp_path)))
        env._episode = lambda *arguments, env=env: PanelEnv._episode(env, *arguments)
        row = PanelTask(PanelData(id=task.task_id, sha256=task.sha256, category=task.category))
        asyncio.run(PanelEnv.run(env, row, SimpleNamespace(player=player)))
        assert player.rewards == {"success": float(episode.success)}


class _Repeater:
    """Stands in for a player of verifiers and for its open interaction: says the next recorded response."""

    def __init__(self, episode: Episode) -> None:
        self.episode, self.said, self.rewards = episode, 0, {}
        asked = SimpleNamespace(model="repeats", sampling=None)
        self.trace = SimpleNamespace(agent=SimpleNamespace(config=asked), info={}, errors=[], stop_condition=None)
        self.trace.record_reward = self.rewards.__setitem__
        self.trace.record_metric = lambda name, value: None

    def interaction(self, task: Any) -> Any:
        assert task.data.system_prompt == self.episode.system
        return _opened(self)

    async def turn(self, text: str) -> Any:
        turn = self.episode.turns[self.said]
        assert text == turn.observation
        self.said += 1
        return SimpleNamespace(terminated=False, last_reply=turn.response)


@contextlib.asynccontextmanager
async def _opened(player: _Repeater) -> AsyncIterator[_Repeater]:
    yield player


def _on_panel(sessions: SessionPool, episodes: list[Episode], episode: Episode, folder: Path) -> PanelSessions:
    """Sessions on a panel of the recorded tasks in which every attempt is `episode`'s."""
    tasks = list(dict.fromkeys(one.task for one in episodes))
    panel = make_panel("recorded", 1, "turngym/ALFWorld-v0", {}, tasks)
    found = PanelSessions.of(panel, seed=SEED, trace=folder / "trace.jsonl", pool=sessions)
    real, found_open = sessions.open, SimpleNamespace(tool=sessions.tool)
    found_open.open = lambda task_id, **named: real(task_id, **{**named, "sample": episode.sample})
    found.pool = found_open  # type: ignore[assignment]
    return found


def _named(trajectory: Trajectory) -> dict[str, Any]:
    names = ("prompt_ids", "response_ids", "response_mask", "logprobs", "reward")
    return {name: getattr(trajectory, name) for name in names}


def _verl_loop(sessions: SessionPool, replay: Any, episode: Episode) -> Any:
    class Manager:
        async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]) -> Any:
            assert sampling_params["stop"] == ["</action>"]
            assert sampling_params["max_tokens"] <= 12
            said = replay.after(f"{episode.task.task_id}:{episode.sample}", prompt_ids)
            return SimpleNamespace(
                token_ids=said.ids.tolist(),
                log_probs=said.logprobs.tolist(),
                stop_reason="completed",
                extra_fields={"global_steps": said.policy_version},
            )

    rollout = SimpleNamespace(prompt_length=256, response_length=1024, name="sglang")
    config = SimpleNamespace(config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout)))
    return verl.TurngymAgentLoop(
        trainer_config=config,
        server_manager=Manager(),
        tokenizer=SimpleNamespace(eos_token_id=1),
        sessions=lambda tokenizer: sessions,
    )


WAYS = [
    through_session,
    through_trl,
    through_verl,
    through_slime,
    through_openenv,
    through_skyrl,
    through_parquet,
    through_datasets,
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__.removeprefix("through_"))
def test_every_adapter_gives_the_same_episode(
    way: Callable[..., Played],
    sessions: SessionPool,
    recorded: list[Episode],
    replay: Any,
    tmp_path: Path,
    assert_same: Callable[[Trajectory, dict[str, Any]], None],
) -> None:
    played = way(sessions, recorded, replay, tmp_path)
    assert len(played) == len(recorded) == 6
    for episode, theirs in zip(recorded, played, strict=True):
        assert_same(Trajectory.of(episode), theirs)


@pytest.mark.parametrize("way", [through_inspect, through_verifiers], ids=["inspect", "verifiers"])
def test_every_evaluator_plays_the_same_episode(
    way: Callable[..., None], sessions: SessionPool, recorded: list[Episode], tmp_path: Path
) -> None:
    """Evaluators see text alone, so the turns are compared, and not their ids (MCP: tests/evaluators/test_mcp.py)."""
    way(sessions, recorded, tmp_path)
    found = read_trace(tmp_path / "trace.jsonl")[0]
    assert len(found) == len(recorded) == 6
    for theirs, ours in zip(found, recorded, strict=True):
        assert [_said(turn) for turn in theirs.turns] == [_said(turn) for turn in ours.turns]
        for name in ("task", "seed", "sample", "status", "success", "score", "episode_return", "final_observation"):
            assert getattr(theirs, name) == getattr(ours, name), name


def _said(turn: Turn) -> tuple[Any, ...]:
    return (turn.observation, turn.admissible, turn.response, turn.action, turn.verdict, turn.reward, turn.progress)


def test_what_was_recorded_has_everything_that_could_go_wrong(recorded: list[Episode]) -> None:
    """Won and lost, refused and readable responses, several turns: else equality would say little."""
    assert {episode.status for episode in recorded} == {Status.COMPLETED, Status.TRUNCATED_TURNS}
    assert {episode.episode_return for episode in recorded} == {0.0, 1.0}
    verdicts = {turn.verdict for episode in recorded for turn in episode.turns}
    assert {Verdict.OK, Verdict.INADMISSIBLE} <= verdicts
    assert all(episode.depth > 2 for episode in recorded)
