"""Where questions come from: files of both published forms, public sets, splits that share nothing."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import search_toy as toy

from turngym.core.errors import TaskError
from turngym.envs.panels import load_panel, verify_panel
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.questions import Question, assert_disjoint
from turngym.envs.search.reward import normalize
from turngym.envs.search.sources import PROMPT, half, open_source, prompt_rows, read_questions, write_prompts
from turngym.envs.testing import expect
from turngym.retrieval.index import BuildPlan, build_index


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_flashrag_lines(tmp_path: Path) -> None:
    path = write(
        tmp_path / "nq.jsonl",
        {"id": "dev_0", "question": "who?", "golden_answers": ["Ann", "A."]},
        {"id": 7, "question": "what", "answer": "a stone", "metadata": {"x": 1}},
    )
    first, second = read_questions(path)
    assert (first.task_id, first.golden_answers, first.split) == ("nq/dev_0", ("Ann", "A."), "eval")
    assert (second.task_id, second.golden_answers, second.gold_ids) == ("nq/7", ("a stone",), ())


def test_search_r1_rows_without_a_question_column(tmp_path: Path) -> None:
    row = {
        "data_source": "searchR1_nq",
        "prompt": [{"role": "user", "content": "Answer. <answer> Beijing </answer>. Question: who sings?\n"}],
        "ability": "fact-reasoning",
        "reward_model": {"style": "rule", "ground_truth": {"target": ["Ann"]}},
        "extra_info": {"split": "train", "index": 3},
    }
    (question,) = read_questions(write(tmp_path / "x.jsonl", row))
    assert question == Question(
        id="train_3", question="who sings?", golden_answers=("Ann",), data_source="nq", split="train"
    )


def test_prompts_are_written_as_search_r1_writes_them_and_read_back(tmp_path: Path) -> None:
    import pyarrow.parquet as parquet

    questions = read_questions(toy.write_toy(tmp_path)["source"])
    path = tmp_path / "train.parquet"
    assert write_prompts(questions, path) == 4
    assert read_questions(path) == questions
    rows = parquet.read_table(path).to_pylist()
    assert rows[1]["prompt"] == [
        {"role": "user", "content": PROMPT.format(question="which country has its capital where Ines Maro was born?")}
    ]
    assert rows[1]["reward_model"] == {"style": "rule", "ground_truth": {"target": ["Haldia"]}}
    assert (rows[1]["ability"], rows[1]["extra_info"]) == ("fact-reasoning", {"split": "eval", "index": 1})
    with pytest.raises(TaskError, match=r"has no \{question\}"):
        list(prompt_rows(questions, "Answer this."))


def test_rows_without_ids_are_named_by_their_content(tmp_path: Path) -> None:
    rows = [{"id": "None", "question": name, "golden_answers": ["x"]} for name in ("one", "two", "one")]
    there = [question.id for question in read_questions(write(tmp_path / "a.jsonl", *rows))]
    back = [question.id for question in read_questions(write(tmp_path / "b.jsonl", *reversed(rows)))]
    assert there[2] == f"{there[0]}-2"
    assert sorted(there) == sorted(back)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([], "no questions in it"),
        ([3], "row 1: a row must be an object"),
        ([{"question": "q", "golden_answers": []}], "row 1: the accepted answers are"),
        ([{"id": 1, "question": q, "golden_answers": ["x"]} for q in "ab"], "'bad/1' is there twice"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, rows: list[Any], text: str) -> None:
    with pytest.raises(TaskError, match=text):
        read_questions(write(tmp_path / "bad.jsonl", *rows))


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="no question file"):
        read_questions(tmp_path / "none.jsonl")
    (tmp_path / "bytes.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(TaskError, match=r"bytes\.jsonl, line 1: byte 0xff at column 15"):
        read_questions(tmp_path / "bytes.jsonl")
    (tmp_path / "fake.parquet").write_bytes(b"PAR0")
    with pytest.raises(TaskError, match="cannot be read as parquet"):
        read_questions(tmp_path / "fake.parquet")


def test_splits_of_a_file(tmp_path: Path) -> None:
    def rows(*names: tuple[str, str]) -> list[dict[str, Any]]:
        return [
            {"id": place, "question": text, "golden_answers": ["x"], "extra_info": {"split": split}}
            for place, (text, split) in enumerate(names)
        ]

    path = write(tmp_path / "q.jsonl", *rows(("one", "train"), ("two", "test")))
    assert [len(open_source(str(path), split=split).questions) for split in (None, "train", "test")] == [2, 1, 1]
    for train in ("train", "Train", "training"):
        path = write(tmp_path / "twins.jsonl", *rows(("The one!", train), ("one?", "test")))
        with pytest.raises(TaskError, match="also training questions: twins/1 "):
            open_source(str(path))


def test_gold_passages_that_are_not_in_the_corpus_are_refused(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus.jsonl", {"id": "p1", "title": "Mirovia", "text": "Its capital is Orlen."})
    row = {"id": "q1", "question": "What is the capital?", "answer": "Orlen"}
    open_source(str(write(tmp_path / "mine.jsonl", {**row, "gold_ids": ["p1"]})), corpus=corpus)
    path = write(tmp_path / "mine.jsonl", {**row, "gold_ids": ["p1", "p2"]})
    with pytest.raises(TaskError, match="gold passage 'p2' of question 'q1'"):
        open_source(str(path), corpus=corpus)


def test_questions_that_are_held_out_may_not_be_trained_on(tmp_path: Path) -> None:
    files = toy.write_toy(tmp_path)
    other = write(tmp_path / "panel.jsonl", {"id": 9, "question": "How many live there?", "golden_answers": ["x"]})
    SearchEnv(**files, held_out=[str(other)]).close()
    twin = {"id": 9, "question": "how many people live in tarnby", "golden_answers": ["x"]}
    other = write(tmp_path / "panel2.jsonl", twin)
    with pytest.raises(TaskError, match=r"panel2/9 \(in training as popqa/d\)"):
        SearchEnv(**files, held_out=[str(other)])


def test_disjointness_is_by_id_and_by_words() -> None:
    one = Question(id="1", question="Who sang it?", golden_answers=("x",), data_source="nq")
    assert_disjoint([one], [replace(one, id="2", question="Who sang this?")])
    for same in (replace(one, question="else"), replace(one, id="2", question="who sang   it")):
        with pytest.raises(TaskError, match="1 evaluation questions"):
            assert_disjoint([one], [same])
    assert normalize("The  Who's song, a-ha!") == "whos song aha"


def test_what_a_task_is() -> None:
    one = Question(id="1", question="q", golden_answers=("x",), data_source="nq", gold_ids=("3",))
    assert one.sha256("c") == replace(one, hops=("h",), split="train").sha256("c")
    changed = [replace(one, question="p"), replace(one, golden_answers=("x", "y")), replace(one, gold_ids=())]
    hashes = [one.sha256("c"), one.sha256("d"), one.sha256(None), *(other.sha256("c") for other in changed)]
    assert len(set(hashes)) == 6


def test_public_sets(search_data: Path) -> None:
    source = open_source("mixture", data=search_data)
    sizes: dict[str, int] = {}
    for question in source.questions.values():
        sizes[question.data_source] = sizes.get(question.data_source, 0) + 1
    assert sizes == {"2wikimultihopqa": 164, "hotpotqa": 397, "popqa": 1000, "nq": 3610}
    assert {name: len(corpus.passages) for name, corpus in source.corpora.items()} == {
        "2wikimultihopqa": 7005,
        "hotpotqa": 3908,
    }
    first = source.questions["2wikimultihopqa/b088d3ca08e211ebbda4ac1f6bf848b6"]
    assert first.hops[:2] == ("Forbidden Ground director", "Free Guy director")
    assert first.gold_ids == ("0", "3", "6", "7")
    train, held = (open_source("mixture", data=search_data, split=split).questions for split in ("train", "eval"))
    assert len(train) + len(held) == 5171
    assert not set(train) & set(held)
    assert {half(question.question) for question in held.values()} == {"eval"}
    assert open_source("hotpotqa", data=search_data).corpora["hotpotqa"].sha256 == source.corpora["hotpotqa"].sha256


def test_missing_data_are_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TURNGYM_SEARCH_DATA", raising=False)
    for name, options, text in (
        ("hotpotqa", {}, "data=..., or as $TURNGYM_SEARCH_DATA"),
        ("musique", {"data": tmp_path}, "put musique_questions.jsonl, musique_questions.parquet there"),
        ("nq", {"data": tmp_path / "none"}, "does not exist"),
        ("nq", {"data": tmp_path, "corpus": "x.jsonl"}, "has its own corpora"),
        ("nq", {"data": tmp_path, "split": "evl"}, "Did you mean 'eval'"),
    ):
        assert text in expect(TaskError, lambda name=name, options=options: open_source(name, **options))


@pytest.mark.parametrize(("name", "size"), [("search-multihop-v1", 274), ("search-mixture-v1", 314)])
def test_panels_of_public_questions(search_data: Path, name: str, size: int) -> None:
    panel = load_panel(name)
    env = panel.make_env(data=str(search_data))
    assert verify_panel(panel, env) == []
    assert len(panel.tasks) == size
    train = panel.make_env(data=str(search_data), split="train").unwrapped
    assert isinstance(train, SearchEnv)
    assert not set(panel.task_ids) & set(train.task_ids())
    questions = open_source("mixture", data=search_data).questions
    held = [questions[task_id] for task_id in panel.task_ids]
    with pytest.raises(TaskError, match=f"{size} evaluation questions are also training"):
        assert_disjoint(questions.values(), held)


def test_a_panel_notices_another_corpus(search_data: Path, tmp_path: Path) -> None:
    for name in ("hotpotqa_questions.jsonl", "2wiki_questions.jsonl", "2wiki_corpus.jsonl"):
        (tmp_path / name).symlink_to(search_data / name)
    rows = (search_data / "hotpotqa_corpus.jsonl").read_text(encoding="utf-8").replace("Toto", "Tutu", 1)
    (tmp_path / "hotpotqa_corpus.jsonl").write_text(rows, encoding="utf-8")
    panel = load_panel("search-multihop-v1")
    problems = verify_panel(panel, panel.make_env(data=str(tmp_path)))
    assert len(problems) == 200
    assert problems[0].startswith("hotpotqa/")


def test_named_sets_keep_to_the_split_that_their_file_names(tmp_path: Path) -> None:
    rows = [
        {"id": f"{split}_{number}", "question": f"who is {split} {number}?", "golden_answers": ["Ann"], "split": split}
        for split in ("train", "dev", "test")
        for number in range(12)
    ]
    write(tmp_path / "musique.jsonl", *rows)
    sides = {side: open_source("musique", split=side, data=tmp_path).questions for side in ("train", "eval", "all")}
    assert [len(sides[side]) for side in ("train", "eval", "all")] == [12, 24, 36]
    assert {task_id.split("/")[1].split("_")[0] for task_id in sides["train"]} == {"train"}
    assert {question.split for question in sides["eval"].values()} == {"eval"}
    # by hash some of the training rows would have been for evaluation, so that this test can fail
    assert {half(str(row["question"])) for row in rows[:12]} == {"train", "eval"}


def test_a_named_set_s_training_split_in_any_case_is_never_for_evaluation(tmp_path: Path) -> None:
    row = {"golden_answers": ["Ann"]}
    names = ("Train", "TRAIN", "training", "Test")
    rows = [{**row, "id": name, "question": f"who is {name}?", "split": name} for name in names]
    write(tmp_path / "musique.jsonl", *rows)
    assert set(open_source("musique", split="eval", data=tmp_path).questions) == {"musique/Test"}


def test_rows_of_another_set_in_the_file_of_a_named_one_are_refused(tmp_path: Path) -> None:
    row = {"id": "test_0", "golden_answers": ["Ann"]}
    nq, hotpot = (
        {**row, "question": "who?", "data_source": "nq"},
        {**row, "question": "what?", "data_source": "hotpotqa"},
    )
    path = write(tmp_path / "nq.jsonl", nq, hotpot)
    with pytest.raises(TaskError, match=r"nq\.jsonl: .* 'hotpotqa'; .*'nq'"):
        open_source("nq", data=tmp_path)
    # by its path, it holds both
    assert set(open_source(str(path)).questions) == {"nq/test_0", "hotpotqa/test_0"}
    # a set's own names are one source, so that an id stays unique
    write(
        tmp_path / "2wiki.jsonl", {**nq, "data_source": "searchR1_2wiki"}, {**hotpot, "data_source": "2WikiMultihopQA"}
    )
    with pytest.raises(TaskError, match="'2wikimultihopqa/test_0' is there twice"):
        open_source("2wiki", data=tmp_path)


def test_a_question_in_both_splits_of_a_named_set_is_an_error(tmp_path: Path) -> None:
    row = {"question": "Who wrote it?", "golden_answers": ["Ann"]}
    write(tmp_path / "musique.jsonl", {**row, "id": "a", "split": "train"}, {**row, "id": "b", "split": "dev"})
    with pytest.raises(TaskError, match="musique/b"):
        open_source("musique", data=tmp_path)


def test_what_was_edited_is_read_anew(tmp_path: Path) -> None:
    """The same name and the same size, of every file that is read, in one process."""

    def corpus(town: str) -> None:
        row = {"id": "p1", "title": "Mirovia", "text": f"The capital of Mirovia is {town}."}
        for name in ("corpus.jsonl", "musique_corpus.jsonl"):
            write(tmp_path / name, row)

    def questions(answer: str) -> None:
        row = {"id": "q1", "question": "What is the capital?", "answer": answer, "gold_ids": ["p1"], "answer_id": "Q1"}
        for name in ("mine.jsonl", "musique.jsonl"):
            write(tmp_path / name, row)

    def aliases(name: str) -> None:
        write(tmp_path / "id_aliases.json", {"Q_id": "Q1", "aliases": [name]})

    def played(**options: Any) -> tuple[tuple[str, ...], str, str]:
        env = SearchEnv(**options, doc_tokens=None)
        env.reset(options={"task": env.task_ids()[0]})
        found = env.question.golden_answers, env.task.sha256, env.step("<search>capital of Mirovia</search>")[0]
        env.close()
        return found

    places = (
        {"source": str(tmp_path / "mine.jsonl"), "corpus": str(tmp_path / "corpus.jsonl")},
        {"source": "musique", "data": tmp_path, "split": "all"},
        {"source": str(tmp_path / "mine.jsonl"), "retriever": f"bm25:{tmp_path / 'corpus.jsonl'}"},
    )
    corpus("Orlen"), questions("Orlen"), aliases("O-Town")
    before = [played(**options) for options in places]
    assert [played(**options) for options in places] == before
    for answers, _, text in before:
        assert answers == ("Orlen", "O-Town")
        assert "Orlen" in text
    corpus("Tarnb")
    assert all("Tarnb" in played(**options)[2] for options in places)
    assert [played(**options)[1] == old[1] for options, old in zip(places, before, strict=True)] == [False, False, True]
    questions("Tarnb"), aliases("T-Town")
    assert [played(**options)[0] for options in places] == [("Tarnb", "T-Town")] * 3


def test_an_index_that_was_built_again_is_opened_anew(tmp_path: Path) -> None:
    questions = write(tmp_path / "mine.jsonl", {"id": 1, "question": "What is the capital?", "answer": "x1"})
    texts = []
    for town in ("Orlen", "Tarnb"):
        write(tmp_path / "corpus.jsonl", {"id": "p1", "title": "Mirovia", "text": f"The capital is {town}."})
        shutil.rmtree(tmp_path / "index", ignore_errors=True)
        build_index(BuildPlan(corpus=tmp_path / "corpus.jsonl", out=tmp_path / "index"))
        env = SearchEnv(source=str(questions), retriever=str(tmp_path / "index"))
        env.reset()
        texts.append(env.step("<search>capital</search>")[0])
        env.close()
    assert "Orlen" in texts[0]
    assert "Tarnb" in texts[1]
