"""The rollout driver: order, determinism, every way an episode can end, and what the tokens say."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from turngym.agents.executor.workers import CancellableRollout
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.agent import Conversation, Reply
from turngym.agents.playing.rollout import Job, Rollout, rollout
from turngym.agents.playing.scripted import ExpertAgent
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.core.episode import Episode, Status
from turngym.core.errors import AgentError
from turngym.core.protocols import Sampling
from turngym.envs.channels import TextChannel


@pytest.fixture
def agent(make_tokenizer: Any, make_policy: Any) -> ModelAgent:
    tokenizer = make_tokenizer()
    renderer = ChatRenderer(tokenizer)
    return ModelAgent(make_policy(tokenizer, renderer.template.end_id), renderer, TextChannel(), Sampling())


def jobs(count: int, **more: Any) -> list[Job]:
    return [Job(task_id=f"doors/{1 + i % 3}", sample=i // 3, group=i % 3, seed=7, **more) for i in range(count)]


def fingerprint(episode: Episode) -> tuple[Any, ...]:
    rows = [segment.tolist() for segment in episode.segments]
    return episode.task, episode.sample, episode.status, episode.success, episode.turns[0].response, rows


def test_same_episodes_for_any_number_of_slots_and_in_job_order(agent: Any, make_doors: Any) -> None:
    results = [rollout(jobs(12), make_doors(), agent, slots=slots) for slots in (1, 5, 64)]
    assert [e.task.task_id for e in results[0]] == [job.task_id for job in jobs(12)]
    assert [fingerprint(e) for e in results[0]] == [fingerprint(e) for e in results[1]]
    assert [fingerprint(e) for e in results[0]] == [fingerprint(e) for e in results[2]]
    backwards = rollout(jobs(12)[::-1], make_doors(), agent, slots=4)
    assert [fingerprint(e) for e in backwards[::-1]] == [fingerprint(e) for e in results[0]]
    assert len({e.turns[0].response for e in results[0]}) > 1


def test_tokens_decode_to_the_whole_conversation(agent: Any, make_doors: Any) -> None:
    episode = rollout([Job(task_id="doors/2", seed=3)], make_doors(max_turns=3), agent)[0]
    (ids,) = episode.segments
    text = agent.renderer.template.decode(ids.tolist())
    assert text.startswith("<|im_start|>system\nOpen every door in order.\n\nAnswer each turn with one action")
    assert text.count("<|im_start|>assistant\n") == len(episode.turns)
    for turn in episode.turns:
        response = agent.renderer.template.decode(episode.response_ids(turn).tolist())
        assert response == turn.response + "<|im_end|>"
        assert agent.renderer.template.decode(episode.prompt_ids(turn).tolist()).endswith("<|im_start|>assistant\n")
        assert turn.observation in agent.renderer.template.decode(ids[slice(*turn.prompt_span)].tolist())
        assert len(turn.logprobs) == turn.response_length
    assert episode.turns[-1].response_span[1] == len(ids)


class Patient:
    """Another's agent: one thread for each conversation. The answers of `doors/1` come when all others have ended."""

    name = "patient"

    def __init__(self) -> None:
        self.inner, self.threads = ExpertAgent(), ThreadPoolExecutor(8)
        self.writer, self.release = self.inner.writer, self.inner.release
        self.last = threading.Event()

    def respond(self, waiting: Any) -> Any:
        raise AssertionError("a rollout asks for each row")

    def submit(self, waiting: Any) -> Any:
        return [self.threads.submit(self.one, conversation) for conversation in waiting]

    def one(self, conversation: Conversation) -> Reply:
        if conversation.task.task_id == "doors/1":
            assert self.last.wait(60)
        return self.inner.respond([conversation])[0]


