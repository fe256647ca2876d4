"""The seven test sets on which Search-R1 and its successors report, as panels, from a user's own files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

from turngym.core.errors import TaskError
from turngym.core.files import add_files
from turngym.core.manifest import files_under
from turngym.core.whole_files import atomic_write
from turngym.envs.panels import Panel, panel_of_env, write_panel
from turngym.envs.search.env import SearchEnv
from turngym.envs.search.question_rows import read_questions
from turngym.envs.search.questions import Question
from turngym.envs.search.sources import SETS

OFFICIAL: Mapping[str, int] = {
    "nq": 3610,
    "triviaqa": 11313,
    "popqa": 14267,
    "hotpotqa": 7405,
    "2wikimultihopqa": 12576,
    "musique": 2417,
    "bamboogle": 125,
}
"""Data source -> questions in Search-R1's test file, 51,713 in all: the test sets of FlashRAG's collection, and the
development sets of HotpotQA, 2WikiMultiHopQA and MuSiQue, whose test answers are not public."""
RULES = {"split": "eval", "topk": 3, "max_turns": 5}
"""Four searches of three passages, and a turn that can only answer."""


def write_test_sets(files: Iterable[str | Path], out: str | Path) -> list[Panel]:
    """Writes a panel and its question file for every test set in `files`, into the folder `out`.

    The panels hold ids and hashes of question and answers. They are played with `data=out` and a retriever of yours.

    Args:
        files: Search-R1's `test.parquet`, or a file for each set, as FlashRAG has them (`nq/test.jsonl`, `nq.jsonl`).

    Raises:
        TaskError: a set has not the official number of questions, repeats an id, or there is none of these sets; or
            `out` has a file of such a name with other content.
    """
    questions_of: dict[str, list[Question]] = {}
    for file in files:
        path = Path(file)
        # FlashRAG names the folder after the set, and the file after the split
        named = path.parent.name if path.name.partition(".")[0] in ("test", "dev") else path.name.partition(".")[0]
        named = SETS.get(named, named)
        for question in read_questions(path, named if named in OFFICIAL else None, split="test"):
            if question.data_source in OFFICIAL:
                questions_of.setdefault(question.data_source, []).append(question)
    if not questions_of:
        raise TaskError(f"there is none of the test sets in these files; they are: {', '.join(OFFICIAL)}")
    for source, questions in questions_of.items():
        if len(questions) != OFFICIAL[source]:
            raise TaskError(
                f"{source} has {len(questions):,} questions in these files, Search-R1's test set has "
                f"{OFFICIAL[source]:,}: another split, or a part of it"
            )
        if len({question.id for question in questions}) != len(questions):
            raise TaskError(f"{source}: some questions share an id")
    folder, panels = Path(out), list[Panel]()
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=".turngym.", dir=folder) as scratch_name:
        scratch = Path(scratch_name)
        for name in (name for name, source in SETS.items() if source in questions_of):
            with atomic_write(scratch / f"{name}_questions.jsonl") as written:
                for question in questions_of[SETS[name]]:
                    answers = list(question.golden_answers)
                    row = {"id": question.id, "question": question.question, "golden_answers": answers}
                    row |= {"data_source": question.data_source, "split": "test"}
                    written.write(json.dumps(row, ensure_ascii=False) + "\n")
            panel = panel_of_env(
                f"search-{name}-test", SearchEnv.env_id, make_kwargs={"source": name, **RULES}, data=scratch
            )
            write_panel(panel, scratch)
            panels.append(panel)
        add_files(files_under(scratch), scratch, folder, TaskError)
    return panels
