"""The network of the examples has DNS for its handles."""

from typing import Any

from examples.statusphere_network import LocalDns
from indexer.demo.local_network import LocalNetwork
from indexer.errors import UnavailableError
from indexer.net.http.http_client import OutboundClient
from indexer.net.identity.handle_verifier import HandleVerifier
from indexer.reasons import FetchFailure
from tests.free_ports import free_ports


class NoHttp(OutboundClient):
    def __init__(self) -> None:
        """Need no session."""

    async def get(self, url: str, **_: Any) -> Any:
        raise UnavailableError(FetchFailure.NO_SUCH_HOST, url)


async def test_handles_resolve_by_dns_to_their_accounts() -> None:
    async with LocalNetwork() as net:
        port = free_ports(1)
        account, other = net.create_account("ada.test"), net.create_account("bob.test")
        async with LocalDns(net.plc, "127.0.0.1", port):
            verifier = HandleVerifier(NoHttp(), [("127.0.0.1", port)], allow_private_hosts=True)
            assert await verifier.verify_handle(account.did, "ada.test") == "ada.test"
            assert await verifier.verify_handle(other.did, "ada.test") == "handle.invalid"
