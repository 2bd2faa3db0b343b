"""The common output of all commands: consoles, tables, progress, files."""

import argparse
import contextlib
import functools
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text

from fusedcomm.launch.world import is_rank_0

PLAIN_WIDTH = 100  # columns, where neither a terminal nor COLUMNS says how many there are
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
GAP = 2  # spaces between columns of a table


def stdout() -> Console:
    """A console on stdout, as wide as COLUMNS or the terminal says, else `PLAIN_WIDTH`."""
    columns = os.environ.get("COLUMNS", "")
    if width := int(columns) if columns.isascii() and columns.isdigit() else 0:
        return _console(width=width)
    return found if (found := _console()).is_terminal else _console(width=PLAIN_WIDTH)


def show(renderable: Any, out: Console | None = None) -> None:
    """Print a table whole: lines may be longer than the terminal is wide, so that no figure loses digits."""
    (out or stdout()).print(renderable, crop=False)


def as_text(renderable: Any) -> str:
    """The text of `show`, without colours."""
    file = io.StringIO()
    # rich would display it instead in a notebook
    plain = {"color_system": None, "force_terminal": False, "force_jupyter": False}
    show(renderable, _console(file=file, width=stdout().width, **plain))
    return file.getvalue().strip("\n")


def _console(**options: Any) -> Console:
    """Ignores COLUMNS and LINES: rich takes 0 columns as a width, and raises for ``²``."""
    environ = {name: text for name, text in os.environ.items() if name not in ("COLUMNS", "LINES")}
    return Console(highlight=False, _environ=environ, **options)


@dataclass(frozen=True)
class Column:
    """A column of a table. ``head``: its name and unit, in one or two lines; ``about``: its legend.

    ``drop``: 0 if it is never left out; else columns with larger numbers go before it, and equal ones with it.
    """

    head: str
    about: str
    cell: Callable[[Any], str | Text]
    drop: int = 0
    left: bool = False  # how the cells are justified
    folds: int = 0  # cells may be folded, to no fewer columns; if 0, they take one line

    @property
    def name(self) -> str:
        """The head in one line."""
        return self.head.replace("\n", " ")


@dataclass(frozen=True)
class Table:
    """Rows under heads, the legend below. Whole columns are left out where there is not enough width for all of them.

    Print it with `show`: where the columns that always stay do not fit, lines are longer than the terminal, and figures
    stay whole. ``others``: where the columns left out are found.
    """

    columns: Sequence[Column]
    rows: Sequence[Any]
    title: str = ""
    others: str = "--json has them"
    is_bold: Callable[[Any], bool] = lambda row: False
    has_legend: bool = True

    def shown(self, width: int) -> list[Column]:
        """The columns that fit, or else the permanent ones."""
        kept = list(self.columns)
        while sum(self._widths(kept, 0)) - GAP > width and (last := max(column.drop for column in kept)):
            kept = [column for column in kept if column.drop != last]
        return kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = self.shown(options.max_width)
        made = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, GAP - 1, 0, 0))
        widths = self._widths(columns, options.max_width)
        for column, width in zip(columns, widths, strict=True):
            justify: Literal["left", "right"] = "left" if column.left else "right"
            made.add_column(Text(column.head), justify=justify, overflow="fold", width=width - GAP)
        for i, row in enumerate(self.rows):
            style = Style(bold=True) if self.is_bold(row) else None
            made.add_row(*(self._cells[column][i] for column in columns), style=style)
        yield Text("")
        if self.title:
            yield Text(self.title, style="italic")
        yield from console.render(made, options.update(width=sum(widths)))
        if left_out := [column.name for column in self.columns if column not in columns]:
            yield Text(f"left out at {options.max_width} columns: {', '.join(left_out)}; {self.others}", style="dim")
        if self.has_legend:
            yield Legend([self])

    def _widths(self, columns: Sequence[Column], width: int) -> list[int]:
        """Each column's width, its gap included. Columns with folded cells share the rest of ``width``."""
        wanted = [self._wanted[column] for column in columns]
        heads = [GAP + max(map(cell_len, column.head.split("\n"))) for column in columns]
        widths = [
            max(head, min(want, GAP + column.folds)) if column.folds else want
            for column, head, want in zip(columns, heads, wanted, strict=True)
        ]
        for _ in range(min(width + GAP, sum(wanted)) - sum(widths)):
            short = min(range(len(columns)), key=lambda i: widths[i] / wanted[i])
            widths[short] += 1
        return widths

    @functools.cached_property
    def _cells(self) -> dict[Column, list[Text]]:
        return {column: [_without_tabs(column.cell(row)) for row in self.rows] for column in self.columns}

    @functools.cached_property
    def _wanted(self) -> dict[Column, int]:
        """The width without folded lines, gap included."""
        return {
            column: GAP + max(cell_len(line) for text in (column.head, *cells) for line in str(text).split("\n"))
            for column, cells in self._cells.items()
        }


