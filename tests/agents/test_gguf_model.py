"""GGUF files of the three families: the same logits as the model they were written from, and text split by its rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen2Config, Qwen3Config

from turngym.agents import gguf_model, models
from turngym.agents.gguf_model import import_gguf
from turngym.agents.models import find_model, load_model, load_policy
from turngym.core.errors import AgentError, ModelError
from turngym.scripts.main import main

gguf = pytest.importorskip("gguf", reason="needs the extra [gguf]")

FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
BYTES = [chr(n) for n in (*range(33, 127), *range(161, 173), *range(174, 256))]
SPACE = "Ġ"
PIECES = [*BYTES, *(chr(256 + n) for n in range(68)), "12", "34", "123", "ab", "cd"]
MERGES = ["1 2", "3 4", "12 3", "a b"]
CONTROL = ["<|start|>", "<|end|>"]


def small(family: str, *, tied: bool) -> Any:
    torch.manual_seed(3)
    config = FAMILIES[family](
        vocab_size=len(PIECES) + len(CONTROL),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16 if family == "qwen3" else 8,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 50_000.0},
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))  # norms of ones and biases of zeros would fit anywhere
    return model


def write(file: Path, family: str, model: Any, *, sort: Any = None, pre: str | None = "smollm", **more: Any) -> Path:
    """The model as a GGUF file, as llama.cpp's converter lays it out; `more` replaces keys (None leaves one out)."""
    writer, config = gguf.GGUFWriter(file, family), model.config
    writer.add_block_count(more.get("layers", config.num_hidden_layers))
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(more.get("heads", config.num_attention_heads))
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(50_000.0)
    writer.add_rope_dimension_count(more.get("rotated", 16 if family == "qwen3" else 8))
    for name, value in more.get("settings", {}).items():
        writer.add_float32(f"{family}.{name}", value)
    if family == "qwen3":
        writer.add_key_length(config.head_dim)
    writer.add_tokenizer_model(more.get("tokenizer", "gpt2"))
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*PIECES, *CONTROL])
    writer.add_token_types(more.get("types", [1] * len(PIECES) + [3] * len(CONTROL)))
    writer.add_token_merges(more.get("merges", MERGES))
    writer.add_bos_token_id(len(PIECES))
    if (eos := more.get("eos", len(PIECES) + 1)) is not None:
        writer.add_eos_token_id(eos)
    if (add_bos := more.get("add_bos", False)) is not None:
        writer.add_add_bos_token(add_bos)
    writer.add_chat_template("{% for m in messages %}<|start|>{{ m['content'] }}<|end|>{% endfor %}")
    names = {there: here for here, there in (gguf_model.LAYER_PARTS | gguf_model.WHOLE_PARTS).items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        words = name.split(".")
        layer = f"blk.{words[2]}." if words[1] == "layers" else ""
        part = names[".".join(words[3:-1]) if layer else ".".join(words[:-1])]
        array = weight.numpy()
        if family == "llama" and part in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if part == "attn_q" else config.num_key_value_heads
            halves = array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(array.shape))
        if sort is not None and array.ndim == 2:
            packed = gguf.quants.quantize(array, sort)
            writer.add_tensor(f"{layer}{part}.{words[-1]}", packed, raw_dtype=sort)
        else:
            writer.add_tensor(f"{layer}{part}.{words[-1]}", array)
    if more.get("extra"):
        writer.add_tensor(more["extra"], np.zeros(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_the_model_that_was_written(family: str, tied: bool, tmp_path: Path) -> None:
    model = small(family, tied=tied)
    folder = import_gguf(write(tmp_path / "m.gguf", family, model), tmp_path / "out")
    read, tokenizer = load_policy(folder, "cpu")
    ids = torch.randint(0, len(PIECES), (2, 40))
    assert torch.equal(read(ids).logits, model(ids).logits)
    assert read.config.tie_word_embeddings == tied
    assert not hasattr(read.config, "quantization_config")
    end = len(PIECES) + 1
    assert (read.config.eos_token_id, read.generation_config.pad_token_id, tokenizer.pad_token_id) == (end, end, end)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "<|start|>a<|end|>"


def test_quantized_weights_are_read_within_a_step_of_their_grid(tmp_path: Path) -> None:
    model = small("llama", tied=True)
    packed = gguf.GGMLQuantizationType.Q8_0
    folder = import_gguf(write(tmp_path / "m.gguf", "llama", model, sort=packed), tmp_path / "out")
    read, _ = load_policy(folder, "cpu")
    for name, weight in model.state_dict().items():
        step = weight.abs().max() / 127
        assert (read.state_dict()[name] - weight).abs().max() <= (0.6 * step if weight.ndim == 2 else 0)
    assert not torch.equal(read.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("smollm", ["ab", SPACE, "1", "2", "3", "4", "Ċ", "Ċ", "1", "2"]),
        ("gpt-2", ["ab", SPACE, "12", "34", "Ċ", "Ċ", "12"]),
        ("llama-bpe", ["ab", SPACE, "123", "4", "Ċ", "Ċ", "12"]),
        ("qwen2", ["ab", SPACE, "1", "2", "3", "4", "Ċ", "Ċ", "1", "2"]),
    ],
)
def test_text_is_split_by_the_rule_that_the_file_names(pre: str, wanted: list[str], tmp_path: Path) -> None:
    folder = import_gguf(write(tmp_path / "m.gguf", "llama", small("llama", tied=True), pre=pre), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("ab 1234\n\n12") == wanted
    assert tokenizer.decode(tokenizer("ab 1234\n\n12 é").input_ids) == "ab 1234\n\n12 é"
    assert tokenizer("<|start|>ab<|end|>").input_ids == [len(PIECES), PIECES.index("ab"), len(PIECES) + 1]


def test_a_file_that_begins_every_text_says_so(tmp_path: Path) -> None:
    model = small("llama", tied=True)
    folder = import_gguf(write(tmp_path / "m.gguf", "llama", model, add_bos=True), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("ab").input_ids == [len(PIECES), PIECES.index("ab")]
    assert tokenizer("ab", add_special_tokens=False).input_ids == [PIECES.index("ab")]


@pytest.mark.parametrize(
    ("pre", "wanted"), [("llama-bpe", ["<|start|>", "cd", SPACE, "12"]), ("gpt-2", ["c", "d", SPACE, "12"])]
)
def test_llama_3_reads_whole_words_first_and_begins_texts(pre: str, wanted: list[str], tmp_path: Path) -> None:
    """No merge makes `cd`, and the file does not say whether a text begins with the BOS."""
    file = write(tmp_path / "m.gguf", "llama", small("llama", tied=True), pre=pre, add_bos=None)
    tokenizer = AutoTokenizer.from_pretrained(import_gguf(file, tmp_path / "out"))
    assert tokenizer.convert_ids_to_tokens(tokenizer("cd 12").input_ids) == wanted


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"pre": "poro-chat"}, r"splits text as 'poro-chat', which is not known here; known: gpt-2, smollm"),
        ({"tokenizer": "llama"}, r"tokenizer of kind 'llama'; byte-level BPE \('gpt2'\) alone is read"),
        ({"eos": 9999}, r"its eos token 9999 is outside the vocabulary of \d+"),
        ({"settings": {"rope.scale_linear": 4.0}}, r"says llama\.rope\.scale_linear = 4\.0, which is not read"),
        ({"settings": {"attention.scale": 0.5}}, r"says llama\.attention\.scale = 0\.5, which is not read"),
        ({"rotated": 4}, r"says llama\.rope\.dimension_count = 4, which is not read"),
        ({"extra": "rope_freqs.weight"}, r"stretches its rotary positions as Llama 3\.1 does"),
        ({"extra": "blk.7.attn_norm.weight"}, r"holds no whole llama model: RuntimeError: "),
        ({"heads": 0}, r"keys llama\.\*: Expected `int` >= 1 - at `\$\.attention\.head_count`"),
        # transformers would make a list of so many names of layers
        ({"layers": 2**31}, r"says that \d+ tensors are 2147483648 layers"),
        ({"types": [1]}, r"different ones, and kinds of 1; each token needs"),
        ({"merges": ["12"]}, r"the merge '12' has no space"),
    ],
)
def test_what_cannot_be_read_is_one_line(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", "llama", small("llama", tied=True), **changed)
    with pytest.raises(AgentError, match=message) as raised:
        import_gguf(file, tmp_path / "out")
    assert "\n" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_damaged_and_foreign_files_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write(tmp_path / "m.gguf", "llama", small("llama", tied=True)).read_bytes()
    for size in (0, 3, 100, len(whole) // 3, len(whole) - 10_000):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(AgentError, match="is no GGUF file, or not the whole of one"):
            import_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    (tmp_path / "gemma.gguf").write_bytes(whole.replace(b"llama", b"gemma"))
    with pytest.raises(AgentError, match="architecture 'gemma'"):
        import_gguf(tmp_path / "gemma.gguf", tmp_path / "out")
    with pytest.raises(AgentError, match=r"m\.gguf exists; name a new folder with --out"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "m.gguf")
    monkeypatch.setattr(models, "free_bytes", lambda: 1000)
    with pytest.raises(ModelError, match=r"needs 0\.0 GB .* 0\.0 GB are free"):
        import_gguf(tmp_path / "m.gguf", tmp_path / "out")


def test_a_model_that_does_not_fit_into_memory_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama", tied=True)
    model.save_pretrained(tmp_path)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    monkeypatch.setattr(models, "free_bytes", lambda: 3 * numbers)
    with pytest.raises(ModelError, match=r"in float32.*; --dtype bfloat16 takes half$"):
        load_model(tmp_path)
    assert next(load_model(tmp_path, dtype="bfloat16").parameters()).dtype == torch.bfloat16


def test_the_command_and_where_a_folder_is_wanted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path / "m.gguf", "qwen2", small("qwen2", tied=True))
    assert main(["model", "import", str(file), "--out", str(tmp_path / "out")]) == 0
    assert f"--agent model:{tmp_path / 'out'}" in capsys.readouterr().out
    assert main(["model", "verify", str(tmp_path / "out")]) == 0
    command = rf"turngym model import {file} --out FOLDER"
    with pytest.raises(AgentError, match=command):
        find_model(file)
    with pytest.raises(ModelError, match=command):
        find_model(file)
