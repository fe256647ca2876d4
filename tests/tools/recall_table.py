"""Prints how many gold passages each retriever finds, for dense index folders of one corpus:

python tests/tools/recall_table.py hotpotqa --data ~/search indexes/hotpotqa-hashing indexes/hotpotqa-minilm
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

import argparse

from gold_recall import Recall, hop_recall, question_recall

from turngym.envs.search.sources import SETS, open_source
from turngym.retrieval.bm25_retriever import BM25Retriever
from turngym.retrieval.core import Retriever
from turngym.retrieval.hybrid import HybridRetriever
from turngym.retrieval.index import read_manifest
from turngym.retrieval.open_retriever import open_retriever


def shown(found: Recall) -> str:
    return " / ".join(f"{share:.3f}".removeprefix("0") for share in (found.recall, found.all_gold, found.any_gold))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", choices=("hotpotqa", "2wiki"))
    parser.add_argument("--data", required=True, help="folder of questions and corpora")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("indexes", nargs="+", type=Path, help="folders of dense indexes")
    options = parser.parse_args()
    source = open_source(options.source, data=options.data)
    questions, corpus = tuple(source.questions.values()), source.corpora.get(SETS[options.source])
    assert corpus is not None, f"{options.data} has no corpus of {options.source}"
    bm25 = BM25Retriever.from_passages(corpus.passages)
    rows: list[tuple[str, Retriever]] = [("BM25", bm25)]
    for folder in options.indexes:
        encoder = read_manifest(folder).encoder
        assert encoder is not None, f"{folder} has no vectors"
        name = encoder.model or encoder.kind
        if encoder.style and encoder.style["passage_dtype"] != "float32":
            name += f", passages in {encoder.style['passage_dtype']}"
        dense = open_retriever(folder)
        rows += [(name, dense), (f"hybrid of BM25 and {name}", HybridRetriever([bm25, dense]))]
    for row, retriever in rows:
        print(f"| {row} | {shown(question_recall(questions, retriever, options.k))} | ", end="")
        print(f"{shown(hop_recall(questions, retriever, options.k))} |", flush=True)


if __name__ == "__main__":
    main()
