"""vLLM's dialect, against a server whose answers are those that the real one was recorded with."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import torch
import vllm_answers
from servers import until
from sglang_fake import END, VOCABULARY, FakeServer, ask, draw, logprobs, tempered
from vllm_fake import GENERATE, FakeVllm

from turngym.agents.rendering.stop_text import StopText
from turngym.agents.servers import vllm_dialect
from turngym.agents.servers.fleet import Fleet, check_tokenizer
from turngym.agents.servers.policy import ServerPolicy, ServerScorer
from turngym.agents.servers.server_connection import (
    BadAnswer,
    ClientLimits,
    ServerError,
    SyncError,
    WrongWeights,
    seed_of,
)
from turngym.agents.servers.vllm_dialect import VllmDialect, VllmGroup
from turngym.agents.servers.weights import BroadcastSync, DiskSync, SyncedPolicy
from turngym.core.protocols import PartialFailure

ROWS = [np.array([5, 6, 7, VOCABULARY - 1, 8], np.int32), np.array([9, 3], np.int32)]
PLACES = [np.array([2, 3, 4]), np.array([1])]


@pytest.fixture
def server() -> Iterator[Any]:
    with FakeVllm() as one:
        yield one


@pytest.fixture
def opened() -> Iterator[Any]:
    fleets = []

    def make(*servers: Any, **settings: Any) -> Fleet:
        quick = {"deadline": 20.0, "backoff": 0.01, "connect_timeout": 5.0, **settings}
        fleets.append(Fleet(urls=[one.url for one in servers], settings=ClientLimits(**quick)).open())
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def asked(server: Any) -> list[Any]:
    """What was asked of it after it was found out about."""
    return [body for body in server.of(GENERATE) if "request_id" in body]


def unknown(answer: Any) -> Any:
    """Without the log-probabilities of a prompt, as a model that computes NaN."""
    for row in (answer["prompt_logprobs"] or [])[1:]:
        row |= {one: {**entry, "logprob": -9999.0} for one, entry in row.items()}
    return answer


def by_hand(prompt: list[int], most: int, seed: int, heat: float, weights: str = "default") -> Any:
    ids: list[int] = []
    found: list[float] = []
    while len(ids) < most and (not ids or ids[-1] != END):
        token, logp = draw(prompt + ids, weights, heat, seed)
        ids.append(token)
        found.append(logp)
    return ids, np.array(found, np.float32)


# Which server it is, and what it can.


def test_which_server_it_is_is_asked(server: Any, opened: Any) -> None:
    (info,) = opened(server).servers
    assert info.dialect == VllmDialect(processed=True, full=True, rows=False)
    assert (info.version, info.model, info.weights, info.dtype) == ("0.32.0", "/models/tiny", "default", "float32")
    assert (info.max_prompt, info.max_length, info.missing, info.adapters) == (64, 64, "", False)
    server.dev, server.loads, server.processed, server.top = False, True, False, 20
    (info,) = opened(server).servers
    assert info.dialect == VllmDialect(processed=False, full=False, rows=False)
    assert (info.missing, info.adapters, info.dtype) == ("VLLM_SERVER_DEV_MODE=1", True, "auto")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"scale_out": False}, "has no /inference/v1/generate: start vLLM with --enable-scale-out"),
        ({"version": "0.31.9"}, r"is vLLM 0.31.9; supported are 0.32 up to, but not, 0.34 \(tried: 0.32.0\)"),
        ({"version": "9" * 5000}, r"is vLLM 9{80}\.\.\.; supported are 0.32"),
        ({"models": lambda: {"data": []}}, r"/v1/models lists no model of the server's own: \{'data': \[\]\}"),
        ({"max_prompt": -9}, "on connecting: max_model_len is -5; it must be a whole number of at least 1"),
        ({"edit": lambda answer: unknown(answer)}, "on connecting: a log-probability is -inf"),
        ({"edit": lambda answer: {**answer, "choices": []}}, "on connecting: not an answer of such a server: Ind"),
    ],
)
def test_a_server_that_cannot_be_used_is_refused_on_connecting(
    server: Any, opened: Any, change: dict[str, Any], said: str
) -> None:
    for name, value in change.items():
        setattr(server, name, value)
    with pytest.raises(ServerError, match=said) as caught:
        opened(server)
    assert "\n" not in str(caught.value)


def test_servers_of_two_kinds_are_no_fleet(server: Any, opened: Any) -> None:
    with FakeServer() as other, pytest.raises(ServerError, match="the servers differ in kind"):
        opened(server, other)


def test_another_vocabulary(server: Any, opened: Any) -> None:
    fleet = opened(server)
    check_tokenizer(fleet, fake.Words(), VOCABULARY)
    server.encode = lambda text: [1, 2]
    with pytest.raises(ServerError, match="has another vocabulary: 'Nothing happens"):
        check_tokenizer(fleet, fake.Words(), VOCABULARY)


# What is drawn.


def test_ids_and_log_probabilities_are_the_servers(server: Any, opened: Any) -> None:
    policy = ServerPolicy(opened(server), vocabulary=VOCABULARY)
    (found,) = policy.generate([ask(5, 6, 7, most=8, stream=(3, 1), temperature=0.7, stop_ids=(9,), stop_text=("xy",))])
    ids, logp = by_hand([5, 6, 7], 8, seed_of((3, 1)), 0.7)
    assert found.ids.tolist() == ids
    np.testing.assert_allclose(found.logprobs, logp, rtol=1e-6)
    (body,) = asked(server)
    assert body["sampling_params"] == {
        "max_tokens": 8,
        "temperature": 0.7,
        "seed": seed_of((3, 1)),
        "logprobs": 0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "watermarking": False,
        "stop_token_ids": [9],
        "stop": ["xy"],
        "skip_special_tokens": False,
    }
    assert (body["token_ids"], body["model"]) == ([5, 6, 7], None)


def test_raw_log_probabilities_are_computed_or_refused(server: Any, opened: Any) -> None:
    server.processed = False
    policy = ServerPolicy(opened(server), vocabulary=VOCABULARY)
    for heat in (0.0, 0.7, 1.0, 1.5):
        (found,) = policy.generate([ask(5, 6, 7, most=8, stream=(3,), temperature=heat)])
        np.testing.assert_allclose(found.logprobs, by_hand([5, 6, 7], 8, seed_of((3,)), heat)[1], rtol=1e-5)
    server.top = 20
    policy = ServerPolicy(opened(server), vocabulary=VOCABULARY)
    (found,) = policy.generate([ask(5, 6, 7, most=8, stream=(3,), temperature=1.0)])
    fewer = ServerPolicy(policy.fleet, vocabulary=VOCABULARY, vocab_size=15)
    for one, heat in ((policy, 0.7), (fewer, 1.0)):
        with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
            one.generate([ask(5, 6, 7, temperature=heat)])


@pytest.mark.parametrize("heat", [0.7, 1.0])
@pytest.mark.parametrize("processed", [True, False])
def test_ids_that_are_not_scored_are_not_drawn(server: Any, opened: Any, processed: bool, heat: float) -> None:
    """A head has more rows than its teacher's: the rest is as if there were no others, whatever else is asked."""
    server.processed = processed
    fleet = opened(server)
    every, few = (ServerPolicy(fleet, vocabulary=VOCABULARY, vocab_size=size) for size in (None, 15))
    asked = ask(5, 6, 7, most=30, stream=(4,), temperature=heat)
    (whole,), (found,) = (one.generate([asked]) for one in (every, few))
    assert whole.ids.max() >= 15 > found.ids.max()
    row = [5, 6, 7, *found.ids.tolist()]
    for place, (one, logp) in enumerate(zip(found.ids, found.logprobs, strict=True), 3):
        among = fake.tempered(server.logp(row[:place], "default")[:15], heat)
        np.testing.assert_allclose(logp, among[one], rtol=1e-5)


