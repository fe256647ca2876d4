"""Chat templates with the structure and markers of real families, written for these tests, and tokenizers for them."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from tokenizers_of import bytes_alone
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "families"
FAMILIES = {
    "qwen3": "hermes",
    "qwen3_5": "qwen-coder",
    "nemotron3": "qwen-coder",
    "glm": "glm",
    "llama3": "llama",
    "deepseek_v3": "deepseek",
    "gpt_oss": "harmony",
    "lfm2": "lfm2",
    "gemma4": "gemma4",
    "mistral": "mistral",
    "mistral_args": "mistral-args",
    "granite": "granite",
    "cohere": "cohere",
    "kimi": "kimi",
}
"""Templates that know tools, with the dialect that each writes."""
MARKER = re.compile(
    r"<\|[^|<>\n ]{1,40}\|>|<｜[^｜<>\n]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|"
    r"\[/?(?:TOOL|INST|ARGS|THINK)[A-Z_]*\]"
)
ENDS = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "</s>")


@lru_cache(maxsize=32)
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the family's markers as special tokens and its chat template."""
    template = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    markers = sorted(set(MARKER.findall(template)))
    end = next((end for end in ENDS if end in markers), "</s>")
    tokenizer = bytes_alone(["<s>", end, *markers])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=end)
    fast.chat_template = template
    return fast
