"""Where do questions come from? An embedded fiction, the public sets by name, mixtures of them, files of your own.

`open_source` opens any of them, and reads a file again once it was changed. What the rows of a file may look like is
decided in `question_rows`; `write_prompts` writes training prompts as Search-R1 does.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any

from cachetools import LRUCache, cached

from turngym.core.errors import RetrievalError, TaskError, checked_choice, did_you_mean
from turngym.core.plugins import need
from turngym.core.redaction import brief, excerpt
from turngym.core.rows import Stamp, path_stamp
from turngym.core.user_files import user_path
from turngym.core.whole_files import written_whole
from turngym.envs.search.fiction import preset
from turngym.envs.search.fiction_questions import generate_fictions
from turngym.envs.search.passage_text import harmless
from turngym.envs.search.question_rows import ALIAS_FILE, read_questions
from turngym.envs.search.questions import Question, assert_disjoint
from turngym.envs.search.reward import normalize
from turngym.retrieval.core import Passage
from turngym.retrieval.corpus import corpus_sha256, read_corpus

PROMPT = (
    "Answer the question at the end. Think between <think> and </think> first, and again whenever you have got new "
    "information. If you lack some knowledge, write a query as <search> query </search>; the best passages come back "
    "between <information> and </information>. You may search as often as you like. Once you know enough, give the "
    "answer alone, without explanation, between <answer> and </answer>, for example <answer> Lisbon </answer>. "
    "Question: {question}\n"
)
"""Instructions and question in one message. It shows two pairs of answer tags, as the original prompt does, on which
the published reward rule (`strict_compat`) depends."""
ABILITY = "fact-reasoning"
DATA_VARIABLE = "TURNGYM_SEARCH_DATA"
SEARCH_HOME = "~/.cache/turngym/search"
"""Where `turngym data get search` puts the test sets, and where sets are looked for unless the variable is set."""
SETS: Mapping[str, str] = {
    "2wiki": "2wikimultihopqa",
    "hotpotqa": "hotpotqa",
    "popqa": "popqa",
    "nq": "nq",
    "musique": "musique",
    "triviaqa": "triviaqa",
    "bamboogle": "bamboogle",
}
"""Name of a public set -> its data source, as Search-R1 calls it."""
MIXTURES: Mapping[str, tuple[str, ...]] = {
    "mixture": ("2wiki", "hotpotqa", "popqa", "nq"),
    "multihop": ("2wiki", "hotpotqa"),
}
_OTHER_NAMES = {"nq": ("nq_open_dev",), "popqa": ("popqa_1000",)}
ENDINGS = (".jsonl", ".parquet", ".json", ".tsv", ".csv", ".jsonl.gz", ".json.gz", ".tsv.gz", ".csv.gz")
"""Endings of question files and corpora, in the order in which they are looked for (parquet holds questions alone)."""
SPLITS = ("train", "eval", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The passages that questions come with. `sha256` covers ids, titles and texts in order."""

    sha256: str
    passages: tuple[Passage, ...] = field(repr=False)

    def titles(self) -> dict[str, str]:
        return {passage.id: passage.title for passage in self.passages}


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Questions by task id, in order, and the corpora by data source, or by the name that questions give."""

    name: str
    questions: Mapping[str, Question]
    corpora: Mapping[str, Corpus]

    def corpus(self, question: Question) -> Corpus | None:
        return self.corpora.get(question.corpus or question.data_source)


def open_source(
    source: str = "world",
    *,
    split: str | None = None,
    data: str | Path | None = None,
    corpus: str | Path | None = None,
    config: Any = "full",
) -> Source:
    """The source called `source`; read once per process.

    Args:
        source: `world`; a public set (`hotpotqa`, `2wiki`, `popqa`, `nq`, ...), several with `+` between them, or
            `mixture` (2Wiki, HotpotQA, PopQA, NQ), `multihop` (the first two); or the path of a question file.
        split: `train`, `eval`, `all`; for files any split that its rows name. None: `train` of the fiction, else `all`.
        data: folder of the public sets; None: `$TURNGYM_SEARCH_DATA`, else where `turngym data get search` puts them.
        corpus: passages (JSONL) that belong to a question file.
        config: which fiction: `full`, `tiny` (many small ones, each with a corpus of its own), `chains` (those, asked
            for the ends of paths of five or six hops), or a `FictionConfig`.

    Raises:
        TaskError: an unknown source or split, data that are not there, questions in both training and evaluation.
    """
    names = MIXTURES.get(source) or tuple(source.split("+"))
    public = all(name in SETS for name in names)
    if corpus is not None and (source == "world" or public):
        raise TaskError(f"source {source!r} has its own corpora; another one is a setting: retriever=...")
    if source == "world":
        return _fiction(config, checked_choice("split", split or "train", SPLITS, TaskError))
    if public:
        part, folder = checked_choice("split", split or "all", SPLITS, TaskError), _data_folder(data)
        return _public(names, tuple(_set_files(name, folder) for name in names), part)
    path = user_path(source)
    if path.name.endswith(ENDINGS) or path.exists():
        if not path.is_file():
            raise TaskError(f"there is no question file {path}")
        corpus_file = None if corpus is None else _as_it_is(user_path(corpus))
        return _file(_question_files(path), split or "all", corpus_file)
    valid = ["world", *MIXTURES, *SETS]
    wrong = next((name for name in names if name not in SETS), source)
    raise TaskError(
        f"unknown source {wrong!r}; sources are: {', '.join(valid)}, or the path of a .parquet, .jsonl or .json."
        f"{did_you_mean(wrong, valid)}"
    )


def half(question: str) -> str:
    """The split, `train` or `eval`, of a public question whose row names none.

    By its normalized words, so that twins are on the same side.
    """
    return ("train", "eval")[hashlib.sha256(normalize(question).encode("utf-8")).digest()[0] & 1]


def _settings(config: Any, split: str) -> tuple[str, str]:
    """A key for what is made: a `FictionConfig` is too deep to hash."""
    return repr(config), split


@cached(LRUCache(8), key=_settings, lock=Lock())
def _fiction(config: Any, split: str) -> Source:
    config = preset(config) if isinstance(config, str) else config
    # of several fictions those of the other split, often most of them, are not made
    questions, corpora = _fiction_content(config, "all" if config.fictions is None else split)
    return _selected("world", questions, split, corpora)


@cached(LRUCache(4), key=_settings, lock=Lock())
def _fiction_content(config: Any, split: str) -> tuple[tuple[Question, ...], Mapping[str, Corpus]]:
    questions: list[Question] = []
    corpora: dict[str, Corpus] = {}
    for fiction in generate_fictions(config, split):
        name = fiction.config.name
        corpora[name] = Corpus(sha256=corpus_sha256(fiction.passages), passages=fiction.passages)
        questions += [replace(question, corpus=name) for question in fiction.questions]
    _check_halves(questions)
    return tuple(questions), corpora


File = tuple[str, Stamp]
"""A path, and the stamp that its file has now: what is read is remembered by both."""


def _as_it_is(path: Path) -> File:
    return str(path), path_stamp(path)


def _question_files(path: Path) -> tuple[File, File]:
    """A question file, and the file of aliases that may lie beside it."""
    return _as_it_is(path), _as_it_is(path.parent / ALIAS_FILE)


def _set_files(name: str, folder: Path) -> tuple[tuple[File, File], File | None]:
    """The question files of a public set, and its corpus if it has one."""
    stems = (f"{name}_questions", *_OTHER_NAMES.get(name, ()), SETS[name], name)
    paths = [folder / f"{stem}{ending}" for stem in stems for ending in ENDINGS]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        wanted = ", ".join(path.name for path in paths[:2])
        raise TaskError(f"the questions of {name!r} are not in {folder}: put {wanted} there")
    corpora = (folder / f"{name}_corpus{ending}" for ending in ENDINGS if ending != ".parquet")
    corpus = next((path for path in corpora if path.is_file()), None)
    return _question_files(path), None if corpus is None else _as_it_is(corpus)


@lru_cache(maxsize=8)
def _public(names: tuple[str, ...], sets: tuple[tuple[tuple[File, File], File | None], ...], split: str) -> Source:
    questions: list[Question] = []
    corpora: dict[str, Corpus] = {}
    for name, files in zip(names, sets, strict=True):
        rows, corpus = _public_set(name, files)
        questions += rows
        if corpus is not None:
            corpora[SETS[name]] = corpus
    _check_halves(questions)
    return _selected("+".join(names), questions, split, corpora)


@lru_cache(maxsize=8)
def _public_set(name: str, files: tuple[tuple[File, File], File | None]) -> tuple[tuple[Question, ...], Corpus | None]:
    ((path, _), _), corpus_file = files
    corpus = None if corpus_file is None else _read_corpus(corpus_file)
    questions = read_questions(path, SETS[name], split="")
    # Search-R1's files hold several sets, whose ids may be the same; names of a set are compared without regard to case
    foreign = {question.data_source for question in questions if question.data_source.lower() not in (name, SETS[name])}
    if foreign:
        raise TaskError(
            f"{path}: it has rows of data_source {brief(sorted(foreign)[0], 80)}; the file of {name!r} holds that set "
            f"alone: {SETS[name]!r}, or no data_source. A file of several sets is a source by its path"
        )
    _check_gold(path, questions, corpus)
    titles = corpus.titles() if corpus is not None else {}
    return tuple(_completed(question, SETS[name], titles) for question in questions), corpus


@lru_cache(maxsize=8)
def _file(files: tuple[File, File], split: str, corpus_file: File | None) -> Source:
    (path, _), _ = files
    questions = read_questions(path)
    splits = dict.fromkeys(question.split for question in questions)
    _check_halves(questions)
    if split != "all" and split not in splits:
        raise TaskError(f"{path} has no split {split!r}; its splits are: {', '.join(splits)}, all")
    corpora: dict[str, Corpus] = {}
    if corpus_file is not None:
        corpus = _read_corpus(corpus_file)
        _check_gold(path, questions, corpus)
        corpora = dict.fromkeys((question.data_source for question in questions), corpus)
    return _selected(path, questions, split, corpora)


@lru_cache(maxsize=8)
def _read_corpus(file: File) -> Corpus:
    try:
        passages = tuple(read_corpus(file[0]))
    except RetrievalError as error:
        raise TaskError(str(error)) from error
    return Corpus(sha256=corpus_sha256(passages), passages=passages)


def _check_gold(path: str, questions: Iterable[Question], corpus: Corpus | None) -> None:
    """Raises TaskError if a gold passage is not in the corpus, where no search could find it."""
    titles = corpus.titles() if corpus is not None else {}
    for question in questions if titles else ():
        if unknown := [gold for gold in question.gold_ids if gold not in titles]:
            raise TaskError(f"{path}: gold passage {unknown[0]!r} of question {question.id!r} is not in the corpus")


def _completed(question: Question, data_source: str, titles: Mapping[str, str]) -> Question:
    """`question` with `train` or `eval` as its split, and the titles of gold passages as hops where none are known."""
    hops = question.hops or tuple(dict.fromkeys(titles[gold] for gold in question.gold_ids if gold in titles))
    # `dev`, `test` and the like are `eval`; a row that names no split is put on a side by its words
    named = "train" if _is_training(question.split) else "eval"
    split = named if question.split else half(question.question)
    return replace(question, data_source=data_source, hops=hops, split=split)


def _selected(name: str, questions: Iterable[Question], split: str, corpora: Mapping[str, Corpus]) -> Source:
    chosen: dict[str, Question] = {}
    for question in questions:
        if split in ("all", question.split) and chosen.setdefault(question.task_id, question) is not question:
            raise TaskError(f"source {name!r}: {question.task_id!r} is there twice; every task needs an id of its own")
    if not chosen:
        raise TaskError(f"source {name!r} has no questions in split {split!r}")
    return Source(name=name, questions=chosen, corpora=corpora)


def _is_training(split: str) -> bool:
    """Whether a split's name is that of training questions: `train`, `Train`, `training`, ..."""
    return split.strip().lower().startswith("train")


