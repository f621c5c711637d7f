"""A local AT Protocol network: a PLC directory, PDSes and a relay, usually on loopback, with signed repos."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from indexer.atproto import cid
from indexer.atproto.crypto import Curve
from indexer.demo.http_server import LOOPBACK, HttpServer
from indexer.demo.local_account import LocalAccount
from indexer.demo.local_pds import LocalPds
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_relay import LocalRelay
from indexer.demo.local_repo import TidClock

RecordsByRepo = dict[str, dict[str, bytes]]
"""DID to path to record CID."""


class LocalNetwork:
    """The network, serving inside `async with LocalNetwork() as net:`.

    All servers listen on `host`. The relay uses `first_port`, then come the PLC directory and the PDSes. Without
    `first_port`, the system chooses all ports.

    Attributes:
        clock: Makes the TIDs and timestamps of all accounts.
        relay: Receives the events of all PDSes and numbers them.
        accounts: The accounts by DID.
        servers: All servers.
    """

    plc_type, pds_type, relay_type, account_type = LocalPlc, LocalPds, LocalRelay, LocalAccount

    def __init__(self, *, pds: int = 2, host: str = LOOPBACK, first_port: int = 0) -> None:
        self.clock = TidClock()
        self.plc = self.plc_type()
        self.pdses: Sequence[LocalPds] = [self.pds_type() for _ in range(pds)]
        self.relay = self.relay_type(self.plc)
        self._accounts: dict[str, LocalAccount] = {}
        self.accounts: Mapping[str, LocalAccount] = self._accounts
        for pds_server in self.pdses:
            self.relay.follow(pds_server)
        self.servers: list[HttpServer] = [self.relay, self.plc, *self.pdses]
        for number, server in enumerate(self.servers):
            server.host = host
            server.port = first_port + number if first_port else 0

    async def __aenter__(self) -> Self:
        for server in self.servers:
            await server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self.servers:
            await server.stop()

    @property
    def relay_url(self) -> str:
        """The websocket URL of the relay."""
        return self.relay.url.replace("http", "ws", 1)

    @property
    def plc_url(self) -> str:
        """The URL of the PLC directory."""
        return self.plc.url

    def create_account(
        self, handle: str | None = None, *, curve: Curve = "k256", pds: int | None = None
    ) -> LocalAccount:
        """Create an account, on PDS number `pds` or else on the PDSes in turn. Its DID is derived from the handle."""
        number = len(self.accounts)
        handle = handle or f"account{number}.test"
        host = self.pdses[number % len(self.pdses) if pds is None else pds]
        account = self.account_type(handle, curve=curve, pds=host, plc=self.plc, clock=self.clock)
        self._accounts[account.did] = account
        return account

    def expected_records(self) -> RecordsByRepo:
        """Return the records of all active accounts: exactly these an indexer of this network must show."""
        return {
            account.did: {path: cid.cid_of(block) for path, block in account.records.items()}
            for account in self.accounts.values()
            if account.status is None
        }
