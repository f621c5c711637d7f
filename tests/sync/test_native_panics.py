"""A panic in the native core is a bug. It becomes an exception of its caller, whichever thread it happens in."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.localnet.local_repo import Write
from indexer.pds.native_reader import NativeReader
from indexer.pds.spool import SpoolSizes
from tests.native_module import module_core, native_core, native_module
from tests.sync.signing_account import POST, SigningAccount

native_module()  # without it, the module is skipped

SIZE_OF_NO_MEMORY = 1 << 63
"""A page of this size is more than the core can allocate."""


def is_panic(error: BaseException) -> bool:
    """Return True for the exception that PyO3 makes of a panic. It has no public name."""
    return type(error).__name__ == "PanicException"


@pytest.fixture(params=[1, 4], ids=["one thread", "four threads"])
def core(request: pytest.FixtureRequest) -> Any:
    return module_core(request.param)


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
