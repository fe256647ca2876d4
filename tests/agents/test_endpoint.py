"""Episodes against a real server that speaks the OpenAI API, calls included, and fails in every way that servers do."""

from __future__ import annotations

import json
import pickle
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from openai_fake import FakeOpenAI, Fault, door, error, served
from toy_evaluation import toy_evaluation, toy_spec

from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.client import Address
from turngym.agents.endpoint.messages import INVALID, SKIPPED, example_messages
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.endpoint.usage import usage_of
from turngym.agents.evaluation.compare import rescore
from turngym.agents.evaluation.scores import EvaluationError
from turngym.agents.executor.worker_count import LocalProcesses
from turngym.agents.executor.workers import open_workers
from turngym.agents.play_spec import EndpointChat, OpenAI
from turngym.agents.playing.env_maker import env_maker
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.memory import Example, Memory
from turngym.core.episode import Episode, Status
from turngym.core.errors import AgentError, TurngymError
from turngym.core.task import Verdict
from turngym.core.tools import tool_call
from turngym.envs.channels import make_channel
from turngym.envs.guard import guard_of
from turngym.envs.panels import collect_tasks
from turngym.scripts.examples.oven import OvenEnv

SECRET = "sk-very-secret-0123456789"


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeOpenAI]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(served(FakeOpenAI(**options)))


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def agent_for(make_env: Any, url: str, channel: str = "text", key_env: str = "OPENAI_API_KEY", **more: Any) -> Any:
    tool = guard_of(make_env()).tool
    asked = {name: more.pop(name) for name in list(more) if name in EndpointOptions.__struct_fields__}
    # test_endpoint_handshake has it
    options = EndpointOptions(base_url=url, key_env=key_env, **{"handshake": False, **asked})
    return EndpointAgent(more.pop("model", "tiny"), options, make_channel(channel, tool), tool, **more)


def jobs(tasks: int = 4, samples: int = 2) -> list[Job]:
    return [Job(task_id=f"doors/{n}", sample=s, seed=7) for s in range(samples) for n in range(1, tasks + 1)]


def said(episodes: list[Episode]) -> list[Any]:
    return [(e.task.task_id, e.sample, e.status, e.turns, e.meta) for e in episodes]


def test_episodes_are_the_same_whatever_is_asked_at_once(serve: Any, make_doors: Any) -> None:
    fake, make = serve(), make_doors()
    found = {}
    for slots in (1, 3, 8):
        found[slots] = rollout(jobs(), make, agent_for(make, fake.url, parallel=slots), slots=slots)
    assert said(found[1]) == said(found[3]) == said(found[8])
    assert 1 < fake.most_at_once <= 8
    assert {e.status for e in found[1]} == {Status.COMPLETED}
    tries = [len(e.turns) for e in found[1]]
    assert tries[:4] != tries[4:]  # samples differ
    assert sum(tries) > 20  # and doors that do not open next cost turns
    other = rollout([Job(task_id="doors/4", seed=8)], make, agent_for(make, fake.url))
    assert fake.requests[-len(other[0].turns)]["seed"] != fake.requests[3]["seed"]


def test_a_slow_answer_holds_up_nobody_else(serve: Any, make_doors: Any) -> None:
    """Two slots: the first episode's first answer comes after all others have ended, and they took turns beside it."""
    others_over = threading.Event()

    def message(body: Any) -> dict[str, Any]:
        if body["messages"][1]["content"] == "You see 1 doors.":
            assert others_over.wait(60)
        return {"content": door(body)}

    fake, make, ended = serve(message=message), make_doors(), []

    def note(episode: Episode) -> None:
        ended.append(episode.task.task_id)
        if len(ended) == 5:
            others_over.set()

    batch = [Job(task_id=f"doors/{n}", seed=7) for n in range(1, 7)]
    episodes = rollout(batch, make, agent_for(make, fake.url, parallel=2), slots=2, on_episode=note)
    assert ended == [f"doors/{n}" for n in (2, 3, 4, 5, 6, 1)]
    assert fake.most_at_once == 2
    assert [e.task.task_id for e in episodes] == [job.task_id for job in batch]
    assert episodes[0].timings["generate"] > 0.9 * sum(e.timings["generate"] for e in episodes[1:])
    quick = serve()
    alone = rollout(batch, make, agent_for(make, quick.url, parallel=1), slots=1)
    assert (said(alone), quick.most_at_once) == (said(episodes), 1)


def test_a_request_that_is_sent_again_holds_up_nobody_else(serve: Any, make_doors: Any) -> None:
    down = lambda n, body: Fault(status=500) if len(body["messages"]) == 4 and body["seed"] in bad else None  # noqa: E731
    bad: list[int] = []
    fake, make = serve(fault=down), make_doors()
    agent = agent_for(make, fake.url, request_retries=2)
    clean = rollout(jobs(), make, agent, slots=4)
    bad += [body["seed"] for body in fake.requests if len(body["messages"]) == 4][:1]
    fake.requests.clear()
    ended: list[Episode] = []
    episodes = rollout(jobs(), make, agent, slots=4, on_episode=ended.append)
    assert ended[-1].status is Status.ERROR_ENGINE
    assert "(tried 3 times)" in ended[-1].meta["error"]
    wrong = episodes.index(ended[-1])
    left = [n for n in range(len(episodes)) if n != wrong]
    assert [episodes[n].turns for n in left] == [clean[n].turns for n in left]


