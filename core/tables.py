"""What people see of results: tables as text, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import html
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import Any, Literal

from turngym.core.redaction import without_keys

Table = tuple[list[str], list[list[str]]]
"""Header and rows."""


def table_of(rows: Iterable[Mapping[str, str]]) -> Table:
    """A table of rows that name their cells: columns as they come up row by row, `-` where a row has none."""
    rows = [*rows]
    header = list(dict.fromkeys(name for row in rows for name in row))
    return header, [[row.get(name, "-") for name in header] for row in rows]


def columns(*tables: Table) -> Table:
    """Turns tables with one row per run into one table with a column per run, which fits a terminal."""
    names = [row[0] for row in tables[0][1]]
    lines = [
        [label, *(row[column] for row in rows)]
        for header, rows in tables
        for column, label in enumerate(header)
        if column
    ]
    return ["", *names], lines


_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# a backslash, code, a cell's end, a list of attributes, emphasis where a word follows, a link or picture, a block
_MARKUP = re.compile(r"[\\`|{]|\*(?=\S)|(?<![^\W_])_(?=\S)|!(?=\[)|(?<=\])(?=[(\[])|^(?=#|\[|[-+*]\s)")


def visible(text: str, keep: str = "") -> str:
    """`text` from anyone as one line that shows what it holds: control characters (of terminals, of the direction of
    writing, ends of lines) as escapes such as `\\x1b`, without those in `keep`."""
    return _HIDDEN.sub(lambda match: match[0] if match[0] in keep else repr(match[0])[1:-1], text)


def markup(text: str, form: Literal["html", "markdown"]) -> str:
    """`text` from anyone for a page: it shows as it is written, whatever tags or marks it holds."""
    escaped = html.escape(visible(without_keys(text)), quote=form == "html")
    return escaped if form == "html" else _MARKUP.sub(r"\\\g<0>", escaped)


def lines_of(text: str) -> str:
    """Sentences with texts from anyone in them, in Markdown: paragraphs, lists (`- `), and `code` between backticks."""
    lines = [(line[:2], line[2:]) if line.startswith("- ") else ("", line) for line in text.split("\n")]
    return "\n".join(mark + "".join(map(_prose, _CODE.split(line))) for mark, line in lines)


# no other backtick beside it, for then it is none in every Markdown
_CODE = re.compile(r"((?<!`)`[^`]+`(?!`))")


def _prose(part: str) -> str:
    return visible(without_keys(part)) if _CODE.fullmatch(part) else markup(part, "markdown")


def filled(template: str, values: Mapping[str, str]) -> str:
    """The page `template` with `values` in the places of their marks (`__BODY__`). A mark in a value is a text."""
    marks = re.compile("|".join(map(re.escape, values)))
    return marks.sub(lambda match: values[match[0]], template)


# where a spreadsheet takes the rest of a cell for a formula; some know the semicolon, too, as the end of a cell
_FORMULA = re.compile(r"(?:^|(?<=;))(?=\s*[=+\-@\uff1d\uff0b\uff0d\uff20])")
_NUMBERS = re.compile(r"[-+.,%\[\]\d*†\s]*(?:[eE][-+]?\d+)?")


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Rows as CSV. Spreadsheets read every cell that is not a number as text, never as a formula."""
    page = StringIO()
    visible_rows = ([visible(cell) for cell in row] for row in rows)
    cells = ([cell if _NUMBERS.fullmatch(cell) else _FORMULA.sub("'", cell) for cell in row] for row in visible_rows)
    csv.writer(page, lineterminator="\n").writerows(cells)
    return page.getvalue()


def markdown(table: Table) -> str:
    """The table in Markdown; the first column is aligned left, the others right."""
    header, rows = table
    lines = [[markup(cell, "markdown") for cell in line] for line in (header, *rows)]
    lines.insert(1, ["---", *["---:"] * (len(header) - 1)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def latex(table: Table, caption: str, label: str) -> str:
    """The table in LaTeX, for the package booktabs: a `table` with its caption (`code` between backticks) and label."""
    header, rows = table
    caption_text = re.sub(r"`([^`]+)`", r"\\texttt{\1}", _latex_text(" ".join(caption.split())))
    name = re.sub(r"[^\w.:-]+", "-", label)
    lines = [" & ".join(map(_latex_text, line)) + r" \\" for line in (header, *rows)]
    alignment = "l" + "r" * (len(header) - 1)
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption_text}}}",
            rf"\label{{tab:{name}}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
    "†": r"\dag{}",
}
LATEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def _latex_text(text: str) -> str:
    return "".join(LATEX.get(character, character) for character in visible(text))


def print_table(table: Table, title: str = "") -> None:
    """Prints the table on standard output, as wide as the terminal: no number is cut.

    Headers are broken at spaces where that makes room. A table that is still too wide is printed as several, one below
    the other, which all begin with the first column.
    """
    from rich.console import Console

    console = Console()
    _draw(console, table, title, console.width)


def table_text(table: Table, title: str = "") -> str:
    """The table as plain text, as wide as it needs to be."""
    from rich.console import Console

    page = StringIO()
    # rich cuts cells to the width of the console, which without a terminal is 80
    _draw(Console(file=page, width=1000, color_system=None), table, title, 1000)
    return "".join(line.rstrip() + "\n" for line in page.getvalue().splitlines())


EDGES = 3
"""Characters that a column takes beside its text; a table takes one more."""


def _draw(console: Any, table: Table, title: str, width: int) -> None:
    from rich.table import Table as RichTable
    from rich.text import Text

    if title:
        console.print(Text(title, style="italic"))
    for header, rows in stacked(table, width):
        drawn = RichTable()
        for column, name in enumerate(header):
            # a first column of sentences is folded, numbers never are
            side: Literal["left", "right"] = "right" if column else "left"
            drawn.add_column(Text(visible(name, "\n")), justify=side, no_wrap=column > 0, overflow="fold")
        for row in rows:
            # Text: a bracket in a cell is no markup
            drawn.add_row(*(Text(visible(cell, "\n")) for cell in row))
        console.print(drawn)


def stacked(table: Table, width: int) -> list[Table]:
    """The table as parts that fit into `width` characters, headers broken where they must be."""
    header, rows = table
    cells = [max((len(row[column]) for row in rows), default=0) for column in range(len(header))]
    if 1 + sum(max(len(name), cell) + EDGES for name, cell in zip(header, cells, strict=True)) <= width:
        return [table]
    names, needs = [], []
    for name, cell in zip(header, cells, strict=True):
        need = max(cell, *map(len, name.split() or [""]))
        names.append("\n".join(textwrap.wrap(name, max(need, 1))))
        needs.append(need + EDGES)
    parts, used = [[0]], 1 + needs[0]
    for column in range(1, len(header)):
        if used + needs[column] > width and len(parts[-1]) > 1:
            parts.append([0])
            used = 1 + needs[0]
        parts[-1].append(column)
        used += needs[column]
    return [([names[column] for column in part], [[row[column] for column in part] for row in rows]) for part in parts]
