"""Reading a whole repo list."""

import asyncio

import pytest
import stamina

from indexer.concurrency.stage_progress import Work
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.pds.xrpc import MethodNotOfferedError
from indexer.reasons import FetchFailure
from indexer.tasks.repo_list_pages import repo_list_pages
from tests.db.repo_rows import did
from tests.net.http.scripted_host import ScriptedHost
from tests.net.pds.missing_methods import MISSING_METHOD_ANSWERS, MissingMethodAnswer
from tests.tasks.crawl_scenario import missing_method, page, path, requested_cursors

REV = "3laaaaaaaaa22"


async def read(host: ScriptedHost, outbound: OutboundClient) -> list[str]:
    """Return the DIDs of all pages."""
    return [
        account.did
        async for listed in repo_list_pages(outbound, host.url, "", None, Work())
        for account in listed.entries
    ]


@pytest.mark.parametrize("server", MISSING_METHOD_ANSWERS, ids=lambda answer: answer.server)
async def test_definite_answer_is_not_asked_for_again(
    host: ScriptedHost, outbound: OutboundClient, server: MissingMethodAnswer
) -> None:
    """One without an XRPC error may come from a proxy before a host that is down."""
    host.pages[path()] = missing_method(server)
    with stamina.set_testing(True, attempts=2), pytest.raises(MethodNotOfferedError):
        await read(host, outbound)
    assert len(host.requests) == (1 if server.name else 2)


@pytest.mark.parametrize(("before", "length"), [(0, 2), (3, 2), (1, 7), (20, 3)])
async def test_list_whose_cursors_lead_in_a_circle_is_not_read_without_end(
    host: ScriptedHost, outbound: OutboundClient, before: int, length: int
) -> None:
    cursors = [f"c{number}" for number in range(before + length)]
    host.pages[path()] = page(cursor=cursors[0])
    for number, cursor in enumerate(cursors):
        following = number + 1 if number + 1 < len(cursors) else before
        host.pages[path(cursor)] = page((did(number), REV), cursor=cursors[following])
    async with asyncio.timeout(20):
        with pytest.raises(UnavailableError, match="lead in a circle") as failure:
            await read(host, outbound)
    assert failure.value.reason is FetchFailure.BAD_ANSWER
    assert set(cursors) < set(requested_cursors(host)), "all pages were read before"
    assert len(host.requests) <= 4 * (before + length) + 4
