"""Weights and caches of the local engine in bfloat16: what it is stored in, and how far it is from float32."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import play, tiny

from turngym.agents import load_world
from turngym.agents.local_engine.engine import LocalEngine, pack_engine, unpack_engine
from turngym.agents.local_engine.model import cast_copy, follow
from turngym.agents.models import TORCH_VARIABLES, load_policy
from turngym.agents.named_agent import open_agent
from turngym.agents.playing.env_maker import probe
from turngym.agents.resolve_play import resolve_agent
from turngym.core.errors import TurngymError
from turngym.core.protocols import GenerateRequest, Sampling
from turngym.core.rollout_request import RolloutRequest
from turngym.trainers.lora import LoraConfig, add_adapters, merged_weights
from turngym.trainers.models import autocast, final_states, head
from turngym.trainers.student_player import PlayedModel, RunEnv, RunInfo, StudentPlayer
from turngym.trainers.student_sources import played_source
from turngym.trainers.train_config import train_config

SIZE: Any = {"turns": 3, "sessions": 4, "temperature": 1.0}
TOLERANCE = 0.04
"""Of a log-probability in bfloat16, whose numbers carry 8 bits: 2^-8 of logits of about 1, some layers deep."""


def build(kind: str = "qwen3") -> Any:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "initializer_range": 0.06}
    if kind == "qwen3":
        return tiny("Qwen3", **sizes)
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "full_attention_interval": 2}
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    return tiny("Qwen3_5Text", **sizes | linear | heads)


def logprobs(model: Any, asked: GenerateRequest, ids: Any, *, in_bfloat16: bool) -> Any:
    """As the trainer computes them: states, then the head; in float32 or under bfloat16 autocast."""
    full = torch.tensor(np.concatenate((asked.prompt_ids, ids))).long()
    with torch.no_grad(), autocast(model, in_bfloat16):
        logp = head(model)(final_states(model, full[None])[0]).float().log_softmax(-1)
    return logp[torch.arange(len(full) - len(ids) - 1, len(full) - 1), torch.tensor(ids).long()].numpy()


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_bfloat16_agrees_with_float32_and_with_the_trainers_bfloat16(kind: str) -> None:
    model = build(kind)
    engine = LocalEngine(model, dtype="bfloat16", cache="ragged")
    gaps: dict[bool, list[float]] = {False: [], True: []}
    for asked, generation in play(engine, **SIZE):
        for how, gap in gaps.items():
            expected = logprobs(model, asked, generation.ids, in_bfloat16=how)
            gap.append(float(np.abs(generation.logprobs - expected).max()))
    assert 0 < max(gaps[False]) < TOLERANCE
    assert 0 < max(gaps[True]) < TOLERANCE


@pytest.mark.parametrize("kind", ["qwen3", "qwen3.5"])
def test_the_cache_is_as_precise_as_the_weights(kind: str) -> None:
    """Of an engine that is told so and of a model that is; recurrent states stay float32."""
    sizes = {}
    for name, engine in {
        "float32": LocalEngine(build(kind)),
        "told": LocalEngine(build(kind), dtype="bfloat16"),
        "loaded": LocalEngine(build(kind).to(torch.bfloat16)),
    }.items():
        play(engine, **SIZE)
        sizes[name] = engine._cache.nbytes()
    slots = 4
    recurrent = 0 if kind == "qwen3" else 2 * slots * 4 * 16 * 16 * 4  # saved and live, 4 heads of 16 x 16 numbers
    assert sizes["told"] == sizes["loaded"] == (sizes["float32"] - recurrent) // 2 + recurrent


def test_the_copy_follows_the_weights() -> None:
    model = build()
    engine = LocalEngine(model, dtype="bfloat16")
    play(engine, **SIZE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    after = play(engine, **SIZE)
    fresh = play(LocalEngine(model, dtype="bfloat16"), **SIZE)
    for (_, one), (_, other) in zip(after, fresh, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    engine.weights_changed(3)
    assert play(engine, **SIZE)[0][1].policy_version == 3
    assert engine.model is model
    assert next(model.parameters()).dtype == torch.float32


def test_a_replica_has_the_precision() -> None:
    engine = LocalEngine(build(), dtype="bfloat16")
    twin = unpack_engine(pack_engine(engine))
    for (_, one), (_, other) in zip(play(engine, **SIZE), play(twin, **SIZE), strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_what_a_copy_changes_and_what_not() -> None:
    model = build()
    model.tie_weights()
    model._keep_in_fp32_modules_strict = {"layers.*.input_layernorm", "model.norm.weight"}
    made = cast_copy(model, torch.bfloat16)
    kinds = {name: parameter.dtype for name, parameter in made.named_parameters()}
    kept = ["model.norm.weight", *(name for name in kinds if name.endswith("input_layernorm.weight"))]
    assert {kinds.pop(name) for name in kept} == {torch.float32}
    assert set(kinds.values()) == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in made.parameters())
    assert made.model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.no_grad():
        model.lm_head.weight.fill_(0.5)
    assert float(made.lm_head.weight.float().abs().max()) < 0.5
    follow(made, model)
    assert float(made.lm_head.weight.float().min()) == 0.5


def biased(**changes: Any) -> Any:
    return tiny("Qwen2", hidden_size=64, intermediate_size=96, initializer_range=0.06, **changes)


def adapted(*targets: str, **changes: Any) -> Any:
    """A model with adapters that change it."""
    model = biased(**changes)
    add_adapters(model, LoraConfig(rank=4, targets=targets))
    disturb(model, 0)
    return model


def disturb(model: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)


def test_a_copy_has_adapters_merged_and_rounded_once() -> None:
    """As the trained model is when it is saved; queries, keys and values have biases here."""
    model = adapted()
    made = cast_copy(model, torch.bfloat16)
    for seed in (1, 2):
        disturb(model, seed)
        follow(made, model)
        plain = merged_weights(model, model.state_dict())
        assert set(plain) == set(made.state_dict())
        for name, weight in made.state_dict().items():
            assert torch.equal(weight, plain[name].to(torch.bfloat16)), name


def test_an_adapted_student_plays_in_bfloat16_as_the_merged_model_does() -> None:
    model = adapted()
    plain = biased()
    engine = LocalEngine(model, dtype="bfloat16")
    for seed in (1, 2):
        disturb(model, seed)
        plain.load_state_dict(merged_weights(model, model.state_dict()))
        for (_, one), (_, other) in zip(
            play(engine, **SIZE), play(LocalEngine(plain, dtype="bfloat16"), **SIZE), strict=True
        ):
            np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_an_adapter_of_a_tied_head_leaves_the_embedding_alone() -> None:
    model = adapted("lm_head", "q_proj", tie_word_embeddings=True)
    assert model.lm_head.base_layer.weight is model.model.embed_tokens.weight
    made = cast_copy(model, torch.bfloat16)
    assert torch.equal(made.model.embed_tokens.weight, model.model.embed_tokens.weight.bfloat16())
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert float((made(ids).logits - model(ids).logits).abs().max()) < TOLERANCE
        follow(made, model)
        assert float((made(ids).logits - model(ids).logits).abs().max()) < TOLERANCE
        disturb(model, 1)
        assert float((made(ids).logits - model(ids).logits).abs().max()) > 5 * TOLERANCE


def test_an_unknown_precision_is_named() -> None:
    with pytest.raises(TurngymError, match="dtype 'fp8' is unknown"):
        LocalEngine(build(), dtype="fp8")


def test_a_student_in_training_plays_in_the_precision_asked_for(tmp_path: Path) -> None:
    """From the option to the tensors that play; the run's identity says so."""
    folder = load_world("alfworld").checkpoint("student")
    model, tokenizer = load_policy(folder)
    learner: Any = PlayedModel(model=model, tokenizer=tokenizer)
    run = RunInfo(out=tmp_path, learner=learner)
    seen = []
    request = RolloutRequest(step=1, episodes=1, group=1, max_turns=2, temperature=1.0)
    for asked, name in ((None, torch.float32), ("bfloat16", torch.bfloat16)):
        given = {"student": folder, "out": tmp_path, "rollout_dtype": asked, "max_turns": 2}
        config = train_config("grpo", given, "test")
        env = RunEnv(config=config, info=run, student=StudentPlayer(config, run))
        collect = played_source(env, None)
        engine = collect.player.engine
        (episode,) = collect(request)
        env.student.close()
        assert next(engine._model.model.parameters()).dtype == name
        assert {tensor.dtype for tensor in engine._cache._keys} == {name}
        seen.append(np.concatenate([turn.logprobs for turn in episode.turns]))
    assert not np.array_equal(seen[0], seen[1])
    assert next(model.parameters()).dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_agent_of_a_folder_has_the_cache_of_its_precision(dtype: Any) -> None:
    """`turngym eval --dtype`, down to the keys that are kept."""
    folder = load_world("alfworld").checkpoint("student")
    spec = resolve_agent({"agent": f"model:{folder}", "dtype": dtype})
    opened = open_agent(spec, lambda: probe("turngym/ALFWorld-v0", {}), slots=1)
    engine = opened.agent.policy  # type: ignore[attr-defined]
    prompt, sampling = np.arange(5, dtype=np.int32), Sampling(max_new_tokens=2)
    engine.generate([GenerateRequest(session="a", prompt_ids=prompt, sampling=sampling, stream=(0,))])
    assert {str(tensor.dtype) for tensor in engine._cache._keys} == {f"torch.{dtype}"}


