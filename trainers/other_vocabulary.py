"""Distillation from a teacher with another tokenizer: what it says of the student's text, on the student's ids.

The teacher reads the same episode in its own chat template (`TextEpisodes`). Student and teacher tokens of a response
are aligned in spans, the smallest pieces of text at whose ends both have a token's end:

    text        g o   t o   s h e l f   1 < / a c t i o n >
    student     [ go to  ] [ shelf 1    ] [ </action>     ] <|end|>
    teacher     [go] [ to] [ shelf] [ ] [1] [</][action][>] <|im_end|>
    spans       |            1            |       2       |    3

A span of one token a side that is the same string is exact: there the teacher's distribution is compared as it is. In
any other span both sides give the whole span a probability, the product over its tokens. `OtherVocabulary` makes the
targets, `SpanLoss` multiplies the student's side; between them the algorithm is what it is with one vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from turngym.agents.rendering.renderer import ChatRenderer, TextEpisodes
from turngym.envs.core.episode import Episode, TopK, Turn
from turngym.envs.core.protocols import Scorer
from turngym.trainers.algorithm import Algorithm, Scorers, TargetFn, Targets, TokenLoss, TokenLosses, Tokens
from turngym.trainers.batch import RolloutBatch
from turngym.trainers.config import ConfigError, DistillConfig
from turngym.trainers.judged import HINTING
from turngym.trainers.lm_head import MIN_LOGP
from turngym.trainers.targets import TargetError, rows

IntArray = NDArray[np.int64]
Cut = tuple[int, int, int, int]
"""A span of a response: student tokens [s0, s1) are the text of teacher tokens [t0, t1)."""
SPAN = "span"
"""The column of `Targets.extra` that says how many tokens back the span of a token began."""
CACHE = 1 << 14
"""Most responses whose alignment is kept: the same few are said again and again."""


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
    found = np.full(size, -1, np.int64)
    for number, token in theirs.items():
        text = token[1]
        if token in by_name:
            found[number] = by_name[token]
        elif their_text.get(text) == number and text in my_text:
            found[number] = my_text[text]
    if ends[0] is not None and ends[1] is not None:
        found[ends[1]] = ends[0]
    return found


def _names(tokenizer: Any) -> dict[int, tuple[str, str]]:
    """Name and text of every id; the text as it is within a sentence, where decoders strip no space."""
    names = {int(number): str(name) for name, number in tokenizer.get_vocab().items()}
    before = tokenizer("a", add_special_tokens=False)["input_ids"][-1:]
    start = len(_decode(tokenizer, before))
    return {number: (name, _decode(tokenizer, [*before, number])[start:]) for number, name in names.items()}


def _by_text(tokenizer: Any, names: dict[int, tuple[str, str]]) -> dict[str, int]:
    """The ordinary id of each text that is whole characters."""
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    found: dict[str, int] = {}
    for number, (name, text) in names.items():
        if number in special or not text or "\ufffd" in text:
            continue
        # byte tokens repeat what other ids say: the one of its own name comes first
        if text not in found or name == text:
            found[text] = number
    return found


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# Which tokens of two responses are the same piece of text.


def token_ends(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> list[int]:
    """Characters up to the end of each token; -1 for tokens that end within a character."""
    text, found = decode(ids), []
    for count in range(1, len(ids) + 1):
        part = decode(ids[:count])
        found.append(len(part) if text.startswith(part) else -1)
    return found


def text_spans(student: Sequence[int], teacher: Sequence[int]) -> list[Cut]:
    """The smallest spans whose ends both sides share, from the `token_ends` of each.

    Tokens behind the last shared end are in none.
    Source: [gold]; docs/algorithms.md#other-vocabularies.
    """
    # the last token with an end: tokens without text belong to what they follow
    mine = {end: count for count, end in enumerate(student, 1)}
    theirs = {end: count for count, end in enumerate(teacher, 1)}
    spans, s0, t0 = [], 0, 0
    for end in sorted((mine.keys() & theirs.keys()) - {-1, 0}):
        spans.append((s0, mine[end], t0, theirs[end]))
        s0, t0 = mine[end], theirs[end]
    return spans


def split_alike(spans: Sequence[Cut], student: Sequence[int], teacher: Sequence[int], shared: IntArray) -> list[Cut]:
    """`spans` with those cut in single tokens whose two sides are the same ids (a character of several byte tokens)."""
    found: list[Cut] = []
    for s0, s1, t0, t1 in spans:
        if list(student[s0:s1]) == [int(shared[number]) for number in teacher[t0:t1]]:
            found += [(s0 + n, s0 + n + 1, t0 + n, t0 + n + 1) for n in range(s1 - s0)]
        else:
            found.append((s0, s1, t0, t1))
    return found


# What the teacher says at the beginning of a span, on the student's ids.


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """A span that is not one shared token: the first id of each side, and the teacher's log-probability of it all."""

    student: int
    teacher: int
    logp: float


