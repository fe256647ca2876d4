"""What does a row of a question file mean? Search-R1's and FlashRAG's rows, those of the public sets, your own.

docs/own_data.md has the table of all forms that are read. Anything else is refused with file, row, field and value,
because an answer that was read wrongly makes every score wrong, the expert's included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from turngym.core.errors import TaskError
from turngym.core.redaction import brief
from turngym.core.rows import absent, read_rows, show, stem
from turngym.core.task import content_hash
from turngym.core.user_files import text_problem, user_path
from turngym.envs.search.parquet_rows import read_parquet
from turngym.envs.search.questions import Question

QUESTIONS = ("question", "Question")
IDS = ("id", "_id", "question_id", "QuestionId")
ANSWERS = ("golden_answers", "answer", "Answer", "answers", "possible_answers", "short_answers")
"""Where accepted answers are looked for, in this order; then `reward_model` and `metadata.answer`."""
ANSWER_ALIASES = "answer_aliases"
ALIAS_FILE = "id_aliases.json"
"""2Wiki's other names of its answers, by the `answer_id` of a row; its scorer accepts them. It lies beside the rows."""
FIELDS = frozenset(
    {*QUESTIONS, *IDS, *ANSWERS, ANSWER_ALIASES, "answer_id", "answerable", "text", "prompt", "extra_info"}
    | {"reward_model", "metadata", "split", "data_source", "gold_ids", "gold", "hops", "chain"}
)
"""Every field that is read."""
MOST_ROWS = 2_000_000
"""Rows of a question file at most; the largest public set has 170,000. All are kept in memory."""
_FORM = '{"question": ..., "golden_answers": [...]}'
_PREFIX = "searchR1_"
_NO_ID = ("None", "null")
"""Texts that stand for a missing id in published files."""
_UNLABELED = "<unk>"
"""What Hugging Face's TriviaQA has for the answers of its test split, which are not public."""
_PYTHON = re.compile(r"\s*[\[{]\s*['\"].*[\]}]\s*", re.DOTALL)
"""A list or dict that Python printed, such as "['Ann', 'Bob']"."""


def read_questions(path: str | Path, data_source: str | None = None, *, split: str = "eval") -> tuple[Question, ...]:
    """The questions of a file, in file order. docs/own_data.md lists the fields and forms that are read.

    The file is a `.parquet`, or any that `turngym.core.rows.read_rows` reads. `data_source` names the rows that do
    not; by default it is the file's name. `split` is that of rows that name none.

    Raises:
        TaskError: no such file, a row without question or answers, a field of another form, an id that comes twice, no
            rows.
    """
    path = user_path(path)
    if not path.is_file():
        raise TaskError(f"there is no question file {path}; give a .parquet of Search-R1's form or a .jsonl")
    if path.suffix == ".parquet":
        rows = _parquet_rows(path)
    else:
        rows = ((row.number, row.value) for row in read_rows(path, _FORM, TaskError))
    name = data_source or stem(path)
    aliases = _Aliases(path.parent / ALIAS_FILE)
    questions = []
    for number, value in rows:
        if number > MOST_ROWS:
            raise TaskError(f"{path}: it has more than {MOST_ROWS:,} rows; divide it")
        questions.append(_question(value, f"{path}, row {number}", name, split, aliases))
    if not questions:
        raise TaskError(f"{path}: there are no questions in it")
    # rows that are the same question without an id get `-2`, `-3`; ids that the file gives must differ
    seen: dict[str, int] = {}
    for index, question in enumerate(questions):
        times = seen[question.task_id] = seen.get(question.task_id, 0) + 1
        if times > 1:
            if question.id != _derived_id(question.question, question.golden_answers):
                raise TaskError(f"{path}: {question.task_id!r} is there twice; ids must be unique in a data source")
            questions[index] = replace(question, id=f"{question.id}-{times}")
    return tuple(questions)


def _derived_id(question: str, golden_answers: Iterable[str]) -> str:
    """The id of a row that has none, made from its content, so that the order of rows does not matter."""
    return content_hash({"question": question, "golden_answers": list(golden_answers)})[:16]