GROWTH = """
import ctypes, sys, torch
from turngym.agents.models import load_model

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena o s h mapped u f used free keep".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Info
load_model(sys.argv[1])
layer, used = torch.nn.Linear(64, 64).bfloat16(), []
for rows in range(1, 601):
    layer(torch.ones(rows, 64, dtype=torch.bfloat16))
    used += [libc.mallinfo2().used] if rows in (200, 600) else []
print(used[1] - used[0])
"""


@pytest.mark.long
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc 2.33")
def test_products_of_ever_new_lengths_do_not_pile_up() -> None:
    """400 lengths more: 260 MB with the 1,024 products that oneDNN and torch keep by default."""
    command = [sys.executable, "-c", GROWTH, str(load_world("alfworld").checkpoint("student"))]
    clean = {name: value for name, value in os.environ.items() if name not in TORCH_VARIABLES}
    done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 30e6


def test_the_variables_of_torch_are_set_where_the_user_has_not_set_them(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = TORCH_VARIABLES
    monkeypatch.setenv(first, "7")
    for name in rest:
        monkeypatch.delenv(name, raising=False)
    load_policy(load_world("alfworld").checkpoint("student"))
    assert {name: os.environ[name] for name in TORCH_VARIABLES} == {**TORCH_VARIABLES, first: "7"}