def span_row(
    top: TopK, shared: IntArray, ranked: IntArray, merged: Merged | None = None
) -> tuple[IntArray, NDArray[np.float32], tuple[float, float]]:
    """One row of `top` on the student's ids: ids [K], log-probabilities [K], and the mass compared (exactly, by rank).

    Teacher ids that the student shares keep their probability. The r-th likeliest of the others gets the r-th of
    `ranked`, the student's likeliest ids without a partner: of all pairings it has the least reverse KL. A `merged`
    span comes first, with the probability of all its tokens, and neither side's first token is an alternative to it.
    What finds no place is outside the support; places that are left over have the log-probability MIN_LOGP.
    Source: [gold], [uld]; docs/algorithms.md#other-vocabularies.
    """
    found, rest = shared[top.ids], shared[top.ids] < 0
    taken = ~rest
    head_ids: list[int] = []
    head_logp: list[float] = []
    if merged is not None:
        rest &= top.ids != merged.teacher
        taken &= (top.ids != merged.teacher) & (found != merged.student)
        ranked = ranked[ranked != merged.student]
        head_ids, head_logp = [merged.student], [merged.logp]
    pairs, width = min(int(rest.sum()), len(ranked)), len(top.ids)
    ids = np.concatenate([np.array(head_ids, np.int64), found[taken], ranked[:pairs]])[:width]
    logp = np.concatenate([np.array(head_logp, np.float32), top.logp[taken], top.logp[rest][:pairs]])[:width]
    exact, by_rank = np.exp(top.logp[taken]).sum(), np.exp(top.logp[rest][:pairs]).sum()
    free = width - len(ids)
    ids = np.concatenate([ids, np.zeros(free, np.int64)])
    return ids, np.concatenate([logp, np.full(free, MIN_LOGP, np.float32)]), (float(exact), float(by_rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """A span in a batch: the supervised tokens `first` to `first` + `count`, and its tokens in a row of the teacher."""

    first: int
    count: int
    row: int
    start: int
    stop: int
    exact: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reading:
    """Implements `Scorer` for the rows of one batch: the teacher's scores of its own ids, on those of the student."""

    batch: RolloutBatch
    ids: Sequence[NDArray[np.int32]]
    """The teacher's rows."""
    spans: Sequence[_Span]
    shared: IntArray
    alone: NDArray[np.bool_]
    """The student's ids without a partner, which are compared by rank."""
    student: Scorer
    teacher: Scorer
    masses: list[tuple[float, float]] = field(default_factory=list)
    """Of each span the teacher's probability that was compared, exactly and by rank."""

    def topk(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray], k: int) -> list[TopK]:
        self._check(ids, positions)
        tops = self._tops(k)
        width = len(tops[0].ids)
        ids_NK = np.zeros((self.batch.tokens, width), np.int32)
        logp_NK = np.full((self.batch.tokens, width), MIN_LOGP, np.float32)
        merged = [number for number, span in enumerate(self.spans) if not span.exact]
        logq = dict(zip(merged, self._logq(merged), strict=True))
        ranked_NK = self._ranked(tops, k)
        for number, (span, top) in enumerate(zip(self.spans, tops, strict=True)):
            whole = None
            if number in logq:
                label, first = self.batch.label_N[span.first], self.ids[span.row][span.start]
                whole = Merged(student=int(label), teacher=int(first), logp=logq[number])
            found = span_row(top, self.shared, ranked_NK[span.first], whole)
            ids_NK[span.first], logp_NK[span.first], mass = found
            self.masses.append(mass)
        cuts = np.cumsum([len(where) for where in positions])[:-1]
        pairs = zip(np.split(ids_NK, cuts), np.split(logp_NK, cuts), strict=True)
        return [TopK(ids=row, logp=logp) for row, logp in pairs]

    def logprobs(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray]) -> list[NDArray[np.float32]]:
        """The teacher's log-probability of each label: the student's own, and an equal part of what the two differ by
        over the span. Tokens in no span have the student's own alone, from which nothing is learned."""
        self._check(ids, positions)
        logp_N = np.concatenate(self.student.logprobs(ids, positions))
        for span, logq in zip(self.spans, self._logq(range(len(self.spans))), strict=True):
            own = logp_N[span.first : span.first + span.count]
            # one token must come out as the teacher gave it, to the last bit
            own[:] = logq if span.count == 1 else own + (logq - own.sum(dtype=np.float64)) / span.count
        return np.split(logp_N, np.cumsum([len(where) for where in positions])[:-1])

    def gather(
        self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray], support: Sequence[IntArray]
    ) -> list[NDArray[np.float32]]:
        raise TargetError("chosen ids of the student can only be scored by a teacher with the student's vocabulary")

    def _check(self, ids: Sequence[NDArray[np.int32]], positions: Sequence[IntArray]) -> None:
        own, count = rows(self.batch)[0], sum(map(len, positions))
        if len(own) != len(ids) or count != self.batch.tokens or not all(map(np.array_equal, own, ids)):
            raise TargetError(
                "this algorithm asks its teacher about other texts than the episodes; it needs a teacher with the "
                "student's vocabulary"
            )

    def _by_row(self, numbers: Iterable[int]) -> dict[int, list[int]]:
        """The spans `numbers` by the teacher's row that they lie in."""
        found: dict[int, list[int]] = {}
        for number in numbers:
            found.setdefault(self.spans[number].row, []).append(number)
        return found

    def _tops(self, k: int) -> list[TopK]:
        """The teacher's K likeliest ids where each span begins."""
        by_row = self._by_row(range(len(self.spans)))
        places = [np.array([self.spans[number].start for number in numbers]) for numbers in by_row.values()]
        found: dict[int, TopK] = {}
        for numbers, top in zip(by_row.values(), self.teacher.topk(self._rows(by_row), places, k), strict=True):
            found |= {n: TopK(ids=ids, logp=logp) for n, ids, logp in zip(numbers, top.ids, top.logp, strict=True)}
        return [found[number] for number in range(len(self.spans))]

    def _logq(self, numbers: Iterable[int]) -> list[float]:
        """log Q of the spans `numbers`: the sum over the teacher's tokens."""
        numbers = list(numbers)
        if not numbers:
            return []
        by_row = self._by_row(numbers)
        spans = [[self.spans[number] for number in each] for each in by_row.values()]
        places = [np.concatenate([np.arange(span.start, span.stop) for span in each]) for each in spans]
        found: dict[int, float] = {}
        for each, row, logp in zip(
            by_row.values(), spans, self.teacher.logprobs(self._rows(by_row), places), strict=True
        ):
            parts = np.split(logp, np.cumsum([span.stop - span.start for span in row])[:-1])
            found |= {number: float(part.sum(dtype=np.float64)) for number, part in zip(each, parts, strict=True)}
        return [found[number] for number in numbers]

    def _rows(self, by_row: Iterable[int]) -> list[NDArray[np.int32]]:
        return [self.ids[row] for row in by_row]

    def _ranked(self, tops: Sequence[TopK], k: int) -> Sequence[IntArray]:
        """The student's likeliest ids without a partner at each token of the batch; none where no id needs one."""
        if all((self.shared[top.ids] >= 0).all() for top in tops):
            return [np.array([], np.int64)] * self.batch.tokens
        best_NK = np.concatenate([found.ids for found in self.student.topk(*rows(self.batch), k)]).astype(np.int64)
        return [ids[self.alone[ids]] for ids in best_NK]


