"""Serve the local network of `indexer demo`, with accounts that write statuses of Statusphere, and with their handles.

    python examples/statusphere_network.py HOST FIRST_PORT SECONDS

The servers use four ports, and the DNS server for the handles the UDP port of the PLC directory. The accounts are
active for SECONDS. The settings that an indexer needs are printed.
"""

import asyncio
import sys
from random import Random
from types import TracebackType
from typing import Any, Self

import dns.exception
import dns.message
import dns.rcode
import dns.rrset

from indexer.cli.demo import daemon_variables
from indexer.demo.local_network import LocalNetwork
from indexer.demo.local_plc import LocalPlc

STATUSES_PER_SECOND = 1.0
STATUS = "xyz.statusphere.status"
_STATUS_NAMES = ("alice", "bob", "carol", "dan", "erin", "frank")
_EMOJI = ("👍", "💙", "🥹", "😤", "🙃", "🚀", "🦋", "🤔")
_STATUS_ACTIONS = {
    "create": 55, "put self": 15, "update": 10, "delete": 10, "create unusual": 4, "rename": 3, "deactivate": 3
}  # fmt: skip
_UNUSUAL: tuple[dict[str, Any], ...] = (
    {"status": 7},
    {"status": "too long to be a status, in bytes and in graphemes"},
    {"createdAt": "yesterday"},
    {"createdAt": None},
)
"""Fields that do not fit the lexicon."""
_DNS_PREFIX = "_atproto."
_DNS_TTL = 1


class StatusActivity:
    """Accounts that write, change and delete statuses of Statusphere.

    They also change their handles and hosting statuses. Some records do not fit the lexicon: no AppView may show them,
    and none may fail on them.
    """

    def __init__(self, network: LocalNetwork) -> None:
        self._random = Random(0)
        self._clock = network.clock
        self._accounts = [network.create_account(f"{name}.test") for name in _STATUS_NAMES]
        self._renamed = 0

    async def run(self, seconds: float, rate: float) -> None:
        """Perform `seconds * rate` steps, at about `rate` steps per second."""
        for account in self._accounts:
            account.create(STATUS, self._status())
        for _ in range(round(seconds * rate)):
            self._perform()
            await asyncio.sleep(1 / rate)

    def _perform(self) -> None:
        """Let one account do one thing. A deactivated account comes back."""
        account = self._random.choice(self._accounts)
        if account.status is not None:
            account.activate()
            return
        (action,) = self._random.choices(tuple(_STATUS_ACTIONS), tuple(_STATUS_ACTIONS.values()))
        own = [path for path in account.records if path.startswith(f"{STATUS}/")]
        match action:
            case "rename":
                self._renamed += 1
                account.set_handle(f"{account.handle.split('.')[0].rstrip('0123456789')}{self._renamed}.test")
            case "deactivate":
                account.set_status("deactivated")
            case "update" if own:
                account.update(self._random.choice(own), self._status())
            case "delete" if own:
                account.delete(self._random.choice(own))
            case "put self" if f"{STATUS}/self" in own:
                account.update(f"{STATUS}/self", self._status())
            case "put self":
                account.create(STATUS, self._status(), "self")
            case "create unusual":
                account.create(STATUS, self._status() | self._random.choice(_UNUSUAL))
            case _:
                account.create(STATUS, self._status())

    def _status(self) -> dict[str, Any]:
        return {"$type": STATUS, "status": self._random.choice(_EMOJI), "createdAt": self._clock.now()}


class LocalDns(asyncio.DatagramProtocol):
    """Serves the TXT record of each handle that the directory has, by UDP, inside `async with`."""

    def __init__(self, plc: LocalPlc, host: str, port: int) -> None:
        self._plc = plc
        self._address = (host, port)
        self._closed = asyncio.Event()

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, self._address)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
        await self._closed.wait()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Respond to a query; ignore what is none."""
        try:
            query = dns.message.from_wire(data)
        except dns.exception.DNSException:
            return
        if query.question:
            self._transport.sendto(self._response(query).to_wire(), addr)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the signature is asyncio's
        """Note that the socket is closed."""
        self._closed.set()

    def _response(self, query: dns.message.Message) -> dns.message.Message:
        question = query.question[0]
        name = question.name.to_text(omit_final_dot=True).lower()
        dids = [
            did
            for did, identity in self._plc.identities.items()
            if identity is not None and name == _DNS_PREFIX + identity.handle.lower()
        ]
        response = dns.message.make_response(query)
        if not dids:
            response.set_rcode(dns.rcode.NXDOMAIN)
        elif question.rdtype.name == "TXT":
            texts = [f'"did={did}"' for did in dids]
            response.answer.append(dns.rrset.from_text(question.name, _DNS_TTL, "IN", "TXT", *texts))
        return response


async def main(host: str, port: int, seconds: float) -> None:
    """Serve the network until cancelled."""
    async with LocalNetwork(host=host, first_port=port) as network, LocalDns(network.plc, host, network.plc.port):
        settings = daemon_variables(network) | {"INDEXER_DNS_SERVERS": f"{host}:{network.plc.port}"}
        del settings["INDEXER_HANDLE_RATE"]
        for name, value in settings.items():
            print(f"{name}={value}", flush=True)  # noqa: T201
        await StatusActivity(network).run(seconds, STATUSES_PER_SECOND)
        await asyncio.get_running_loop().create_future()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