def _check_halves(questions: Iterable[Question]) -> None:
    train, evaluation = list[Question](), list[Question]()
    for question in questions:
        (train if _is_training(question.split) else evaluation).append(question)
    # what is compared is made of every question's words
    if train and evaluation:
        assert_disjoint(train, evaluation)


def _data_folder(data: str | Path | None) -> Path:
    named = data or os.environ.get(DATA_VARIABLE)
    if not named and not user_path(SEARCH_HOME).is_dir():
        raise TaskError(
            f"the public question sets are not part of the package: give their folder as data=..., or as "
            f"${DATA_VARIABLE}, or fetch Search-R1's test sets with `turngym data get search`; source='world' needs "
            "no data"
        )
    folder = user_path(named or SEARCH_HOME)
    if not folder.is_dir():
        raise TaskError(f"the folder of the question sets, {folder}, does not exist")
    return folder


# --- prompts


def asked(question: str) -> str:
    """The question as it is put to the agent: stripped, harmless, with a question mark at its end."""
    text = harmless(question.strip())
    return text if text.endswith("?") else f"{text}?"


def prompt_rows(questions: Iterable[Question], prompt: str = PROMPT) -> Iterator[dict[str, Any]]:
    """Rows of a training file. `prompt` is the message, with `{question}` where the question goes."""
    if "{question}" not in prompt:
        raise TaskError(f"the prompt {excerpt(prompt, 80)!r} has no {{question}} in it")
    for index, question in enumerate(questions):
        yield {
            "id": question.id,
            "question": question.question,
            "golden_answers": list(question.golden_answers),
            "data_source": question.data_source,
            "prompt": [{"role": "user", "content": prompt.replace("{question}", asked(question.question))}],
            "ability": ABILITY,
            "reward_model": {"style": "rule", "ground_truth": {"target": list(question.golden_answers)}},
            "extra_info": {"split": question.split, "index": index},
            "gold_ids": list(question.gold_ids),
            "hops": list(question.hops),
        }


def write_prompts(questions: Iterable[Question], path: str | Path, prompt: str = PROMPT) -> int:
    """Write the training prompts as parquet; the number of rows. `read_questions` reads the same questions back."""
    arrow, parquet = (need(name, "a parquet file", "parquet") for name in ("pyarrow", "pyarrow.parquet"))
    # written out: of lists that are all empty pyarrow would infer lists of null
    text, strings = arrow.string(), arrow.list_(arrow.string())
    schema = arrow.schema(
        [
            ("id", text),
            ("question", text),
            ("golden_answers", strings),
            ("data_source", text),
            ("prompt", arrow.list_(arrow.struct([("role", text), ("content", text)]))),
            ("ability", text),
            ("reward_model", arrow.struct([("style", text), ("ground_truth", arrow.struct([("target", strings)]))])),
            ("extra_info", arrow.struct([("split", text), ("index", arrow.int64())])),
            ("gold_ids", strings),
            ("hops", strings),
        ]
    )
    rows = list(prompt_rows(questions, prompt))
    with written_whole(path) as scratch, scratch.open("wb") as file:
        parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), file)
    return len(rows)
