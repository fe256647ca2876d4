"""Where do questions come from? The embedded world, the public sets by name, mixtures of them, files of your own.

`open_source` opens any of them. Question files are Search-R1's parquet and FlashRAG's JSONL; `write_prompts` writes
training prompts as Search-R1 does.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from turngym.envs.core.errors import TaskError, checked_choice, did_you_mean
from turngym.envs.core.task import content_hash
from turngym.envs.search.protocol import harmless
from turngym.envs.search.questions import Question, assert_disjoint, normalize
from turngym.envs.search.world import preset
from turngym.envs.search.world_questions import generate_worlds
from turngym.retrieval.core import Passage, RetrievalError
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
_PREFIX = "searchR1_"
_NO_ID = (None, "", "None", "null")
"""What stands for a missing id, also in published files."""
DATA_VARIABLE = "TURNGYM_SEARCH_DATA"
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
SPLITS = ("train", "eval", "all")


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The passages that questions come with. `sha256` covers ids, titles and texts in order."""

    sha256: str
    passages: tuple[Passage, ...] = field(repr=False)

    def titles(self) -> dict[str, str]:
        """Passage id -> title."""
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
        split: `train`, `eval`, `all`; for files any split that its rows name. None: `train` of the world, else `all`.
        data: folder of the public sets; None takes `$TURNGYM_SEARCH_DATA`.
        corpus: passages (JSONL) that belong to a question file.
        config: which world: `full`, `tiny` (many small ones, each with a corpus of its own), `chains` (the same, asked
            for the ends of paths of five or six hops), or a `WorldConfig`.

    Raises:
        TaskError: an unknown source or split, data that are not there, questions in both training and evaluation.
    """
    if source == "world":
        return _world(_FrozenConfig(config), checked_choice("split", split or "train", SPLITS, TaskError))
    names = MIXTURES.get(source) or tuple(source.split("+"))
    if all(name in SETS for name in names):
        if corpus is not None:
            raise TaskError(f"source {source!r} has its own corpora; another one is a setting: retriever=...")
        return _public(names, str(_data_folder(data)), checked_choice("split", split or "all", SPLITS, TaskError))
    path = Path(source).expanduser()
    if path.suffix in (".parquet", ".jsonl", ".json") or path.exists():
        if not path.is_file():
            raise TaskError(f"there is no question file {path}")
        stat = path.stat()
        # size and time tell that a file was replaced
        stamp = stat.st_size, stat.st_mtime_ns
        return _file(str(path), split or "all", None if corpus is None else str(corpus), stamp)
    known = ["world", *MIXTURES, *SETS]
    wrong = next((name for name in names if name not in SETS), source)
    raise TaskError(
        f"unknown source {wrong!r}; sources are: {', '.join(known)}, or the path of a .parquet or .jsonl."
        f"{did_you_mean(wrong, known)}"
    )


def half(question: str) -> str:
    """The split, `train` or `eval`, of a public question whose row names none.

    By its normalized words, so that twins are on the same side.
    """
    return ("train", "eval")[hashlib.sha256(normalize(question).encode("utf-8")).digest()[0] & 1]


class _FrozenConfig:
    """Settings of a world as a cache key: a preset's name, or a `WorldConfig`, which is too deep to hash."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self._text = repr(config)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _FrozenConfig) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


@lru_cache(maxsize=8)
def _world(key: _FrozenConfig, split: str) -> Source:
    questions, corpora = _world_content(key)
    return _selected("world", questions, split, corpora)


@lru_cache(maxsize=4)
def _world_content(key: _FrozenConfig) -> tuple[tuple[Question, ...], Mapping[str, Corpus]]:
    config = preset(key.config) if isinstance(key.config, str) else key.config
    questions: list[Question] = []
    corpora: dict[str, Corpus] = {}
    for world in generate_worlds(config):
        name = world.config.name
        corpora[name] = Corpus(sha256=corpus_sha256(world.passages), passages=world.passages)
        questions += [replace(question, corpus=name) for question in world.questions]
    _check_halves(questions)
    return tuple(questions), corpora


@lru_cache(maxsize=8)
def _public(names: tuple[str, ...], folder: str, split: str) -> Source:
    questions: list[Question] = []
    corpora: dict[str, Corpus] = {}
    for name in names:
        rows, corpus = _public_set(name, folder)
        questions += rows
        if corpus is not None:
            corpora[SETS[name]] = corpus
    _check_halves(questions)
    return _selected("+".join(names), questions, split, corpora)


