"""Every page is true: its Python runs in order, its commands are parsed by their verbs, its links lead somewhere.

A fenced block with a title (```toml title="run.toml") is a file: it is written into the page's temporary folder before
the page runs. A comment in the line above a block says why it is not run like the others:

- `<!-- not run: REASON -->`: it needs what no test has (a GPU, downloaded data, a server)
- `<!-- needs: MODULE -->`: run where that module is installed, else left out
- `<!-- run by: TEST -->`: another test runs it
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faults
import pytest
import words as word_counts

from turngym.agents.resolve_play import play_asked
from turngym.envs.panels import list_panels
from turngym.scripts import main as command
from turngym.scripts import options
from turngym.scripts.study.study_file import built_in

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UNRUN_AT_MOST = 6
"""Python blocks, of all pages, that no test runs."""

_FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_TITLE = re.compile(r'title="([^"]+)"')
_NOTE = re.compile(r"<!-- (not run|needs|run by): (.+?) -->\n$")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
_ASSIGNMENT = re.compile(r"[A-Z_]+=.*")

RUNNER = """
import json, sys
names = {"__name__": "__main__"}
for where, line, text in json.load(sys.stdin):
    exec(compile("\\n" * line + text, where, "exec"), names)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: `line` counts the lines of the page before its text."""

    page: str
    line: int
    language: str
    title: str | None
    kind: str | None
    """`not run`, `needs` or `run by`; None: run."""
    note: str
    text: str


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = []
    for match in _FENCE.finditer(text):
        title, note = _TITLE.search(match[2]), _NOTE.search(text[: match.start()])
        found.append(
            Block(
                page=name_of(page),
                line=text.count("\n", 0, match.start()) + 1,
                language=match[1],
                title=title[1] if title else None,
                kind=note[1] if note else None,
                note=note[2] if note else "",
                text=match[3],
            )
        )
    return found


def python_blocks(page: Path) -> list[Block]:
    return [block for block in blocks(page) if block.language == "python" and block.title is None]


def wanted(block: Block) -> bool:
    """Whether the block is run here."""
    if block.kind == "needs":
        return all(importlib.util.find_spec(name.strip()) is not None for name in block.note.split(","))
    return block.kind is None


def load_hooks() -> Any:
    spec = importlib.util.spec_from_file_location("docs_hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    return hooks


HOOKS = load_hooks()


def quick_only_the_readme(page: Path) -> Any:
    return pytest.param(page, id=name_of(page), marks=() if page.name == "README.md" else pytest.mark.long)


@pytest.mark.parametrize(
    "page",
    [
        quick_only_the_readme(page)
        for page in PAGES
        if python_blocks(page) and page.name not in HOOKS.NOTEBOOKS.values()  # those run as notebooks
    ],
)
def test_the_python_of_a_page_runs_in_order(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.title is not None:
            path = tmp_path / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
    chosen = [block for block in python_blocks(page) if wanted(block)]
    if not chosen:
        pytest.skip(f"{name_of(page)}: every block needs something that is not installed, or another test runs it")
    run_blocks([(block.page, block.line, block.text) for block in chosen], tmp_path)


def run_blocks(texts: Sequence[tuple[str, int, str]], folder: Path) -> None:
    """Runs (file, line, text) one after the other in one process."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(texts),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.long
