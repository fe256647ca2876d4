"""Servers as one: which are taken, who gets what, and what is asked of all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sglang_fake as fake

from turngym.agents.servers.fleet import Fleet, check_model, check_names, check_tokenizer
from turngym.agents.servers.policy import ServerPolicy
from turngym.agents.servers.server_connection import BadAnswer, ClientLimits, ServerDown, ServerError, error_text
from turngym.core.protocols import GenerateRequest

FakeServer, VOCABULARY = fake.FakeServer, fake.VOCABULARY
QUICK, Words = fake.QUICK, fake.Words


@pytest.fixture
def pair() -> Iterator[tuple[Any, Any]]:
    with FakeServer() as one, FakeServer() as two:
        yield one, two


def opened(*servers: Any) -> Fleet:
    return Fleet(urls=[server.url for server in servers], settings=QUICK).open()


def ask(session: str, turn: int = 0) -> GenerateRequest:
    return fake.ask(5, 6, most=3, stream=(turn,), session=session)


def test_what_a_server_says_about_itself() -> None:
    with FakeServer(max_prompt=1018) as server:
        fleet = opened(server)
        (info,) = fleet.servers
        fleet.close()
    assert (info.version, info.kind, info.weights, info.seeded) == ("0.5.23", "Qwen3ForCausalLM", "default", True)
    assert (info.max_prompt, info.max_length) == (1018, 1022)
    assert (fleet.versions.current, fleet.versions.version) == ("default", 0)


@pytest.mark.parametrize("version", ["0.5.20", "9" * 5000])
def test_another_release_is_refused(version: str) -> None:
    with FakeServer(version=version) as server, pytest.raises(ServerError, match=r"supported are 0\.5\.21") as caught:
        opened(server)
    assert version[:80] in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("limit", ["many", -5, True])
def test_a_limit_that_is_no_number_of_ids(limit: Any) -> None:
    with FakeServer(max_prompt=limit) as server, pytest.raises(BadAnswer, match="max_req_input_len is ") as caught:
        opened(server)
    assert f"is {limit!r};" in str(caught.value)


def test_an_architecture_is_the_first_of_a_list(pair: tuple[Any, Any]) -> None:
    for server in pair:
        server.orders.append(lambda path, body: (200, {"architectures": "Qwen"}) if path == "/model_info" else None)
    fleet = opened(*pair)
    assert [server.kind for server in fleet.servers] == ["", ""]
    fleet.close()


@pytest.mark.parametrize("version", ["0.5.21", "0.5.23.post1"])
def test_releases_that_speak_the_protocol(version: str) -> None:
    with FakeServer(version=version) as server:
        fleet = opened(server)
        assert [info.version for info in fleet.servers] == [version]
        fleet.close()


def test_no_server_and_no_sglang_server() -> None:
    with pytest.raises(ServerError, match="at least one url"):
        Fleet(urls=[]).open()
    with pytest.raises(ServerError, match="must begin with http"):
        Fleet(urls=["127.0.0.1:30000"]).open()
    with pytest.raises(ServerError, match=":-1' has a port"):
        Fleet(urls=["http://127.0.0.1:-1"]).open()
    with FakeServer() as server:
        server.orders.append(lambda path, body: (404, {"detail": "Not Found"}))
        with pytest.raises(ServerError, match=r"neither an SGLang nor a vLLM server: .*404"):
            opened(server)
    nobody = Fleet(urls=[server.url], settings=ClientLimits(connect_timeout=0.05, backoff=0.01))
    with pytest.raises(ServerDown, match="tried"):
        nobody.open()


def test_servers_that_differ(pair: tuple[Any, Any]) -> None:
    pair[1].max_prompt = 30
    with pytest.raises(ServerError, match="longest prompt"):
        opened(*pair)
    pair[1].max_prompt, pair[1].kind = 60, "LlamaForCausalLM"
    with pytest.raises(ServerError, match="architecture"):
        opened(*pair)


def test_a_session_stays_with_its_server_and_sessions_spread(pair: tuple[Any, Any]) -> None:
    fleet = opened(*pair)
    policy = ServerPolicy(fleet, vocabulary=VOCABULARY)
    for server in pair:
        server.token_seconds = 0.01
    for turn in range(3):
        policy.generate([ask(f"s{n}", turn) for n in range(6)])
    fleet.close()
    counts = [len(server.of("/generate")) for server in pair]
    assert sorted(counts) == [9, 9]


def test_the_other_server_takes_over(pair: tuple[Any, Any]) -> None:
    fleet = opened(*pair)
    policy = ServerPolicy(fleet, vocabulary=VOCABULARY)
    before = policy.generate([ask(f"s{n}") for n in range(4)])
    pair[0].orders.append(lambda path, body: (0, None))
    after = policy.generate([ask(f"s{n}") for n in range(4)])
    fleet.close()
    assert [one.ids.tolist() for one in before] == [one.ids.tolist() for one in after]


def test_behind_a_router_the_servers_themselves_are_asked(pair: tuple[Any, Any]) -> None:
    with FakeServer(workers=[server.url for server in pair]) as router:
        fleet = opened(router)
        policy = ServerPolicy(fleet, vocabulary=VOCABULARY)
        policy.generate([ask("a"), ask("b")])
        fleet.call_all(("POST", "/pause_generation", {"mode": "retract"}))
        fleet.call_all(("POST", "/continue_generation", {}))
        fleet.close()
        assert [server.url for server in fleet.servers] == [server.url for server in pair]
        assert len(router.of("/generate")) == 2
        assert not router.of("/pause_generation")
    for server in pair:
        assert server.of("/pause_generation") == [{"mode": "retract"}]
        assert not server.of("/generate")


def test_the_key_goes_to_no_host_that_nobody_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServer(workers=["http://10.1.2.3:30000"]) as router:
        monkeypatch.setenv("TURNGYM_SERVER_KEY", "sk-0123456789abcdef")
        with pytest.raises(ServerError, match=r"lists http://10\.1\.2\.3:30000, on a host that was not named"):
            opened(router)


def test_a_router_whose_servers_have_no_address() -> None:
    with FakeServer(workers=[]) as router:
        router.orders.append(lambda path, body: (200, {"workers": 5}) if path == "/workers" else None)
        with pytest.raises(BadAnswer, match="/workers: not an answer of such a server: TypeError"):
            opened(router)


def test_a_router_without_servers() -> None:
    with FakeServer(workers=[]) as router, pytest.raises(ServerError, match="a router without servers"):
        Fleet(urls=[router.url], settings=ClientLimits(connect_timeout=1.0, backoff=0.01)).open()


def test_an_error_is_a_text_or_an_object() -> None:
    assert error_text({"error": "a"}) == "a"
    assert error_text({"error": {"message": "b", "code": 400}}) == "b"
    assert error_text({"success": False, "message": "c"}) == "c"
    assert error_text({"detail": "d"}) == "d"
    assert error_text("plain") == "plain"


def test_another_model_is_seen_before_anything_is_sent(tmp_path: Path) -> None:
    mine = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({**mine, "hidden_size": 128}))
    with FakeServer(model=str(tmp_path)) as server:
        fleet = opened(server)
        with pytest.raises(ServerError, match="hidden_size is 128 there and 64 here"):
            check_model(fleet, mine)
        check_model(fleet, {**mine, "hidden_size": 128})
        with pytest.raises(ServerError, match=r"Qwen3ForCausalLM .* LlamaForCausalLM"):
            check_model(fleet, {**mine, "architectures": ["LlamaForCausalLM"]})
        inside = {"architectures": mine["architectures"], "text_config": mine}
        (tmp_path / "config.json").write_text(json.dumps({**inside, "text_config": {**mine, "hidden_size": 128}}))
        with pytest.raises(ServerError, match="hidden_size is 128 there and 64 here"):
            check_model(fleet, inside)
        check_model(fleet, {**inside, "text_config": {**mine, "hidden_size": 128}})
        fleet.close()


class WithAdded(Words):
    """A tokenizer with one added token."""

    added_tokens_decoder: ClassVar = {305: "<|end|>"}


def test_another_vocabulary_is_seen_before_anything_is_sent() -> None:
    with FakeServer() as server:
        fleet = opened(server)
        check_tokenizer(fleet, Words(), VOCABULARY)
        server.decode = lambda ids: "z" if ids == [7] else fake.letters(ids)
        with pytest.raises(ServerError, match="id 7 is 'z' there and 'h' here"):
            check_tokenizer(fleet, Words(), VOCABULARY)
        # a family's tokenizers have the same letters; an added token lies between the ids that are compared of many
        server.decode = lambda ids: "z" if ids == [305] else fake.letters(ids)
        check_tokenizer(fleet, Words(), 1000)
        with pytest.raises(ServerError, match="id 305 is 'z' there"):
            check_tokenizer(fleet, WithAdded(), 1000)
        server.decode, server.encode = fake.letters, lambda text: fake.numbers(text)[::-1]
        with pytest.raises(ServerError, match=r"'Nothing happens\.' is"):
            check_tokenizer(fleet, Words(), VOCABULARY)
        server.orders.append(lambda path, body: (200, {"text": ["a"]}) if path == "/detokenize" else None)
        with pytest.raises(ServerError, match="40 rows were asked for"):
            check_tokenizer(fleet, Words(), VOCABULARY)
        fleet.close()


def test_weights_of_a_training_run_are_not_those_of_the_folder() -> None:
    with FakeServer(weights="turngym-1a2b-3-v7") as server:
        fleet = opened(server)
        with pytest.raises(ServerError, match="a training run sent it"):
            check_names(fleet)
        fleet.close()
