"""The tables of `indexer status`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from indexer.cli.output import duration_text, fact_table, literal_text
from indexer.cli.status_report import Status


def status_tables(status: Status) -> Group:
    """Return the status as tables for a terminal."""
    parts: list[RenderableType] = [_readiness(status), _cursor_table(status), _repo_table(status)]
    if status.consumers:
        parts.append(_consumer_table(status))
    if status.paused_hosts:
        parts.append(_host_table(status))
    return Group(*parts, fact_table(_facts(status)))


def _readiness(status: Status) -> Text:
    if status.not_ready is None:
        return Text("ready", "bold green")
    return Text(f"not ready: {status.not_ready}", "bold red")


def _cursor_table(status: Status) -> Table:
    table = Table("relay", "shard", "cursor", "lag", title="stream", title_justify="left")
    for cursor in status.cursors:
        lag = "-" if cursor.lag_seconds is None else duration_text(cursor.lag_seconds)
        table.add_row(literal_text(cursor.relay), literal_text(cursor.shard), f"{cursor.seq:,}", lag)
    return table


def _repo_table(status: Status) -> Table:
    table = Table("", "", title="repos", title_justify="left", show_header=False)
    table.columns[1].justify = "right"
    rows = [
        *status.repos.items(),
        *((f"reason: {reason}", count) for reason, count in status.reasons.items()),
        *((f"last error: {failure}", count) for failure, count in status.failures.items()),
    ]
    for name, count in rows:
        table.add_row(literal_text(name), f"{count:,}")
    return table


def _consumer_table(status: Status) -> Table:
    columns = ("consumer", "position", "changes behind", "lag", "last seen")
    table = Table(*columns, title="consumers of the change log", title_justify="left")
    for consumer in status.consumers:
        lag = Text("disconnected", "bold red") if consumer.cut_off else Text(duration_text(consumer.lag_seconds))
        seen = f"{duration_text(consumer.silent_seconds)} ago"
        table.add_row(literal_text(consumer.name), f"{consumer.seq:,}", f"{consumer.behind:,}", lag, seen)
    return table


def _host_table(status: Status) -> Table:
    columns = ("host", "paused for", "reason", "failures in a row", "last error")
    table = Table(*columns, title="paused hosts", title_justify="left")
    for host in status.paused_hosts:
        cells = (host.host, duration_text(host.seconds_left), host.reason, str(host.failures_in_a_row))
        table.add_row(*map(literal_text, cells), literal_text(host.last_error or "-"))
    return table


def _facts(status: Status) -> Mapping[str, Any]:
    return {
        "database": status.database,
        "records": f"about {status.records:,}",
        "resync queue": f"{status.resync_queue:,}",
        "parked": f"{status.parked:,}",
        "events per second": f"{status.events_per_second:,.1f}",
        "resyncs per second": f"{status.resyncs_per_second:,.1f}",
        "progress": None if status.progress is None else f"{status.progress:.1%}",
        "time left": None if status.seconds_left is None else duration_text(status.seconds_left),
    }
