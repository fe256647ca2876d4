"""Ways to make a packed result look better than it is, each by somebody who seals the file anew.

What a file states never fixes a task or a score, is never imported or asked, and is text on every page.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markdown
import msgspec
import pytest
from forged import forge

from turngym.agents import evaluate
from turngym.agents.evaluation.packed import check_result, pack_result, packed, play_again
from turngym.agents.evaluation.packed_file import PackedResult
from turngym.agents.evaluation.rules import deviations
from turngym.agents.evaluation.scores import EvaluationError, score
from turngym.agents.play_spec import PlaySpec
from turngym.agents.playing.scripted import ExpertAgent
from turngym.agents.resolve_play import ENVIRONMENT
from turngym.core.episode import Episode, Status
from turngym.core.errors import TurngymError
from turngym.core.resolve import merged
from turngym.core.spec import changed, read, to_table
from turngym.core.tables import markup, visible
from turngym.envs.base import ActingPlayer
from turngym.scripts.main import main
from turngym.scripts.result_table import grouped, read_folder

PANEL = "search-quickstart"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random actions lose some of ten episodes."""
    out = tmp_path_factory.mktemp("run")
    evaluate(PANEL, "expert", noise=0.5, samples=2, limit=5, seed=3, workers=0, out=out, progress=False)
    return out


@pytest.fixture(scope="module")
def result(run: Path) -> PackedResult:
    made = packed(run)
    assert {one.success for one in made.episodes} == {True, False}
    return made


Change = Callable[[PackedResult], PackedResult]


def setting(path: str, value: Any) -> Change:
    """The setting at a dotted path becomes `value`, valid or not."""
    return lambda result: replace(result, spec=put(result.spec, path.split("."), value))


def put(value: Any, names: list[str], new: Any) -> Any:
    first, *rest = names
    inner = put(getattr(value, first), rest, new) if rest else new
    # not `changed`: a stranger's file may say anything
    return msgspec.structs.replace(value, **{first: inner})


def make(**changes: Any) -> Change:
    """Other arguments of gym.make."""

    def done(result: PackedResult) -> PackedResult:
        for name, value in changes.items():
            own = name in ENVIRONMENT
            kwargs = {**result.spec.play.env_kwargs, name: value}
            result = setting(*((f"play.env.{name}", value) if own else ("play.env_kwargs", kwargs)))(result)
        return result

    return done


def each(change: Callable[[Episode], Episode]) -> Change:
    """Every episode changed, with the table that is then theirs."""

    def done(result: PackedResult) -> PackedResult:
        episodes = tuple(map(change, result.episodes))
        return replace(
            result, episodes=episodes, scores=json.loads(json.dumps(score(episodes, result.spec.play).to_json()))
        )

    return done


def loss_as_error(one: Episode) -> Episode:
    """A loss that is called a failure of the environment does not count in the mean of the others."""
    if one.success:
        return one
    return replace(one, status=Status.ERROR_ENV, turns=(), episode_return=0.0, score=0.0, meta={}, final_observation="")


def goes_on_after_the_break(one: Episode) -> Episode:
    turns = (replace(one.turns[0], excluded="broken off"), *one.turns[1:])
    return replace(one, status=Status.TRUNCATED_TOKENS, turns=turns)


def broken_off_but_valid(one: Episode) -> Episode:
    last = replace(one.turns[-1], excluded="broken off")
    return replace(one, status=Status.TRUNCATED_TOKENS, turns=(*one.turns[:-1], last))


CHEATS: Mapping[str, tuple[Change, str]] = {
    "another reward": (make(reward="sub_em"), 'settings: reward is "sub_em", not "em": what scores comes from'),
    "formats that pay": (make(format_scores=[1.0, 1.0, 1.0]), "settings: format_scores is"),
    "a class of one's own": (make(env_class="this:s"), "settings: env_class is"),
    "an address": (make(retriever="http://127.0.0.1:1/admin"), "settings: retriever is"),
    "a reranker": (make(rerank="this:s"), "settings: rerank is"),
    "easier questions": (make(config="loops"), "settings: config is"),
    "the training split": (make(split="train"), "settings: split is"),
    "a corpus of answers": (make(corpus="answers.jsonl"), "settings: corpus is"),
    "a choice that is no plain value": (make(topk={"a": 1}), "settings: topk.a is"),
    "an argument that nobody knows": (make(cheat=True), "settings: cheat is"),
    "goals that were met": (each(lambda one: replace(one, meta={**one.meta, "goal_rate": 1.0})), "goal_rate is 1.0"),
    "one world instead of many": (
        each(lambda one: replace(one, task=replace(one.task, cluster="only"))),
        "cluster is 'only' in the file",
    ),
    "progress that was made": (
        each(lambda one: replace(one, turns=(replace(one.turns[0], progress=0.5), *one.turns[1:]))),
        "progress is 0.5 in the file",
    ),
    "responses that were read strictly": (
        each(lambda one: replace(one, meta={**one.meta, "read_leniently": 1})),
        "read_leniently is 1 in the file, 0 when",
    ),
    "turns after the end": (each(goes_on_after_the_break), "an answer that was broken off is the last one"),
    "a broken answer that pays": (each(broken_off_but_valid), "an answer that was broken off is the last one"),
}


