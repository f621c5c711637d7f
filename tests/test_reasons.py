"""docs/reasons.md lists every reason, and the code uses every reason."""

from functools import cache
from pathlib import Path

import pytest

import indexer.reasons
from docs.generate import reasons_page
from indexer.reasons import Desync, FetchFailure, GapReason, Rejection

PAGE = Path(__file__).parents[1] / "docs" / "reasons.md"
INDEXER = Path(indexer.reasons.__file__).parent


def test_reasons_page_is_generated_from_the_code() -> None:
    assert PAGE.read_text() == reasons_page(), "run `python -m docs.generate`"


@pytest.mark.parametrize("reason", [*Rejection, *Desync, *FetchFailure, *GapReason])
def test_every_reason_is_used_in_the_code_or_in_sql(reason: Rejection | Desync | FetchFailure | GapReason) -> None:
    name = f"{type(reason).__name__}.{reason.name}"
    text = code()
    assert name in text or f"'{reason}'" in text, f"{name} is never used"


@cache
def code() -> str:
    """Return the text of all modules that may use a reason."""
    return "\n".join(path.read_text() for path in INDEXER.rglob("*.py") if path.name != "reasons.py")
