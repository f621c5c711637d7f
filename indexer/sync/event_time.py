"""Read the `time` field of a message, which its sender chose."""

from datetime import datetime


def event_seconds(event_time: str | None) -> float | None:
    """Return the time as Unix seconds; None if it is not a datetime with a time zone."""
    try:
        moment = datetime.fromisoformat(event_time or "")
        return None if moment.tzinfo is None else moment.timestamp()
    except (ValueError, OverflowError):
        return None