class _Aliases:
    """2Wiki's file of aliases, read when the first row asks for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_id: dict[str, tuple[str, ...]] | None = None

    def of(self, answer_id: str) -> tuple[str, ...]:
        """The other names of an answer; none without a file of aliases, or if it does not list the answer."""
        if self._by_id is None:
            self._by_id = {}
            form = '{"Q_id": "Q1", "aliases": [...], "demonyms": [...]}'
            for entry in read_rows(self.path, form, TaskError) if self.path.is_file() else ():
                row = _Row(entry.value, f"{self.path}, {entry.place}", form)
                names = (*row.texts("aliases", any_text=True), *row.texts("demonyms", any_text=True))
                self._by_id[row.text("Q_id") or ""] = tuple(dict.fromkeys(names))
        return self._by_id.get(answer_id, ())


def _question(value: Any, where: str, data_source: str, unnamed: str, aliases: _Aliases) -> Question:
    row = _Row(value, where, "with question and golden_answers")
    extra = row.inner("extra_info")
    split = extra.text("split") or row.text("split")
    question, answers = _asked_in(row, extra), _answers(row, aliases)
    row_id = next((text for text in map(row.text, IDS) if text is not None and text not in _NO_ID), None)
    if row_id is None:
        index = extra.text("index")
        row_id = _derived_id(question, answers) if index is None else f"{split}_{index}"
    if "\0" in row_id:
        raise row.wrong("id", row_id, "a text without NUL")
    return Question(
        id=row_id,
        question=question,
        golden_answers=answers,
        data_source=(row.text("data_source") or data_source).removeprefix(_PREFIX) or data_source,
        gold_ids=row.texts("gold_ids") or row.texts("gold"),
        hops=tuple(dict.fromkeys(_hops(row) or _chain(row))),
        split=split or unnamed,
    )


def _blank(text: str) -> bool:
    """Whether a text holds no visible character."""
    return not any(sign.isprintable() and not sign.isspace() for sign in text)


def _asked_in(row: _Row, extra: _Row) -> str:
    fields = [*((row, name) for name in QUESTIONS), (extra, "question")]
    text = next((text for holder, name in fields if (text := holder.text(name)) is not None), None)
    if text is None and (message := _last_message(row)) is not None:
        _, marker, text = message.rpartition("Question:")
        if not marker:
            raise row.wrong("prompt", message, "a text with 'Question: ' and the question at its end; or give question")
    if text is None:
        # BEIR's queries
        text = row.text("text")
    if text is None or _blank(text):
        raise TaskError(
            f"{row.where}: no question{row.blanks(QUESTIONS)}; a row needs question, or a prompt that ends with "
            f"Question: ...; its fields are {brief(sorted(row.fields), 200)}"
        )
    return text.strip()


def _last_message(row: _Row) -> str | None:
    prompt = row.unfolded("prompt")
    if prompt is None or isinstance(prompt, str):
        return row.text("prompt")
    if isinstance(prompt, list) and isinstance(prompt[-1], Mapping):
        return _Row(prompt[-1], f"{row.where}, last message of prompt", "with content").text("content")
    raise row.wrong("prompt", prompt, "a text, or a list of messages")


def _hops(row: _Row) -> tuple[str, ...]:
    """Gold sub-queries. A number would be how many there are."""
    hops = row.unfolded("hops")
    if any(not isinstance(hop, str) for hop in (hops if isinstance(hops, list) else [hops or ""])):
        raise row.wrong("hops", hops, "a list of texts, the queries that find the answer")
    return row.texts("hops")


def _chain(row: _Row) -> Iterator[str]:
    """Gold sub-queries from links, which are lists whose first two entries make a query."""
    links = row.unfolded("chain")
    if links is not None and not isinstance(links, list):
        raise row.wrong("chain", links, "a list of links such as ['Forbidden Ground', 'director', ...]")
    for link in links or ():
        parts = [link] if isinstance(link, str) else link[:2] if isinstance(link, list) else []
        query = " ".join(row.plain("chain", part) for part in parts)
        if not query.strip():
            raise row.wrong("chain", links, "a list of links such as ['Forbidden Ground', 'director', ...]")
        yield query


# --- accepted answers


def _answers(row: _Row, aliases: _Aliases) -> tuple[str, ...]:
    """The accepted answers; the first is what an oracle gives. Other names that are blank are left out."""
    answerable = row.fields.get("answerable")
    # a table has texts alone
    flag = "" if _missing(answerable) else str(answerable).strip().lower()
    if flag in ("false", "0"):
        raise TaskError(f"{row.where}: answerable is false; leave out questions that have no accepted answer")
    if flag not in ("", "true", "1"):
        raise row.wrong("answerable", answerable, "true, or nothing")
    field, value = next(_given_answers(row), ("golden_answers", None))
    if value is None:
        raise TaskError(
            f"{row.where}: the accepted answers are missing{row.blanks(ANSWERS)}; a row needs golden_answers, a text "
            f"or a list of texts; its fields are {brief(sorted(row.fields), 200)}"
        )
    main, other_names = _accepted(row, field, value)
    if empty := [text for text in main if _blank(text)]:
        raise row.wrong(field, empty[0], "an answer that can be seen")
    other_names += row.texts(ANSWER_ALIASES, any_text=True)
    if (answer_id := row.text("answer_id")) is not None:
        other_names += aliases.of(answer_id)
    accepted = main + tuple(text for text in dict.fromkeys(other_names) if text not in main and not _blank(text))
    if set(accepted) == {_UNLABELED}:
        raise row.wrong(field, value, "a known answer; this split has none, take one that has, such as validation")
    if not accepted:
        raise row.wrong(field, value, "at least one answer that can be seen")
    return accepted


def _given_answers(row: _Row) -> Iterator[tuple[str, Any]]:
    """(field, value) of every field in which the row gives answers."""
    for name in ANSWERS:
        value = row.unfolded(name)
        was_text = isinstance(value, list) and isinstance(row.fields[name], str)
        if was_text and any(not isinstance(item, str | Mapping) for item in value):
            raise row.wrong(name, row.fields[name], "a text, or a text of JSON that is a list of texts")
        if value is not None:
            yield name, value
    if "reward_model" in row.fields and (value := row.inner("reward_model").unfolded("ground_truth")) is not None:
        yield "reward_model.ground_truth", value
    # BEIR's queries; other files have metadata of every kind
    metadata = row.fields.get("metadata")
    if isinstance(metadata, Mapping) and (value := _Row(metadata, row.where, "").unfolded("answer")) is not None:
        yield "metadata.answer", value


_VALID = "a text, a list of texts, or an object with value and aliases, with text, or with target"


def _accepted(row: _Row, field: str, value: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(answers, their other names): of one text, a list of texts, an object of a known form, or a list of those."""
    main: tuple[str, ...] = ()
    other_names: tuple[str, ...] = ()
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, Mapping):
            answers, names = _of_object(row, field, item)
            main, other_names = main + answers, other_names + names
        elif item is None or isinstance(item, list):
            raise row.wrong(field, value, _VALID)
        else:
            main += (row.plain(field, item),)
    return main, other_names