def test_the_deadline_aborts_and_keeps_what_was_drawn(server: Any, opened: Any) -> None:
    server.token_seconds = 0.05
    policy = ServerPolicy(opened(server, deadline=0.4), vocabulary=VOCABULARY)
    stream = next(n for n in range(999) if len(by_hand([5], 50, seed_of((n,)), 1.0)[0]) == 50)
    (found,) = policy.generate([ask(5, most=50, stream=(stream,))])
    assert found.finish == "aborted"
    assert 1 <= len(found.ids) < 40
    (body,) = asked(server)
    assert server.of("/inference/v1/abort_requests") == [{"request_ids": [f"generate-tokens-{body['request_id']}"]}]


def test_what_is_broken_off_goes_on_with_other_random_numbers(server: Any, opened: Any, tmp_path: Path) -> None:
    """Every request has a generator of its own: with one seed, the second part would get the first part's numbers."""
    server.token_seconds = 0.01
    fleet = opened(server)
    policy = ServerPolicy(fleet, vocabulary=VOCABULARY, stops=StopText(fake.Words()))
    sink = DiskSync(fleet=fleet, save=lambda path: None, folder=tmp_path, busy="abort")
    stream = next(n for n in range(999) if len(by_hand([5], 50, seed_of((n,)), 1.0)[0]) == 50)
    drawn: list[Any] = []
    thread = threading.Thread(target=lambda: drawn.extend(policy.generate([ask(5, most=50, stream=(stream,))])))
    thread.start()
    until(lambda: server.running)
    time.sleep(0.1)
    sink.publish(1)
    thread.join()
    first, *rest = asked(server)
    assert rest
    cut = len(rest[-1]["token_ids"]) - 1
    assert cut > 0
    assert rest[-1]["sampling_params"]["seed"] == seed_of((stream, cut)) != first["sampling_params"]["seed"]
    assert rest[-1]["sampling_params"]["max_tokens"] == 50 - cut
    assert drawn[0].version_spans == ((0, 0, cut), (1, cut, len(drawn[0].ids)))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda choice: choice["token_ids"].pop(), "ids came with"),
        (lambda choice: choice["logprobs"]["content"][0].update(token_id=30), "but its log-probability is of id 30"),
        (lambda choice: choice["logprobs"]["content"][0].update(logprob=-9999.0), "log-probability"),
        (lambda choice: choice.update(logprobs=None), "came with 0 log-probabilities"),
        (lambda choice: choice.update(finish_reason="error"), "finish_reason is 'error'"),
        (lambda choice: choice["weight_versions"][0].update(end=1), "do not cover"),
        (lambda choice: choice.update(token_ids=[2**40]), "OverflowError"),
    ],
)
def test_an_answer_in_half_is_none(server: Any, opened: Any, damage: Any, said: str) -> None:
    policy = ServerPolicy(opened(server), vocabulary=VOCABULARY)

    def edit(answer: Any) -> Any:
        damage(answer["choices"][0])
        return answer

    server.edit = edit
    with pytest.raises(PartialFailure) as caught:
        policy.generate([ask(5, 6, most=4, stream=(2,))])
    (error,) = caught.value.results
    assert isinstance(error, BadAnswer)
    assert said in str(error)


