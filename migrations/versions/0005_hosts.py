"""Create the table of hosts, with request statistics and pauses."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLE = """
    create table indexer.host (
        host text collate "C" not null,
        requests bigint not null,
        failures bigint not null,
        streak integer not null,
        paused_until timestamptz,
        pause_reason text,
        last_error text,
        last_success timestamptz,
        updated_at timestamptz not null default now(),
        constraint host_pkey primary key (host)
    ) with (fillfactor = 50)
"""

VIEW = """
    create view atproto.hosts as
    select host, requests, failures, streak as failures_in_a_row,
        case when paused_until > now() then paused_until end as paused_until,
        case when paused_until > now() then pause_reason end as pause_reason,
        last_error, last_success as last_success_at, updated_at
    from indexer.host
"""

COMMENTS = {
    "table indexer.host": "How each host has answered lately, and its pause.",
    "view atproto.hosts": "The hosts that were asked for exports, identities and handles, and how they answer.",
    "column atproto.hosts.host": "Its name, with the port if that is not the usual one.",
    "column atproto.hosts.requests": "Requests sent to it.",
    "column atproto.hosts.failures": "Those that failed by its fault: no connection, no answer, a server error.",
    "column atproto.hosts.failures_in_a_row": "Failures since it last answered.",
    "column atproto.hosts.paused_until": "Until then it gets no requests; null if it is not paused.",
    "column atproto.hosts.pause_reason": "throttled: it asked for a pause; host-paused: it failed too often in a row.",
    "column atproto.hosts.last_error": "The newest failure; its first word is from a closed set.",
    "column atproto.hosts.last_success_at": "When it last answered as it should.",
    "column atproto.hosts.updated_at": "When this row was last written.",
}

GRANTS = """
    do $$ declare
        role name;
    begin
        for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
            execute format('grant select on atproto.hosts to %I', role);
        end loop;
    end $$
"""


def upgrade() -> None:
    """Apply the migration."""
    op.execute(TABLE)
    op.execute(VIEW)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
    op.execute(GRANTS)
