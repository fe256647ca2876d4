"""L_PT: what is read at which step, and its gradient."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from turngym.core.spec import changed
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.lm_loss import LmLoss, TextError, read_texts
from turngym.trainers.models import tiny_qwen3
from turngym.trainers.ranks import Ranks
from turngym.trainers.run_config import LmLossConfig, RunConfig
from turngym.trainers.scorer import LocalScorer


def encode(text: str) -> list[int]:
    return [ord(letter) % 32 for letter in text]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, ...]:
    (tmp_path / "a.txt").write_text("first one\nsecond line\n\n\n  \nsecond\n")
    (tmp_path / "b.txt").write_text("third")
    return tmp_path / "a.txt", tmp_path / "b.txt"


def test_documents_are_paragraphs_in_order(files: tuple[Path, ...]) -> None:
    assert list(read_texts(files)) == ["first one\nsecond line", "second", "third"]


def test_a_step_reads_the_same_whatever_was_read_before(files: tuple[Path, ...]) -> None:
    config = LmLossConfig(files=files, documents=2, max_length=5)
    walked = LmLoss(config, encode)
    rows = {step: walked.rows(step) for step in (1, 2, 3, 3, 6, 7)}
    assert [len(row) for row in rows[1]] == [5, 5]
    assert rows[2][0].tolist() == encode("third")
    assert rows[2][1].tolist() == encode("first")  # the files begin again
    for step in (7, 6, 2, 3, 1):
        for a, b in zip(LmLoss(config, encode).rows(step), rows[step], strict=True):
            np.testing.assert_array_equal(a, b)
    for step in (6, 2):  # one step back, and many
        for a, b in zip(walked.rows(step), rows[step], strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_least_that_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "least.txt").write_text("ab\n\nc\n\nde")
    term = LmLoss(LmLossConfig(files=(tmp_path / "least.txt",), documents=1, max_length=2), encode)
    found = [[row.tolist() for row in term.rows(step)] for step in (1, 2, 3)]
    assert found == [[[1, 2]], [], [[4, 5]]]  # one id predicts nothing


def test_the_settings_of_a_run_reach_the_term(files: tuple[Path, ...]) -> None:
    class Words:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [0, *encode(text)] if add_special_tokens else encode(text)

    config = LmLossConfig(files=files, documents=2, max_length=4)
    run = RunConfig(micro_tokens=77, autocast="bfloat16")
    term = LmLoss.of(BuildContext(run=run, lm_loss=config, tokenizer=Words()))
    assert [row.tolist() for row in term.rows(1)] == [encode("firs"), encode("seco")]
    assert (term._micro_tokens, term._autocast) == (77, True)
    assert not LmLoss.of(BuildContext(run=changed(run, autocast="off"), lm_loss=config, tokenizer=Words()))._autocast


@dataclass(frozen=True)
class Half:
    """One of two processes, whose gradients are averaged; the other one's numbers are not to be had here."""

    rank: int
    size: int = 2

    def all_gather(self, value: float) -> list[float]:
        return [value]


def test_two_processes_share_the_documents(files: tuple[Path, ...]) -> None:
    model = tiny_qwen3(32, width=16, layers=1, heads=2)
    config = LmLossConfig(files=files, documents=3, max_length=9)
    whole, parts = 0.0, []
    for rank in (0, 1):
        term, ranks = LmLoss(config, encode, micro_tokens=9), cast(Ranks, Half(rank))
        parts.append(len(term._batches(term.rows(1), ranks)))
        whole += term.backward(model, 1, ranks)
    assert parts == [2, 2]  # of three rows: who has one takes part in the second pass with nothing
    found = {name: parameter.grad / 2 for name, parameter in model.named_parameters()}
    model.zero_grad()
    assert whole == pytest.approx(LmLoss(config, encode).backward(model, 1), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_gradient_is_that_of_the_mean_negative_log_likelihood(files: tuple[Path, ...]) -> None:
    model = tiny_qwen3(32, width=16, layers=1, heads=2)
    term = LmLoss(LmLossConfig(files=files, documents=3, coef=0.5, max_length=9), encode, micro_tokens=9)
    value = term.backward(model, 1)
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    rows = [torch.tensor(encode(text)[:9]) for text in read_texts(files)]
    losses = [-model(row[None]).logits[0, :-1].log_softmax(-1).gather(1, row[1:, None]) for row in rows]
    loss = torch.cat(losses).mean()
    (0.5 * loss).backward()
    assert value == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6)


