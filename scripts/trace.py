"""Read recorded episodes: print, filter, verify, export to Parquet, view in a browser, or one HTML page of a few.

Examples:
    turngym trace print runs/a/eval.jsonl --outcome lost
    turngym trace view before=runs/a/eval.jsonl after=runs/b/eval.jsonl
    turngym trace records runs/live --turns
    turngym trace html runs/a/eval.jsonl --out lost.html --outcome lost --tokenizer runs/a/student
"""

from __future__ import annotations

import sys
import webbrowser
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

from turngym.agents.play_spec import EvalSpec, Listed, episodes_of
from turngym.agents.proxy.turn_records import RECORDS_FILE, iter_records, read_records
from turngym.agents.serving import DrainingServer, page_front
from turngym.core.episode import Episode, Status, Turn
from turngym.core.errors import TurngymError
from turngym.core.numbers import Count, Port
from turngym.core.plugins import need
from turngym.core.redaction import brief, excerpt
from turngym.core.setting import Positional
from turngym.core.spec import Spec, Unread, changed, needing, read, to_table
from turngym.core.task import Verdict
from turngym.core.trace import (
    TraceError,
    TraceProblem,
    digits_of,
    episode_to_json,
    has_checksum,
    header_line,
    is_header,
    iter_trace,
    read_specs,
    trace_errors,
)
from turngym.core.user_files import must_be_new, must_end, named_path
from turngym.core.whole_files import written_whole
from turngym.envs.spaces import printable
from turngym.scripts.options import run_verb
from turngym.scripts.report_data import name_of_run
from turngym.scripts.trace_pages import TraceIndex, create_app, index_trace, speaker, write_page
from turngym.scripts.trace_picture import Picture, picture
from turngym.scripts.trace_prompt import Prompts
from turngym.trainers.adapters.datasets import write_parquet, write_table

# `turngym trace records`: which turns of a proxy were trained on, and why the others were not.

OPEN, WAITS = "its session goes on", "waits for its judge or its step"


class Records(Spec):
    """Say of every turn that a proxy served whether it was trained on, at which step, or why it was left out."""

    folder: Positional[Path]
    """Folder of the proxy's run (its --out)."""
    turns: bool = False
    """Print a line per turn."""


@dataclass(slots=True)
class Fates:
    """Everything known about a main turn, by session key and turn index."""

    fate: dict[tuple[str, int], str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """Main turns of each session so far."""
    side: int = 0
    feedback: dict[tuple[str, int], int] = field(default_factory=dict)
    steps: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    _step_of: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, record: Mapping[str, Any]) -> None:
        kind = record["kind"]
        if kind == "turn" and not record["main"]:
            self.side += 1
        elif kind == "turn":
            key = record["session"]
            # an answer that was asked for again takes the place of the one before
            if not (record["retry"] and self.counts.get(key)):
                self.counts[key] = self.counts.get(key, 0) + 1
            self.fate[key, self.counts[key] - 1] = OPEN
        elif kind == "end":
            for turn in range(self.counts.get(record["session"], 0)):
                self.fate[record["session"], turn] = WAITS
        elif kind == "feedback":
            self.feedback[record["session"], record["turn"]] = record["score"]
        elif kind in ("trained", "unused"):
            self._used(record)
        elif kind == "resumed":
            # the checkpoint was older than these steps: what they learned is gone
            self.steps = {step: trained for step, trained in self.steps.items() if step <= record["step"]}
            for main_turn in [main_turn for main_turn, step in self._step_of.items() if step > record["step"]]:
                self.fate[main_turn] = WAITS
                del self._step_of[main_turn]

    def _used(self, record: Mapping[str, Any]) -> None:
        if record["kind"] == "trained":
            self.steps[record["step"]] = record
        for key in record["sessions"]:
            session = record["turns"][key]
            for turn in session["trained"] if record["kind"] == "trained" else ():
                self.fate[key, turn] = f"trained on at step {record['step']}"
                self._step_of[key, turn] = record["step"]
            for turn, why in session["left_out"].items():
                self.fate[key, int(turn)] = f"left out: {why}"
                self._step_of[key, int(turn)] = record["step"]