@lru_cache(maxsize=8)
def _public_set(name: str, folder: str) -> tuple[tuple[Question, ...], Corpus | None]:
    stems = (f"{name}_questions", *_OTHER_NAMES.get(name, ()), SETS[name], name)
    paths = [Path(folder, f"{stem}{suffix}") for stem in stems for suffix in (".jsonl", ".parquet")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        wanted = ", ".join(path.name for path in paths[:2])
        raise TaskError(f"the questions of {name!r} are not in {folder}: put {wanted} there")
    corpus_path = Path(folder, f"{name}_corpus.jsonl")
    corpus = _read_corpus(str(corpus_path)) if corpus_path.is_file() else None
    questions = read_questions(path, SETS[name], split="")
    titles = corpus.titles() if corpus is not None else {}
    return tuple(_completed(question, SETS[name], titles, path) for question in questions), corpus


@lru_cache(maxsize=8)
def _file(path: str, split: str, corpus_path: str | None, stamp: tuple[int, int]) -> Source:
    # `stamp` is only for the key of the cache
    questions = read_questions(path)
    parts: dict[str, list[Question]] = {}
    for question in questions:
        parts.setdefault(question.split, []).append(question)
    if len(parts) > 1 and "train" in parts:
        assert_disjoint(parts["train"], [question for question in questions if question.split != "train"])
    if split != "all" and split not in parts:
        raise TaskError(f"{path} has no split {split!r}; its splits are: {', '.join(parts)}, all")
    corpora: dict[str, Corpus] = {}
    if corpus_path is not None:
        corpora = dict.fromkeys((question.data_source for question in questions), _read_corpus(corpus_path))
    return _selected(path, questions, split, corpora)


@lru_cache(maxsize=8)
def _read_corpus(path: str) -> Corpus:
    try:
        passages = tuple(read_corpus(path))
    except RetrievalError as error:
        raise TaskError(str(error)) from error
    return Corpus(sha256=corpus_sha256(passages), passages=passages)


def _completed(question: Question, data_source: str, titles: Mapping[str, str], path: Path) -> Question:
    """`question` with `train` or `eval` as its split, and the titles of gold passages as hops where none are known."""
    unknown = [gold for gold in question.gold_ids if titles and gold not in titles]
    if unknown:
        raise TaskError(f"{path}: gold passage {unknown[0]!r} of question {question.id!r} is not in the corpus")
    hops = question.hops or tuple(dict.fromkeys(titles[gold] for gold in question.gold_ids if gold in titles))
    # `dev`, `test` and the like are `eval`; a row that names no split is put on a side by its words
    side = "train" if question.split.startswith("train") else "eval"
    return replace(
        question, data_source=data_source, hops=hops, split=side if question.split else half(question.question)
    )


def _selected(name: str, questions: Iterable[Question], split: str, corpora: Mapping[str, Corpus]) -> Source:
    chosen = {question.task_id: question for question in questions if split in ("all", question.split)}
    if not chosen:
        raise TaskError(f"source {name!r} has no questions in split {split!r}")
    return Source(name=name, questions=chosen, corpora=corpora)


def _check_halves(questions: Iterable[Question]) -> None:
    rows = list(questions)
    assert_disjoint(
        [question for question in rows if question.split == "train"],
        [question for question in rows if question.split != "train"],
    )


def _data_folder(data: str | Path | None) -> Path:
    named = data or os.environ.get(DATA_VARIABLE)
    if not named:
        raise TaskError(
            f"the public question sets are not part of the package: give their folder as data=..., or as "
            f"${DATA_VARIABLE}; source='world' needs no data"
        )
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise TaskError(f"the folder of the question sets, {folder}, does not exist")
    return folder


# --- question files


def asked(question: str) -> str:
    """The question as it is put to the agent: stripped, harmless, with a question mark at its end."""
    text = harmless(question.strip())
    return text if text.endswith("?") else f"{text}?"


def read_questions(path: str | Path, data_source: str | None = None, *, split: str = "eval") -> tuple[Question, ...]:
    """The questions of a `.parquet`, or of a file with one JSON object per line, in file order.

    Fields: `question` (or the text after "Question:" at the end of `prompt`), `golden_answers` (or `answer`, or
    `reward_model.ground_truth.target`), and where given `id`, `data_source`, `extra_info.split`, `gold` or `gold_ids`,
    `hops` or `chain`. `data_source` names the rows that do not; by default it is the file's name. `split` is that of
    rows that name none.

    Raises:
        TaskError: no such file, a row without question or answers, an id that comes twice, no rows.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise TaskError(f"there is no question file {path}; give a .parquet of Search-R1's form or a .jsonl")
    rows = _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)
    name = data_source or path.stem
    questions = [_question(row, f"{path}, row {number + 1}", name, split) for number, row in rows]
    if not questions:
        raise TaskError(f"{path}: there are no questions in it")
    # rows that are the same question without an id get `-2`, `-3`; ids that the file gives must differ
    seen: dict[str, int] = {}
    for place, question in enumerate(questions):
        times = seen[question.task_id] = seen.get(question.task_id, 0) + 1
        if times > 1:
            if question.id != _derived_id(question.question, question.golden_answers):
                raise TaskError(f"{path}: {question.task_id!r} is there twice; ids must be unique in a data source")
            questions[place] = replace(question, id=f"{question.id}-{times}")
    return tuple(questions)


def prompt_rows(questions: Iterable[Question], prompt: str = PROMPT) -> Iterator[dict[str, Any]]:
    """Rows of a training file. `prompt` is the message, with `{question}` where the question goes."""
    if "{question}" not in prompt:
        raise TaskError(f"the prompt {prompt[:80]!r} has no {{question}} in it")
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
    arrow, parquet = _arrow()
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
    parquet.write_table(arrow.Table.from_pylist(rows, schema=schema), str(path))
    return len(rows)


def _derived_id(question: str, golden_answers: Iterable[str]) -> str:
    """The id of a row that has none, made from its content, so that the order of rows does not matter."""
    return content_hash({"question": question, "golden_answers": list(golden_answers)})[:16]


def _question(row: Any, where: str, data_source: str, unnamed: str) -> Question:
    if not isinstance(row, Mapping):
        raise TaskError(f"{where}: a row must be an object with question and golden_answers, not {str(row)[:80]!r}")
    extra = row.get("extra_info") or {}
    split = extra.get("split") or row.get("split")
    question, answers = _asked_in(row, where), _answers(row, where)
    name = row.get("id")
    if name in _NO_ID:
        index = extra.get("index")
        name = _derived_id(question, answers) if index is None else f"{split}_{index}"
    chain = row.get("hops") or [" ".join(link[:2]) for link in row.get("chain") or ()]
    return Question(
        id=str(name),
        question=question,
        golden_answers=answers,
        data_source=str(row.get("data_source") or data_source).removeprefix(_PREFIX),
        gold_ids=tuple(str(gold) for gold in row.get("gold_ids") or row.get("gold") or ()),
        hops=tuple(dict.fromkeys(chain)),
        split=str(split or unnamed),
    )


def _asked_in(row: Mapping[str, Any], where: str) -> str:
    text = row.get("question") or (row.get("extra_info") or {}).get("question")
    if text is None and row.get("prompt"):
        prompt = row["prompt"]
        message = prompt if isinstance(prompt, str) else prompt[-1].get("content", "")
        text = message.rpartition("Question:")[2]
    if not isinstance(text, str) or not text.strip():
        raise TaskError(f"{where}: no question; a row needs question, or a prompt that ends with Question: ...")
    return text.strip()


def _answers(row: Mapping[str, Any], where: str) -> tuple[str, ...]:
    found = row.get("golden_answers") or row.get("answer") or row.get("answers")
    if not found:
        truth = (row.get("reward_model") or {}).get("ground_truth")
        found = truth.get("target") if isinstance(truth, Mapping) else truth
    answers = (found,) if isinstance(found, str) else tuple(found or ())
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise TaskError(f"{where}: the accepted answers are {found!r}; they must be one string or several")
    return answers


def _json_rows(path: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            if not raw.strip():
                continue
            try:
                yield number, json.loads(raw.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise TaskError(f"{path}, line {line}: not a JSON object in UTF-8: {error}") from None
            number += 1


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    arrow, parquet = _arrow()
    try:
        with parquet.ParquetFile(str(path)) as file:
            number = 0
            for batch in file.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield number, row
                    number += 1
    except (arrow.ArrowException, OSError) as error:
        raise TaskError(f"{path} cannot be read as parquet: {error}") from error


def _arrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise TaskError(f"parquet files need pyarrow: pip install 'turngym[parquet]' ({error})") from error
    return pyarrow, pyarrow.parquet