# What is scored.


def test_scores_of_given_ids_likely_ids_and_chosen_ids(server: Any, opened: Any) -> None:
    support = [np.array([[0, 39, 7]] * 3), np.array([[5, 6, 5]])]
    for heat in (1.0, 2.0):
        scorer = ServerScorer(fleet=opened(server), vocabulary=VOCABULARY, temperature=heat)
        given, best = scorer.logprobs(ROWS, PLACES), scorer.topk(ROWS, PLACES, 3)
        chosen = scorer.gather(ROWS, PLACES, support)
        for number, (row, places) in enumerate(zip(ROWS, PLACES, strict=True)):
            for line, place in enumerate(places):
                logp = tempered(logprobs(row[:place].tolist(), "default"), heat)
                np.testing.assert_allclose(given[number][line], logp[row[place]], rtol=1e-5)
                assert best[number].ids[line].tolist() == np.argsort(-logp)[:3].tolist()
                np.testing.assert_allclose(best[number].logp[line], np.sort(logp)[::-1][:3], rtol=1e-5)
                rest = 1 - np.exp(np.sort(logp)[::-1][:3].astype(np.float64)).sum()
                np.testing.assert_allclose(np.exp(best[number].tail[line]), rest, rtol=1e-4)
                np.testing.assert_allclose(chosen[number].logp[line], logp[support[number][line]], rtol=1e-5)


@pytest.mark.parametrize("heat", [1.0, 2.0])
def test_scores_that_the_server_does_not_know_are_none(server: Any, opened: Any, heat: float) -> None:
    """It says -9999 for minus infinity and for NaN."""
    scorer = ServerScorer(fleet=opened(server), vocabulary=VOCABULARY, temperature=heat)
    server.edit = unknown
    support = [np.array([[0, 39, 7]] * 3), np.array([[5, 6, 5]])]
    for call in (
        lambda: scorer.logprobs(ROWS, PLACES),
        lambda: scorer.topk(ROWS, PLACES, 3),
        lambda: scorer.gather(ROWS, PLACES, support),
    ):
        with pytest.raises(BadAnswer, match=r"log-probability is (-inf|nan); it must"):
            call()


def test_a_draw_of_which_the_server_knows_no_probability_is_none(server: Any, opened: Any) -> None:
    """Also where its log-probability is computed from those of the whole vocabulary."""
    server.processed = False
    policy = ServerPolicy(opened(server), vocabulary=VOCABULARY)

    def edit(answer: Any) -> Any:
        (entry, *_) = answer["choices"][0]["logprobs"]["content"]
        for one in entry["top_logprobs"]:
            one["logprob"] = -9999.0 if one["token_id"] == entry["token_id"] else one["logprob"]
        return answer

    server.edit = edit
    with pytest.raises(PartialFailure) as caught:
        policy.generate([ask(5, 6, most=4, stream=(2,), temperature=0.7)])
    assert "log-probability -inf" in str(caught.value.results[0])


