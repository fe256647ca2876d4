"""Any Hugging Face text encoder, with the prefixes and poolings of the e5, bge and dpr families."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.core import Passage, RetrievalError


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStyle:
    """How a model wants its texts and how its outputs become one vector."""

    pooling: Literal["mean", "cls", "pooler"]
    """mean of the last hidden states over real tokens; the first token's state; or the model's `pooler_output`."""
    query_prefix: str = ""
    """Goes before every query."""
    passage_prefix: str = ""
    """Goes before every passage."""
    pair: bool = False
    """Title and text as two segments (dpr) instead of Search-R1's `"title"` newline text."""
    normalize: bool = True
    """Scale vectors to length 1, so that the inner product is the cosine."""
    max_length: int = 256
    """Tokens after which a text is cut."""


STYLES = {
    "e5": EncoderStyle(pooling="mean", query_prefix="query: ", passage_prefix="passage: "),
    "bge": EncoderStyle(
        pooling="cls", query_prefix="Represent this sentence for searching relevant passages: ", max_length=512
    ),
    "dpr": EncoderStyle(pooling="pooler", pair=True, normalize=False),
    "plain": EncoderStyle(pooling="mean"),
}
"""What the families' model cards ask for; `plain` adds nothing."""


class HuggingFaceEncoder:
    """Encodes with a transformers model on one device; texts of like length share a batch. Safe across threads.

    The fingerprint covers configuration, weights, tokenizer and style, not where the files lie.
    """

    def __init__(
        self,
        model: str,
        style: str | EncoderStyle | None = None,
        *,
        passage_model: str | None = None,
        device: str = "cpu",
        batch_tokens: int = 16_384,
    ) -> None:
        """Load `model` (a folder or a hub name already downloaded or downloadable).

        Args:
            style: A name of `STYLES`, a style of your own, or None to go by the model's name.
            passage_model: The second model where queries and passages have one each (dpr).
            batch_tokens: Padded tokens of one forward pass.

        Raises:
            RetrievalError: unknown style, packages missing, no such model, or a pooling that the model lacks.
        """
        self.model, self.style, self.device = model, find_style(style, model), device
        self.passage_model = passage_model
        self._batch_tokens = max(1, batch_tokens)
        # A fast tokenizer cannot be used from two threads at once.
        self._tokenizing = threading.Lock()
        pooler = self.style.pooling == "pooler"
        self._query = _load(model, device, pooler=pooler)
        self._passage = _load(passage_model, device, pooler=pooler) if passage_model else self._query
        self.fingerprint = f"hf-v1:{_digest(self._query, self._passage, self.style)}"
        # also tells now, not hours later, whether the model has the pooling
        probe = self._run(self._query, [(f"{self.style.query_prefix}x", None)])
        self.dim = int(probe.shape[1])

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._run(self._query, [(self.style.query_prefix + text, None) for text in texts])

    def encode_passages(self, passages: Sequence[Passage]) -> NDArray[np.float32]:
        prefix = self.style.passage_prefix
        if self.style.pair:
            return self._run(self._passage, [(prefix + passage.title, passage.text) for passage in passages])
        return self._run(self._passage, [(prefix + passage.contents, None) for passage in passages])

    def _run(self, part: tuple[Any, Any], texts: Sequence[tuple[str, str | None]]) -> NDArray[np.float32]:
        import torch

        tokenizer, model = part
        if not texts:
            return np.zeros((0, self.dim), np.float32)
        longest = self.style.max_length
        with self._tokenizing:
            coded = [tokenizer(first, second, truncation=True, max_length=longest) for first, second in texts]
        out: NDArray[np.float32] | None = None
        for rows in _batches([len(row["input_ids"]) for row in coded], self._batch_tokens):
            fields = {key: [coded[row][key] for row in rows] for key in coded[rows[0]]}
            batch = tokenizer.pad(fields, return_tensors="pt").to(self.device)
            with torch.inference_mode():
                vectors = self._pool(model(**batch), batch["attention_mask"]).float().cpu().numpy()
            out = np.empty((len(texts), vectors.shape[1]), np.float32) if out is None else out
            out[rows] = vectors
        assert out is not None
        if not np.isfinite(out).all():
            raise RetrievalError(
                f"{self.model} gave vectors that are not finite; its weights or their type are unusable"
            )
        return out

    def _pool(self, output: Any, mask: Any) -> Any:
        """`[B, dim]` from `last_hidden_state [B, L, dim]` and `mask [B, L]`."""
        import torch

        if self.style.pooling == "pooler":
            vectors = getattr(output, "pooler_output", None)
            if vectors is None:
                raise RetrievalError(f"{self.model} has no pooler output; use pooling 'cls' or 'mean'")
        elif self.style.pooling == "cls":
            vectors = output.last_hidden_state[:, 0]
        else:
            weight = mask[..., None].to(output.last_hidden_state.dtype)
            vectors = (output.last_hidden_state * weight).sum(1) / weight.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(vectors.float(), dim=-1) if self.style.normalize else vectors