class OtherVocabulary:
    """Another target function's targets, the teacher being one with another tokenizer.

    The teacher's K likeliest ids where a span begins become K of the student's (`span_row`); other tokens of a span,
    and tokens that no span holds, have empty rows, whose divergence is 0.

    Args:
        target_fn: asks the teacher about the batch's rows.
        student: the student's renderer.
        reader: writes episodes as the teacher's ids.
        sizes: rows of the LM heads (student's, teacher's).
    """

    def __init__(
        self,
        target_fn: TargetFn,
        *,
        student: ChatRenderer,
        reader: TextEpisodes,
        sizes: tuple[int, int],
    ) -> None:
        self.target_fn, self.student, self.reader = target_fn, student, reader
        mine, theirs = student.template, reader.renderer.template
        self.shared = shared_ids(mine.tokenizer, theirs.tokenizer, sizes[1], (mine.end_id, theirs.end_id))
        self.alone = np.zeros(sizes[0], np.bool_)
        self.alone[list(mine.tokenizer.get_vocab().values())] = True
        self.alone[self.shared[self.shared >= 0]] = False
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
            shared=self.shared,
            alone=self.alone,
            student=scorers.student,
            teacher=scorers.teacher,
        )
        targets = self.target_fn(batch, episodes, replace(scorers, teacher=reading))
        back_N = np.zeros(batch.tokens, np.int64)
        for span in spans:
            back_N[span.first : span.first + span.count] = np.arange(span.count)
        exact = sum(span.count for span in spans if span.exact) / batch.tokens
        merged = sum(span.count for span in spans if not span.exact) / batch.tokens
        log = {"vocabulary/exact": exact, "vocabulary/merged": merged, "vocabulary/lost": 1.0 - exact - merged}
        if reading.masses:
            mass = np.mean(reading.masses, axis=0)
            log |= {"vocabulary/exact_mass": float(mass[0]), "vocabulary/rank_mass": float(mass[1])}
        return replace(targets, extra={**targets.extra, SPAN: back_N}, log={**targets.log, **log})

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
            here = np.flatnonzero(batch.episode_N == number)
            for index in np.unique(batch.turn_N[here]):
                turn = episode.turns[index]
                # turns beyond the teacher's context are not written; a response in other words has no spans
                if index >= len(written.turns) or written.turns[index].response != turn.response:
                    continue
                tokens = here[batch.turn_N[here] == index]
                offset = int(position_N[tokens[0]]) - turn.response_span[0]
                theirs = written.turns[index]
                row = len(ids) + theirs.segment
                for s0, s1, t0, t1 in self._of_turn(episode, turn, written, theirs):
                    # a part of the response may have been chosen by somebody else: only whole spans are compared
                    if s0 >= offset and s1 <= offset + len(tokens):
                        label, start = int(tokens[s0 - offset]), theirs.response_span[0] + t0
                        pair = batch.label_N[label], self.shared[written.segments[theirs.segment][start]]
                        exact = s1 - s0 == t1 - t0 == 1 and pair[0] == pair[1]
                        spans.append(
                            _Span(first=label, count=s1 - s0, row=row, start=start, stop=start + t1 - t0, exact=exact)
                        )
            ids += written.segments
        return ids, spans

    def _of_turn(self, episode: Episode, turn: Turn, written: Episode, theirs: Turn) -> list[Cut]:
        return self._align(tuple(episode.response_ids(turn).tolist()), tuple(written.response_ids(theirs).tolist()))

    def _cuts(self, mine: tuple[int, ...], theirs: tuple[int, ...]) -> list[Cut]:
        """The spans of a response; an id that ended it on both sides is one of its own."""
        said, read = without_end(mine, self.student), without_end(theirs, self.reader.renderer)
        mine_ends, their_ends = (
            token_ends(lambda ids: _decode(renderer.template.tokenizer, ids), part)  # noqa: B023
            for renderer, part in ((self.student, said), (self.reader.renderer, read))
        )
        spans = text_spans(mine_ends, their_ends)
        if len(said) < len(mine) and len(read) < len(theirs):
            spans.append((len(said), len(mine), len(read), len(theirs)))
        return split_alike(spans, mine, theirs, self.shared)


