"""Parallel rollouts in real processes: the same episodes, weights that follow, and workers killed in mid-run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from alfworld_jobs import EXPERT, SPEC, jobs, untimed

from turngym.agents.executor.parallel import ParallelRollout
from turngym.agents.executor.processes import LocalWorkers, WorkerAnswer
from turngym.agents.playing.env_maker import EnvSpec
from turngym.agents.playing.rollout import rollout
from turngym.core.episode import Episode
from turngym.core.errors import TaskError


@pytest.fixture(scope="module")
def workers() -> Iterator[LocalWorkers]:
    made = LocalWorkers(2)
    yield made
    made.close()


@pytest.mark.long
def test_processes_play_the_same_episodes_even_when_they_are_killed(workers: LocalWorkers) -> None:
    expected = untimed(rollout(jobs(24), SPEC, EXPERT))
    run = ParallelRollout(workers)
    assert untimed(run(jobs(24), SPEC, EXPERT, slots=4)) == expected
    assert run.deaths == []
    assert os.getpid() not in workers.pids
    seen = 0

    def kill(episode: Episode) -> None:
        nonlocal seen
        seen += 1
        if seen == 3:
            for pid in workers.pids:
                os.kill(pid, signal.SIGKILL)

    assert untimed(run(jobs(24), SPEC, EXPERT, slots=4, on_episode=kill)) == expected
    assert seen == 24
    assert {death.split(" was ")[1] for death in run.deaths} == {"ended by SIGKILL"}


def test_a_workers_exception_arrives_with_its_traceback(workers: LocalWorkers) -> None:
    workers.close()  # another rollout had them, to which one may still owe an answer
    with pytest.raises(TaskError, match="the data differ") as caught:
        ParallelRollout(workers)([replace(jobs(1)[0], sha256="0" * 64)], SPEC, EXPERT)
    assert "in a worker:\nTraceback" in caught.value.__notes__[0]
    assert workers.pids == ()


def test_ctrl_c_is_not_for_a_worker_that_begins() -> None:
    """It reaches the whole process group, and this one says what ends; a worker that imports would show a traceback."""
    workers = LocalWorkers(1)
    workers.call(0, "end")
    os.kill(workers.pids[0], signal.SIGINT)
    assert workers.wait(60.0) == [WorkerAnswer(worker=0)]
    workers.close()


OWN = """
print("RUNS", flush=True)
import sys
import gymnasium as gym
from dataclasses import replace
from lamps_env import LampsEnv
from turngym.agents import open_workers
from turngym.agents.executor.worker_count import LocalProcesses
from turngym.agents.playing.env_maker import EnvSpec
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.playing.scripted import ExpertAgent, named_player
from turngym.envs import ActionGuard, register

class MyEnv(LampsEnv):
    env_id = "mine/Env-v0"

class MyAgent(ExpertAgent):
    pass

class MyPlayer:
    def __init__(self, guard):
        self.guard = guard
    def observe(self, action):
        pass
    def act(self):
        return self.guard.expert_action()

def guarded(**options):
    return ActionGuard(MyEnv(**options), max_turns=12)

register("mine/Env-v0", MyEnv, max_turns=12)
gym.register("mine/Named-v0", entry_point="__main__:guarded")
jobs = [Job(task_id=f"{room}/blue", sample=0, group=n, seed=0) for n, room in enumerate(("cellar", "attic", "study"))]
with open_workers(LocalProcesses(processes=2)) as play:
    for make_env in (EnvSpec("mine/Env-v0"), EnvSpec("__main__:mine/Named-v0"), lambda: gym.make("mine/Env-v0")):
        for agent in (MyAgent(), ExpertAgent(expert=named_player("__main__:MyPlayer"), name="mine")):
            here, there = rollout(jobs, make_env, agent), play(jobs, make_env, agent)
            assert [replace(one, timings={}) for one in here] == [replace(one, timings={}) for one in there]
            assert all(one.success for one in there)
    class MyEnv(MyEnv):  # a cell of a notebook that runs again
        def _begin(self, task_id):
            return super()._begin(task_id) + " Again."
    register("mine/Env-v0", MyEnv, max_turns=12)
    assert all("Again" in one.turns[0].observation for one in play(jobs, EnvSpec("mine/Env-v0"), MyAgent()))
print("DONE", flush=True)
"""


@pytest.mark.long
def test_what_a_script_defines_itself_plays_in_workers_that_do_not_run_the_script(tmp_path: Path) -> None:
    support = str(Path(__file__).parents[1] / "support")
    (tmp_path / "script.py").write_text(OWN)
    environment = {**os.environ, "PYTHONPATH": support}
    command = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("RUNS\nDONE\n", "")


@pytest.mark.long
def test_copies_of_an_engine_follow_its_weights() -> None:
    import torch
    import transformers

    from turngym.agents.local_engine.engine import LocalEngine
    from turngym.agents.model_agent import ModelAgent
    from turngym.agents.rendering.renderer import ChatRenderer
    from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
    from turngym.core.protocols import Sampling
    from turngym.envs.alfworld.priors import SMALL, vocabulary
    from turngym.envs.channels import TextChannel

    tokenizer = build_phrase_tokenizer([*vocabulary(SMALL), "<action>", "</action>"])
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads, initializer_range=0.3))
    engine = LocalEngine(model, tokenizer=tokenizer)
    agent = ModelAgent(engine, ChatRenderer(tokenizer), TextChannel(), Sampling(max_new_tokens=4), max_context=1024)
    spec = EnvSpec("turngym/ALFWorld-v0", {"split": "generated", "channel": "text", "on_invalid": "noop"})
    run = ParallelRollout(LocalWorkers(1, threads=1))
    try:
        plain = {"slots": 8, "max_turns": 3}
        first = run(jobs(6), spec, agent, **plain)
        same(first, rollout(jobs(6), spec, agent, **plain))
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(-1.0)
        engine.weights_changed(5)
        second = run(jobs(6), spec, agent, **plain)
        same(second, rollout(jobs(6), spec, agent, **plain))
    finally:
        run.close()
    assert {turn.policy_version for episode in second for turn in episode.turns} == {5}
    assert [turn.response for e in first for turn in e.turns] != [turn.response for e in second for turn in e.turns]


def same(ours: list[Episode], theirs: list[Episode]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert [ids.tolist() for ids in a.segments] == [ids.tolist() for ids in b.segments]
        assert (a.task, a.status, a.meta, a.final_observation) == (b.task, b.status, b.meta, b.final_observation)
        for x, y in zip(a.turns, b.turns, strict=True):
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-4)
            assert replace(x, logprobs=None) == replace(y, logprobs=None)
