"""The pages for users of tap and Jetstream name every setting, and only paths that this program serves."""

import re
from pathlib import Path
from typing import cast

import pytest

from indexer.identity import IdentityCache
from indexer.monitoring.health import MetricsPage, Probe, make_application
from indexer.monitoring.metrics import Metrics
from indexer.service.feed.access import Access
from indexer.service.feed.jetstream_reader import JetstreamReader
from indexer.service.feed.jetstream_routes import JetstreamRoutes
from indexer.service.feed.tap_routes import TapRoutes
from indexer.store import Store

DOCS = Path(__file__).parents[2] / "docs"
TAP, JETSTREAM = (DOCS / f"migrating-from-{name}.md" for name in ("tap", "jetstream"))
PAGES = (TAP, JETSTREAM)
TAP_VARIABLES = [
    "ADMIN_PASSWORD",
    "BIND",
    "COLLECTION_FILTERS",
    "CURSOR_SAVE_INTERVAL",
    "DATABASE_URL",
    "DISABLE_ACKS",
    "FIREHOSE_PARALLELISM",
    "FULL_NETWORK",
    "IDENT_CACHE_SIZE",
    "LOG_LEVEL",
    "MAX_DB_CONNS",
    "METRICS_LISTEN",
    "NO_REPLAY",
    "OUTBOX_CAPACITY",
    "OUTBOX_ONLY",
    "OUTBOX_PARALLELISM",
    "PLC_URL",
    "RELAY_URL",
    "REPO_FETCH_TIMEOUT",
    "RESYNC_PARALLELISM",
    "RETRY_TIMEOUT",
    "SIGNAL_COLLECTION",
    "WEBHOOK_URL",
]
"""The variables of tap, which its README and its flags name."""
PATH = re.compile(r"`(?:(GET|PUT|POST) )?(/[\w./{}-]+)`")
SHOWN_BY = re.compile(r"`tests/\w[\w/]*\.py`|\[[\w.]+\]\([\w.]+\.md")


def table(page: Path, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading, by row."""
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found, heading
    rows = [line.strip("|").split("|") for line in found[1].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def served_paths() -> set[tuple[str, str]]:
    """Return the methods and paths that a process with the role `feed` serves for programs."""
    store, reader = cast("Store", None), cast("JetstreamReader", None)
    feeds = [
        *TapRoutes(store, cast("IdentityCache", None)).routes(Access(None)),
        *JetstreamRoutes(store, reader, Metrics(), values_stored=True).routes(),
    ]
    health = make_application(cast("Probe", None), cast("MetricsPage", None)).router.routes()
    return {
        ("GET", "/channel"),
        *((route.method, route.path) for route in feeds),
        *((route.method, route.resource.canonical) for route in health if route.resource is not None),
    }


def test_every_variable_of_tap_has_a_row() -> None:
    named = [name for row in table(TAP, "Settings") for name in re.findall(r"`TAP_(\w+)`", row[0])]
    assert sorted(named) == TAP_VARIABLES


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_path_of_ours_is_served(page: Path) -> None:
    named = {(method or "GET", path) for row in table(page, "Paths") for method, path in PATH.findall(row[1])}
    assert named
    assert named <= served_paths()


def test_every_path_of_the_feed_for_clients_of_tap_is_named() -> None:
    named = {path for row in table(TAP, "Paths") for _, path in PATH.findall(row[1])}
    store = cast("Store", None)
    routes = TapRoutes(store, cast("IdentityCache", None)).routes(Access(None))
    assert {route.path for route in routes} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_claim_is_shown_by_a_test_or_a_page(page: Path) -> None:
    claims = table(page, "What becomes better")
    assert claims
    assert [claim for claim, shown in claims if not SHOWN_BY.search(shown)] == []
