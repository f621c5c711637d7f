"""Where connections go: to the addresses that were checked, under certificates for the names that were asked for."""

import asyncio
import ssl
from collections.abc import Sequence
from ipaddress import ip_address

import dns.rcode
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from indexer.errors import UnavailableError
from indexer.outbound import Outbound, Patience, host_of
from indexer.outbound.network import NameServers, system_addresses
from indexer.reasons import FetchFailure
from tests.identity.names import NameServer
from tests.outbound.conftest import IMPATIENT, World
from tests.outbound.host import Host, answer
from tests.serving import until

TLS = ssl.create_default_context()
PUBLIC, OTHER, PRIVATE = "93.184.216.34", "2606:4700::1111", "10.0.0.7"


async def failure_of(client: Outbound, url: str) -> UnavailableError:
    with pytest.raises(UnavailableError) as failure:
        await client.get(url, max_bytes=1_000, timeout=3)
    return failure.value


async def test_a_public_host(world: World) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    world.host.pages["/"] = answer(b"hello")
    client = world.client()
    for _ in range(3):
        assert (await client.get("https://pds.example/", max_bytes=10)).body == b"hello"
    await client.close()
    assert world.connected == [(PUBLIC, 443)]
    assert world.asked == ["pds.example"]
    assert "host: pds.example\r\n" in world.host.requests[0]


async def test_the_address_that_was_checked_is_the_one_connected_to(world: World) -> None:
    """A rebinding name server: public when first asked, private ever after."""
    world.names["pds.example"] = [[PUBLIC], [PRIVATE]]
    world.host.pages["/"] = answer(b"hello", headers={"Connection": "close"})
    client = world.client()
    await client.get("https://pds.example/", max_bytes=10)
    assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
    await client.close()
    assert world.connected == [(PUBLIC, 443)]


async def test_of_a_names_addresses_only_public_ones_are_tried(world: World) -> None:
    world.names["pds.example"] = [[PRIVATE, "::1", OTHER, "169.254.169.254"]]
    world.host.pages["/"] = answer(b"hello")
    client = world.client()
    await client.get("https://pds.example/", max_bytes=10)
    await client.close()
    assert world.connected == [(OTHER, 443)]


@pytest.mark.parametrize(
    "location",
    [
        "https://127.0.0.1/",
        "https://[::1]/",
        "https://[::ffff:127.0.0.1]/",
        "https://[::ffff:7f00:1]/",
        "https://localhost/",
        "https://inside.example/",
        "https://2130706433/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://169.254.169.254/latest/meta-data/",
        "//127.0.0.1/",
        "http://pds.example/",
        "http://127.0.0.1/",
        "https://pds.example:8443/",
        "https://pds.example:80/",
        "https://user@pds.example/",
        "https://user:secret@pds.example/",
        "ftp://pds.example/",
        "file:///etc/passwd",
        "gopher://pds.example/",
        "https://[::1",
        "https://pds.example:99999/",
        "https://\u0130\u00df.example\u3002/",
    ],
)
async def test_a_redirect_is_checked_like_a_request(world: World, location: str) -> None:
    async def resolve(name: str, port: int) -> Sequence[str]:
        if name == "pds.example":
            return [PUBLIC]
        return [PRIVATE] if "example" in name else await system_addresses(name, port)

    client = Outbound(user_agent="test", patience=IMPATIENT, resolve=resolve, tls=world.trust)
    world.host.pages["/"] = answer(status=302, headers={"Location": location})
    assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
    assert (await failure_of(client, location)).reason is FetchFailure.REFUSED_ADDRESS
    assert {address for address, _ in world.connected} == {PUBLIC}
    assert all(request.startswith("get / ") for request in world.host.requests)
    assert len(world.host.requests) == 1
    await client.close()


async def test_the_relays_redirect_to_a_pds(world: World) -> None:
    world.names |= {"relay.example": [[PUBLIC]], "pds.example": [[OTHER]]}
    world.host.pages["/repo?did=a"] = answer(status=302, headers={"Location": "https://pds.example/export"})
    world.host.pages["/export"] = answer(b"car")
    client = world.client()
    assert (await client.get("https://relay.example/repo?did=a", max_bytes=10)).url == "https://pds.example/export"
    await client.close()
    assert world.connected == [(PUBLIC, 443), (OTHER, 443)]


async def test_a_certificate_must_be_for_the_name(world: World) -> None:
    world.names |= {name: [[PUBLIC]] for name in ("pds.example", "other.example", PUBLIC)}
    world.host.pages["/"] = answer(b"hello")
    client = world.client()
    assert (await client.get("https://pds.example/", max_bytes=10)).body == b"hello"
    assert (await failure_of(client, "https://other.example/")).reason is FetchFailure.UNREACHABLE
    assert (await failure_of(client, f"https://{PUBLIC}/")).reason is FetchFailure.UNREACHABLE
    await client.close()


