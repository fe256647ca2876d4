"""Judges by name, and judges that are models: behind a policy in this process, or behind an endpoint."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from judged import judge_of
from servers import Answer, JsonServer

from turngym.agents import models
from turngym.agents.judges.env_judges import ENV_JUDGES, ExpertJudge, RuleJudge
from turngym.agents.judges.judge_settings import AnyJudge
from turngym.agents.judges.judges import JudgeContext, TimedJudge, make_judge
from turngym.agents.judges.model_judges import KEY, LONGEST_PART, HttpJudge, PolicyJudge, messages
from turngym.agents.judges.votes import read_score
from turngym.agents.rendering.chat_template import ChatTemplate
from turngym.core.errors import SettingsError, TurngymError
from turngym.core.protocols import GenerateRequest, Generation, JudgeRequest


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("turngym.agents.endpoint.client.FIRST_WAIT", 0.001)


def ask(number: int = 0, **more: Any) -> JudgeRequest:
    facts: dict[str, Any] = {"kind": "score", "response": f"reply {number}", "next_state": "Nothing happens."}
    return JudgeRequest(**{"name": f"house/{number} seed 0 sample 0, turn 0", **facts, **more})


class Voter:
    """Writes a box drawn from the request's own stream; fails or stays silent where it is told to."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self.batches: list[list[GenerateRequest]] = []
        self.released: list[str] = []
        self.fail: Callable[[str], Exception | None] = lambda prompt: None
        self.finish = "stop"

    def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        self.batches.append(list(requests))
        prompts = [self.template.decode(request.prompt_ids.tolist()) for request in requests]
        for prompt in prompts:
            if (error := self.fail(prompt)) is not None:
                raise error
        return [self._one(*pair) for pair in zip(requests, prompts, strict=True)]

    def _one(self, request: GenerateRequest, prompt: str) -> Generation:
        score = int(np.random.default_rng(request.stream).integers(-1, 2))
        ids = np.append(self.template.encode(f"so \\boxed{{{score}}}"), self.template.end_id).astype(np.int32)
        ids = ids[:0] if "too long" in prompt else ids
        return Generation(ids=ids, logprobs=np.zeros(len(ids), np.float32), finish=self.finish)

    def release(self, session: str) -> None:
        self.released.append(session)


@pytest.fixture
def voter(make_tokenizer: Callable[..., Any]) -> Voter:
    return Voter(ChatTemplate(make_tokenizer()))


def local(voter: Voter, **more: Any) -> PolicyJudge:
    return PolicyJudge(policy=voter, template=voter.template, **more)


def test_all_votes_are_one_batch_and_each_depends_on_its_request_alone(voter: Voter) -> None:
    judge = local(voter, votes=5)
    together = judge.judge([ask(n) for n in range(4)])
    assert [len(batch) for batch in voter.batches] == [20]
    assert sorted(voter.released) == sorted({request.session for request in voter.batches[0]})
    assert len(set(voter.released)) == 20
    assert {request.sampling.temperature for request in voter.batches[0]} == {0.6}
    assert voter.template.end_id in voter.batches[0][0].sampling.stop_ids
    assert len({vote for item in together for vote in item.votes}) == 3
    assert all(vote is not None and vote.startswith("so \\boxed{") for item in together for vote in item.votes)
    assert all("<|im_end|>" not in (vote or "") for item in together for vote in item.votes)
    assert judge.judge([ask(2)]) == [together[2]]
    assert local(voter, votes=5, seed=1).judge([ask(2)]) != [together[2]]
    assert judge.judge([]) == []


def test_failed_votes_are_none_and_the_others_stay(voter: Voter) -> None:
    judge = local(voter, votes=2)
    before = judge.judge([ask(n) for n in range(3)])
    voter.fail = lambda prompt: RuntimeError("out of memory") if "reply 1" in prompt else None
    found = judge.judge([ask(n) for n in range(3)])
    assert [found[0], found[2]] == [before[0], before[2]]
    assert found[1].votes == (None, None)
    assert "house/1" in found[1].error
    assert "out of memory" in found[1].error
    [silent] = judge.judge([ask(next_state="too long")])
    assert silent.votes == (None, None)
    assert "no room" in silent.error
    voter.fail = lambda prompt: KeyError("a mistake")
    with pytest.raises(KeyError):
        judge.judge([ask()])