def records(command: Records) -> int:
    """Prints the report. Raises TurngymError if the folder has no records."""
    if not (command.folder / RECORDS_FILE).exists():
        raise TurngymError(
            f"{command.folder} has no {RECORDS_FILE}; name the folder that `turngym serve proxy` wrote to"
        )
    print("\n".join(lines(read_records(command.folder), turns=command.turns)))
    return 0


def lines(recorded: Iterable[Mapping[str, Any]], *, turns: bool) -> list[str]:
    """Reads the records in order and collects what happened to each turn."""
    fates, output = Fates(), []
    for record in recorded:
        fates.take(record)
    for (session, turn), fate in fates.fate.items() if turns else ():
        score = fates.feedback.get((session, turn))
        thumb = "" if score is None else f", thumb {'up' if score > 0 else 'down'}"
        output.append(f"session {session} turn {turn}: {fate}{thumb}")
    output += [_step_line(step, record) for step, record in sorted(fates.steps.items())]
    ends = Counter("trained on" if fate.startswith("trained on") else fate for fate in fates.fate.values())
    output.append(f"{len(fates.fate)} main turns of {len(fates.counts)} sessions, {fates.side} side turns")
    output += [f"{count:6} {fate}" for fate, count in ends.most_common()]
    if fates.feedback:
        up = sum(score > 0 for score in fates.feedback.values())
        output.append(f"{up:6} thumbs up, {len(fates.feedback) - up} down")
    return output


def _step_line(step: int, record: Mapping[str, Any]) -> str:
    trained = sum(len(session["trained"]) for session in record["turns"].values())
    text = f"step {step}: {trained} turns of {len(record['sessions'])} sessions"
    if "versions_behind_max" in record:
        text += f", at most {record['versions_behind_max']:g} updates behind"
    return text + (f" and {record['age_s_max']:.0f} s old" if "age_s_max" in record else "")


# Filters: the options with which the trace verbs choose episodes.


class Select(Spec):
    """Which episodes to take; all conditions must hold."""

    status: tuple[Status, ...] = ()
    """Only episodes that ended like this (repeat the option for several)."""
    outcome: Literal["any", "won", "lost", "error"] = "any"
    """Only episodes that solved their task, that did not, or that ended in an error and so say neither."""
    category: tuple[str, ...] = ()
    """Only tasks of this category, for example `heat` (repeat the option for several)."""
    task: str = ""
    """Only tasks whose id contains this text."""
    verdict: tuple[Verdict, ...] = ()
    """Only episodes with at least one turn judged like this (repeat the option for several)."""
    limit: Count | None = None
    """Stop after this many episodes."""

    def takes(self, episode: Episode) -> bool:
        """Whether `episode` meets every condition except the limit."""
        return (
            (not self.status or episode.status in self.status)
            and (self.outcome == "any" or episode.outcome == self.outcome)
            and (not self.category or episode.task.category in self.category)
            and self.task in episode.task.task_id
            and (not self.verdict or any(turn.verdict in self.verdict for turn in episode.turns))
        )


def selected(paths: Sequence[Path], select: Select) -> Iterator[tuple[Path, Episode]]:
    """The chosen episodes of the files in order, each with its file; damaged lines are reported on standard error.

    Raises TurngymError at once, before anything is written, for a file in which no line is an episode.
    """
    for path in paths:
        _check_trace(path)
    return _chosen(paths, select)


def _check_trace(path: Path) -> None:
    problems = list[TraceProblem]()
    for item in iter_trace(path):
        if isinstance(item, Episode):
            return
        problems.append(item)
    # a torn line alone is what a killed run leaves
    if not all(problem.torn for problem in problems):
        raise TraceError(f"{path} is no trace: none of its {len(problems)} lines is an episode ({problems[0]})")


def _chosen(paths: Sequence[Path], select: Select, *, say: bool = True) -> Iterator[tuple[Path, Episode]]:
    count = 0
    for path in paths:
        for item in iter_trace(path):
            if select.limit is not None and count >= select.limit:
                return
            if not isinstance(item, Episode):
                if say:
                    print(f"{path}: skipped {item}", file=sys.stderr)
            elif select.takes(item):
                count += 1
                yield path, item


# `turngym trace verify`: compares the checksum of every line.

SHOWN_LINES = 20


class Verify(Spec):
    """Read every line and compare its checksum; status 1 if any is damaged (a torn last line is not)."""

    files: Positional[tuple[Path, ...]]
    """Trace files (JSON lines), or the records.jsonl of a proxy."""


