"""Every way to a model in half precision keeps the frequencies of positions as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_requests import tiny
from safetensors.torch import save_file

from turngym.agents.local_engine.model import cast_copy
from turngym.agents.models import load_model
from turngym.retrieval.precision import cast_parameters
from turngym.scripts.model import merge
from turngym.trainers.lora import LoraConfig, add_adapters

LONG = 3000
ROPE = {"rope_type": "default", "rope_theta": 1e6}
HALVES = ("bfloat16", "float16")


def folders(folder: Path, family: str = "Llama", **changes: Any) -> tuple[Path, Path]:
    """A tiny model of 4,096 positions, and an adapter of it whose weights are all zero."""
    sizes = {"hidden_size": 64, "head_dim": 16, "max_position_embeddings": 4096, "initializer_range": 0.3}
    base, adapter = folder / "base", folder / "adapter"
    tiny(family, **sizes, **changes).save_pretrained(base)
    adapter.mkdir()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    zeros = {f"{layer}.lora_A.weight": torch.zeros(2, 64), f"{layer}.lora_B.weight": torch.zeros(64, 2)}
    save_file(zeros, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": str(base)}))
    return base, adapter


def last_logp(model: Any) -> Any:
    ids = torch.randint(0, 60, (1, LONG), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(ids).logits[0, -1].float().log_softmax(-1)


@pytest.mark.parametrize("dtype", HALVES)
def test_an_adapter_of_zeros_is_its_base_at_position_3000(dtype: str, tmp_path: Path) -> None:
    """They were 2.8 nats a token apart in bfloat16."""
    base, adapter = folders(tmp_path, rope_parameters=ROPE)
    expected, found = (last_logp(load_model(folder, dtype=dtype)) for folder in (base, adapter))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma3Text"])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_way_gives_what_loading_in_half_precision_gives(family: str, dtype: str, tmp_path: Path) -> None:
    base, adapter = folders(tmp_path, family)
    half = getattr(torch, dtype)
    merge(adapter, tmp_path / "merged")
    ways: dict[str, Callable[[], Any]] = {
        "adapter": lambda: load_model(adapter, dtype=dtype),
        "merged folder": lambda: load_model(tmp_path / "merged", dtype=dtype),
        "copy that plays": lambda: cast_copy(load_model(base), half),
        "in place": lambda: cast_parameters(load_model(base), half),
    }
    plain = load_model(base, dtype=dtype)
    for name, way in ways.items():
        model = way()
        for (key, expected), (_, value) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert value.dtype == expected.dtype, (name, key)
            assert torch.equal(value, expected), (name, key)
        frequencies = {key: value for key, value in plain.named_buffers() if "inv_freq" in key}
        assert frequencies
        buffers = dict(model.named_buffers())
        for key, expected in frequencies.items():
            assert buffers[key].dtype == torch.float32
            assert torch.equal(buffers[key], expected), (name, key)


def test_a_tied_weight_stays_one() -> None:
    model = cast_parameters(tiny("Llama", tie_word_embeddings=True), torch.bfloat16)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.bfloat16


def test_names_that_stay_in_float32_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Patterns with stars, found anywhere in a name; the second list is for float16 alone."""
    base, _ = folders(tmp_path)
    kind = transformers.LlamaForCausalLM
    strict, more = kind._keep_in_fp32_modules_strict, kind._keep_in_fp32_modules
    kind._keep_in_fp32_modules_strict, kind._keep_in_fp32_modules = ["layers.*.mlp.gate"], ["q_proj.weight"]
    try:
        for dtype in HALVES:
            plain, made = load_model(base, dtype=dtype), cast_parameters(load_model(base), getattr(torch, dtype))
            expected = {name: parameter.dtype for name, parameter in plain.named_parameters()}
            assert set(expected.values()) == {torch.float32, getattr(torch, dtype)}
            assert {name: parameter.dtype for name, parameter in made.named_parameters()} == expected
        # peft puts "base_layer" into names, in which HunYuan's "base" is none of its own
        kind._keep_in_fp32_modules_strict = ["base"]
        adapted = load_model(base)
        add_adapters(adapted, LoraConfig(rank=2))
        assert {one.dtype for one in cast_copy(adapted, torch.bfloat16).parameters()} == {torch.bfloat16}
    finally:
        kind._keep_in_fp32_modules_strict, kind._keep_in_fp32_modules = strict, more
