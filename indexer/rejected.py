"""Dead letters for people and scripts: what was refused, why, and what became of it when it was taken up again."""

from dataclasses import asdict
from typing import Any

from indexer.errors import UpstreamError
from indexer.log import printable
from indexer.service.replay import Replayed
from indexer.store import Letter
from indexer.sync.frames import show_frame

_SHOWN = 160


def letter_facts(letter: Letter) -> dict[str, Any]:
    """By column, with the reason's sentence and whether the frame is whole."""
    return asdict(letter) | {"meaning": letter.reason.text, "whole": letter.whole}


def letter_report(letter: Letter, frame: bytes) -> dict[str, Any]:
    """All that is known of a letter, its message by field; `unreadable` says why that can't be shown."""
    try:
        return letter_facts(letter) | show_frame(frame) | {"unreadable": None}
    except UpstreamError as error:
        return letter_facts(letter) | {"header": None, "payload": None, "unreadable": error.detail}


def letter_lines(letter: Letter) -> str:
    """What a list shows: two lines, or three where there is a detail."""
    seq = "-" if letter.seq is None else str(letter.seq)
    words = [str(letter.id), _time(letter), letter.relay, seq, letter.did or "-", letter.kind or "-"]
    lines = ["  ".join(map(printable, words)), f"    {letter.reason}: {letter.reason.text}"]
    return "\n".join([*lines, f"    {_short(letter.detail)}"] if letter.detail else lines)


def report_facts(report: dict[str, Any]) -> dict[str, Any]:
    """A report but for the message, as a table shows it: numbers that name something are not counted in thousands."""
    kept = f"{report['frame_bytes']:,} bytes"
    return {
        "id": str(report["id"]),
        "time": report["time"],
        "relay": report["relay"],
        "seq": None if report["seq"] is None else str(report["seq"]),
        "did": report["did"],
        "kind": report["kind"],
        "reason": f"{report['reason']}: {report['meaning']}",
        "detail": report["detail"],
        "frame": kept if report["whole"] else f"{kept} kept of more: it can't be replayed",
    }


def replayed_line(replayed: Replayed) -> str:
    """ID, outcome, and the reason where there is one."""
    why = [f"{replayed.why}: {replayed.why.text}"] if replayed.why else []
    why += [_short(replayed.detail)] if replayed.detail else []
    why += [f"(before: {replayed.before})"] if replayed.before not in {None, replayed.why} else []
    return "  ".join([str(replayed.number), replayed.outcome, *why])


def _time(letter: Letter) -> str:
    return letter.time.isoformat(" ", "seconds")


def _short(words: str) -> str:
    return printable(words if len(words) <= _SHOWN else f"{words[:_SHOWN]}…")
