"""The status page of a real daemon in headless Chromium."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import Any

import pytest

from indexer.demo.local_pds import GET_REPO, LIST_REPOS
from indexer.reasons import Desync, FetchFailure, GapReason, Rejection
from indexer.sync.changes import Batch, DeadLetter
from indexer.sync.identity import HostState
from indexer.sync.shard import Shard
from indexer.sync.stream import Gap
from indexer.telemetry.conditions import HOST_FAILING
from tests import chromium
from tests.chromium import Page, Scheme, open_browser
from tests.daemon.running_daemon import LIKE, POST, FilteredNetwork, RunningDaemon, running_daemon
from tests.faulty_network import Fault, FaultyAccount, FaultyNetwork
from tests.quick_tuning import QUICK
from tests.waiting import until

pytestmark = [
    pytest.mark.proof("browser"),
    pytest.mark.skipif(
        chromium.EXECUTABLE is None, reason=f"Chromium is not installed: run {chromium.INSTALL_COMMAND}"
    ),
]
PHONE, DESKTOP = 390, 1280
VIEWS: tuple[tuple[int, Scheme], ...] = ((PHONE, "light"), (PHONE, "dark"), (DESKTOP, "light"), (DESKTOP, "dark"))
MARKUP = "<img src=x onerror=alert(1)>"
"""In an attribute or as HTML, this would open a dialog and load an image."""


@dataclass
class OpenPage:
    """The status page of a daemon, opened in a browser."""

    daemon: RunningDaemon
    browser: Page
    url: str

    async def open(self, *, width: int = DESKTOP, scheme: Scheme = "light") -> None:
        await self.browser.open(self.url, width=width, scheme=scheme)
        await self.wait_for_polls(1)

    async def wait_for_polls(self, count: int) -> None:
        await self.browser.wait_for(f"Number(document.documentElement.dataset.polled ?? 0) >= {count}")

    async def text(self, selector: str = "body") -> str:
        text: str = await self.browser.evaluate(f"document.querySelector({selector!r}).innerText")
        return text

    async def rows(self, table: str) -> list[list[str]]:
        """Return the cells of each row of a table."""
        rows: list[list[str]] = await self.browser.evaluate(
            f"[...document.getElementById('{table}').tBodies[0].rows]"
            ".map(row => [...row.cells].map(cell => cell.innerText))"
        )
        return rows

    async def wait_for_text(self, text: str) -> None:
        async def is_shown() -> bool:
            return text in await self.text()

        await until(is_shown, lambda: f"{text!r} is not shown; {self.browser.problems}")

    async def look_up(self, account: str) -> None:
        await self.browser.evaluate(f"document.getElementById('account').value = {account!r}")
        await self.browser.evaluate("document.querySelector('#lookup button').click()")

    async def is_wider_than_the_window(self) -> bool:
        wider: bool = await self.browser.evaluate("document.documentElement.scrollWidth > window.innerWidth")
        return wider


@asynccontextmanager
async def open_page(
    database: str, directory: Path, network: FaultyNetwork | None = None, **settings: Any
) -> AsyncIterator[OpenPage]:
    """Run a daemon and a browser; at the end, assert that the browser had nothing to complain about."""
    async with (
        running_daemon(database, directory, network, http_bind="127.0.0.1:0", **settings) as daemon,
        daemon.stages.serve_http() as address,
        open_browser() as browser,
    ):
        yield OpenPage(daemon, browser, f"http://{address}/")
        assert browser.problems == []


async def make_hostile(daemon: RunningDaemon, account: FaultyAccount) -> None:
    """Make every text that comes from outside markup."""
    stages = daemon.stages
    await daemon.db.hosts.save(
        [HostState(f"host {MARKUP}", 1, 9, 9, time() + 900, FetchFailure.HOST_PAUSED, f"error {MARKUP}", None)]
    )
    stages.conditions.report(HOST_FAILING, f"subject {MARKUP}", message=f"message {MARKUP}")
    daemon.network.relay.faults.append(Fault(LIST_REPOS, status=500, times=None))  # so that no gap is closed
    await stages.open_gaps.open(Gap(f"wss://{MARKUP}", str(Shard()), GapReason.NO_CURSOR))
    letter = DeadLetter(
        f"wss://{MARKUP}", 1, f"did:{MARKUP}", MARKUP, Rejection.FIELD_INVALID, f"detail {MARKUP}", b"", 0
    )
    await daemon.db.write(Batch(dead_letters=(letter,)))
    await daemon.execute("select atproto.register_reader($1)", f"reader {MARKUP}")
    await daemon.execute(
        "update indexer.repo set sync_status = 'desynchronized', sync_reason = 'requested', hosting_status = $2,"
        " next_attempt_at = 'infinity', last_failure = 'timeout', last_error = $1 where did = $3",
        f"last {MARKUP}",
        f"hosting {MARKUP}",
        account.did,
    )
    await daemon.execute(
        "update indexer.identity set handle = $1, pds = $1 where did = $2", f"handle {MARKUP}", account.did
    )


async def test_page_shows_what_the_database_has(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        for number in range(7):
            page.daemon.create_account(f"account{number}.test")
        await page.daemon.wait_until_equal()
        await page.open()
        stored = await page.daemon.execute("select sync_status, count(*) from indexer.repo group by 1")
        assert [tuple(row) for row in stored] == [("synchronized", 7)]

        async def shows_the_counts() -> bool:
            shown = {row[0]: row[1] for row in await page.rows("repos")}
            return [shown.get(name) for name in ("synchronized", "desynchronized", "in-progress")] == ["7", "0", "0"]

        await until(shows_the_counts)
        assert await page.text("#progress") == "100\N{NO-BREAK SPACE}%"
        assert (await page.text("#headline")).startswith("Ready: everything up to ")
        assert page.daemon.network.relay_url in await page.text("#process")
        assert await page.browser.evaluate("document.querySelectorAll('canvas').length") == 3
        assert "Links" not in await page.text("#tiles"), "links are off"
        assert "Scope backfill" not in await page.text("#tiles"), "no collection was added"


async def test_links_and_added_collections_are_shown_with_their_progress(database: str, tmp_path: Path) -> None:
    tuning = replace(QUICK, scope=replace(QUICK.scope, interval=3_600.0))
    async with (
        FilteredNetwork(collections=[POST]) as network,
        open_page(database, tmp_path, network, tuning=tuning, collections=POST) as page,
    ):
        page.daemon.create_account("one.test")
        await page.daemon.wait_until_equal()
        await page.open()
        await page.daemon.execute(
            "insert into indexer.link_reader (seq, did, enabled_at) values (0, 'did:plc:j', now() - interval '1 hour')"
        )
        await page.daemon.db.scope.change(collections=[POST, LIKE])
        await page.wait_for_text("46.8")
        assert re.fullmatch("backfill, time left: 1.h .*", await page.text("#links-note"))
        await page.wait_for_text("Scope backfill")
        assert "1" in await page.text("#scope-waiting")
        assert (await page.text("#scope-note")).startswith("repos wait for added collections")
        await page.daemon.execute("update indexer.repo set scope_version = 99")

        async def shows_nothing() -> bool:
            return "Scope backfill" not in await page.text("#tiles")

        await until(shows_nothing)


async def test_running_resync_is_shown_with_account_host_phase_and_bytes(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        account = page.daemon.create_account("slow.test", records=200)
        await page.daemon.wait_until_equal()
        size = sum(map(len, account.repo.export()))
        account.pds.faults.append(Fault(GET_REPO, rate=size // 30))
        page.daemon.lose_commit(account)
        await page.open()

        async def is_loading() -> bool:
            rows = await page.rows("resyncs")
            return bool(rows) and "download the export" in rows[0][2] and rows[0][3].endswith("B")

        await until(is_loading)
        [[did, host, *_]] = await page.rows("resyncs")
        assert (did, host) == (account.did, account.pds.url.removeprefix("http://"))
        account.pds.faults.clear()


async def test_texts_from_outside_never_become_markup(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        account = page.daemon.create_account("hostile.test")
        await page.daemon.wait_until_equal()
        await make_hostile(page.daemon, account)
        await page.open()
        for text in ("host", "error", "subject", "message", "detail", "reader"):
            await page.wait_for_text(f"{text} {MARKUP}")
        await page.wait_for_text(f"did:{MARKUP}")
        await page.wait_for_text(f"wss://{MARKUP}")
        assert "Not ready" in await page.text("#headline")
        await page.look_up(account.did)
        for text in ("handle", "last", "hosting"):
            await page.wait_for_text(f"{text} {MARKUP}")
        assert await page.browser.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert not await page.is_wider_than_the_window()


async def test_page_fits_the_window_in_both_schemes_and_does_not_jump(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        account = page.daemon.create_account("hostile.test")
        await page.daemon.wait_until_equal()
        await make_hostile(page.daemon, account)
        await page.daemon.execute("select atproto.register_reader($1)", "x" * 100)
        await page.browser.call("Page.addScriptToEvaluateOnNewDocument", source=OBSERVE_SHIFTS)
        backgrounds = []
        for width, scheme in VIEWS:
            await page.open(width=width, scheme=scheme)
            await page.wait_for_text("x" * 100)
            assert not await page.is_wider_than_the_window(), (width, scheme)
            assert await page.browser.evaluate("window.shifts") < 0.1, (width, scheme)
            assert await page.browser.evaluate(LOW_CONTRAST) == [], (width, scheme)
            backgrounds.append(await page.browser.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(set(backgrounds)) == 2


OBSERVE_SHIFTS = """
    window.shifts = 0;
    new PerformanceObserver(list => list.getEntries().forEach(entry => { window.shifts += entry.value; }))
        .observe({type: "layout-shift", buffered: true});
