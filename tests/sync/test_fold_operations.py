"""Operations in the forms that hosts send, folded into one net operation per path."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.inversion import NetOp
from indexer.errors import UpstreamError
from indexer.reasons import Rejection
from indexer.sync.events import RepoOp
from indexer.sync.verify import LegacyOperationsError, fold_operations
from tests.atproto.mst.oracle import cid_of

A, B, C, D = (cid_of(name) for name in (b"a", b"b", b"c", b"d"))
PATH = "app.bsky.feed.like/1"


def create(new: bytes | None, prev: bytes | None = None, path: str = PATH) -> RepoOp:
    return RepoOp("create", path, new, prev)


def update(new: bytes | None, prev: bytes | None = None) -> RepoOp:
    return RepoOp("update", PATH, new, prev)


def delete(prev: bytes | None = None) -> RepoOp:
    return RepoOp("delete", PATH, None, prev)


@pytest.mark.parametrize(
    ("ops", "old", "new", "action"),
    [
        ([create(A)], None, A, "create"),
        ([update(B, A)], A, B, "update"),
        ([delete(A)], A, None, "delete"),
        # Captured from the reference PDS: every prev is the CID before the commit.
        ([delete(A), create(B, A)], A, B, "update"),
        ([create(A), update(B)], None, B, "create"),
        ([update(B, A), update(C, A)], A, C, "update"),
        # Sequential style: each prev is the CID that the previous operation left.
        ([create(A), update(B, A)], None, B, "create"),
        ([update(B, A), update(C, B)], A, C, "update"),
        ([update(B, A), delete(B)], A, None, "delete"),
        ([delete(A), create(B)], A, B, "update"),
        # The action follows from the CIDs, not from the action of the last operation.
        ([update(B, A), delete(A), create(C)], A, C, "update"),
    ],
)
def test_operations_on_one_path_fold_to_one(
    ops: list[RepoOp], old: bytes | None, new: bytes | None, action: str
) -> None:
    (net,) = fold_operations(ops)
    assert net == NetOp(PATH.encode(), old, new)
    assert net.action == action


@pytest.mark.parametrize(
    "ops",
    [
        [],
        [create(A), delete()],  # captured
        [create(A), delete(A)],
        [update(A, A)],  # captured: data unchanged
        [delete(A), create(A, A)],
        [update(B, A), update(A, B)],
    ],
)
def test_paths_that_do_not_change_are_left_out(ops: list[RepoOp]) -> None:
    assert fold_operations(ops) == []


def test_paths_are_in_the_order_of_first_appearance() -> None:
    ops = [create(A, path="b/1"), create(B, path="a/2"), create(C, path="c/3"), create(D, path="b/1")]
    assert fold_operations(ops) == [NetOp(key, None, cid) for key, cid in ((b"b/1", D), (b"a/2", B), (b"c/3", C))]


@pytest.mark.parametrize(
    "ops",
    [
        [create(None)],
        [update(None, A)],
        [RepoOp("delete", PATH, A, A)],
        [update(B, A), update(D, C)],
        [create(A), delete(B)],
        [delete(A), create(C, B)],
        [update(B, A), update(C, B), update(D, B), update(A, B)],  # B is neither the first prev nor the previous CID
        [delete(), update(C, B), create(None)],  # the contradiction is reported before the missing prev
    ],
)
def test_contradictory_operations_are_rejected(ops: list[RepoOp]) -> None:
    with pytest.raises(UpstreamError) as caught:
        fold_operations(ops)
    assert caught.value.reason is Rejection.OPS_MISMATCH
    assert PATH in caught.value.detail


@pytest.mark.parametrize("ops", [[update(B)], [delete()], [create(A, path="a/1"), delete()], [update(B), update(C, B)]])
def test_operations_without_prev_are_reported_as_legacy(ops: list[RepoOp]) -> None:
    with pytest.raises(LegacyOperationsError, match=PATH):
        fold_operations(ops)


steps = st.lists(st.tuples(st.sampled_from(["x/1", "x/2", "y/1"]), st.sampled_from([A, B, C, None])), max_size=12)


@given(st.dictionaries(st.sampled_from(["x/1", "x/2", "y/1"]), st.sampled_from([A, B])), steps, st.data())
def test_the_net_operations_are_the_difference_between_the_two_states(
    before: dict[str, bytes], writes: list[tuple[str, bytes | None]], data: st.DataObject
) -> None:
    """Every `prev` is drawn from the styles that are allowed."""
    state: dict[str, bytes | None] = dict(before)
    ops: list[RepoOp] = []
    seen: set[str] = set()
    for path, new in writes:
        now = state.get(path)
        if new is None and now is None:
            continue
        action = "delete" if new is None else "update" if now else "create"
        styles = [before.get(path)] if path not in seen else [before.get(path), now, None]
        ops.append(RepoOp(action, path, new, data.draw(st.sampled_from(styles))))
        state[path] = new
        seen.add(path)
    changed = {path for path in seen if before.get(path) != state.get(path)}
    net = fold_operations(ops)
    assert {op.key.decode(): (op.old, op.new) for op in net} == {
        path: (before.get(path), state.get(path)) for path in changed
    }
    assert len(net) == len(changed)