async def test_a_certificate_must_be_trusted(world: World) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    client = Outbound(user_agent="test", patience=IMPATIENT, resolve=world.resolve)
    assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.UNREACHABLE
    await client.close()
    assert world.host.requests == []


async def test_tls_that_breaks_in_the_middle(world: World, certificate: str) -> None:
    """Plain bytes where a TLS record should be."""
    world.names["pds.example"] = [[PUBLIC]]

    async def broken(writer: asyncio.StreamWriter) -> None:
        writer.write(answer(b"half", length=8))
        await writer.drain()
        writer.get_extra_info("socket").send(b"\x17\x03\x03\x00\x20" + bytes(32))
        await asyncio.get_running_loop().create_future()

    world.host.pages["/"] = broken
    client = world.client()
    assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.UNREACHABLE
    await client.close()


async def test_tls_with_a_host_that_speaks_none(world: World) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    async with Host() as plain:
        world.host = plain
        client = world.client()
        assert (await failure_of(client, "https://pds.example/")).reason in {
            FetchFailure.UNREACHABLE,
            FetchFailure.TIMEOUT,
        }
        await client.close()


async def test_names_that_lead_nowhere(world: World) -> None:
    async def hang(_name: str, _port: int) -> Sequence[str]:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]

    async def none(_name: str, _port: int) -> Sequence[str]:
        return []

    client = world.client()
    assert (await failure_of(client, "https://unknown.example/")).reason is FetchFailure.UNREACHABLE
    await client.close()
    for resolve, reason in ((hang, FetchFailure.TIMEOUT), (none, FetchFailure.REFUSED_ADDRESS)):
        client = Outbound(user_agent="test", resolve=resolve, tls=world.trust)
        with pytest.raises(UnavailableError) as failure:
            await client.get("https://pds.example/", max_bytes=10, timeout=0.3)
        assert failure.value.reason is reason
        await client.close()
    assert world.connected == []


async def test_the_next_address_is_tried_when_one_is_dead(host: Host) -> None:
    async def resolve(_name: str, _port: int) -> Sequence[str]:
        return ["127.0.0.2", "127.0.0.1"]

    host.pages["/"] = answer(b"hello")
    client = Outbound(user_agent="test", allow_private_hosts=True, resolve=resolve)
    assert (await client.get(f"http://pds.example:{host.port}/", max_bytes=10)).body == b"hello"
    await client.close()


# The DNS


async def test_addresses_of_both_families_in_turn() -> None:
    async with NameServer() as server:
        server.addresses["pds.example"] = [PUBLIC, "1.1.1.1", "8.8.8.8", OTHER]
        found = await NameServers([server.address])("pds.example", 443)
    assert {":" in address for address in found[:2]} == {True, False}
    assert set(found) == {PUBLIC, "1.1.1.1", "8.8.8.8", OTHER}


@pytest.mark.parametrize("name", ["unknown.example", "texts.example"])
async def test_names_without_an_address(name: str) -> None:
    async with NameServer() as server:
        server.texts["texts.example"] = ["hello"]
        with pytest.raises(UnavailableError) as raised:
            await NameServers([server.address])(name, 443)
    assert raised.value.reason is FetchFailure.NO_SUCH_HOST


@pytest.mark.parametrize("name", ["a..b", "a" * 64 + ".example", "xn--\u00e9"])
async def test_names_that_are_none(name: str) -> None:
    async with NameServer() as server:
        with pytest.raises((OSError, UnicodeError)):
            await NameServers([server.address])(name, 443)


async def test_a_name_server_that_fails() -> None:
    async with NameServer() as server:
        server.rcode = dns.rcode.SERVFAIL
        with pytest.raises(OSError, match="SERVFAIL"):
            await NameServers([server.address])("pds.example", 443)


async def test_a_name_server_that_never_answers(world: World) -> None:
    async with NameServer() as server:
        server.silent = True
        client = Outbound(user_agent="test", resolve=NameServers([server.address], 0.2), tls=world.trust)
        assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.TIMEOUT
        assert "pds.example" in server.asked
        await client.close()


async def test_many_names_whose_server_hangs_hold_up_no_other(world: World) -> None:
    world.host.pages["/"] = answer(b"hello")
    async with NameServer() as silent, NameServer() as server:
        silent.silent = True
        server.addresses["pds.example"] = [PUBLIC]
        slow, fast = NameServers([silent.address]), NameServers([server.address])

        async def resolve(name: str, port: int) -> Sequence[str]:
            return await (fast if name == "pds.example" else slow)(name, port)

        client = Outbound(user_agent="test", patience=Patience(connect=0.5), resolve=resolve, tls=world.trust)
        hanging = [asyncio.create_task(failure_of(client, f"https://{n}.example/")) for n in range(90)]
        await until(lambda: len(silent.asked) >= len(hanging))
        assert (await client.get("https://pds.example/", max_bytes=10)).body == b"hello"
        assert {failure.reason for failure in await asyncio.gather(*hanging)} == {FetchFailure.TIMEOUT}
        await client.close()


