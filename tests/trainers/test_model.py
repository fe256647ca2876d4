"""Models: loading, the split into backbone and head, padding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_requests import tiny
from hypothesis import given
from hypothesis import strategies as st

from turngym.agents import models
from turngym.agents.models import load_model, load_tokenizer
from turngym.agents.saved_model import save_model
from turngym.core.errors import ModelError
from turngym.retrieval.precision import cast_parameters
from turngym.trainers.models import (
    check_head,
    head,
    hidden_states,
    length_batches,
    pad,
    recomputing,
    tiny_qwen3,
    vocabulary_size,
)
from turngym.trainers.scorer import load_student

torch.set_num_threads(1)
ROWS = [np.array([5, 6, 7], np.int32), np.array([1, 2, 3, 4, 8, 9], np.int32)]


def test_tiny_model_depends_on_its_seed_only() -> None:
    state = torch.get_rng_state()
    one, same, other = tiny_qwen3(60, width=32, seed=3), tiny_qwen3(60, width=32, seed=3), tiny_qwen3(60, width=32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not torch.equal(next(one.parameters()), next(other.parameters()))
    assert vocabulary_size(one) == 60
    assert not one.training


def test_tiny_model_of_the_embedded_size() -> None:
    model = tiny_qwen3(600, width=128, layers=2, heads=4)
    # 600*128 tied embeddings + 2 * (4*128*128 attention + 3*128*256 mlp + 2*128 + 2*32 norms) + 128
    assert sum(parameter.numel() for parameter in model.parameters()) == 76800 + 2 * (65536 + 98304 + 256 + 64) + 128


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(30, 4, None), (32, 4, 3)])
def test_sizes_that_do_not_divide_are_refused(width: int, heads: int, kv_heads: int | None) -> None:
    with pytest.raises(ModelError, match="must be a multiple"):
        tiny_qwen3(60, width=width, heads=heads, kv_heads=kv_heads)


def test_saved_model_loads_to_the_same_numbers(tmp_path: Path) -> None:
    model = tiny_qwen3(60, width=32, seed=1)
    save_model(model, tmp_path / "m")
    assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / "m").iterdir()}
    again = load_model(tmp_path / "m")
    ids = torch.arange(9)[None]
    assert torch.equal(model(ids).logits, again(ids).logits)
    assert next(load_model(tmp_path / "m", dtype="bfloat16").parameters()).dtype == torch.bfloat16


def test_loading_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no folder .*absent"):
        load_model(tmp_path / "absent")
    save_model(tiny_qwen3(60, width=32), tmp_path / "m")
    with pytest.raises(ModelError, match="dtype 'int4' is unknown; valid: float32"):
        load_model(tmp_path / "m", dtype="int4")
    # transformers makes an empty one for Qwen3
    with pytest.raises(ModelError, match=r"cannot load the tokenizer in .*: there is no vocabulary; valid: a folder"):
        load_tokenizer(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot load the model in"):
        load_model(tmp_path / "m")


def family(name: str) -> torch.nn.Module:
    import transformers as hf

    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 2, "intermediate_size": 48, "pad_token_id": None}
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_expand": 2}
    made = {
        "gemma2": lambda: hf.Gemma2ForCausalLM(
            hf.Gemma2Config(**sizes, **more, head_dim=8, final_logit_softcapping=5.0, attn_implementation="eager")
        ),
        "cohere": lambda: hf.CohereForCausalLM(hf.CohereConfig(**sizes, **more, logit_scale=0.25)),
        "granite": lambda: hf.GraniteForCausalLM(hf.GraniteConfig(**sizes, **more, logits_scaling=4.0)),
        "falcon-h1": lambda: hf.FalconH1ForCausalLM(
            hf.FalconH1Config(**sizes, **more, **mamba, lm_head_multiplier=0.02)
        ),
        "hyperclovax": lambda: hf.HyperCLOVAXForCausalLM(hf.HyperCLOVAXConfig(**sizes, **more, logits_scaling=0.125)),
        "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**sizes, **more)),
        # its base model bears another name than transformers looks under
        "llama4": lambda: hf.Llama4ForCausalLM(
            hf.Llama4TextConfig(**sizes, **more, head_dim=8, num_local_experts=2, intermediate_size_mlp=48)
        ),
        "gpt2": lambda: hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=4)),
        "phi": lambda: hf.PhiForCausalLM(hf.PhiConfig(**sizes, intermediate_size=48)),
    }
    torch.manual_seed(0)
    return made[name]().eval()


FAMILIES = ["gemma2", "cohere", "granite", "falcon-h1", "hyperclovax", "llama", "llama4", "gpt2", "phi"]


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_backbone_and_head_give_the_model_s_own_logits(name: str) -> None:
    model = family(name)
    padded = pad(ROWS)
    split = head(model)(hidden_states(model, padded)).view(2, 6, -1)
    for row, ids in enumerate(ROWS):
        whole = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        assert torch.allclose(split[row, : len(ids)], whole, atol=1e-5)


@pytest.mark.parametrize("family", ["Mamba", "HYV4"])
def test_states_and_heads_of_different_precision_fit(family: str) -> None:
    """In half precision Mamba keeps its states in float32, HunYuan's fourth its head: a RuntimeError."""
    small = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8)
    small |= {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
    model = tiny(family, **(small if family == "HYV4" else {}))
    half = cast_parameters(model, torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16
    check_head(half)


def test_ids_without_an_embedding_are_named() -> None:
    """Those of tokens that were added to the tokenizer alone."""
    with pytest.raises(ModelError, match=r"id 41 is read, and Qwen3ForCausalLM knows ids 0 to 39"):
        hidden_states(tiny_qwen3(40, width=16), np.array([[3, 41, 40]]))


def test_a_model_that_cannot_compute_is_refused() -> None:
    model: Any = tiny("Qwen3")
    model.model.layers[0].self_attn.q_proj = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match="Qwen3ForCausalLM fails on a trial row"):
        check_head(model)


def test_a_family_whose_logits_are_not_its_heads_is_not_trained(tmp_path: Path, monkeypatch: Any) -> None:
    model = family("llama")
    save_model(model, tmp_path)
    whole = type(model).forward
    changes: list[Any] = [lambda logits: logits * 1.1, lambda logits: logits[..., :-2]]

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = whole(self, *args, **kwargs)
        found.logits = changes[0](found.logits)
        return found

    check_head(model)
    monkeypatch.setattr(type(model), "forward", scaled)
    for said in ("differ by", "2 less"):
        with pytest.raises(ModelError, match=f"LlamaForCausalLM.*{said}"):
            load_student(tmp_path, "float32", "cpu")
        changes.pop(0)


def test_a_head_of_several_layers_is_said_to_be_one() -> None:
    """ModernBERT's decoder calls the last of them `decoder`, which was taken for the model's body."""
    with pytest.raises(ModelError, match="ModernBertDecoderForCausalLM makes its logits in a way that is not known"):
        check_head(tiny("ModernBertDecoder", **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)))


