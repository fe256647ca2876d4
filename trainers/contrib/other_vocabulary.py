"""Distillation from a teacher with another tokenizer: what it says of the student's text, on the student's ids.

The teacher reads the same episode in its own chat template (`TextEpisodes`). Student and teacher tokens of a response
are aligned in spans, the smallest pieces of text at whose ends both have a token's end:

    text        g o   t o   s h e l f   1 < / a c t i o n >
    student     [ go to  ] [ shelf 1    ] [ </action>     ] <|end|>
    teacher     [go] [ to] [ shelf] [ ] [1] [</][action][>] <|im_end|>
    spans       |            1            |       2       |    3

A span of one token a side that is the same string is exact: there the teacher's distribution is compared as it is. In
any other span the two are compared by text. At "shelf 1" the teacher might have said " cabinet" in the place of
" shelf", or "2" in the place of "1": each such piece of text, with its probability, goes to those ids of the student
that begin with it ("cabinet 1", "cabinet 2"; "shelf 2"). `OtherVocabulary` makes the targets, `KnownPlaces` leaves out
what is not in them; between them the algorithm is what it is with one vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain, compress, islice, takewhile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turngym.agents import ChatRenderer, TextEpisodes
from turngym.core import Episode, Scorer, SettingsError, TopK
from turngym.trainers import (
    MIN_LOGP,
    MIN_TAIL_LOGP,
    Algorithm,
    DistillConfig,
    RolloutBatch,
    Scorers,
    TargetError,
    TargetFn,
    Targets,
    TokenLoss,
    TokenLosses,
    Tokens,
    rows,
)

IntArray = NDArray[np.int64]
Cut = tuple[int, int, int, int]
"""A span of a response: student tokens [s0, s1) are the text of teacher tokens [t0, t1)."""
Ends = tuple[tuple[int, ...], tuple[int, ...]]
"""`token_ends` of the student's and of the teacher's tokens of a span, from where it begins; below 0 if unknown."""
LIKELY = 50
"""How many of the teacher's likeliest ids are read where only the probability of what was said is asked for."""
MOST_PIECES = 64
"""Most ids among which a piece of text is divided."""
LEAST_DIVIDED = math.log(0.01)
"""Pieces less likely than this are not divided but left to the tail: they are not worth reading the student for."""
UNKNOWN_TAIL = math.log(1e-7)
"""Stands for a tail of which nothing is known but that it is small."""
CACHE = 1 << 14
"""Most responses whose alignment is kept, and most pieces of text: the same few are said again and again."""


# Which ids of two vocabularies are the same string.


def shared_ids(student: Any, teacher: Any, size: int, ends: tuple[int | None, int | None] = (None, None)) -> IntArray:
    """The student's id of the same string for each of the teacher's `size` ids, -1 where there is none: int64 [V].

    Tokens of one name that decode alike are the same, and so are ordinary tokens of one text (` go` is ` go` in a
    byte-level tokenizer and `▁go` in SentencePiece's). `ends` (student's, teacher's) end a response: they are the same
    by their role. Equal tokenizers give 0, 1, 2, ...
    """
    mine, theirs = _names(student), _names(teacher)
    by_name = {token: number for number, token in mine.items()}
    my_text, their_text = _by_text(student, mine), _by_text(teacher, theirs)
    # the head may have more rows than the tokenizer has tokens
    shared = np.full(size, -1, np.int64)
    for number, token in theirs.items():
        text = token[1]
        if token in by_name:
            shared[number] = by_name[token]
        elif their_text.get(text) == number and text in my_text:
            shared[number] = my_text[text]
    if ends[0] is not None and ends[1] is not None:
        shared[ends[1]] = ends[0]
    return shared


def _names(tokenizer: Any) -> dict[int, tuple[str, str]]:
    """Name and text of every id; the text as it is within a sentence, where decoders strip no space."""
    names = {int(number): str(name) for name, number in tokenizer.get_vocab().items()}
    before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    start = len(_decode(tokenizer, before))
    return {number: (name, _decode(tokenizer, [*before, number])[start:]) for number, name in names.items()}


