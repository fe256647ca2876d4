"""Retrievers made of others: several fused into one by rank, or one whose best hits a reranker orders again."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence, Sized
from typing import Any, Protocol

from turngym.core.errors import RetrievalError
from turngym.core.plugin_values import failures_of
from turngym.core.redaction import brief
from turngym.retrieval.core import Hit, Passage, Retriever, RetrieverUnavailable, check_request, checked_hits, searched
from turngym.retrieval.encoders import load_model, weights_digest
from turngym.retrieval.lucene_text import analyze

DEPTH = 50
"""Hits that every part is asked for: a passage that one part ranks 40th can still win if another ranks it first."""


class HybridRetriever:
    """A passage scores `sum over parts of weight / (constant + rank)`, ranks from 1; equal scores go by id.

    Ranks alone count, so parts need no common scale. Source: [rrf]; docs/algorithms.md#rank-fusion (constant 60).
    """

    def __init__(
        self,
        parts: Sequence[Retriever],
        *,
        constant: float = 60.0,
        depth: int = DEPTH,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Fuses `parts`, which must serve the same corpus: passages with the same id are the same.

        Args:
            constant: added to every rank; the larger it is, the less a first rank counts above a later one.
            depth: hits that each part is asked for, or k if that is more.
            weights: one for each part, above 0; by default all are 1.

        Raises:
            RetrievalError: no parts, or not one positive weight for each.
        """
        weights = [1.0] * len(parts) if weights is None else list(weights)
        if not parts or len(weights) != len(parts) or min(weights) <= 0:
            raise RetrievalError(
                f"{len(parts)} parts with weights {weights}; a hybrid needs parts, each weight above 0"
            )
        if constant < 0 or depth < 1:
            raise RetrievalError(f"constant {constant} and depth {depth}; they must be at least 0 and 1")
        self._parts, self._weights, self._constant, self._depth = tuple(parts), weights, constant, depth

    @property
    def fingerprint(self) -> str:
        inside = ",".join(
            f"{weight:g}*{part.fingerprint}" for weight, part in zip(self._weights, self._parts, strict=True)
        )
        return f"rrf:constant={self._constant:g}:depth={self._depth}[{inside}]"

    def __len__(self) -> int:
        """Number of passages that can be found; 0 if no part knows."""
        return max((len(part) for part in self._parts if isinstance(part, Sized)), default=0)

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_request(queries, k)
        hit_lists = [searched(part, queries, max(k, self._depth)) for part in self._parts]
        return [self._fuse(lists, k) for lists in zip(*hit_lists, strict=True)] if queries else []

    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _fuse(self, lists: Sequence[Sequence[Hit]], k: int) -> list[Hit]:
        scores: dict[str, float] = {}
        passages: dict[str, Passage] = {}
        for weight, hits in zip(self._weights, lists, strict=True):
            for rank, hit in enumerate(hits, 1):
                name = hit.passage.id
                passages.setdefault(name, hit.passage)
                scores[name] = scores.get(name, 0.0) + weight / (self._constant + rank)
        best = sorted(scores, key=lambda name: (-scores[name], name))[:k]
        return [Hit(passage=passages[name], score=scores[name]) for name in best]


class Reranker(Protocol):
    """Orders hits again, for example with a slower and better model. May drop hits and change scores, but adds none."""

    @property
    def fingerprint(self) -> str:
        """Identifies method, model and settings."""

    def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]: ...


class RerankingRetriever:
    """Asks `inner` for `depth` hits, lets `reranker` order them, and returns the best `k`."""

    def __init__(self, inner: Retriever, reranker: Reranker, *, depth: int = 20) -> None:
        if depth < 1:
            raise RetrievalError(f"depth is {depth}; it must be at least 1")
        self._inner, self._reranker, self._depth = inner, reranker, depth

    @property
    def fingerprint(self) -> str:
        return f"rerank:{self._reranker.fingerprint}:depth={self._depth}[{self._inner.fingerprint}]"

    def __len__(self) -> int:
        """Number of passages that can be found; 0 if the inner retriever does not know."""
        return len(self._inner) if isinstance(self._inner, Sized) else 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        check_request(queries, k)
        hit_lists = searched(self._inner, queries, max(k, self._depth))
        pairs = zip(queries, hit_lists, strict=True)
        return [list(checked_hits(self._reranker(query, hits), len(hits))[:k]) for query, hits in pairs]

    def close(self) -> None:
        self._inner.close()