def test_an_agent_that_answers_each_row_by_itself(make_doors: Any) -> None:
    batch = [*jobs(5), Job(task_id="doors/3", sample=9, seed=7, demonstration=("open door 1", "open door 2"))]
    wanted = rollout(batch, make_doors(), ExpertAgent())
    agent, ended = Patient(), []

    def note(episode: Episode) -> None:
        ended.append(episode.task.task_id)
        if len(ended) == 4:
            agent.last.set()

    found = CancellableRollout()(batch, make_doors(), agent, slots=3, on_episode=note)
    assert ended[-2:] == ["doors/1", "doors/1"]
    assert [(e.task, e.sample, e.turns) for e in found] == [(e.task, e.sample, e.turns) for e in wanted]
    agent.one = lambda conversation: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(AgentError, match="agent 'patient' failed: ZeroDivisionError: "):
        rollout(batch, make_doors(), agent)
    agent.submit = lambda waiting: []  # type: ignore[method-assign]
    with pytest.raises(AgentError, match="agent 'patient' answered 0 of 5"):
        rollout(batch[:5], make_doors(), agent)


def test_a_rollout_gives_signs_of_life_while_nobody_answers(make_doors: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("turngym.agents.playing.rollout.LISTEN", 0.01)
    agent = Patient()
    driver = Rollout(make_doors(), agent)
    waiting = deque(enumerate(jobs(1)))
    assert driver.advance(waiting) == driver.advance(waiting) == []
    assert driver.playing == 1
    agent.last.set()
    while driver.playing:
        done = driver.advance(waiting)
    assert done[0][1].success
    driver.close()


def test_every_ending(agent: Any, make_doors: Any) -> None:
    hard = Job(task_id="doors/30", seed=1)
    assert rollout([hard], make_doors(max_turns=4), agent)[0].status is Status.TRUNCATED_TURNS
    capped = rollout([hard], make_doors(), agent, max_turns=4)[0]
    assert (capped.status, capped.depth) == (Status.TRUNCATED_DEPTH, 4)
    won = rollout([Job(task_id="doors/1", seed=0, sample=n) for n in range(8)], make_doors(), agent)
    assert {e.status for e in won} == {Status.COMPLETED}
    assert all(e.success and e.episode_return == 1.0 and e.score == 1.0 and e.meta["goal_rate"] == 1.0 for e in won)


def test_full_context_keeps_the_turns_so_far(
    agent: Any, make_tokenizer: Any, make_policy: Any, make_doors: Any
) -> None:
    free = rollout([Job(task_id="doors/30", seed=1)], make_doors(), agent)[0]
    limit = free.turns[2].response_span[0] - 1
    small = ModelAgent(agent.policy, agent.renderer, TextChannel(), max_context=limit)
    cut = rollout([Job(task_id="doors/30", seed=1)], make_doors(), small)[0]
    assert (cut.status, cut.depth) == (Status.TRUNCATED_TOKENS, 2)
    assert cut.segments[0].tolist() == free.segments[0][: free.turns[1].response_span[1]].tolist()
    barely = ModelAgent(agent.policy, agent.renderer, TextChannel(), max_context=limit + 11)
    last = rollout([Job(task_id="doors/30", seed=1)], make_doors(), barely)[0].turns[-1]
    assert (last.index, last.finish, last.response_length) == (2, "length", 10)


def test_environment_faults_end_their_episode_only(agent: Any, make_doors: Any) -> None:
    made = []

    def make() -> Any:
        made.append(make_doors()())
        return made[-1]

    fault = Job(task_id="doors/broken-3", demonstration=("open door 1", "open door 2"))
    batch = [Job(task_id="doors/broken-0"), fault, *jobs(3)]
    episodes = rollout(batch, make, agent, slots=1)
    assert [e.status.is_error for e in episodes] == [True, True, False, False, False]
    assert episodes[0].meta["error"] == "the house is gone"
    assert (episodes[1].depth, episodes[1].meta["error"]) == (1, "the lock melted")
    assert len(episodes[1].segments[0]) == episodes[1].turns[0].response_span[1]
    assert len(made) == 3


def test_engine_faults_end_their_episode_only(agent: Any, make_doors: Any) -> None:
    clean = rollout(jobs(6), make_doors(), agent)
    agent.policy.fail = lambda request: RuntimeError("out of memory") if request.session[0] in "24" else None
    episodes = rollout(jobs(6), make_doors(), agent)
    assert [e.status.is_error for e in episodes] == [n in (2, 4) for n in range(6)]
    assert episodes[2].meta["error"] == "RuntimeError: out of memory"
    assert [fingerprint(episodes[n]) for n in (0, 1, 3, 5)] == [fingerprint(clean[n]) for n in (0, 1, 3, 5)]
    agent.policy.fail = lambda request: TimeoutError("slow")
    assert rollout(jobs(1), make_doors(), agent)[0].status is Status.ERROR_TIMEOUT


def test_mistakes_and_engines_that_never_worked_propagate(agent: Any, make_doors: Any) -> None:
    agent.policy.fail = lambda request: RuntimeError("no such device")
    with pytest.raises(RuntimeError, match="no such device"):
        rollout(jobs(2), make_doors(), agent)
    rollout_ok = agent.policy
    rollout_ok.fail = lambda request: None
    rollout(jobs(1), make_doors(), agent)
    agent.policy.fail = lambda request: TypeError("wrong argument")
    with pytest.raises(TypeError):
        rollout(jobs(2), make_doors(), agent)


def test_demonstrations_come_first_and_are_marked(agent: Any, make_doors: Any) -> None:
    job = Job(task_id="doors/3", seed=1, demonstration=("open door 1", "open door 2"))
    episode = rollout([job], make_doors(), agent)[0]
    assert [t.origin for t in episode.turns[:3]] == ["demonstration", "demonstration", "policy"]
    assert episode.turns[1].response == "<action>open door 2</action>"
    assert episode.turns[0].logprobs is None
    assert episode.turns[2].observation == "door 2 is open"


def test_a_rewritten_history_gives_several_segments(make_tokenizer: Any, make_policy: Any, make_doors: Any) -> None:
    forgetful = (
        "{%- for m in messages -%}{{- '<|im_start|>' + m.role + '\n' -}}"
        "{{- m.content if m.role != 'assistant' else '...' -}}{{- '<|im_end|>\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
    )
    with pytest.raises(Exception, match="does not show a message"):
        ChatRenderer(make_tokenizer(forgetful))
    shortening = forgetful.replace("'...'", "m.content[-30:]")
    tokenizer = make_tokenizer(shortening)
    renderer = ChatRenderer(tokenizer)
    agent = ModelAgent(make_policy(tokenizer, renderer.template.end_id), renderer, TextChannel(), max_context=4000)
    policy = agent.policy
    episode = rollout([Job(task_id="doors/30", seed=1)], make_doors(max_turns=4), agent)[0]
    assert [turn.segment for turn in episode.turns] == [0, 0, 0, 0]
    original = policy._one

    def long(request: Any) -> Any:
        given = original(request)
        ids = np.concatenate([tokenizer("let me think it over. ")["input_ids"], given.ids]).astype(np.int32)
        return replace(given, ids=ids, logprobs=np.zeros(len(ids), np.float32))

    policy._one = long
    episode = rollout([Job(task_id="doors/30", seed=1)], make_doors(max_turns=4), agent)[0]
    assert [turn.segment for turn in episode.turns] == [0, 1, 2, 3]
    assert policy.released[1:] == [f"0:doors/30:0/{n}" for n in range(4)]
    for turn in episode.turns:
        assert renderer.template.decode(episode.response_ids(turn).tolist()) == turn.response + "<|im_end|>"
        assert episode.segments[turn.segment][: turn.response_span[1]].size == len(episode.segments[turn.segment])


def test_sessions_are_released_and_finished_episodes_reported_early(agent: Any, make_doors: Any) -> None:
    seen: list[Episode] = []
    episodes = rollout(jobs(6), make_doors(), agent, slots=2, on_episode=seen.append)
    assert len(seen) == 6
    assert {id(e) for e in seen} == {id(e) for e in episodes}
    assert len(set(agent.policy.released)) == 6
    assert max(agent.policy.batches) == 2


def test_interrupt_keeps_what_was_finished(agent: Any, make_doors: Any) -> None:
    seen: list[Episode] = []

    def stop(episode: Episode) -> None:
        seen.append(episode)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rollout(jobs(6), make_doors(), agent, slots=3, on_episode=stop)
    assert len(seen) == 2
    assert np.all([e.status is not None for e in seen])
