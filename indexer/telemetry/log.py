"""Structured log lines on stderr: this program's and its libraries' in one form, with one list of event names."""

import logging
import os
import sys
import threading
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, Literal

import orjson
import structlog
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import Processor

from indexer.redaction import REDACTED, is_secret_name, without_secrets

log = structlog.get_logger(__name__)

Format = Literal["auto", "json", "console"]


def configure_logging(form: Format = "auto", level: str = "info") -> None:
    """Send all log lines of the process, from `level` up, to stderr, without secrets.

    The tracebacks of uncaught exceptions become log lines, too.
    """
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
    # During an outage, the pool logs a traceback for each reconnection that fails; `condition.began` reports it once.
    logging.getLogger("asyncpg.pool").setLevel(max(threshold, logging.ERROR))
    for library in ("alembic", "asyncio"):
        # Their info lines repeat what this program's own events say.
        logging.getLogger(library).setLevel(max(threshold, logging.WARNING))
    sys.excepthook = _log_uncaught
    threading.excepthook = _log_uncaught_in_thread
    sys.unraisablehook = _log_unraisable


def printable(text: str) -> str:
    """Return `text`, quoted with escapes if it contains characters that could control a terminal."""
    return text if text.isprintable() else repr(text)


def _renderers(*, as_json: bool) -> list[Processor]:
    """Return the last processors. Tracebacks have no local variables: those of libraries contain passwords."""
    if as_json:
        return [
            structlog.processors.ExceptionRenderer(ExceptionDictTransformer(show_locals=False)),
            _remove_secrets,
            structlog.processors.JSONRenderer(serializer=lambda line, **_: orjson.dumps(line, default=str).decode()),
        ]
    colors = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    return [
        structlog.processors.format_exc_info,
        _remove_secrets,
        _make_printable,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback),
    ]


def _remove_secrets(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in line.items():
        line[key] = REDACTED if is_secret_name(key) else _redacted(value)
    return line


def _redacted(value: Any) -> Any:
    """Return a value of a log line without secrets: JSON types keep their type, others become text."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): REDACTED if is_secret_name(str(key)) else _redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_redacted(inner) for inner in value]
    return without_secrets(str(value))


def _make_printable(_: Any, __: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Escape the values of a line, which may contain messages from other hosts."""
    for key, value in line.items():
        if isinstance(value, str):
            line[key] = "\n".join(map(printable, value.split("\n"))) if key == "exception" else printable(value)
    return line


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    log.critical("process.failed", exc_info=(kind, error, trace))


def _log_uncaught_in_thread(failed: threading.ExceptHookArgs) -> None:
    if failed.exc_value is not None:
        error = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        log.error("thread.failed", thread=failed.thread and failed.thread.name, exc_info=error)


def _log_unraisable(failed: "sys.UnraisableHookArgs") -> None:
    if failed.exc_value is not None:
        error = (failed.exc_type, failed.exc_value, failed.exc_traceback)
        # The text of the object may call methods of an object that is being destroyed, and may be long.
        log.error("cleanup.failed", message=failed.err_msg, type=type(failed.object).__name__, exc_info=error)
