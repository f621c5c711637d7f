"""A small AT Protocol network on loopback: a PLC directory, hosts, a relay; all repositories signed."""

from base64 import b32encode
from hashlib import sha256
from types import TracebackType
from typing import Self

from indexer.atproto import cid
from indexer.atproto.crypto import Curve
from indexer.localnet.account import Account
from indexer.localnet.clock import Clock
from indexer.localnet.pds import Pds
from indexer.localnet.plc import Plc
from indexer.localnet.relay import Relay
from indexer.localnet.server import Server

Truth = dict[str, dict[str, bytes]]
"""DID to path to record CID."""


class LocalNetwork:
    """`async with LocalNetwork() as net:` serves until the block ends. Its parts may be used directly."""

    def __init__(self, *, pds: int = 2, clock: Clock | None = None, relay_window: int | None = None) -> None:
        self.clock = clock or Clock()
        self.plc = Plc()
        self.pdses = [Pds() for _ in range(pds)]
        self.relay = Relay(self.plc, window=relay_window)
        self.accounts: dict[str, Account] = {}
        for host in self.pdses:
            host.listeners.append(self.relay.receive)

    async def __aenter__(self) -> Self:
        for server in self._servers():
            await server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers():
            await server.stop()

    def _servers(self) -> list[Server]:
        return [self.plc, *self.pdses, self.relay]

    @property
    def relay_url(self) -> str:
        return self.relay.url.replace("http", "ws", 1)

    @property
    def plc_url(self) -> str:
        return self.plc.url

    def create_account(self, handle: str | None = None, *, curve: Curve = "k256", pds: int | None = None) -> Account:
        """A new account; without `pds` the hosts take turns. The DID follows from the handle."""
        number = len(self.accounts)
        handle = handle or f"account{number}.test"
        host = self.pdses[number % len(self.pdses) if pds is None else pds]
        account = Account(did_of(handle), handle, curve=curve, pds=host, plc=self.plc, clock=self.clock)
        self.accounts[account.did] = account
        return account

    def truth(self) -> Truth:
        """The records of all active accounts: what an indexer of this network must hold, and nothing else."""
        return {
            account.did: {path: cid.cid_of(block) for path, block in account.records.items()}
            for account in self.accounts.values()
            if account.status is None
        }


def did_of(handle: str) -> str:
    """A did:plc made from the handle, so that the same activity makes the same network."""
    return "did:plc:" + b32encode(sha256(handle.encode()).digest()[:15]).decode().lower()
