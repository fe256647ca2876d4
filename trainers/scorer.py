"""Models in this process that score given ids (teachers, the initial policy); how they and the student are loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from turngym.agents.models import load_model, load_tokenizer
from turngym.agents.saved_model import save_model
from turngym.core.episode import TopK
from turngym.core.errors import ModelError, SettingsError
from turngym.core.protocols import Scorer
from turngym.trainers import lora
from turngym.trainers.lm_head import project, topk
from turngym.trainers.microbatch import packing_for, passes
from turngym.trainers.models import (
    VocabularyError,
    check_head,
    common_vocabulary,
    freeze_unread,
    head,
    rows_apart,
    vocabulary_size,
)
from turngym.trainers.ranks import Ranks, balanced_shares, on_all_ranks
from turngym.trainers.run_config import Packing, Renewed
from turngym.trainers.tensor_file import read_tensors

Ids = Sequence[NDArray[np.int32]]
Positions = Sequence[NDArray[np.int64]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalScorer:
    """Implements `Scorer` with micro-batches; holds [chunk, V] logits at most, never [B, T, V].

    Each of `ids` is one row; its `positions` must lie in 1..len-1, else ModelError. No gradient.
    """

    model: nn.Module
    vocab_size: int | None = None
    """Use only the first ids, when teacher and student are padded to different sizes."""
    temperature: float = 1.0
    """Scores are log-softmax(logits / temperature): the `distill_temperature`."""
    max_tokens: int = 8192
    """Padded tokens per forward pass."""
    chunk: int = 1024
    """Positions that go through the head at a time."""
    packing: Packing = "off"
    """Whether the rows of a pass share a line; needs a model that keeps them apart (`microbatch.packing_for`)."""
    bare: bool = False
    """Score as `model` did before it had adapters."""

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        def score(states: Tensor, rows: list[int]) -> list[TopK]:
            best, logp, tail = topk(
                states, head(self.model), k, chunk=self.chunk, temperature=self.temperature, vocab=self.vocab_size
            )
            sizes = [len(positions[row]) for row in rows]
            # one copy off the device for all rows, not one for each
            return _by_row(best.cpu(), logp.cpu(), tail.cpu(), sizes)

        return self._score(ids, positions, score)

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        _check_positions(ids, positions)
        labels = [np.asarray(row, np.int64)[where][:, None] for row, where in zip(ids, positions, strict=True)]
        return [top.logp[:, 0] for top in self.gather(ids, positions, labels)]

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[TopK]:
        def score(states: Tensor, rows: list[int]) -> list[TopK]:
            wanted = torch.from_numpy(np.concatenate([np.asarray(support[row], np.int64) for row in rows]))
            projected = project(
                states,
                head(self.model),
                wanted[:, 0].to(states.device),  # project() wants a label; this column of the result is not read
                wanted.to(states.device),
                chunk=self.chunk,
                temperature=self.temperature,
                vocab=self.vocab_size,
                tail=True,
            )
            assert projected.topk_logp_NK is not None
            assert projected.tail_N is not None
            sizes = [len(positions[row]) for row in rows]
            return _by_row(wanted, projected.topk_logp_NK.cpu(), projected.tail_N.cpu(), sizes)

        return self._score(ids, positions, score)

    @torch.no_grad()
    def _score(self, ids: Ids, positions: Positions, score: Callable[[Tensor, list[int]], list[T]]) -> list[T]:
        """Run micro-batches of rows of similar length; results return to the order of `ids`."""
        _check_positions(ids, positions)
        scores: dict[int, T] = {}
        with lora.without_adapters(self.model) if self.bare else nullcontext():
            for rows, states in self._states(ids, positions):
                scores.update(zip(rows, score(states, rows), strict=True))
        return [scores[row] for row in range(len(ids))]

    def _states(self, ids: Ids, positions: Positions) -> Iterator[tuple[list[int], Tensor]]:
        """Yield (row numbers, hidden states [P, D] that predict their positions, row after row)."""
        packed = self.packing != "off"
        for part in passes(ids, self.max_tokens, packed=packed):
            with rows_apart(self.model, packed):
                states = part.states(self.model)
            # a token is predicted at the place before it
            where = [
                part.places(member, np.asarray(positions[row], np.int64) - 1) for member, row in enumerate(part.rows)
            ]
            yield list(part.rows), states[torch.from_numpy(np.concatenate(where)).to(states.device)]


def _by_row(ids_PK: Tensor, logp_PK: Tensor, tail_P: Tensor, sizes: Sequence[int]) -> list[TopK]:
    """The positions of several rows, so many of each, row by row."""
    parts = zip(ids_PK.split(sizes), logp_PK.split(sizes), tail_P.split(sizes), strict=True)  # type: ignore[arg-type]
    return [TopK(ids=i.numpy().astype(np.int32), logp=p.numpy(), tail=t.numpy()) for i, p, t in parts]


class SplitScorer(ABC):
    """A `Scorer` that has others score its rows, each some of them."""

    @abstractmethod
    def split(self, ids: Ids, ask: Callable[[Scorer, Sequence[int]], Sequence[T]]) -> list[T]:
        """Answers in the order of `ids`; `ask(scorer, rows)` gives those of some rows, by number."""

    def topk(self, ids: Ids, positions: Positions, k: int) -> list[TopK]:
        return self.split(ids, lambda scorer, rows: scorer.topk(_take(ids, rows), _take(positions, rows), k))

    def logprobs(self, ids: Ids, positions: Positions) -> list[NDArray[np.float32]]:
        return self.split(ids, lambda scorer, rows: scorer.logprobs(_take(ids, rows), _take(positions, rows)))

    def gather(self, ids: Ids, positions: Positions, support: Sequence[NDArray[np.int64]]) -> list[TopK]:
        return self.split(
            ids, lambda scorer, rows: scorer.gather(_take(ids, rows), _take(positions, rows), _take(support, rows))
        )


def _take(items: Sequence[T], rows: Sequence[int]) -> list[T]:
    return [items[row] for row in rows]


def _check_positions(ids: Ids, positions: Positions) -> None:
    for number, (row, where) in enumerate(zip(ids, positions, strict=True)):
        if len(where) and (where.min() < 1 or where.max() >= len(row)):
            raise ModelError(
                f"row {number}: positions {int(where.min())}..{int(where.max())} must lie in 1..{len(row) - 1}: an id "
                "is scored from the ids before it"
            )


# The models of a run from their folders: the student, and scorers for teacher and initial policy.


def load_student(folder: Path, dtype: str, device: str) -> tuple[Any, Any]:
    """A model to train or to score with, and its tokenizer.

    Raises TurngymError for a folder that lacks one of them, and for a model that `check_head` refuses.
    """
    model = load_model(folder, dtype=dtype, device=device)
    check_head(model)
    freeze_unread(model)
    return model, load_tokenizer(folder)


def load_scorer(
    folder: Path,
    *,
    dtype: str,
    device: str,
    temperature: float,
    max_tokens: int,
    chunk: int = 1024,
    vocab_size: int | None = None,
    student: tuple[Any, Any] | None = None,
    other: bool = False,
    packing: Packing = "off",
) -> LocalScorer:
    """A model that scores ids at `temperature`. Of a teacher, only the ids that `student` (a model with its tokenizer)
    knows too are scored; where the two differ in them VocabularyError, or all of the teacher's if it may have `other`
    ids. A model that cannot have `packing` goes without.
    """
    model, tokenizer = load_student(folder, dtype, device)
    if student is not None:
        sizes = vocabulary_size(student[0]), vocabulary_size(model)
        try:
            vocab_size = common_vocabulary(student[1], tokenizer, *sizes)
        except VocabularyError:
            if not other:
                raise
    return LocalScorer(
        model=model,
        vocab_size=vocab_size,
        temperature=temperature,
        max_tokens=max_tokens,
        chunk=chunk,
        # a teacher is not what --packing on was said of: one that cannot have it scores padded rows
        packing=packing if packing != "off" and packing_for("auto", model) == "auto" else "off",
    )


# The reference of a KL, replaced now and then by the student as it then is.

REFERENCE_FILE = "reference.pt"


@dataclass(slots=True, kw_only=True)
class ReferenceRefresh:
    """Moves the reference, at first the initial policy, after every `every`-th step:
    w += rate (student - w).

    Its weights are part of checkpoints from the first replacement on, so that a resumed run has the same one.
    Source: [kd-rewards] Algorithm 1 (its optional last line); docs/algorithms.md#kl-estimators.
    """

    every: int
    reference: Any
    """The model that scores as reference: weights of a student without adapters."""
    student: Any
    rate: float = 1.0
    """1: the reference becomes the student. Below: a moving average."""
    _replaced: bool = False
    _average: dict[str, Tensor] | None = None
    """The average in float32: a reference in bfloat16 would lose small moves."""

    def after(self, step: int) -> None:
        """The student has finished `step` (1-based)."""
        if step % self.every == 0:
            weights = lora.merged_weights(self.student, self.student.state_dict())
            if self.rate < 1.0:
                if self._average is None:
                    self._average = {name: value.float().clone() for name, value in self.reference.state_dict().items()}
                for name, value in self._average.items():
                    value.lerp_(weights[name].to(value), self.rate)
                weights = self._average
            self.reference.load_state_dict(weights)
            self._replaced = True

    def save(self, folder: Path) -> None:
        if self._replaced:
            torch.save(self._average or self.reference.state_dict(), folder / REFERENCE_FILE)

    def load(self, folder: Path) -> None:
        if (folder / REFERENCE_FILE).exists():
            weights = read_tensors(folder / REFERENCE_FILE)
            self.reference.load_state_dict(weights)
            if self.rate < 1.0:
                device = next(iter(self.reference.state_dict().values())).device
                self._average = {name: value.to(device) for name, value in weights.items()}
            self._replaced = True


def reference_refresh(
    renewed: Renewed | None, reference: Scorer | None, student: Any, ranks: Ranks
) -> ReferenceRefresh | None:
    """The refresh of the reference that the settings ask for; None if it stays. Raises SettingsError if it is not
    possible.

    Only a run of one process can renew its reference.
    """
    if renewed is None:
        return None
    every, rate = renewed.reference_every, renewed.reference_rate
    if ranks.size > 1:
        raise SettingsError(f"reference_every is {every} with {ranks.size} training processes; it needs a single one")
    if not isinstance(reference, LocalScorer) or reference.bare:
        raise SettingsError(
            f"reference_every is {every}, but this run has no reference in this process: it needs a KL to the initial "
            "policy (kl_coef above 0)"
        )
    lora.require_one_model(student)
    return ReferenceRefresh(every=every, reference=reference.model, student=student, rate=rate)


# Rows of a batch that several processes score together.


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedScorer(SplitScorer):
    """Each process scores its share of the rows, about as many tokens as the others'."""

    scorer: Scorer
    ranks: Ranks
    model: Any = None
    """The scorer's model, if it is sharded; its full parameters are gathered while it scores."""

    def split(self, ids: Ids, ask: Callable[[Scorer, Sequence[int]], Sequence[T]]) -> list[T]:
        mine = balanced_shares([len(row) for row in ids], self.ranks.size)[self.ranks.rank].tolist()
        with self.ranks.full_params(self.model):
            answers = on_all_ranks(self.ranks, lambda: ask(self.scorer, mine) if mine else [])
        rows: dict[int, T] = {}
        for members, values in self.ranks.all_gather((mine, list(answers))):
            rows.update(zip(members, values, strict=True))
        return [rows[row] for row in range(len(ids))]


