"""Servers as the commands find them: the model, the vocabulary and the numbers must be those that are meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from turngym.agents.servers.open_servers import eval_policy, teacher_scorer, train_policy
from turngym.agents.servers.server_connection import ServerError
from turngym.agents.servers.server_options import PolicyServer, TrainServers
from turngym.envs.core.protocols import GenerateRequest, Sampling
from turngym.trainers.scorer import ModelWeights

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": fake.VOCABULARY, "hidden_size": 16}


class Words:
    """As the fake server encodes and decodes."""

    def __len__(self) -> int:
        return int(fake.VOCABULARY)

    def decode(self, token_ids: Any, /, **kwargs: Any) -> str:
        return str(fake.letters(list(token_ids)))

    def encode(self, text: str, /, **kwargs: Any) -> list[int]:
        return list(fake.numbers(text))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


@pytest.fixture
def server(folder: Path) -> Iterator[Any]:
    with fake.FakeServer(model=str(folder)) as one:
        yield one


def request() -> GenerateRequest:
    return GenerateRequest(
        session="a", prompt_ids=np.array([5, 6], np.int32), sampling=Sampling(max_new_tokens=3), stream=(1,)
    )


def test_a_server_plays_with_the_weights_of_a_folder(server: Any, folder: Path) -> None:
    address = server.url.removeprefix("http://")
    policy = eval_policy(PolicyServer(policy_server=f" {address} ,"), folder, Words(), 20)
    assert (policy.vocabulary, policy.max_length) == (fake.VOCABULARY, 20)
    assert len(policy.generate([request()])[0].ids) >= 1
    policy.fleet.close()


def test_a_server_with_other_weights_does_not(server: Any, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG))
    (other / "model.safetensors").write_bytes(b"others")
    options = PolicyServer(policy_server=server.url)
    with pytest.raises(ServerError, match="are meant"):
        eval_policy(options, other, Words(), None)
    (other / "config.json").write_text("{}")
    with pytest.raises(ServerError, match="names a vocab_size"):
        eval_policy(options, other, Words(), None)
    assert not server.of("/generate")


def test_a_server_that_ignores_seeds_is_named(server: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.seeded = False
    eval_policy(PolicyServer(policy_server=server.url), folder, Words(), None).fleet.close()
    assert "ignores seeds" in capsys.readouterr().out


def test_a_teacher_scores_at_temperatures_that_its_server_knows(server: Any, folder: Path) -> None:
    options = TrainServers(teacher_server=server.url)
    with pytest.raises(ServerError, match="scores at temperature 1, not at 2"):
        teacher_scorer(options, None, Words(), fake.VOCABULARY, 2.0)
    server.tempers = True
    warm, _ = teacher_scorer(options, None, Words(), fake.VOCABULARY, 2.0)
    assert warm.temperature == 2.0
    warm.fleet.close()
    server.tempers = False
    scorer, shared = teacher_scorer(options, folder, Words(), fake.VOCABULARY - 3, 1.0)
    assert (scorer.vocabulary, scorer.shared, shared) == (fake.VOCABULARY, fake.VOCABULARY - 3, fake.VOCABULARY - 3)
    scorer.fleet.close()


def test_a_server_that_computes_other_numbers_than_the_trainer(server: Any, tmp_path: Path) -> None:
    config = Qwen3Config(
        vocab_size=fake.VOCABULARY,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    options = TrainServers(policy_server=server.url)
    engine = train_policy(options, model, Words(), 20, tmp_path / "out", weights=ModelWeights(model))
    with pytest.raises(ServerError, match=r"57 given ids .*version 0 of the policy"):
        engine.generate([request()])
    assert list((tmp_path / "out" / "weights").iterdir())
    engine.close()
    assert not list((tmp_path / "out" / "weights").iterdir())
