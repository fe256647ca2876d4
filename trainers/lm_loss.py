"""L_PT: language modeling on pre-training text beside the batch's loss, so that a student keeps its general skills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from turngym.core.errors import TurngymError
from turngym.core.plugin_values import checked_text
from turngym.core.protocols import Scorer
from turngym.core.rows import absent, read_rows, show
from turngym.core.user_files import text_lines
from turngym.envs.search.parquet_rows import read_parquet
from turngym.trainers.algorithm_spec import BuildContext
from turngym.trainers.lm_head import project
from turngym.trainers.models import autocast, head, hidden_states, length_batches, pad
from turngym.trainers.ranks import SINGLE, Ranks, balanced_shares
from turngym.trainers.run_config import LmLossConfig, has_rows

Encode = Callable[[str], Sequence[int]]
MOST_ROWS = 1_000_000_000
"""Documents of one parquet file, which are streamed."""


class TextError(TurngymError):
    """Pre-training text that cannot be read."""


def read_texts(paths: Sequence[Path], column: str = "text") -> Iterator[str]:
    """Documents of text files (blank lines separate them) and of rows (`column`), streamed in the given order.

    Raises TextError for a file that is missing, empty, of another kind, or lacks the column.
    """
    for path in paths:
        if not path.is_file():
            raise TextError(f"there is no file {path} to read pre-training text from")
        any_text = False
        for text in _column(path, column) if has_rows(path) else _paragraphs(path):
            any_text = True
            yield text
        if not any_text:
            raise TextError(f"{path} holds no text")


def _paragraphs(path: Path) -> Iterator[str]:
    lines: list[str] = []
    # one empty line more ends the last document
    for line in chain(text_lines(path, TextError), [""]):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "".join(lines).strip()
            lines = []


def _column(path: Path, column: str) -> Iterator[str]:
    """The texts of a column, in file order; rows without one are passed by."""

    def choose(names: Sequence[str]) -> list[str]:
        if column not in names:
            raise TextError(f"{path} has no column {column!r}; its columns are {', '.join(names)}")
        return [column]

    if path.suffix == ".parquet":
        rows: Iterator[Any] = read_parquet(path, choose, TextError, MOST_ROWS)
    else:
        rows = (row.value for row in read_rows(path, f'{{"{column}": ...}}', TextError))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, Mapping) or column not in row:
            raise TextError(f"{path}, row {number} is {show(row)}; valid: an object with {column!r}")
        if not absent(row[column]) and row[column] != "":
            yield checked_text(f"{path}, row {number}: {column}", row[column], error=TextError)


class LmLoss:
    """lambda times the mean negative log-likelihood of the next documents: a `Term`, value in nats per token.

    With `mean = "document"` it is the mean of -log p(document), nats per document, as the papers have it.

    Step k always reads documents (k - 1) * documents ... k * documents - 1 of the endless repetition of the files, so
    a resumed run reads what it would have read. Documents are cut at `max_length` tokens.

    Args:
        micro_tokens: tokens of a pass at most, padding included; a longer document has a pass of its own.
    """

    name = "lpt"

    def __init__(
        self, config: LmLossConfig, encode: Encode, *, micro_tokens: int = 8192, autocast: bool = False
    ) -> None:
        files, length = config.files, config.max_length
        if not files or length < 2:
            raise TextError(
                f"L_PT needs files, and at least 2 tokens per document; got {len(files)} files, {length} tokens"
            )
        for path in files:  # a missing or empty file is found before the run starts
            next(read_texts([path], config.column))
        self._config, self._encode, self._micro_tokens = config, encode, micro_tokens
        self._autocast = autocast
        self._stream, self._at = self._open(), 0
        self._held: list[NDArray[np.int32]] = []

    @classmethod
    def of(cls, context: BuildContext) -> LmLoss:
        """The term that the settings `lm_loss` describe, read with the student's tokenizer."""
        run = context.run
        return cls(
            context.lm_loss,
            lambda document: context.tokenizer.encode(document, add_special_tokens=False),
            micro_tokens=run.pass_tokens,
            autocast=run.autocast != "off",
        )

    def rows(self, step: int) -> list[NDArray[np.int32]]:
        """The token ids of step `step` (1-based), one array per document; the same for every call with that step."""
        documents = self._config.documents
        wanted = step * documents
        # a step with several updates asks again for the same rows
        if wanted != self._at:
            # files are read forward only: a step before the present one begins anew
            if wanted - documents < self._at:
                self._stream, self._at = self._open(), 0
            skip = wanted - documents - self._at
            texts = list(islice(self._stream, skip, skip + documents))
            self._held = [np.asarray(self._encode(text)[: self._config.max_length], np.int32) for text in texts]
            self._at = wanted
        # a single token has nothing before it to be predicted from
        return [row for row in self._held if len(row) > 1]

    def backward(self, model: Any, step: int, ranks: Ranks = SINGLE) -> float:
        """Add the gradient of `coef` * loss; returns the loss without `coef`."""
        rows = self.rows(step)
        # over all processes' rows, so that the shares of the mean add up
        count, total = self._count(rows), 0.0
        for chosen in self._batches(rows, ranks):
            padded = pad(chosen)
            with autocast(model, self._autocast):
                states = hidden_states(model, padded)
            where = [line * padded.shape[1] + np.arange(len(row) - 1) for line, row in enumerate(chosen)]
            states = states[torch.from_numpy(np.concatenate(where)).to(states.device)]
            labels = torch.from_numpy(np.concatenate([row[1:] for row in chosen]).astype(np.int64)).to(states.device)
            with autocast(model, self._autocast):
                loss = -project(states, head(model), labels, into_grad=True).logp_N.sum() / count
            (self._config.coef * loss * ranks.size).backward()
            total += float(loss.detach())
        return sum(ranks.all_gather(total))

    def value(self, scorer: Scorer, step: int) -> float:
        """The loss of step `step` under `scorer`, without `coef` and without a gradient; 0.0 without text."""
        rows = self.rows(step)
        if not rows:
            return 0.0
        logps = scorer.logprobs(rows, [np.arange(1, len(row)) for row in rows])
        return -float(sum(part.sum(dtype=np.float64) for part in logps)) / self._count(rows)

    def _count(self, rows: Sequence[NDArray[np.int32]]) -> int:
        """The divisor of the sum over all tokens."""
        return len(rows) if self._config.mean == "document" else sum(len(row) - 1 for row in rows)

    def _batches(self, rows: Sequence[NDArray[np.int32]], ranks: Ranks) -> list[list[NDArray[np.int32]]]:
        """This process's micro-batches; all get equally many, the last ones a row that predicts nothing."""
        nothing = [np.zeros(1, np.int32)]
        shares = [[rows[index] for index in part] for part in balanced_shares([len(row) for row in rows], ranks.size)]
        split = [length_batches([len(row) for row in share], self._micro_tokens) for share in shares]
        mine = [[shares[ranks.rank][member] for member in members] for members in split[ranks.rank]]
        return mine + [nothing] * (max(map(len, split)) - len(mine))

    def _open(self) -> Iterator[str]:
        return chain.from_iterable(read_texts(self._config.files, self._config.column) for _ in repeat(None))
