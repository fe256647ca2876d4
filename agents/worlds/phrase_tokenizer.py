"""The tokenizer of models that are small enough to train on a laptop: a token for each phrase of their environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from turngym.agents.rendering.template_limits import PHRASE_TEMPLATE
from turngym.core.errors import TurngymError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END = "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
PAD = "<|pad|>"


def build_phrase_tokenizer(phrases: Iterable[str]) -> PreTrainedTokenizerFast:
    """A tokenizer that spends one token on each of `phrases` and falls back to bytes for any other text.

    Every piece costs the same in the underlying unigram model, so the segmentation with the fewest tokens wins.
    `decode(encode(text)) == text` for any text that does not spell out a byte token (`<0x41>`).
    The order of `phrases` does not matter; the ids depend on the set alone.

    Raises TurngymError without phrases, or where a phrase collides with a special token.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(set(phrases) - {""})
    clashes = [piece for piece in pieces if piece in (PAD, END, *ROLES)]
    if not pieces or clashes:
        raise TurngymError(f"a phrase tokenizer needs phrases that are not special tokens; got {clashes or 'none'}")
    special = [PAD, END, *ROLES]
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    # Unigram charges an unknown character 10 more than the worst piece; at -100, phrases always win over bytes
    scored = [(piece, -1.0) for piece in special + pieces] + [(piece, -100.0) for piece in byte_pieces]
    # Unigram needs an unk id to get past unknown text; with byte_fallback the id itself never appears
    tokenizer = Tokenizer(models.Unigram(scored, unk_id=len(scored) - 256, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=list(ROLES),
    )
    fast.chat_template = PHRASE_TEMPLATE
    return fast