def verify(command: Verify) -> int:
    return max(_verify(path) for path in command.files)


def _verify(path: Path) -> int:
    if not path.is_file():
        raise TurngymError(f"there is no file {path}")
    items = iter_records(path.parent) if path.name == RECORDS_FILE else iter_trace(path)
    intact, torn, damaged = 0, 0, list[TraceProblem]()
    for item in items:
        if isinstance(item, TraceProblem) and item.torn:
            torn += 1
        elif isinstance(item, TraceProblem):
            damaged.append(item)
        else:
            intact += 1
    for problem in damaged[:SHOWN_LINES]:
        print(f"{path}: line {problem.line}: {problem.reason}", file=sys.stderr)
    if len(damaged) > SHOWN_LINES:
        print(f"{path}: and {len(damaged) - SHOWN_LINES} more", file=sys.stderr)
    # settings of a trace are lines, too
    damaged_lines, sealed = {problem.line for problem in damaged}, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            sealed += has_checksum(line)
            intact += is_header(line) and line.endswith(b"\n") and number not in damaged_lines
    unsealed = intact - sealed + len(damaged)
    notes = [f"{len(damaged)} damaged"] if damaged else []
    notes += ["the last line is torn"] if torn else []
    notes += [f"{unsealed} without a checksum"] if unsealed > 0 else []
    print(f"{path}: {intact} lines are whole" + "".join(f", {note}" for note in notes))
    return 1 if damaged else 0


# `turngym trace view`: a local page over an index of the files, which may be larger than memory.

HOST = "127.0.0.1"


class View(Spec):
    """Read episodes in the browser: a local server over an index of the files, which may be larger than memory."""

    files: Positional[tuple[str, ...]]
    """Trace files, PATH or NAME=PATH; two of them are shown side by side on one task."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, for prompts and tokens; by default that of the model that played."""
    port: Port = 8321
    """Port on this machine; 0 takes a free one. Only this machine can connect."""
    browser: bool = False
    """Open the page in a browser."""


def view(command: View) -> int:
    """Serve until Ctrl-C or SIGTERM."""
    runs = open_runs(command.files)
    app = create_app(runs, command.tokenizer)
    server = DrainingServer(page_front(app, threads=4), host=HOST, port=command.port)
    server.stop_on_signals()
    print(f"ready: {server.url}, {sum(map(len, runs.values())):,} episodes; Ctrl-C ends it", flush=True)
    if command.browser:
        webbrowser.open(server.url)
    server.run()
    return 0


def open_runs(files: tuple[str, ...]) -> dict[str, TraceIndex]:
    """An index of each file by name. Raises TurngymError for two of one name."""
    runs: dict[str, TraceIndex] = {}
    for spec in files:
        name, path = named_path(spec)
        name = name or name_of_run(path)
        if name in runs:
            raise TurngymError(f"two files are called {name!r}; tell them apart with NAME=PATH")
        runs[name] = index_trace(path, lambda count: print(f"{count:,} episodes indexed", file=sys.stderr))
        if runs[name].skipped:
            if not len(runs[name]):
                raise TurngymError(f"{path} is no trace: none of its {runs[name].skipped} lines is an episode")
            print(f"{path}: skipped {runs[name].skipped} lines that are no episodes", file=sys.stderr)
    return runs


Files = Positional[tuple[Path, ...]]


class Print(Spec):
    """Print a line per episode, or with --turns everything that was said."""

    files: Files
    """Trace files (JSON lines)."""
    select: Select = Select()
    turns: bool = False
    """Print every turn: observation, response, verdict, reward."""
    prompt: bool = False
    """Print before every response the whole prompt as the model read it: system message and memory included."""
    tokenizer: Path | None = None
    """Folder of the tokenizer, for prompts; by default that of the model that played."""
    width: Count = 2000
    """Longest text printed of one observation or response, in characters."""

    def unread(self) -> Unread:
        if not self.prompt:
            yield from needing("--prompt", "tokenizer")
        if not self.prompt and not self.turns:
            yield from needing("--turns or --prompt", "width")


class Filter(Spec):
    """Copy the chosen episodes into a new trace file, whose settings list the tasks that are left."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The new file; must not exist."""
    select: Select = Select()


