"""The tables of `indexer status`."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from indexer.cli.output import duration_text, fact_table, literal_text
from indexer.cli.status_report import Status
from indexer.serve.status_document import LinkStatus


def status_tables(status: Status) -> Group:
    """Return the status as tables for a terminal.

    Facts come first, tables that may be long last: `--watch` shows no more than fits the terminal.
    """
    parts: list[RenderableType] = [_readiness(status), fact_table(_facts(status)), _cursor_table(status)]
    if status.daemons:
        parts.append(_daemon_table(status))
    if status.gaps:
        parts.append(_gap_table(status))
    parts.append(_repo_table(status))
    if status.consumers:
        parts.append(_consumer_table(status))
    if status.paused_hosts:
        parts.append(_host_table(status))
    return Group(*parts)


def _readiness(status: Status) -> Text:
    if not status.not_ready_reasons:
        return Text("ready", "bold green")
    return Text("\n".join(f"not ready: {reason.message}" for reason in status.not_ready_reasons), "bold red")


def _cursor_table(status: Status) -> Table:
    table = Table("relay", "shard", "cursor", "lag", title="stream", title_justify="left")
    for cursor in status.cursors:
        lag = "-" if cursor.lag_seconds is None else duration_text(cursor.lag_seconds)
        table.add_row(literal_text(cursor.relay), literal_text(cursor.shard), f"{cursor.seq:,}", lag)
    return table


def _daemon_table(status: Status) -> Table:
    table = Table("shard", "state", "from", "session", "since", title="daemons", title_justify="left")
    for daemon in status.daemons:
        state = Text(daemon.state, "" if daemon.state == "owns" else "yellow")
        since = f"{duration_text(daemon.seconds)} ago"
        table.add_row(literal_text(daemon.shard), state, literal_text(daemon.client), str(daemon.pid), since)
    return table


def _gap_table(status: Status) -> Table:
    table = Table(
        "relay", "shard", "reason", "first seq", "last seq", "open for", title="open gaps", title_justify="left"
    )
    for gap in status.gaps:
        seqs = ["-" if seq is None else f"{seq:,}" for seq in (gap.first_seq, gap.last_seq)]
        cells = (gap.relay, gap.shard, gap.reason, *seqs, duration_text(gap.open_seconds))
        table.add_row(*map(literal_text, cells))
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
        table.add_row(literal_text(name), _repos(status, count))
    return table


def _repos(status: Status, count: int) -> str:
    """Return a number of repos, with a word if it is an estimate."""
    return f"{count:,}" if status.counted_share == 1.0 else f"about {count:,}"


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
    set_aside = f"{status.set_aside_events:,} refused by clients of the feed: see `indexer rejected list --feed`"
    return ({"events set aside": set_aside} if status.set_aside_events else {}) | {
        "database": status.database,
        "records": f"about {status.records:,}",
        "resync queue": _repos(status, status.resync_queue),
        "parked": _repos(status, status.parked),
        "unproven": _repos(status, status.unproven),
        "links": _links(status.links),
        "scope backfill": _scope_backfill(status),
        "events per second": f"{status.events_per_second:,.1f}",
        "resyncs per second": f"{status.resyncs_per_second:,.1f}",
        "progress": None if status.progress is None else f"{status.progress:.1%}",
        "time left": None if status.seconds_left is None else duration_text(status.seconds_left),
    }


def _scope_backfill(status: Status) -> str:
    scope = status.scope_backfill
    if not scope.waiting:
        return "complete"
    left = "unknown" if scope.seconds_left is None else duration_text(scope.seconds_left)
    return f"{_repos(status, scope.waiting)} repos wait for added collections; time left: {left}"


def _links(links: LinkStatus) -> str:
    if links.state == "off":
        return "off"
    parts: list[str] = [links.state]
    if links.state == "backfill":
        left = "unknown" if links.seconds_left is None else duration_text(links.seconds_left)
        parts = [f"backfill: about {links.progress or 0.0:.1%} of the repos", f"time left: {left}"]
    if links.open_recounts:
        parts.append(f"repos to recount: {links.open_recounts:,}")
    return "; ".join(parts)
