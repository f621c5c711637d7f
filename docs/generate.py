"""Generate the parts of the documentation that repeat the code: `make docs`, or `python -m docs.generate --check`.

Generated are the list of docs/settings.md and config/indexer.example.toml (from indexer/app/settings.py),
docs/commands.md (from the commands), docs/reasons.md (from indexer/reasons.py and indexer/atproto/record.py),
docs/metrics.md (from indexer/telemetry/metrics.py),
config/grafana/dashboards/indexer.json (from docs/dashboard_panels.py), the transition table of
docs/architecture.md, and from a migrated database the reference of docs/sql.md and the client types in
examples/public_schema/ (docs/client_types.py).
"""

import argparse
import asyncio
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import asyncpg
import click

from docs.client_types import PublicColumn, load_public_columns, sqlalchemy_models, typescript_types
from indexer.app.settings import Settings, allowed, variable
from indexer.atproto.record import Problem
from indexer.cli.command import JSON_HELP, ExitCode
from indexer.cli.main import COMMANDS, load_command
from indexer.db.migrate import migrate
from indexer.embedded import database
from indexer.net.server.address import Address
from indexer.reasons import Desync, FetchFailure, GapReason, LogFlaw, Rejection
from indexer.sync.repo import TRANSITIONS, SyncStatus, Trigger
from indexer.telemetry.metrics import MetricDefinition, Metrics

PROJECT = Path(__file__).parents[1]
VIEWS = (
    "repos",
    "records",
    "blobs",
    "links",
    "link_progress",
    "changes",
    "readers",
    "cursors",
    "gaps",
    "hosts",
    "relay_hosts",
    "rejected",
    "scope_progress",
)

_VIEWS = """
    select c.relname as name, obj_description(c.oid, 'pg_class') as comment
    from pg_class c where relnamespace = 'atproto'::regnamespace and relkind in ('v', 'm', 'r')
    order by array_position($1::text[], relname::text), relname
"""
_COLUMNS = """
    select attname as name, format_type(atttypid, atttypmod) as type, col_description(attrelid, attnum) as comment
    from pg_attribute where attrelid = ('atproto.' || $1)::regclass and attnum > 0 order by attnum
"""
_FUNCTIONS = """
    select proname as name, pg_get_function_arguments(oid) as arguments, pg_get_function_result(oid) as result,
        obj_description(oid, 'pg_proc') as comment
    from pg_proc where pronamespace = 'atproto'::regnamespace order by proname
"""

_UNSET = {
    "database_url": "unset",
    "data_dir": "`~/.local/share/indexer`",
    "upstream": "`relay`, or that of the database's newest cursor",
    "track": "`signal` with signal collections, otherwise `all`",
    "contact": "unset",
    "sweep_interval": "`24h`, or `1h` with a Jetstream",
    "dns_servers": "the system's",
    "verify_threads": "the processor cores",
    "webhook_url": "unset",
    "admin_password": "unset",
}
_EXAMPLES = {
    "database_url": "postgresql://localhost/indexer",
    "data_dir": "/var/lib/indexer",
    "track": "listed",
    "contact": "https://example.com/indexer",
    "sweep_interval": "24h",
    "verify_threads": "2",
    "webhook_url": "http://127.0.0.1:3000/webhook",
    "admin_password": "a long random text",
}


def generated(public_schema: str, columns: Sequence[PublicColumn]) -> dict[Path, str]:
    """Return the expected text of every file with a generated part, except the dashboard.

    Args:
        public_schema: The result of `describe_public_schema`.
        columns: The columns of the public views.
    """
    docs, examples = PROJECT / "docs", PROJECT / "examples" / "public_schema"
    return {
        docs / "settings.md": _with_block(docs / "settings.md", "settings", settings_list()),
        PROJECT / "config" / "indexer.example.toml": example_settings(),
        docs / "reasons.md": reasons_page(),
        docs / "metrics.md": metrics_page(),
        docs / "commands.md": commands_page(),
        docs / "architecture.md": _with_block(docs / "architecture.md", "transitions", transition_table()),
        docs / "sql.md": _with_block(docs / "sql.md", "public schema", public_schema),
        examples / "atproto_models.py": sqlalchemy_models(columns),
        examples / "atproto.ts": typescript_types(columns),
    }


