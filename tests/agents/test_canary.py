"""The canary: servers of both kinds that say that they have the weights, and compute with others."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import sglang_fake as fake
import torch
from late import late
from sglang_fake import FakeServer
from transformers import Qwen3Config, Qwen3ForCausalLM
from vllm_fake import FakeVllm

from turngym.agents.servers.canary import Canary, CanaryError
from turngym.agents.servers.fleet import Fleet
from turngym.agents.servers.open_servers import train_policy
from turngym.agents.servers.server_connection import WrongWeights
from turngym.agents.servers.server_options import ServersOf
from turngym.trainers.lora import LoraConfig, add_adapters
from turngym.trainers.scorer import ModelWeights


def make_model(seed: int = 0, layers: int = 2) -> Any:
    config = Qwen3Config(
        vocab_size=fake.VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=0.3,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).eval()


def computing(kind: type[Any], network: Any, **more: Any) -> Any:
    """A server of this kind that computes with `network`, in whatever precision that is."""

    class Computes(kind):  # type: ignore[misc]
        def logp(self, prefix: list[int], weights: str) -> Any:
            return self.rows(prefix)[-1]

        def logps(self, ids: list[int], weights: str) -> Any:
            return list(self.rows(ids[:-1]))

        def rows(self, ids: list[int]) -> Any:
            with torch.inference_mode():
                logits = self.network(input_ids=torch.tensor([ids])).logits[0]
            return logits.double().log_softmax(-1).numpy()

    server = Computes(max_prompt=200, **more)
    server.network = network
    return server


def half_the_layers(model: Any) -> Any:
    found = copy.deepcopy(model)
    found.model.layers = found.model.layers[:1]
    return found


def moved(model: Any, size: float) -> Any:
    found = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return found


def adapted(model: Any, seed: int) -> Any:
    found = copy.deepcopy(model)
    add_adapters(found, LoraConfig(rank=2), seed=seed)
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    return found


LIES = {
    "old weights": lambda model: moved(model, 0.003),
    "half the layers": half_the_layers,
    "another dtype": lambda model: copy.deepcopy(model).bfloat16(),
    "another adapter": lambda model: adapted(model, 5),
    "another model of the same shape": lambda model: make_model(seed=9),
}


def canary_of(fleet: Fleet, model: Any, **more: Any) -> Canary:
    own = ModelWeights(model)
    return Canary(fleet=fleet, vocabulary=fake.VOCABULARY, scorer=own.scorer, rounding=own.rounding, **more)


@pytest.fixture(params=[FakeServer, FakeVllm], ids=["SGLang", "vLLM"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture
def opened() -> Iterator[Any]:
    fleets = []

    def make(*servers: Any) -> Fleet:
        fleets.append(Fleet(urls=[one.url for one in servers], settings=fake.QUICK).open())
        return fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()


def test_an_honest_server_passes_and_the_tolerance_is_measured(kind: Any, opened: Any) -> None:
    model = make_model()
    with computing(kind, model) as server:
        canary = canary_of(opened(server), model)
        canary.check()
        assert canary.difference < 1e-5
        assert canary.tolerance == pytest.approx(5e-4)
    half = copy.deepcopy(model).bfloat16()
    with computing(kind, half, dtype="bfloat16") as server:
        canary = canary_of(opened(server), model)
        canary.check()
        assert 1e-3 < canary.difference < canary.tolerance < 1.0


@pytest.mark.parametrize("lie", late(LIES, "old weights", "another dtype"))
def test_a_server_that_lies_is_named_with_both_numbers(kind: Any, opened: Any, lie: str) -> None:
    model = make_model()
    meant = adapted(model, 1) if lie == "another adapter" else model
    with computing(kind, model if lie == "another adapter" else meant) as honest:
        honest.network = meant
        with computing(kind, LIES[lie](model)) as server, pytest.raises(CanaryError) as caught:
            canary_of(opened(honest, server), meant).check()
    said = str(caught.value)
    assert said.startswith(server.url)
    assert honest.url not in said
    assert "on average from those of version 0 of the policy; rounding makes at most 0.0005" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    "lie", late(("half the layers", "another model of the same shape", "old weights"), "old weights")
)
def test_a_server_in_half_precision_that_lies(kind: Any, opened: Any, lie: str) -> None:
    model = make_model()
    lying = moved(model, 0.05) if lie == "old weights" else LIES[lie](model)
    with computing(kind, lying.bfloat16(), dtype="bfloat16") as server, pytest.raises(CanaryError):
        canary_of(opened(server), model).check()


def test_weights_that_did_not_arrive_are_seen_though_rounding_hides_them(kind: Any, opened: Any) -> None:
    """A step moves the numbers by less than a half precision rounds: but a server with new ones gives other bits."""
    model = make_model()
    stale = copy.deepcopy(model).bfloat16()
    with computing(kind, stale, dtype="bfloat16") as server:
        canary = canary_of(opened(server), model)
        canary.check()
        canary.check()  # nothing has moved: the same bits are right
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.002 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
        with pytest.raises(CanaryError, match="weights before version 0 "):
            canary.check()
        server.network = copy.deepcopy(model).bfloat16()
        canary.check()


def test_keys_and_values_of_other_weights_are_seen_in_what_is_drawn(kind: Any, opened: Any) -> None:
    """Given ids are scored anew; a draw continues from what the server has kept of the prompt."""
    model = make_model()
    with computing(kind, model) as server:
        other, fresh = make_model(seed=9), server.logp

        def kept(prefix: list[int], weights: str) -> Any:
            if len(prefix) < 160:  # scored
                return fresh(prefix, weights)
            with torch.inference_mode():
                return other(input_ids=torch.tensor([prefix])).logits[0, -1].double().log_softmax(-1).numpy()

        server.logp = kept
        with pytest.raises(CanaryError, match=r"gives 8 drawn \(temperature 0.7\) ids"):
            canary_of(opened(server), model).check()


def test_weights_of_somebody_else_are_refused_by_their_name(kind: Any, opened: Any) -> None:
    model = make_model()
    with computing(kind, model) as server:
        fleet = opened(server)
        server.weights = "others"
        with pytest.raises(WrongWeights, match="others"):
            canary_of(fleet, model).check()


def test_after_the_start_and_after_every_sync(kind: Any, tmp_path: Any) -> None:
    model = make_model()
    with computing(kind, model) as server:
        options = ServersOf(policy_server=server.url)
        engine = train_policy(options, model, fake.SizedWords(), 60, tmp_path, weights=ModelWeights(model))
        engine.generate([fake.ask(3, 4)])
        server.network = copy.deepcopy(model)
        with torch.no_grad():
            model.lm_head.weight.mul_(1.01)
        engine.weights_changed(7)
        with pytest.raises(CanaryError, match="from those of version 7 of the policy"):
            engine.generate([fake.ask(3, 4)])
        server.network = model
        assert engine.generate([fake.ask(3, 4)])[0].policy_version == 7
        engine.close()


def test_the_ids_are_fixed_and_of_both_ends_of_the_vocabulary(opened: Any) -> None:
    with FakeServer(max_prompt=2000) as server:
        canary = Canary(fleet=opened(server), vocabulary=150_000, scorer=None, rounding=None)  # type: ignore[arg-type]
        short, long = canary._rows
        assert (len(short), len(long)) == (8, 160)
        assert 30 <= (long >= 149_900).sum() <= 50
        assert (long < 100_000).sum() > 50
        np.testing.assert_array_equal(long, canary._rows[1])