def without_end(ids: tuple[int, ...], renderer: ChatRenderer) -> tuple[int, ...]:
    """A response without the id that ended it."""
    return ids[:-1] if ids and ids[-1] in renderer.stop_ids else ids


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanLoss:
    """Another token loss whose first token of a span stands for the span: its probability is the product over them.

    log P = sum over the span's tokens of log p; importance ratios alike. Places of the support that are empty
    (MIN_LOGP in the targets) are impossible for the student, too.
    Source: [gold]; docs/algorithms.md#other-vocabularies.
    """

    loss: TokenLoss

    def __call__(self, tokens: Tokens) -> TokenLosses:
        student, teacher, back_n = tokens.topk_logp_nK, tokens.teacher_logp_nK, tokens.extra[SPAN]
        if student is None or teacher is None:
            return self.loss(tokens)
        # tokens of a row lie side by side, so that a span's first is so many places back
        first_n = torch.arange(len(back_n), device=back_n.device) - back_n
        more_n = _later(tokens.logp_n, back_n, first_n)
        student = torch.cat([student[:, :1] + more_n[:, None], student[:, 1:]], dim=1)
        student = student.masked_fill(teacher <= MIN_LOGP, MIN_LOGP)
        sampled_n = tokens.sampled_logp_n + _later(tokens.sampled_logp_n, back_n, first_n)
        behavior_n = tokens.behavior_logp_n + _later(tokens.behavior_logp_n, back_n, first_n)
        whole = replace(tokens, topk_logp_nK=student, sampled_logp_n=sampled_n, behavior_logp_n=behavior_n)
        return self.loss(whole)


