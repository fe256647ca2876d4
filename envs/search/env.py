"""The search environment: a question, searches that bring passages, one answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

import msgspec
import numpy as np

from turngym.core.errors import TaskError, checked_choice, checked_int
from turngym.core.task import Task, Verdict
from turngym.core.tools import ToolSpec
from turngym.envs.base import ActingPlayer, Outcome, Player, TextEnv, quote
from turngym.envs.channels import Channel
from turngym.envs.search import players, turn_protocol
from turngym.envs.search.fiction import FictionConfig
from turngym.envs.search.passage_text import Count, DocFormat, harmless, render
from turngym.envs.search.players import SearchScene
from turngym.envs.search.questions import Question, assert_disjoint
from turngym.envs.search.retrievers import Searcher
from turngym.envs.search.reward import RewardKind, RewardRule, answer_f1
from turngym.envs.search.sources import PROMPT, asked, open_source
from turngym.retrieval.core import Hit, Passage, Retriever
from turngym.retrieval.hybrid import Reranker

INSTRUCTIONS = """Answer a question with the help of a search engine.
Think between <think> and </think> first, and again whenever you have got new information. If you lack some knowledge, \
search for it; the best passages come back between <information> and </information>. You may search as often as you \
like, one query at a time. Once you know enough, give the answer alone, without explanation."""


_State = tuple[list[tuple[str, str]], str | None, list[str], set[str], list[tuple[str, str, str, float]], str | None]
"""What `SearchEnv._get_state()` gives."""


class SearchEnv(TextEnv):
    """Search-R1's protocol: `<search>query</search>` brings passages, `<answer>text</answer>` ends the episode.

    An action may be the bare tags or a whole response: Search-R1's rule reads what acts (`turn_protocol.canonical`).
    Reward comes with the answer. Success is exact match with an accepted answer (containment with `reward="sub_em"`).

    Args:
        source, split, data, corpus, config: which questions; see `sources.open_source`.
        retriever: None searches the questions' own corpus with BM25 in this process; else a `Retriever`, an index
            folder, or the URL of a retrieval server. A setting, not part of the task.
        rerank: orders the best 20 passages of every search again: `hf:FOLDER` of a cross-encoder, `coverage`, or a
            `Reranker`. A setting like the retriever.
        max_searches: searches after which only an answer is possible; None: no limit.
        search_turns: turns in which a search is possible, whatever the agent does in them; in later ones only an answer
            is. None: all of them. `gym.make` takes one less than its `max_turns`, so that the last turn, Search-R1's
            final generation, can answer what came back.
        doc_format: layout of passages, `search_r1`, `verl` or `skyrl`.
        doc_tokens: longest passage, in words, or in what `count` counts; None: whole passages.
        count: from a text to its number of tokens; None: words are counted.
        reward: `em`, `sub_em` or `format`, see `questions.RewardRule`.
        format_scores: s, f and r of the reward `format`, each from 0 to 1.
        strict_compat: judge as the published code does, over prompt and response.
        held_out: sources of evaluation questions; a question that is in one of them is an error.
        render_mode: `ansi`: `render()` gives the last action and observation; `human`: both are printed; None: neither.

    Raises:
        EnvBackendError: (from `step`) the search failed; the state is as before. Finding nothing is an observation.

    `info["searches"]` counts searches, `info["gold_found"]` is the share of gold passages seen (None where unknown).
    """

    env_id: ClassVar[str] = "turngym/Search-v0"
    tool: ClassVar[ToolSpec] = ToolSpec(
        name="search",
        description="Search the corpus; returns the passages that fit the query best.",
        argument="query",
        argument_description="What to look for, in a few words.",
        examples=("<search>capital of Portugal</search>", "<answer>Lisbon</answer>"),
        tags=turn_protocol.VERBS,
    )
    instructions: ClassVar[str] = INSTRUCTIONS
    players: ClassVar[tuple[str, ...]] = ("single-shot", "reading")
    on_invalid = "noop"
    """Invalid actions get the published text."""
    told_by = frozenset({"topk", "doc_format", "doc_tokens", "max_searches", "search_turns"})
    scored_by = frozenset({"reward", "format_scores", "strict_compat"})

    @classmethod
    def options_within(cls, max_turns: int | None, options: Mapping[str, Any]) -> dict[str, Any]:
        """Lets the last of `max_turns` turns only answer: Search-R1's "max_turns" plus its final generation."""
        if max_turns is None or options.get("search_turns") is not None:
            return dict(options)
        return {**options, "search_turns": max_turns - 1}

    def __init__(
        self,
        *,
        source: str = "world",
        split: str | None = None,
        data: str | Path | None = None,
        corpus: str | Path | None = None,
        config: str | FictionConfig = "full",
        retriever: Retriever | str | None = None,
        rerank: Reranker | str | None = None,
        topk: int = 3,
        max_searches: int | None = None,
        search_turns: int | None = None,
        doc_format: str = "search_r1",
        doc_tokens: int | None = 256,
        count: Count | None = None,
        reward: RewardKind = "em",
        format_scores: tuple[float, float, float] = (0.2, 0.1, 0.0),
        strict_compat: bool = False,
        held_out: Sequence[str] = (),
        render_mode: str | None = None,
    ) -> None:
        super().__init__(render_mode=render_mode)
        limits = {"max_searches": max_searches, "search_turns": search_turns}
        for name, value in limits.items():
            limits[name] = None if value is None else checked_int(name, value, 0, none="no limit", error=TaskError)
        if doc_tokens is not None:
            doc_tokens = checked_int("doc_tokens", doc_tokens, 1, none="whole passages", error=TaskError)
        self.source = open_source(source, split=split, data=data, corpus=corpus, config=config)
        for other in (held_out,) if isinstance(held_out, str) else held_out:
            apart = open_source(other, data=data, split="eval" if other == "world" else None, config=config)
            assert_disjoint(self.source.questions.values(), apart.questions.values())
        self.searcher = Searcher(self.source, retriever, rerank)
        s, f, r = format_scores
        self.rule = RewardRule(kind=reward, s=s, f=f, r=r, strict_compat=strict_compat)
        self._layout: DocFormat = checked_choice("doc_format", doc_format, get_args(DocFormat), TaskError)
        self._topk, self._doc_tokens, self._count = checked_int("topk", topk, 1, error=TaskError), doc_tokens, count
        self._max_searches, self._search_turns = limits["max_searches"], limits["search_turns"]
        # one tuple for all calls: TextEnv keeps the set of ids by the identity of the list
        self._task_ids = tuple(self.source.questions)
        self._question: Question | None = None
        self._log: list[tuple[str, str]] = []
        self._pending: str | None = None
        self._queries: list[str] = []
        self._seen: set[str] = set()
        self._hits: tuple[Hit, ...] = ()
        self._answer: str | None = None
        self._calls = False

    def task_ids(self) -> Sequence[str]:
        return self._task_ids

    @property
    def question(self) -> Question:
        """The question, with the accepted answers."""
        if self._question is None:
            raise TaskError(f"{self.env_id}: there is no task before reset()")
        return self._question

    @property
    def task(self) -> Task:
        question = self.question
        corpus = self.source.corpus(question)
        return Task(
            env_id=self.env_id,
            task_id=question.task_id,
            sha256=question.sha256(None if corpus is None else corpus.sha256),
            split=question.split,
            category=question.data_source,
            cluster=question.corpus,
        )

    @property
    def success(self) -> bool:
        return self.rule.matches(self._answer, self.question.golden_answers)

    @property
    def scene(self) -> SearchScene:
        """The state that scripted players act on."""
        return SearchScene(self.question, tuple(self._queries), self._hits, self.may_search)

    @property
    def invalid_observation(self) -> str:  # type: ignore[override]
        """The published text, or one that names the tool if agents search by calling it."""
        return turn_protocol.invalid_call(self.tool, self.may_search) if self._calls else turn_protocol.INVALID

    @property
    def statement(self) -> str:
        return f"Question: {asked(self.question.question)}"

    @property
    def may_search(self) -> bool:
        """Whether the turn that begins now, or is being judged, may search."""
        if self._search_turns is not None and len(self._log) >= self._search_turns:
            return False
        return self._max_searches is None or len(self._queries) < self._max_searches

    def canonical(self, action: str) -> str:
        return turn_protocol.canonical(action)

    def check(self, action: str) -> str | None:
        read = turn_protocol.read_action(action)
        if read is None:
            return f"{quote(action)} holds no {' and no '.join(self.tool.templates)}"
        verb, text = read
        if verb == turn_protocol.SEARCH and not self.may_search:
            used_up = self._max_searches is not None and len(self._queries) >= self._max_searches
            why = f"no search is left after {len(self._queries)}" if used_up else "the last turn cannot search"
            return f"{why}; only <answer>answer</answer> is possible"
        if verb == turn_protocol.SEARCH and not text:
            return "the query is empty"
        return None

    def speak_through(self, channel: Channel | None) -> None:
        self._calls = channel is not None and channel.name.startswith("tool")

    def on_response(self, response: str) -> None:
        """Keep the response for the reward."""
        self._pending = response

    def on_refusal(self) -> None:
        """Counts a response that was not played as a turn."""
        self._refused(self._pending or "")
        self._pending = None

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        # no guard around: the action is the response
        if self._pending is None and isinstance(action, str):
            self._pending = action
        return super().step(action)

    def expert_action(self) -> str | None:
        """Searches the gold chain, one hop per turn (the question itself if no chain is known), then gives the first
        accepted answer."""
        chain = players.chain_of(self.question)
        left = (query for query in map(harmless, chain) if query.strip() not in self._queries)
        query = next(left, None) if self.may_search else None
        return turn_protocol.answer(self.question.golden_answers[0]) if query is None else turn_protocol.search(query)

    def make_player(self, name: str) -> Player:
        """`single-shot` searches the question once and answers with a span of the passages; `reading` is the expert,
        but searches again only if a hint says so."""
        if name == "reading":
            return players.ReadingSearchPlayer(lambda: self.scene)
        if name == "single-shot":
            return ActingPlayer(lambda: players.single_shot(self.scene))
        return super().make_player(name)

    def sample_action(self, rng: np.random.Generator) -> str | None:
        return players.sample_action(self.scene, rng)

    def plausible_mistake(self, rng: np.random.Generator) -> str | None:
        return players.plausible_mistake(self.scene, rng)

    def describe(self, verdict: Verdict = Verdict.OK, action: str | None = None) -> dict[str, Any]:
        info = super().describe(verdict, action)
        gold = self.question.gold_ids
        info["searches"] = len(self._queries)
        info["answer_f1"] = answer_f1(self._answer, self.question.golden_answers)
        info["gold_found"] = len(self._seen.intersection(gold)) / len(set(gold)) if gold else None
        info["admissible_templates"] = list(self.tool.templates if self.may_search else self.tool.templates[1:])
        return info

    def _begin(self, task_id: str) -> str:
        self._question = self.source.questions[task_id]
        self._log, self._queries, self._seen, self._hits = [], [], set(), ()
        self._pending = self._answer = None
        return self.statement

    def _apply(self, action: str) -> Outcome:
        response = action if self._pending is None else turn_protocol.written(self._pending, action)
        # before the search, which may fail: the step that repeats it must not find this response unanswered
        self._pending = None
        if self.check(action) is not None:
            return Outcome(observation=self._refused(response), verdict=Verdict.INADMISSIBLE)
        verb, text = turn_protocol.read_action(action) or ("", "")
        if verb == turn_protocol.ANSWER:
            self._log.append((response, ""))
            self._answer = text
            transcript = "".join(response + observation for response, observation in self._log)
            said = "".join(response for response, _ in self._log)
            prompt = PROMPT.replace("{question}", asked(self.question.question))
            reward = self.rule.score(transcript, self.question.golden_answers, said=said, prompt=prompt)
            return Outcome(observation="", reward=reward, terminated=True)
        # before anything is changed, so that a failed search leaves the state as it was
        hits = self.searcher.search(self.question, text, self._topk)
        repeated = text in self._queries
        observation = turn_protocol.information(render(hits, self._layout, self._doc_tokens, self._count))
        self._queries.append(text)
        self._seen.update(hit.passage.id for hit in hits)
        self._hits = hits
        self._log.append((response, observation))
        return Outcome(observation=observation, verdict=Verdict.NO_EFFECT if repeated else Verdict.OK)

    def _refused(self, response: str) -> str:
        """The answer to a turn that did nothing; it says what the next turn may do."""
        # in two steps: what the next turn may do depends on how many turns there were, this one included
        self._log.append((response, ""))
        self._log[-1] = response, self.invalid_observation
        return self.invalid_observation

    def _get_state(self) -> Any:
        hits = [[hit.passage.id, hit.passage.title, hit.passage.text, float(hit.score)] for hit in self._hits]
        log, queries = [list(turn) for turn in self._log], list(self._queries)
        # sorted: equal states give equal snapshots in every process
        return [log, self._pending, queries, sorted(self._seen), hits, self._answer]

    def _set_state(self, state: Any) -> None:
        self._log, self._pending, self._queries, self._seen, hits, self._answer = msgspec.convert(state, _State)
        self._hits = tuple(Hit(passage=Passage(id=i, title=t, text=x), score=score) for i, t, x, score in hits)
