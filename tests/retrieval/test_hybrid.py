"""Rank fusion by hand, and reranking."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from turngym.core.errors import RetrievalError
from turngym.retrieval.core import Hit, Passage, Retriever, RetrieverUnavailable
from turngym.retrieval.hybrid import CoverageReranker, HybridRetriever, RerankingRetriever, open_reranker
from turngym.retrieval.open_retriever import open_retriever


class Fixed:
    """Always answers with the same ids."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.fingerprint = f"fixed({','.join(names)})"
        self.asked: list[int] = []
        self.closed = 0

    def search(self, queries: Sequence[str], k: int) -> list[list[Hit]]:
        self.asked.append(k)
        hits = [Hit(passage=Passage(id=name, title=name, text=f"about {name}"), score=9.0) for name in self.names]
        return [hits[:k] for _ in queries]

    def close(self) -> None:
        self.closed += 1


def names(hits: Sequence[Hit]) -> list[str]:
    return [hit.passage.id for hit in hits]


def test_scores_by_hand() -> None:
    first, second = Fixed("a", "b", "c"), Fixed("c", "d", "a")
    (hits,) = HybridRetriever([first, second]).search(["q"], 3)
    assert names(hits) == ["a", "c", "b"]
    assert [hit.score for hit in hits] == pytest.approx([1 / 61 + 1 / 63, 1 / 63 + 1 / 61, 1 / 62])
    assert first.asked == second.asked == [50]


def test_ties_go_by_id_not_by_part() -> None:
    (hits,) = HybridRetriever([Fixed("z", "m"), Fixed("b", "a")]).search(["q"], 4)
    assert names(hits) == ["b", "z", "a", "m"]


def test_weights_and_deep_hits() -> None:
    deep = Fixed(*(f"x{number:02d}" for number in range(49)), "both")
    (hits,) = HybridRetriever([deep, Fixed("both")], weights=[0.5, 2.0]).search(["q"], 1)
    assert names(hits) == ["both"]
    assert hits[0].score == pytest.approx(0.5 / 110 + 2 / 61)
    assert "0.5*fixed(" in HybridRetriever([deep, Fixed("both")], weights=[0.5, 2.0]).fingerprint


def test_empty_and_wrong_use() -> None:
    hybrid = HybridRetriever([Fixed("a"), Fixed()])
    assert hybrid.search([], 3) == []
    assert [names(hits) for hits in hybrid.search(["p", "q"], 3)] == [["a"], ["a"]]
    with pytest.raises(RetrievalError, match="k=0"):
        hybrid.search(["q"], 0)
    with pytest.raises(RetrievalError, match="needs parts"):
        HybridRetriever([])
    with pytest.raises(RetrievalError, match="weight above 0"):
        HybridRetriever([Fixed("a")], weights=[0.0])


def test_close_closes_the_parts() -> None:
    part = Fixed("a")
    HybridRetriever([part, part]).close()
    assert part.closed == 2


class Backwards:
    fingerprint = "backwards"

    def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
        return list(reversed(hits))


def test_reranker_sees_more_than_is_asked_for() -> None:
    inner = Fixed("a", "b", "c", "d")
    retriever = RerankingRetriever(inner, Backwards(), depth=3)
    assert [names(hits) for hits in retriever.search(["p", "q"], 2)] == [["c", "b"]] * 2
    assert inner.asked == [3]
    assert retriever.fingerprint == "rerank:backwards:depth=3[fixed(a,b,c,d)]"


def test_a_score_of_a_reranker_that_is_not_finite_is_a_failure() -> None:
    class Odd(Backwards):
        def __call__(self, query: str, hits: Sequence[Hit]) -> list[Hit]:
            return [Hit(passage=hit.passage, score=float("nan")) for hit in hits]

    with pytest.raises(RetrieverUnavailable, match="'a' is nan"):
        RerankingRetriever(Fixed("a", "b"), Odd()).search(["p"], 1)