def _later(logp_n: Tensor, back_n: Tensor, first_n: Tensor) -> Tensor:
    """For the first token of a span the sum over its other tokens, 0 for all others: [n]."""
    others_n = torch.where(back_n > 0, logp_n, torch.zeros_like(logp_n))
    return torch.zeros_like(logp_n).index_add(0, first_n, others_n)


def of_other_vocabulary(
    algorithm: Algorithm, distill: DistillConfig, *, student: ChatRenderer, reader: TextEpisodes, sizes: tuple[int, int]
) -> Algorithm:
    """`algorithm` with a teacher whose vocabulary is another one; arguments as of `OtherVocabulary`.

    Raises ConfigError where that cannot be had.
    """
    if algorithm.teacher_mix or algorithm.guide is not None or algorithm.judge in HINTING:
        raise ConfigError(
            f"distill vocabulary is other, but the teacher of {algorithm.name} plays or reads hints, in the student's "
            "ids; valid: same"
        )
    if distill.support == "student":
        raise ConfigError("distill vocabulary is other with support student; valid: support teacher")
    signal = OtherVocabulary(algorithm.target_fn, student=student, reader=reader, sizes=sizes)
    return replace(algorithm, target_fn=signal, token_loss=SpanLoss(loss=algorithm.token_loss))