def test_chosen_ids_by_the_route_that_gpus_have(opened: Any) -> None:
    """Written after the package's own code; a CPU server refuses it, so this one answers as that code says."""
    import base64
    import io

    dialect = VllmDialect(rows=True)
    asking = fake.score_of(ROWS[0], 1, [2, 4], chosen=np.array([[3, 4], [5, 6]]))
    params = dialect.score_body(asking, "r", None)["sampling_params"]
    assert (params["prompt_logprob_token_ids"], params["prompt_logprob_start"]) == ([[3, 4], [0, 0], [5, 6]], 1)
    file = io.BytesIO()
    np.save(file, np.array([[-1, -2], [-9, -9], [-3, -4]], np.float32))
    answer = {"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}
    assert dialect.read_chosen(answer, asking).tolist() == [[-1, -2], [-3, -4]]
    np.save(file := io.BytesIO(), np.zeros((2, 2), np.float32))
    with pytest.raises(BadAnswer, match=r"of shape \(2, 2\) came"):
        dialect.read_chosen({"prompt_token_id_logprobs": base64.b64encode(file.getvalue()).decode()}, asking)
    with pytest.raises(BadAnswer, match="ValueError"):
        dialect.read_chosen({"prompt_token_id_logprobs": "AAAA"}, asking)


def test_a_server_that_lists_no_more_than_the_likeliest_ids_is_enough(server: Any, opened: Any) -> None:
    """The ids behind them bound the tail; without them it is what the K leave of 1."""
    server.top = 3
    scorer = ServerScorer(fleet=opened(server), vocabulary=VOCABULARY)
    for _ in range(2):
        best = scorer.topk(ROWS, PLACES, 3)
        for one in best:
            np.testing.assert_allclose(np.exp(one.tail), 1 - np.exp(one.logp.astype(float)).sum(axis=1), rtol=1e-5)
    asked = [body["sampling_params"].get("prompt_logprobs") for body in server.of("/inference/v1/generate")]
    assert asked.count(19) <= len(ROWS)  # not once more
    assert asked.count(3) == 2 * len(ROWS)


def test_what_a_server_does_not_score_is_refused_in_a_line(server: Any, opened: Any) -> None:
    server.top = 20
    fleet = opened(server)
    with pytest.raises(ServerError, match="greater than max allowed: 20"):
        ServerScorer(fleet=fleet, vocabulary=VOCABULARY).topk(ROWS, PLACES, 30)
    with pytest.raises(ServerError, match="--max-logprobs -1"):
        ServerScorer(fleet=fleet, vocabulary=VOCABULARY).gather(ROWS, PLACES, [np.array([[1]] * 3), np.array([[1]])])
    with pytest.raises(ServerError, match="scores at temperature 1, not at 2"):
        ServerScorer(fleet=fleet, vocabulary=VOCABULARY, temperature=2.0).logprobs(ROWS, PLACES)


# New weights.


def write(path: Path) -> None:
    (path / "weights").write_text("")


def test_weights_from_a_folder_in_the_order_that_the_server_needs(server: Any, opened: Any, tmp_path: Path) -> None:
    fleet = opened(server)
    before = len(server.asked)
    DiskSync(fleet=fleet, save=write, folder=tmp_path, busy="retract").publish(3)
    name = str(fleet.versions.current)
    (path,) = tmp_path.iterdir()
    assert server.asked[before:] == [
        ("/pause?mode=keep", None),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}),
        ("/update_weight_version", {"new_version": name}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
        ("/weight_info", None),
    ]
    assert ServerPolicy(fleet, vocabulary=VOCABULARY).generate([ask(5)])[0].policy_version == 3


def test_adapters_are_named_by_every_request(server: Any, opened: Any, tmp_path: Path) -> None:
    server.loads = True
    fleet = opened(server)
    fleet.versions.adapters = True
    sink = DiskSync(fleet=fleet, save=write, folder=tmp_path)
    policy = SyncedPolicy(policy=ServerPolicy(fleet, vocabulary=VOCABULARY), sink=sink, stamp=lambda: 0)
    for version in (1, 2, 3):
        policy.weights_changed(version)
        assert policy.generate([ask(5)])[0].policy_version == version
        assert asked(server)[-1]["model"] == fleet.versions.current
    assert len(server.adapters) == 2
    assert set(server.adapters.values()) == {str(path) for path in tmp_path.iterdir()}
    server.adapters.clear()  # it was restarted
    assert policy.generate([ask(5)])[0].policy_version == 3
    assert list(server.adapters) == [fleet.versions.current]
    sink.close()
    assert not server.adapters
    with pytest.raises(PartialFailure) as caught:
        policy.generate([ask(5)])
    assert isinstance(caught.value.results[0], WrongWeights)


