"""LocalScorer against a plain softmax, and the check of vocabularies."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from turngym.core.errors import ModelError
from turngym.trainers.models import VocabularyError, common_vocabulary, tiny_qwen3
from turngym.trainers.scorer import LocalScorer

torch.set_num_threads(1)
IDS = [np.arange(10, dtype=np.int32), np.arange(20, 2, -1, dtype=np.int32), np.arange(5, dtype=np.int32)]
POSITIONS = [np.arange(1, 10), np.array([3, 9, 17]), np.zeros(0, np.int64)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return tiny_qwen3(60, width=32, seed=1)


def plain(model: torch.nn.Module, row: int, temperature: float = 1.0, vocab: int = 60) -> torch.Tensor:
    ids = torch.from_numpy(IDS[row].astype(np.int64))
    with torch.no_grad():
        logits = model(ids[None]).logits[0][:, :vocab] / temperature
    return logits.log_softmax(-1)[POSITIONS[row] - 1]


@pytest.mark.parametrize("settings", [{}, {"max_tokens": 7, "chunk": 2}, {"temperature": 2.5}, {"vocab_size": 33}])
def test_scores_are_those_of_a_plain_softmax(model: torch.nn.Module, settings: dict[str, float]) -> None:
    scorer = LocalScorer(model=model, **settings)
    support = [np.tile(np.array([0, 7, 30]), (len(where), 1)) for where in POSITIONS]
    found, gathered, labels = (
        scorer.topk(IDS, POSITIONS, 5),
        *(scorer.gather(IDS, POSITIONS, support), scorer.logprobs(IDS, POSITIONS)),
    )
    for row in (0, 1):
        logp = plain(model, row, settings.get("temperature", 1.0), settings.get("vocab_size", 60))
        best = logp.topk(5)
        assert np.array_equal(found[row].ids, best.indices.numpy())
        assert np.allclose(found[row].logp, best.values.numpy(), atol=1e-5)
        assert np.allclose(gathered[row].logp, logp[:, [0, 7, 30]].numpy(), atol=1e-5)
        assert np.array_equal(gathered[row].ids, support[row])
        for scored in (found[row], gathered[row]):
            assert np.allclose(np.exp(scored.tail), 1 - np.exp(scored.logp).sum(1), atol=1e-5)
        assert np.allclose(labels[row], logp[np.arange(len(logp)), IDS[row][POSITIONS[row]]].numpy(), atol=1e-5)
    assert found[2].ids.shape == (0, 5)
    assert gathered[2].logp.shape == (0, 3)
    assert found[2].tail.shape == gathered[2].tail.shape == (0,)
    assert labels[2].shape == (0,)


def test_k_beyond_the_vocabulary_is_the_whole_vocabulary(model: torch.nn.Module) -> None:
    found = LocalScorer(model=model, vocab_size=33).topk(IDS[:1], POSITIONS[:1], 50)[0]
    assert found.ids.shape == (9, 33)
    assert np.allclose(np.exp(found.logp).sum(1), 1.0, atol=1e-5)


def test_scoring_leaves_no_gradient_and_no_mode_behind(model: torch.nn.Module) -> None:
    LocalScorer(model=model).logprobs(IDS, POSITIONS)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("bad", [0, 10])
def test_positions_outside_the_row_are_named(model: torch.nn.Module, bad: int) -> None:
    with pytest.raises(ModelError, match=rf"row 0: positions {bad}\.\.{bad} must lie in 1\.\.9"):
        LocalScorer(model=model).logprobs(IDS[:1], [np.array([bad])])


@dataclass
class Tokenizer:
    tokens: list[str]
    special_tokens_map: dict[str, str] = field(default_factory=dict)

    def get_vocab(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}


def test_same_vocabulary_gives_the_smaller_padded_size() -> None:
    one = Tokenizer(["a", "b", "c"], {"eos_token": "c"})
    assert common_vocabulary(one, Tokenizer(["a", "b", "c"], {"eos_token": "c"}), 64, 60) == 60


def test_a_padding_token_of_one_tokenizer_changes_nothing() -> None:
    """Neither model has a row for it, and no row is padded with it."""
    padded = Tokenizer(["a", "b", "c", "[PAD]"], {"eos_token": "c", "pad_token": "[PAD]"})
    plain = Tokenizer(["a", "b", "c"], {"eos_token": "c", "pad_token": "c"})
    assert common_vocabulary(padded, plain, 3, 3) == common_vocabulary(padded, padded, 3, 3) == 3
    with pytest.raises(VocabularyError, match="1 ids differ"):
        common_vocabulary(padded, plain, 4, 3)


@pytest.mark.parametrize(
    ("teacher", "sizes", "text"),
    [
        (Tokenizer(["a", "x", "y"]), (3, 3), r"2 ids differ\): id 1: student 'b', teacher 'x'; id 2: .* teacher 'y'"),
        (Tokenizer(["a", "b", "c", "d"]), (4, 4), r"1 ids differ\): id 3: student None, teacher 'd'"),
        (Tokenizer(["a", "b", "c"], {"eos_token": "c"}), (3, 3), "special token eos_token differs: student None"),
        (Tokenizer(["a", "b", "c"]), (3, 2), "ids up to 2, but the smaller LM head has 2 rows"),
    ],
)
def test_different_vocabularies_are_refused(teacher: Tokenizer, sizes: tuple[int, int], text: str) -> None:
    with pytest.raises(VocabularyError, match=text):
        common_vocabulary(Tokenizer(["a", "b", "c"]), teacher, *sizes)
