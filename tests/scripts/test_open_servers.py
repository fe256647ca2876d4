"""Servers as the commands find them: the model, the vocabulary and the numbers must be those that are meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import torch
from transformers import Gemma3Config, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

from turngym.agents.models import load_tokenizer
from turngym.agents.play_spec import Servers
from turngym.agents.rendering.chat_template import RenderError
from turngym.agents.rendering.open_renderer import end_ids
from turngym.agents.servers.open_servers import eval_policy, load_outside, teacher_scorer, train_policy
from turngym.agents.servers.server_connection import ServerError
from turngym.agents.servers.server_options import ServersOf, TeacherServed
from turngym.core.errors import TurngymError
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.trainers.scorer import ModelWeights

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": fake.VOCABULARY, "hidden_size": 16}


TOKENIZER = json.dumps(
    {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
)


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
    policy = eval_policy(Servers(policy_server=f" {address} ,"), folder, Words(), 20)
    assert (policy.vocabulary, policy.max_length) == (fake.VOCABULARY, 20)
    assert len(policy.generate([request()])[0].ids) >= 1
    policy.fleet.close()


def test_a_server_with_other_weights_does_not(server: Any, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG))
    (other / "model.safetensors").write_bytes(b"others")
    options = Servers(policy_server=server.url)
    with pytest.raises(ServerError, match="are meant"):
        eval_policy(options, other, Words(), None)
    (other / "config.json").write_text("{}")
    with pytest.raises(ServerError, match="names a vocab_size"):
        eval_policy(options, other, Words(), None)
    assert not server.of("/generate")


def write(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"architectures": CONFIG["architectures"], **config}))


def test_a_language_model_inside_of_another(server: Any, folder: Path, tmp_path: Path) -> None:
    write(folder, text_config=CONFIG)
    policy = eval_policy(Servers(policy_server=server.url), folder, Words(), None)
    assert policy.vocabulary == fake.VOCABULARY
    policy.fleet.close()
    write(folder, text_config={**CONFIG, "vocab_size": fake.VOCABULARY - 3})
    scorer, shared = teacher_scorer(TeacherServed(teacher_server=server.url), None, Words(), fake.VOCABULARY, 1.0)
    assert (scorer.vocabulary, shared) == (fake.VOCABULARY - 3, fake.VOCABULARY - 3)
    scorer.fleet.close()
    # as the files of Gemma 3 are
    write(folder, text_config={"model_type": "gemma3_text"})
    policy = eval_policy(Servers(policy_server=server.url), folder, Words(), None)
    assert policy.vocabulary == Gemma3TextConfig().vocab_size
    policy.fleet.close()
    write(folder, text_config={"vocab_size": "many"})
    with pytest.raises(ServerError, match="names a vocab_size; it is 'many' there"):
        teacher_scorer(TeacherServed(teacher_server=server.url), None, Words(), fake.VOCABULARY, 1.0)


def test_a_student_inside_of_another_model(server: Any, tmp_path: Path) -> None:
    inside = {"vocab_size": fake.VOCABULARY, "hidden_size": 16}
    config = Gemma3Config(text_config=inside, architectures=CONFIG["architectures"])
    weights: Any = SimpleNamespace(adapter=None, save=None, scorer=None, rounding=0.0)
    options = ServersOf(policy_server=server.url)
    policy = train_policy(
        options, SimpleNamespace(config=config), Words(), 20, tmp_path / "out", weights=weights, live=True
    )
    assert policy.policy.vocabulary == fake.VOCABULARY
    policy.close()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("generation_config.json", "{", "generation_config.json cannot be read: "),
        ("tokenizer.json", TOKENIZER.replace("WordLevel", "Nope"), "cannot load the tokenizer in "),
        ("config.json", "{}", "names a vocab_size"),
    ],
)
def test_a_strangers_folder_that_cannot_be_read(folder: Path, name: str, text: str, said: str) -> None:
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert (end_ids(load_outside(str(folder))), len(load_tokenizer(folder))) == ((1, 2), 2)
    (folder / name).write_text(text)
    with pytest.raises(TurngymError, match=said) as caught:
        _ = load_tokenizer(folder), load_outside(str(folder))
    assert "\n" not in str(caught.value)


def test_an_end_token_that_a_servers_model_lacks(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(TOKENIZER)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": fake.VOCABULARY}))
    with pytest.raises(RenderError, match=f"eos_token_id .* is {fake.VOCABULARY};"):
        end_ids(load_outside(str(folder)))


def test_a_server_that_ignores_seeds_is_named(server: Any, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server.seeded = False
    eval_policy(Servers(policy_server=server.url), folder, Words(), None).fleet.close()
    assert "ignores seeds" in capsys.readouterr().out


def test_a_teacher_scores_at_temperatures_that_its_server_knows(server: Any, folder: Path) -> None:
    options = TeacherServed(teacher_server=server.url)
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
    options = ServersOf(policy_server=server.url)
    engine = train_policy(options, model, Words(), 20, tmp_path / "out", weights=ModelWeights(model))
    with pytest.raises(ServerError, match=r"57 given ids .*version 0 of the policy"):
        engine.generate([request()])
    assert list((tmp_path / "out" / "weights").iterdir())
    engine.close()
    assert not list((tmp_path / "out" / "weights").iterdir())