@pytest.mark.parametrize("kind", CHEATS)
def test_a_cheat_is_a_difference(kind: str, result: PackedResult, tmp_path: Path) -> None:
    change, said = CHEATS[kind]
    path = change(result).write(tmp_path / "a.result.xz")
    found = check_result(path)
    assert [line for line in found if said in line], found
    assert main(["result", "check", str(path)]) == 1


REFUSED = {
    "tasks left out at the end": ("limit", setting("play.tasks.sampling.limit", -95)),
    "no task": ("limit", setting("play.tasks.sampling.limit", 0)),
    "no sample": ("samples", setting("play.samples", 0)),
    "no turn": ("max_turns", setting("play.env.max_turns", 0)),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_counts_are_counts(kind: str, result: PackedResult, tmp_path: Path) -> None:
    name, change = REFUSED[kind]
    path = forge(change(result), tmp_path / "a.result.xz")
    with pytest.raises(EvaluationError, match=rf"{name} is -?\d+; valid: "):
        check_result(path)


def test_a_file_without_a_seal_is_none(result: PackedResult, tmp_path: Path) -> None:
    class Unsealed(PackedResult):
        def lines(self) -> list[str]:
            head, *rows = PackedResult.lines(self)
            return [json.dumps({**json.loads(head), "sha256": ""}), *rows]

    own = {name: getattr(result, name) for name in PackedResult.__dataclass_fields__}
    with pytest.raises(EvaluationError, match="sha256"):
        check_result(forge(Unsealed(**own), tmp_path / "a.result.xz"))


@pytest.mark.parametrize("name", ["this.x:y", "this:s", "../../secret", "/etc/hosts.json", "own-panel-v1"])
def test_a_panel_that_a_file_names_comes_with_turngym(name: str, result: PackedResult, tmp_path: Path) -> None:
    path = setting("play.tasks.panel", name)(result).write(tmp_path / "a.result.xz")
    with pytest.raises(TurngymError, match="does not come with turngym"):
        check_result(path)
    with pytest.raises(TurngymError, match="does not come with turngym"):
        play_again(setting("play.tasks.panel", name)(result), "expert", workers=0, progress=False)


def test_what_a_file_may_not_name_is_named_by_who_checks(result: PackedResult, tmp_path: Path) -> None:
    path = make(retriever="http://127.0.0.1:1/admin")(result).write(tmp_path / "a.result.xz")
    # None: the world's own, with which it was played
    assert check_result(path, env_kwargs={"retriever": None}) == []
    assert play_again(make(env_class="this:s")(result), "expert", workers=0, progress=False, noise=0.5) == []


def test_a_loss_that_is_called_an_error_is_lost(
    result: PackedResult, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cheat = each(loss_as_error)(result)
    assert cheat.scores["overall"]["avg"]["mean"] == 1.0
    path = cheat.write(tmp_path / "a.result.xz")
    ((group,),) = [grouped(read_folder(tmp_path))]
    (counted,) = group.results.values()
    assert counted.scores["overall"]["avg"]["mean"] == result.scores["overall"]["avg"]["mean"] < 1
    lost = sum(not one.success for one in result.episodes)
    header, rows = group.table()
    assert dict(zip(header, rows[0], strict=True))["errors"] == str(lost)
    main(["result", "check", str(path)])
    assert f"{lost} episodes ended in an error and count as lost in tables" in capsys.readouterr().out


def test_a_table_shows_the_numbers_of_the_episodes(result: PackedResult, tmp_path: Path) -> None:
    scores = json.loads(json.dumps(result.scores))
    scores["overall"]["avg"]["mean"] = 1.0
    replace(result, scores=scores).write(tmp_path / "a.result.xz")
    with pytest.raises(TurngymError, match=r"a\.result\.xz .*overall\.avg\.mean is 1\.0"):
        read_folder(tmp_path)


def test_another_game_has_a_table_of_its_own(result: PackedResult) -> None:
    others = {
        "honest": result,
        "reward": make(reward="sub_em")(result),
        "panel": setting("play.tasks.sha256", "0" * 64)(result),
        "told": make(topk=3, max_turns=20)(result),
    }
    found = {group.title: list(group.results) for group in grouped(others)}
    assert found == {
        f"{PANEL}-v1": ["honest", "told"],
        f'{PANEL}-v1, reward is "sub_em", not "em"': ["reward"],
        f"{PANEL}-v1, a panel that does not come with turngym, 000000000000": ["panel"],
    }
    header, rows = next(group for group in grouped(others) if group.title == f"{PANEL}-v1").table()
    assert {row[0]: row[header.index("otherwise than the panel")] for row in rows} == {
        "honest": "5 of 100 tasks, over all categories",
        "told": "5 of 100 tasks, over all categories; max_turns is 20, not 8; topk is 3, not 1",
    }


def test_who_claims_a_preset_played_as_it_says(result: PackedResult) -> None:
    from turngym.agents.presets import find_preset

    preset = find_preset("search-r1", "turngym/Search-v0")
    assert preset is not None
    play = read(PlaySpec, merged([to_table(result.spec.play), preset.table["play"]]), "a test")
    as_it_says = changed(result.spec, play=play)
    played = setting("preset", "search-r1")(replace(result, spec=as_it_says))
    assert deviations(played.spec) == ([], ["5 of 100 tasks, over all categories"])
    claimed = deviations(setting("preset", "search-r1")(result).spec)[1]
    assert {"max_turns is 8, not 5", "topk is 1, not 3"} <= set(claimed)


def cheat(env: Any, options: Any) -> ExpertAgent:
    """An agent of another package, which calls itself a model."""
    return ExpertAgent(expert=lambda guard: ActingPlayer(lambda: "<answer>x</answer>"), name="model our-7b")


def test_a_player_that_calls_itself_a_model_is_known_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    given: dict[str, Any] = {"samples": 1, "limit": 2, "workers": 0, "progress": False}
    for name, agent in {"named": "test_cheats:cheat", "object": cheat(None, None)}.items():
        evaluate(PANEL, agent, out=tmp_path / name, **given)
        pack_result(tmp_path / name, tmp_path / "packed" / f"{name}.result.xz")
    header, rows = grouped(read_folder(tmp_path / "packed"))[0].table()
    place = "turngym.agents.playing.scripted:ExpertAgent"
    assert {row[0]: row[header.index("played by (as stated)")] for row in rows} == {
        "named": "model our-7b (no fingerprint, opened as test_cheats:cheat)",
        "object": f"model our-7b (no fingerprint, opened as {place})",
    }


# --- Texts of a file on pages

TEXTS = {
    "a picture": '<img src=x onerror="document.title=1">',
    "a script": "</script><script>alert(1)</script>",
    "a link": "[free](javascript:alert(1))",
    "a picture in Markdown": "![x](http://127.0.0.1/x)",
    "another row": "me | 100.0 |\n| best | 100.0",
    "a heading": "me\n\n# Best",
    "an attribute": "me {: onmouseover=alert(1) }",
    "code": "`me` <!-- ",
    "an entity": "&lt;script&gt;",
    "a backslash before a bar": "me \\| 100.0 \\",
    "letters from right to left": "me \u202e0.001",
    "a terminal's code": "\x1b]0;x\x07\x1b[2J",
    "marks of the page": "__DATA__ __BODY__ __TITLE__",
}


class Seen(HTMLParser):
    """Tags with attributes, and the cells' texts, of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags += [tag, *(name for name, _ in attrs)]
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.cells:
            self.cells[-1] += data


Pages = tuple[Seen, Seen]


def named(where: str, text: str) -> Change:
    """A text of the file at one of its places."""
    if where == "version":
        return lambda one: replace(one, versions={"turngym": text})
    if where in ("agent", "date"):
        return lambda one: replace(one, **{where: text})
    return setting(where, text)


def plain(result: PackedResult) -> PackedResult:
    return named("play.env.tool_name", "me")(named("preset", "me")(named("agent", "me")(result)))


def pages_of(result: PackedResult, folder: Path) -> Pages:
    """The Markdown and the HTML of a table with this result alone."""
    result.write(folder / "a.result.xz")
    assert main(["result", "table", str(folder), "--out", str(folder / "out")]) == 0
    written = {path.suffix: path.read_text() for path in (folder / "out").iterdir()}
    assert len(list(csv.reader(written[".csv"].splitlines()))) == 2
    read = markdown.markdown(written[".md"], extensions=["tables", "attr_list", "fenced_code"])
    return Seen(read), Seen(written[".html"])


@pytest.fixture(scope="module")
def plain_pages(result: PackedResult, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return pages_of(plain(result), tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_of_a_file_is_text_on_every_page(
    kind: str, result: PackedResult, plain_pages: Pages, tmp_path: Path
) -> None:
    text, evil = TEXTS[kind], plain(result)
    for where in ("agent", "preset", "date", "version", "play.env.tool_name"):
        evil = named(where, text)(evil)
    for harmless, found in zip(plain_pages, pages_of(evil, tmp_path), strict=True):
        assert found.tags == harmless.tags
        # as it was written, in a cell or in the title of a group
        known = {cell.strip() for cell in harmless.cells}
        assert [cell for cell in found.cells if visible(text).strip() in cell and cell.strip() not in known]


def test_markup_shows_what_is_written() -> None:
    for text in TEXTS.values():
        assert markup(text, "html").isprintable()
        assert "\n" not in markup(text, "markdown")
    assert markup("12.3 [10.0, 14.0] *", "markdown") == "12.3 [10.0, 14.0] *"
    assert markup("step_000048", "markdown") == "step_000048"


def test_no_field_is_a_formula(result: PackedResult, tmp_path: Path) -> None:
    named("agent", '=HYPERLINK("http://127.0.0.1/"&A1)')(result).write(tmp_path / "a.result.xz")
    assert main(["result", "table", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "results.csv").open() as file:
        (row,) = csv.DictReader(file)
    assert row["agent"].startswith("'=HYPERLINK")
    assert float(row["success"]) == result.scores["overall"]["avg"]["mean"]
