"""The real vLLM server on a CPU, with the shipped student of the household. Needs vllm: docs/model_servers.md.

    TURNGYM_VLLM_PYTHON=... python -m pytest tests/agents/test_vllm_real.py -m vllm

One server does nearly all of it, in order; it is killed once and comes back. The last test starts its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm_answers
from sglang_server import START, VLLM, require, served_policy

from turngym.agents.evaluation.evaluate import evaluate
from turngym.agents.models import load_model, load_tokenizer
from turngym.agents.servers.canary import CanaryError
from turngym.agents.servers.fleet import Fleet, check_model, check_tokenizer
from turngym.agents.servers.open_servers import teacher_scorer, train_policy
from turngym.agents.servers.policy import ServerPolicy, ServerScorer
from turngym.agents.servers.server_connection import ClientLimits, ServerError
from turngym.agents.servers.server_options import ServersOf, TeacherServed
from turngym.agents.worlds.worlds import CHECKPOINTS
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.core.trace import read_trace
from turngym.trainers.lora import LoraConfig, add_adapters
from turngym.trainers.run import train
from turngym.trainers.scorer import LocalScorer, ModelWeights

pytestmark = pytest.mark.vllm
STUDENT = CHECKPOINTS / "alfworld" / "student"
TEACHER = CHECKPOINTS / "alfworld" / "teacher"
PANELS = ("alfworld-quickstart-v1", "webshop-quickstart-v1", "search-quickstart-v1")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = ("--adapters", "4", "--top", "-1", "--restarts", "1")
    with served_policy(STUDENT, tmp_path_factory.mktemp("vllm"), *options, engine="vllm") as address:
        yield address


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    one = Fleet(urls=[url], settings=ClientLimits(deadline=START, backoff=0.1)).open()
    yield one
    one.close()


@pytest.fixture(scope="module")
def model() -> Any:
    return load_model(STUDENT)


def test_the_server_is_what_it_should_be(fleet: Fleet, model: Any) -> None:
    (server,) = fleet.servers
    assert (server.dialect.name, server.weights, server.dtype, server.missing) == ("vLLM", "default", "float32", "")
    assert (server.max_length, server.adapters) == (1024, True)
    assert server.dialect == type(server.dialect)(processed=True, full=True, rows=False)
    check_model(fleet, model.config.to_dict())
    tokenizer = load_tokenizer(STUDENT)
    check_tokenizer(fleet, tokenizer, len(tokenizer))
    with pytest.raises(ServerError, match="hidden_size is 128 there and 64 here"):
        check_model(fleet, {**model.config.to_dict(), "hidden_size": 64})


def test_answers_have_the_shape_of_the_recorded_ones(url: str) -> None:
    found, wanted = vllm_answers.answers(url), vllm_answers.recorded()
    for name, (status, body) in wanted.items():
        assert (status, vllm_answers.shape(body)) == (found[name][0], vllm_answers.shape(found[name][1])), name


@pytest.mark.parametrize("panel", PANELS)
def test_greedy_episodes_are_the_local_engines(url: str, tmp_path: Path, panel: str) -> None:
    played = []
    for name, servers in (("local", {}), ("server", {"policy_server": url})):
        evaluate(
            panel,
            f"model:{STUDENT}",
            out=tmp_path / name,
            limit=4,
            samples=1,
            temperature=0.0,
            max_turns=6,
            workers=0,
            **servers,
            progress=False,
        )
        played.append(read_trace(tmp_path / name / "trace.jsonl")[0])
    assert sum(len(episode.turns) for episode in played[0]) > 8
    for local, served in zip(*played, strict=True):
        np.testing.assert_array_equal(local.segments[0], served.segments[0])
        for mine, theirs in zip(local.turns, served.turns, strict=True):
            np.testing.assert_allclose(theirs.logprobs, mine.logprobs, atol=1e-4)


def test_what_is_sampled_has_the_trainers_log_probabilities_and_repeats(fleet: Fleet, model: Any) -> None:
    policy = ServerPolicy(fleet, vocabulary=448)
    prompt = np.random.default_rng(0).integers(3, 448, 40).astype(np.int32)
    sampling = Sampling(max_new_tokens=24, temperature=0.7)
    requests = [GenerateRequest(session=str(n), prompt_ids=prompt, sampling=sampling, stream=(n,)) for n in range(8)]
    drawn = policy.generate(requests)
    assert len({one.ids.tobytes() for one in drawn}) > 1
    for one, again in zip(drawn, [policy.generate([request])[0] for request in requests], strict=True):
        np.testing.assert_array_equal(one.ids, again.ids)
        row, places = np.append(prompt, one.ids), np.arange(len(prompt), len(prompt) + len(one.ids))
        wanted = LocalScorer(model=model, temperature=0.7).logprobs([row], [places])[0]
        np.testing.assert_allclose(one.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_scores_are_the_local_scorers(fleet: Fleet, model: Any, temperature: float) -> None:
    random = np.random.default_rng(1)
    ids = [random.integers(0, 448, length).astype(np.int32) for length in (3, 70, 300)]
    places = [np.sort(random.choice(np.arange(1, len(row)), min(len(row) - 1, 20), replace=False)) for row in ids]
    mine = LocalScorer(model=model, temperature=temperature)
    theirs = ServerScorer(fleet=fleet, vocabulary=448, temperature=temperature)
    for one, other in zip(mine.logprobs(ids, places), theirs.logprobs(ids, places), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4)
    for best, found in zip(mine.topk(ids, places, 20), theirs.topk(ids, places, 20), strict=True):
        np.testing.assert_allclose(found.logp, best.logp, atol=1e-4)
    support = [random.integers(0, 448, (len(where), 5)) for where in places]
    for one, other in zip(mine.gather(ids, places, support), theirs.gather(ids, places, support), strict=True):
        np.testing.assert_allclose(other.logp, one.logp, atol=1e-4)


def test_the_wrong_teacher_is_seen_at_the_start(url: str) -> None:
    tokenizer, load = load_tokenizer(STUDENT), lambda folder: ModelWeights(load_model(folder))
    options = TeacherServed(teacher_server=url)
    teacher_scorer(options, STUDENT, tokenizer, 448, 1.0, load)[0].fleet.close()
    with pytest.raises(CanaryError, match=f"from those of the teacher in {TEACHER}"):
        teacher_scorer(options, TEACHER, tokenizer, 448, 1.0, load)


@pytest.mark.parametrize("algorithm", ["grpo", "turnopd"])
def test_training_with_weights_that_follow(url: str, tmp_path: Path, algorithm: str) -> None:
    """Adapters: exact on a CPU. The canary is asked before the first step and after each."""
    settings: dict[str, Any] = {"teacher": TEACHER} if algorithm == "turnopd" else {"reward": "own_rewards:thrift"}
    result = train(
        algorithm,
        student=STUDENT,
        out=tmp_path,
        env="turngym/ALFWorld-v0",
        steps=3,
        episodes=8,
        max_turns=3,
        max_new_tokens=16,
        policy_server=url,
        workers=2,
        lora={"rank": 4},
        optimizer={"lr": 1e-3},
        keep_rollouts=3,
        progress=False,
        **settings,
    )
    assert result.step == 3
    episodes = [episode for path in (tmp_path / "rollouts").glob("*") for episode in read_trace(path)[0]]
    assert len(episodes) == 24
    assert not any(episode.status.is_error for episode in episodes)
    assert {turn.policy_version for episode in episodes for turn in episode.turns} >= {0, 1}


def adapted() -> Any:
    model = load_model(STUDENT)
    add_adapters(model, LoraConfig(rank=4))
    shift(model, 1)
    return model


def shift(model: Any, seed: int) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))


def test_a_server_that_is_killed_comes_back_with_the_adapter_of_the_run(url: str, tmp_path: Path) -> None:
    model = adapted()
    options = ServersOf(policy_server=url, server_deadline=START)
    engine = train_policy(options, model, load_tokenizer(STUDENT), None, tmp_path, weights=ModelWeights(model))
    prompt = np.random.default_rng(0).integers(3, 448, 40).astype(np.int32)
    ask = GenerateRequest(session="a", prompt_ids=prompt, sampling=Sampling(max_new_tokens=12), stream=(3,))
    (before,) = engine.generate([ask])
    assert engine.canary is not None
    assert engine.canary.difference < 1e-4
    os.kill(listening(url), signal.SIGKILL)
    time.sleep(1.0)
    (after,) = engine.generate([ask])
    np.testing.assert_array_equal(before.ids, after.ids)
    np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-5)
    shift(model, 2)
    engine.weights_changed(1)
    assert engine.generate([ask])[0].policy_version == 1
    assert engine.canary.difference < 1e-4
    engine.close()


def listening(url: str) -> int:
    """The process that listens at `url`."""
    port, sockets = int(url.rpartition(":")[2]), set[str]()
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = row.split()
        if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
            sockets.add(f"socket:[{fields[9]}]")
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) in sockets:
                return int(link.parts[2])
        except OSError:
            continue
    raise AssertionError(f"nobody listens at {url}")


def test_a_run_starts_its_own_server_which_ends_with_it(tmp_path: Path) -> None:
    """All weights are trained: a CPU build reloads a folder wrongly, is caught by the canary, and started again."""
    require("vllm")
    words = [sys.executable, "-m", "turngym.scripts", "train", "turnopd", "--student", str(STUDENT)]
    words += ["--out", str(tmp_path), "--env", "turngym/ALFWorld-v0", "--steps", "50", "--episodes", "8"]
    words += ["--max-turns", "3", "--max-new-tokens", "16", "--optimizer.lr", "1e-3"]
    words += ["--teacher", str(TEACHER), "--engine", "vllm", "--engine-python", VLLM, "--threads", "1"]
    said = tmp_path / "said"
    with said.open("w+") as out, subprocess.Popen(words, stdout=out, stderr=out) as child:
        try:
            end = time.monotonic() + START
            # progress is said every few seconds, not at every step
            while not re.search(r"step ([2-9]|[1-9]\d)\b", said.read_text()):
                assert child.poll() is None, said.read_text()
                assert time.monotonic() < end, said.read_text()
                time.sleep(0.3)
        finally:
            child.kill()
    assert "It is started again with them" in said.read_text()
    url = said.read_text().partition("note: ")[2].split()[0]
    end = time.monotonic() + 20
    while True:
        try:
            listening(url)
        except AssertionError:
            break
        assert time.monotonic() < end, "the server has outlived the trainer"
        time.sleep(0.2)