def shared_scorer(scorer: Scorer, ranks: Ranks, model: Any = None) -> Scorer:
    """`scorer` with its rows divided over the ranks; `scorer` itself with one process."""
    return scorer if ranks.size == 1 else SharedScorer(scorer=scorer, ranks=ranks, model=model)


# A model in training as those read it who sample with its weights elsewhere.


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Implements `WeightSource`: what `model` has now, its adapters merged in.

    Raises ModelError for adapters whose merged weights a plain model cannot hold.
    """

    model: Any

    def __post_init__(self) -> None:
        lora.require_one_model(self.model)

    def save(self, folder: Path) -> None:
        save_model(self.model, folder, lora.merged_weights(self.model, self.model.state_dict()))

    def named_weights(self) -> Iterable[tuple[str, Any]]:
        # parameters, not the state dict: a head tied to the embedding is then sent once
        return lora.merged_weights(self.model, dict(self.model.named_parameters())).items()

    @property
    def adapter(self) -> int:
        return int(self.model.peft_config[lora.ADAPTER_NAME].r) if lora.adapted(self.model) else 0

    def save_adapter(self, folder: Path) -> None:
        lora.save_adapter(self.model, self.model.state_dict(), folder)

    def scorer(self, temperature: float = 1.0) -> LocalScorer:
        return LocalScorer(model=self.model, temperature=temperature)

    @contextmanager
    def rounding(self, dtype: str) -> Iterator[None]:
        # attention by its plain formula, and with a half precision what a server rounds; no copy of the weights is kept
        half = None if dtype == "float32" else getattr(torch, dtype, torch.bfloat16)
        device = next(self.model.parameters()).device.type
        cast = torch.autocast(device, half, enabled=half is not None, cache_enabled=False)
        with sdpa_kernel(SDPBackend.MATH), cast:
            yield