def _by_text(tokenizer: Any, names: dict[int, tuple[str, str]]) -> dict[str, int]:
    """The ordinary id of each text that is whole characters."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    by_text: dict[str, int] = {}
    for number, (name, text) in names.items():
        if number in special or not text or "\ufffd" in text:
            continue
        # byte tokens repeat what other ids say: the one of its own name comes first
        if text not in by_text or name == text:
            by_text[text] = number
    return by_text


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# Which tokens of two responses are the same piece of text.


def token_ends(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """Characters up to the end of each token; -1 for tokens that end within a character."""
    text, ends = decode(ids), []
    for count in range(1, len(ids) + 1):
        part = decode(ids[:count])
        ends.append(len(part) if text.startswith(part) else -1)
    return ends


def text_spans(student: Sequence[int], teacher: Sequence[int]) -> list[Cut]:
    """The smallest spans whose ends both sides share, from the `token_ends` of each.

    Tokens behind the last shared end are in none.
    Source: [gold]; docs/contrib_algorithms.md#other-vocabularies.
    """
    # the last token with an end: tokens without text belong to what they follow
    mine = {end: count for count, end in enumerate(student, 1)}
    theirs = {end: count for count, end in enumerate(teacher, 1)}
    spans, s0, t0 = [], 0, 0
    for end in sorted((mine.keys() & theirs.keys()) - {-1, 0}):
        spans.append((s0, mine[end], t0, theirs[end]))
        s0, t0 = mine[end], theirs[end]
    return spans


def split_alike(cut: Cut, student: Sequence[int], teacher: Sequence[int], shared: IntArray) -> list[Cut]:
    """A span in single tokens if its two sides are the same ids (a character of several byte tokens), else as it is.

    `cut` counts in all ids of the `student` and of the `teacher`; `shared` is `shared_ids`, int64 [V].
    """
    s0, s1, t0, t1 = cut
    if list(student[s0:s1]) != [int(shared[number]) for number in teacher[t0:t1]]:
        return [cut]
    return [(s0 + n, s0 + n + 1, t0 + n, t0 + n + 1) for n in range(s1 - s0)]


# What the teacher might have said at a token of the student, on the student's ids.


class Beginnings:
    """Which ids of the student begin with a piece of text.

    Args:
        texts: ordinary ids by their text.
        shared: ids that the teacher has, too.
    """

    def __init__(self, texts: dict[str, int], shared: Iterable[int]) -> None:
        self.texts, self.shared = texts, frozenset(shared)
        self.sorted = sorted(texts)
        self.longer, self.ids = lru_cache(CACHE)(self._longer), lru_cache(CACHE)(self._ids)

    def _longer(self, piece: str, own: bool) -> tuple[int, ...]:
        """The ids whose text begins with `piece`, the shortest MOST of them. With `own` none that the teacher has too:
        it would have said these at once."""
        later = islice(self.sorted, bisect_left(self.sorted, piece), None)
        longer = [self.texts[text] for text in sorted(takewhile(lambda text: text.startswith(piece), later), key=len)]
        return tuple(number for number in longer if not own or number not in self.shared)[:MOST_PIECES]

    def _ids(self, piece: str, own: bool) -> tuple[int, ...]:
        """Ids whose text begins with `piece`; if there are none, the longest id with which `piece` begins."""
        shorter = (piece[:size] for size in range(len(piece), 0, -1))
        return self.longer(piece, own) or tuple(self.texts[text] for text in shorter if text in self.texts)[:1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A piece of text that the teacher might have said: its log-probability, and the student's ids that say it."""

    logq: float
    ids: tuple[int, ...]
    exact: bool = False
    """Whether it is one token of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A span in a batch: the supervised tokens `first` to `first` + `count`, and its tokens in a row of the teacher."""

    first: int
    count: int
    row: int
    start: int
    stop: int
    text: str
    ends: Ends
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """A span as the teacher has it: its tokens, their log-probabilities, and its likeliest ids at each of them."""

    ids: NDArray[np.int32]
    logq: NDArray[np.float32]
    top: Sequence[TopK]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """Divides what the teacher might have said among the ids of a student.

    What no piece stands for is added up, too (`rest`, a logarithm): what the pieces leave of 1 would be rounding where
    the teacher is sure. NaN where the teacher does not say how likely its other ids are.
    """

    begin: Beginnings
    shared: IntArray
    """`shared_ids`."""
    texts: dict[int, str]
    """The teacher's ordinary ids."""

    def exact(self, top: TopK) -> tuple[list[Piece], float]:
        """Splits the teacher's likeliest ids into those that the student can say, as ids or pieces of text, and the
        rest."""
        aligned = {number: self._aligned(number, logq) for number, logq in _pairs(top)}
        lost = [logq for number, logq in _pairs(top) if aligned[number] is None]
        return [piece for piece in aligned.values() if piece is not None], _total([_tail_of(top), *lost])

    def _aligned(self, number: int, logq: float) -> Piece | None:
        """The student's text for the teacher's id `number`, where both begin a token."""
        text, same = self.texts.get(number, ""), int(self.shared[number])
        if same >= 0:
            longer = self.begin.longer(text, True) if text else ()
            return Piece(logq=logq, ids=(same, *longer), exact=True)
        ids = self.begin.ids(text, True) if text else ()
        return Piece(logq=logq, ids=ids) if ids else None

    def by_text(self, span: _Span, index: int, label: int, said: _Said) -> tuple[list[Piece], float]:
        """The teacher's possible continuations at token `index` of the student in `span`, given all text before it, and
        the rest.

        First the token itself (`label`), then whatever leaves the text on the way to its end. Empty where the token
        begins or ends within a character.
        """
        mine, theirs = span.ends
        start, end = mine[index - 1] if index else 0, mine[index]
        if start < 0 or end <= start:
            return [], 0.0
        left: list[Piece] = []
        lost: list[float] = []
        before = 0.0
        for number, border in enumerate((0, *theirs[:-1])):
            for likely, logq in _pairs(said.top[number]):
                if likely == said.ids[number]:
                    continue
                # where the teacher's token begins within a character, its alternatives are no text
                piece = self._left(span, start, border, likely, before + logq) if border >= 0 else None
                if piece is None:
                    lost.append(before + logq)
                else:
                    left.append(piece)
            lost.append(before + _tail_of(said.top[number], said.ids[number], float(said.logq[number])))
            before += float(said.logq[number])
            if theirs[number] >= end:
                break
        pieces = [Piece(logq=before, ids=(label,)), *left]
        if not start:
            return pieces, _total(lost)
        # within a token of the teacher only what begins as the text does is possible; how likely others than its
        # likeliest ids do is not known
        total = float(np.logaddexp.reduce([piece.logq for piece in pieces]))
        return [replace(piece, logq=piece.logq - total) for piece in pieces], UNKNOWN_TAIL

    def _left(self, span: _Span, start: int, border: int, number: int, logq: float) -> Piece | None:
        """The student's piece at `start` of the span where the teacher leaves its text at `border` with id `number`."""
        if not start and not border:
            return self._aligned(number, logq)
        if number not in self.texts:
            return None
        text, before = span.text[:border] + self.texts[number], span.text[:start]
        if not text.startswith(before) or text == before:
            return None
        ids = self.begin.ids(text[start:], not start)
        return Piece(logq=logq, ids=ids) if ids else None