def settings_list() -> str:
    """Return the list of settings."""
    return "".join(
        f"- `{variable(name)}` = {_default(name)} ({_without_examples(allowed(name))}): {_description(name)}\n"
        for name in Settings.model_fields
    )


def _without_examples(kind: str) -> str:
    """Return the form of a value without what the head of the page says of lists, durations and sizes."""
    return re.sub(r"^a comma-separated list of |,? such as \w+(, \w+)* or \w+", "", kind)


def _description(setting: str) -> str:
    return " ".join(str(Settings.model_fields[setting].description).split())


def example_settings() -> str:
    """Return config/indexer.example.toml: every setting with its default, commented out."""
    settings = "".join(f"# {_description(name)}\n# {name} = {_toml(name)}\n\n" for name in Settings.model_fields)
    return f"# Every setting with its default. docs/settings.md describes them.\n\n{settings}"


def reasons_page() -> str:
    """Return docs/reasons.md."""
    failures = [(failure, failure.text + " *Permanent.*" * failure.is_permanent) for failure in FetchFailure]
    return f"""# Reasons

Values of metric labels and of columns. Their names are kept.

## Why a message or an export is rejected

`atproto.rejected.reason`, `indexer_rejected_total{{reason}}`. The message itself is at fault, and
changes nothing, except for `store-failed`.

{_list([(reason, reason.text) for reason in Rejection])}
## Why a repo is not synchronized

`atproto.repos.sync_reason`, `indexer_desynchronized_total{{reason}}`. The repo is fetched again at
`next_attempt_at`.

{_list([(reason, reason.text) for reason in Desync])}
## Why a fetch failed

`atproto.repos.last_failure`, `indexer_resync_total{{result}}`. After a *permanent* failure the repo
is parked until an event unparks it, or for `INDEXER_SWEEP_INTERVAL`.

{_list(failures)}
## Why messages may have been missed

`atproto.gaps.reason`. While a gap is open, `/readyz` fails and names it. A reconciliation closes
it.

{_list([(reason, reason.text) for reason in GapReason])}
## Why a log of PLC operations is not believed

The next directory is asked.

{_list([(flaw, flaw.text) for flaw in LogFlaw])}
## Problems of record values

`atproto.records.value_problem`. The record keeps its path and its CID. Stored bytes are returned by
`atproto.record_bytes`.

{_list([(problem, problem.text) for problem in Problem])}"""


def metrics_page() -> str:
    """Return docs/metrics.md."""
    groups = "".join(
        f"\n## {section}\n\n{''.join(map(_metric, metrics))}"
        for section, metrics in groupby(Metrics().definitions.values(), lambda metric: metric.section)
    )
    return f"""# Metrics

`/metrics` shows these, and the usual `process_*`, `python_info` and `python_gc_*`. Names and labels
are a public interface; label values are limited in number. The text after ⚠ says when to worry.
Every process has its own metrics. Sum the counters, but not the gauges that each process reads from
the database: `indexer_repos`, `indexer_repos_desynchronized`, `indexer_resync_queue`, and those of
the change log and of links.
{groups}"""


def _metric(metric: MetricDefinition) -> str:
    kind = ", ".join([metric.kind, *(f"`{label}`" for label in metric.labels)])
    return f"- `{metric.name}` ({kind}): {metric.meaning} ⚠ {metric.worry}\n"


