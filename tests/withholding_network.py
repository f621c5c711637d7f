"""A network whose relay withholds accounts, and whose PDSes have streams of their own."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from indexer.demo.local_pds import LocalPds
from indexer.demo.local_plc import LocalPlc
from indexer.demo.local_relay import SUBSCRIBE_REPOS
from tests.faulty_network import FaultyAccount, FaultyNetwork, FaultyPds, FaultyRelay


class StreamingPds(FaultyPds):
    """A PDS with a stream of its own.

    Attributes:
        events: The stream, which behaves like that of a relay.
    """

    def __init__(self) -> None:
        super().__init__()
        self.events = FaultyRelay(LocalPlc(), first_seq=5_000)
        self.route(SUBSCRIBE_REPOS, self.events.subscribe)


class WithholdingRelay(FaultyRelay):
    """A relay that withholds accounts: it says that they are throttled, and drops their commits."""

    def __init__(self, plc: LocalPlc, first_seq: int = 0) -> None:
        super().__init__(plc, first_seq)
        self.withheld = set[str]()

    def receive(self, pds: LocalPds, did: str, kind: str, payload: dict[str, Any]) -> None:
        if did not in self.withheld:
            super().receive(pds, did, kind, payload)

    def withhold(self, account: FaultyAccount) -> None:
        """Withhold an account from now on."""
        self._report(account, active=False, status="throttled")
        self.withheld.add(account.did)

    def show(self, account: FaultyAccount) -> None:
        """Show an account again."""
        self.withheld.discard(account.did)
        self._report(account, active=True)
        head = account.pds.hosted[account.did].repo.head
        self.listed[account.did].head, self.listed[account.did].rev = head.cid, head.rev

    def _report(self, account: FaultyAccount, **fields: Any) -> None:
        payload = {"did": account.did, "time": datetime.now(UTC).isoformat(), **fields}
        self.receive(account.pds, account.did, "#account", payload)


class WithholdingNetwork(FaultyNetwork):
    """The network. Its accounts are on its PDSes in turn."""

    pds_type, relay_type = StreamingPds, WithholdingRelay
    pdses: Sequence[StreamingPds]
    relay: WithholdingRelay

    def __init__(self, *, pds: int = 2) -> None:
        super().__init__(pds=pds)
        for host in self.pdses:
            host.events.plc = self.plc
            host.events.follow(host)

    @property
    def host(self) -> StreamingPds:
        """The PDS of the first account."""
        return self.pdses[0]
