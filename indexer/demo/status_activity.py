"""Random statuses of Statusphere, the example app of AT Protocol, for the AppViews in `examples/`."""

import asyncio
from random import Random
from typing import Any

from indexer.demo.local_account import LocalAccount
from indexer.demo.local_network import LocalNetwork

STATUS = "xyz.statusphere.status"
NAMES = ("alice", "bob", "carol", "dan", "erin", "frank")
EMOJI = ("👍", "💙", "🥹", "😤", "🙃", "🚀", "🦋", "🤔")
_ACTIONS = {"create": 55, "put self": 15, "update": 10, "delete": 10, "create unusual": 4, "rename": 3, "deactivate": 3}


class StatusActivity:
    """Accounts of their own write, change and delete statuses, and change their handles and hosting statuses.

    Some records do not fit the lexicon: no AppView may show them, and none may fail on them.
    """

    def __init__(self, network: LocalNetwork, seed: int = 0) -> None:
        self._random = Random(seed)
        self._clock = network.clock
        self._accounts = [network.create_account(f"{name}.test") for name in NAMES]
        self._renamed = 0

    async def run(self, seconds: float, rate: float) -> None:
        """Perform `seconds * rate` steps, at `rate` steps per second if the machine is fast enough."""
        clock = asyncio.get_running_loop().time
        began = clock()
        for account in self._accounts:
            account.create(STATUS, self._status())
        for step in range(round(seconds * rate)):
            self.perform()
            await asyncio.sleep(max(0.0, began + (step + 1) / rate - clock()))

    def perform(self) -> None:
        """Let one account do one thing. A deactivated account comes back."""
        account = self._random.choice(self._accounts)
        if account.status is not None:
            account.activate()
            return
        (action,) = self._random.choices(tuple(_ACTIONS), tuple(_ACTIONS.values()))
        own = [path for path in account.records if path.startswith(f"{STATUS}/")]
        if not own:
            action = "create"
        match action:
            case "create":
                account.create(STATUS, self._status())
            case "put self":
                self._put_self(account)
            case "update":
                account.update(self._random.choice(own), self._status())
            case "delete":
                account.delete(self._random.choice(own))
            case "create unusual":
                account.create(STATUS, self._unusual())
            case "rename":
                self._renamed += 1
                account.set_handle(f"{account.handle.split('.')[0].rstrip('0123456789')}{self._renamed}.test")
            case "deactivate":
                account.deactivate()

    def _put_self(self, account: LocalAccount) -> None:
        path = f"{STATUS}/self"
        if path in account.records:
            account.update(path, self._status())
        else:
            account.create(STATUS, self._status(), "self")

    def _status(self) -> dict[str, Any]:
        return {"$type": STATUS, "status": self._random.choice(EMOJI), "createdAt": self._clock.now()}

    def _unusual(self) -> dict[str, Any]:
        """Return a record that does not fit the lexicon."""
        changes: tuple[dict[str, Any], ...] = (
            {"status": 7},
            {"status": "too long to be a status, in bytes and in graphemes"},
            {"createdAt": "yesterday"},
            {"createdAt": None},
        )
        return self._status() | self._random.choice(changes)