def commands_page() -> str:
    """Return docs/commands.md."""
    commands = list(_commands({name: load_command(name) for name in COMMANDS}, "indexer"))
    without_json = ", ".join(
        f"`{path}`"
        for path, command in commands
        if not isinstance(command, click.Group) and "as_json" not in {parameter.name for parameter in command.params}
    )
    json_output = _wrapped(
        "With `--json`, a command prints JSON, one object a line. Every command has this option, except "
        f"{without_json}. Names of JSON fields are kept within a major version; fields may be added. Many are "
        "columns of the [public views](sql.md)."
    )
    return f"""# Commands

`indexer COMMAND --help` shows the same. All commands accept the [settings](settings.md): from the
environment, and from the file that `--config` names, before or after the command.

## Output

Results go to stdout; log lines, errors and progress to stderr. An error is one line on stderr that
starts with `indexer: `, and the exit code is not 0.

{json_output}

A terminal shows colours, except with `NO_COLOR`, and a progress bar. Otherwise, a long command
writes a line of progress to stderr every 10 seconds.

## Exit codes

{_list([(str(code.value), code.text) for code in ExitCode])}
{"".join(_command_section(command, path) for path, command in commands)}"""


def _commands(of_group: Mapping[str, click.Command], path: str) -> Iterator[tuple[str, click.Command]]:
    """Yield each command of a group, and those of its groups, with its name on the command line."""
    for name, command in sorted(of_group.items()):
        yield f"{path} {name}", command
        if isinstance(command, click.Group):
            yield from _commands(command.commands, f"{path} {name}")


def _command_section(command: click.Command, path: str) -> str:
    """Return the section of a command: arguments, help text and options, but not those of all commands."""
    with click.Context(command, info_name=path) as context:
        arguments = [piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]"]
        options = [
            record
            for parameter in command.get_params(context)
            if isinstance(parameter, click.Option)
            and "--config" not in parameter.opts
            and "--help" not in parameter.opts
            and parameter.help not in JSON_HELP
            and (record := parameter.get_help_record(context))
        ]
    paragraphs = inspect.cleandoc(command.help or "").split("\n\n")
    usage = f"    {path} {' '.join(arguments)}" if arguments and not isinstance(command, click.Group) else None
    parts = [f"## `{path}`", usage, *map(_help_paragraph, paragraphs), _list(options).rstrip()]
    return "\n\n".join(filter(None, parts)) + "\n\n"


def _help_paragraph(text: str) -> str:
    """Return a paragraph of a help text in Markdown. One that begins with the mark of click for fixed lines is code."""
    first, *lines = text.splitlines()
    return "\n".join(f"    {line}" for line in lines) if first == "\b" else _wrapped(" ".join([first, *lines]))


def transition_table() -> str:
    """Return `TRANSITIONS` as a table: the outcome, and the next status if it differs."""
    rows = ["| trigger | " + " | ".join(SyncStatus) + " |", "|---|" + "---|" * len(SyncStatus)]
    for trigger in Trigger:
        cells = []
        for status in SyncStatus:
            outcome, after = TRANSITIONS[status].get(trigger, (None, status))
            cells.append("-" if outcome is None else f"{outcome}" if after is status else f"{outcome} → **{after}**")
        rows.append(f"| {trigger} | " + " | ".join(cells) + " |")
    return "\n".join(rows) + "\n"


def _wrapped(paragraph: str) -> str:
    return textwrap.fill(paragraph, 100, break_long_words=False, break_on_hyphens=False)


async def describe_public_schema(connection: asyncpg.Connection) -> str:
    """Return the reference of the views and functions in schema `atproto`, from the comments in the database."""
    parts = []
    described = set()
    for view, comment in await connection.fetch(_VIEWS, VIEWS):
        columns = [
            f"`{name}` ({type_.replace('timestamp with time zone', 'timestamptz')}): {text}"
            for name, type_, text in await connection.fetch(_COLUMNS, view)
        ]
        rows = "".join(f"- {column}\n" for column in columns if column not in described)
        if known := [column.split()[0] for column in columns if column in described]:
            rows += f"- {', '.join(known)}: as above.\n"
        described.update(columns)
        parts.append(f"\n## View `atproto.{view}`\n\n{_wrapped(comment)}\n\n{rows}")
    parts.append("\n## Functions\n")
    for name, arguments, result, comment in await connection.fetch(_FUNCTIONS):
        returns = "as the view `changes`" if result.startswith("TABLE") else f"`{result}`"
        parts.append(f"\n**`atproto.{name}({arguments})`** → {returns}  \n{_wrapped(comment)}\n")
    return "".join(parts)


