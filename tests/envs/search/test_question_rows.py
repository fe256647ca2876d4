"""What a row means: every published form is read as its own scorer reads it, everything else is refused by name."""

from __future__ import annotations

import gzip
import json
import math
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from turngym.core.errors import TaskError
from turngym.envs.search import parquet_rows, question_rows
from turngym.envs.search.question_rows import FIELDS, read_questions
from turngym.envs.search.questions import Question
from turngym.envs.search.reward import RewardRule
from turngym.envs.search.sources import open_source


def read(tmp_path: Path, row: Any) -> Question:
    path = tmp_path / "q.jsonl"
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    (question,) = read_questions(path)
    return question


def refused(tmp_path: Path, row: Any) -> str:
    with pytest.raises(TaskError) as caught:
        read(tmp_path, row)
    text = str(caught.value)
    assert f"{tmp_path / 'q.jsonl'}, row 1" in text
    assert "\n" not in text
    return text


def outcome(tmp_path: Path, row: Any) -> Question | str:
    """The question, or the text of its refusal."""
    try:
        return read(tmp_path, row)
    except TaskError as error:
        return str(error)


ROW = {"id": "1", "question": "Which town is it?", "golden_answers": ["Orlen"]}
TRIVIAQA = {
    "aliases": ["Tarnby Town", "A (The)", ""],
    "normalized_aliases": ["tarnby town", "old tarnby"],
    "matched_wiki_entity_name": "Somewhere",
    "type": "WikipediaEntity",
    "value": "Tarnby",
}
OFFICIAL_TRIVIAQA = {
    "Value": "Tarnby",
    "Aliases": ["Tarnby Town"],
    "NormalizedAliases": ["tarnby town"],
    "HumanAnswers": ["T-Town"],
    "MatchedWikiEntityName": "Somewhere",
}


@pytest.mark.parametrize(
    ("given", "accepted"),
    [
        ({"golden_answers": "Orlen"}, ("Orlen",)),
        ({"golden_answers": ["Orlen", "City of Orlen", "Orlen"]}, ("Orlen", "City of Orlen", "Orlen")),
        ({"answer": 1931}, ("1931",)),
        # NQ-open and DPR
        ({"answer": ["14 December 1972 UTC", "December 1972"]}, ("14 December 1972 UTC", "December 1972")),
        # signs alone are answers of NQ
        ({"answer": ["A+", "AB+"]}, ("A+", "AB+")),
        # TriviaQA as Hugging Face has it, and as it is published
        ({"answer": TRIVIAQA}, ("Tarnby", "Tarnby Town", "A (The)", "tarnby town", "old tarnby")),
        ({"Answer": OFFICIAL_TRIVIAQA}, ("Tarnby", "Tarnby Town", "tarnby town", "T-Town")),
        ({"answer": {"value": "The A", "aliases": ["Vitamin A", "a", " "]}}, ("The A", "Vitamin A", "a")),
        # SQuAD in both forms, Natural Questions' short answers
        ({"answers": {"text": ["Ann Lee", "Ann"], "answer_start": [17, 17]}}, ("Ann Lee", "Ann")),
        ({"answers": [{"text": "Ann Lee", "answer_start": 17}, {"text": "Ann"}]}, ("Ann Lee", "Ann")),
        ({"short_answers": [{"text": ["Ann"], "start_token": [1]}, {"text": []}]}, ("Ann",)),
        # PopQA's lists are texts of JSON
        ({"obj": "politician", "possible_answers": '["politician", "pol"]'}, ("politician", "pol")),
        # MuSiQue
        ({"answer": "Haldia", "answer_aliases": ["Hald", ""], "answerable": True}, ("Haldia", "Hald")),
        # Search-R1 and verl
        ({"reward_model": {"style": "rule", "ground_truth": {"target": ["Ann", "A."]}}}, ("Ann", "A.")),
        ({"reward_model": {"ground_truth": "Ann"}}, ("Ann",)),
        # BEIR's queries
        ({"metadata": {"answer": "American", "supporting_facts": [["Title", 0]]}}, ("American",)),
        # empty fields are as good as missing ones
        ({"golden_answers": [], "answer": None, "answers": " ", "metadata": {"answer": "x1"}}, ("x1",)),
    ],
)
def test_published_forms_of_answers(tmp_path: Path, given: dict[str, Any], accepted: tuple[str, ...]) -> None:
    row = {"id": "1", "question": "Which town is it?", **given}
    assert read(tmp_path, row).golden_answers == accepted


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"answer": True}, "answer is true; valid: a text"),
        ({"answer": None}, "the accepted answers are missing: answer is null"),
        ({"answer": [["Ann"]]}, 'answer is [["Ann"]]; valid: a text, a list of texts, or an object with'),
        ({"answer": {"name": "Ann"}}, 'answer is {"name": "Ann"}; valid:'),
        ({"answer": {"text": [], "answer_start": []}}, "at least one answer"),
        ({"answer": {"value": " ", "aliases": ["\u200b"]}}, "at least one answer"),
        ({"answer": ["Ann", " "]}, "answer is ' '; valid: an answer that can be seen"),
        ({"answer": "['Ann', 'Bob']"}, "valid: JSON, whose texts stand in double quotes"),
        ({"answer": "Ann\ud800"}, "answer has half a surrogate pair (\\ud800) at character 3"),
        ({"answer": "Ann", "answer_aliases": [None]}, "answer_aliases is null"),
        ({"answer": "Ann", "answerable": False}, "answerable is false"),
        ({"answer": "Ann", "answerable": "no"}, "answerable is 'no'; valid: true"),
        ({"golden_answers": ["<unk>"]}, '["<unk>"]; valid: a known answer; this split has none'),
        ({"reward_model": ["Ann"]}, 'reward_model is ["Ann"]; valid: an object'),
        ({}, "the accepted answers are missing; a row needs golden_answers"),
    ],
)
def test_other_forms_of_answers_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, {"id": "1", "question": "Which town is it?", **given})


