"""A panic in the native core is a bug. It becomes an exception of its caller, whichever thread it happens in."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.local_repo import Write
from indexer.pds.native_reader import NativeReader
from indexer.pds.spool import SpoolSizes
from tests.native_module import module_core, native_core
from tests.sync.signing_account import POST, STORE_ALL, SigningAccount, decoded_event

SIZE_OF_NO_MEMORY = 1 << 63
"""A page of this size is more than the core can allocate."""


def is_panic(error: BaseException) -> bool:
    """Return True for the exception that PyO3 makes of a panic. It has no public name."""
    return type(error).__name__ == "PanicException"


@pytest.fixture(params=[1, 2, 4], ids=["one thread", "two threads", "four threads"])
def core(request: pytest.FixtureRequest) -> Any:
    return module_core(request.param)


@pytest.mark.parametrize("items", [1, 2, 100])
def test_panic_while_a_batch_is_verified_is_raised_by_the_call(core: Any, items: int) -> None:
    with pytest.raises(BaseException, match="the test asked for a panic") as raised:
        core.panic(items).next_results(1)
    assert is_panic(raised.value)


def test_core_goes_on_after_panics_in_many_threads_at_once(core: Any) -> None:
    """Callers in other threads neither wait forever nor get the panic."""

    def call(number: int) -> BaseException | list[Any] | None:
        try:
            begun = core.panic(50) if number % 2 else core.begin([], [], DEFAULT_LIMITS)
            return begun.next_results(1)  # type: ignore[no-any-return]
        except BaseException as error:  # noqa: BLE001 - a panic is no Exception
            return error

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(call, range(200)))
    assert all(isinstance(result, BaseException) and is_panic(result) for result in results[1::2])
    assert results[::2] == [[]] * 100


async def test_panic_in_a_worker_thread_is_raised_where_it_is_awaited(core: Any) -> None:
    with pytest.raises(BaseException, match="the test asked for a panic"):
        await asyncio.wait_for(asyncio.to_thread(core.panic(10).next_results, 1), 30)


def test_verification_goes_on_after_a_panic() -> None:
    core, account = native_core(), SigningAccount()
    events = [decoded_event("commit", account.commit_post(f"p{number}")) for number in range(10)]
    with pytest.raises(BaseException, match="the test asked for a panic"):
        module_core(2).panic(10).next_results(1)
    verified = core.begin_verification([(event, account.key.public) for event in events], STORE_ALL).results()
    assert all(verified)


def test_panic_while_an_export_is_read_ends_each_further_call(tmp_path: Path) -> None:
    account = SigningAccount()
    account.commit(*[Write.create(f"{POST}/r{number}", {"number": number}) for number in range(9)])
    reader = NativeReader(native_core(), tmp_path, DEFAULT_LIMITS, SpoolSizes(1, SIZE_OF_NO_MEMORY))
    reader.write(b"".join(account.repo.export()))
    with pytest.raises(BaseException, match="capacity overflow") as raised:
        reader.block(account.repo.head.cid)
    assert is_panic(raised.value)
    calls: list[Callable[[], object]] = [reader.finish, lambda: reader.write(b"x"), lambda: len(reader)]
    for call in calls:
        with pytest.raises(RuntimeError, match="an earlier call has panicked"):
            call()
    reader.close()


def test_panic_while_rows_are_written_is_raised_by_the_call(tmp_path: Path) -> None:
    account = SigningAccount()
    account.commit(*[Write.create(f"{POST}/r{number}", {"number": number}) for number in range(9)])
    reader = NativeReader(native_core(), tmp_path, DEFAULT_LIMITS)
    reader.write(b"".join(account.repo.export()))
    export = reader.verify(account.did, account.key.public, DEFAULT_LIMITS)
    chunk = export.new_records(STORE_ALL, reader.size).next_chunk()
    assert chunk is not None
    with pytest.raises(BaseException, match="overflow") as raised:
        chunk.change_rows(1, 1, (1 << 31) - 2)
    assert is_panic(raised.value)
    reader.close()
