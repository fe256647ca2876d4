"""The many small fictions of the quickstart: what they promise to models that can only copy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from turngym.agents.worlds.phrase_tokenizer import build_phrase_tokenizer
from turngym.envs.search import players, retrievers
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.fiction import CHAINS, TINY
from turngym.envs.search.fiction_questions import Fiction, generate_fictions, vocabulary
from turngym.envs.search.sources import open_source
from turngym.envs.search.turn_protocol import read_action
from turngym.retrieval.bm25_retriever import BM25Retriever

FEW = replace(TINY, fictions=(6, 4))


@pytest.fixture(scope="module")
def fictions() -> list[Fiction]:
    return list(generate_fictions(FEW))


def names(fictions: list[Fiction]) -> set[str]:
    return {entity.name for fiction in fictions for entity in fiction.graph.entities.values()}


def test_training_fictions_come_first_and_each_has_its_own_facts(fictions: list[Fiction]) -> None:
    assert [fiction.config.part for fiction in fictions] == ["train"] * 6 + ["eval"] * 4
    for fiction in fictions:
        assert {question.split for question in fiction.questions} == {fiction.config.part}
    told = [
        {
            (fiction.graph.entities[fact.subject].name, fact.relation, fact.value)
            for fact in fiction.graph.facts.values()
        }
        for fiction in fictions
    ]
    for one, other in pairwise(told):
        assert len(one & other) < len(one) / 10


def test_fewer_fictions_are_the_beginning_of_more(fictions: list[Fiction]) -> None:
    first = next(iter(generate_fictions(TINY)))
    assert first.passages == fictions[0].passages
    assert first.questions == fictions[0].questions


def test_evaluation_names_are_new_but_made_of_known_parts(fictions: list[Fiction]) -> None:
    training, evaluation = names(fictions[:6]), names(fictions[6:])
    assert not training & evaluation
    parts = {part for name in training for part in name.split() if " " in name}
    held = {part for name in evaluation for part in name.split() if " " in name}
    assert len(held - parts) <= len(held) / 20


def test_a_name_finds_its_article(fictions: list[Fiction]) -> None:
    for fiction in fictions:
        retriever = BM25Retriever.from_passages(fiction.passages)
        for question in fiction.questions:
            found = [hits[0].passage.id for hits in retriever.search(list(question.hops), 1)]
            assert tuple(found) == question.gold_ids


def test_hops_are_names_and_the_answer_ends_a_sentence_of_the_last_passage(fictions: list[Fiction]) -> None:
    for fiction in fictions:
        known = {entity.name for entity in fiction.graph.entities.values()}
        texts = {passage.id: passage.text for passage in fiction.passages}
        for question in fiction.questions:
            assert known.issuperset(question.hops)
            assert question.hops[0] in question.question
            for hop, gold in zip((*question.hops[1:], question.golden_answers[0]), question.gold_ids, strict=True):
                assert f" {hop}." in texts[gold]


def test_most_questions_have_two_hops(fictions: list[Fiction]) -> None:
    for fiction in fictions:
        hops = Counter(len(question.hops) for question in fiction.questions)
        assert set(hops) == {1, 2, 3}
        assert hops[2] == max(hops.values())


def test_long_chains_name_their_beginning_and_are_asked_for_their_end() -> None:
    fictions = list(generate_fictions(replace(CHAINS, fictions=(4, 2))))
    assert [len(fiction.questions) for fiction in fictions] == [6] * 4 + [5] * 2
    hops: Counter[int] = Counter()
    for fiction in fictions:
        known = {entity.name for entity in fiction.graph.entities.values()}
        for question in fiction.questions:
            path = fiction.chains[question.task_id]
            hops[len(path)] += 1
            assert all(value == subject for (_, _, value), (subject, _, _) in pairwise(path))
            told = [path[0][0], *(value for _, _, value in path)]
            assert len(set(told)) == len(told)
            assert len({relation for _, relation, _ in path}) == len(path)
            assert told[-1] in question.golden_answers
            assert {name for name in known if f" {name}" in question.question} == {told[0]}
    assert set(hops) == {5, 6}


def test_long_chains_are_told_in_the_words_of_the_tiny_worlds() -> None:
    assert vocabulary(CHAINS) == vocabulary(TINY)


def test_every_text_is_cut_into_phrases_never_into_bytes(fictions: list[Fiction]) -> None:
    tokenizer = build_phrase_tokenizer([*vocabulary(FEW), "<search>", "</search>", "<answer>", "</answer>"])
    env = SearchEnv(config=FEW, split="all", topk=1, max_searches=7)
    rng = np.random.default_rng(0)
    for task_id in env.task_ids()[::5]:
        texts = [env.reset(options={"task": task_id})[0]]
        # its fiction, which other questions share
        assert task_id.partition("/")[2].rpartition("-")[0] == env.task.cluster
        for turn in range(4):
            action = (env.plausible_mistake(rng) if turn % 2 else env.expert_action()) or ""
            if (read_action(action) or ("answer",))[0] == "answer":
                break
            texts += [action, env.step(action)[0]]
        for text in texts:
            pieces = tokenizer.tokenize(text)
            assert not [piece for piece in pieces if piece.startswith("<0x")], text
            assert tokenizer.decode(tokenizer.encode(text)) == text


def test_each_fiction_is_searched_alone(fictions: list[Fiction]) -> None:
    source = open_source(config=FEW, split="all")
    corpora = {question.corpus: source.corpus(question) for question in source.questions.values()}
    assert [*corpora] == [fiction.config.name for fiction in fictions]
    for fiction in fictions:
        corpus = corpora[fiction.config.name]
        assert corpus is not None
        assert corpus.passages == fiction.passages


def test_one_split_is_as_among_all(fictions: list[Fiction]) -> None:
    whole = open_source(config=FEW, split="all")
    for split in ("train", "eval"):
        source = open_source(config=FEW, split=split)
        assert [*source.questions.items()] == [one for one in whole.questions.items() if one[1].split == split]
        assert [*source.corpora] == [one.config.name for one in fictions if one.config.part == split]
        assert all(whole.corpora[name] == corpus for name, corpus in source.corpora.items())


def test_retrievers_are_kept_up_to_a_number_of_passages(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(config=FEW, split="all")
    corpora = [*source.corpora.values()]
    size = len(corpora[0].passages)
    kept = retrievers.own_retriever.cache
    kept.clear()
    monkeypatch.setattr(kept, "_Cache__maxsize", 3 * size)
    first = retrievers.own_retriever(corpora[0])
    for corpus in corpora[1:3]:
        retrievers.own_retriever(corpus)
    assert retrievers.own_retriever(corpora[0]) is first
    for corpus in corpora[3:5]:
        retrievers.own_retriever(corpus)
    assert set(kept) == {corpora[place].sha256 for place in (0, 3, 4)}
    monkeypatch.setattr(kept, "_Cache__maxsize", 1)
    monkeypatch.setattr(retrievers, "_KEPT", 1)
    retrievers.own_retriever(corpora[5])
    assert set(kept) == {corpora[5].sha256}
    kept.clear()


def test_blunders_are_plausible_and_never_end_the_episode() -> None:
    env = SearchEnv(config=FEW, split="train", topk=1)
    rng = np.random.default_rng(1)
    seen = set()
    for task_id in env.task_ids()[:40]:
        env.reset(options={"task": task_id})
        env.step(env.expert_action() or "")
        verb, text = read_action(players.plausible_mistake(env.scene, rng) or "") or ("", "")
        assert verb == "search"
        named = text in {passage.title for passage in env.source.corpus(env.question).passages}  # type: ignore[union-attr]
        seen.add("name" if named else "nothing" if not text else "words")
    assert seen == {"name", "nothing", "words"}