def test_the_mean_over_documents_is_longer_texts_too(files: tuple[Path, ...]) -> None:
    class Half:
        def logprobs(self, ids: Any, positions: Any) -> list[Any]:
            assert [where.tolist() for where in positions] == [list(range(1, len(row))) for row in ids]
            return [np.full(len(where), -0.5, np.float32) for where in positions]

    scorer: Any = Half()
    model = tiny_qwen3(32, width=16, layers=1, heads=2)
    found = {}
    for mean in ("token", "document"):
        term = LmLoss(LmLossConfig(files=files, documents=3, max_length=9, mean=mean), encode)  # type: ignore[arg-type]
        found[mean] = term.backward(model, 1), term.value(scorer, 1)
        model.zero_grad()
    # 9, 6 and 5 ids: 8 + 5 + 4 predicted ones in three documents
    assert found["token"][1] == 0.5
    assert found["document"][1] == pytest.approx(0.5 * 17 / 3)
    assert found["document"][0] == pytest.approx(found["token"][0] * 17 / 3, rel=1e-5)


def test_without_a_gradient_it_is_the_same_number(files: tuple[Path, ...]) -> None:
    model = tiny_qwen3(32, width=16, layers=1, heads=2)
    term = LmLoss(LmLossConfig(files=files, documents=2, coef=0.5, max_length=9), encode)
    for step in (1, 2):
        value = term.value(LocalScorer(model=model), step)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert value == pytest.approx(term.backward(model, step), rel=1e-5)
        model.zero_grad()


def test_text_that_predicts_nothing_is_worth_nothing(tmp_path: Path) -> None:
    (tmp_path / "least.txt").write_text("a")
    term = LmLoss(LmLossConfig(files=(tmp_path / "least.txt",), documents=1), encode)
    nobody: Any = None
    assert term.value(nobody, 1) == 0.0


def test_bad_text_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match="L_PT needs files"):
        LmLoss(LmLossConfig(), encode)
    with pytest.raises(TextError, match="there is no file"):
        LmLoss(LmLossConfig(files=(tmp_path / "none.txt",)), encode)
    (tmp_path / "empty.txt").write_text(" \n\n")
    with pytest.raises(TextError, match="holds no text"):
        LmLoss(LmLossConfig(files=(tmp_path / "empty.txt",)), encode)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TextError, match="is no UTF-8"):
        LmLoss(LmLossConfig(files=(tmp_path / "latin.txt",)), encode)
    import pyarrow
    import pyarrow.parquet as parquet

    parquet.write_table(pyarrow.table({"body": ["x y"]}), tmp_path / "t.parquet")
    with pytest.raises(TextError, match="has no column 'text'; its columns are body"):
        LmLoss(LmLossConfig(files=(tmp_path / "t.parquet",)), encode)
    assert list(read_texts([tmp_path / "t.parquet"], "body")) == ["x y"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b'{"text": "one", "n": 1}\n{"text": null}\n{"text": "two"}\n'),
        ("a.json", b'[{"text": "one"}, {"text": ""}, {"text": "two"}]'),
        ("a.csv", b"n,text\n1,one\n2,two\n"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}\n{"text": "two"}\n', mtime=0)),
        ("a.txt", b"one\n\ntwo\n"),
    ],
)
def test_texts_in_rows_are_no_text_of_braces(name: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert list(read_texts([path])) == ["one", "two"]
    if name != "a.txt":
        with pytest.raises(TextError, match=r"row 1 is .*valid: an object with 'words'"):
            list(read_texts([path], "words"))
    (tmp_path / "torn.jsonl").write_bytes(b'{"text": "on')
    with pytest.raises(TextError):
        list(read_texts([tmp_path / "torn.jsonl"]))
