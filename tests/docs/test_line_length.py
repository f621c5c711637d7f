"""Lines of prose in Markdown have at most 100 characters."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PATTERNS = ("*.md", "docs/**/*.md", "examples/*/README.md", "native/README.md")
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
MAX_CHARACTERS = 100
ITEM = re.compile(r" *(?:[-*]|\d+\.) +")
ONE_LINK = re.compile(r"\[[^\]]*\]\(\S*\)\.?")
FENCES = ("```", "~~~")
NOT_PROSE = (*FENCES, "|", "#", "<", "http")
"""First characters of fences, tables, headings, HTML, and addresses."""


def prose(page: str) -> Iterator[str]:
    """Yield the lines of paragraphs and list items. A block that is indented further than its list item is code."""
    fenced, indent = False, 0
    for line in page.splitlines():
        content = line.lstrip()
        fenced ^= content.startswith(FENCES)
        item = ITEM.match(line)
        if item:
            indent = item.end()
        elif content and not line.startswith(" "):
            indent = 0
        is_code = fenced or (not item and len(line) - len(content) >= indent + 4)
        if content and not is_code and not content.startswith(NOT_PROSE):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_prose_wraps_at_100_characters(page: Path) -> None:
    assert [
        line for line in prose(page.read_text()) if len(line) > MAX_CHARACTERS and not ONE_LINK.fullmatch(line)
    ] == []


def test_what_is_prose() -> None:
    lists = "- Item\n  goes on.\n\n      code of the item\n\n1. One\n   two.\n"
    page = f"# Title\n\nText.\n\n    code\n\n{lists}\n| a table |\n```\ncode\n```\n"
    assert list(prose(page)) == ["Text.", "- Item", "  goes on.", "1. One", "   two."]
