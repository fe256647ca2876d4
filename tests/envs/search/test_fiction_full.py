"""The embedded fiction: what it promises, and how hard it is for BM25."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
from gold_recall import hop_recall, question_recall

from turngym.core.errors import TaskError
from turngym.envs.search.fiction import FULL, LIKE_PUBLIC, FictionConfig, english, preset, relations
from turngym.envs.search.fiction_questions import Fiction, generate_fiction
from turngym.envs.search.questions import Question, assert_disjoint
from turngym.envs.search.reward import normalize
from turngym.envs.testing import expect
from turngym.retrieval.bm25_retriever import BM25Retriever
from turngym.retrieval.lucene_text import analyze


@pytest.fixture(scope="module")
def fiction() -> Fiction:
    return generate_fiction(FULL)


@pytest.fixture(scope="module")
def retriever(fiction: Fiction) -> BM25Retriever:
    return BM25Retriever.from_passages(fiction.passages)


def of_family(fiction: Fiction, family: str, split: str | None = None) -> list[Question]:
    return [q for q in fiction.questions if q.data_source == family and split in (None, q.split)]


def words(bank: tuple[str, ...]) -> set[str]:
    """Content words of templates, stemmed."""
    return set(analyze(re.sub(r"\{\w\}('s)?", "", " ".join(bank))))


def tiny(**changes: object) -> FictionConfig:
    """A fiction that is made in no time."""
    counts = {"person": 60, "film": 40, "book": 30, "city": 20, "company": 12}
    settings: dict[str, object] = {"name": "tiny", "counts": counts, "questions": {"2wiki-like": (20, 5)}}
    return FictionConfig(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.long
def test_the_full_fiction_has_the_promised_size(fiction: Fiction) -> None:
    assert len(fiction.graph.entities) == 2516
    assert 6_000 <= len(fiction.passages) <= 20_000
    assert max(len(passage.text.split()) for passage in fiction.passages) <= 200
    assert Counter((q.data_source, q.split) for q in fiction.questions) == {
        (family, split): count for family in LIKE_PUBLIC for split, count in (("train", 600), ("eval", 150))
    }


def test_same_settings_same_world_another_seed_another_world() -> None:
    one, same, other = generate_fiction(tiny()), generate_fiction(tiny()), generate_fiction(tiny(seed=1))
    assert one.passages == same.passages
    assert one.questions == same.questions
    assert one.questions != other.questions


@pytest.mark.long
def test_gold_passages_exist_and_tell_the_facts_of_the_chain(fiction: Fiction) -> None:
    texts = {passage.id: passage for passage in fiction.passages}
    assert len(texts) == len(fiction.passages)
    for question in fiction.questions:
        chain = fiction.chains[question.task_id]
        assert len(question.hops) == len(question.gold_ids) == len(chain) == len(set(question.gold_ids))
        for gold, (subject, _, value) in zip(question.gold_ids, chain, strict=True):
            assert texts[gold].title.startswith(subject)
            assert value in texts[gold].text


@pytest.mark.long
def test_families_have_their_hops(fiction: Fiction) -> None:
    hops = {family: {len(question.hops) for question in of_family(fiction, family)} for family in LIKE_PUBLIC}
    assert hops["popqa-like"] == hops["nq-like"] == {1}
    assert hops["2wiki-like"] == {2, 4}
    assert hops["hotpot-like"] == {2}
    assert hops["musique-like"] == {3, 4}


@pytest.mark.long
def test_each_hop_names_only_what_is_known_by_then(fiction: Fiction) -> None:
    names: dict[str, set[str]] = {}
    for entity in fiction.graph.entities.values():
        names.setdefault(entity.name, set()).update(entity.answers)
    for question in of_family(fiction, "musique-like"):
        chain = fiction.chains[question.task_id]
        for number, (subject, _, _) in enumerate(chain):
            found = {value for _, _, value in chain[:number]}
            assert subject in found or any(name in question.question for name in names[subject]), question


@pytest.mark.long
def test_answers_are_not_in_the_question(fiction: Fiction) -> None:
    choices = 0
    for question in fiction.questions:
        asked = f" {normalize(question.question)} "
        if any(f" {normalize(answer)} " in asked for answer in question.golden_answers):
            assert " or " in question.question
            choices += 1
    assert 100 < choices < 400


@pytest.mark.long
def test_yes_and_no_are_balanced(fiction: Fiction) -> None:
    for split in ("train", "eval"):
        answers = Counter(q.golden_answers[0] for q in fiction.questions if q.split == split)
        assert answers["yes"] > 10
        assert abs(answers["yes"] - answers["no"]) <= 8


@pytest.mark.long
def test_training_and_evaluation_share_no_entity(fiction: Fiction) -> None:
    touched: dict[str, set[str]] = {"train": set(), "eval": set()}
    for question in fiction.questions:
        touched[question.split].update(gold.partition(".")[0] for gold in question.gold_ids)
    assert not touched["train"] & touched["eval"]
    train = [question for question in fiction.questions if question.split == "train"]
    assert_disjoint(train, [question for question in fiction.questions if question.split == "eval"])


def test_passages_and_questions_use_disjoint_words_for_a_relation() -> None:
    for relation in relations(FULL).values():
        says, asks = (words(bank) for bank in (relation.say, (*relation.np, *relation.ask)))
        assert not says & asks, relation.name


@pytest.mark.long
def test_most_second_hops_of_2wiki_paths_cannot_be_found_by_the_question(fiction: Fiction) -> None:
    texts = {passage.id: set(analyze(passage.contents)) for passage in fiction.passages}
    apart = 0
    paths = [q for q in of_family(fiction, "2wiki-like") if len(q.hops) == 2 and " or " not in q.question]
    for question in paths:
        names = {word for word in analyze(question.question) if word not in english()}
        apart += not names & texts[question.gold_ids[1]]
    assert apart / len(paths) > 0.5


@pytest.mark.long
def test_coined_names_are_no_words_of_the_texts(fiction: Fiction) -> None:
    for entity in fiction.graph.entities.values():
        if entity.kind in ("person", "city", "region", "country"):
            assert not set(re.findall(r"[a-z]+", entity.name.lower())) & english()


# family: (recall, all gold, any gold) of the real set that it imitates, at 3 passages, question as query
REAL = {"hotpot-like": (0.665, 0.401, 0.929), "2wiki-like": (0.648, 0.311, 1.0), "musique-like": (0.423, 0.093, 0.797)}


@pytest.mark.long
@pytest.mark.parametrize("family", REAL)
@pytest.mark.long
def test_bm25_finds_about_as_much_as_in_the_real_sets(fiction: Fiction, retriever: BM25Retriever, family: str) -> None:
    found = question_recall(of_family(fiction, family), retriever)
    for value, real in zip((found.recall, found.all_gold, found.any_gold), REAL[family], strict=True):
        assert value == pytest.approx(real, abs=0.07)


@pytest.mark.long
def test_gold_sub_queries_make_multi_hop_questions_findable(fiction: Fiction, retriever: BM25Retriever) -> None:
    found = hop_recall(of_family(fiction, "musique-like"), retriever)
    assert 0.60 <= found.all_gold <= 0.76
    assert found.any_gold > 0.98


def test_impossible_wishes_are_explained() -> None:
    too_small = expect(TaskError, generate_fiction, tiny(relations=("film.director",)))
    assert "ask for fewer questions or make the fiction larger" in too_small
    assert "Did you mean" in expect(TaskError, lambda: tiny(questions={"2wiki": (5, 5)}))
    assert "the fiction is 'fulll'; valid: full, tiny" in expect(TaskError, preset, "fulll")
    assert "ran out of names" in expect(TaskError, generate_fiction, replace(tiny(), first_names=3, last_names=3))