@pytest.mark.parametrize(
    ("given", "field", "value"),
    [
        ({"Question": "Who?", "question": None}, "question", "Who?"),
        ({"question": None, "prompt": "Answer. Question: who?\n"}, "question", "who?"),
        ({"question": None, "prompt": '[{"role": "user", "content": "Question: who?"}]'}, "question", "who?"),
        ({"question": None, "text": "who?"}, "question", "who?"),
        ({"question": 1984}, "question", "1984"),
        ({"_id": "5a7a0693", "id": None}, "id", "5a7a0693"),
        ({"QuestionId": "tc_33", "id": "None"}, "id", "tc_33"),
        ({"id": None, "extra_info": '{"split": "test", "index": 3}'}, "id", "test_3"),
        # pandas' missing values
        ({"_id": "5a7a0693", "id": math.nan, "gold_ids": math.nan}, "id", "5a7a0693"),
        ({"extra_info": {"split": "test"}}, "split", "test"),
        ({"data_source": "searchR1_nq"}, "data_source", "nq"),
        ({"gold_ids": [], "gold": [0, "3"]}, "gold_ids", ("0", "3")),
        ({"gold": "[0, 3]"}, "gold_ids", ("0", "3")),
        ({"chain": [["Orlen", "river", "Tane"], ["Tane", 3], "Tane"]}, "hops", ("Orlen river", "Tane 3", "Tane")),
    ],
)
def test_other_fields(tmp_path: Path, given: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(tmp_path, {**ROW, **given}), field) == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"question": "  "}, "no question: question is '  '"),
        ({"question": ["Who?"]}, 'question is ["Who?"]'),
        ({"question": None, "prompt": ["Question: Who?"]}, 'prompt is ["Question: Who?"]; valid: a text, or a list of'),
        ({"question": None, "prompt": [{"content": ["Who?"]}]}, "last message of prompt: content is"),
        ({"id": {"$oid": "5f"}}, 'id is {"$oid": "5f"}; valid: a text'),
        ({"id": "a\0b"}, "valid: a text without NUL"),
        ({"id": "\udc00"}, "id has half a surrogate pair"),
        ({"extra_info": "test"}, "extra_info is 'test'; valid: an object"),
        ({"split": {"name": "test"}}, "split is {"),
        ({"gold_ids": [None]}, "gold_ids is [null]"),
        ({"hops": 7}, "hops is 7; valid: a list of texts"),
        ({"hops": ["a", ""]}, 'hops is ["a", ""]'),
        ({"chain": "a"}, "chain is 'a'"),
    ],
)
def test_other_fields_of_other_forms_are_refused(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    assert words in refused(tmp_path, {**ROW, **given})


NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
VALUES: list[Any] = [
    *(None, True, False, 0, -7, 10**30, 2.5, 1e300, math.nan, math.inf, -math.inf, "", " \t", "the", "x", "---", "\0"),
    *("\ud800", "\u200b", "a\nb", "[", "{}", "[1]", '["x"]', "['x']", '{"text": ["x"]}', "</answer>", "x" * 5000),
    *(
        [],
        [None],
        [""],
        ["x"],
        ["x", 3],
        ["x", 2.5],
        [["x"]],
        [{}],
        [{"text": "x"}],
        [[[]]],
        {},
        {"text": None},
        NESTED,
    ),
    *({"value": "x", "aliases": 3}, {"value": []}, {"target": {"target": 1}}, {"ground_truth": []}, {"index": {}}),
    *({"split": []}, {"question": {}}, {"answer": {}}, [{"content": {}}], [{"role": "user"}], {"content": 3}),
]


@pytest.mark.parametrize("field", [*sorted(FIELDS), "supporting_facts", "context"])
def test_every_kind_of_value_in_every_field_is_read_or_refused(tmp_path: Path, field: str) -> None:
    for value in VALUES:
        for row in (ROW, {}):
            question = outcome(tmp_path, {**row, field: value})
            if isinstance(question, str):
                assert "q.jsonl" in question
                assert "\n" not in question
                assert len(question) < len(str(tmp_path)) + 500
                continue
            texts = (*question.golden_answers, *question.gold_ids, *question.hops, question.question, question.task_id)
            assert all(isinstance(text, str) and text.encode() for text in texts)
            # nothing that an agent leaves out is right, and what an oracle says is
            rule = RewardRule()
            assert not rule.matches("", question.golden_answers)
            assert rule.matches(" the ", question.golden_answers) == ("the" in question.golden_answers)
            assert rule.matches(question.golden_answers[0], question.golden_answers)


@pytest.mark.parametrize("value", [3, "text", None, [1], [[]], True])
def test_rows_that_are_no_objects(tmp_path: Path, value: Any) -> None:
    if isinstance(value, list):
        value = json.dumps(value)
    assert "a row must be an object" in refused(tmp_path, value)


@pytest.mark.parametrize("kind", ["em", "sub_em", "format"])
def test_answers_of_signs_and_articles_are_matched_as_they_stand(kind: Any) -> None:
    rule = RewardRule(kind=kind)
    for golden in ("---", "A+", ")", "A", "The The", "an"):
        assert rule.matches(golden, ["Ann", golden])
        assert rule.matches(f" {golden.lower()} ", [golden])
        others = {"", " ", "the", "a", ".", "a the", "B", "The Who"} - {golden.lower()}
        assert not any(rule.matches(said, [golden]) for said in others)
    # the published rule takes them all for the same
    assert RewardRule(strict_compat=True).matches("the", ["---"])


# --- files as they are downloaded


def hotpot(number: int) -> dict[str, Any]:
    return {
        "_id": f"5a{number}",
        "answer": f"Town {number}",
        "question": f"Which town number {number} has a lighthouse?",
        "supporting_facts": [["Town", 0]],
        "context": [["Town", ["A town."]]],
        "type": "bridge",
        "level": "hard",
    }


def test_official_files_of_named_sets(tmp_path: Path) -> None:
    two_wiki = {**hotpot(0), "_id": "b0", "answer": "Haldia", "answer_id": "Q1", "evidences": [["a", "b", "c"]]}
    trivia = {"Question": "Where?", "QuestionId": "tc_1", "Answer": OFFICIAL_TRIVIAQA, "SearchResults": []}
    popqa = 'id\tobj\tquestion\tpossible_answers\n7\tpol\tWhat is it?\t"[""pol"", ""politician""]"\n'
    write = {
        "hotpotqa_questions.json": json.dumps([hotpot(number) for number in range(3)]),
        "2wiki_questions.json": json.dumps([two_wiki]),
        "id_aliases.json": '{"Q_id": "Q1", "aliases": ["Hald", ""], "demonyms": ["Haldian"]}\n'
        '{"Q_id": "Q2", "aliases": [], "demonyms": null}\n',
        "triviaqa.json": json.dumps({"Data": [trivia], "Domain": "unfiltered-web", "Version": 1.0}, indent=4),
        "popqa.tsv": popqa,
        "bamboogle.csv": 'Question,Answer\n"Who, then?",Ann\n',
        "2wiki_corpus.json": json.dumps([{"_id": 3, "title": "Town", "text": "A town.", "metadata": {}}]),
    }
    for name, text in write.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    musique = {"id": "2hop__1", "question": "Who?", "answer": "Ann", "answer_aliases": ["A."], "answerable": True}
    (tmp_path / "musique.jsonl.gz").write_bytes(gzip.compress(json.dumps(musique).encode()))
    official = read_questions(tmp_path / "hotpotqa_questions.json")
    assert [question.id for question in official] == ["5a0", "5a1", "5a2"]
    sources = {name: open_source(name, data=tmp_path) for name in ("2wiki", "triviaqa", "popqa", "musique")}
    accepted = {
        name: {task_id: question.golden_answers for task_id, question in source.questions.items()}
        for name, source in sources.items()
    }
    assert accepted == {
        "2wiki": {"2wikimultihopqa/b0": ("Haldia", "Hald", "Haldian")},
        "triviaqa": {"triviaqa/tc_1": ("Tarnby", "Tarnby Town", "tarnby town", "T-Town")},
        "popqa": {"popqa/7": ("pol", "politician")},
        "musique": {"musique/2hop__1": ("Ann", "A.")},
    }
    (only,) = open_source("bamboogle", data=tmp_path).questions.values()
    assert (only.question, only.golden_answers) == ("Who, then?", ("Ann",))
    assert open_source("2wiki", data=tmp_path).corpora["2wikimultihopqa"].passages[0].id == "3"


def test_an_own_file_in_every_ending_is_named_after_it(tmp_path: Path) -> None:
    for ending, text in ((".jsonl", json.dumps(ROW)), (".json", json.dumps([ROW]))):
        path = tmp_path / f"mine{ending}.gz"
        path.write_bytes(gzip.compress(text.encode()))
        env = gym.make("turngym/Search-v0", source=str(path), split="eval")
        assert env.unwrapped.task_ids() == ("mine/1",)  # type: ignore[attr-defined]
        env.close()
    for name in ("none.json", "none.jsonl.gz", "none.tsv"):
        with pytest.raises(TaskError, match="there is no question file"):
            gym.make("turngym/Search-v0", source=str(tmp_path / name))


def test_parquet_structs_numbers_and_columns_that_are_not_read(tmp_path: Path) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    def write(name: str, **columns: Any) -> Path:
        parquet.write_table(arrow.table(columns), tmp_path / name)
        return tmp_path / name

    questions = ["Where?", "Who?"]
    structs = write("a.parquet", question=questions, answer=[TRIVIAQA, {"value": "Ann", "aliases": None}], x=[1, 2])
    assert [question.golden_answers for question in read_questions(structs)] == [
        ("Tarnby", "Tarnby Town", "A (The)", "tarnby town", "old tarnby"),
        ("Ann",),
    ]
    squad = write("b.parquet", id=[1, 2], question=questions, answers=[{"text": ["a b"], "answer_start": [1]}] * 2)
    assert [(question.id, question.golden_answers) for question in read_questions(squad)] == [
        ("1", ("a b",)),
        ("2", ("a b",)),
    ]
    gaps = write("n.parquet", question=questions, id=[1, 2], golden_answers=["a", "b"], answer_aliases=[math.nan] * 2)
    assert [question.golden_answers for question in read_questions(gaps)] == [("a",), ("b",)]
    years = write("c.parquet", question=questions, answer=arrow.array([1931, 1950], arrow.int64()))
    assert [question.golden_answers for question in read_questions(years)] == [("1931",), ("1950",)]
    for column, words in (
        (arrow.array([1931.0, None]), "row 1: answer is 1931.0"),
        (arrow.array([b"Ann", b"\xff"]), "row 1: answer is"),
        (arrow.array([True, False]), "row 1: answer is true"),
        (arrow.array([[["a"]], [["b"]]]), 'row 1: answer is [["a"]]'),
        (arrow.array([[("a", 1)], []], arrow.map_(arrow.string(), arrow.int64())), "row 1: answer is"),
        (arrow.array([0, 1], arrow.timestamp("s")), "row 1: answer is"),
        (arrow.array([0, 1], arrow.date32()), "row 1: answer is"),
        (arrow.array([0, 1], arrow.timestamp("s", tz="Mars/Olympus")), "d.parquet, column 'answer': "),
        (arrow.array(["Ann", None]), "row 2: the accepted answers are missing"),
    ):
        with pytest.raises(TaskError) as caught:
            read_questions(write("d.parquet", question=questions, answer=column))
        assert words in str(caught.value)
    with pytest.raises(TaskError, match=r"no column .*; it has \['y'\]"):
        read_questions(write("e.parquet", y=[1]))
    twice = arrow.Table.from_arrays([questions, questions, ["x", "y"]], names=["question", "question", "answer"])
    parquet.write_table(twice, tmp_path / "f.parquet")
    with pytest.raises(TaskError, match=r"f\.parquet: two columns have one name"):
        read_questions(tmp_path / "f.parquet")


def test_a_file_has_a_bounded_number_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_rows, "MOST_ROWS", 3)
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps({**ROW, "id": number}) + "\n" for number in range(4)), encoding="utf-8")
    with pytest.raises(TaskError, match="more than 3 rows"):
        read_questions(path)
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    many = arrow.table({"question": ["Who?"] * 4, "answer": ["Ann"] * 4})
    parquet.write_table(many, tmp_path / "q.parquet")
    with pytest.raises(TaskError, match=r"4 rows in .* are too many"):
        read_questions(tmp_path / "q.parquet")


def test_a_parquet_of_one_long_text_for_every_row_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    monkeypatch.setattr(parquet_rows, "UNPACKED", 1 << 22)
    monkeypatch.setattr(parquet_rows, "BATCH", 1 << 20)
    one = arrow.array(["Who " + "x" * 500_000])
    asked = arrow.DictionaryArray.from_arrays(arrow.array([0] * 500, arrow.int32()), one)
    table = arrow.table({"question": asked, "answer": ["Ann"] * 500})
    # without Arrow's own types, as other programs write it
    parquet.write_table(table, tmp_path / "q.parquet", store_schema=False)
    assert (tmp_path / "q.parquet").stat().st_size < 1 << 20
    pool = arrow.default_memory_pool()
    before = pool.max_memory()
    with pytest.raises(TaskError, match="rows have more than"):
        read_questions(tmp_path / "q.parquet")
    # a quarter of a gigabyte of text stands behind the file
    assert pool.max_memory() - before < 32 << 20
