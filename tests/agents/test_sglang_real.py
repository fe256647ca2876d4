"""The real SGLang server on a CPU, with a tiny Qwen3 made on the spot. Needs sglang: docs/model_servers.md.

    python -m pytest tests/agents/test_sglang_real.py -m sglang

One server does it all, in order; it is killed once and comes back. About two minutes, most of them its starts.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sglang_fake as fake
import sglang_schema as schemas
import torch
from sglang_server import PYTHON, START, require, served_policy
from stopped import ends_though_stopped
from transformers import Qwen3Config, Qwen3ForCausalLM

from turngym.agents.local_engine.model import CausalModel
from turngym.agents.model_agent import ModelAgent
from turngym.agents.playing.rollout import Job, rollout
from turngym.agents.rendering.renderer import ChatRenderer
from turngym.agents.servers.fleet import Fleet, check_model, check_tokenizer
from turngym.agents.servers.policy import ServerPolicy, ServerScorer
from turngym.agents.servers.server_connection import ClientLimits, ServerError, SyncError
from turngym.agents.servers.sglang_dialect import SglangDialect
from turngym.agents.servers.weights import BroadcastSync, DiskSync, SyncedPolicy, free_port
from turngym.core.episode import Episode
from turngym.core.protocols import GenerateRequest, Generation, Sampling
from turngym.core.trace import TraceWriter, read_trace
from turngym.envs.channels import make_channel
from turngym.trainers.scorer import LocalScorer

pytestmark = pytest.mark.sglang


@pytest.fixture(scope="module")
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A model of 2 layers and width 64 with random weights, sharp enough that its draws differ."""
    path = tmp_path_factory.mktemp("tiny-qwen3")
    config = Qwen3Config(
        vocab_size=len(tokenizer) + 5,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served_policy(folder, tmp_path_factory.mktemp("server"), "--restarts", "1") as address:
        yield address


@pytest.fixture
def fleet(url: str) -> Iterator[Fleet]:
    one = Fleet(urls=[url], settings=ClientLimits(deadline=START, backoff=0.1)).open()
    yield one
    one.close()


def engine(fleet: Fleet, model: Any, folder: Path) -> SyncedPolicy:
    sink = DiskSync(fleet=fleet, save=model.save_pretrained, folder=folder)
    policy = ServerPolicy(fleet, vocabulary=model.config.vocab_size)
    return SyncedPolicy(policy=policy, sink=sink, stamp=CausalModel(model).weights_stamp)


def play(policy: Any, tokenizer: Any, make_doors: Any, *, slots: int, games: int = 6) -> list[Episode]:
    """Episodes of three turns at most, 16 ids each."""
    make = make_doors(max_turns=3, on_invalid="noop")
    tool = make().base.tool
    agent = ModelAgent(
        policy,
        ChatRenderer(tokenizer),
        make_channel("text", tool),
        Sampling(temperature=0.8, max_new_tokens=16),
        max_context=policy.max_length,
    )
    jobs = [Job(task_id=f"doors/{2 + n // 2}", sample=n % 2) for n in range(games)]
    return rollout(jobs, make, agent, slots=slots)


def shift(model: Any, seed: int) -> None:
    """Other weights, in place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def same_numbers(fleet: Fleet, model: Any) -> float:
    """Largest difference between the server's log-probabilities and the model's own, of 60 random ids."""
    size = model.config.vocab_size
    row = np.random.default_rng(5).integers(0, size, 60).astype(np.int32)
    where = np.arange(1, 60)
    theirs = ServerScorer(fleet=fleet, vocabulary=size).logprobs([row], [where])[0]
    return float(np.abs(theirs - LocalScorer(model=model).logprobs([row], [where])[0]).max())


def draws(policy: Any, tokenizer: Any, count: int, length: int) -> list[Generation]:
    prompt = np.array(tokenizer("Open the door.")["input_ids"], np.int32)
    sampling = Sampling(max_new_tokens=length)
    requests = [
        GenerateRequest(session=str(n), prompt_ids=prompt, sampling=sampling, stream=(n,)) for n in range(count)
    ]
    return list(policy.generate(requests))


def test_the_server_is_what_it_should_be(fleet: Fleet, model: Any, tokenizer: Any) -> None:
    (server,) = fleet.servers
    assert (server.seeded, server.max_length, server.weights) == (True, 1022, "default")
    check_model(fleet, model.config.to_dict())
    check_tokenizer(fleet, tokenizer, len(tokenizer))
    with pytest.raises(ServerError, match="hidden_size is 64 there and 128 here"):
        check_model(fleet, {**model.config.to_dict(), "hidden_size": 128})


def test_the_schema_knows_what_goes_over_the_wire(url: str, model: Any) -> None:
    dialect = SglangDialect()
    check = schemas.checker(schemas.load_schema())
    ids = np.array([5, 6, 7], np.int32)
    for body in (
        dialect.generate_body(fake.draw_of(ids, 5, sampling=Sampling(stop_text=("x",))), "a", None),
        dialect.score_body(fake.score_of(ids, 0, [1], top=4, chosen=np.array([[1, 2]])), "b", None),
    ):
        check("request", body)
        answer = httpx.post(f"{url}/generate", json=body, timeout=60.0)
        assert answer.status_code == 200
        check("answer", answer.json())
    refused = httpx.post(f"{url}/generate", json={"input_ids": [5], "sampling_params": {"max_tokens": 3}}, timeout=60.0)
    assert refused.status_code == 400
    assert "unknown field `max_tokens`" in refused.text


def test_rollouts_repeat_and_their_numbers_are_the_models(
    fleet: Fleet, model: Any, tokenizer: Any, make_doors: Any, tmp_path: Path
) -> None:
    policy = ServerPolicy(fleet, vocabulary=model.config.vocab_size)
    alone = play(policy, tokenizer, make_doors, slots=1)
    reused = policy.cached_tokens / policy.prompt_tokens
    together = play(policy, tokenizer, make_doors, slots=6)
    scorer = LocalScorer(model=model, temperature=0.8)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_array_equal(one.segments[0], other.segments[0])
        assert len(one.turns) == 3
        for turn in one.turns:
            places = np.arange(*turn.response_span)
            wanted = scorer.logprobs([one.segments[0]], [places])[0]
            np.testing.assert_allclose(turn.logprobs, wanted, atol=1e-4)
    assert len({one.segments[0].tobytes() for one in alone}) == len(alone)
    assert reused > 0.5  # later turns cost their new ids
    with TraceWriter(tmp_path / "trace.jsonl") as writer:
        for one in alone:
            writer.write(one)
    assert len(read_trace(tmp_path / "trace.jsonl")[0]) == len(alone)


def test_scores_are_the_local_scorers(fleet: Fleet, model: Any) -> None:
    size = model.config.vocab_size
    random = np.random.default_rng(1)
    ids = [random.integers(0, size, length).astype(np.int32) for length in (3, 70, 300)]
    places = [np.sort(random.choice(np.arange(1, len(row)), min(len(row) - 1, 40), replace=False)) for row in ids]
    mine, theirs = LocalScorer(model=model), ServerScorer(fleet=fleet, vocabulary=size)
    for one, other in zip(mine.logprobs(ids, places), theirs.logprobs(ids, places), strict=True):
        np.testing.assert_allclose(other, one, atol=1e-4)
    for best, found in zip(mine.topk(ids, places, 20), theirs.topk(ids, places, 20), strict=True):
        np.testing.assert_allclose(found.logp, best.logp, atol=1e-4)
        assert (found.ids == best.ids).mean() > 0.99  # neighbors within rounding may change places
    support = [random.integers(0, size, (len(where), 20)) for where in places]
    for one, other in zip(mine.gather(ids, places, support), theirs.gather(ids, places, support), strict=True):
        np.testing.assert_allclose(other.logp, one.logp, atol=1e-4)


def test_a_temperature_that_this_release_does_not_know_is_refused(fleet: Fleet, model: Any) -> None:
    """Unknown fields of a request are ignored without a word: the answer is asked whether it has it."""
    scorer = ServerScorer(fleet=fleet, vocabulary=model.config.vocab_size, temperature=2.0)
    with pytest.raises(ServerError, match="scores at temperature 1, not at 2"):
        scorer.logprobs([np.array([3, 4, 5], np.int32)], [np.array([1, 2])])


@pytest.mark.parametrize("route", ["disk", "broadcast"])
def test_new_weights_arrive_while_the_server_serves(
    fleet: Fleet, model: Any, tokenizer: Any, tmp_path: Path, route: str
) -> None:
    sink: DiskSync | BroadcastSync
    if route == "disk":
        sink = DiskSync(fleet=fleet, save=model.save_pretrained, folder=tmp_path, busy="retract")
    else:
        sink = BroadcastSync(fleet=fleet, weights=model.named_parameters, busy="retract", bucket_bytes=20_000)
    sink.publish(1)
    assert same_numbers(fleet, model) < 1e-4
    shift(model, 1)
    assert same_numbers(fleet, model) > 0.1
    policy = ServerPolicy(fleet, vocabulary=model.config.vocab_size)
    version, mixed = 1, False
    while not mixed and version < 8:  # again, where all was drawn before or after the change
        version += 1
        drawn: list[Generation] = []
        thread = threading.Thread(target=lambda into: into.extend(draws(policy, tokenizer, 4, 800)), args=(drawn,))
        thread.start()
        time.sleep(0.3 * version)
        sink.publish(version)
        thread.join()
        for one in drawn:
            assert one.policy_version in (version - 1, version)
            if one.version_spans:
                (before, zero, cut), (after, again, end) = one.version_spans
                assert (before, zero, after, end) == (version - 1, 0, version, len(one.ids))
                assert cut == again
                mixed = True
    assert mixed
    assert same_numbers(fleet, model) < 1e-4
    assert fleet.versions.version == version
    sink.close()


def test_through_a_router(url: str, fleet: Fleet, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Requests go through it; weights go to the server behind it, which the router would not hand on."""
    if subprocess.run([PYTHON, "-c", "import sglang_router"], capture_output=True, check=False).returncode:
        pytest.skip("sglang-router is not installed: pip install --no-deps sglang-router==0.3.2")
    port = free_port("127.0.0.1")
    words = [PYTHON, "-m", "sglang_router.launch_router", "--worker-urls", url, "--host", "127.0.0.1"]
    words += ["--port", str(port), "--prometheus-port", str(free_port("127.0.0.1"))]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as router:
        try:
            wait = ClientLimits(deadline=START, backoff=0.2, connect_timeout=START)
            through = Fleet(urls=[f"http://127.0.0.1:{port}"], settings=wait).open()
            assert [server.url for server in through.servers] == [url]
            shift(model, 3)
            sink = DiskSync(fleet=through, save=model.save_pretrained, folder=tmp_path / "w", busy="retract")
            sink.publish(4)
            assert same_numbers(through, model) < 1e-4
            policy = ServerPolicy(through, vocabulary=model.config.vocab_size)
            assert {one.policy_version for one in draws(policy, tokenizer, 3, 8)} == {4}
            sink.close()
            through.close()
        finally:
            router.kill()


def test_a_broadcast_that_a_server_refuses_ends_at_once(fleet: Fleet, model: Any) -> None:
    sink = BroadcastSync(fleet=fleet, weights=model.named_parameters, timeout=60.0)
    sink.publish(1)
    fleet.call_all(("POST", "/destroy_weights_update_group", {"group_name": sink._name}))
    with pytest.raises(SyncError, match="theirs are as before"):
        sink.publish(2)
    assert fleet.versions.version == 1
    sink.publish(3)
    assert same_numbers(fleet, model) < 1e-4
    sink.close()


def test_what_the_server_breaks_off_is_continued_to_the_same_response(
    fleet: Fleet, url: str, model: Any, tokenizer: Any
) -> None:
    policy = ServerPolicy(fleet, vocabulary=model.config.vocab_size)
    whole = draws(policy, tokenizer, 3, 600)
    sent, drawn = policy.prompt_tokens, list[Generation]()
    thread = threading.Thread(target=lambda: drawn.extend(draws(policy, tokenizer, 3, 600)))
    thread.start()
    time.sleep(0.5)
    fleet.call_one(url, ("POST", "/abort_request", {"rid": "", "abort_all": True}))
    thread.join()
    assert policy.prompt_tokens - sent > sent, "nothing was broken off, so nothing was continued"
    for one, all_of_it in zip(drawn, whole, strict=True):
        assert one.finish == all_of_it.finish
        np.testing.assert_array_equal(one.ids, all_of_it.ids)
        np.testing.assert_allclose(one.logprobs, all_of_it.logprobs, atol=1e-4)


def test_a_server_that_dies_in_mid_run_comes_back_with_the_weights_of_the_run(
    fleet: Fleet, url: str, model: Any, tokenizer: Any, make_doors: Any, tmp_path: Path
) -> None:
    shift(model, 7)
    policy = engine(fleet, model, tmp_path)
    policy.weights_changed(5)
    undisturbed = play(policy, tokenizer, make_doors, slots=3, games=8)
    before = fleet.call_one(url, ("GET", "/server_info", None))["startup_time"]
    done: list[list[Episode]] = []
    thread = threading.Thread(target=lambda: done.append(play(policy, tokenizer, make_doors, slots=2, games=8)))
    thread.start()
    time.sleep(0.5)
    # an id that the model does not know: the scheduler dies of it, and the server with it
    deadly = {"input_ids": [10**6], "sampling_params": {"max_new_tokens": 1}}
    with pytest.raises(ServerError):
        fleet.call_one(url, ("POST", "/generate", deadly))
    thread.join()
    assert fleet.call_one(url, ("GET", "/server_info", None))["startup_time"] != before
    (disturbed,) = done
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert not other.status.is_error
        np.testing.assert_array_equal(one.segments[0], other.segments[0])
        assert {turn.policy_version for turn in other.turns} == {5}
    assert same_numbers(fleet, model) < 1e-4


@pytest.mark.nightly
@pytest.mark.parametrize("command", ["train", "serve"])
def test_a_server_that_was_stopped_keeps_nobody_from_ending(command: str, folder: Path, tmp_path: Path) -> None:
    python, metrics = require("sglang"), tmp_path / "run" / "metrics.jsonl"
    argv = ["-m", "turngym.scripts"]
    if command == "train":
        argv += ["train", "grpo", "--student", str(folder), "--out", "run", "--steps", "500", "--episodes", "8"]
        argv += ["--env", "turngym/ALFWorld-v0", "--split", "generated", "--max-turns", "3", "--max-new-tokens", "16"]
        argv += ["--engine", "sglang", "--engine-python", python, "--threads", "1", "--tracker", "none"]
    else:
        argv += ["serve", "policy", str(folder), "--engine", "sglang", "--python", python, "--device", "cpu"]
        argv += ["--port", str(free_port("127.0.0.1")), "--threads", "1", "--cache-tokens", "16384"]
        argv += ["--log", "server.log", "--wait", str(START)]

    def working() -> bool:
        if command == "train":
            return metrics.exists() and metrics.stat().st_size > 0
        return "ready: " in (tmp_path / "log").read_text()

    assert ends_though_stopped(argv, tmp_path, working, start=START)
