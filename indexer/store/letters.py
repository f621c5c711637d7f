"""Dead letters: refused messages, of each relay and reason the newest ones, until a replay settles them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from indexer.reasons import Rejection
from indexer.store.rows import Connection, columns_of, plain, unnest
from indexer.sync.batch import DEAD_LETTER_BYTES
from indexer.sync.plan import DeadLetter
from indexer.sync.shard import bucket_of

MOST = 1_000  # kept of each reason and relay, the newest
MOST_BYTES = 64 * 1024 * 1024  # and their frames' bytes


class LetterGoneError(LookupError):
    """Somebody else has settled the letter, or it was dropped for newer ones."""


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter but for its frame, of which `frame_bytes` are kept. `time` is when it was refused first."""

    id: int
    time: datetime
    relay: str
    seq: int | None
    did: str | None
    kind: str
    reason: Rejection
    detail: str
    frame_bytes: int

    @property
    def whole(self) -> bool:
        """Whether all of the frame is kept; one that may just be as long as the longest that are counts as cut."""
        received = self.frame_bytes > 0 or self.reason is not Rejection.FRAME_TOO_LARGE
        return received and self.frame_bytes < DEAD_LETTER_BYTES


_COLUMNS = {
    "bucket": "smallint",
    "relay": "text",
    "seq": "bigint",
    "did": "text",
    "kind": "text",
    "reason": "text",
    "detail": "text",
    "frame": "bytea",
}

_INSERT = f"""
    insert into indexer.dead_letter ({", ".join(_COLUMNS)}) select {", ".join(_COLUMNS)}
    from {unnest(_COLUMNS, "w")} order by place
"""

# By reason, so that a flood of one kind leaves the others where they are.
_TRIM = """
    with letter as (
        select id, bucket, row_number() over newer as place, sum(octet_length(frame)) over newer as bytes
        from indexer.dead_letter where relay = $1 and reason = any($2::text[])
        window newer as (partition by reason order by id desc)
    )
    delete from indexer.dead_letter d using letter l
    where d.id = l.id and d.bucket = l.bucket and (l.place > $3::bigint or l.bytes > $4::bigint)
"""

_REASONS = {str(reason): reason for reason in Rejection}
_READ = "id, time, relay, seq, did, kind, reason, detail, octet_length(frame) as frame_bytes"

_NEWEST = f"""
    select {_READ} from indexer.dead_letter
    where ($1::text is null or reason = $1) and ($2::text is null or did = $2) order by id desc limit $3
"""

_ONE = f"select {_READ}, frame from indexer.dead_letter where id = $1"

_OF_REASON = "select id from indexer.dead_letter where reason = $1 order by id"

_AMEND = """
    update indexer.dead_letter set bucket = $2, seq = $3, did = $4, kind = $5, reason = $6, detail = $7
    where id = $1 returning true
"""

_DELETE = "delete from indexer.dead_letter where id = $1 returning true"


async def write(connection: Connection, letters: Sequence[DeadLetter]) -> None:
    """Adds these, and drops the oldest beyond the bounds."""
    if not letters:
        return
    rows = [
        (
            bucket_of(letter.did or ""),
            letter.relay,
            letter.seq,
            plain(letter.did),
            plain(letter.kind),
            letter.reason,
            plain(letter.detail),
            letter.frame,
        )
        for letter in letters
    ]
    await connection.execute(_INSERT, *columns_of(rows, _COLUMNS))
    for relay in sorted({letter.relay for letter in letters}):
        reasons = sorted({letter.reason for letter in letters if letter.relay == relay})
        await connection.execute(_TRIM, relay, reasons, MOST, MOST_BYTES)


async def newest(connection: Connection, reason: Rejection | None, did: str | None, most: int) -> list[Letter]:
    return [_letter(row) for row in await connection.fetch(_NEWEST, reason, did, most)]


async def of_reason(connection: Connection, reason: Rejection) -> list[int]:
    return [number for (number,) in await connection.fetch(_OF_REASON, reason)]


async def read(connection: Connection, number: int) -> tuple[Letter, bytes] | None:
    row = await connection.fetchrow(_ONE, number)
    return None if row is None else (_letter(row), row["frame"])


async def amend(connection: Connection, number: int, refused: DeadLetter) -> None:
    """The letter as it was refused once more; its frame, relay and time stay. Raises `LetterGoneError`."""
    did, kind, detail = plain(refused.did), plain(refused.kind), plain(refused.detail)
    values = (bucket_of(refused.did or ""), refused.seq, did, kind, refused.reason, detail)
    if not await connection.fetchval(_AMEND, number, *values):
        raise LetterGoneError(number)


async def delete(connection: Connection, number: int) -> None:
    """Raises `LetterGoneError`."""
    if not await connection.fetchval(_DELETE, number):
        raise LetterGoneError(number)


def _letter(row: asyncpg.Record) -> Letter:
    columns: dict[str, Any] = {name: row[name] for name in Letter.__dataclass_fields__}
    return Letter(**columns | {"reason": _REASONS[row["reason"]]})