def test_an_interruption_ends_what_is_under_way(serve: Any, make_doors: Any) -> None:
    """Ctrl-C while every slot waits for the server: finished episodes are kept, requests are given up at once."""
    asked = threading.Semaphore(0)
    never = threading.Event()

    def message(body: Any) -> dict[str, Any]:
        if len(body["messages"]) > 2:
            asked.release()
            never.wait(30)
        return {"content": "<action>open door 1"}

    fake, make, kept = serve(message=message), make_doors(), []

    def interrupt() -> None:
        for _ in range(2):
            assert asked.acquire(timeout=30)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    agent = agent_for(make, fake.url)
    threading.Thread(target=interrupt, daemon=True).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        rollout([Job(task_id=f"doors/{n}") for n in (1, 2, 3)], make, agent, slots=2, on_episode=kept.append)
    assert time.monotonic() - start < 25
    assert [e.task.task_id for e in kept] == ["doors/1"]
    never.set()
    again = rollout([Job(task_id="doors/1")], make, agent)
    assert again[0].success


def test_what_is_sent_and_what_is_recorded(serve: Any, make_doors: Any) -> None:
    fake, make = (
        serve(message=lambda body: {"content": "Go.\n<action>open door 1", "reasoning_content": "1 is next"}),
        make_doors(),
    )
    agent = agent_for(
        make, fake.url, temperature=0.5, max_tokens=99, extra_body='{"top_p": 0.9}', reasoning_back="send"
    )
    (episode,) = rollout([Job(task_id="doors/2", seed=7)], make, agent, max_turns=2)
    first, second = fake.requests
    assert {name: first[name] for name in ("model", "temperature", "max_tokens", "top_p", "stop")} == {
        "model": "tiny",
        "temperature": 0.5,
        "max_tokens": 99,
        "top_p": 0.9,
        "stop": ["</action>"],
    }
    assert 0 <= first["seed"] < 2**31
    assert first["seed"] != second["seed"]
    assert "tools" not in first
    assert [m["role"] for m in first["messages"]] == ["system", "user"]
    assert "<action>" in first["messages"][0]["content"]
    assert first["messages"][1]["content"] == "You see 2 doors."
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "Go.\n<action>open door 1</action>", "reasoning_content": "1 is next"},
        {"role": "user", "content": "door 1 is open"},
    ]
    turn = episode.turns[0]
    assert turn.response == "<think>\n1 is next\n</think>\n\nGo.\n<action>open door 1</action>"
    assert (turn.action, turn.origin, turn.logprobs, episode.segments) == ("open door 1", "demonstration", None, ())
    dropped = agent_for(make, fake.url, send_seed=False, send_stop=False)
    rollout([Job(task_id="doors/2", seed=7)], make, dropped, max_turns=2)
    assert "seed" not in fake.requests[-1]
    assert "stop" not in fake.requests[-1]
    assert "reasoning_content" not in fake.requests[-1]["messages"][2]


@pytest.mark.parametrize("channel", ["text", "tool"])
def test_a_window_is_one_message(serve: Any, make_doors: Any, channel: str) -> None:
    """What was said and called before stands in the text; results of calls are of no call any more."""
    call = {"id": "c", "type": "function", "function": {"name": "door", "arguments": '{"action": "open door 1"}'}}
    answer = {"content": "Hm.\n<action>open door 1"} if channel == "text" else {"content": None, "tool_calls": [call]}
    fake, make = serve(message=lambda body: answer), make_doors(channel=channel)
    agent = agent_for(make, fake.url, channel, memory=Memory("window:1"), max_context=10_000)
    (episode,) = rollout([Job(task_id="doors/3", seed=7)], make, agent, max_turns=3)
    assert len(episode.turns) == 3
    assert [[m["role"] for m in body["messages"]] for body in fake.requests] == [["system", "user"]] * 3
    first, second, third = (body["messages"][1]["content"] for body in fake.requests)
    assert first == episode.turns[0].observation
    assert second.endswith("Now turn 2. Observation 2: " + episode.turns[1].observation)
    assert "Observation 1: You see 3 doors.\nAction 1: open door 1\n" in second
    assert "Observation 2: door 1 is open\nAction 2: open door 1\n" in third
    assert "Action 1" not in third
    assert "Hm." not in third