class Parquet(Spec):
    """Write a Parquet file (needs `pip install 'turngym[parquet]'`)."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The Parquet file; must not exist."""
    select: Select = Select()
    rows: Literal["turns", "trajectories"] = "turns"
    """`turns`: one row per turn, to look at; `trajectories`: one per episode with token ids, mask and
    log-probabilities, to train on with other trainers."""


class Html(Spec):
    """Write one self-contained page for reading episodes turn by turn in a browser."""

    files: Files
    """Trace files (JSON lines)."""
    out: Path
    """The page; must not exist unless --overwrite is given."""
    select: Select = Select()
    tokenizer: Path | None = None
    """Folder of the tokenizer, for prompts and tokens; by default that of the model that played."""
    title: str = "Episodes"
    """Heading of the page."""
    overwrite: bool = False
    """Replace an existing page."""


def main(argv: Sequence[str]) -> int:
    """Run `turngym trace` with `argv` (without the verb itself)."""
    verbs: dict[type, Callable[[Any], int]] = {
        Print: _print,
        Filter: _filter,
        Parquet: _parquet,
        Html: _html,
        Picture: picture,
        Verify: verify,
        View: view,
        Records: records,
    }
    return run_verb(verbs, argv, prog="turngym trace", about=__doc__)


def _print(command: Print) -> int:
    ends = Counter[str]()
    prompts_of = cache(partial(Prompts.of, tokenizer=command.tokenizer))
    for path, episode in selected(command.files, command.select):
        print(printable(episode_line(episode)))
        if command.turns or command.prompt:
            lines = turn_lines(episode, command.width, prompts_of(path) if command.prompt else None)
            print(printable("\n".join(lines)))
        ends[episode.outcome] += 1
    hint = "" if command.turns or command.prompt else " (--turns prints what was said)"
    errors = f", {ends['error']} ended in an error" if ends["error"] else ""
    count = ends.total()
    print(f"{count} {'episode' if count == 1 else 'episodes'}, {ends['won']} won{errors}{hint}")
    return 0


def _filter(command: Filter) -> int:
    must_be_new(command.out, TurngymError)
    # the settings come first and say which tasks are left, so the files are read twice
    left: dict[str, dict[str, set[int]]] = {}
    for _, episode in selected(command.files, command.select):
        left.setdefault(episode.spec, {}).setdefault(episode.task.task_id, set()).add(episode.sample)
    whole = {digits: spec for path in command.files for digits, spec in read_specs(path).items() if digits in left}
    specs = {digits: _spec_of_left(spec, left[digits]) for digits, spec in whole.items()}
    names = {digits: digits_of(spec) for digits, spec in specs.items()}
    count = 0
    with (
        trace_errors(command.out, "nothing was written"),
        written_whole(command.out) as scratch,
        scratch.open("wb") as file,
    ):
        file.writelines(dict.fromkeys(map(header_line, specs.values())))
        for _, episode in _chosen(command.files, command.select, say=False):
            renamed = replace(episode, spec=names.get(episode.spec, episode.spec))
            file.write(episode_to_json(renamed).encode("ascii") + b"\n")
            count += 1
    print(f"{count} episodes in {command.out}")
    return 0


def _spec_of_left(spec: Mapping[str, Any], left: Mapping[str, Collection[int]]) -> dict[str, Any]:
    """The settings of an evaluation or rollout of which these episodes are left: numbers of samples by task."""
    played = read(EvalSpec, spec, "trace")
    if sum(map(len, left.values())) == episodes_of(played.play):
        return dict(spec)
    samples = max(map(len, left.values()))
    return to_table(changed(played, play=changed(played.play, tasks=Listed(task=tuple(left)), samples=samples)))


def _parquet(command: Parquet) -> int:
    pa = need("pyarrow", "trace parquet", "parquet")
    must_be_new(command.out, TurngymError)
    must_end(command.out, ".parquet")
    # a seed may have any number of digits, Parquet's numbers have 64 bits
    episodes = (_with_short_seed(path, episode) for path, episode in selected(command.files, command.select))
    with trace_errors(command.out, "nothing was written"):
        if command.rows == "trajectories":
            total = write_parquet(episodes, command.out)
        else:
            schema = pa.schema([(name, _arrow_type(pa, kind)) for name, kind in COLUMNS.items()])
            rows = (turn_row(episode, turn) for episode in episodes for turn in episode.turns)
            total = write_table(rows, command.out, schema)
    print(f"{total} {command.rows} in {command.out}")
    return 0