def find_style(style: str | EncoderStyle | None, model: str) -> EncoderStyle:
    """The style meant; None goes by the model's name.

    Raises:
        RetrievalError: no such name, or a model whose name names no family.
    """
    if isinstance(style, EncoderStyle):
        return style
    if style is None:
        name = model.replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
        known = [key for key in STYLES if key in name]
        if len(known) != 1:
            raise RetrievalError(f"cannot tell the style of {model!r} by its name; name it: {', '.join(STYLES)}")
        return STYLES[known[0]]
    if style not in STYLES:
        close = get_close_matches(style, STYLES, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise RetrievalError(f"no encoder style {style!r}; there are {', '.join(STYLES)}{hint}")
    return STYLES[style]


def weights_digest(model: Any) -> str:
    """sha256 over every weight of a torch model by name, whatever file it came from."""
    sha = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sha.update(f"{name} {tuple(weight.shape)}".encode())
        # float(): NumPy has no bfloat16
        sha.update(np.ascontiguousarray(weight.float().cpu().numpy()).data)
    return sha.hexdigest()


def refuse_random(what: str, missing: Iterable[str]) -> None:
    """Raises RetrievalError for weights that a model's files lack: transformers fills them with random numbers."""
    if names := sorted(missing):
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        raise RetrievalError(f"cannot load {what}: its files lack the weights {', '.join(names[:3])}{more}")


def _load(name: str, device: str, *, pooler: bool) -> tuple[Any, Any]:
    """(tokenizer, model in float32, evaluating); `pooler` says whether the model's own is used."""
    try:
        import torch
        from transformers import AutoModel, AutoTokenizer
    except ImportError as error:
        raise RetrievalError(f"encoding with {name!r} needs transformers: pip install 'turngym[train]'") from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        load: Any = AutoModel.from_pretrained
        model, loading = load(name, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError) as error:
        raise RetrievalError(f"cannot load the encoder {name!r}: {error}") from error
    # many encoders come without a pooler, and only one way of pooling uses it
    unused = [key for key in loading["missing_keys"] if not pooler and "pooler." in key]
    refuse_random(f"the encoder {name!r}", set(loading["missing_keys"]).difference(unused))
    for key in unused:
        # what was made up is another at every load, and would be in the fingerprint
        model.get_parameter(key).data.zero_()
    # Padding happens per batch, after the texts are sorted by length; the hint to pad earlier does not apply.
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    return tokenizer, model.to(device).eval()


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Rows, longest first, in batches whose padded size stays within `batch_tokens` (one row at least)."""
    batch: list[int] = []
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batch and (len(batch) + 1) * widest > batch_tokens:
            yield batch
            batch = []
        # longest first: the first row of a batch is its widest
        widest = widest if batch else max(lengths[row], 1)
        batch.append(row)
    if batch:
        yield batch


def _digest(query: tuple[Any, Any], passage: tuple[Any, Any], style: EncoderStyle) -> str:
    """sha256 over style, tokenizer, configuration and every weight of both models, by name."""
    sha = hashlib.sha256(json.dumps(dataclasses.asdict(style), sort_keys=True).encode())
    for tokenizer, model in [query] if passage is query else [query, passage]:
        sha.update(tokenizer.backend_tokenizer.to_str().encode() if tokenizer.is_fast else repr(tokenizer).encode())
        sha.update(weights_digest(model).encode())
        settings = model.config.to_dict()
        # Where the files lie and which library wrote them do not change a vector.
        for key in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"):
            settings.pop(key, None)
        sha.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return sha.hexdigest()[:32]
