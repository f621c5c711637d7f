"""The source files of the project, and the calls in the package, for tests of rules that every file must follow."""

import ast
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

PROJECT = Path(__file__).parents[1]
INDEXER = PROJECT / "indexer"
NOT_OURS = ("node_modules", "__pycache__")


def source_files(*folders: str) -> list[Path]:
    """Return all files in folders of the project, except installed packages."""
    found = []
    for folder in folders:
        for directory, subfolders, names in os.walk(PROJECT / folder):
            subfolders[:] = [name for name in subfolders if name not in NOT_OURS]
            found += [Path(directory, name) for name in names]
    return sorted(found)


class SourceCall(NamedTuple):
    """A call in the source.

    Attributes:
        module: The path of the module, relative to the package.
        function: The name of the innermost function around the call; empty in the module itself.
    """

    module: str
    function: str
    call: ast.Call


@cache
def source_calls() -> tuple[SourceCall, ...]:
    """Return all calls in the package."""
    return tuple(
        SourceCall(str(module.relative_to(INDEXER)), function, call)
        for module in sorted(INDEXER.rglob("*.py"))
        for function, call in _calls(ast.parse(module.read_text()))
    )


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    waiting = [(tree, "")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        elif isinstance(node, ast.Call):
            yield function, node
        waiting += [(child, function) for child in ast.iter_child_nodes(node)][::-1]
