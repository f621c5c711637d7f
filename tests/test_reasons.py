"""docs/reasons.md has every reason, in the code's words. To write it anew: python -m tests.test_reasons"""

import ast
from pathlib import Path

import pytest

import indexer.reasons
from indexer.atproto import record
from indexer.reasons import Desync, FetchFailure, Rejection

PAGE = Path(__file__).parents[1] / "docs" / "reasons.md"
INDEXER = Path(indexer.reasons.__file__).parent

HEAD = """# Reasons

Every reason that this program gives, in closed sets. They are the values of metrics' labels and of columns, and keep
their names. This page is made from the code, and held to it by a test.
"""


REFUSED = """
## Why a message or an export is refused

`atproto.rejected.reason`, `indexer_rejected_total{reason}`. By its own fault; nothing was changed by it.
"""

DESYNCHRONIZED = """
## Why a repo is not synchronized

`atproto.repos.sync_reason`, `indexer_desynchronized_total{reason}`. It is fetched again; `next_attempt_at` says when.
"""

FETCH_FAILED = """
## Why a fetch came to nothing

The first word of `atproto.repos.last_error`, `indexer_resync_total{result}`. *Parked*: not tried again until the
account or its identity is heard of.
"""

UNUSUAL = """
## What is unusual about a record's value

`atproto.records.value_problem`. The record keeps its place and its CID whatever its bytes are.
"""


def written() -> str:
    return "".join(
        [
            HEAD,
            REFUSED,
            table("reason", [(reason, reason.text) for reason in Rejection]),
            DESYNCHRONIZED,
            table("reason", [(reason, reason.text) for reason in Desync]),
            FETCH_FAILED,
            table("reason", [(reason, reason.text + " *Parked.*" * reason.parks) for reason in FetchFailure]),
            UNUSUAL,
            table("problem", problems()),
        ]
    )


def table(name: str, rows: list[tuple[str, str]]) -> str:
    return f"\n| {name} | meaning |\n|---|---|\n" + "".join(f"| `{key}` | {text} |\n" for key, text in rows)


def problems() -> list[tuple[str, str]]:
    """The members of `Problem` with the comments behind them, as sentences."""
    lines = Path(record.__file__).read_text().splitlines()
    tree = ast.parse("\n".join(lines))
    problem = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Problem")
    found = []
    for member in problem.body:
        if isinstance(member, ast.Assign) and isinstance(member.value, ast.Constant):
            comment = lines[member.lineno - 1].partition("# ")[2]
            found.append((str(member.value.value), f"{comment[0].upper()}{comment[1:]}."))
    return found


def test_the_page_says_what_the_code_says() -> None:
    assert PAGE.read_text() == written(), "docs/reasons.md is behind: python -m tests.test_reasons"


@pytest.mark.parametrize("reason", [*Rejection, *Desync, *FetchFailure])
def test_every_reason_is_given_somewhere(reason: Rejection | Desync | FetchFailure) -> None:
    name = f"{type(reason).__name__}.{reason.name}"
    users = [path for path in INDEXER.rglob("*.py") if path.name != "reasons.py" and name in path.read_text()]
    in_sql = [path for path in INDEXER.rglob("*.py") if f"'{reason}'" in path.read_text()]
    assert users or in_sql, f"{name} is never given"


if __name__ == "__main__":
    PAGE.write_text(written())
