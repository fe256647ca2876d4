"""The tokenizer in a model's folder, for encoders and for models that play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from turngym.core.user_files import library_path


def open_tokenizer(folder: Path, config: Any = None) -> Any:
    """The tokenizer in a folder; `config` is its model's, where that lies elsewhere: the kind of model decides which
    tokens it adds. Raises what transformers raises, and ValueError where there are no words in it:
    transformers makes an empty tokenizer of some families (Qwen, BERT) in a folder without its files."""
    import transformers

    options = {} if config is None else {"config": config}
    tokenizer = transformers.AutoTokenizer.from_pretrained(library_path(folder), trust_remote_code=False, **options)
    if not tokenizer.get_vocab().keys() - set(map(str, tokenizer.added_tokens_decoder.values())):
        raise ValueError("there is no vocabulary; valid: a folder with tokenizer.json and tokenizer_config.json")
    return tokenizer