def _total(logq: Sequence[float]) -> float:
    """The logarithm of a sum of probabilities; NaN if one is unknown."""
    return math.nan if any(map(math.isnan, logq)) else float(np.logaddexp.reduce([*logq, -math.inf]))


def _tail_of(top: TopK, label: int | None = None, logq: float = math.nan) -> float:
    """The log-probability of all ids but those in a row of `top` and the `label`; NaN if unknown."""
    if top.tail is None:
        return math.nan
    tail = float(top.tail)
    if label is None or label in top.ids:
        return tail
    # its share of the tail, at most all of it
    return tail + math.log(max(-math.expm1(logq - tail), 1e-7))


def _pairs(top: TopK) -> Iterable[tuple[int, float]]:
    return zip(top.ids.tolist(), top.logp.tolist(), strict=True)


def divided(pieces: Sequence[Piece], logp: dict[int, float]) -> dict[int, float]:
    """The teacher's log-probability of each of the student's ids, by log-probabilities `logp` of the student.

    Each piece is divided among its ids as the student divides them: q~(a) = sum_u q(u) p(a) / sum_{a' in A(u)} p(a').
    With these q~, any divergence of the two, and its gradient, is that over the pieces.
    Source: docs/contrib_algorithms.md#other-vocabularies.
    """
    logps: dict[int, float] = {}
    for piece in pieces:
        parts = [(piece.ids[0], piece.logq)]
        if len(piece.ids) > 1:
            shares = np.array([logp[number] for number in piece.ids])
            parts = list(zip(piece.ids, (piece.logq + shares - np.logaddexp.reduce(shares)).tolist(), strict=True))
        for number, logq in parts:
            logps[number] = float(np.logaddexp(logps[number], logq)) if number in logps else logq
    return logps


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Implements `Scorer` for the rows of one batch: the teacher's scores of its own ids, on those of the student."""

    batch: RolloutBatch
    ids: Sequence[NDArray[np.int32]]
    """The teacher's rows."""
    spans: Sequence[_Span]
    pieces: Pieces
    student: Scorer
    teacher: Scorer
    masses: list[tuple[float, float]] = field(default_factory=list)
    """Shares of each token's teacher probability that were compared as one token, and as a piece of text."""

    def topk(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray], k: int) -> list[TopK]:
        self._check(ids, positions)
        answers = self._said(range(len(self.spans)), k)
        by_token = self._pieces_by_token(answers)
        shares = self._shares(ids, positions, {token: pieces for token, (pieces, _) in by_token.items()})
        width = len(next(iter(answers.values())).top[0].ids)
        ids_NK = np.zeros((self.batch.tokens, width), np.int32)
        logp_NK = np.full((self.batch.tokens, width), MIN_LOGP, np.float32)
        # a token that no span holds has an empty row, and all of its mass in the tail
        tail_N = np.zeros(self.batch.tokens, np.float32)
        for token, (pieces, rest) in by_token.items():
            row = divided(pieces, shares.get(token, {}))
            # the likeliest, in the order of the teacher's own
            likely = sorted(range(len(row)), key=[*row.values()].__getitem__, reverse=True)
            chosen = sorted(likely[:width])
            ids_NK[token] = next(iter(row))  # empty places repeat an id: the student's tail is of all but these
            ids_NK[token, : len(chosen)] = np.array([*row])[chosen]
            logp_NK[token, : len(chosen)] = np.array([*row.values()])[chosen]
            tail_N[token] = max(_total([rest, *np.array([*row.values()])[likely[width:]]]), MIN_TAIL_LOGP)
            exact, text = (
                sum(math.exp(piece.logq) for piece in pieces if piece.exact is is_exact) for is_exact in (True, False)
            )
            self.masses.append((exact, text))
        cuts = np.cumsum([len(where) for where in positions])[:-1]
        tails: Any = [None] * len(positions) if np.isnan(tail_N).any() else np.split(tail_N, cuts)
        columns = zip(np.split(ids_NK, cuts), np.split(logp_NK, cuts), tails, strict=True)
        return [TopK(ids=row, logp=logp, tail=tail) for row, logp, tail in columns]

    def logprobs(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray]) -> list[NDArray[np.float32]]:
        """The teacher's log-probability of each label. Tokens that are not compared have the student's own, from which
        nothing is learned."""
        self._check(ids, positions)
        logp_N = np.concatenate(self.student.logprobs(ids, positions))
        exact, merged = (
            [n for n, span in enumerate(self.spans) if span.exact is is_exact] for is_exact in (True, False)
        )
        for number, logq in zip(exact, self._logq(exact), strict=True):
            logp_N[self.spans[number].first] = logq[0]
        by_token = {token: pieces for token, (pieces, _) in self._pieces_by_token(self._said(merged, LIKELY)).items()}
        shares = self._shares(ids, positions, by_token)
        for token, pieces in by_token.items():
            logp_N[token] = divided(pieces, shares.get(token, {}))[int(self.batch.label_N[token])]
        return np.split(logp_N, np.cumsum([len(where) for where in positions])[:-1])

    def gather(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray], support: Sequence[IntArray]
    ) -> list[TopK]:
        raise TargetError("chosen ids of the student can only be scored by a teacher with the student's vocabulary")

    def _check(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray]) -> None:
        batch_rows, count = rows(self.batch)[0], sum(map(len, positions))
        if len(batch_rows) != len(ids) or count != self.batch.tokens or not all(map(np.array_equal, batch_rows, ids)):
            raise TargetError(
                "this algorithm asks its teacher about other texts than the episodes; it needs a teacher with the "
                "student's vocabulary"
            )

    def _pieces_by_token(self, answers: dict[int, _Said]) -> dict[int, tuple[list[Piece], float]]:
        """The teacher's possible continuations at each token of those spans that can be compared, and the rest."""
        pieces_of = {}
        for number, answer in answers.items():
            span = self.spans[number]
            for token in range(span.first, span.first + span.count):
                label = int(self.batch.label_N[token])
                if span.exact:
                    pieces_of[token] = self.pieces.exact(answer.top[0])
                else:
                    pieces_of[token] = self.pieces.by_text(span, token - span.first, label, answer)
        kept_pieces: dict[int, tuple[list[Piece], float]] = {}
        for token, (pieces, tail) in pieces_of.items():
            divisible = [len(piece.ids) == 1 or piece.logq > LEAST_DIVIDED for piece in pieces]
            if any(divisible):
                lost = [piece.logq for piece, stays in zip(pieces, divisible, strict=True) if not stays]
                kept_pieces[token] = [*compress(pieces, divisible)], _total([tail, *lost])
        return kept_pieces

    def _shares(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray], by_token: dict[int, list[Piece]]
    ) -> dict[int, dict[int, float]]:
        """The student's log-probabilities by token, of the ids among which a piece has to be divided."""
        several = {token: [p.ids for p in pieces if len(p.ids) > 1] for token, pieces in by_token.items()}
        wanted = {token: sorted({*chain(*row)}) for token, row in several.items() if row}
        if not wanted:
            return {}
        support_NK = np.zeros((self.batch.tokens, max(map(len, wanted.values()))), np.int64)
        for token, numbers in wanted.items():
            support_NK[token, : len(numbers)] = numbers
        # only rows that hold such a token are read once more
        again = np.unique(self.batch.row_N[[*wanted]])
        places = np.flatnonzero(np.isin(self.batch.row_N, again))
        support = [support_NK[self.batch.row_N == number] for number in again]
        student: Any = self.student
        tops = student.gather([ids[n] for n in again], [positions[n] for n in again], support)
        logp = np.concatenate([row.logp for row in tops])
        row_logp = dict(zip(places.tolist(), logp.tolist(), strict=True))
        return {token: dict(zip(numbers, row_logp[token], strict=False)) for token, numbers in wanted.items()}

    def _by_row(self, numbers: Iterable[int]) -> dict[int, list[int]]:
        """The spans `numbers` by the teacher's row that they lie in."""
        by_row: dict[int, list[int]] = {}
        for number in numbers:
            by_row.setdefault(self.spans[number].row, []).append(number)
        return by_row

    def _said(self, numbers: Sequence[int], k: int) -> dict[int, _Said]:
        """The teacher's answers for the spans `numbers`. In an exact span the log-probability of the label is not
        looked up."""
        if not numbers:
            return {}
        by_row = self._by_row(numbers)
        answers: dict[int, _Said] = {}
        tops = self.teacher.topk(
            [self.ids[row] for row in by_row], [self._places(row_spans) for row_spans in by_row.values()], k
        )
        for row_spans, top in zip(by_row.values(), tops, strict=True):
            tails = [None] * len(top.ids) if top.tail is None else top.tail
            places = iter(zip(top.ids, top.logp, tails, strict=True))
            for number in row_spans:
                span = self.spans[number]
                likeliest = [TopK(ids=i, logp=p, tail=t) for i, p, t in islice(places, span.stop - span.start)]
                ids = self.ids[span.row][span.start : span.stop]
                # NaN where what was said is none of the likeliest
                logqs = [dict(_pairs(at)).get(said, math.nan) for said, at in zip(ids.tolist(), likeliest, strict=True)]
                answers[number] = _Said(ids=ids, logq=np.array(logqs, np.float32), top=likeliest)
        # only episodes that hold a token which is none of the K likeliest are read again
        unknown = [n for n, answer in answers.items() if not self.spans[n].exact and np.isnan(answer.logq).any()]
        for number, logq in zip(unknown, self._logq(unknown), strict=True):
            answers[number] = replace(answers[number], logq=logq)
        return answers

    def _logq(self, numbers: Sequence[int]) -> list[NDArray[np.float32]]:
        """The teacher's log-probabilities of its tokens in the spans `numbers`."""
        if not numbers:
            return []
        by_row = self._by_row(numbers)
        logqs: dict[int, NDArray[np.float32]] = {}
        logq = self.teacher.logprobs(
            [self.ids[row] for row in by_row], [self._places(row_spans) for row_spans in by_row.values()]
        )
        for row_spans, row in zip(by_row.values(), logq, strict=True):
            sizes = [self.spans[number].stop - self.spans[number].start for number in row_spans]
            logqs |= zip(row_spans, np.split(row, np.cumsum(sizes)[:-1]), strict=True)
        return [logqs[number] for number in numbers]

    def _places(self, numbers: Sequence[int]) -> IntArray:
        """The teacher's tokens of the spans `numbers` in their row."""
        return np.concatenate([np.arange(self.spans[n].start, self.spans[n].stop) for n in numbers])


