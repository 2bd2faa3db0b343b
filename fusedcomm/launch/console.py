"""What all commands print and write alike."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

PLAIN_WIDTH = 120  # columns, where no terminal says its own


def stdout(width: int = PLAIN_WIDTH) -> Console:
    """A console on stdout, ``width`` wide where that is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=width)


def wide_stdout(width: int) -> Console:
    """A console on stdout, at least ``width`` wide: a narrow terminal wraps lines, where rich would cut figures."""
    return Console(highlight=False, width=max(width, stdout().width))


@contextlib.contextmanager
def progress(here: bool, total: int, first: str, then: str) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, if ``here`` and if that is a terminal; the function yielded takes how many are done."""
    stderr = Console(stderr=True)
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
    """The options of every command that starts ranks: on what, and how many."""
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


def not_writable(file: str | None) -> str | None:
    """Why ``file`` cannot be written, found out before the work; None if it can, or is None."""
    try:
        if file:
            open(file, "a").close()
    except OSError as error:
        return f"{file}: {error.strerror}"
    return None


def write_json(file: str, report: Any) -> None:
    with open(file, "w") as opened:
        json.dump(report, opened, indent=2)
        opened.write("\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
