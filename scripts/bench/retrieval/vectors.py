"""Made-up vectors and texts with the structure of real ones, for measuring how retrieval grows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from turngym.retrieval.core import Passage

SHARD = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Unit vectors in groups within topics, drawn as real encoders spread them: unevenly, in few directions.

    Topic centres lie in a space whose variance falls off as `1 / sqrt(j)` over directions; groups lie around topics,
    and vectors around groups, so widely that groups overlap. Group sizes follow a power law. A random rotation mixes
    the axes. Queries are fresh draws, so their nearest neighbors score about 0.45 and hardly differ from the next
    ones: harder than vectors on a low-dimensional sheet, easier than noise without groups, which only a full scan
    searches.
    """

    dim: int = 384
    topics: int = 500
    groups: int = 20_000
    topic_spread: float = 0.8
    """Distance of groups from their topic, relative to the length of centres."""
    group_spread: float = 1.5
    """Distance of vectors from their group: above 1, groups overlap."""
    seed: int = 0

    @classmethod
    def for_rows(cls, rows: int, dim: int) -> Mixture:
        """Fifty vectors per group on average, forty groups per topic, whatever the size."""
        groups = max(40, rows // 50)
        return cls(dim=dim, groups=groups, topics=max(1, groups // 40))

    def parts(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float64]]:
        """(group centres `[groups, dim]`, scale per direction `[dim]`, probability per group)."""
        rng = np.random.default_rng(self.seed)
        scale = np.arange(1, self.dim + 1) ** -0.25
        scale = (scale / np.sqrt((scale**2).sum())).astype(np.float32)
        topics = rng.standard_normal((self.topics, self.dim), dtype=np.float32) * scale
        around = rng.standard_normal((self.groups, self.dim), dtype=np.float32) * scale * np.float32(self.topic_spread)
        weight = np.arange(1, self.groups + 1) ** -0.5
        centres = topics[rng.integers(0, self.topics, self.groups)] + around
        return centres, scale, weight / weight.sum()

    def draw(self, rows: int, stream: int) -> NDArray[np.float32]:
        """`rows` vectors; equal for equal (seed, stream)."""
        centres, scale, weight = self.parts()
        rng = np.random.default_rng((self.seed, stream))
        turn = np.linalg.qr(np.random.default_rng(self.seed).standard_normal((self.dim, self.dim)))[0]
        noise = rng.standard_normal((rows, self.dim), dtype=np.float32) * scale * np.float32(self.group_spread)
        out = (centres[rng.choice(self.groups, rows, p=weight)] + noise) @ turn.astype(np.float32)
        return np.asarray(out / np.linalg.norm(out, axis=1, keepdims=True), np.float32)

    def write(self, folder: Path, rows: int) -> None:
        """Shards `folder/00000.npy` ... as index building writes them."""
        folder.mkdir(parents=True, exist_ok=True)
        for number, start in enumerate(range(0, rows, SHARD)):
            np.save(folder / f"{number:05d}.npy", self.draw(min(SHARD, rows - start), number))


def zipf_passages(count: int, *, words: int = 100, vocabulary: int = 500_000, seed: int = 0) -> Iterator[Passage]:
    """Passages of `words` words whose frequencies fall off as in English text (rank ** -1), 4 to 9 letters each."""
    rng = np.random.default_rng(seed)
    weight = np.cumsum(1 / np.arange(1, vocabulary + 1))
    weight /= weight[-1]
    names = zipf_words(vocabulary)
    for start in range(0, count, 1000):
        drawn = np.searchsorted(weight, rng.random((min(1000, count - start), words)))
        for row, places in enumerate(drawn.tolist()):
            text = [names[place] for place in places]
            yield Passage(id=str(start + row), title=" ".join(text[-2:]), text=" ".join(text))


def zipf_queries(count: int, *, words: int = 8, vocabulary: int = 500_000, seed: int = 1) -> list[str]:
    """Questions: words half as skewed as the text, since people ask for what is rare."""
    rng = np.random.default_rng(seed)
    weight = np.cumsum(np.arange(1, vocabulary + 1) ** -0.7)
    names = zipf_words(vocabulary)
    drawn = np.searchsorted(weight / weight[-1], rng.random((count, words)))
    return [" ".join(names[place] for place in row) for row in drawn.tolist()]


def zipf_words(count: int) -> list[str]:
    """Different words of consonants and vowels in turn, short ones first."""
    first, second = "bcdfghklmnprstvz", "aeiou"
    words = []
    for number in range(count):
        rest, word = number + 16 * 5 * 16, ""
        while rest:
            rest, letter = divmod(rest, 16 if len(word) % 2 == 0 else 5)
            word += (first if len(word) % 2 == 0 else second)[letter]
        words.append(word + "q")
    return words
