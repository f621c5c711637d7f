"""Connections go only to checked addresses, with certificates for the requested names."""

import asyncio
import os
import ssl
from collections.abc import Sequence
from dataclasses import replace
from ipaddress import ip_address
from time import monotonic

import dns.rcode
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.net.http.checked_connector import DnsResolver, resolve_with_system
from indexer.net.http.http_client import OutboundClient, OutboundSettings, Timeouts, host_of
from indexer.reasons import FetchFailure
from tests.net.http.conftest import LOCAL, PUBLIC_ONLY, OutboundWorld
from tests.net.http.scripted_host import ScriptedHost, hang, http_response
from tests.net.identity.name_server import NameServer

TLS = ssl.create_default_context()
PUBLIC, OTHER, PRIVATE = "93.184.216.34", "2606:4700::1111", "10.0.0.7"
DEFAULT = OutboundSettings("test")


async def failure_of(client: OutboundClient, url: str) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        await client.get(url, max_bytes=1_000, timeout=3)
    return failure.value


async def test_connection_goes_to_the_address_that_was_checked(
    world: OutboundWorld, public_client: OutboundClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the first lookup gives a public address, all later ones a private address."""
    world.names["pds.example"] = [[PUBLIC], [PRIVATE]]
    world.host.pages["/"] = http_response(b"hello", headers={"Connection": "close"})
    await public_client.get("https://pds.example/", max_bytes=10)
    await public_client.get("https://pds.example/", max_bytes=10)
    assert world.connected == [(PUBLIC, 443)] * 2
    assert len(world.lookups) == 1, "its addresses are remembered for a few seconds"
    monkeypatch.setattr("indexer.net.http.checked_connector.monotonic", lambda: monotonic() + 60.0)
    assert (await failure_of(public_client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
    assert world.connected == [(PUBLIC, 443)] * 2


async def test_only_the_public_addresses_of_a_name_are_tried(
    world: OutboundWorld, public_client: OutboundClient
) -> None:
    world.names["pds.example"] = [[PRIVATE, "::1", OTHER, "169.254.169.254"]]
    world.host.pages["/"] = http_response(b"hello")
    await public_client.get("https://pds.example/", max_bytes=10)
    assert world.connected == [(OTHER, 443)]


LOCATIONS = """
    https://127.0.0.1/ https://[::1]/ https://[::ffff:127.0.0.1]/ https://[::ffff:7f00:1]/ https://localhost/
    https://inside.example/ https://2130706433/ https://0x7f.1/ https://0177.0.0.1/ https://127.1/
    https://169.254.169.254/latest/meta-data/ //127.0.0.1/ http://pds.example/ http://127.0.0.1/
    https://[::ffff:10.0.0.7]/ https://[64:ff9b::a00:7]/ https://pds.example:8443/ https://pds.example:80/
    https://user@pds.example/ https://user:secret@pds.example/ ftp://pds.example/ file:///etc/passwd
    gopher://pds.example/ https://[::1 https://pds.example:99999/ https://\u0130\u00df.example\u3002/
"""


@pytest.mark.parametrize("location", LOCATIONS.split())
async def test_redirect_target_is_checked_like_a_request(world: OutboundWorld, location: str) -> None:
    async def resolve(name: str, port: int) -> Sequence[str]:
        if name == "pds.example":
            return [PUBLIC]
        return [PRIVATE] if "example" in name else await resolve_with_system(name, port)

    world.host.pages["/"] = http_response(status=302, headers={"Location": location})
    async with OutboundClient(PUBLIC_ONLY, resolve=resolve, tls=world.trust) as client:
        assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
        assert (await failure_of(client, location)).reason is FetchFailure.REFUSED_ADDRESS
    assert {address for address, _ in world.connected} == {PUBLIC}
    assert all(request.startswith("get / ") for request in world.host.requests)
    assert len(world.host.requests) == 1


async def test_certificate_must_match_the_name_and_be_trusted(
    world: OutboundWorld, public_client: OutboundClient
) -> None:
    world.names |= {name: [[PUBLIC]] for name in ("pds.example", "other.example", PUBLIC)}
    async with OutboundClient(PUBLIC_ONLY, resolve=world.resolve) as client:  # it trusts the usual authorities
        assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.UNREACHABLE
    for url in ("https://other.example/", f"https://{PUBLIC}/"):
        assert (await failure_of(public_client, url)).reason is FetchFailure.UNREACHABLE
    assert world.host.requests == []


async def test_invalid_tls_record_within_the_body(world: OutboundWorld, public_client: OutboundClient) -> None:
    world.names["pds.example"] = [[PUBLIC]]

    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(http_response(b"half", length=8))
        await writer.drain()
        os.write(writer.get_extra_info("socket").fileno(), b"\x17\x03\x03\x00\x20" + bytes(32))
        await hang(writer)

    world.host.pages["/"] = broken
    assert (await failure_of(public_client, "https://pds.example/")).reason is FetchFailure.UNREACHABLE


async def test_host_without_tls(world: OutboundWorld) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    settings = replace(PUBLIC_ONLY, timeouts=Timeouts(connect=0.3))
    async with ScriptedHost() as plain, OutboundClient(settings, resolve=world.resolve, tls=world.trust) as client:
        world.host = plain
        failure = await failure_of(client, "https://pds.example/")
        assert failure.reason in {FetchFailure.UNREACHABLE, FetchFailure.TIMEOUT}


async def test_names_that_cannot_be_resolved(world: OutboundWorld, public_client: OutboundClient) -> None:
    async def never_resolve(_name: str, _port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def resolve_to_nothing(_name: str, _port: int) -> Sequence[str]:
        return []

    assert (await failure_of(public_client, "https://unknown.example/")).reason is FetchFailure.UNREACHABLE
    for resolve, reason in ((never_resolve, FetchFailure.TIMEOUT), (resolve_to_nothing, FetchFailure.REFUSED_ADDRESS)):
        settings = replace(DEFAULT, timeouts=Timeouts(connect=0.2))
        async with OutboundClient(settings, resolve=resolve, tls=world.trust) as client:
            assert (await failure_of(client, "https://pds.example/")).reason is reason
    assert world.connected == []


async def test_next_address_is_tried_if_one_is_unreachable(host: ScriptedHost) -> None:
    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    host.pages["/"] = http_response(b"hello")
    async with OutboundClient(LOCAL, resolve=resolve) as client:
        assert (await client.get(f"http://pds.example:{host.port}/", max_bytes=10)).body == b"hello"


# DNS


async def test_ipv4_and_ipv6_addresses_alternate() -> None:
    async with NameServer() as server:
        server.addresses["pds.example"] = [PUBLIC, "1.1.1.1", "8.8.8.8", OTHER]
        found = await DnsResolver([server.address])("pds.example", 443)
    assert {":" in address for address in found[:2]} == {True, False}
    assert set(found) == {PUBLIC, "1.1.1.1", "8.8.8.8", OTHER}


@pytest.mark.slow
@pytest.mark.parametrize("rcode", [dns.rcode.SERVFAIL, dns.rcode.NXDOMAIN, None])
async def test_address_is_found_although_the_query_for_the_other_family_fails(rcode: dns.rcode.Rcode | None) -> None:
    """Some name servers give a wrong response, or none, to a query for AAAA (RFC 4074)."""
    async with NameServer() as server:
        server.addresses["pds.example"] = [PUBLIC]
        server.failing["AAAA"] = rcode
        assert await DnsResolver([server.address], timeout=0.5)("pds.example", 443) == [PUBLIC]


async def test_name_without_addresses_is_no_such_host_and_an_invalid_name_an_error() -> None:
    async with NameServer() as server:
        server.texts["texts.example"] = ["hello"]
        for name in ("unknown.example", "texts.example"):
            with pytest.raises(UnavailableError) as raised:
                await DnsResolver([server.address])(name, 443)
            assert raised.value.reason is FetchFailure.NO_SUCH_HOST
        for name in ("a..b", "a" * 64 + ".example", "xn--\u00e9"):
            with pytest.raises((UnavailableError, UnicodeError)):
                await DnsResolver([server.address])(name, 443)


async def test_dns_server_that_fails_or_never_responds(world: OutboundWorld) -> None:
    async with NameServer() as server:
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(UnavailableError, match="SERVFAIL"):
            await DnsResolver([server.address])("pds.example", 443)
        server.silent = True
        resolve = DnsResolver([server.address], timeout=0.1)
        async with OutboundClient(DEFAULT, resolve=resolve, tls=world.trust) as client:
            assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.TIMEOUT


async def test_names_that_do_not_resolve_do_not_delay_others(world: OutboundWorld) -> None:
    world.host.pages["/"] = http_response(b"hello")
    async with NameServer() as silent, NameServer() as server:
        silent.silent = True
        server.addresses["pds.example"] = [PUBLIC]
        slow, fast = DnsResolver([silent.address], timeout=60), DnsResolver([server.address])

        async def resolve(name: str, port: int) -> Sequence[str]:
            return await (fast if name == "pds.example" else slow)(name, port)

        async with OutboundClient(DEFAULT, resolve=resolve, tls=world.trust) as client:
            waiting = [asyncio.create_task(client.get(f"https://{n}.example/", max_bytes=10)) for n in range(90)]
            await silent.wait_for_queries(len(waiting))
            assert (await client.get("https://pds.example/", max_bytes=10)).body == b"hello"
            assert not any(task.done() for task in waiting)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)


@pytest.mark.parametrize(
    ("notations", "address"),
    [
        ("2130706433 0x7f000001 0177.0.0.1 0x7f.1 127.1", "127.0.0.1"),
        ("93.184.216.34", "93.184.216.34"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
    ],
)
async def test_addresses_in_any_notation_are_not_looked_up(notations: str, address: str) -> None:
    async with NameServer() as server:
        for notation in notations.split():
            found = await DnsResolver([server.address])(notation, 443)
            assert [ip_address(one) for one in found] == [ip_address(address)]
        assert server.queries == []


async def test_name_with_private_addresses_is_refused(world: OutboundWorld) -> None:
    async with NameServer() as server:
        server.addresses["pds.example"] = ["10.0.0.7", "127.0.0.1", "fd00::1"]
        settings = OutboundSettings("test", dns_servers=[server.address])
        async with OutboundClient(settings, tls=world.trust) as client:
            assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
            server.addresses["pds.example"] = [PUBLIC]
            world.host.pages["/"] = http_response(b"hello")
            assert (await client.get("https://PDS.example./", max_bytes=10)).body == b"hello"
    assert world.connected == [(PUBLIC, 443)]


async def test_name_that_is_not_one_of_idna_2008_is_looked_up_as_it_is(world: OutboundWorld) -> None:
    """The first two contain an emoji; the last one has no Unicode form."""
    async with NameServer() as server:
        settings = OutboundSettings("test", dns_servers=[server.address])
        async with OutboundClient(settings, tls=world.trust) as client:
            for name in ("xn--ls8h.example", "xn--i-7iq.example", "xn--a.example"):
                server.addresses[name] = [PUBLIC]
                failure = await failure_of(client, f"https://{name}/")
                assert "certificate" in str(failure), "that of the test has no such name"
    assert world.connected == [(PUBLIC, 443)] * 3


def test_host_of_a_url() -> None:
    for url, host in {
        "https://PDS.Example/xrpc": "pds.example",
        "https://pds.example.:443/": "pds.example",
        "https://pds.example..": "pds.example",
        "https://pds.example:8443": "pds.example:8443",
        "http://pds.example:80": "pds.example",
        "http://[::1]:2583/": "[::1]:2583",
        "https://p\u00e4ds.example/": "xn--pds-qla.example",
    }.items():
        assert host_of(url) == host


async def test_all_notations_of_a_host_share_its_pause(world: OutboundWorld, public_client: OutboundClient) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    world.host.pages["/"] = http_response(status=429, headers={"Retry-After": "60"})
    assert (await failure_of(public_client, "https://pds.example/")).reason is FetchFailure.THROTTLED
    for url in ("https://pds.example./", "https://PDS.EXAMPLE/", "https://pds.example:443/"):
        assert (await failure_of(public_client, url)).reason is FetchFailure.THROTTLED
    assert len(world.host.requests) == 1


async def test_too_long_name_is_refused_and_not_tracked(world: OutboundWorld, public_client: OutboundClient) -> None:
    failure = await failure_of(public_client, f"https://{'a.' * 500}example/")
    assert failure.reason is FetchFailure.REFUSED_ADDRESS
    assert public_client.hosts.unsaved() == []


label = st.text("abcxn-_.0123456789:[]%@/\\ \x00é。", max_size=70)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=80) | label)
@example("a" * 64 + ".example")
@example("a..b")
@example("[]@")
@example("xn--")
@example("[::1%25lo]")
@example("a" * 70_000)
def test_any_name_is_refused_without_other_errors(name: str) -> None:
    """Try any names, up to the certificate check of a connection that is never opened."""

    async def resolve(host: str, _port: int) -> Sequence[str]:
        host.encode("idna")
        TLS.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
        return [PRIVATE]

    async def request() -> None:
        async with OutboundClient(DEFAULT, resolve=resolve, tls=TLS) as client:
            with pytest.raises(UnavailableError):
                await client.get(f"https://{name}/xrpc/method", max_bytes=10)

    asyncio.run(request())
