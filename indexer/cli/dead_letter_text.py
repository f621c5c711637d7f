"""Dead letters and the results of replays, as text for people and as JSON for scripts."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from indexer.db import StoredDeadLetter
from indexer.db.feed_delivery import SetAside
from indexer.errors import UpstreamError
from indexer.live.dead_letter_replay import ReplayResult
from indexer.sync.events import frame_for_display
from indexer.telemetry.log import printable

MAX_DETAIL_CHARACTERS = 160


def dead_letter_dict(dead_letter: StoredDeadLetter) -> dict[str, Any]:
    """Return a dead letter by column, with the sentence of its reason and whether its frame is complete."""
    return asdict(dead_letter) | {"meaning": dead_letter.reason.text, "complete": dead_letter.complete}


def dead_letter_report(dead_letter: StoredDeadLetter, frame: bytes) -> dict[str, Any]:
    """Return a dead letter with the fields of its message; `unreadable` says why they cannot be decoded, if so."""
    try:
        return dead_letter_dict(dead_letter) | frame_for_display(frame) | {"unreadable": None}
    except UpstreamError as error:
        return dead_letter_dict(dead_letter) | {"header": None, "payload": None, "unreadable": error.detail}


def dead_letter_lines(dead_letter: StoredDeadLetter) -> str:
    """Return the entry of a list: two lines, or three if there is a detail."""
    cells = [
        str(dead_letter.id),
        dead_letter.time.isoformat(" ", "seconds"),
        dead_letter.relay,
        "-" if dead_letter.seq is None else str(dead_letter.seq),
        dead_letter.did or "-",
        dead_letter.kind or "-",
    ]
    lines = ["  ".join(map(printable, cells)), f"    {dead_letter.reason}: {dead_letter.reason.text}"]
    return "\n".join([*lines, f"    {_shorten(dead_letter.detail)}"] if dead_letter.detail else lines)


def report_facts(report: dict[str, Any]) -> dict[str, Any]:
    """Return a report without its message, as the facts of a table. Identifying numbers get no thousands separator."""
    stored = f"{report['frame_bytes']:,} bytes"
    return {
        "id": str(report["id"]),
        "time": report["time"],
        "relay": report["relay"],
        "seq": None if report["seq"] is None else str(report["seq"]),
        "did": report["did"],
        "kind": report["kind"],
        "reason": f"{report['reason']}: {report['meaning']}",
        "detail": report["detail"],
        "frame": stored if report["complete"] else f"{stored} stored of a longer frame; it cannot be replayed",
    }


def set_aside_dict(event: SetAside) -> dict[str, Any]:
    """Return an event of the feed that clients refused, and that was set aside."""
    return {
        "uri": "at://" + "/".join(part for part in (event.did, event.collection, event.rkey) if part),
        "action": event.action,
        "rev": event.rev or None,
        "attempts": event.attempts,
        "since": datetime.fromtimestamp(event.since, UTC),
        "failure": event.failure,
    }


def set_aside_lines(event: SetAside) -> str:
    """Return the entry of a list: two lines."""
    fields = set_aside_dict(event)
    since = fields["since"].isoformat(" ", "seconds")
    line = f"{since}  {event.action}  {printable(fields['uri'])}"
    return f"{line}\n    sent {event.attempts} times: {printable(event.failure)}"


def replay_line(result: ReplayResult) -> str:
    """Return the result of a replay as one line: ID, outcome, and the reason if there is one."""
    parts = [str(result.id), result.outcome]
    parts += [f"{result.reason}: {result.reason.text}"] if result.reason else []
    parts += [_shorten(result.detail)] if result.detail else []
    parts += [f"(before: {result.previous_reason})"] if result.previous_reason not in {None, result.reason} else []
    return "  ".join(parts)


def _shorten(text: str) -> str:
    return printable(text if len(text) <= MAX_DETAIL_CHARACTERS else f"{text[:MAX_DETAIL_CHARACTERS]}…")
