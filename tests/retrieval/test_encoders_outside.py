"""An encoder of another package: an index is built with it by name, opened with it again, and refused if it changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from turngym.core.errors import RetrievalError
from turngym.retrieval.index import BuildPlan, IndexFolderError, build_index, describe_index, read_manifest
from turngym.retrieval.open_retriever import open_retriever

CODE = """
import numpy as np

WORDS = ("apple", "river", "stone")


class Count:
    dim = np.int64(3)
    fingerprint = "count-v1"

    def __init__(self, device):
        self.device = device

    def encode_queries(self, texts):
        return np.array([[text.count(word) for word in WORDS] for text in texts], np.float32).reshape(-1, 3)

    def encode_passages(self, passages):
        return self.encode_queries([passage.text for passage in passages])


class Other(Count):
    fingerprint = "count-v2"


class Odd(Count):
    dim = 2.5


class Failing(Count):
    def encode_passages(self, passages):
        raise SystemExit(f"{len(passages)} are too many")
"""


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module `counting_encoder`, with an installed entry point `count`."""
    folder = tmp_path / "outside"
    info = folder / "counting_encoder-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / "counting_encoder.py").write_text(CODE)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-encoder\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[turngym.encoders]\ncount = counting_encoder:Count\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "counting_encoder", raising=False)


@pytest.mark.parametrize("name", ["count", "counting_encoder:Count"])
def test_an_index_is_built_and_opened_with_it(outside: None, tmp_path: Path, name: str) -> None:
    corpus = tmp_path / "c.jsonl"
    texts = ["an apple", "a river and a river", "stone by stone by stone", "nothing at all"]
    corpus.write_text("".join(json.dumps({"id": n, "contents": f'"T{n}"\n{t}'}) + "\n" for n, t in enumerate(texts)))
    out = tmp_path / "index"
    build_index(BuildPlan(corpus=corpus, out=out, kind="dense", encoder=name))
    record = read_manifest(out).encoder
    assert record is not None
    assert (record.kind, record.model, record.fingerprint, record.dim) == ("other", name, "count-v1", 3)
    assert ["encoder", name] in [list(row) for row in describe_index(read_manifest(out))]
    if ":" in name:
        with pytest.raises(IndexFolderError, match="no installed package has as an entry point"):
            open_retriever(out)
    # what is installed is known by its name; a module is imported for whoever names it
    found = open_retriever(out, encoder=name if ":" in name else None).search(["river", "stone", "apple"], 1)
    assert [hits[0].passage.title for hits in found] == ["T1", "T2", "T0"]
    with pytest.raises(IndexFolderError, match=r"another encoder: it stores count-v1 .*Other is count-v2"):
        open_retriever(out, encoder="counting_encoder:Other")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Odd", r"the encoder's dim is 2\.5; it must be a whole number from 1"),
        ("Failing", r"passages 0 to 0: the encoder failed: SystemExit: 1 are too many \(.*counting_encoder\.py, line"),
    ],
)
def test_an_encoder_that_fails_is_one_line(outside: None, tmp_path: Path, name: str, said: str) -> None:
    corpus = tmp_path / "c.jsonl"
    corpus.write_text('{"id": 1, "text": "x"}\n')
    with pytest.raises(RetrievalError, match=said):
        build_index(BuildPlan(corpus=corpus, out=tmp_path / "i", kind="dense", encoder=f"counting_encoder:{name}"))
