"""A small tokenizer of each kind that transformers knows, with added tokens of each kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaTokenizer, PreTrainedTokenizerFast

from turngym.agents.rendering.text_encoder import HIDDEN

USER, ANSWER, END, BOS = "<|user|>", "<|assistant|>", "<|end|>", "<s>"
TEMPLATE = (
    "{{- bos_token -}}{%- for m in messages -%}{{- '<|' + m.role + '|>\n' + m.content + '<|end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
"""Role and end tokens with lines' ends behind them, as Phi-3's."""
PLAIN = (
    "{%- for m in messages -%}{%- if m.role == 'assistant' -%}{{- '<|assistant|>\n' + m.content + eos_token + '\n' -}}"
    "{%- else -%}{{- '<|' + m.role + '|>\n' + m.content + eos_token + '\n' -}}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>\n' -}}{%- endif -%}"
)
"""Zephyr's: roles are plain text, and only the end is a token."""
WORDS = ("look", "the", "shelf", "is", "empty", "user", "assistant", "end", "s", "open", "a", "go", "to", "s>", "in")
LETTERS = [chr(code) for code in range(33, 127)]
GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _merges(word: str) -> tuple[list[str], list[tuple[str, str]]]:
    pieces = [word[:cut] for cut in range(2, len(word) + 1)]
    return pieces, [(word[: cut - 1], word[cut - 1]) for cut in range(2, len(word) + 1)]


def _bpe(alphabet: list[str], words: list[str], **more: Any) -> models.BPE:
    vocabulary, merges = dict.fromkeys(alphabet), list[tuple[str, str]]()
    for word in words:
        pieces, steps = _merges(word)
        vocabulary |= dict.fromkeys(pieces)
        merges += [step for step in steps if step not in merges]
    return models.BPE(vocab={piece: number for number, piece in enumerate(vocabulary)}, merges=merges, **more)


def byte_level(pattern: str | None = GPT2, *, prefix: bool = False, **more: Any) -> Tokenizer:
    """GPT-2's, Llama 3's, Qwen's: bytes as letters, words split by an expression first."""
    words = [f"Ġ{word}" for word in WORDS] + list(WORDS) + ["ĊĊ", ">Ċ", "</"]
    tokenizer = Tokenizer(_bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), words, **more))
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False)
    split = [] if pattern is None else [pre_tokenizers.Split(Regex(pattern), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def bytes_alone(specials: Sequence[str | AddedToken], letters: int = 1) -> Tokenizer:
    """One token per byte, lossless, and then `specials`; with `letters` -1 the bytes backwards."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[::letters]
    tokenizer = Tokenizer(_bpe(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*specials])
    return tokenizer


def _byte_pieces() -> list[str]:
    return [f"<0x{number:02X}>" for number in range(256)]


def metaspace(scheme: str, model: Any, *, split: bool = False) -> Tokenizer:
    """SentencePiece as transformers builds it now."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=split)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if scheme != "never" else steps)
    return tokenizer


def sentencepiece_bpe() -> models.BPE:
    words = [*(f"▁{word}" for word in WORDS), *WORDS, "<s>"]
    alphabet = ["<unk>", "<s>", "</s>", *_byte_pieces(), "▁", *LETTERS]
    return _bpe(alphabet, words, unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def unigram() -> models.Unigram:
    words = {f"▁{word}": -4.0 for word in WORDS} | dict.fromkeys(WORDS, -5.0) | dict.fromkeys(("▁", *LETTERS), -8.0)
    scored = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((piece, 0.0) for piece in _byte_pieces()), *words.items()]
    return models.Unigram(scored, unk_id=0, byte_fallback=True)


def legacy_llama() -> Tokenizer:
    """Llama 2's tokenizer.json: a normalizer puts a space before every stretch between added tokens."""
    tokenizer = metaspace("never", sentencepiece_bpe())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def rewriting_unigram() -> Tokenizer:
    """T5's and XLM-R's: compatible characters become one (`＜` is `<`), then a unigram model that knows `<s>`."""
    tokenizer = metaspace("always", unigram(), split=True)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


def word_piece() -> Tokenizer:
    pieces = [
        "[UNK]",
        "<s>",
        *WORDS,
        *(f"##{word}" for word in WORDS),
        *LETTERS,
        *(f"##{letter}" for letter in LETTERS),
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def word_level() -> Tokenizer:
    pieces = ["[UNK]", "<s>", *WORDS, "<", "|", ">", "</", "/"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte-level, GPT-2": byte_level,
    "byte-level, Llama 3": lambda: byte_level(LLAMA3, ignore_merges=True),
    "byte-level, prefix": lambda: byte_level(prefix=True),
    "byte-level, no words": lambda: byte_level(None),
    "BPE, first": lambda: metaspace("first", sentencepiece_bpe()),
    "BPE, always": lambda: metaspace("always", sentencepiece_bpe()),
    "BPE, never": lambda: metaspace("never", sentencepiece_bpe()),
    "BPE, legacy": legacy_llama,
    "unigram, first": lambda: metaspace("first", unigram()),
    "unigram, always": lambda: metaspace("always", unigram(), split=True),
    "unigram, never": lambda: metaspace("never", unigram()),
    "unigram, rewriting": rewriting_unigram,
    "word pieces": word_piece,
    "words": word_level,
}
LOSSLESS = tuple(name for name in KINDS if not name.startswith("word") and name != "unigram, rewriting")
"""Those that write every text back as it was, but for a space at the beginning."""
FLAGS: Mapping[str, Mapping[str, bool]] = {
    "special": {"special": True, "normalized": False},
    "normalized": {"special": True, "normalized": True},
    "not special": {"special": False, "normalized": False},
    "not special, normalized": {"special": False, "normalized": True},
    "lstrip": {"special": True, "normalized": False, "lstrip": True},
    "rstrip": {"special": True, "normalized": False, "rstrip": True},
    "both strips": {"special": True, "normalized": False, "lstrip": True, "rstrip": True},
    "single word": {"special": True, "normalized": False, "single_word": True},
}


def tokenizer_of(kind: str, flags: str = "special", template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    """The tokenizer `kind`, whose role and end tokens are added with `flags`; `<s>` begins a text and is special."""
    tokenizer = KINDS[kind]()
    unknown = next((text for text in ("<unk>", "[UNK]") if tokenizer.token_to_id(text) is not None), None)
    named = [AddedToken(text, special=True, normalized=False) for text in (BOS, unknown) if text]
    tokenizer.add_special_tokens(named)
    tokens = [AddedToken(text, **FLAGS[flags]) for text in (USER, ANSWER, END, "<|system|>", "<|reserved_1|>")]
    if FLAGS[flags]["special"]:
        tokenizer.add_special_tokens(tokens)
    else:
        tokenizer.add_tokens(tokens)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=END, unk_token=unknown, clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast


def llama_tokenizer(*, legacy: bool) -> Any:
    """transformers' own class for Llama's SentencePiece, as it makes it of a vocabulary."""
    model = sentencepiece_bpe()
    whole = Tokenizer(model)
    pieces = whole.get_vocab()
    words = [*(f"▁{word}" for word in WORDS), *WORDS]
    merges = list(dict.fromkeys(step for word in words for step in _merges(word)[1]))
    tokenizer = LlamaTokenizer(vocab=pieces, merges=merges, legacy=legacy, add_bos_token=False)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.chat_template = PLAIN
    return tokenizer


def reveal(text: str) -> str:
    """`text` as people read it, nothing hidden in it."""
    return HIDDEN.sub(lambda match: chr((ord(match[1]) - 0xE000 << 12) + ord(match[2]) - 0xE200), text)