A = Passage(id="a", title="", text="")
ODD: list[tuple[Any, str]] = [
    (None, "None"),
    ([], "0 of 1"),
    ([[], []], "2 of 1"),
    ([None], "None"),
    ([["a"]], "'a'"),
    ([[Hit(passage="a", score=1.0)]], "'a'"),  # type: ignore[arg-type]
    ([[Hit(passage=Passage(id=5, title="", text=""), score=1.0)]], "id .* is 5"),  # type: ignore[arg-type]
    ([[Hit(passage=Passage(id="a", title="", text=None), score=1.0)]], "text .* is None"),  # type: ignore[arg-type]
    *(([[Hit(passage=A, score=score)]], "score of passage 'a'") for score in (float("inf"), "1", None, 10**400)),
    ([[Hit(passage=A, score=1.0)] * 21], "21 hits; at most 20"),
]


@pytest.mark.parametrize(("found", "named"), ODD)
def test_what_is_no_list_of_hits_is_a_failure_and_never_nothing(found: Any, named: str) -> None:
    class Odd(Fixed):
        def search(self, queries: Sequence[str], k: int) -> Any:
            return found

    doors: list[Retriever] = [RerankingRetriever(Odd(), Backwards(), depth=20), HybridRetriever([Odd()], depth=20)]
    for door in doors:
        with pytest.raises(RetrieverUnavailable, match=named):
            door.search(["p"], 1)