async def public_schema_signatures(connection: asyncpg.Connection) -> list[str]:
    """Return one line for each column and function of schema `atproto`: what statements of consumers depend on."""
    columns = [
        f"{view}.{name} {type_}"
        for view, _ in await connection.fetch(_VIEWS, VIEWS)
        for name, type_, _ in await connection.fetch(_COLUMNS, view)
    ]
    functions = await connection.fetch(_FUNCTIONS)
    return [*columns, *(f"{name}({arguments}) {result}" for name, arguments, result, _ in functions)]


def _default(name: str) -> str:
    """Return the default of a setting as an operator would write it."""
    match getattr(Settings(), name):
        case _ if name in _UNSET:
            return _UNSET[name]
        case bool(value):
            return f"`{value}`".lower()
        case float(value) if value and value % 3_600 == 0:
            return f"`{value / 3_600:g}h`"
        case float(value):
            return f"`{value:g}`"
        case Address() as address:
            return f"`{address}`"
        case ():
            return "none"
        case tuple(items):
            return f"`{','.join(items)}`"
        case value:
            return f"`{value}`"


def _toml(name: str) -> str:
    """Return the value of a setting in TOML, which writes strings, numbers, booleans and lists of them as JSON does."""
    value: Any = _EXAMPLES.get(name) or getattr(Settings(), name)
    if isinstance(value, tuple) and not isinstance(value, Address):
        return json.dumps([str(item) for item in value])
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def _list(rows: list[tuple[Any, str]]) -> str:
    return "".join(f"- `{key}`: {text}\n" for key, text in rows)


def _with_block(path: Path, name: str, content: str) -> str:
    """Return the file's text with `content` between the comments `<!-- name: … -->` and `<!-- /name -->`."""
    text = path.read_text()
    block = re.compile(rf"(<!-- {name}: generated.*?-->\n).*?(<!-- /{name} -->)", re.DOTALL)
    assert block.search(text), f"{path} has no block {name!r}"
    return block.sub(lambda match: f"{match[1]}{content}{match[2]}", text)


async def _public_schema() -> tuple[str, list[PublicColumn]]:
    with TemporaryDirectory(prefix="indexer-docs-") as directory:
        async with database(None, Path(directory)) as dsn:
            await migrate(dsn)
            connection = await asyncpg.connect(dsn)
            try:
                return await describe_public_schema(connection), await load_public_columns(connection)
            finally:
                await connection.close()


def outdated(files: Mapping[Path, str]) -> list[Path]:
    """Return the files whose text differs from the expected one."""
    return [path for path, text in files.items() if not path.exists() or path.read_text() != text]


def main() -> int:
    """Write the generated parts, or with --check only compare them; return the exit code."""
    parser = argparse.ArgumentParser(description="Generate the parts of the documentation that repeat the code.")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a file is outdated; change nothing")
    check = parser.parse_args().check
    from docs.dashboard import dashboard_json  # noqa: PLC0415 - it needs a library that only `make docs` installs

    dashboard = {PROJECT / "config" / "grafana" / "dashboards" / "indexer.json": dashboard_json()}
    files = generated(*asyncio.run(_public_schema())) | dashboard
    found = outdated(files)
    for path in found:
        print(f"{'outdated' if check else 'written'}: {path.relative_to(PROJECT)}")
        if not check:
            path.write_text(files[path])
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
