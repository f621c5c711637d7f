"""The table of dead letters: rejected messages, the newest of each relay and reason, until a replay removes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from indexer.db.columns import Connection, columns_of, of_buckets, typed, unnest, values_of
from indexer.db.connections import Area
from indexer.reasons import Rejection
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.changes import DeadLetter
from indexer.sync.shard import bucket_of

MAX_ROWS = 1_000
"""Dead letters that are stored per relay and reason. All subscribed hosts count as one relay."""
MAX_BYTES = 64 * 1024 * 1024
"""Bytes of frames that are stored per relay and reason."""


class DeadLetterGoneError(LookupError):
    """The dead letter does not exist any more: it was resolved, or removed because newer ones came."""


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter without its frame, of which `frame_bytes` are stored. `time` is that of the first rejection."""

    id: int
    time: datetime
    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame_bytes: int
    epoch: int = 0

    @property
    def complete(self) -> bool:
        """True if the whole frame is stored. False if it has the maximum stored length, as it may have been longer."""
        return self.frame_bytes < DEAD_LETTER_BYTES


_COLUMNS = typed(
    "bucket smallint, relay text, seq bigint, did text, kind text, reason text, detail text, frame bytea, epoch bigint"
)

_FIELDS = [name for name in _COLUMNS if name != "bucket"]

# Each account is looked at once, since many of its removals may have been reversed.
_WITH_REMOVED_RECORDS = f"""
    select did from (select distinct unnest(${list(_COLUMNS).index("did") + 1}::text[]) as did) d where exists (
        select from indexer.removal v
        where v.target >= 'at://' || did || '/' and v.target < 'at://' || did || '0' and v.action <> 'show' and (
            v.action = 'redact' or not exists (select from indexer.removal l where l.target = v.target and l.id > v.id)
        )
    )
"""
# A message that may contain a redacted or hidden record is not stored. No frame is searched for records, of which an
# account may have many.
_INSERT = f"""
    insert into indexer.dead_letter ({", ".join(_COLUMNS)}) select {", ".join(_COLUMNS)}
    from {unnest(_COLUMNS, "w")}
    where not exists (
        select from indexer.dead_letter d where d.bucket = w.bucket and {of_buckets("d")}
            and d.relay = w.relay and d.reason = w.reason and d.epoch = w.epoch and d.seq = w.seq and d.frame = w.frame
    ) and not exists (
        select from indexer.removal v where v.target = w.did and v.action = 'redact'
    ) and w.did <> all(array({_WITH_REMOVED_RECORDS}))
    and (w.did is not null or not exists (select from indexer.removal)) and not exists (
        select from indexer.removal v
        where position(':' in v.target) = 0 and position(convert_to(v.target || '/', 'UTF8') in w.frame) > 0
    )
    order by ordinal
"""

# Each reason has its own bounds, so that many rejections for one reason do not remove those for other reasons. URLs of
# hosts begin with http, those of relays with ws.
_TRIM = """
    with ranked as (
        select id, bucket, row_number() over newer as position, sum(octet_length(frame)) over newer as bytes
        from indexer.dead_letter
        where (relay = $1 or starts_with($1, 'http') and starts_with(relay, 'http')) and reason = any($2::text[])
        window newer as (partition by reason order by id desc)
    )
    delete from indexer.dead_letter d using ranked r
    where d.id = r.id and d.bucket = r.bucket and (r.position > $3::bigint or r.bytes > $4::bigint)
"""

_REASONS = {str(reason): reason for reason in Rejection}
_READ = "id, time, relay, seq, did, kind, reason, detail, octet_length(frame) as frame_bytes, epoch"

_NEWEST = f"""
    select {_READ} from indexer.dead_letter
    where ($1::text is null or reason = $1) and ($2::text is null or did = $2) order by id desc limit $3
"""

_IDS = "select id from indexer.dead_letter where reason = $1 order by id"

_UPDATE = """
    update indexer.dead_letter set bucket = $2, seq = $3, did = $4, kind = $5, reason = $6, detail = $7
    where id = $1 returning true
"""


async def insert(connection: Connection, dead_letters: Sequence[DeadLetter]) -> None:
    """Insert dead letters that are new, and delete the oldest ones beyond `MAX_ROWS` and `MAX_BYTES`.

    A relay sends the messages after the cursor again at each connection. Malformed ones do not move the cursor.
    """
    if not dead_letters:
        return
    rows = [(bucket_of(dead_letter.did or ""), *values_of(dead_letter, _FIELDS)) for dead_letter in dead_letters]
    await connection.execute(_INSERT, *columns_of(rows, _COLUMNS))
    for relay in sorted({dead_letter.relay for dead_letter in dead_letters}):
        reasons = sorted({dead_letter.reason for dead_letter in dead_letters if dead_letter.relay == relay})
        await connection.execute(_TRIM, relay, reasons, MAX_ROWS, MAX_BYTES)


class DeadLetters(Area):
    """The stored dead letters."""

    async def newest(self, reason: Rejection | None, did: str | None, limit: int) -> list[StoredDeadLetter]:
        """Return dead letters, newest first, only those of the reason and of the DID if they are given."""
        return [_dead_letter(row) for row in await self._fetch(_NEWEST, reason, did, limit)]

    async def ids(self, reason: Rejection) -> list[int]:
        """Return the IDs of all dead letters with this reason, oldest first."""
        return [id_ for (id_,) in await self._fetch(_IDS, reason)]

    async def load(self, id_: int) -> tuple[StoredDeadLetter, bytes] | None:
        """Return a dead letter and its stored frame; None if it does not exist."""
        async with self._pool.connection() as connection:
            row = await connection.fetchrow(f"select {_READ}, frame from indexer.dead_letter where id = $1", id_)
            return None if row is None else (_dead_letter(row), row["frame"])

    async def update(self, id_: int, rejected: DeadLetter) -> None:
        """Store why a replayed message was rejected again. Frame, relay and time stay.

        Raises:
            DeadLetterGoneError: The dead letter does not exist.
        """
        values = values_of(rejected, ("seq", "did", "kind", "reason", "detail"))
        if not await self._fetchval(_UPDATE, id_, bucket_of(rejected.did or ""), *values):
            raise DeadLetterGoneError(id_)


async def delete(connection: Connection, id_: int) -> None:
    """Delete a dead letter.

    Raises:
        DeadLetterGoneError: The dead letter does not exist.
    """
    if not await connection.fetchval("delete from indexer.dead_letter where id = $1 returning true", id_):
        raise DeadLetterGoneError(id_)


def _dead_letter(row: asyncpg.Record) -> StoredDeadLetter:
    columns: dict[str, Any] = {name: row[name] for name in StoredDeadLetter.__dataclass_fields__}
    return StoredDeadLetter(**columns | {"reason": _REASONS[row["reason"]]})
