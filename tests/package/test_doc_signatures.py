"""Functions that docs/ names in indented blocks have the arguments that are written there."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from tests.package.test_docs import PAGES


def python_calls() -> Iterator[tuple[str, ast.arguments]]:
    """Functions of fusedcomm in indented blocks, called or with their whole signature."""
    for path in PAGES:
        pattern = r"^    (fusedcomm(?:\.\w+)+)\(((?:.|\n {8})*?)\)(?:  .*)?$"
        for name, arguments in re.findall(pattern, path.read_text(), re.M):
            function = ast.parse(f"def f({arguments}): ...").body[0]
            assert isinstance(function, ast.FunctionDef)
            yield name, function.args


def defaults_of(arguments: ast.arguments) -> dict[str, Any]:
    """The defaults by the name of each argument, ``empty`` where it has none."""
    positional = [inspect.Parameter.empty] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
    found = [
        *zip(arguments.args, positional, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    return {arg.arg: ast.literal_eval(node) if isinstance(node, ast.Constant) else node for arg, node in found}


def test_functions_have_the_arguments_that_are_written() -> None:
    calls = list(python_calls())
    assert len(calls) >= 10
    for name, arguments in calls:
        module, _, function = name.rpartition(".")
        parameters = inspect.signature(getattr(importlib.import_module(module), function)).parameters
        assert defaults_of(arguments).keys() <= parameters.keys(), name
        if arguments.kwonlyargs:
            assert defaults_of(arguments) == {each.name: each.default for each in parameters.values()}, name