class OtherVocabulary:
    """Another target function's targets, the teacher being one with another tokenizer.

    The teacher's K likeliest ids at each of its tokens become ids of the student (`Pieces`, `divided`); tokens that no
    span holds have empty rows, whose divergence is 0.
    """

    def __init__(
        self, target_fn: TargetFn, *, student: ChatRenderer, reader: TextEpisodes, sizes: tuple[int, int]
    ) -> None:
        self.target_fn, self.student, self.reader = target_fn, student, reader
        mine, theirs = student.template, reader.renderer.template
        self.shared = shared_ids(mine.tokenizer, theirs.tokenizer, sizes[1], (mine.end_id, theirs.end_id))
        mine_by_text, their_by_text = (_by_text(each.tokenizer, _names(each.tokenizer)) for each in (mine, theirs))
        self.pieces = Pieces(
            begin=Beginnings(mine_by_text, self.shared[self.shared >= 0].tolist()),
            shared=self.shared,
            texts={number: text for text, number in their_by_text.items()},
        )
        self._align = lru_cache(CACHE)(self._cuts)

    def __call__(self, batch: RolloutBatch, episodes: Sequence[Episode], scorers: Scorers) -> Targets:
        if scorers.teacher is None:
            raise TargetError("this algorithm compares the student with a teacher, and no teacher was given")
        ids, spans = self.read(batch, episodes)
        if not spans:
            raise TargetError(
                "the teacher finds none of the student's responses in what it reads of these episodes; both must speak "
                "in the same channel"
            )
        reading = _Reading(
            batch=batch,
            ids=ids,
            spans=spans,
            pieces=self.pieces,
            student=scorers.student,
            teacher=scorers.teacher,
        )
        targets = self.target_fn(batch, episodes, replace(scorers, teacher=reading))
        exact, merged = (sum(span.count for span in spans if span.exact is is_exact) for is_exact in (True, False))
        counts = {"exact": exact, "merged": merged, "lost": batch.tokens - exact - merged}
        log = {f"vocabulary/{name}": count / batch.tokens for name, count in counts.items()}
        if reading.masses:
            mass = np.mean(reading.masses, axis=0)
            log |= {"vocabulary/exact_mass": float(mass[0]), "vocabulary/text_mass": float(mass[1])}
        return replace(targets, log={**targets.log, **log})

    def read(self, batch: RolloutBatch, episodes: Sequence[Episode]) -> tuple[list[NDArray[np.int32]], list[_Span]]:
        """The batch's episodes as the teacher's rows, and the spans of the supervised tokens in them."""
        ids: list[NDArray[np.int32]] = []
        spans: list[_Span] = []
        position_N = batch.position_M[batch.predictor_N] + 1
        for number in range(batch.episodes):
            episode = episodes[batch.source_E[number]]
            written = self.reader.rewrite(episode)
            # not one turn fits the teacher's context
            if written is episode:
                continue
            in_episode = np.flatnonzero(batch.episode_N == number)
            for index in np.unique(batch.turn_N[in_episode]):
                turn = episode.turns[index]
                # turns beyond the teacher's context are not written; a response in other words has no spans
                if index >= len(written.turns) or written.turns[index].response != turn.response:
                    continue
                tokens = in_episode[batch.turn_N[in_episode] == index]
                offset = int(position_N[tokens[0]]) - turn.response_span[0]
                theirs = written.turns[index]
                row = len(ids) + theirs.segment
                response = episode.response_ids(turn), written.response_ids(theirs)
                for (s0, s1, t0, t1), text, ends in self._align(*(tuple(part.tolist()) for part in response)):
                    # a part of the response may have been chosen by somebody else: only whole spans are compared
                    if s0 >= offset and s1 <= offset + len(tokens):
                        first, start = int(tokens[s0 - offset]), theirs.response_span[0] + t0
                        same = batch.label_N[first] == self.shared[written.segments[theirs.segment][start]]
                        exact = s1 - s0 == t1 - t0 == 1 and bool(same)
                        place = {"first": first, "count": s1 - s0, "row": row, "start": start, "stop": start + t1 - t0}
                        spans.append(_Span(**place, text=text, ends=ends, exact=exact))
            ids += written.segments
        return ids, spans

    def _cuts(self, mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[tuple[Cut, str, Ends]]:
        """The spans of a response, their text, and where tokens end in it; an id that ended the response on both sides
        is a span of its own, without text."""
        spoken, read = without_end(mine, self.student), without_end(theirs, self.reader.renderer)
        mine_ends, their_ends = (
            token_ends(lambda ids: _decode(renderer.template.tokenizer, ids), part)  # noqa: B023
            for renderer, part in ((self.student, spoken), (self.reader.renderer, read))
        )
        text, cuts, start = _decode(self.student.template.tokenizer, spoken), [], 0
        for cut in text_spans(mine_ends, their_ends):
            s0, s1, t0, t1 = cut
            # below 0 where a token ends within a character
            ends = tuple(end - start for end in mine_ends[s0:s1]), tuple(end - start for end in their_ends[t0:t1])
            stop = mine_ends[s1 - 1]
            cuts += [(part, text[start:stop], ends) for part in split_alike(cut, mine, theirs, self.shared)]
            start = stop
        if len(spoken) < len(mine) and len(read) < len(theirs):
            cuts.append(((len(spoken), len(mine), len(read), len(theirs)), "", ((0,), (0,))))
        return cuts


def without_end(ids: tuple[int, ...], renderer: ChatRenderer) -> tuple[int, ...]:
    """A response without the id that ended it."""
    return ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPlaces:
    """Another token loss for rows of which some places are empty (MIN_LOGP): the student cannot be there, either. In a
    row that is wholly empty all is in the tail, of both."""

    loss: TokenLoss

    def __call__(self, tokens: Tokens) -> TokenLosses:
        student, teacher = tokens.topk_logp_nK, tokens.teacher_logp_nK
        if student is None or teacher is None:
            return self.loss(tokens)
        empty = teacher <= MIN_LOGP
        tail_n = None if tokens.tail_n is None else tokens.tail_n.masked_fill(empty.all(-1), 0.0)
        return self.loss(replace(tokens, topk_logp_nK=student.masked_fill(empty, MIN_LOGP), tail_n=tail_n))


def of_other_vocabulary(
    algorithm: Algorithm, distill: DistillConfig, *, student: ChatRenderer, reader: TextEpisodes, sizes: tuple[int, int]
) -> Algorithm:
    """A `Translation`: `algorithm` with a teacher whose vocabulary is another one.

    Raises SettingsError if the teacher of `algorithm` plays or reads hints, which takes the student's ids, and for
    support `student`.
    """
    if algorithm.teacher_mix or algorithm.guide is not None or algorithm.privileged is not None:
        raise SettingsError(
            f"distill vocabulary is other, but the teacher of {algorithm.name} plays or reads hints, in the student's "
            "ids; valid: same"
        )
    if distill.support == "student":
        raise SettingsError("distill vocabulary is other with support student; valid: support teacher")
    signal = OtherVocabulary(algorithm.target_fn, student=student, reader=reader, sizes=sizes)
    return replace(algorithm, target_fn=signal, token_loss=KnownPlaces(loss=algorithm.token_loss))