def test_votes_that_end_at_the_limit_are_counted(voter: Voter, endpoint: Endpoint) -> None:
    judge = local(voter, votes=2)
    assert [item.cut for item in judge.judge([ask(0), ask(1)])] == [0, 0]
    voter.finish = "length"
    assert [item.cut for item in judge.judge([ask(0), ask(1)])] == [2, 2]
    # reasoning that came to no answer has no content: it is not asked again
    for text, written in (("so \\boxed{1} or", "so \\boxed{1} or"), (None, "")):
        endpoint.bodies.clear()
        choice = {"message": {"content": text}, "finish_reason": "length"}
        endpoint.answer = lambda body, number, choice=choice: (200, {"choices": [choice]})  # type: ignore[misc]
        [found] = remote(endpoint, votes=2).judge([ask()])
        assert (found.votes, found.cut, found.error) == ((written, written), 2, "")
        assert len(endpoint.bodies) == 2
    endpoint.answer = lambda body, number: (200, {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]})
    assert remote(endpoint, votes=2).judge([ask()])[0].cut == 0


def test_a_thought_that_the_prompt_opened_is_no_verdict(make_tokenizer: Callable[..., Any]) -> None:
    """A vote that is cut in it has none, although it begins with no tag."""
    opening = "{%- if add_generation_prompt -%}{{- '<think>\\n' -}}{%- endif -%}"
    tokenizer = make_tokenizer()
    tokenizer.chat_template += opening
    voter = Voter(ChatTemplate(tokenizer))
    voter.finish = "length"
    [vote] = local(voter, votes=1).judge([ask()])[0].votes
    assert vote is not None
    assert "\\boxed{" in vote
    assert read_score(vote) is None


def test_prompts_show_the_parts_and_cut_the_middle() -> None:
    system, shown = messages(ask(before="You are in a room.", next_role="tool"))
    assert "\\boxed{0}" in system
    assert shown.index("You are in a room.") < shown.index("reply 0") < shown.index("Nothing happens.")
    assert "role tool" in shown
    hints, shown = messages(ask(kind="hint", next_state="a" * LONGEST_PART + "middle" + "b" * LONGEST_PART))
    assert "[HINT_START]" in hints
    assert "middle" not in shown
    assert f"{LONGEST_PART + 6} characters left out" in shown
    assert len(shown) < LONGEST_PART + 200
    assert "in front of it" not in shown


@dataclass
class Endpoint:
    """A server that answers what `answer` says: (status, body)."""

    answer: Callable[[dict[str, Any], int], tuple[int, Any]] = lambda body, number: (200, said("\\boxed{1}"))
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    url: str = ""
    lock: threading.Lock = field(default_factory=threading.Lock)


def said(text: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text}}]}


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    state = Endpoint()

    def reply(path: str, body: Any, headers: Any) -> Answer:
        with state.lock:
            number = len(state.bodies)
            state.bodies.append({"path": path, **body})
            state.keys.append(headers.get("Authorization"))
        status, answer = state.answer(body, number)
        return Answer(answer, status)

    server = JsonServer(reply)
    state.url = f"{server.url}/v1"
    yield state
    server.stop()


def remote(endpoint: Endpoint, **more: Any) -> HttpJudge:
    return HttpJudge(options=judge_of(endpoint.url, **{f"judge_{name}": value for name, value in more.items()}))  # type: ignore[arg-type]