def test_a_server_without_the_routes_for_weights(server: Any, opened: Any, tmp_path: Path) -> None:
    from turngym.agents.servers.open_servers import train_policy
    from turngym.agents.servers.server_options import Gloo, ServersOf

    server.dev = False
    with pytest.raises(ServerError, match="VLLM_SERVER_DEV_MODE=1"):
        train_policy(ServersOf(policy_server=server.url), Student(), fake.SizedWords(), 60, tmp_path, weights=Weights())
    server.dev = True
    options = ServersOf(policy_server=server.url, weight_sync=Gloo())
    with pytest.raises(SyncError, match="vLLM takes weights from the disk or by nccl"):
        train_policy(options, Student(), fake.SizedWords(), 60, tmp_path, weights=Weights())
    options = ServersOf(policy_server=server.url, when_busy="retract")
    server.loads = True
    with pytest.raises(ServerError, match="adapter that it began with"):
        train_policy(options, Student(), fake.SizedWords(), 60, tmp_path, weights=Weights(adapter=True))


class Student:
    class config:
        @staticmethod
        def to_dict() -> dict[str, Any]:
            return {"architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCABULARY}


class Weights:
    def __init__(self, adapter: bool = False) -> None:
        self.adapter = adapter
        self.save = self.save_adapter = write

    def __getattr__(self, name: str) -> Any:
        return lambda *_: []


def test_the_broadcast_says_what_vllms_own_trainer_says(server: Any, opened: Any, monkeypatch: Any) -> None:
    """NCCL needs GPUs: the group is a stand-in here, and the calls are those of vLLM's HTTP client."""
    sent: list[Any] = []

    class Group(VllmGroup):
        def __init__(self, *about: Any) -> None:
            sent.append(about[2])

        def send(self, tensor: Any) -> Any:
            sent.append(tensor.tolist())
            return lambda: True

        def close(self) -> None:
            sent.append("closed")

    monkeypatch.setattr(vllm_dialect, "VllmGroup", Group)
    fleet = opened(server)
    weights = [("a", torch.ones(2)), ("b", torch.zeros(1, 3))]
    sink = BroadcastSync(fleet=fleet, weights=lambda: weights, backend="nccl", bucket_bytes=8)
    monkeypatch.setattr(BroadcastSync, "_tensors", lambda self: iter(weights))
    before = len(server.asked)
    sink.publish(2)
    calls = server.asked[before:]
    assert [path for path, _ in calls] == [
        *("/init_weight_transfer_engine", "/pause?mode=wait", "/start_weight_update", "/update_weights"),
        *("/update_weights", "/finish_weight_update", "/reset_prefix_cache?reset_running_requests=true", "/resume"),
        "/weight_info",
    ]
    assert calls[0][1]["init_info"].keys() == {"master_address", "master_port", "rank_offset", "world_size"}
    assert (calls[0][1]["init_info"]["rank_offset"], calls[0][1]["init_info"]["world_size"]) == (1, 2)
    assert calls[3][1] == {"update_info": {"names": ["a"], "dtype_names": ["float32"], "shapes": [[2]]}}
    assert calls[4][1] == {"update_info": {"names": ["b"], "dtype_names": ["float32"], "shapes": [[1, 3]]}}
    assert calls[5][1] == {"weight_version": fleet.versions.current}
    assert sent == [2, [1.0, 1.0], [[0.0, 0.0, 0.0]]]
    sink.close()
    assert server.asked[-1][0] == "/shutdown_weight_transfer_engine"
    assert sent[-1] == "closed"


def test_without_vllms_package_a_broadcast_is_refused(server: Any, opened: Any) -> None:
    sink = BroadcastSync(fleet=opened(server), weights=list, backend="nccl", timeout=5.0)
    with pytest.raises(SyncError, match="needs its package in this environment"):
        sink.publish(1)


def test_the_fake_answers_as_the_real_one_was_recorded(server: Any) -> None:
    server.model, server.loads = "/models/tiny", True
    found = vllm_answers.answers(server.url)
    wanted = vllm_answers.recorded()
    assert {name: (answer[0], vllm_answers.shape(answer[1])) for name, answer in found.items()} == {
        name: (answer[0], vllm_answers.shape(answer[1])) for name, answer in wanted.items()
    }
