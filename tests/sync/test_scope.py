"""Scopes: what a change of the scope wants, and which records a narrower scope deletes."""

from dataclasses import replace

from indexer.atproto.syntax import CollectionFilter
from indexer.reasons import Desync
from indexer.sync.changes import RecordChange, RepoWrite
from indexer.sync.plan import plan_narrowing
from indexer.sync.repo import Head, Repo, SyncStatus, amend, needs_export, widen
from indexer.sync.scope import Scope, Track, covers, filter_of

HEAD = Head("3laaaaaaaaa22", b"data", b"commit")
SYNCHRONIZED = Repo("did:plc:a", 3, SyncStatus.SYNCHRONIZED, None, HEAD, attempts=2, scope_version=1)


def test_widened_repo_needs_an_export_and_no_back_off() -> None:
    wide = Scope(2, collections=CollectionFilter(["a.b.c", "a.b.d"]), added_in=(0, 2))
    assert (wide.added_after(1), wide.added_after(2)) == (["a.b.d"], [])
    assert needs_export(SYNCHRONIZED, wide)
    assert not needs_export(SYNCHRONIZED._replace(scope_version=2), wide)
    assert widen(SYNCHRONIZED) == amend(
        SYNCHRONIZED, sync_status=SyncStatus.DESYNCHRONIZED, sync_reason=Desync.SCOPE_WIDENED
    )


def test_pattern_covers_another_one_if_it_matches_all_its_collections() -> None:
    covered = "* a.b.c, * a.b.*, a.b.c a.b.c, a.b.* a.b.c, a.b.* a.b.c.*, a.b.* a.b.*"
    others = "a.b.c a.b.d, a.b.* a.bc.d, a.b.c.* a.b.*, a.b.c a.b.c.d, a.b.c *"
    for pairs, expected in ((covered, True), (others, False)):
        for pair in pairs.split(", "):
            outer, inner = pair.split()
            assert covers(outer, inner) is expected, pair


ALL, LISTED = Scope(), Scope(track=Track.LISTED)


def signal_scope(*patterns: str) -> Scope:
    return Scope(track=Track.SIGNAL, signal_collections=filter_of(patterns))


def test_repos_may_be_out_of_a_scope_that_wants_fewer() -> None:
    one, all_, two = signal_scope("a.b.c"), signal_scope("a.b.*"), signal_scope("a.b.c", "d.e.f")
    fewer = [(ALL, LISTED), (ALL, all_), (one, LISTED), (two, all_), (all_, one)]
    not_fewer = [(ALL, ALL), (LISTED, ALL), (LISTED, LISTED), (LISTED, all_), (one, ALL), (one, all_)]
    not_fewer.append((two, signal_scope("d.e.f", "a.b.c", "g.h.i")))
    for pairs, expected in ((fewer, True), (not_fewer, False)):
        for before, after in pairs:
            assert after.may_want_fewer_repos(before) is expected, (str(before), str(after))


def test_scopes_choose_the_same_whatever_the_order_of_their_patterns() -> None:
    one = Scope(1, Track.SIGNAL, CollectionFilter(["a.b.c", "a.b.d"]), (1, 1), CollectionFilter(["e.f.g", "e.f.h"]))
    other = Scope(2, Track.SIGNAL, CollectionFilter(["a.b.d", "a.b.c"]), (1, 2), CollectionFilter(["e.f.h", "e.f.g"]))
    assert one.same_choice(other)
    different = [
        replace(other, track=Track.ALL),
        replace(other, collections=CollectionFilter(["a.b.d"])),
        replace(other, signal_collections=CollectionFilter(["e.f.g"])),
    ]
    assert [one.same_choice(scope) for scope in different] == [False, False, False]
    assert str(one) == "repos signal, collections a.b.c,a.b.d, signal collections e.f.g,e.f.h"
    assert str(Scope(collections=CollectionFilter(["a.b.c"]))) == "repos all, collections a.b.c"


def test_no_pattern_is_no_filter() -> None:
    assert filter_of([]) is None


def test_records_are_deleted_unless_a_resync_or_an_erasure_does_it() -> None:
    in_progress = SYNCHRONIZED._replace(did="did:plc:b", sync_status=SyncStatus.IN_PROGRESS)
    without_head = Repo("did:plc:c", 4)
    repos = {repo.did: repo for repo in (SYNCHRONIZED, in_progress, without_head)}
    keys = [(did, "a.b.c", rkey) for did in (*repos, "did:plc:unknown") for rkey in ("1", "2")]
    changes = tuple([RecordChange("delete", "a.b.c", rkey, None) for rkey in ("1", "2")])
    assert plan_narrowing(repos, keys) == (RepoWrite(SYNCHRONIZED, amend(SYNCHRONIZED), changes),)