@dataclass(frozen=True)
class Legend:
    """The legends of the columns shown in some table. Neighbours with equal ones share a line."""

    tables: Sequence[Table]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names: dict[str, list[str]] = {}
        for table in self.tables:
            for column in table.shown(options.max_width):
                if column.name and column.name not in names.setdefault(column.about, []):
                    names[column.about].append(column.name)
        lines = RichTable.grid(padding=(0, GAP, 0, 0))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for about, each in names.items():
            lines.add_row(Text(", ".join(each)), Text(about))
        yield Text("")
        yield lines
        yield Text("")


def _without_tabs(cell: str | Text) -> Text:
    """A tab would take more columns than `cell_len` counts."""
    text = cell.copy() if isinstance(cell, Text) else Text(cell)
    text.expand_tabs(8)
    return text


@contextlib.contextmanager
def progress(here: bool, total: int, first: str, then: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if ``here`` and if that is a terminal; the function yielded takes how many are done."""
    stderr = _console(stderr=True)
    if not (here and stderr.is_terminal):
        yield lambda done: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    # No refresh thread: it would take time from the rank that is measured.
    with Progress(*columns, console=stderr, transient=True, auto_refresh=False) as bar:
        task = bar.add_task(first, total=total)

        def on_done(done: int) -> None:
            bar.update(task, completed=done, description=then, refresh=True)

        yield on_done


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every command that starts ranks: device and number."""
    device = "where to run (default: cuda if there are two GPUs or more, else cpu)"
    parser.add_argument("--device", choices=("cpu", "cuda"), help=device)
    world_size = "ranks to start (default: one per GPU, or 2 on CPU; under torchrun its own)"
    parser.add_argument("--world-size", type=positive, metavar="N", help=world_size)
    add_oversubscribe(parser)


def add_oversubscribe(parser: argparse.ArgumentParser) -> None:
    text = "start more ranks on CPU than there are CPUs for them (default: refused, but for 2)"
    parser.add_argument("--oversubscribe", action="store_true", help=text)


def fail(command: str, text: str, code: int = 1) -> int:
    print(f"fusedcomm {command}: {text}", file=sys.stderr)
    return code


def not_writable(args: argparse.Namespace, *options: str) -> str | None:
    """Why the file of one of these options cannot be written, found out before the work, by rank 0; else None."""
    for option in options if is_rank_0() else ():
        try:
            if file := getattr(args, option, None):
                is_new = not os.path.lexists(file)
                open(file, "a").close()
                if is_new:
                    os.remove(file)
        except OSError as error:
            return f"--{option} {file}: {error.strerror}"
    return None


def write_json(file: str, report: Any) -> None:
    with open(file, "w") as opened:
        json.dump(report, opened, indent=2)
        opened.write("\n")


def size_in_bytes(text: str) -> int:
    """As nccl-tests reads it: a number, and K, M or G for powers of 1024."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].upper() in ("K", "M", "G") else (text, "")
    try:
        value = int(float(number) * UNITS[unit])
    except (ValueError, OverflowError):
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive number of bytes, K, M or G, got {text!r}")
    return value


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
