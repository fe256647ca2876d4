"""Log-probabilities of an endpoint are recorded only where they are those that its ids were drawn with."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from openai_fake import FakeOpenAI, Fault, door, error, served

from turngym.agents.endpoint.agent import EndpointAgent
from turngym.agents.endpoint.logprob_check import DISTORTING, NEUTRAL, slope
from turngym.agents.endpoint.options import EndpointOptions
from turngym.agents.playing.rollout import Job, rollout
from turngym.core.errors import AgentError
from turngym.envs.channels import make_channel
from turngym.envs.guard import guard_of

LOGITS = {"a": 2.0, "b": 1.0, "c": -0.5, "d": -3.0, "e": -4.0, "f": -6.0}
"""Of the first token; what comes after it does not matter here."""


def answer(body: dict[str, Any], mode: str, says: float | None = None) -> dict[str, Any]:
    """What a server adds to an answer: ids, and log-probabilities before (`raw`) or after the temperature."""
    heat = body["temperature"] if mode == "processed" and body["temperature"] else 1.0
    total = math.log(sum(math.exp(value / heat) for value in LOGITS.values()))
    logp = {name: value / heat - total for name, value in LOGITS.items()}
    top = [{"token": name, "logprob": logp[name]} for name in [*LOGITS][: body.get("top_logprobs", 0)]]
    rows: dict[str, Any] = {"content": [{"token": "a", "logprob": logp["a"], "top_logprobs": top}] * 2}
    if says is not None:
        rows["temperature"] = says
    return {"prompt_token_ids": [1, 2], "choice": {"token_ids": [3, 4], "logprobs": rows}}


@pytest.fixture
def serve() -> Iterator[Callable[..., FakeOpenAI]]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            served(FakeOpenAI(message=lambda body: {"content": door(body)}, **options))
        )


def played(make: Any, fake: FakeOpenAI, temperature: float, **more: Any) -> Any:
    tool = guard_of(make()).tool
    options = EndpointOptions(base_url=fake.url, token_ids=True, handshake=False, **more)
    agent = EndpointAgent("tiny", options, make_channel("text", tool), tool, temperature=temperature)
    jobs = [Job(task_id=f"doors/{number}", seed=7) for number in (1, 2)]
    return rollout(jobs, make, agent, max_turns=2)


def logprobs(episodes: Any) -> set[float | None]:
    found = [turn.logprobs for episode in episodes for turn in episode.turns]
    return {None if one is None else round(float(one[0]), 4) for one in found}


def test_every_request_for_ids_pins_what_changes_what_is_drawn(serve: Any, make_doors: Any) -> None:
    fake = serve(extra=lambda body: answer(body, "processed"))
    played(make_doors(), fake, 0.5, extra_body='{"top_k": 0, "min_p": null, "seedling": 1}')
    assert len(fake.requests) > 3
    for body in fake.requests:
        assert {name: body[name] for name in NEUTRAL} == {
            "top_p": 1,
            "top_k": -1,
            "min_p": 0,
            "presence_penalty": 0,
            "frequency_penalty": 0,
            "repetition_penalty": 1,
        }
        assert body["seedling"] == 1
    plain = serve()
    agent = EndpointAgent(
        "tiny", EndpointOptions(base_url=plain.url), make_channel("text", (tool := guard_of(make_doors()()).tool)), tool
    )
    rollout([Job(task_id="doors/1", seed=7)], make_doors(), agent)
    # whoever asks for no ids plays as the server is set up
    assert not set(NEUTRAL) & set(plain.requests[0])


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ('{"top_p": 0.95}', "top_p to 0.95 with --token-ids.*or set 1$"),
        ('{"top_k": 20}', "top_k to 20.*or set -1$"),
        ('{"top_k": [20]}', "top_k to"),
        ('{"repetition_penalty": 1.05}', "repetition_penalty to 1.05"),
        ('{"min_p": 0.05}', "min_p to 0.05"),
        *((f'{{"{name}": {{"5": 1}}}}', f"{name} to .* leave it out$") for name in DISTORTING),
    ],
)
def test_another_distribution_is_refused_before_anything_is_sent(
    serve: Any, make_doors: Any, extra: str, words: str
) -> None:
    fake = serve(extra=lambda body: answer(body, "processed"))
    with pytest.raises(AgentError, match=words):
        played(make_doors(), fake, 1.0, extra_body=extra)
    assert not fake.requests


@pytest.mark.parametrize("temperature", [0.7, 0.95, 1.3])
def test_two_requests_tell_whether_the_temperature_is_in_them(
    serve: Any, make_doors: Any, temperature: float, capfd: Any
) -> None:
    fake = serve(extra=lambda body: answer(body, "processed"))
    found = logprobs(played(make_doors(), fake, temperature))
    weights = [math.exp(value / temperature) for value in LOGITS.values()]
    assert found == {round(math.log(weights[0] / sum(weights)), 4)}
    assert f"are those at temperature {temperature:g} (checked)" in capfd.readouterr().err
    checks = [body for body in fake.requests if "top_logprobs" in body]
    assert [(body["temperature"], body["max_tokens"]) for body in checks] == [(temperature, 1), (1.0, 1)]
    assert checks[0]["messages"] == checks[1]["messages"]
    assert checks[0]["messages"] in [body["messages"] for body in fake.requests if "top_logprobs" not in body]

    raw = serve(extra=lambda body: answer(body, "raw"))
    with pytest.raises(AgentError, match=f"not those at temperature {temperature:g}.*processed_logprobs"):
        played(make_doors(), raw, temperature)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_nothing_is_asked_where_both_are_the_same(
    serve: Any, make_doors: Any, mode: str, temperature: float, capfd: Any
) -> None:
    fake = serve(extra=lambda body: answer(body, mode))
    total = math.log(sum(math.exp(value) for value in LOGITS.values()))
    assert logprobs(played(make_doors(), fake, temperature)) == {round(2.0 - total, 4)}
    assert not any("top_logprobs" in body for body in fake.requests)
    assert "log-probabilities" not in capfd.readouterr().err


def refuses_alternatives(number: int, body: Any) -> Fault | None:
    return Fault(status=400, error=error("top_logprobs is not supported")) if "top_logprobs" in body else None


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"extra": lambda body: answer({**body, "top_logprobs": 0}, "raw")}, "it names no 5 alternatives"),
        ({"extra": lambda body: answer(body, "raw"), "fault": refuses_alternatives}, "top_logprobs is not supported"),
    ],
)
def test_what_cannot_be_checked_is_not_recorded(
    serve: Any, make_doors: Any, capfd: Any, options: Any, why: str
) -> None:
    episodes = played(make_doors(), serve(**options), 0.7)
    assert logprobs(episodes) == {None}
    assert {turn.origin for episode in episodes for turn in episode.turns} == {"policy"}
    assert episodes[0].segments[0].tolist()[:4] == [1, 2, 3, 4]
    said = capfd.readouterr().err
    assert said.count("cannot be checked, so they are not recorded") == 1
    assert why in said


def test_a_server_that_says_its_temperature_is_taken_at_its_word(serve: Any, make_doors: Any) -> None:
    fake = serve(extra=lambda body: answer(body, "processed", says=0.7))
    assert logprobs(played(make_doors(), fake, 0.7)) != {None}
    assert not any("top_logprobs" in body for body in fake.requests)
    for asked in (0.85, 1.0):
        with pytest.raises(AgentError, match=rf"at temperature 0\.7 and not at {asked:g}"):
            played(make_doors(), fake, asked)


def test_distances_by_hand() -> None:
    plain = {"a": -1.0, "b": -3.0, "c": -9999.0}
    assert slope(plain, {"a": -0.5, "b": -4.5, "c": -9999.0}) == pytest.approx(2.0)
    assert slope(plain, plain) == pytest.approx(1.0)
    assert slope(plain, {"a": -0.5}) is None
    assert slope({"a": -1.0, "b": -1.01}, {"a": -1.0, "b": -1.02}) is None