def test_a_model_that_reads_in_both_directions_is_not_trained() -> None:
    from transformers import BertGenerationConfig, BertGenerationDecoder

    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = BertGenerationDecoder(BertGenerationConfig(**sizes, intermediate_size=48, initializer_range=0.3)).eval()
    with pytest.raises(ModelError, match="BertGenerationDecoder predicts an id by those behind it"):
        check_head(encoder)


def test_a_family_that_cannot_recompute_is_named() -> None:
    from transformers import CTRLConfig, CTRLLMHeadModel

    model = CTRLLMHeadModel(CTRLConfig(vocab_size=40, n_embd=32, dff=48, n_layer=2, n_head=4))
    with pytest.raises(ModelError, match="--gradient-checkpointing: CTRLLMHeadModel"), recomputing(model, True):
        pass


def test_a_family_without_fast_attention_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(family("gemma2"), tmp_path)
    assert load_model(tmp_path).config._attn_implementation == "eager"
    assert f"{tmp_path}: attention without" in capsys.readouterr().err


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 100))
def test_length_batches_hold_every_row_once_within_the_limit(lengths: list[int], limit: int) -> None:
    batches = length_batches(lengths, limit)
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= limit for batch in batches)
    flat = [lengths[row] for batch in batches for row in batch]
    assert flat == sorted(lengths, reverse=True)


def test_weights_that_lie_there_twice_are_loaded_and_counted_once(tmp_path: Path, monkeypatch: Any) -> None:
    save_model(tiny_qwen3(40, width=16), tmp_path)
    counted = list[int]()
    monkeypatch.setattr(models, "require_memory", lambda _, numbers, __: counted.append(numbers))
    load_model(tmp_path)
    shutil.copy(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    load_model(tmp_path)
    assert counted[0] == counted[1] > 0
