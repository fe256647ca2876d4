"""The endpoint agent against our own proxy with a real model: the same episodes as the model plays in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late import late
from servers import running

from turngym.agents import EvalResult, evaluate
from turngym.agents.client_keys import ClientKeys
from turngym.agents.models import load_model
from turngym.agents.proxy.app import create_app
from turngym.agents.rendering.chat_settings import ChatSettings
from turngym.agents.serving import DrainingServer
from turngym.agents.worlds import load_world
from turngym.core.errors import TurngymError
from turngym.core.trace import read_trace
from turngym.scripts.serve_proxy import proxy_front
from turngym.trainers.batch import pack
from turngym.trainers.live.proxy_options import proxy_config
from turngym.trainers.live.run import build
from turngym.trainers.scorer import LocalScorer
from turngym.trainers.targets import rows

STUDENT = Path(load_world("alfworld").checkpoint("student"))
PANEL: dict[str, Any] = {"limit": 4, "samples": 1, "progress": False}


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a proxy that serves the tiny student and only records."""
    settings = {"student": STUDENT, "out": tmp_path_factory.mktemp("proxy"), "device": "cpu", "threads": 1}
    settings["proxy"] = {"max_waiting": 8, "name": "tiny"}
    service, _ = build(proxy_config(None, [("test", settings)]))
    server = DrainingServer(proxy_front(create_app(service, keys=ClientKeys({"": "sesame"}))), port=0)
    with running(server) as address:
        yield address
    service.close()


def asked(proxy: str) -> dict[str, Any]:
    """The student, spoken to as it was trained."""
    chat = ChatSettings.load(STUDENT)
    assert chat.channel == "text"
    spoken = {"system": chat.system, "max_new_tokens": chat.max_new_tokens}
    return {"base_url": proxy, "key_env": "TINY_KEY", "slots": 6, **spoken, **PANEL}


def responses(result: EvalResult) -> list[list[str]]:
    return [[turn.response for turn in episode.turns] for episode in result.episodes]


def test_a_greedy_model_plays_the_same_behind_the_endpoint(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sesame")
    here = evaluate("alfworld-quickstart", f"model:{STUDENT}", temperature=0.0, threads=1, **PANEL)
    there = evaluate("alfworld-quickstart", "openai:tiny", temperature=0.0, **asked(proxy))
    assert responses(there) == responses(here)
    assert there.scores == here.scores
    used = there.to_json()["usage"]
    assert used["answers"] == sum(len(e.turns) for e in there.episodes)
    assert used["completion_tokens"] == sum(t.response_length for e in here.episodes for t in e.turns)
    assert used["prompt_tokens"] == sum(len(e.prompt_ids(t)) for e in here.episodes for t in e.turns)
    assert not there.episodes[0].segments


@pytest.mark.parametrize("memory", late(("all", "window:1", "react"), "all"))
def test_ids_and_logprobs_arrive_as_they_were_sampled(
    proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setenv("TINY_KEY", "sesame")
    how: dict[str, Any] = {"temperature": 0.0, "memory": memory}
    # a tiny tokenizer spells out what it has never seen: with another memory a prompt grows by 700 ids a turn
    how |= {} if memory == "all" else {"max_turns": 5}
    here = evaluate("alfworld-quickstart", f"model:{STUDENT}", threads=1, **how, **PANEL)
    there = evaluate("alfworld-quickstart", "openai:tiny", out=tmp_path, token_ids=True, **how, **asked(proxy))
    assert {len(e.segments) == 1 for e in here.episodes} == {memory == "all"}
    for mine, theirs in zip(here.episodes, read_trace(tmp_path / "trace.jsonl")[0], strict=True):
        found = next(e for e in there.episodes if e.task == theirs.task)
        assert [s.tolist() for s in theirs.segments] == [s.tolist() for s in found.segments]
        mine = next(e for e in here.episodes if e.task == theirs.task)
        for one, other in zip(mine.turns, theirs.turns, strict=True):
            assert mine.response_ids(one).tolist() == theirs.response_ids(other).tolist()
            assert mine.prompt_ids(one).tolist() == theirs.prompt_ids(other).tolist()
            assert one.logprobs is not None
            assert other.logprobs is not None
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            assert other.origin == "policy"
    batch = pack(there.episodes)
    assert batch.tokens == sum(t.response_length for e in here.episodes for t in e.turns)
    assert not np.isnan(batch.behavior_logp_N).any()


def test_sampled_logprobs_are_those_at_their_temperature(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sesame")
    asked_for = asked(proxy) | {"limit": 2, "max_turns": 4}
    found = evaluate("alfworld-quickstart", "openai:tiny", temperature=0.7, token_ids=True, **asked_for).episodes
    batch, model = pack(found), load_model(STUDENT)
    at = {heat: LocalScorer(model=model, temperature=heat) for heat in (0.7, 1.0)}
    gaps = {
        heat: np.abs(np.concatenate(scorer.logprobs(*rows(batch))) - batch.behavior_logp_N).max()
        for heat, scorer in at.items()
    }
    assert gaps[0.7] < 1e-4 < 0.01 < gaps[1.0]


@pytest.mark.long
def test_samples_differ_and_repeat(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sesame")
    settings = asked(proxy) | {"limit": 2, "samples": 2, "max_turns": 8}
    first = evaluate("alfworld-quickstart", "openai:tiny", temperature=1.0, **settings)
    again = evaluate("alfworld-quickstart", "openai:tiny", temperature=1.0, **{**settings, "slots": 1})
    other = evaluate("alfworld-quickstart", "openai:tiny", temperature=1.0, seed=1, **settings)
    said = [responses(result) for result in (first, again, other)]
    assert said[0] == said[1] != said[2]
    assert said[0][0] != said[0][2]  # two attempts at the first task


def test_a_wrong_key_and_a_wrong_name(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINY_KEY", "sk-wrong")
    with pytest.raises(TurngymError, match=r"401: .*\$TINY_KEY"):
        evaluate("alfworld-quickstart", "openai:tiny", **asked(proxy))
    monkeypatch.setenv("TINY_KEY", "sesame")
    with pytest.raises(TurngymError, match=r"404: .*\"tini\".*Did you mean 'tiny'\?$"):
        evaluate("alfworld-quickstart", "openai:tini", **asked(proxy))
    with pytest.raises(TurngymError, match=r"there is no setting 'base_ur'\..*Did you mean 'base_url'"):
        evaluate("alfworld-quickstart", "openai:tiny", base_ur="x")  # type: ignore[call-arg]


@pytest.mark.long
def test_the_page_is_true(proxy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Python of docs/endpoints.md, against this proxy in the place of the one that it names."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "endpoints.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for old, new in (("http://127.0.0.1:8080/v1", proxy), ("openai:student", "openai:tiny")):
        assert old in block
        block = block.replace(old, new)
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "docs/endpoints.md", "exec"), {"__name__": "__main__"})
    assert len(read_trace("student.jsonl")[0]) == 2
    assert "sesame" not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