@pytest.mark.parametrize("name", HOOKS.NOTEBOOKS)
def test_a_notebook_runs_from_its_first_cell_to_its_last(name: str, tmp_path: Path) -> None:
    HOOKS.write_notebooks(tmp_path)
    cells = json.loads((tmp_path / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = []
    for number, cell in enumerate(cells):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code":
            head, _, body = text.partition("\n")
            if head.startswith("%%writefile "):  # what IPython does with it
                text = f"open({head.split()[1]!r}, 'w').write({body!r})"
            texts.append((f"{name}.ipynb, cell {number}", 0, text))
    page = ROOT / "docs" / HOOKS.NOTEBOOKS[name]
    assert [text.strip() for _, _, text in texts if text.strip() in page.read_text(encoding="utf-8")]
    run_blocks(texts, tmp_path)


def test_cells_of_a_notebook() -> None:
    page = (
        '# A\n\n```python title="p/m.py"\nx = 1\n```\n\n<!-- not run: a b c -->\n```python\ny\n```\nb\n\n'
        "```bash\nls\n```\n```python\nz\n```\n"
    )
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in HOOKS.notebook(page)["cells"]]
    text = "<!-- not run: a b c -->\n```python\ny\n```\nb\n\n```bash\nls\n```"
    made = "import os\nos.makedirs('p', exist_ok=True)"
    assert cells == [
        ("markdown", "# A"),
        ("code", made),
        ("code", "%%writefile p/m.py\nx = 1"),
        ("markdown", text),
        ("code", "z"),
    ]


def test_llms_txt() -> None:
    pages = {
        "index.md": "# T\n\nIt is [a thing](x.md). More.",
        "b.md": "# B\n\n```sh\nx\n```\n\n`turngym` [is it?](x.md) so: all. Two.",
    }
    found = HOOKS.llms_text([{"T": "index.md"}, {"Use": [{"Bee": "b.md"}, {"API": "api/x.md"}]}], pages, "Sum.")
    assert found == (
        "# turngym\n\n> Sum.\n\n## T\n\n- [T](index.md): It is a thing.\n\n"
        "## Use\n\n- [Bee](b.md): `turngym` is it? so: all.\n"
    )


def test_only_few_blocks_are_run_by_no_test() -> None:
    unrun = [block for page in PAGES for block in python_blocks(page) if block.kind == "not run"]
    assert len(unrun) <= UNRUN_AT_MOST, [f"{block.page}, line {block.line}: {block.note}" for block in unrun]
    for block in unrun:
        assert len(block.note.split()) >= 3, f"{block.page}, line {block.line}: say why it is not run"


def test_a_block_that_another_test_runs_is_known_there() -> None:
    for page in PAGES:
        for block in python_blocks(page):
            if block.kind == "run by":
                assert block.page in (ROOT / block.note).read_text(encoding="utf-8"), f"{block.page}, {block.note}"


def commands(page: Path) -> Iterator[tuple[int, list[str]]]:
    """(line, words after `turngym`) of the commands in a page's shell blocks."""
    for block in blocks(page):
        if block.language == "bash":
            for offset, line in enumerate(block.text.replace("\\\n", " ").splitlines()):
                words = _turngym(shlex.split(line, comments=True))
                if words is not None:
                    yield block.line + 1 + offset, words


def _turngym(words: Sequence[str]) -> list[str] | None:
    words = list(words)
    while words and _ASSIGNMENT.fullmatch(words[0]):
        del words[0]
    for end in ("|", ">", "&", "&&", ";"):
        words = words[: words.index(end)] if end in words else words
    if words[:1] == ["turngym"]:
        return words[1:]
    if words[:2] == ["python3", "scripts/bootstrap.py"]:
        return words[2:] if words[2] == "quickstart" else None
    for place, word in enumerate(words[1:], start=1):
        if words[place - 1] == "-m" and word in ("turngym", "turngym.scripts.main"):
            return words[place + 1 :]
    return None


class Parsed(BaseException):
    """The options were understood; nothing else is to happen. Not an Exception, so that no verb catches it."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the verb's own option parser has against `words`; None if it takes them, and reads all of them."""

    def parsed(*_: Any, **__: Any) -> Any:
        raise Parsed

    doors = [("turngym.trainers.distributed", "open_ranks"), ("turngym.scripts.serve_proxy", "serve")]
    known = [(importlib.import_module(module), name) for module, name in doors]
    real = [getattr(module, name) for module, name in known]
    for module, name in known:
        monkeypatch.setattr(module, name, parsed)
    asked = options.Verb.asked

    def typed(verb: Any, argv: Sequence[str]) -> Any:
        found = asked(verb, argv)
        for where, table in found.layers if verb.spec is not None else ():
            play_asked(table, where)
        raise Parsed

    monkeypatch.setattr(options.Verb, "asked", typed)
    try:
        status = command.main(words)
    except Parsed:
        return None
    except SystemExit as end:
        return None if end.code in (0, None) else f"exit status {end.code}"
    finally:
        for (module, name), door in zip(known, real, strict=True):
            monkeypatch.setattr(module, name, door)
        monkeypatch.setattr(options.Verb, "asked", asked)
    return None if status == 0 else f"status {status}"


@pytest.mark.parametrize("page", [page for page in PAGES if any(commands(page))], ids=name_of)
def test_the_commands_of_a_page_are_parsed(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for block in blocks(page):
        if block.title is not None:
            (tmp_path / block.title).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    problems = [problem_of(words, monkeypatch, capsys, f"{name_of(page)}, line {n}") for n, words in commands(page)]
    assert not any(problems), "\n".join(problems)


def problem_of(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: str
) -> str:
    """Why the command that stands at `place` cannot be parsed; "" if it can."""
    write_missing_config(words)
    problem = parse(words, monkeypatch)
    said = capsys.readouterr()
    return "" if problem is None else f"{place}: turngym {shlex.join(words)}: {problem}\n{said.err}"


def examples() -> Iterator[tuple[str, list[str]]]:
    """(file, words after `turngym`) of the examples that the verbs' help shows."""
    for path in sorted((ROOT / "scripts").rglob("*.py")):
        for line in (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").splitlines():
            if line.startswith("    turngym "):
                yield name_of(path), shlex.split(line, comments=True)[1:]


def test_the_examples_of_a_help_are_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = []
    for number, (place, words) in enumerate(examples()):
        folder = tmp_path / str(number)
        folder.mkdir()
        monkeypatch.chdir(folder)
        problems.append(problem_of(words, monkeypatch, capsys, place))
    assert not any(problems), "\n".join(problems)
    assert len(problems) > 60


def test_panels_and_studies_that_commands_name_come_along() -> None:
    told = [(name_of(page), words) for page in PAGES for _, words in commands(page)]
    panels, studies = set(), set()
    for place, words in (*told, *examples()):
        panels |= {(words[at + 1], place) for at, word in enumerate(words[:-1]) if word == "--panel"}
        if words[0] == "panel" and words[1] in ("verify", "show", "export-prompts", "export-games"):
            panels |= {(word, place) for word in words[2:3] if not word.startswith("--")}
        if words[:2] == ["study", "run"]:
            studies.add((words[2], place))
    lost = [(name, place) for name, place in panels if not (name.endswith(".json") or ":" in name or comes_along(name))]
    assert not sorted(lost)
    assert len(panels) > 20
    known = built_in()
    assert not sorted((name, place) for name, place in studies if not (name.endswith(".toml") or name in known))
    assert len(studies) > 10


def comes_along(panel: str) -> bool:
    return any(panel in (name, name.rpartition("-v")[0]) for name in list_panels())


NEEDED = {"train": 'student = "STUDENT"\nteacher = "TEACHER"\n', "eval": 'panel = "alfworld-generated-eval"\n'}


def write_missing_config(words: Sequence[str]) -> None:
    """The configuration of an earlier run, as far as the options need it; examples name runs that do not exist here."""
    if "--config" in words and not (path := Path(words[words.index("--config") + 1])).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(NEEDED.get(words[0], ""), encoding="utf-8")


@pytest.mark.parametrize(
    "good",
    [
        ["eval", "--panel", "alfworld-quickstart", "--samples", "1"],
        ["train", "grpo", "--student", "S", "--out", "runs/a", "--grpo.n", "4"],
        ["trace", "print", "a.jsonl"],
    ],
)
def test_an_unknown_option_would_be_seen(good: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(good, monkeypatch) is None
    assert parse([*good, "--no-such-option", "1"], monkeypatch) is not None
    assert parse(["no-such-verb"], monkeypatch) is not None
    assert not list(tmp_path.iterdir()), "parsing did something"


SUBVERBS = {
    "panel": ("list", "show", "verify", "write", "export-prompts"),
    "trace": ("print", "filter", "parquet", "html"),
    "index": ("build", "inspect", "plan"),
    **{name: tuple(one.verbs) for name, one in command.VERBS.items() if isinstance(one, command.Group)},
    "data": ("get", "list", "where", "verify"),
    "endpoint": ("check",),
}
OF_OTHERS = {
    *("--no-deps", "--nproc-per-node", "--custom-generate-function-path", "--rollout-function-path"),
    *("--partial-rollout", "--enable-deterministic-inference", "--strict", "--config-settings", "--import-mode"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "--jinja", "--logprobs-mode", "--max-logprobs"),
    *("--enable-scale-out", "--enable-lora", "--enable-sleep-mode", "--enable-memory-saver"),
    *("--loo.n", "--loo.cap"),
    *("--no-push", "--epochs", "--env.player.max-turns"),
    *("--newest-torch",),
}
"""Options that pages name of other programs (pip, torchrun, slime, vLLM, Inspect, verifiers, ...) or of an example."""


def test_every_verb_explains_itself_and_options_in_the_text_exist(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from turngym.core.setting import settings_of
    from turngym.trainers.algorithm_spec import BUILT_IN
    from turngym.trainers.train_config import config_class, option_name

    monkeypatch.setenv("COLUMNS", "250")
    # what the help of every algorithm lists, without writing it
    classes = map(config_class, BUILT_IN)
    settings = {option_name(cls, path) for cls in classes for path in settings_of(cls)}
    calls = [[verb, sub] for verb in command.VERBS for sub in SUBVERBS.get(verb, ("",))]
    calls += [["train", "opd"], ["train", "opd", "--help-all"]]
    calls += [["eval", "--help-all"], ["rollout", "--help-all"]]
    text = ""
    for words in calls:
        status: Any = 0
        try:
            status = command.main([word for word in words if word] + ["--help"])
        except SystemExit as ended:
            status = ended.code
        said = capsys.readouterr().out
        assert (status, "usage" in said) == (0, True), words
        text += said
    with contextlib.suppress(SystemExit):
        faults.main(["--help"])
    known = set(re.findall(r"--[a-z][\w.-]*\w", text + capsys.readouterr().out)) | OF_OTHERS
    known |= {f"--{name.replace('_', '-')}" for name in settings}
    known |= {name.replace("--no-", "--") for name in known} | {name.replace("--", "--no-", 1) for name in known}
    lost = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for span in re.findall(r"`([^`\n]+)`", text):
            named = re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", span)
            lost += [f"{name_of(page)}: {name}" for name in named if not _known(name, known)]
    assert not sorted(set(lost))


def _known(name: str, known: set[str]) -> bool:
    """Whether it is an option, or a group of options (`--lora`); `--no-` may stand before the last part."""
    plain = name.replace(".no-", ".")
    # help shows the shortest end of a setting's path
    return (
        plain in known
        or f"--{plain.rpartition('.')[2]}" in known
        or any(other.startswith(plain + ".") for other in known)
    )


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files(page: Path) -> None:
    lost = [link for link in _LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    made = {"contributing.md", "changelog.md", "index.md", "index.html"}  # pages of the site that docs/hooks.py makes
    assert not [link for link in lost if link.rpartition("/")[2] not in made]


def test_the_pages_are_short() -> None:
    users, evidence, research = word_counts.totals()
    assert users <= 27_300, "cut before you add: python tests/support/words.py --pages"
    assert evidence <= 5_500
    assert research <= 11_000


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "research").glob("*.md")), ids=name_of)
def test_a_page_of_research_is_a_dated_answer_to_a_question(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    question, answer = text.find("**Question.** "), re.search(r"\*\*Answer, (?:[A-Z]\w+ .*)?20\d\d\.\*\* ", text)
    assert 0 < question < (answer.start() if answer else -1)
    assert "```bash\n" in text, "the command that measures it again"
    assert "## Limits\n" in text or "**Limits.** " in text
    longer = {"published_tables.md": 1_900, "intervals.md": 1_500}  # other people's numbers, and formulas
    assert word_counts.words(text) <= longer.get(page.name, 1_200)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 200


def test_links_of_the_root_become_those_of_the_site() -> None:
    assert HOOKS.page_text("[a](docs/a.md#b) [c](CHANGELOG.md) [d](https://x.org) [e.py](scripts/e.py)") == (
        "[a](a.md#b) [c](changelog.md) [d](https://x.org) `e.py`"
    )


def test_every_page_is_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert f" {name}\n" in nav, f"docs/{name} is missing in the nav of mkdocs.yml"
