"""What is saved is read back: quantized, tied, converted and adapted models, and folders that hold something else."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_requests import tiny
from safetensors.torch import load_file, save_file
from tokenizers_of import tokenizer_of

from turngym.agents.models import load_model, load_tokenizer, require_plain
from turngym.agents.saved_model import companions, save_model, save_tokenizer, write_companions, write_tensors
from turngym.core.errors import ModelError
from turngym.retrieval.precision import cast_parameters

IDS = torch.arange(12)[None]
EXPERTS = {"num_experts_per_tok": 2, "head_dim": 16}
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32}


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model(IDS).logits


def change(path: Path, **settings: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def fp8(folder: Path) -> Any:
    """A folder of FP8 weights as Qwen publishes them; returns the model that they stand for."""
    model = tiny("Qwen3", **WIDE, tie_word_embeddings=False)
    stored = {}
    for name, value in model.state_dict().items():
        if not name.endswith("_proj.weight"):
            stored[name] = value
            continue
        scale = value.abs().amax() / 448.0
        stored[name] = (value / scale).to(torch.float8_e4m3fn)
        blocks = [-(-size // 128) for size in value.shape]
        stored[name.replace(".weight", ".weight_scale_inv")] = torch.full(blocks, float(scale))
        value.copy_(stored[name].float() * scale)
    model.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    kind = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
    change(folder / "config.json", quantization_config=kind)
    return model


def mxfp4(folder: Path) -> Any:
    """A folder of gpt-oss with experts in MXFP4; returns the model that they stand for."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    model = tiny("GptOss", **EXPERTS, hidden_size=64, intermediate_size=64, num_local_experts=2)
    stored = {}
    generator = torch.Generator().manual_seed(0)
    for name, value in model.state_dict().items():
        if not name.endswith("experts.gate_up_proj") and not name.endswith("experts.down_proj"):
            stored[name] = value
            continue
        experts, inner, outer = value.shape
        blocks = torch.randint(0, 256, (experts, outer, inner // 32, 16), dtype=torch.uint8, generator=generator)
        scales = torch.full((experts, outer, inner // 32), 122, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        value.copy_(convert_moe_packed_tensors(blocks, scales).float())
    model.save_pretrained(folder)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder / "config.json", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": []})
    return model


@pytest.mark.parametrize("kind", [fp8, mxfp4])
def test_a_quantized_model_is_saved_as_the_numbers_that_it_was_trained_as(
    kind: Callable[[Path], Any], tmp_path: Path
) -> None:
    """It was saved as FP8 numbers without their scales (0.21 came back as 448), experts under names of their own."""
    pytest.importorskip("accelerate")
    meant = kind(tmp_path / "quantized")
    model = load_model(tmp_path / "quantized")
    require_plain(model, tmp_path)
    assert torch.allclose(logits(model), logits(meant), atol=1e-4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    save_model(model, tmp_path / "saved")
    again = load_model(tmp_path / "saved")
    own = model.state_dict()
    assert again.state_dict().keys() == own.keys()
    assert all(torch.equal(value, own[name]) for name, value in again.state_dict().items())
    assert torch.equal(logits(again), logits(model))
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())


def test_quantized_weights_without_a_word_on_them_are_refused(tmp_path: Path) -> None:
    """As TensorRT's folders have them: every FP8 number was taken for the weight itself."""
    fp8(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"down_proj\.weight is F8_E4M3"):
        load_model(tmp_path)


def test_what_stays_quantized_in_memory_is_not_saved(tmp_path: Path) -> None:
    model = tiny("Llama")
    kind = transformers.utils.quantization_config.QuantizationMethod.BITS_AND_BYTES
    model.hf_quantizer = type("Quantizer", (), {"quantization_config": type("Config", (), {"quant_method": kind})()})()
    with pytest.raises(ModelError, match="quantized"):
        save_model(model, tmp_path)


FAMILIES = {
    "tied head": ("Qwen2", {"tie_word_embeddings": True}),
    "experts under other names": ("Mixtral", {"num_local_experts": 4}),
    "many experts": ("Qwen3Moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "fused layers": ("Phi3", {}),
    "no attention": ("Mamba", {}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_back_is_the_model(family: str, dtype: Any, tmp_path: Path) -> None:
    name, sizes = FAMILIES[family]
    model = cast_parameters(tiny(name, **sizes), dtype)
    save_model(model, tmp_path)
    assert torch.equal(logits(load_model(tmp_path, dtype=str(dtype)[6:])), logits(model))


def test_a_head_of_its_own_is_said_to_be_one(tmp_path: Path) -> None:
    """Servers and older loaders ask the configuration alone, and would play with the embedding as head."""
    model = tiny("Qwen2", tie_word_embeddings=False)
    save_model(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    read = load_model(tmp_path)
    assert torch.equal(logits(read), logits(model))
    save_model(read, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("family", "rope", "said"),
    [
        ("Qwen2", {"rope_theta": 5e5, **YARN}, {"rope_theta": 5e5, "rope_scaling": YARN}),
        ("Llama", {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5, "rope_scaling": None}),
        ("GPTNeoX", {"rope_theta": 5e5, "rope_type": "default"}, {"rope_theta": 5e5, "partial_rotary_factor": 0.25}),
    ],
)
def test_a_server_with_an_older_transformers_reads_the_same_positions(
    family: str, rope: dict[str, Any], said: dict[str, Any], tmp_path: Path
) -> None:
    """It knows none of `rope_parameters`, and takes 10,000 where it finds no `rope_theta`."""
    model = cast_parameters(tiny(family, rope_parameters=rope), torch.bfloat16)
    save_model(model, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written[name] for name in said} == said
    assert written["torch_dtype"] == written["dtype"] == "bfloat16"
    again = load_model(tmp_path, dtype="bfloat16")
    assert again.config.rope_parameters == model.config.rope_parameters
    assert torch.equal(logits(again), logits(model))
    save_model(again, tmp_path)


def test_the_index_of_an_older_models_files_goes_with_them(tmp_path: Path) -> None:
    tiny("Llama").save_pretrained(tmp_path, max_shard_size="20KB")
    assert list(tmp_path.glob("*.index.json"))
    save_model(tiny("Llama", num_hidden_layers=1), tmp_path)
    assert {file.name for file in tmp_path.glob("model*")} == {"model.safetensors"}


def test_weights_can_be_read_by_whoever_may_read_the_configuration(tmp_path: Path) -> None:
    """safetensors writes them for their owner alone."""
    before = os.umask(0o022)
    try:
        save_model(tiny("Llama"), tmp_path / "m")
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / "m").iterdir()} == {0o644}
        os.umask(0o077)
        save_model(tiny("Llama"), tmp_path / "own")
        assert {file.stat().st_mode & 0o777 for file in (tmp_path / "own").iterdir()} == {0o600}
    finally:
        os.umask(before)


class Wrong:
    """Ways in which a folder may hold another model than the one that was saved."""

    @staticmethod
    def numbers(folder: Path) -> None:
        Wrong._weights(folder, lambda weights: {name: value + 1 for name, value in weights.items()})

    @staticmethod
    def precision(folder: Path) -> None:
        Wrong._weights(folder, lambda weights: {name: value.bfloat16() for name, value in weights.items()})

    @staticmethod
    def shape(folder: Path) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        Wrong._weights(folder, lambda weights: weights | {name: weights[name][:5].clone()})

    @staticmethod
    def missing(folder: Path) -> None:
        Wrong._weights(folder, lambda weights: {name: weights[name] for name in sorted(weights)[1:]})

    @staticmethod
    def config(folder: Path) -> None:
        change(folder / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 123.0})

    @staticmethod
    def quantization(folder: Path) -> None:
        change(folder / "config.json", quantization_config={"quant_method": "fp8"})

    @staticmethod
    def _weights(folder: Path, changed: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        weights = load_file(folder / "model.safetensors")
        save_file(changed(weights), folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("wrong", ["numbers", "precision", "shape", "missing", "config", "quantization"])
def test_a_folder_that_holds_another_model_ends_the_run(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("Llama")
    write = type(model).save_pretrained

    def written_wrongly(self: Any, folder: str, **more: Any) -> None:
        write(self, folder, **more)
        getattr(Wrong, wrong)(Path(folder))

    monkeypatch.setattr(type(model), "save_pretrained", written_wrongly)
    with pytest.raises(ModelError):
        save_model(model, tmp_path)


def test_an_adapter_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(3, 2)}
    (tmp_path / "like").touch(mode=0o644)
    write_tensors(tensors, tmp_path / "adapter_model.safetensors", like="like")
    assert (tmp_path / "adapter_model.safetensors").stat().st_mode == (tmp_path / "like").stat().st_mode
    import safetensors.torch

    monkeypatch.setattr(safetensors.torch, "save_file", lambda found, path: save_file({"a": found["a"]}, path))
    with pytest.raises(ModelError, match="b is in the model alone"):
        write_tensors(tensors, tmp_path / "adapter_model.safetensors", like="like")


def test_what_stands_beside_the_weights_is_copied(tmp_path: Path) -> None:
    """A tokenizer whole and as it was, what prepares images; nothing of how the old weights were stored."""
    base, adapter, out = (tmp_path / name for name in ("base", "adapter", "out"))
    for folder, names in (
        (base, ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json")),
        (base, ("preprocessor_config.json", "hf_quant_config.json", "model.safetensors.index.json", "turngym.json")),
        (base, ("additional_chat_templates/tool_use.jinja", "tokenizer.model", "README.md")),
        (adapter, ("adapter_config.json", "turngym.json", "trainer_state.json")),
    ):
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(folder.name)
    found = companions(base, adapter)
    beside = {"preprocessor_config.json", "turngym.json"}
    spoken = {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "tokenizer.model"}
    assert found.keys() == beside | spoken | {"additional_chat_templates/tool_use.jinja"}
    assert (found["turngym.json"], found["vocab.json"]) == (b"adapter", b"base")
    write_companions(found, out)
    assert companions(out) == found
    # an adapter with a tokenizer of its own takes none of the base's files: a template of theirs would come first
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_text("adapter")
    assert companions(base, adapter).keys() == beside | {"tokenizer.json", "tokenizer_config.json"}


def test_a_tokenizer_of_ours_is_of_a_class_that_older_servers_know(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("byte-level, GPT-2")
    save_tokenizer(tokenizer, tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert "extra_special_tokens" not in settings
    again = load_tokenizer(tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again.chat_template == tokenizer.chat_template