def _with_short_seed(path: Path, episode: Episode) -> Episode:
    if not -(2**63) <= episode.seed < 2**63:
        where = f"{path}: episode {episode.task.task_id} sample {episode.sample}"
        raise TurngymError(f"{where} has seed {brief(episode.seed, 40)}; Parquet holds seeds of 64 bits")
    return episode


def _html(command: Html) -> int:
    if not command.overwrite:
        must_be_new(command.out, TurngymError)
    must_end(command.out, ".html", ".htm")
    prompts_of = cache(partial(Prompts.of, tokenizer=command.tokenizer))
    episodes = ((episode, prompts_of(path)) for path, episode in selected(command.files, command.select))
    count, size = write_page(command.out, episodes, title=command.title)
    print(f"{count} episodes in {command.out} ({size / 1e6:.1f} MB); open it in a browser")
    return 0


def episode_line(episode: Episode) -> str:
    """`won completed  12 turns  return 1.00  heat  task sample 0`."""
    ended = f"{episode.outcome:<4} {episode.status.value}"
    head = f"{ended:<21} {episode.depth:>3} turns  return {episode.episode_return:+z.2f}"
    return f"{head}  {episode.task.category:<8} {episode.task.task_id} sample {episode.sample}"


def turn_lines(episode: Episode, width: int, prompts: Prompts | None) -> list[str]:
    """What was said in an episode as lines for a terminal; with `prompts`, whole prompts instead of observations."""
    lines: list[str] = []
    for turn in episode.turns:
        if prompts is None:
            lines.append(_block(f"[{turn.index}] environment", turn.observation, width))
        else:
            text = prompts.whole(episode, turn)
            read = f", {turn.response_span[0]:,} tokens" if turn.response_length else ""
            lines.append(_block(f"[{turn.index}] prompt{read}", text, len(text)))
        verdict = f"{turn.verdict.value}, reward {turn.reward:g}, {turn.finish}"
        lines.append(_block(f"[{turn.index}] {speaker(episode, turn)} ({verdict})", turn.response, width))
    return [*lines, _block("end", episode.final_observation, width), ""]


COLUMNS: dict[str, str] = {
    **dict.fromkeys(("env_id", "task_id", "task_sha", "split", "category"), "string"),
    **dict.fromkeys(("seed", "sample", "group", "depth"), "int64"),
    "status": "string",
    "success": "bool_",
    **dict.fromkeys(("return", "score"), "float64"),
    "turn": "int64",
    **dict.fromkeys(("observation", "response", "action", "verdict"), "string"),
    "reward": "float64",
    "segment": "int64",
    "response_ids": "list int32",
    "logprobs": "list float32",
    **dict.fromkeys(("finish", "origin"), "string"),
    "policy_version": "int64",
    "judge_scores": "list float64",
    "hint": "string",
}
"""Columns of the Parquet export; one row is one turn."""


def turn_row(episode: Episode, turn: Turn) -> dict[str, Any]:
    """Returns one turn together with the values of its episode, keyed by COLUMNS; unknown values are None."""
    task = episode.task
    ids = episode.response_ids(turn).tolist() if turn.response_length else None
    values = (
        *(task.env_id, task.task_id, task.sha256, task.split, task.category),
        *(episode.seed, episode.sample, episode.group, episode.depth),
        *(episode.status.value, episode.success, episode.episode_return, episode.score),
        *(turn.index, turn.observation, turn.response, turn.action, turn.verdict.value, turn.reward),
        *(turn.segment, ids, None if turn.logprobs is None else turn.logprobs.tolist()),
        *(turn.finish, turn.origin, turn.policy_version),
        *(None if turn.judge_scores is None else list(turn.judge_scores), turn.hint),
    )
    return dict(zip(COLUMNS, values, strict=True))


def _arrow_type(pa: Any, kind: str) -> Any:
    words = kind.split()
    inner = getattr(pa, words[-1])()
    return pa.list_(inner) if len(words) == 2 else inner


def _block(head: str, text: str, width: int) -> str:
    cut = excerpt(text, width) + (f" ({len(text)} characters)" if len(text) > width else "")
    return f"  {head}\n" + "\n".join(f"    {line}" for line in cut.splitlines() or [""])
