"""How a GGUF file becomes an ordinary model folder that transformers loads and that can be trained.

The weights are dequantized to float32; nothing of the quantization remains in config.json. Three families are read:
Llama, Qwen2 and Qwen3 (`general.architecture`), with byte-level BPE tokenizers (`tokenizer.ggml.model` = gpt2).

A GGUF file names the way its tokenizer splits text (`tokenizer.ggml.pre`) and does not spell it out. A wrong guess
gives other ids for some texts only, which nobody notices, so an unknown name is an error. The format and the names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from turngym.agents.models import require_memory
from turngym.agents.saved_model import save_model, save_tokenizer
from turngym.core.errors import AgentError
from turngym.core.files import new_folder, write_sums
from turngym.core.redaction import brief, excerpt

CONFIGS = {"llama": "LlamaConfig", "qwen2": "Qwen2Config", "qwen3": "Qwen3Config"}
"""The families that are read: `general.architecture` and the configuration of transformers."""

LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Tensors of one layer: their names in a GGUF file and in transformers."""
WHOLE_PARTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""How GPT-4 splits text; %s is how many digits stay together."""
Size = Annotated[int, Meta(ge=1, le=1 << 31)]
Id = Annotated[int, Meta(ge=0)]


class _Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a model, which begin with its architecture."""

    block_count: Size
    context_length: Size
    embedding_length: Size
    feed_forward_length: Size
    heads: Size = msgspec.field(name="attention.head_count")
    kv_heads: Size | None = msgspec.field(name="attention.head_count_kv", default=None)
    width: Size | None = msgspec.field(name="attention.key_length", default=None)
    epsilon: Annotated[float, Meta(gt=0.0, le=1.0)] = msgspec.field(name="attention.layer_norm_rms_epsilon")
    theta: Annotated[float, Meta(gt=0.0, le=1e12)] = msgspec.field(name="rope.freq_base", default=10_000.0)


