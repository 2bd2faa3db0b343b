"""``python -m docs.generate`` writes the generated pages; with ``--check`` it only says which of them are stale."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from docs.generate import api, drawing, rooms

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.generate", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a page is stale")
    check = parser.parse_args(argv).check
    pages = api.pages(root) | rooms.pages(root) | drawing.pages(root)
    there = {path.relative_to(root).as_posix() for path in (root / api.FOLDER).glob("*.md")}
    stale = [path for path, text in pages.items() if not (root / path).exists() or (root / path).read_text() != text]
    left = sorted(there - set(pages))
    if check:
        for path in stale:
            print(f"{path} is stale: run make docs", file=sys.stderr)
        for path in left:
            print(f"{path} is about no public module any more: run make docs", file=sys.stderr)
        return 1 if stale or left else 0
    for path in left:
        (root / path).unlink()
    for path in stale:
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(pages[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