"""
# Texts whose contrast with the nearest opaque background is below 4.5, which WCAG 2 demands at level AA.
LOW_CONTRAST = """
    (() => {
        const parts = color => color.match(/[0-9.]+/g).map(Number);
        const luminance = color => parts(color).slice(0, 3).map(value => value / 255)
            .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
            .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
        const background = node => {
            const color = getComputedStyle(node).backgroundColor;
            return (parts(color)[3] ?? 1) === 1 ? color : background(node.parentElement);
        };
        const texts = [...document.querySelectorAll("body *")].filter(node => node.offsetParent !== null
            && [...node.childNodes].some(child => child.nodeType === Node.TEXT_NODE && child.data.trim()));
        return texts.filter(node => {
            const values = [luminance(getComputedStyle(node).color), luminance(background(node))];
            return (Math.max(...values) + 0.05) / (Math.min(...values) + 0.05) < 4.5;
        }).map(node => `${node.tagName} ${node.className}: ${node.innerText}`);
    })()
"""


async def test_account_is_looked_up_by_did_or_handle_and_unknown_ones_are_said(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        account = page.daemon.create_account("known.test")
        await page.daemon.wait_until_equal()
        await page.open()
        await page.look_up(account.did)
        await page.wait_for_text(f"The repo is synchronized: the stored records are those of rev {account.rev}.")
        await page.daemon.execute("update indexer.identity set handle = 'known.test' where did = $1", account.did)
        await page.daemon.execute(
            "update indexer.repo set sync_status = 'desynchronized', sync_reason = 'chain-break',"
            " next_attempt_at = now() + interval '1 day' where did = $1",
            account.did,
        )
        await page.look_up("known.test")
        await page.wait_for_text(Desync.CHAIN_BREAK.text)
        await page.look_up("did:plc:unknown")
        await page.wait_for_text("did:plc:unknown is not in the database.")


async def test_page_says_that_the_daemon_does_not_answer_and_recovers(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        page.daemon.create_account("one.test")
        await page.daemon.wait_until_equal()
        await page.open()
        await page.browser.call("Network.setBlockedURLs", urls=["*status.json*"])
        await page.wait_for_text("The daemon does not answer")
        await page.browser.call("Network.setBlockedURLs", urls=[])
        await page.browser.wait_for("document.getElementById('offline').hidden")
        assert page.browser.problems != [], "the browser reports the requests that failed"
        page.browser.problems.clear()


async def test_page_works_with_the_keyboard_and_names_its_parts(database: str, tmp_path: Path) -> None:
    async with open_page(database, tmp_path) as page:
        await page.open()
        tree = (await page.browser.call("Accessibility.getFullAXTree"))["nodes"]
        named = {(node["role"]["value"], node["name"]["value"]) for node in tree if "name" in node and "role" in node}
        assert {
            ("textbox", "DID or handle"),
            ("button", "Look up"),
            ("heading", "Resyncs in progress"),
            ("columnheader", "Repos"),
        } <= named
        assert any(role == "image" and name.startswith("Chart of the last hour. Lag") for role, name in named)
        await page.browser.evaluate("document.getElementById('account').focus()")
        await page.browser.call("Input.insertText", text="did:plc:typed")
        for kind in ("keyDown", "keyUp"):
            await page.browser.call("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r")
        await page.wait_for_text("did:plc:typed is not in the database.")