def test_rerankers_are_opened_by_name(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    rows = [{"id": name, "contents": f'"{name}"\nred {name}'} for name in ("apple", "pear", "plum")]
    corpus.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plain, turned = open_retriever(f"bm25:{corpus}"), open_retriever(f"bm25:{corpus}", rerank=Backwards())
    assert names(turned.search(["red"], 2)[0]) == names(plain.search(["red"], 3)[0])[:0:-1]
    assert isinstance(turned, RerankingRetriever)
    assert len(turned) == 3
    covered = open_retriever(f"bm25:{corpus}", rerank="coverage", rerank_depth=2)
    assert covered.fingerprint.startswith("rerank:coverage:constant=10:gain=0.1:depth=2[bm25:")
    for wrong in ("hf:", "cross-encoder", "hf"):
        with pytest.raises(RetrievalError, match=f"no reranker '{wrong}'; rerankers are hf:FOLDER"):
            open_retriever(f"bm25:{corpus}", rerank=wrong)
    with pytest.raises(RetrievalError, match="cannot load the reranker"):
        open_reranker(f"hf:{tmp_path / 'nowhere'}")


def hits_of(*texts: str) -> list[Hit]:
    return [Hit(passage=Passage(id=str(i), title="", text=text), score=1.0) for i, text in enumerate(texts)]


def test_coverage_prefers_what_is_not_covered_yet() -> None:
    hits = hits_of("rush drummer", "rush drummer again", "toronto city", "rush")
    ordered = CoverageReranker()("Rush drummers, Toronto", hits)
    assert names(ordered) == ["0", "2", "1", "3"]
    df = {"rush": 3, "drummer": 2, "toronto": 1}
    weight = {word: math.log(5 / (count + 0.5)) for word, count in df.items()}
    total = sum(weight.values())
    assert ordered[0].score == pytest.approx(1 / 11 + 0.1 * (weight["rush"] + weight["drummer"]) / total)
    assert ordered[1].score == pytest.approx(1 / 13 + 0.1 * weight["toronto"] / total)
    assert ordered[2].score == pytest.approx(1 / 12)


def test_coverage_of_nothing() -> None:
    assert CoverageReranker()("", hits_of("a b"))[0].score == pytest.approx(1 / 11)
    assert CoverageReranker()("x", []) == []


def cross_encoder(folder: Path, labels: int) -> Path:
    """A random BERT over letters that classifies."""
    import torch
    import transformers

    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz"]
    tokens += [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        num_labels=labels, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    transformers.BertTokenizerFast(vocab={t: i for i, t in enumerate(tokens)}).save_pretrained(folder)
    return folder


def test_of_two_classes_the_probability_counts(tmp_path: Path) -> None:
    """The logit of "yes" alone says nothing: that of "no" may be larger still."""
    import torch
    import transformers

    folder, texts = cross_encoder(tmp_path, 2), ["ab", "cd", "efghij", "klm", "nopq"]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    coded = transformers.AutoTokenizer.from_pretrained(folder)(
        ["xyz"] * 5, [hit.passage.contents for hit in hits_of(*texts)], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        logits = model(**coded).logits
    chances = logits.softmax(1)[:, 1]
    assert chances.argsort().tolist() != logits[:, 1].argsort().tolist()
    found = open_reranker(f"hf:{folder}")("xyz", hits_of(*texts))
    assert [int(hit.passage.id) for hit in found] == chances.argsort(descending=True).tolist()


def test_classes_that_mean_something_else_rank_nothing(tmp_path: Path) -> None:
    """A classifier of entailment ranked passages by how neutral they are, or by how little they follow."""
    with pytest.raises(RetrievalError, match="tells 'LABEL_0, LABEL_1, LABEL_2' apart"):
        open_reranker(f"hf:{cross_encoder(tmp_path / 'three', 3)}")
    folder = cross_encoder(tmp_path / "named", 2)
    config = json.loads((folder / "config.json").read_text())
    named = {"id2label": {"0": "entailment", "1": "other"}, "label2id": {"entailment": 0, "other": 1}}
    (folder / "config.json").write_text(json.dumps(config | named))
    with pytest.raises(RetrievalError, match="tells 'entailment, other' apart"):
        open_reranker(f"hf:{folder}")


def test_cross_encoder(tmp_path: Path) -> None:
    from turngym.retrieval.hybrid import CrossEncoderReranker

    folder = cross_encoder(tmp_path, 1)
    reranker = open_reranker(f"hf:{folder}")
    assert isinstance(reranker, CrossEncoderReranker)
    assert reranker.fingerprint.startswith("cross-encoder:")
    assert CrossEncoderReranker(str(folder), max_length=9).fingerprint != reranker.fingerprint
    reranker = CrossEncoderReranker(str(folder), batch=2)
    (hits,) = RerankingRetriever(Fixed("ab", "cd", "efghij"), reranker).search(["xyz"], 3)
    assert sorted(names(hits)) == ["ab", "cd", "efghij"]
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)
    single = {hit.passage.id: reranker("xyz", [hit])[0].score for hit in hits}
    assert [hit.score for hit in hits] == pytest.approx([single[hit.passage.id] for hit in hits], abs=1e-5)


@pytest.mark.parametrize("padded", [True, False])
def test_a_decoder_reranks(tmp_path: Path, padded: bool) -> None:
    """Its configuration names no padding, which transformers needs to find where a text ends."""
    import transformers
    from tokenizers_of import tokenizer_of

    from turngym.retrieval.hybrid import CrossEncoderReranker

    tokenizer = tokenizer_of("byte-level, GPT-2")
    tokenizer.pad_token = tokenizer.eos_token if padded else None
    tokenizer.save_pretrained(tmp_path)
    size = max(tokenizer.get_vocab().values()) + 1
    config = transformers.LlamaConfig(
        vocab_size=size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=8, num_labels=1, initializer_range=0.5, max_position_embeddings=64,
    )  # fmt: skip
    transformers.LlamaForSequenceClassification(config).save_pretrained(tmp_path)
    reranker = CrossEncoderReranker(str(tmp_path))
    hits = hits_of("look", "the shelf is empty", "a " * 90)
    single = {hit.passage.id: reranker("go", [hit])[0].score for hit in hits}
    assert {hit.passage.id: hit.score for hit in reranker("go", hits)} == pytest.approx(single, abs=1e-5)