@pytest.mark.parametrize(
    ("form", "address"),
    [
        ("2130706433", "127.0.0.1"),
        ("0x7f000001", "127.0.0.1"),
        ("0177.0.0.1", "127.0.0.1"),
        ("0x7f.1", "127.0.0.1"),
        ("127.1", "127.0.0.1"),
        ("93.184.216.34", "93.184.216.34"),
        ("::ffff:127.0.0.1", "::ffff:127.0.0.1"),
        ("64:ff9b::7f00:1", "64:ff9b::7f00:1"),
    ],
)
async def test_addresses_in_any_form_are_addresses_and_not_names(form: str, address: str) -> None:
    async with NameServer() as server:
        assert [ip_address(found) for found in await NameServers([server.address])(form, 443)] == [ip_address(address)]
        assert server.asked == []


@pytest.mark.parametrize(
    "form", ["2130706433", "0x7f.1", "0177.0.0.1", "127.1", "[::ffff:10.0.0.7]", "[64:ff9b::a00:7]"]
)
async def test_private_addresses_in_any_form(world: World, form: str) -> None:
    """As in production: with the DNS."""
    async with NameServer() as server:
        client = Outbound(user_agent="test", dns_servers=[server.address], tls=world.trust)
        assert (await failure_of(client, f"https://{form}/")).reason is FetchFailure.REFUSED_ADDRESS
        await client.close()
    assert world.connected == []


async def test_a_name_that_leads_to_a_private_address(world: World) -> None:
    async with NameServer() as server:
        server.addresses["pds.example"] = ["10.0.0.7", "127.0.0.1", "fd00::1"]
        client = Outbound(user_agent="test", dns_servers=[server.address], tls=world.trust)
        assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.REFUSED_ADDRESS
        server.addresses["pds.example"] = [PUBLIC]
        world.host.pages["/"] = answer(b"hello")
        assert (await client.get("https://PDS.example./", max_bytes=10)).body == b"hello"
        await client.close()
    assert world.connected == [(PUBLIC, 443)]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://PDS.Example/xrpc", "pds.example"),
        ("https://pds.example.:443/", "pds.example"),
        ("https://pds.example..", "pds.example"),
        ("https://pds.example:8443", "pds.example:8443"),
        ("http://pds.example:80", "pds.example"),
        ("http://[::1]:2583/", "[::1]:2583"),
        ("https://p\u00e4ds.example/", "xn--pds-qla.example"),
    ],
)
def test_one_host_has_one_name(url: str, host: str) -> None:
    assert host_of(url) == host


async def test_a_host_is_one_however_it_is_written(world: World) -> None:
    world.names["pds.example"] = [[PUBLIC]]
    world.host.pages["/"] = answer(status=429, headers={"Retry-After": "60"})
    client = world.client()
    assert (await failure_of(client, "https://pds.example/")).reason is FetchFailure.THROTTLED
    for url in ("https://pds.example./", "https://PDS.EXAMPLE/", "https://pds.example:443/"):
        assert (await failure_of(client, url)).reason is FetchFailure.THROTTLED
    assert len(world.host.requests) == 1
    await client.close()


async def test_a_name_longer_than_names_can_be_is_not_even_remembered(world: World) -> None:
    client = world.client()
    failure = await failure_of(client, f"https://{'a.' * 500}example/")
    assert failure.reason is FetchFailure.REFUSED_ADDRESS
    assert client.hosts.unsaved() == []
    await client.close()


hostile_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=80)
label = st.text("abcxn-_.0123456789:[]%@/\\ \x00é。", max_size=70)


@given(hostile_names | label)
@example("a" * 64 + ".example")
@example("a..b")
@example(".example")
@example("example.")
@example("xn--")
@example("[::1%25lo]")
@example("a" * 70_000)
def test_no_name_breaks_us(name: str) -> None:
    """With names as they come, up to the certificate check of a connection that is never made."""

    async def resolve(host: str, _port: int) -> Sequence[str]:
        host.encode("idna")
        TLS.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_hostname=host)
        return [PRIVATE]

    async def ask() -> None:
        client = Outbound(user_agent="test", resolve=resolve, tls=TLS)
        try:
            with pytest.raises(UnavailableError):
                await client.get(f"https://{name}/xrpc/method", max_bytes=10)
        finally:
            await client.close()

    asyncio.run(ask())