class _Words(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a tokenizer, which begin with `tokenizer.ggml`."""

    model: str
    pre: str = "missing"
    tokens: list[str]
    token_type: list[int]
    merges: list[str]
    bos_token_id: Id | None = None
    eos_token_id: Id | None = None
    unknown_token_id: Id | None = None
    padding_token_id: Id | None = None
    add_bos_token: bool | None = None


READ = {setting.encode_name for setting in msgspec.structs.fields(_Sizes)} | {"vocab_size", "tensor_data_layout"}
"""Settings of a model that are read, or change nothing. Others stretch, cut or scale what it computes: a file is
refused unless they say what is plain (`PLAIN`, and the width of a head)."""
PLAIN = {"rope.scaling.type": "none", "rope.scale_linear": 1.0, "expert_count": 0, "expert_used_count": 0}
SPLITS = {"gpt-2": None, "smollm": None, "llama-bpe": WORDS % r"\p{N}{1,3}", "qwen2": WORDS % r"\p{N}"}
"""`tokenizer.ggml.pre` and the pattern of its pieces; None: GPT-2's own, of which `smollm` splits off each digit."""
LLAMA_3 = "llama-bpe"
"""The tokenizer in which a piece of the vocabulary is one token, whether or not merges lead to it, and a text begins
with the BOS where the file does not say. Both as llama.cpp has it (src/llama-vocab.cpp, `ignore_merges`)."""

CONTROL, USER_DEFINED = 3, 4
"""`tokenizer.ggml.token_type` of what is no piece of BPE: control tokens such as <|im_end|>, and whole words added."""


SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""GGUF's numbers of kinds, and their bytes; 8 is a text, 9 an array."""
TEXT, ARRAY = 8, 9
MOST_ITEMS, MOST_KEYS, MOST_TENSORS = 1 << 22, 1 << 12, 1 << 16
"""Items of an array, of which the library makes an object each; vocabularies have 300,000."""


def check_lengths(file: Path) -> None:
    """Raises ValueError if the header of a GGUF file declares more than the file holds, or than our limits allow.

    The library believes every length: it would read a 94-byte file that declares 2^40 numbers for days.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:

        def number(form: str) -> int:
            data = opened.read(struct.calcsize(form))
            if len(data) < struct.calcsize(form):
                raise ValueError("it ends inside of its head")
            value: int = struct.unpack(form, data)[0]
            return value

        def skip(length: int, part: str) -> None:
            if length > size - opened.tell():
                raise ValueError(f"it declares {part} of {length:,} bytes behind its end")
            opened.seek(length, 1)

        if opened.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        number("<I")
        tensors, keys = number("<Q"), number("<Q")
        if tensors > MOST_TENSORS or keys > MOST_KEYS:
            raise ValueError(f"it declares {tensors:,} tensors and {keys:,} settings")
        for _ in range(keys):
            skip(number("<Q"), "a name")
            kind, count = number("<I"), 1
            if kind == ARRAY:
                kind, count = number("<I"), number("<Q")
            if count > MOST_ITEMS or kind not in (*SCALARS, TEXT):
                raise ValueError(f"it declares an array of {count:,} items of kind {kind}")
            if kind == TEXT:
                for _ in range(count):
                    skip(number("<Q"), "a text")
            else:
                skip(count * SCALARS[kind], "values")


def import_gguf(file: Path, folder: Path) -> Path:
    """Write the model of the GGUF `file` to `folder`: config.json, float32 weights, tokenizer, chat template.

    Returns `folder`. Raises AgentError where the package `gguf` or torch is missing, `folder` exists, memory is short,
    or the file is damaged, of another architecture, or of a tokenizer whose splitting is not known.
    """
    try:
        import torch
        import transformers
        from gguf import GGUFReader
    except ImportError as error:
        raise AgentError(
            f"GGUF files need gguf, torch and transformers: pip install 'turngym[train,gguf]' ({error})"
        ) from error
    if folder.exists():
        raise AgentError(f"{folder} exists; name a new folder with --out")
    if not file.is_file():
        raise AgentError(f"there is no file {file}")
    try:
        check_lengths(file)
        # the reader maps the file, so that a truncated one is noticed here
        reader = GGUFReader(file)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # it raises whatever numpy does
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise AgentError(f"{file} is no GGUF file, or not the whole of one ({why})") from error
    metadata = _Metadata(file, fields)
    require_memory(file, sum(int(tensor.n_elements) for tensor in reader.tensors), "float32")
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    try:
        if metadata.sizes.block_count > len(reader.tensors):
            # a claim of 10^9 would be built for hours
            raise AgentError(f"{file} says that {len(reader.tensors)} tensors are {metadata.sizes.block_count} layers")
        tokenizer = _tokenizer(metadata)
        config = _config(metadata, transformers, tied=tied)
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        state = {name: torch.from_numpy(weight) for name, weight in _weights(metadata, reader, config)}
        if tied:
            state["lm_head.weight"] = state["model.embed_tokens.weight"]
        model.load_state_dict(state, strict=True, assign=True)
    except AgentError:
        raise
    except Exception as error:  # a file from anyone may claim anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise AgentError(f"{file} holds no whole {metadata.architecture} model: {excerpt(reason, 300)}") from error
    model.tie_weights()
    ids = {
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    model.generation_config = transformers.GenerationConfig(**ids)
    # written beside its place, so that a folder of this name is always whole
    with new_folder(folder) as unfinished:
        save_model(model, unfinished)
        save_tokenizer(tokenizer, unfinished)
        write_sums(unfinished)
    return folder


Settings = TypeVar("Settings")
Whole = TypeVar("Whole", bound=int | None)


class _Metadata:
    """The key-value pairs of a GGUF file. Raises AgentError for a key that is missing, or has a value of another kind
    than it should."""

    def __init__(self, file: Path, fields: dict[str, Any]) -> None:
        self.file, self.fields = file, fields
        name = str(fields.get("general.architecture"))
        if name not in CONFIGS:
            raise AgentError(f"{file} holds a model of architecture {brief(name, 60)}; known: {', '.join(CONFIGS)}")
        self.architecture = name
        self.sizes = self._read(_Sizes, name)
        self.words = self._read(_Words, "tokenizer.ggml")
        self.template: str | None = self._read(dict[str, Any], "tokenizer").get("chat_template")
        if not isinstance(self.template, str | None):
            raise AgentError(f"{file}: its tokenizer.chat_template is {brief(self.template, 60)}; valid: a text")

    def _read(self, kind: type[Settings], prefix: str) -> Settings:
        start = f"{prefix}."
        values = {name.removeprefix(start): value for name, value in self.fields.items() if name.startswith(start)}
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            raise AgentError(f"{self.file}, keys {prefix}.*: {error}") from error


def _config(metadata: _Metadata, transformers: Any, *, tied: bool) -> Any:
    kind, sizes, words = metadata.architecture, metadata.sizes, metadata.words
    values: dict[str, Any] = {
        "vocab_size": len(words.tokens),
        "hidden_size": sizes.embedding_length,
        "intermediate_size": sizes.feed_forward_length,
        "num_hidden_layers": sizes.block_count,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": _first(sizes.kv_heads, sizes.heads),
        "max_position_embeddings": sizes.context_length,
        # float32 in the file: 9.999999747378752e-06 was written as 1e-05
        "rms_norm_eps": float(np.format_float_positional(np.float32(sizes.epsilon))),
        "tie_word_embeddings": tied,
        "bos_token_id": words.bos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": _first(words.padding_token_id, words.eos_token_id),
    }
    values["rope_parameters"] = {"rope_type": "default", "rope_theta": sizes.theta}
    width = _first(sizes.width, sizes.embedding_length // sizes.heads)
    plain = PLAIN | dict.fromkeys(("attention.value_length", "rope.dimension_count"), width)
    for name, value in metadata.fields.items():
        key = name.removeprefix(f"{kind}.")
        if key != name and key not in READ and (key not in plain or plain[key] != value):
            raise AgentError(f"{metadata.file} says {name} = {brief(value, 60)}, which is not read")
    return getattr(transformers, CONFIGS[kind])(**values, head_dim=width)


def _weights(metadata: _Metadata, reader: Any, config: Any) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Every tensor under its name in transformers, as float32."""
    from gguf.quants import dequantize

    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER_PARTS:
            name = f"model.layers.{parts[1]}.{LAYER_PARTS[parts[2]]}.{parts[3]}"
        elif parts[0] in WHOLE_PARTS and len(parts) == 2:
            name = f"{WHOLE_PARTS[parts[0]]}.{parts[1]}"
        elif parts[0] == "rope_freqs":
            raise AgentError(f"{metadata.file} stretches its rotary positions as Llama 3.1 does, which is not read")
        else:
            raise AgentError(
                f"{metadata.file} holds a tensor {tensor.name!r} that no {metadata.architecture} model has"
            )
        try:
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        except NotImplementedError as error:
            kind = tensor.tensor_type.name
            raise AgentError(
                f"{metadata.file}: the quantization {kind} of {tensor.name} is not read by gguf"
            ) from error
        if metadata.architecture == "llama" and parts[0] == "blk" and parts[2] in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if parts[2] == "attn_q" else config.num_key_value_heads
            weight = _halves_apart(weight, heads)
        yield name, np.ascontiguousarray(weight)


def _halves_apart(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of a projection, [heads * width, D] or [heads * width], in the order of transformers.

    Llama files interleave the two halves of each head that rotate together; transformers keeps the halves apart.
    """
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, *weight.shape[1:])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _tokenizer(metadata: _Metadata) -> Any:
    import tokenizers
    from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words, split = metadata.words, metadata.words.pre
    if words.model != "gpt2":
        raise AgentError(
            f"{metadata.file} has a tokenizer of kind {words.model!r}; byte-level BPE ('gpt2') alone is read"
        )
    if split not in SPLITS:
        raise AgentError(
            f"{metadata.file} splits text as {split!r}, which is not known here; known: {', '.join(SPLITS)}. Ids would "
            "be wrong for some texts: use the model's original tokenizer.json"
        )
    tokens, types = words.tokens, words.token_type
    vocabulary = {token: n for n, token in enumerate(tokens)}
    if not len(vocabulary) == len(tokens) == len(types):
        problem = f"{len(tokens)} tokens, {len(vocabulary)} different ones, and kinds of {len(types)}"
        raise AgentError(f"{metadata.file} has {problem}; each token needs a text of its own and a kind")
    if bad := [merge for merge in words.merges if " " not in merge]:
        raise AgentError(f"{metadata.file}: the merge {brief(bad[0], 60)} has no space between two parts")
    merges = [(first, second) for first, _, second in (merge.partition(" ") for merge in words.merges)]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=split == LLAMA_3))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=SPLITS[split] is None)
    first: list[Any] = []
    if split == "smollm":
        first = [pre_tokenizers.Digits(individual_digits=True)]
    elif (pattern := SPLITS[split]) is not None:
        first = [pre_tokenizers.Split(Regex(pattern), behavior="isolated")]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*first, byte_level])
    backend.decoder = decoders.ByteLevel()
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    for token, sort in zip(tokens, types, strict=True):
        if sort in (CONTROL, USER_DEFINED):
            backend.add_tokens([tokenizers.AddedToken(token, special=sort == CONTROL, normalized=False)])
    ids = {"bos": words.bos_token_id, "eos": words.eos_token_id, "unk": words.unknown_token_id}
    ids["pad"] = _first(words.padding_token_id, words.eos_token_id)
    if ids["eos"] is None:
        raise AgentError(f"{metadata.file} has no 'tokenizer.ggml.eos_token_id': nothing would end a response")
    if bad := [name for name, token_id in ids.items() if token_id is not None and token_id >= len(tokens)]:
        raise AgentError(
            f"{metadata.file}: its {bad[0]} token {ids[bad[0]]} is outside the vocabulary of {len(tokens)}"
        )
    names = {f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    begins = split == LLAMA_3 if words.add_bos_token is None else words.add_bos_token
    if begins and "bos_token" in names:
        begin = names["bos_token"]
        # TemplateProcessing puts it before every text, as llama.cpp does
        backend.post_processor = processors.Sequence(
            [processors.TemplateProcessing(f"{begin} $A", special_tokens=[(begin, ids["bos"])])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=metadata.sizes.context_length,
        clean_up_tokenization_spaces=False,
        **names,
    )
    tokenizer.chat_template = metadata.template
    return tokenizer


def _first(preferred: int | None, fallback: Whole) -> int | Whole:
    return fallback if preferred is None else preferred
