"""The code that the model mirrors, and what it was when the model was last read against it.

A digest covers what functions of a file do: not comments, docstrings, annotations, formatting and messages (f-strings).
``python -m tests.protocol.mirrors`` prints the table anew.
"""

import ast
import hashlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]

WHAT_TO_DO = (
    "{place}: one of {names} has changed since the model was read against it. Read it next to {part} in "
    "tests/protocol/, change the model where it differs, run the models there, and then set the digest in {table} to "
    "{digest}"
)
# by part of the model, and by file or file:Class: names of functions, and their digest
Mirrors = dict[str, dict[str, tuple[str, str]]]


def digest(place: str, names: str, text: str | None = None) -> str:
    """The digest of functions of ``place``, a file or file:Class, in ``text`` or as they are."""
    file, _, owner = place.partition(":")
    text = (ROOT / file).read_text() if text is None else text
    of = _normal_python if file.endswith(".py") else _normal_cpp
    normal = "\n".join(of(text, f"{owner}.{name}".lstrip(".")) for name in names.split())
    return hashlib.sha256(normal.encode()).hexdigest()[:12]


def complaints(mirrors: Mirrors, table: str) -> list[str]:
    return [
        WHAT_TO_DO.format(place=place, names=names, part=part, table=table, digest=digest(place, names))
        for part, places in mirrors.items()
        for place, (names, known) in places.items()
        if digest(place, names) != known
    ]


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
    """The text from the line that defines the function to the brace that closes it, on the same line or alone."""
    code = re.sub(r"//[^\n]*", "", text)
    end = r"(?:\n.*?^\1\}|[^\n]*\}$)"
    found = re.search(rf"^( *)[^\n;=]*\b{re.escape(name)}\([^;]*?\{{{end}", code, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"a mirrored function must exist: there is no {name}")
    return " ".join(found.group().split())


if __name__ == "__main__":
    from tests.protocol.mirrored import MIRRORED

    for part, places in MIRRORED.items():
        print(f'    "{part}": {{')
        for place, (names, _) in places.items():
            print(f'        "{place}": ("{names}", "{digest(place, names)}"),')
        print("    },")