def _of_object(row: _Row, field: str, value: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Answers in the objects of TriviaQA, SQuAD (HF's Natural Questions alike) and Search-R1."""
    inner = _Row(value, f"{row.where}, {field}", "")
    for names in _TRIVIAQA:
        if any(name in value for name in names):
            # all are names of one thing, of which each may lack a word
            return (), tuple(text for name in names for text in inner.texts(name, any_text=True))
    for name in ("target", "text"):
        if name in value:
            return inner.texts(name), ()
    raise row.wrong(field, value, _VALID)


_TRIVIAQA = (
    ("value", "aliases", "normalized_aliases", "human_answers"),
    ("Value", "Aliases", "NormalizedAliases", "HumanAnswers"),
)
"""The names in an answer of TriviaQA that its scorer accepts, in Hugging Face's and in its own files."""


# --- values


class _Row:
    """The fields of one JSON object, and the errors for those that have another form."""

    def __init__(self, value: Any, where: str, form: str) -> None:
        if not isinstance(value, Mapping):
            raise TaskError(f"{where}: a row must be an object {form}, not {show(value)}")
        self.fields, self.where = value, where

    def wrong(self, field: str, value: Any, valid: str) -> TaskError:
        return TaskError(f"{self.where}: {field} is {show(value)}; valid: {valid}")

    def blanks(self, fields: Iterable[str]) -> str:
        """The first of `fields` that is there, as a clause for an error."""
        return next((f": {name} is {show(self.fields[name])}" for name in fields if name in self.fields), "")

    def text(self, field: str) -> str | None:
        """A text, or the digits of a whole number. None where it is missing, null or blank."""
        value = self.fields.get(field)
        return None if _missing(value) else self.plain(field, value)

    def texts(self, field: str, *, any_text: bool = False) -> tuple[str, ...]:
        """One text or a list of texts, blank ones included if `any_text`."""
        value = self.unfolded(field)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not any_text and any(map(_missing, items)):
            raise self.wrong(field, value, "a text, or a list of texts none of which is blank")
        return tuple(self.plain(field, item) for item in items)

    def inner(self, field: str) -> _Row:
        """An object, which may be missing or written as a text of JSON."""
        value = self.unfolded(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.wrong(field, value, "an object, or nothing")
        return _Row(value or {}, f"{self.where}, {field}", "")

    def unfolded(self, field: str) -> Any:
        """The value; a list or object that is written as a text of JSON is parsed. None where it is missing."""
        value = self.fields.get(field)
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                read = json.loads(value)
            except (ValueError, RecursionError):
                if _PYTHON.fullmatch(value):
                    raise self.wrong(field, value, "JSON, whose texts stand in double quotes") from None
            else:
                value = read
        return None if _missing(value) else value

    def plain(self, field: str, value: Any) -> str:
        """`value` as a text; a whole number becomes its digits."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        if not isinstance(value, str):
            guess = " (what a number with a point or true would be as a text is not guessed)"
            raise self.wrong(field, value, f"a text{guess if isinstance(value, float | bool) else ''}")
        if (problem := text_problem(value)) is not None:
            raise TaskError(f"{self.where}: {field} {problem}")
        return value


def _missing(value: Any) -> bool:
    return absent(value) or value in ([], {}) or (isinstance(value, str) and not value.strip())


# --- files


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    def choose(names: Sequence[str]) -> list[str]:
        # contexts and paragraphs, most of the bytes, are never unpacked
        columns = [name for name in names if name in FIELDS]
        if not columns:
            raise TaskError(f"{path}: it has no column that is read, such as question; it has {brief(names, 200)}")
        return columns

    yield from enumerate(read_parquet(path, choose, TaskError, MOST_ROWS), start=1)