def test_failures_that_pass_leave_no_trace(serve: Any, make_doors: Any) -> None:
    """Each kind once in a while; the episodes are those of a server without faults, and nothing is counted twice."""
    make = make_doors()
    kinds = [
        Fault(status=500),
        Fault(status=503, raw=b"<html>busy</html>"),
        Fault(cut=True),
        Fault(raw=b'{"choices": []}'),
        Fault(raw=b'{"choices": [{"mess'),
        Fault(raw=b"data: {}", headers={"Content-Type": "text/event-stream"}),
        Fault(raw=b'{"error": {"code": 502, "message": "connection reset"}}'),
        Fault(raw=b'{"choices": [{"message": {"content": "<action>x"}, "error": "died", "finish_reason": "error"}]}'),
        Fault(raw=b'{"choices": [{"message": {"content": "<action>x"}, "finish_reason": "abort"}]}'),
        Fault(raw=b'{"choices": [{"message": {"content": ""}, "finish_reason": "insufficient_system_resource"}]}'),
        Fault(raw=b'{"choices": [{"message": {"content": ["x", 5]}, "finish_reason": "stop"}]}'),
        Fault(status=429, error=error("slow down", "rate_limit_exceeded"), headers={"retry-after-ms": "20"}),
    ]
    clean, bad = serve(), serve(fault=lambda n, body: kinds[n // 3 % len(kinds)] if n % 3 == 1 else None)
    whole = rollout(jobs(5, 3), make, agent_for(make, clean.url), slots=4)
    episodes = rollout(jobs(5, 3), make, agent_for(make, bad.url), slots=4)
    assert [e.turns for e in episodes] == [e.turns for e in whole]
    used, meant = usage_of(episodes), usage_of(whole)
    assert used is not None
    assert meant is not None
    assert used.retries == len(bad.requests) - len(clean.requests) >= len(kinds)
    assert (used.answers, used.prompt_tokens, used.cost) == (meant.answers, meant.prompt_tokens, None)


def test_what_a_server_refuses_midway_is_said_once_and_counted(serve: Any, make_doors: Any, tmp_path: Path) -> None:
    """It may be a full context in words that nobody knows: those episodes are left out of the score, not in silence."""
    refusal = Fault(400, error("Request contains an invalid argument."))
    fake, make = serve(fault=lambda n, body: refusal if len(body["messages"]) > 6 else None), make_doors()
    tasks = collect_tasks(make(), [f"doors/{n}" for n in (1, 2, 3, 4)])
    with pytest.warns(UserWarning, match="refused a request midway.*--max-context N") as said:
        result = toy_evaluation(tasks, make, agent_for(make, fake.url), samples=2).run()
    assert len(said) == 1
    errors = [e for e in result.episodes if e.status is Status.ERROR_ENGINE]
    assert len(errors) > 1
    assert result.to_json()["usage"]["refused"] == len(errors)
    # what names another field, or is known, is a mistake that its own error explains
    named = Fault(400, error("'stop' is not supported with this model", param="stop"))
    other = serve(fault=lambda n, body: named if len(body["messages"]) > 2 else None)
    with pytest.warns(UserWarning, match="refused a request midway.*--no-send-stop") as said:
        (episode,) = rollout([Job(task_id="doors/2", seed=7)], make, agent_for(make, other.url))
    assert "--max-context" not in str(said[0].message)
    assert episode.meta["usage"]["refused"] == 1


def test_prompts_that_a_server_cuts_are_noticed_once(serve: Any, make_doors: Any) -> None:
    def tokens(body: Any) -> int:
        return sum(len(m["content"]) for m in body["messages"])

    def counted(count: Callable[[Any], int]) -> Any:
        wait = {"content": "<action>wait</action>"}
        extra = lambda body: {"usage": {"prompt_tokens": count(body), "completion_tokens": 9}}  # noqa: E731
        return serve(message=lambda body: wait, extra=extra, usage=False)

    make = make_doors(max_turns=12)
    batch = [Job(task_id=f"doors/{n}") for n in (2, 3)]
    for cut in (lambda body: min(tokens(body), 400), lambda body: 400 - tokens(body) % 50):
        with pytest.warns(UserWarning, match="prompts seem to be cut by the server.*num_ctx") as said:
            episodes = rollout(batch, make, agent_for(make, counted(cut).url))
        assert len(said) == 1
        assert all(e.meta["usage"]["stalled"] > 1 for e in episodes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # once in a while another server answers, with another tokenizer
        flaky = lambda body: tokens(body) * 3 // (4 - len(body["messages"]) // 2 % 2)  # noqa: E731
        for honest in (tokens, flaky):
            for episode in rollout(batch, make, agent_for(make, counted(honest).url)):
                assert episode.meta["usage"]["stalled"] == 0
        # a window's prompts are about as long as each other
        rollout(
            batch, make, agent_for(make, counted(lambda body: min(tokens(body), 600)).url, memory=Memory("window:1"))
        )
    with pytest.warns(UserWarning, match="usage in part") as said:
        (episode, _) = rollout(batch, make, agent_for(make, counted(lambda body: 0).url))
    assert len(said) == 1
    assert episode.meta["usage"]["stalled"] == 0
    assert episode.meta["usage"]["unreported"] == episode.meta["usage"]["noticed"]["usage in part"] == 12


def test_answers_that_are_the_models_own_fault(serve: Any, make_doors: Any) -> None:
    """A filter's answer and a call that the server could not read are turns, not failures of the server."""
    make = make_doors()
    filtered = serve(message=lambda body: {"content": ""}, finish="content_filter")
    (episode,) = rollout(JOB, make, agent_for(make, filtered.url), max_turns=2)
    assert [(t.verdict, t.finish) for t in episode.turns] == [(Verdict.MALFORMED, "content_filter")] * 2
    assert episode.meta["usage"]["filtered"] == 2
    text = '<function=door>{"action": "open'
    groq = error("Failed to call a function. See 'failed_generation'", "tool_use_failed")
    groq["error"]["failed_generation"] = text
    fault = lambda n, body: Fault(400, groq) if len(body["messages"]) == 2 else None  # noqa: E731
    door_call = call('{"action": "open door 1"}')
    broken, tools = serve(fault=fault, message=lambda body: {"tool_calls": [door_call]}), make_doors("tool")
    (episode,) = rollout(JOB, tools, agent_for(tools, broken.url, "tool"), max_turns=2)
    assert [t.verdict for t in episode.turns] == [Verdict.MALFORMED, Verdict.OK]
    assert episode.turns[0].response == text
    assert broken.requests[1]["messages"][2] == {"role": "assistant", "content": text}


@pytest.mark.parametrize("channel", ["text", "tool"])
@pytest.mark.parametrize(
    ("status", "words", "code", "action"),
    [
        (
            500,
            "Failed to parse input at pos 2: <|tool_call_start|>[door(action='open door 1')]<|tool_call_end|>",
            "",
            1,
        ),
        (500, 'error parsing tool call: raw=\'{"action": "ope\', err=unexpected end of JSON input', "", 0),
        (500, 'unexpected tokens remaining in message header: Some("to=functions.door")', "", 0),
        (200, "HarmonyError('Unknown role: <|start|>assistant')", "400", 0),
        (400, "tool call validation failed: parameters for tool door did not match schema", "tool_use_failed", 0),
    ],
)
def test_an_answer_that_its_server_cannot_read_is_a_turn(
    status: int, words: str, code: str, action: int, channel: str, serve: Any, make_doors: Any
) -> None:
    """Asked again it would be another answer, or the same error until the episode is left out of the score."""
    refused = json.dumps(error(words, code)).encode()
    fake = serve(fault=lambda n, body: Fault(status, raw=refused) if n == 0 else None)
    make = make_doors(channel)
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, channel), max_turns=1)
    played = action and channel == "tool"
    assert [t.verdict for t in episode.turns] == [Verdict.OK if played else Verdict.MALFORMED]
    used = episode.meta["usage"]
    assert used["noticed"]["answer that its own server cannot read"] == used["unreported"] == 1
    assert (len(fake.requests), used["retries"]) == (1, 0)


def test_a_call_at_the_limit_of_tokens_counts_as_cut_off(serve: Any, make_doors: Any) -> None:
    make, door_call = make_doors("tool"), call('{"action": "open door 1"}')
    for limit, finish, cut in ((10, "tool_calls", 1), (11, "tool_calls", 0), (10, "stop", 0)):
        fake = serve(message=lambda body: {"tool_calls": [door_call]}, finish=finish)
        (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool", max_tokens=limit), max_turns=1)
        assert episode.meta["usage"].get("cut_off", 0) == cut
        assert episode.turns[0].finish == ("length" if cut else "stop")


def test_a_rate_limit_holds_for_all(serve: Any, make_doors: Any) -> None:
    limited = Fault(status=429, error=error("slow down"), headers={"Retry-After": "1"})
    fake, make = serve(fault=lambda n, body: limited if n < 4 else None), make_doors()
    episodes = rollout(jobs(samples=1), make, agent_for(make, fake.url, request_retries=0), slots=4)
    assert all(e.status is Status.COMPLETED for e in episodes)
    assert fake.times[4] - fake.times[3] > 0.99
    spent = serve(fault=lambda n, body: Fault(status=429, error=error("pay first", "insufficient_quota")))
    with pytest.raises(AgentError, match=r"status 429: pay first$"):
        rollout(jobs(), make, agent_for(make, spent.url))
    assert len(spent.requests) == 8
    daily = Fault(status=429, error=error("200 a day"), headers={"Retry-After": "86400"})
    slow = serve(fault=lambda n, body: daily if n else None)
    start = time.monotonic()
    episodes = rollout(jobs(2, 2), make, agent_for(make, slow.url, request_deadline=60.0), slots=1)
    assert [e.status for e in episodes] == [Status.COMPLETED] + [Status.ERROR_TIMEOUT] * 3
    assert time.monotonic() - start < 30  # it is known at once that the deadline comes first
    # the request that met it, and those that need not be sent
    assert len(slow.requests) == 2
    for episode in episodes[1:]:
        said = r"asks to wait (1 day, 0:00:00|23:59:\d\d), and a response has 60 s .*; status 429: 200 a day\."
        assert re.search(said, episode.meta["error"])


def test_a_deadline_is_for_the_whole_answer(serve: Any, make_doors: Any) -> None:
    """A server that drips is never silent for long, and never done."""
    fake, make = serve(fault=lambda n, body: Fault(drip=30.0) if len(body["messages"]) > 2 else None), make_doors()
    start = time.monotonic()
    episodes = rollout(jobs(2, 1), make, agent_for(make, fake.url, request_deadline=1.5), slots=2)
    assert [(e.status, len(e.turns)) for e in episodes] == [(Status.COMPLETED, 1), (Status.ERROR_TIMEOUT, 1)]
    assert "no answer within 1.5 s" in episodes[1].meta["error"]
    assert time.monotonic() - start < 25
    slow = serve(fault=lambda n, body: Fault(drip=30.0))
    with pytest.raises(AgentError, match=r"doors/1 sample 0, turn 0: http.* within 0\.3 s \(1 attempt"):
        rollout(jobs(1, 1), make, agent_for(make, slow.url, request_deadline=0.3))


@pytest.mark.parametrize("where", ["content", "reasoning_content", "tool_calls"])
def test_an_answer_beyond_its_tokens_is_not_recorded(serve: Any, make_doors: Any, where: str) -> None:
    """30 MB in place of 9 tokens became 120 MB of trace."""

    def message(body: Any) -> dict[str, Any]:
        text = "x" * (1024 + 256 * 9 + (len(body["messages"]) > 2) - len("look"))
        call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": text}}
        said = {"content": f"look{text}", "reasoning_content": text, "tool_calls": [call]}
        return {"content": None if where == "tool_calls" else "look", where: said[where]}

    channel = "tool" if where == "tool_calls" else "text"
    fake, make = serve(message=message), make_doors(channel=channel)
    agent = agent_for(make, fake.url, channel, max_tokens=9)
    (episode,) = rollout([Job(task_id="doors/2")], make, agent, max_turns=2)
    assert (episode.status, episode.depth) == (Status.ERROR_ENGINE, 1)
    assert f"the answer has {1025 + 256 * 9} characters; at most 9 tokens were asked for" in episode.meta["error"]


def test_an_endpoint_that_breaks_later_ends_episodes_and_never_loses_them(
    serve: Any, make_doors: Any, tmp_path: Path
) -> None:
    down = Fault(status=500)
    fake, make = serve(fault=lambda n, body: down if len(body["messages"]) > 4 and not healed else None), make_doors()
    healed: list[bool] = []
    tasks = collect_tasks(make(), [f"doors/{n}" for n in (1, 2, 3, 4)])

    def play(**more: Any) -> Any:
        agent = agent_for(make, fake.url, request_retries=0, price_in=2.0, price_out=10.0, **more)
        spec = OpenAI(
            model="m",
            temperature=agent.temperature,
            chat=EndpointChat(max_new_tokens=more.get("max_tokens", 9)),
            endpoint=agent.options,
        )
        trial = toy_evaluation(tasks, make, agent, samples=2, trace=tmp_path / "t.jsonl")
        return replace(trial, spec=toy_spec(tasks, spec, samples=2)).run()

    first = play()
    assert first.scores.errors > 0
    broken = [e for e in first.episodes if e.status.is_error]
    assert {(e.status, e.success) for e in broken} == {(Status.ERROR_ENGINE, False)}
    assert "status 500: broken" in broken[0].meta["error"]
    asked = len(fake.requests)
    healed.append(True)
    second = play()
    assert second.resumed == 8 - len(broken)
    assert second.scores.errors == 0
    assert len(fake.requests) - asked == sum(
        len(e.turns) for e in second.episodes if (e.task, e.sample) in [(b.task, b.sample) for b in broken]
    )
    whole = toy_evaluation(
        tasks, make, agent_for(make, fake.url, price_in=2.0, price_cached=0.5, price_out=10.0), samples=2
    ).run()
    assert [e.turns for e in second.episodes] == [e.turns for e in whole.episodes]
    used = second.to_json()["usage"]
    # what was played again was paid for twice
    assert used == rescore(tmp_path / "t.jsonl").to_json()["usage"]
    assert used["answers"] == sum(len(e.turns) for e in (*second.episodes, *broken)) == used["completion_tokens"] / 10
    assert used["reasoning_tokens"] == 3 * used["answers"]
    assert used["cost"] == pytest.approx((2 * used["prompt_tokens"] + 10 * used["completion_tokens"]) / 1e6)
    final = usage_of(second.episodes)
    assert final is not None
    assert final.cost is not None
    assert used["cost"] > final.cost
    assert whole.to_json()["usage"]["cost"] == pytest.approx(final.cost - 1.5 * final.cached_tokens / 1e6)
    assert f"{used['prompt_tokens']:,}" in str(second)
    for other in ({"temperature": 0.1}, {"max_tokens": 7}, {"extra_body": '{"top_p": 0.5}'}, {"send_seed": False}):
        with pytest.raises(EvaluationError, match=r"played with agent\."):
            play(**other)


def test_an_endpoint_that_dies_after_the_first_turn_is_explained(serve: Any, make_doors: Any) -> None:
    """The commonest cause, and how to go on; not the advice for an address where nobody has ever listened."""
    fake, make = serve(), make_doors()

    def dies(number: int, body: Any) -> Fault | None:
        if number == 0:
            return None
        fake.stop()
        return Fault(cut=True)

    fake.fault = dies
    agent = agent_for(make, fake.url, request_retries=1)
    (episode,) = rollout([Job(task_id="doors/4", seed=7)], make, agent)
    assert (episode.status, len(episode.turns)) == (Status.ERROR_ENGINE, 1)
    told = episode.meta["error"]
    assert "(tried 2 times). It answered before, so it has stopped or is restarting" in told
    assert "out of memory" in told
    assert "fewer --slots: with --out (rollout: --append, too) only the episodes that have not ended are played" in told
    assert "Is the server running" not in told


@pytest.mark.parametrize("raw", [b'{"choices": [], "usage": {"prompt_tokens": 9}}', b"<html>busy</html>"])
def test_an_address_that_has_answered_is_not_blamed(raw: bytes, serve: Any, make_doors: Any) -> None:
    """Gateways pass a model's empty turn on as no choice at all (LiteLLM #40477)."""
    fake, make = serve(fault=lambda number, body: Fault(raw=raw) if number else None), make_doors()
    (episode,) = rollout([Job(task_id="doors/4", seed=7)], make, agent_for(make, fake.url, request_retries=1))
    assert (episode.status, len(episode.turns)) == (Status.ERROR_ENGINE, 1)
    assert "(tried 2 times)" in episode.meta["error"]
    assert "--base-url" not in episode.meta["error"]


NO_TOOLS = Fault(400, error('"auto" tool choice requires --enable-auto-tool-choice'))
NO_STOP = Fault(400, error("'stop' is not supported with this model", param="stop"))
TOO_LONG = Fault(400, error("too long", "context_length_exceeded"))
NO_MODEL = r"status 404: The model `tiny` does not exist.*The endpoint has: tiny-2\. Did you mean 'tiny-2'"


@pytest.mark.parametrize(
    ("channel", "options", "problem"),
    [
        ("text", {"key": "x"}, r"status 401: Incorrect API key.*\. The key is read from \$OPENAI_API_KEY; --key-env"),
        ("text", {"model": "tiny-2"}, NO_MODEL),
        # its address has a list of models, so it is no wrong one
        ("text", {"fault": lambda n, b: Fault(404, error("Only supported in v1/responses"))}, r"in v1/responses$"),
        ("tool", {"fault": lambda n, b: NO_TOOLS}, r"--channel text writes"),
        ("text", {"fault": lambda n, b: NO_STOP}, r"--no-send-stop leaves"),
        ("text", {"fault": lambda n, b: TOO_LONG}, r"status 400: too long\. The first prompt alone fills the context"),
        ("text", {"fault": lambda n, b: Fault(500)}, r"status 500: broken \(tried 2 times\)$"),
        ("text", {"fault": lambda n, b: Fault(raw=b"<html>")}, r"is a web page and not JSON: '<html>'\. --base-url is"),
    ],
)
def test_an_endpoint_that_never_worked_is_explained(
    serve: Any, make_doors: Any, channel: str, options: Any, problem: str
) -> None:
    fake, make = serve(**options), make_doors(channel)
    with pytest.raises(AgentError, match=problem) as caught:
        rollout(jobs(2, 1), make, agent_for(make, fake.url, channel, request_retries=1))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_an_address_that_is_none(make_doors: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = make_doors()
    fake = serve()
    with pytest.raises(AgentError, match=r"404.*--base-url"):
        rollout(jobs(1, 1), make, agent_for(make, fake.url.removesuffix("/v1")))
    with pytest.raises(AgentError, match="is --base-url its address"):
        rollout(jobs(1, 1), make, agent_for(make, "http://127.0.0.1:9/v1"))
    for url, problem in (
        ("127.0.0.1:80", "must begin with http"),
        ("http://127.0.0.1:99999/v1", "99999.* a port that is no number"),
        ("http://me:pw@host/v1", "address with a user or a password"),
    ):
        with pytest.raises(TurngymError, match=problem):
            Address.of(url, "OPENAI_API_KEY")
    with pytest.raises(AgentError, match="OPENAI_API_KEY, which is not set"):
        Address.of("", "OPENAI_API_KEY")
    with pytest.raises(AgentError, match="MY_KEY, which is not set"):
        Address.of(fake.url, "MY_KEY")
    monkeypatch.setenv("OPENAI_BASE_URL", fake.url)
    assert Address.of("", "OPENAI_API_KEY").base_url == fake.url


def test_the_key_is_sent_and_never_shown(make_doors: Any, serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, fake = make_doors(), serve(key=SECRET)
    monkeypatch.setenv("MY_KEY", SECRET + "\n")
    (episode,) = rollout(jobs(1, 1), make, agent_for(make, fake.url, key_env="MY_KEY"))
    assert episode.status is Status.COMPLETED
    monkeypatch.setenv("MY_KEY", "sk-another")
    with pytest.raises(AgentError, match=r"Incorrect API key provided: Bearer \*\*\*") as caught:
        rollout(jobs(1, 1), make, agent_for(make, fake.url, key_env="MY_KEY"))
    assert "sk-another" not in str(caught.value)
    monkeypatch.setenv("MY_KEY", "sk-\x1bé")
    with pytest.raises(AgentError, match="a key is printable ASCII"):
        agent_for(make, fake.url, key_env="MY_KEY")


def test_a_full_context_is_asked_for_less_and_then_ends_the_episode(serve: Any, make_doors: Any) -> None:
    def full(number: int, body: Any) -> Fault | None:
        used = sum(len(m["content"]) for m in body["messages"])
        if used + body["max_tokens"] <= room:
            return None
        return Fault(400, error(f"This model's maximum context length is {room} tokens. However, you requested more"))

    make = make_doors(max_turns=60)
    fake = serve(fault=full, message=lambda body: {"content": "<action>wait</action>"})
    room = 700
    (episode,) = rollout([Job(task_id="doors/3")], make, agent_for(make, fake.url, max_tokens=4096))
    limits = [body["max_tokens"] for body in fake.requests]
    assert limits[:3] == [4096, 1024, 256]
    assert limits[-1] == 64
    assert (episode.status, episode.success) == (Status.TRUNCATED_TOKENS, False)
    assert len(episode.turns) > 1
    open_ended = serve(message=lambda body: {"content": "<action>wait</action>"})
    (episode,) = rollout(
        [Job(task_id="doors/3")], make, agent_for(make, open_ended.url, max_tokens=90, max_context=500)
    )
    assert episode.status is Status.TRUNCATED_TOKENS
    last = open_ended.requests[-1]
    used = [sum(len(m["content"]) for m in body["messages"]) for body in open_ended.requests]
    assert last["max_tokens"] == 500 - used[-2] - 10 < 90


def test_the_key_is_in_no_file(serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    from turngym.scripts import main

    fake = serve(key=SECRET, message=lambda body: {"content": "<action>look</action>"})
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("OPENAI_LOG", "debug")
    words = [
        "--agent",
        "openai:tiny",
        "--base-url",
        fake.url,
        "--max-turns",
        "2",
        "--price-in",
        "1",
        "--price-out",
        "2",
    ]
    panel = ["--panel", "alfworld-quickstart", "--limit", "2", "--samples", "1", "--no-verify"]
    assert main.main(["eval", *panel, *words, "--out", str(tmp_path / "eval")]) == 0
    words += ["--tasks", "2", "--out", str(tmp_path / "t.jsonl")]
    assert main.main(["rollout", *words]) == 0
    spoken = capfd.readouterr()
    assert "text" in spoken.err
    assert "completion tokens" in spoken.out
    assert "cost" in spoken.out
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == 5
    assert not [path for path in files if SECRET in path.read_text()]
    assert SECRET not in spoken.out + spoken.err
    results = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert results["usage"]["answers"] == 4
    asked = len(fake.requests)
    same = ["--config", str(tmp_path / "eval" / "spec.toml"), "--out", str(tmp_path / "eval")]
    assert main.main(["eval", *same]) == 0
    assert len(fake.requests) == asked  # resumed: nothing was played again
    again = json.loads((tmp_path / "eval" / "results.json").read_text())
    assert {**again, "seconds": 0, "date": ""} == {**results, "seconds": 0, "date": ""}
    assert main.main(["eval", *panel, *words[:6], "--temperature", "0.1", "--out", str(tmp_path / "eval")]) == 2
    assert "temperature 0.85" in capfd.readouterr().err


JOB = [Job(task_id="doors/2", seed=7)]


def call(arguments: Any, name: Any = "door", id: Any = "c1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turns_of(*messages: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """A model that says one message after the other."""
    return lambda body: messages[sum(m["role"] == "assistant" for m in body["messages"])]


def test_a_game_by_calls(serve: Any, make_doors: Any) -> None:
    both = [call('{"action": "open door 1"}'), call('{"action": "open door 2"}', id="c2")]
    model = turns_of(
        {"content": "First one.", "reasoning": "door 1 </think> now", "tool_calls": both},
        {"content": None, "tool_calls": [call({"action": "open door 2"}, id="")]},
    )
    make = make_doors("tool")
    fake = serve(message=model, finish="tool_calls")
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool", reasoning_back="send"))
    assert (episode.status, episode.success, len(episode.turns)) == (Status.COMPLETED, True, 2)
    first, second = fake.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["door"]
    assert "stop" not in first
    assert "calling the tool door" in first["messages"][0]["content"]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "First one.", "tool_calls": both, "reasoning": "door 1 </think> now"},
        {"role": "tool", "tool_call_id": "c1", "content": "door 1 is open"},
        {"role": "tool", "tool_call_id": "c2", "content": SKIPPED},
    ]
    said = episode.turns[0].response
    wanted = '{"name": "door", "arguments": {"action": "open door 1"}}'
    assert said == f"<think>\ndoor 1 < /think> now\n</think>\n\nFirst one.\n<tool_call>\n{wanted}\n</tool_call>"
    assert make().read(said).thought == "door 1 < /think> now"


@pytest.mark.parametrize(
    ("made", "reason", "sent_back"),
    [
        (call('{"action": "open'), "arguments of the tool call are not valid JSON", {INVALID: '{"action": "open'}),
        (call('{"action": 1}'), "must be a string", {"action": 1}),
        (call('{"action": "open door 1"}', name="dor"), "there is no tool", {"action": "open door 1"}),
        (call('{"action": "open door 1"}', name=None), 'an object with "name"', {"action": "open door 1"}),
        (call('{"action": "<think></tool_call>"}'), "is not possible now", {"action": "<think></tool_call>"}),
    ],
)
def test_bad_calls_are_data(serve: Any, make_doors: Any, made: Any, reason: str, sent_back: Any) -> None:
    make = make_doors("tool")
    fake = serve(message=lambda body: {"content": "", "tool_calls": [made]})
    (episode,) = rollout(JOB, make, agent_for(make, fake.url, "tool"), max_turns=2)
    assert episode.turns[0].verdict is (Verdict.INADMISSIBLE if reason == "is not possible now" else Verdict.MALFORMED)
    assert reason in episode.turns[1].observation
    assistant, result = fake.requests[1]["messages"][2:]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == sent_back
    assert result["role"] == "tool"
    assert result["tool_call_id"] == assistant["tool_calls"][0]["id"]


@pytest.mark.filterwarnings("ignore:.*answers have")
def test_several_tools_are_sent_and_their_calls_are_played(serve: Any) -> None:
    """The handshake asks for a call of one of them; types are judged; a call in the text is found by any name."""
    make = env_maker("turngym.scripts.examples.oven:example/Oven-v0", channel="tool")
    heat = {"degrees": 200, "fan": True}
    model = turns_of(
        {"tool_calls": [call('{"dish": "cake"}', name="read_recipe")]},
        {"tool_calls": [call(json.dumps(heat | {"degrees": "200"}), name="heat")]},
        {"tool_calls": [call(json.dumps(heat), name="heat")]},
        {"content": '```json\n{"name": "bake", "arguments": {"dish": "cake"}}\n```'},
    )
    fake = serve(message=model)
    agent = agent_for(make, fake.url, "tool", handshake=True)
    (episode,) = rollout([Job(task_id="cake/200/fan")], make, agent)
    assert 'Call the tool read_recipe with "dish" set to "cake".' in fake.requests[0]["messages"][1]["content"]
    assert fake.requests[2]["tools"] == OvenEnv.tool.schemas()
    assert [turn.verdict for turn in episode.turns] == [Verdict.OK, Verdict.INADMISSIBLE, Verdict.OK, Verdict.OK]
    assert [turn.action for turn in episode.turns[2:]] == [tool_call("heat", **heat), tool_call("bake", dish="cake")]
    assert '"degrees"' in episode.turns[2].observation
    assert episode.success


def test_typed_calls_that_somebody_else_played_are_calls_in_the_messages() -> None:
    actions = [tool_call("heat", degrees=200, fan=True), tool_call("bake", dish="cake")]
    channel = make_channel("tool", OvenEnv.tool)
    shown = Example(turns=tuple(("You see.", channel.format(action)) for action in actions), final="Delicious.")
    sent = [
        m["tool_calls"][0]["function"] for m in example_messages([shown], channel, OvenEnv.tool) if "tool_calls" in m
    ]
    assert [(one["name"], json.loads(one["arguments"])) for one in sent] == [
        ("heat", {"degrees": 200, "fan": True}),
        ("bake", {"dish": "cake"}),
    ]


def test_an_answer_is_text_beside_the_tool(serve: Any) -> None:
    """Search: queries are calls, the answer is written; its end tag is dropped by the server and put back."""
    make = env_maker("turngym/Search-v0", channel="tool", split="eval")
    env = make()
    task = env.unwrapped.task_ids()[0]
    env.close()
    search = call('{"query": "capital"}', name="search")
    fake = serve(message=turns_of({"tool_calls": [search]}, {"content": "I know.\n<answer>Nobody"}))
    (episode,) = rollout([Job(task_id=task)], make, agent_for(make, fake.url, "tool"))
    assert [turn.action for turn in episode.turns] == ["<search>capital</search>", "<answer>Nobody</answer>"]
    assert episode.turns[1].response == "I know.\n<answer>Nobody</answer>"
    assert episode.status is Status.COMPLETED
    assert fake.requests[0]["stop"] == ["</answer>"]
    assert fake.requests[1]["messages"][-1]["role"] == "tool"
    assert "<information>" in fake.requests[1]["messages"][-1]["content"]


@pytest.mark.long
def test_workers_ask_by_themselves(serve: Any, make_doors: Any) -> None:
    make = env_maker("turngym/ALFWorld-v0", channel="text", config="small", max_turns=2)
    fake = serve(message=lambda body: {"content": f"<action>go to shelf {body['seed'] % 3}"})
    agent = agent_for(make, fake.url)
    env = make()
    jobs = [Job(task_id=task) for task in env.unwrapped.task_ids()[:4]]
    env.close()
    here = rollout(jobs, make, agent)
    assert pickle.loads(pickle.dumps(agent)).name == "openai tiny"
    with open_workers(LocalProcesses(processes=2)) as play:
        there = play(jobs, make, agent, slots=2)
        assert [e.turns for e in there] == [e.turns for e in here]
        assert [e.meta for e in there] == [e.meta for e in here]
        wrong = agent_for(make, fake.url, model="other")
        with pytest.raises(AgentError, match="The model `other` does not exist"):
            play(jobs, make, wrong, slots=2)


def test_an_environment_of_another_channel_is_refused(serve: Any, make_doors: Any) -> None:
    with pytest.raises(AgentError, match="channel 'tool', but the environment reads 'text'"):
        rollout(JOB, make_doors("text"), agent_for(make_doors("tool"), serve().url, "tool"))


def test_what_somebody_else_played_is_in_the_messages(serve: Any, make_doors: Any) -> None:
    fake, make = serve(), make_doors()
    shown = [Job(task_id="doors/4", seed=7, demonstration=("open door 1", "open door 2"))]
    (episode,) = rollout(shown, make, agent_for(make, fake.url))
    assert [message["content"] for message in fake.requests[0]["messages"][1:]] == [
        *("You see 4 doors.", "<action>open door 1</action>", "door 1 is open"),
        *("<action>open door 2</action>", "door 2 is open"),
    ]
    assert episode.success
