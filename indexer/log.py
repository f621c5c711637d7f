"""Log lines: structured, to stderr, ours and the libraries' in one form, with one vocabulary of actions."""

import logging
import sys
from collections.abc import MutableMapping
from typing import Any, Literal

import orjson
import structlog
from structlog.typing import Processor

ACTIONS = {
    "changes.dropped": "The oldest part of the change log, up to this seq, was dropped: it is kept no longer.",
    "collections.changed": "INDEXER_COLLECTIONS is another one than before: repos follow with their next resync.",
    "daemon.draining": "A signal came: what was received is written, nothing more is read.",
    "daemon.started": "The daemon serves; its health is to be had at this address.",
    "daemon.stopped": "Everything received is saved.",
    "daemon.stopped-at-once": "A second signal came: what was not saved comes again after the next start.",
    "database.unavailable": "Postgres could not be asked; the work is tried again.",
    "handle.unchecked": "A handle could not be checked; it is tried again later.",
    "identity.kept": "No newer identity could be had; the one at hand serves on.",
    "identity.not-loaded": "Postgres could not be asked for an identity; the network is.",
    "identity.not-renewed": "An identity is known to have changed, and could not be looked up; it is tried again.",
    "identity.not-saved": "An identity was looked up and used, and Postgres could not be asked to keep it.",
    "key.unavailable": "A signing key could not be had; the event's repo is resynchronized.",
    "postgres.ended": "The embedded Postgres ended by itself; it is started again.",
    "postgres.killed": "The embedded Postgres didn't stop when asked to, and was killed.",
    "postgres.not-restarted": "The embedded Postgres doesn't start; it is tried again.",
    "postgres.restarted": "The embedded Postgres runs again.",
    "reader.cut-off": "A registered reader was given up: it was too far behind, and has to start anew.",
    "reader.lags": "A registered reader is far behind the change log, which is kept for it.",
    "relay.connected": "The stream is open.",
    "relay.connecting": "A connection to a relay begins, behind this cursor.",
    "relay.error": "The relay ended the stream with an error.",
    "relay.gap": "The relay no longer has everything behind our cursor.",
    "relay.info": "The relay said something about the stream.",
    "relay.lost": "The connection to the relay ended; another follows after a pause.",
    "repo.erased": "The account stayed deleted for the time of grace; its records are erased.",
    "process.ended": "One of several processes ended; it is started again after a pause.",
    "process.started": "One of several processes was started.",
    "shard.lost": "The session that held our buckets has ended: nothing is written until they are held again.",
    "shard.waiting": "Another process holds buckets of our shard; we begin when it ends.",
    "sweep.done": "All accounts that the relay lists were held against ours; those that differ are fetched again.",
    "sweep.failed": "The relay's list of accounts could not be read to its end; it is tried again from there.",
    "sweep.woken": "So many repos that were given up on are tried again.",
    "resync.done": "A resync ended, with this result.",
    "resync.equivocation": "The export has another tree than ours at our revision, and a good signature; it is taken.",
    "resync.failed": "A resync came to nothing; it is tried again later.",
    "resync.lost": "A resync was taken over by another worker, or the database went away under it.",
    "resync.source": "One source of an export failed; the next is asked.",
    "resync.values-missing": "No export had these records' blocks: their CIDs are kept, and it is fetched again later.",
}
"""The name of every log line that this program writes, and what it says. A test holds the code to it."""

Format = Literal["auto", "json", "console"]


def configure_logging(form: Format = "auto", level: str = "info") -> None:
    """Sends all log lines of the process, from `level` on, to stderr."""
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
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(as_json=as_json)],
        )
    )
    logging.captureWarnings(capture=True)
    logging.basicConfig(handlers=[handler], level=threshold, force=True)
    for library in ("alembic", "asyncio", "websockets"):
        # They tell every step at info; what matters of it, we say ourselves.
        logging.getLogger(library).setLevel(max(threshold, logging.WARNING))


def printable(text: str) -> str:
    """`text` as it is, or quoted with escapes if it holds anything that could steer a terminal."""
    return text if text.isprintable() else repr(text)


def _rendering(*, as_json: bool) -> list[Processor]:
    if as_json:
        return [
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(serializer=lambda line, **_: orjson.dumps(line, default=str).decode()),
        ]
    return [_make_printable, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


def _make_printable(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Messages of relays and hosts are in the values."""
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = printable(value)
    return line