def open_reranker(spec: Reranker | str, *, device: str = "cpu") -> Reranker:
    """Opens `hf:FOLDER` (a cross-encoder) or `coverage` (needs no model); returns a reranker of your own as it is.

    Raises:
        RetrievalError: another name, packages missing, or no such model.
    """
    if not isinstance(spec, str):
        return spec
    if spec == "coverage":
        return CoverageReranker()
    kind, _, model = spec.partition(":")
    if kind != "hf" or not model:
        raise RetrievalError(
            f"no reranker {spec!r}; rerankers are hf:FOLDER (a Hugging Face sequence classifier) and coverage"
        )
    return CrossEncoderReranker(model, device=device)


class CoverageReranker:
    """Picks, one after the other, the hit that is ranked well and covers terms of the query that no earlier pick has.

    The score of a pick is `1 / (constant + rank) + gain * covered`, where `covered` is the share of the query's terms
    that are in the passage and in no earlier pick, each weighted by `ln((n + 1) / (df + 0.5))` over the `n` hits (0 if
    that is negative). Multi-hop questions name things of several passages, but a plain ranking often finds the same
    thing thrice. The two constants were chosen on the HotpotQA and 2Wiki questions of
    docs/research/benchmarks.md.
    """

    def __init__(self, *, constant: float = 10.0, gain: float = 0.1) -> None:
        self._constant, self._gain = constant, gain
        self.fingerprint = f"coverage:constant={constant:g}:gain={gain:g}"

    def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        terms = [set(analyze(hit.passage.contents)) for hit in hits]
        # sorted, because the last digits of the sums below would follow the order of a set
        wanted = sorted(set(analyze(query)))
        counts = {term: sum(term in words for words in terms) for term in wanted}
        weight = {term: max(0.0, math.log((len(hits) + 1) / (count + 0.5))) for term, count in counts.items()}
        total = sum(weight.values()) or 1.0
        left, remaining, picked = list(wanted), list(range(len(hits))), []

        def score(row: int) -> float:
            covered = sum(weight[term] for term in left if term in terms[row])
            return 1 / (self._constant + row + 1) + self._gain * covered / total

        while remaining:
            best = max(remaining, key=lambda row: (score(row), -row))
            picked.append(Hit(passage=hits[best].passage, score=score(best)))
            remaining.remove(best)
            left = [term for term in left if term not in terms[best]]
        return picked


class CrossEncoderReranker:
    """Scores query and passage together with a Hugging Face sequence classifier, best first: by its logit, and with two
    classes without names (no, yes) by the log-probability of the second."""

    def __init__(self, model: str, *, device: str = "cpu", max_length: int = 512, batch: int = 32) -> None:
        """Loads `model`. Raises RetrievalError for missing packages, or if there is no such model, or it cannot score.

        Args:
            model: folder or hub name of a sequence classifier.
            max_length: most tokens of query and passage together; the rest is cut.
        """
        # an encoder without a classification head would give random scores
        self._tokenizer, loaded = load_model(model, "reranker", "AutoModelForSequenceClassification")
        self._model: Any = loaded.to(device)
        # of classes with names (entailment, neutral) nobody says which is the relevant one
        labels = [str(label) for _, label in sorted(loaded.config.id2label.items())]
        if len(labels) > 1 and labels != ["LABEL_0", "LABEL_1"]:
            raise RetrievalError(
                f"{model} tells {brief(', '.join(labels), 120)} apart; a reranker has one class, or two without names "
                "(no, yes: no id2label in its config.json)"
            )
        # a fast tokenizer cannot be used from two threads at once
        self._tokenizing = threading.Lock()
        self._device, self._max_length = device, min(max_length, self._tokenizer.model_max_length)
        # where a decoder classifies, transformers finds the end of a text by its padding
        padding = self._tokenizer.pad_token_id
        loaded.config.pad_token_id = padding
        self._batch = 1 if padding is None else batch
        self._name = model
        # what the model lacks for long texts shows now, and not hours later
        self("x", [Hit(passage=Passage(id="x", title="x", text="x " * max_length), score=0.0)])
        self.fingerprint = f"cross-encoder:{weights_digest(self._model)[:32]}:length={max_length}"

    def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        import torch

        scores: list[float] = []
        for start in range(0, len(hits), self._batch):
            part = [(query, hit.passage.contents) for hit in hits[start : start + self._batch]]
            with self._tokenizing:
                coded = self._tokenizer(
                    part, padding=self._batch > 1, truncation=True, max_length=self._max_length, return_tensors="pt"
                )
            with torch.inference_mode(), failures_of(f"the reranker {self._name!r}", self._model, RetrieverUnavailable):
                logits = self._model(**coded.to(self._device)).logits.float()
                scores += (logits if logits.shape[1] == 1 else logits.log_softmax(1))[:, -1].tolist()
        scored = [Hit(passage=hit.passage, score=score) for hit, score in zip(hits, scores, strict=True)]
        return sorted(scored, key=lambda hit: -hit.score)
