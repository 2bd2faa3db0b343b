"""The code that the model mirrors, and what it was when the model was last read against it.

A digest covers what a function does: not its comments, docstring, annotations, formatting and messages (f-strings).
``python -m tests.protocol.mirrors`` prints the table anew.
"""

from __future__ import annotations

import ast
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

WHAT_TO_DO = (
    "{source} has changed since the model was read against it. Read it next to {part} in tests/protocol/, change the "
    "model where it differs, run the models there, and then set its digest in {table} to {digest}"
)


def digest(source: str, text: str | None = None) -> str:
    """The digest of ``file:qualified name``, in ``text`` or in the file."""
    path, _, name = source.partition(":")
    text = (ROOT / path).read_text() if text is None else text
    normal = _normal_python(text, name) if path.endswith(".py") else _normal_cpp(text, name)
    return hashlib.sha256(normal.encode()).hexdigest()[:12]


def complaints(mirrors: dict[str, dict[str, str]], table: str) -> list[str]:
    """What has changed, and what to do about it. ``mirrors`` has digests by source, for each part of the model."""
    found = []
    for part, sources in mirrors.items():
        for source, known in sources.items():
            now = digest(source)
            if now != known:
                found.append(WHAT_TO_DO.format(source=source, part=part, table=table, digest=now))
    return found


def _normal_python(text: str, name: str) -> str:
    node: ast.AST = ast.parse(text)
    for each in name.split("."):
        found = [child for child in ast.iter_child_nodes(node) if getattr(child, "name", None) == each]
        if not found:
            raise ValueError(f"a mirrored function must exist: there is no {name}")
        node = found[-1]
    return _dump(node)


def _dump(node: object) -> str:
    """Like ast.dump, but equal in all versions of Python, and without what does not change what a function does."""
    if isinstance(node, list):
        return "[" + " ".join(_dump(each) for each in node if not _is_text(each)) + "]"
    if isinstance(node, ast.JoinedStr):
        return "message"
    if not isinstance(node, ast.AST):
        return repr(node)
    skipped = {"ctx", "annotation", "returns", "type_comment", "type_params", "kind"}
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in skipped and value not in (None, [])]
    return f"{type(node).__name__}({' '.join(f'{name}={_dump(value)}' for name, value in fields)})"


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _normal_cpp(text: str, name: str) -> str:
    """The text from the line that defines the function to the brace that closes it, on a line of its own or on the
    same one.
    """
    code = re.sub(r"//[^\n]*", "", text)
    end = r"(?:\n.*?^\1\}|[^\n]*\}$)"
    found = re.search(rf"^( *)[^\n;=]*\b{re.escape(name)}\([^;]*?\{{{end}", code, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"a mirrored function must exist: there is no {name}")
    return " ".join(found.group().split())


if __name__ == "__main__":
    from tests.protocol.mirrored import MIRRORED

    for part, sources in MIRRORED.items():
        print(f'    "{part}": {{')
        for source in sources:
            print(f'        "{source}": "{digest(source)}",')
        print("    },")
