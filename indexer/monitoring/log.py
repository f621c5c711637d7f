"""Structured log lines on stderr: this program's and its libraries' in one form, with one list of event names."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import orjson
import structlog
from structlog.typing import Processor

LOG_EVENTS = {
    "change-log.trimmed": "The oldest segment of the change log, up to this seq, was deleted.",
    "collections.changed": "INDEXER_COLLECTIONS has changed; each repo follows at its next resync.",
    "consumer.disconnected": "A consumer was too far behind the change log; it has to register again and start over.",
    "consumer.lagging": "A consumer is far behind; the change log retains the changes that it has not read.",
    "daemon.draining": "A signal was received: received messages are written, and no more are read.",
    "daemon.started": "The daemon is running; its health checks are at this address.",
    "daemon.stopped": "The daemon has stopped.",
    "daemon.stopped-at-once": "A second signal was received; unsaved messages are read again after the next start.",
    "database.unavailable": "Postgres did not answer; the operation will be retried.",
    "handle.check-failed": "A handle could not be verified; the verification will be retried.",
    "identity.load-failed": "Postgres did not answer when identities were loaded; they are resolved over the network.",
    "identity.refresh-failed": "An identity could not be refreshed; the cached one is still used.",
    "identity.refresh-postponed": "A stale identity could not be refreshed; the refresh will be retried.",
    "identity.save-failed": "A resolved identity is in use, but Postgres did not store it.",
    "key.unavailable": "A signing key could not be fetched; the message is not verified, and a synchronized repo is "
    "resynced.",
    "postgres.ended": "The embedded Postgres stopped unexpectedly; it will be restarted.",
    "postgres.killed": "The embedded Postgres did not stop in time and was killed.",
    "postgres.not-restarted": "The embedded Postgres could not be restarted; the restart will be retried.",
    "postgres.restarted": "The embedded Postgres is running again.",
    "process.ended": "One of several daemon processes ended; it will be restarted after a pause.",
    "process.started": "One of several daemon processes was started.",
    "reconciliation.done": "The relay's repo list was compared with the database; a resync was requested for repos "
    "that are behind.",
    "reconciliation.failed": "The relay's repo list could not be read to its end; it will be continued after a pause.",
    "relay.connected": "The stream is open.",
    "relay.connecting": "A connection to a relay is being opened, after this cursor.",
    "relay.error": "The relay sent an error message and ended the stream.",
    "relay.gap": "The relay no longer has all events after the cursor; shard 0 requests a reconciliation.",
    "relay.info": "The relay sent an info message.",
    "relay.lost": "The connection to the relay was lost; the daemon reconnects after a pause.",
    "repo.erased": "The grace period of a deleted account is over, and its records were erased.",
    "repos.unparked": "Parked repos are due again for a resync.",
    "resync.claim-lost": "The repo was desynchronized again, its lease expired, or the database failed; the resync was "
    "abandoned.",
    "resync.done": "A resync ended with this result.",
    "resync.equivocation": "The export has another tree than the stored one at the same rev; the export was applied.",
    "resync.failed": "Resync failed; will retry after a back-off, or when the repo is unparked.",
    "resync.source-failed": "One source of exports failed; the next one is asked.",
    "resync.values-missing": "No source has the blocks of these records; their CIDs are stored, and a resync will be "
    "requested later.",
    "shard-lock.lost": "The database session of the shard lock ended; nothing is written until it is acquired again.",
    "shard-lock.waiting": "Another process holds the lock on a part of this shard; this process waits for it.",
}
"""The name and the meaning of every log event of this program. A test compares the names with the code."""

Format = Literal["auto", "json", "console"]


def configure_logging(form: Format = "auto", level: str = "info") -> None:
    """Send all log lines of the process, from `level` up, to stderr."""
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder()],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_renderers(as_json=as_json)],
        )
    )
    logging.captureWarnings(capture=True)
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    for library in ("alembic", "asyncio", "websockets"):
        # Their info lines repeat what this program's own events say.
        logging.getLogger(library).setLevel(max(threshold, logging.WARNING))


def printable(text: str) -> str:
    """Return `text`, quoted with escapes if it contains characters that could control a terminal."""
    return text if text.isprintable() else repr(text)


def _renderers(*, as_json: bool) -> list[Processor]:
    if as_json:
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(serializer=lambda line, **_: orjson.dumps(line, default=str).decode()),
        ]
    return [_make_printable, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


def _make_printable(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape the values of a line, which may contain messages from other hosts."""
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = printable(value)
    return line
