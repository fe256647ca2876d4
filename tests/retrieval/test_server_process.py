"""Batches in processes of their own: same answers, and what a crash, a hang or a bad start of one costs."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from turngym.core.errors import RetrievalError
from turngym.retrieval.batching import ProcessRetriever
from turngym.retrieval.core import RetrieverUnavailable

MODULE = """
import os, time
from turngym.retrieval.core import Hit, Passage, RetrieverUnavailable
from turngym.core.errors import RetrievalError

class Toy:
    def __init__(self, parent, fingerprint):
        self.parent, self.fingerprint = parent, fingerprint
    def __len__(self):
        return 5
    def search(self, queries, k):
        if "die" in queries: os._exit(3)
        if "hang" in queries: time.sleep(60)
        if "bad" in queries: raise KeyError("bad")
        if "gone" in queries: raise RetrieverUnavailable("shard 7 is gone")
        where = "here" if os.getpid() == self.parent else "child"
        return [[Hit(passage=Passage(id=q, title=where, text="x"), score=1.5)] * k for q in queries]
    def close(self):
        pass

def start(parent, fails=False, other=False):
    if fails and os.getpid() != parent: raise RetrievalError("no such index")
    return Toy(parent, "toy:2" if other and os.getpid() != parent else "toy:1")
"""
BATCH = ["a", "b"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that children can import."""
    (tmp_path / "toy_opener.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("toy_opener").start
    sys.modules.pop("toy_opener")


def where(found: Any) -> list[str]:
    return [hits[0].passage.title for hits in found]


def test_batches_go_to_a_child_and_a_dead_one_is_replaced(start: Any) -> None:
    retriever = ProcessRetriever(partial(start, os.getpid()), small=2)
    try:
        assert (retriever.fingerprint, len(retriever)) == ("toy:1", 5)
        assert where(retriever.search(["a"], 1)) == ["here"]
        found = retriever.search(BATCH, 3)
        assert where(found) == ["child", "child"]
        assert [(hit.passage.id, hit.score) for hit in found[1]] == [("b", 1.5)] * 3
        with pytest.raises(RetrieverUnavailable, match=r"process \d+ ended with status 3"):
            retriever.search(["a", "die"], 1)
        assert where(retriever.search(BATCH, 1)) == ["child", "child"]
        with pytest.raises(RetrieverUnavailable, match="shard 7 is gone"):
            retriever.search(["a", "gone"], 1)
        with pytest.raises(RetrievalError, match="KeyError: 'bad'"):
            retriever.search(["a", "bad"], 1)
        assert where(retriever.search(BATCH, 1)) == ["child", "child"]
    finally:
        retriever.close()
        retriever.close()
    with pytest.raises(RetrieverUnavailable):
        retriever.search(BATCH, 1)


def test_a_child_that_hangs_is_ended(start: Any) -> None:
    retriever = ProcessRetriever(partial(start, os.getpid()), small=2, patience=0.2)
    try:
        with pytest.raises(RetrieverUnavailable, match=r"no answer in 0\.2 s; its process was ended"):
            retriever.search(["a", "hang"], 1)
        assert where(retriever.search(["a"], 1)) == ["here"]
    finally:
        retriever.close()


@pytest.mark.parametrize(
    ("options", "says"), [({"fails": True}, "no such index"), ({"other": True}, "the index is now toy:2; it was toy:1")]
)
def test_a_child_that_does_not_start_is_said(start: Any, options: dict[str, bool], says: str) -> None:
    with pytest.raises(RetrievalError, match=says):
        ProcessRetriever(partial(start, os.getpid(), **options))