def test_each_vote_is_one_request_with_a_seed_of_its_own(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    endpoint.answer = lambda body, number: (200, said(f"{body['messages'][1]['content'][-16:]} {body['seed']}"))
    judge = remote(endpoint, votes=2, model="wise", max_tokens=7)
    first, second = judge.judge([ask(0), ask(1)])
    assert len(endpoint.bodies) == 4
    assert {body["path"] for body in endpoint.bodies} == {"/v1/chat/completions"}
    assert {(body["model"], body["temperature"], body["max_tokens"]) for body in endpoint.bodies} == {("wise", 0.6, 7)}
    assert set(endpoint.keys) == {"Bearer secret"}
    assert len({body["seed"] for body in endpoint.bodies}) == 4
    assert first.error == second.error == ""
    assert remote(endpoint, votes=2).judge([ask(1)]) == [second]
    judge.close()


def test_busy_servers_are_asked_again_and_refusals_are_not(endpoint: Endpoint) -> None:
    endpoint.answer = lambda body, number: (200, said("\\boxed{-1}")) if number == 2 else (503, b"busy")
    assert remote(endpoint, votes=1).judge([ask()])[0].votes == ("\\boxed{-1}",)
    endpoint.bodies.clear()
    endpoint.answer = lambda body, number: (401, b"who are you")
    [refused] = remote(endpoint, votes=1).judge([ask()])
    assert refused.votes == (None,)
    assert "status 401" in refused.error
    assert "house/0" in refused.error
    assert len(endpoint.bodies) == 1


def test_an_answer_that_broke_off_is_no_vote(endpoint: Endpoint) -> None:
    """An error inside a 200 is asked about again, as a 503 is; what had been written by then decides nothing."""
    whole = {"choices": [{"message": {"content": "\\boxed{-1}"}, "finish_reason": "stop"}]}
    for broken in (
        {"choices": [{**whole["choices"][0], "finish_reason": "error"}]},
        {**whole, "error": {"code": 502, "message": "reset"}},
    ):
        endpoint.bodies.clear()
        endpoint.answer = lambda body, number, broken=broken: (200, whole if number else broken)
        assert remote(endpoint, votes=1).judge([ask()])[0].votes == ("\\boxed{-1}",)
        assert len(endpoint.bodies) == 2
        endpoint.answer = lambda body, number, broken=broken: (200, broken)
        assert remote(endpoint, votes=1, tries=1).judge([ask()])[0].votes == (None,)


@pytest.mark.parametrize("rubbish", [b"", b"no json", b"[]", {"choices": []}, said(None), said(3), {"choices": "x"}])
def test_rubbish_is_a_failed_vote(endpoint: Endpoint, rubbish: Any) -> None:
    endpoint.answer = lambda body, number: (200, rubbish)
    [found] = remote(endpoint, votes=2, tries=1).judge([ask()])
    assert found.votes == (None, None)
    assert found.error


def test_an_endpoint_that_is_not_there_fails_every_vote() -> None:
    judge = HttpJudge(options=judge_of("http://127.0.0.1:1/v1", judge_votes=2))
    [found] = judge.judge([ask()])
    assert found.votes == (None, None)
    assert "connection refused" in found.error
    assert judge.judge([]) == []
    with pytest.raises(TurngymError, match=r"--judge 'http://127\.0\.0\.1:0' has a port"):
        HttpJudge(options=judge_of("http://127.0.0.1:0"))
    for name in ("judge_votes", "judge_parallel", "judge_tries"):
        with pytest.raises(SettingsError, match=rf"{name} is 0; .*at least 1"):
            judge_of("http://127.0.0.1:1/v1", **{name: 0})


@pytest.mark.parametrize(
    ("name", "setting", "owners"),
    [
        ("rules", "judge_votes", "model or url or own"),
        ("expert", "judge_temperature", "model or url or own"),
        ("model:folder", "judge_timeout", "expert or url or own"),
        ("skills:alfworld", "judge_strict", "expert"),
        ("outside_judge:Shortest", "judge_parallel", "url"),
    ],
)
def test_a_judge_has_the_settings_of_its_kind_alone(name: str, setting: str, owners: str) -> None:
    with pytest.raises(SettingsError, match=f"{setting} is a setting of judge = {owners};"):
        judge_of(name, **{setting: 1})


CODE = """
from dataclasses import dataclass
from turngym.core.protocols import Judgment


@dataclass
class Shortest:
    context: object

    def judge(self, requests):
        worst = max(len(request.response) for request in requests)
        return [Judgment(votes=(f"\\\\boxed{{{-1 if len(r.response) == worst else 1}}}",)) for r in requests]
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `outside_judge`, with the installed entry point `shortest`."""
    info = tmp_path / "outside_judge-1.0.dist-info"
    info.mkdir()
    (tmp_path / "outside_judge.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-judge\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turngym.judges]\nshortest = outside_judge:Shortest\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "outside_judge", raising=False)


VOTES = {"judge_votes": 5, "judge_temperature": 0.25, "judge_timeout": 7.5}


def made(options: AnyJudge, kind: Any = "score", **more: Any) -> Any:
    return make_judge(options, kind, ENV_JUDGES, make_env=dict, seed=4, **more)


def test_the_built_in_judges() -> None:
    assert isinstance(made(judge_of("rules"), "hint"), RuleJudge)
    expert = made(judge_of("expert", judge_strict=True, judge_timeout=7.5), "hint", expert="searching")
    assert isinstance(expert, ExpertJudge)
    assert (expert.strict, expert.make_env, expert.expert.name, expert.timeout) == (True, dict, "searching", 7.5)
    http = made(judge_of("http://127.0.0.1:9/v1", **VOTES))
    assert isinstance(http, HttpJudge)
    assert (http.options.judge_votes, http.options.judge_temperature, http.seed) == (5, 0.25, 4)


@pytest.mark.parametrize("name", ["shortest", "outside_judge:Shortest"])
def test_a_judge_of_another_package(outside: None, name: str) -> None:
    judge = made(judge_of(name, **VOTES), "hint", expert="searching", device="cpu")
    context = judge.inner.context
    assert isinstance(context, JudgeContext)
    assert (context.kind, context.expert, context.seed, context.device) == ("hint", "searching", 4, "cpu")
    assert context.options.judge_votes == 5
    assert context.make_env is dict
    requests = [JudgeRequest(name=str(n), kind="score", response="x" * n, next_state="") for n in (1, 3, 2)]
    assert [one.votes for one in judge.judge(requests)] == [("\\boxed{1}",), ("\\boxed{-1}",), ("\\boxed{1}",)]


def test_a_judge_of_another_package_that_hangs_or_raises() -> None:
    forever = threading.Event()

    class Odd:
        def judge(self, requests: Sequence[JudgeRequest]) -> list[Any]:
            if requests[0].response == "hang":
                forever.wait(30)
            raise LookupError("no verdict")

    judge = TimedJudge(inner=Odd(), timeout=0.1)  # type: ignore[arg-type]
    late = judge.judge([ask(response="hang"), ask(response="hang")])
    assert [one.votes for one in late] == [(None,), (None,)]
    assert late[1].error.endswith("turn 0: the judge, asked 2 times, took more than 0.2 s")
    [broken] = judge.judge([ask()])
    assert "turn 0: LookupError: no verdict (" in broken.error
    forever.set()


def test_a_judge_named_as_on_the_hub_has_the_settings_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "turngym.json").write_text('{"max_contxt": 9}')
    monkeypatch.setattr(models, "model_folder", lambda named, weights=True: tmp_path)
    with pytest.raises(SettingsError, match="max_contxt"):
        made(judge_of("model:some-org/judge"))


def test_a_key_that_no_header_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line before anything is judged; a judge that is made in Python says so of each vote."""
    secret = "sk-ü-0123456789abcdef"
    monkeypatch.setenv(KEY, secret)
    options = judge_of("http://127.0.0.1:1/v1", judge_votes=1, judge_tries=1)
    with pytest.raises(TurngymError, match=f"the environment variable {KEY} holds no key"):
        make_judge(options, "score", ENV_JUDGES, make_env=dict)
    (found,) = HttpJudge(options=options).judge([ask()])
    assert (found.votes, KEY in found.error, secret in found.error) == ((None,), True, False)
