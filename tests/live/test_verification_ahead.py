"""Commits that wait in the inbox are verified ahead, once each, and their results are kept as long as they wait."""

from indexer.live.copies import Copies
from indexer.live.inbox import Inbox
from indexer.live.repo_row_cache import RepoRowCache
from indexer.live.verification_ahead import MIN_MESSAGES, VerificationAhead
from indexer.sync.batch import ReceivedMessage
from tests.native_module import CountingCore
from tests.sync.signing_account import CONTEXT, SigningAccount, received_message


class Waiting:
    """An inbox with commits of an account without a row, and the verification ahead.

    Attributes:
        core: The native core.
        messages: The messages.
        ahead: The verification of messages in the inbox.
    """

    def __init__(self, count: int) -> None:
        account = SigningAccount()
        self.messages = [received_message("commit", account.commit_post(f"p{number}")) for number in range(count)]
        self.inbox = Inbox(10**9)
        for message in self.messages:
            self.inbox.append(message)
        self.core = CountingCore()
        self._key_state_of = {account.did: account.key_state}.get
        self.ahead = VerificationAhead(self.core, self.inbox, Copies(self.inbox), RepoRowCache(), self._key_state_of)

    async def prepare(self, batch: list[ReceivedMessage]) -> None:
        await self.ahead.prepare(batch, {}, self._key_state_of, CONTEXT)


async def test_waiting_commits_are_verified_once() -> None:
    waiting = Waiting(MIN_MESSAGES)
    waiting.ahead.begin({}, CONTEXT, 500)
    assert len(waiting.ahead.prepared) == 0
    await waiting.ahead.finish()
    await waiting.prepare(waiting.messages)
    waiting.ahead.begin({}, CONTEXT, 500)
    await waiting.ahead.finish()
    assert len(waiting.ahead.prepared) == waiting.core.asked == MIN_MESSAGES
    assert len(waiting.inbox) == MIN_MESSAGES


async def test_nothing_is_left_after_clear_also_of_a_running_verification() -> None:
    waiting = Waiting(MIN_MESSAGES + 1)
    await waiting.prepare(waiting.messages[:1])
    waiting.ahead.begin({}, CONTEXT, 500)
    waiting.ahead.clear()
    await waiting.ahead.finish()
    assert len(waiting.ahead.prepared) == 0
    assert waiting.core.asked == MIN_MESSAGES + 1
