"""The greedy episodes of a real model in this process, behind an endpoint, on SGLang, and in other people's evaluators.

Where ids are shown they are compared, else the text of every turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evaluator_commands import inspect_eval
from proxy_http import ServedProxy
from sglang_server import served_policy

from turngym.agents import evaluate
from turngym.agents.evaluation.compare import rescore
from turngym.core.episode import Episode
from turngym.trainers.live.proxy_options import proxy_config
from turngym.trainers.live.run import build

BASE = Path(os.environ.get("TURNGYM_SMOLLM2", Path(__file__).parents[2] / "models" / "smollm2"))
pytestmark = pytest.mark.skipif(
    not BASE.is_dir(), reason="needs models/smollm2: python3 scripts/bootstrap.py smollm2 makes it"
)
# not by load_world, which wants the base model in the current folder
STUDENT = Path(__file__).parents[2] / "agents/worlds/checkpoints/alfworld-smollm2/student"
PANEL = "alfworld-quickstart"
PLAYED: dict[str, Any] = {"limit": 3, "max_turns": 8, "samples": 1, "progress": False}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Episode]]:
    """The episodes as the model plays them in this process; the adapter finds its base in the current folder."""
    folder = tmp_path_factory.mktemp("real")
    (folder / "models").mkdir()
    (folder / "models" / "smollm2").symlink_to(BASE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield evaluate(PANEL, f"model:{STUDENT}", temperature=0.0, threads=1, **PLAYED).episodes


@pytest.fixture(scope="module")
def url(here: list[Episode], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`turngym serve proxy --no-train` with the same model."""
    settings = {"student": STUDENT, "out": tmp_path_factory.mktemp("proxy"), "device": "cpu", "threads": 1}
    settings["proxy"] = {"max_waiting": 8, "name": "smollm2"}
    service, _ = build(proxy_config(None, [("test", settings)]))
    served = ServedProxy(service)
    yield served.server.url
    served.stop()


def said(episodes: list[Episode]) -> dict[str, list[tuple[Any, ...]]]:
    """Task -> what was seen, answered and made of the answer in each turn, in a fixed order of the tasks."""
    found = {e.task.task_id: [(t.observation, t.response, t.action, t.verdict) for t in e.turns] for e in episodes}
    return dict(sorted(found.items()))


def test_the_episodes_are_worth_comparing(here: list[Episode]) -> None:
    turns = [turn for episode in here for turn in episode.turns]
    assert len(turns) > 12
    assert len({turn.response for turn in turns}) > 6
    assert {turn.verdict.value for turn in turns} == {"ok", "inadmissible"}


def test_an_endpoint_agent_gets_the_ids_that_this_process_draws(
    here: list[Episode], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    there = evaluate(PANEL, "openai:smollm2", base_url=url, token_ids=True, temperature=0.0, **PLAYED).episodes
    assert said(there) == said(here)
    for mine in here:
        theirs = next(episode for episode in there if episode.task == mine.task)
        for one, other in zip(mine.turns, theirs.turns, strict=True):
            assert theirs.prompt_ids(other).tolist() == mine.prompt_ids(one).tolist()
            assert theirs.response_ids(other).tolist() == mine.response_ids(one).tolist()
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-3)  # type: ignore[arg-type]


def test_the_official_client_gets_the_same_ids(here: list[Episode], url: str) -> None:
    """Its messages are those of the episode; `stop` is what the text channel sends."""
    openai = pytest.importorskip("openai", reason="the official client")
    episode = max(here, key=lambda one: len({turn.response for turn in one.turns}))
    with openai.OpenAI(base_url=url, api_key="none") as client:
        messages = [{"role": "system", "content": episode.system}]
        for turn in episode.turns:
            messages.append({"role": "user", "content": turn.observation})
            answer = client.chat.completions.create(
                model="smollm2", messages=messages, temperature=0.0, stop=["</action>"], logprobs=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            assert answer.choices[0].token_ids == episode.response_ids(turn).tolist()
            messages.append({"role": "assistant", "content": turn.response})


def test_inspect_plays_the_same_episodes(here: list[Episode], url: str, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai", reason="needs the extra turngym[inspect]")
    pytest.importorskip("openai", "3.4", reason="Inspect's provider for chat servers; verifiers wants an older one")
    options = {"limit": 3, "max_turns": 8, "temperature": 0, "trace": tmp_path / "trace.jsonl"}
    words = [word for name, value in options.items() for word in ("-T", f"{name}={value}")]
    inspect_eval(tmp_path, url, *words, model="smollm2", panel=PANEL)
    assert said(rescore(tmp_path / "trace.jsonl").episodes) == said(here)


@pytest.mark.nightly
@pytest.mark.sglang
def test_the_sglang_server_draws_the_same_ids(here: list[Episode], tmp_path: Path) -> None:
    """Its kernels sum in another order, so an id may differ where two are nearly as likely; here none does."""
    merged = tmp_path / "merged"
    words = [sys.executable, "-m", "turngym.scripts", "model", "merge", str(STUDENT), "--out", str(merged)]
    subprocess.run(words, check=True, capture_output=True)
    with served_policy(merged, tmp_path) as address:
        there = evaluate(PANEL, f"model:{merged}", policy_server=address, temperature=0.0, **PLAYED).episodes
    assert said(there) == said(here)
    for mine in here:
        theirs = next(episode for episode in there if episode.task == mine.task)
        for one, other in zip(mine.turns, theirs.turns, strict=True):
            assert theirs.response_ids(other).tolist() == mine.response_ids(one).tolist()
            np.testing.assert_allclose(other.logprobs, one.logprobs, atol=1e-3)  # type: ignore[arg-type]
