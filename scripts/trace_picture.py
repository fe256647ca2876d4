"""`turngym trace picture`: an episode as an animated SVG, as a page or a README shows it: no script, one file.

Each turn has two frames: what the agent read, then also what it did. A reader who asked for less motion sees the last.
"""

from __future__ import annotations

import textwrap
from html import escape
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from turngym.agents.evaluation.packed_file import SUFFIX, read_sealed
from turngym.core.episode import Episode
from turngym.core.errors import TurngymError
from turngym.core.numbers import FINITE, Number
from turngym.core.setting import Positional
from turngym.core.spec import Spec
from turngym.core.trace import iter_episodes
from turngym.core.user_files import must_be_new, must_end
from turngym.core.whole_files import atomic_write
from turngym.envs.spaces import printable

STYLE = """\
svg { color-scheme: light dark }
.paper { fill: #f6f8fa; stroke: #d0d7de }
text { white-space: pre; font: 13px ui-monospace, "DejaVu Sans Mono", monospace; fill: #1f2328 }
.did { fill: #0550ae; font-weight: bold } .bad { fill: #b3261e } .soft { fill: #656d76 } .won { fill: #1a7f37 }
@media (prefers-color-scheme: dark) {
  .paper { fill: #161b22; stroke: #30363d } text { fill: #e6edf3 }
  .did { fill: #79c0ff } .bad { fill: #f0857d } .soft { fill: #8d96a0 } .won { fill: #57c475 }
}
.frame { opacity: 0 } .frame:last-of-type { opacity: 1 }
@media (prefers-reduced-motion: no-preference) { .frame { animation: shown SECONDSs step-end infinite } }
@keyframes shown { 0% { opacity: 1 } SHARE% { opacity: 0 } 100% { opacity: 0 } }
@keyframes last { 0% { opacity: 1 } LONGER% { opacity: 0 } 100% { opacity: 0 } }"""
HOLD = 3
"""Number of frames for which the last one stays."""
GAP = 0.01
"""Percent of the time by which a frame ends early: rounding could let two overlap."""
LINE, CHARACTER, MARGIN = 18, 7.83, 16
"""Height of a line, width of a character, space around the text; pixels."""


class Picture(Spec):
    """Write one episode as an animated SVG."""

    file: Positional[Path]
    """A trace, or a packed result."""
    out: Path
    """The SVG file; must not exist."""
    task: str | None = None
    """Task id; by default the first episode that was won."""
    sample: Number = 0
    """--task: which of its episodes."""
    seconds: Annotated[float, Meta(ge=0.1, le=FINITE)] = 1.6
    """How long a frame stays."""
    rows: Annotated[int, Meta(ge=4, le=10**9)] = 18
    """Lines of text that are seen at a time."""
    width: Annotated[int, Meta(ge=20, le=10**9)] = 88
    """Characters of a line."""


def picture(command: Picture) -> int:
    must_be_new(command.out, TurngymError)
    must_end(command.out, ".svg")
    episode = _chosen(command)
    text = animated(episode, seconds=command.seconds, rows=command.rows, width=command.width)
    with atomic_write(command.out) as file:
        file.write(text)
    print(f"{command.out}: {episode.task.task_id} sample {episode.sample}, {episode.outcome} in {episode.depth} turns")
    return 0


def _chosen(command: Picture) -> Episode:
    path = command.file
    episodes = read_sealed(path).episodes if path.name.endswith(SUFFIX) else iter_episodes(path)
    for episode in episodes:
        if command.task is None and episode.success and episode.turns:
            return episode
        if command.task == episode.task.task_id and episode.sample == command.sample:
            return episode
    wanted = "episode that was won" if command.task is None else f"episode of {command.task!r}, sample {command.sample}"
    raise TurngymError(f"{path} has no {wanted}; `turngym trace print` lists what it has")


Line = tuple[str, str]
"""A line of text and its class."""


def frames(episode: Episode, width: int) -> list[list[Line]]:
    """The lines on the screen, all of them, after each frame."""
    lines: list[Line] = []
    pictures = []
    for turn in episode.turns:
        lines = [*lines, *_wrapped(turn.observation, "read", width)]
        pictures.append(lines)
        answer = turn.response if turn.action is None else turn.action
        lines = [*lines, *_wrapped(f"> {answer}", "did", width)]
        if not turn.verdict.valid:
            lines = [*lines, (f"  {turn.verdict.value}", "bad")]
        pictures.append(lines)
    end = (f"{episode.outcome} after {episode.depth} turns", "won" if episode.success else "bad")
    pictures.append([*lines, *_wrapped(episode.final_observation, "read", width), end])
    return pictures


def _wrapped(text: str, kind: str, width: int) -> list[Line]:
    lines = [line for line in printable(text).splitlines() if line.strip()]
    return [(part, kind) for line in lines for part in textwrap.wrap(line, width, subsequent_indent="  ")]


def animated(episode: Episode, *, seconds: float, rows: int, width: int) -> str:
    """The SVG. Every frame is a group that is visible for its share of the time, and nothing else moves. The last frame
    stays `HOLD` times as long as others; of a longer text the last `rows` lines are shown."""
    pictures = frames(episode, width)
    count = len(pictures) - 1 + HOLD
    total = round(count * seconds, 3)
    wide, high = round(width * CHARACTER + 2 * MARGIN), (rows + 1) * LINE + 2 * MARGIN
    style = STYLE.replace("SECONDS", f"{total:g}").replace("SHARE", f"{100 / count - GAP:.4f}")
    style = style.replace("LONGER", f"{100 * HOLD / count - GAP:.4f}")
    title = f"An episode of {episode.task.env_id}, turn by turn: {episode.task.task_id}"
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}">']
    parts.append(f"<title>{escape(title)}</title><style>{style}</style>")
    parts.append(f'<rect class="paper" x="0.5" y="0.5" width="{wide - 1}" height="{high - 1}" rx="8"/>')
    head = f"{episode.task.env_id}  {episode.meta.get('agent', '')}".rstrip()
    parts.append(f'<text class="soft" x="{MARGIN}" y="{MARGIN + 10}">{escape(head)}</text>')
    for frame_number, lines in enumerate(pictures):
        # a negative delay starts the animation in its middle, so that no frame waits for the first round
        look = f"animation-delay: {frame_number * seconds - total:g}s"
        look += "; animation-name: last" if frame_number == len(pictures) - 1 else ""
        texts = [
            f'<text class="{kind}" x="{MARGIN}" y="{MARGIN + 10 + LINE * number}">{escape(text)}</text>'
            for number, (text, kind) in enumerate(lines[-rows:], 1)
        ]
        parts.append(f'<g class="frame" style="{look}">{"".join(texts)}</g>')
    return "\n".join([*parts, "</svg>\n"])
