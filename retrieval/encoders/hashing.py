"""The encoder that needs no model: hashed words, weighted by how rare they are, thrown onto signed coordinates."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.core import Passage, RetrievalError

BUCKETS = 1 << 18
"""Cells in which documents are counted: words that share one share a document count too."""
PLACES = 4
"""Coordinates per word; with one alone, two words that collide would be the same word."""
TITLE_REPEATS = 2
"""How often the title counts; measured on HotpotQA and 2Wiki, where it names what the passage is about."""
# odd: a product with one, modulo 2^64, loses no bit
_ODD = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64)
_WORD = re.compile(r"\w+")
_ENDINGS = ("ies", "es", "s", "ing", "ed")
_ROWS = 256
"""Texts per array operation."""


class HashingFit:
    """Counts, passage by passage, in how many passages each hashed word occurs."""

    def __init__(self) -> None:
        self.counts = np.zeros(BUCKETS, np.uint32)
        self.passages = 0

    def add(self, passage: Passage) -> None:
        words = {word & (BUCKETS - 1) for word in _hashes(f"{passage.title} {passage.text}")}
        self.counts[np.fromiter(words, np.int64, len(words))] += np.uint32(1)
        self.passages += 1

    def encoder(self, dim: int = 1024) -> HashingEncoder:
        return HashingEncoder(self.counts, self.passages, dim=dim)


class HashingEncoder:
    """Sum over a text's words of `idf * (1 + ln count) * signs at 4 hashed coordinates`, scaled to length 1.

    `idf = ln((N + 1) / (df + 1))`. Texts without a word give the zero vector. Same text, same vector: on every machine
    and in every batch. The inner product estimates the cosine of tf-idf vectors with a standard error of about
    `1 / sqrt(dim)`.
    """

    def __init__(self, counts: NDArray[np.uint32], passages: int, *, dim: int = 1024) -> None:
        """`counts[bucket]`: passages with a word of that bucket, out of `passages`."""
        if counts.shape != (BUCKETS,):
            raise RetrievalError(f"word counts of shape {counts.shape}; {BUCKETS} buckets are needed: fit it again")
        if dim < 1:
            raise RetrievalError(f"dim is {dim}; it must be at least 1")
        self.counts, self.passages, self.dim = counts.astype(np.uint32), passages, dim
        self._idf = np.log((passages + 1.0) / (self.counts.astype(np.float64) + 1.0))
        sha = hashlib.sha256(self.counts.astype("<u4").tobytes()).hexdigest()[:16]
        self.fingerprint = f"hashing-v1:dim={dim}:passages={passages}:counts={sha}"

    @classmethod
    def fit(cls, passages: Iterable[Passage], *, dim: int = 1024) -> HashingEncoder:
        """Count words over one pass."""
        fit = HashingFit()
        for passage in passages:
            fit.add(passage)
        return fit.encoder(dim)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return self._encode(texts)

    def encode_passages(self, passages: Sequence[Passage]) -> NDArray[np.float32]:
        return self._encode([" ".join([passage.title] * TITLE_REPEATS + [passage.text]) for passage in passages])

    def save(self, folder: str | Path) -> None:
        """Write `counts.npy` and `hashing.json` into `folder`."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "counts.npy", self.counts)
        head = {"dim": self.dim, "passages": self.passages, "fingerprint": self.fingerprint}
        (folder / "hashing.json").write_text(json.dumps(head) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> HashingEncoder:
        """Read what `save` wrote.

        Raises:
            RetrievalError: missing or damaged files.
        """
        folder = Path(folder)
        try:
            head = json.loads((folder / "hashing.json").read_text(encoding="utf-8"))
            encoder = cls(np.load(folder / "counts.npy"), int(head["passages"]), dim=int(head["dim"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RetrievalError(f"{folder}: no usable hashing encoder ({error}); build the index again") from error
        if encoder.fingerprint != head.get("fingerprint"):
            raise RetrievalError(
                f"{folder}: the counts give {encoder.fingerprint}, but hashing.json says {head.get('fingerprint')}; "
                "build the index again"
            )
        return encoder

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        out = np.zeros((len(texts), self.dim), np.float32)
        for start in range(0, len(texts), _ROWS):
            part = texts[start : start + _ROWS]
            out[start : start + len(part)] = self._block(part)
        return out

    def _block(self, texts: Sequence[str]) -> NDArray[np.float64]:
        words = [_hashes(text) for text in texts]
        rows = np.repeat(np.arange(len(texts)), [len(row) for row in words])
        # Words in order of their hash, so that a row's sums do not depend on what else is in the block.
        hashes, inverse = np.unique(
            np.fromiter((word for row in words for word in row), np.uint64, len(rows)), return_inverse=True
        )
        keys, counts = np.unique(rows * max(len(hashes), 1) + inverse, return_counts=True)
        row, word = np.divmod(keys, max(len(hashes), 1))
        weight = self._idf[(hashes & np.uint64(BUCKETS - 1)).astype(np.int64)][word] * (1.0 + np.log(counts))
        mixed = hashes[:, None] * _ODD
        # the upper bits, which depend on all bits below them
        place = ((mixed >> np.uint64(32)) % np.uint64(self.dim)).astype(np.int64)
        sign = np.where((mixed >> np.uint64(20)) & np.uint64(1), 1.0, -1.0)
        flat = row[:, None] * self.dim + place[word]
        block = np.bincount(
            flat.ravel(), (weight[:, None] * sign[word]).ravel(), minlength=len(texts) * self.dim
        ).reshape(len(texts), self.dim)
        length = np.sqrt((block * block).sum(1, keepdims=True))
        return block / np.where(length > 0, length, 1.0)


def _hashes(text: str) -> list[int]:
    """A 64-bit number per word."""
    return [_hash(word) for word in _WORD.findall(text.lower())]


def _stem(word: str) -> str:
    for ending in _ENDINGS:
        if len(word) - len(ending) >= 3 and word.endswith(ending):
            return word[: -len(ending)]
    return word


_MEMO: dict[str, int] = {}


def _hash(word: str) -> int:
    """A stable hash of the word without its ending; the memo is emptied rather than let grow with a corpus."""
    value = _MEMO.get(word)
    if value is None:
        value = int.from_bytes(
            hashlib.blake2b(_stem(word).encode("utf-8", "replace"), digest_size=8).digest(), "little"
        )
        if len(_MEMO) >= 1 << 20:
            _MEMO.clear()
        _MEMO[word] = value
    return value
