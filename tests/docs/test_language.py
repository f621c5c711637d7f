"""The terms of docs/glossary.md: synonyms that were in use before do not come back."""

import re
from pathlib import Path

import pytest

from tests.source_code import source_files

PROJECT = Path(__file__).parents[2]
CODE = [path for folder in ("indexer", "benchmarks", "examples") for path in sorted((PROJECT / folder).rglob("*.py"))]
PAGES = [*sorted((PROJECT / "docs").glob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md"]
RETIRED = re.compile(
    r"(?<![A-Za-z])(rota|tenure|ground|signer|desk|purse|hindrance|woken|kept_event|heard_rev|seen_rev|put_off|believed"
    r"|patience|KeyDesk|manners)(?![A-Za-z])",
    re.IGNORECASE,
)
FIRST_WORDS = re.compile(r'^ *"""\s*(What|Whose|Whom|Those|Whether|How|Towards)\b.*', re.MULTILINE)


def test_docstrings_start_with_a_verb_or_a_noun() -> None:
    paths = source_files("indexer", "benchmarks", "examples", "tests", "migrations", "docs")
    found = [
        f"{path}: {match[0].strip()}"
        for path in paths
        if path.suffix == ".py"
        for match in FIRST_WORDS.finditer(path.read_text())
    ]
    assert found == []


def test_code_uses_no_retired_term() -> None:
    found = [f"{path}: {match[0]}" for path in CODE for match in RETIRED.finditer(path.read_text())]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_uses_no_retired_term(page: Path) -> None:
    assert RETIRED.findall(page.read_text()) == []
