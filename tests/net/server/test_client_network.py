"""The network of a client, without and with a reverse proxy."""

import pytest
from aiohttp.test_utils import make_mocked_request
from multidict import CIMultiDict

from indexer.net.server.connection_limit import FORWARDED_FOR, client_network


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "network"),
    [
        ("8.8.8.8", (), "8.8.8.8"),
        ("2606:4700:1:2:3:4:5:6", (), "2606:4700:1:2::/64"),
        ("8.8.8.8", ("9.9.9.9",), "8.8.8.8"),
        ("127.0.0.1", (), "127.0.0.1"),
        ("127.0.0.1", ("9.9.9.9",), "9.9.9.9"),
        ("::1", ("8.8.4.4, 9.9.9.9",), "9.9.9.9"),
        ("10.1.2.3", ("8.8.4.4", "2606:4700:1:2:3:4:5:6"), "2606:4700:1:2::/64"),
        ("fd00::1", ("::ffff:9.9.9.9",), "9.9.9.9"),
        ("127.0.0.1", ("9.9.9.9, unknown",), "127.0.0.1"),
        ("127.0.0.1", ("x" * 1_000,), "127.0.0.1"),
    ],
)
def test_only_a_peer_that_may_be_a_proxy_names_the_client(
    peer: str, forwarded_for: tuple[str, ...], network: str
) -> None:
    headers = CIMultiDict((FORWARDED_FOR, line) for line in forwarded_for)
    request = make_mocked_request("GET", "/", headers=headers).clone(remote=peer)
    assert client_network(request) == network
