"""The file of an export that the native core reads: it has no name, and is freed as soon as it is closed."""

from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import pytest

from indexer.atproto.cid import DAG_CBOR, cid_of
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.demo.local_repo import car
from indexer.errors import UnavailableError
from indexer.reasons import FetchFailure
from tests.core.native_exports import DID, KEYS, SMALL_BUFFERS, post, posts, repo
from tests.core.unreadable_file import make_unreadable, open_descriptors
from tests.native_module import native_module, native_reader
from tests.sync.signing_account import STORE_ALL

native_module()  # without it, the module is skipped
pytestmark = pytest.mark.slow


def test_the_file_has_no_name_and_is_freed_although_the_export_is_still_referenced(tmp_path: Path) -> None:
    reader = native_reader(tmp_path, DEFAULT_LIMITS, **SMALL_BUFFERS)
    reader.write(car(repo(posts(200))))
    assert list(tmp_path.iterdir()) == []
    blocks = repo(posts(200))
    assert reader.size == sum(len(cid) + 4 + len(block) for cid, block in blocks.items())
    assert reader.block(cid_of(post(0))) == post(0)
    for cid in (DAG_CBOR + bytes(32), b""):
        assert reader.block(cid) is None
    export = reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS)
    assert len(open_descriptors(tmp_path)) == 1
    reader.close()
    assert not open_descriptors(tmp_path)
    for read in (lambda: export.block_of(cid_of(post(0))), export.new_records(STORE_ALL).next_chunk):
        with pytest.raises(UnavailableError, match="closed"):
            read()


def test_a_disk_error_is_reported_by_each_read(tmp_path: Path) -> None:
    key = KEYS["k256"].public
    without_values = replace(STORE_ALL, store_values=False)
    for read in (
        lambda reader, _export: reader.block(cid_of(post(0))),
        lambda reader, _export: reader.verify(DID, key, DEFAULT_LIMITS),
        lambda _reader, export: export.block_of(cid_of(post(0))),
        lambda _reader, export: list(export.records()),
        lambda _reader, export: export.new_records(STORE_ALL).next_chunk(),
        lambda _reader, export: export.new_records(without_values).next_chunk(),
    ):
        with closing(native_reader(tmp_path, DEFAULT_LIMITS, **SMALL_BUFFERS)) as reader:
            reader.write(car(repo(posts(2_000))))
            export = reader.verify(DID, key, DEFAULT_LIMITS)
            make_unreadable(tmp_path)
            with pytest.raises(UnavailableError) as caught:
                read(reader, export)
            assert caught.value.reason is FetchFailure.SPOOL_UNREADABLE


def test_an_export_that_is_closed_while_it_is_verified_frees_its_file(tmp_path: Path) -> None:
    reader = native_reader(tmp_path, DEFAULT_LIMITS, **SMALL_BUFFERS)
    reader.write(car(repo(posts(5_000))))
    records = iter(reader.verify(DID, KEYS["k256"].public, DEFAULT_LIMITS).records())
    started, ended = Event(), Event()

    def walk() -> None:
        with suppress(UnavailableError):
            for _ in records:
                started.set()
        ended.set()

    thread = Thread(target=walk)
    thread.start()
    started.wait()
    reader.close()
    thread.join()
    assert ended.is_set()
    assert not open_descriptors(tmp_path)
