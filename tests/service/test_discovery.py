"""Accounts that a host lists, tracked, whatever ends the reading of the list on the way."""

import asyncpg
import pytest
import stamina

from indexer.errors import UnavailableError
from indexer.outbound import Outbound
from indexer.service.discovery import Discovery
from indexer.store import Store
from indexer.sync.listing import Listing
from tests.outbound.host import Host
from tests.service.lists import BROKEN, asked, page, path
from tests.store.rows import did, insert, synchronized

REV = "3laaaaaaaaa22"


async def discover(store: Store, outbound: Outbound, host: Host) -> list[Listing]:
    """What was heard of each page."""
    discovery, heard = Discovery(store, outbound), list[Listing]()
    ended = await discovery.run(await discovery.begin(host.url, ""), heard.append)
    assert ended == heard[-1]
    return heard


async def tracked(sql: asyncpg.Connection) -> set[str]:
    return {row["did"] for row in await sql.fetch("select did from indexer.repo where status = 'desynchronized'")}


async def test_all_that_are_listed_and_active(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    await insert(store, synchronized("known"))
    gone = {"did": did("gone"), "rev": REV, "active": False, "status": "deactivated"}
    host.pages[path()] = page((did(1), REV), (did("known"), REV), {"did": "nobody"}, cursor="x")
    host.pages[path("x")] = page(gone, (did(2), REV), (did(1), REV))
    heard = await discover(store, outbound, host)
    assert await tracked(sql) == {did(1), did(2)}
    assert [(listing.listed, listing.found, listing.cursor) for listing in heard] == [(2, 1, "x"), (5, 2, None)]
    assert (await store.repos([did("known")]))[did("known")] == synchronized("known")


async def test_it_goes_on_where_it_was_left_and_begins_anew_after_the_end(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    host.pages[path()] = page((did(1), REV), cursor="x")
    host.pages[path("x")] = BROKEN
    with stamina.set_testing(True, attempts=2), pytest.raises(UnavailableError, match="http-status: 404"):
        await discover(store, outbound, host)
    assert asked(host) == [None, "x", "x"]
    assert await tracked(sql) == {did(1)}
    host.pages[path("x")] = page((did(2), REV))
    [listing] = await discover(store, outbound, host)
    assert (listing.listed, listing.found) == (2, 2)
    assert await tracked(sql) == {did(1), did(2)}
    assert asked(host)[3:] == ["x"]
    [*_, again] = await discover(store, outbound, host)
    assert asked(host)[4:] == [None, "x"]
    assert (again.listed, again.found) == (2, 0)
    assert again.began_at > listing.began_at


async def test_a_place_is_never_ahead_of_what_is_tracked(
    store: Store, sql: asyncpg.Connection, host: Host, outbound: Outbound
) -> None:
    """The page and its place are one transaction: with the place refused, the accounts are not there either."""
    host.pages[path()] = page((did(1), REV), cursor="x")
    await sql.execute("alter table indexer.listing add check (listed = 0)")
    with pytest.raises(asyncpg.CheckViolationError):
        await discover(store, outbound, host)
    assert await tracked(sql) == set()


async def test_lists_of_several_collections_have_places_of_their_own(
    store: Store, host: Host, outbound: Outbound
) -> None:
    discovery = Discovery(store, outbound)
    await store.save_listing(Listing("discover", host.url, "com.example.a", "x", 7, 3, began_at=5.0))
    assert (await discovery.begin(host.url, "com.example.a")).cursor == "x"
    assert (await discovery.begin(host.url, "com.example.b")).cursor is None
    assert (await discovery.begin("https://other.example", "com.example.a")).cursor is None


async def test_a_host_that_asks_for_a_pause_gets_it(store: Store, host: Host, outbound: Outbound) -> None:
    """And no more requests than the one that was told so."""
    host.pages[path()] = b"HTTP/1.1 429 Status\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
    with stamina.set_testing(True, attempts=3), pytest.raises(UnavailableError, match="throttled"):
        await discover(store, outbound, host)
    assert asked(host) == [None]
