"""Store the repo lists and streams of hosts, logs of did:plc operations, and how each record was proven.

Nearly all statements only need a lock for a moment. The index needs the time to read the table `repo`, in which nothing
is written: `repo` and the other tables are first locked against writes only, in one statement. Otherwise a transaction
that has written one of them, and waits for `repo`, would be in a deadlock with a later statement, and the index would
be built again. Then the views are locked before the tables, as queries do.

Existing changes are not checked again: the constraint says the same as the three that it replaces.
"""

from alembic import op

revision = "0102"
down_revision = "0101"
branch_labels = None
depends_on = None

STATEMENTS = (
    "lock table indexer.repo, indexer.record, indexer.identity, indexer.change in share mode",
    "create index repo_withheld on indexer.repo (bucket) where withheld_since is not null",
    """
    do $$ declare
        view regclass;
    begin
        for view in select oid from pg_class
            where relkind = 'v' and relnamespace in ('atproto'::regnamespace, 'lexicon'::regnamespace)
        loop
            execute format('alter view %s reset (check_option)', view);
        end loop;
    end $$
    """,
    'alter table indexer.record add column proof "char"',
    "alter table indexer.identity add column chain bytea",
    """
    alter table indexer.change drop constraint change_action, drop constraint change_cid, drop constraint change_record,
    add constraint change_action check (case
        when action in ('create', 'update') then collection is not null and rkey is not null and cid is not null
        when action = 'delete' then collection is not null and rkey is not null and cid is null
        else action in ('hidden', 'visible', 'deleted', 'identity', 'moved', 'completed')
            and collection is null and rkey is null and cid is null
    end) not valid
    """,
    """
    create table indexer.relay_host (
        relay text collate "C" not null,
        host text collate "C" not null,
        accounts bigint,
        status text,
        listed_at timestamptz not null,
        primary key (relay, host)
    )
    """,
    """
    create table indexer.host_list (
        host text collate "C" not null,
        url text not null,
        host_bucket smallint not null,
        counts jsonb,
        began_at timestamptz,
        finished_at timestamptz,
        ended_at timestamptz,
        lacking bigint not null default 0,
        reading jsonb,
        reading_since timestamptz,
        cursor text,
        failures integer not null default 0,
        last_error text,
        primary key (host)
    ) with (
        fillfactor = 50
    )
    """,
    """
    create table indexer.subscribed_host (
        pds text collate "C" not null,
        shard text not null,
        id bigint not null generated always as identity,
        primary key (pds, shard)
    )
    """,
    "drop table if exists indexer.migration_lock",
    """
create or replace function indexer.hash_order() returns smallint[]
language sql immutable parallel safe
return array(select b::smallint from generate_series(0, 255) b order by hashint2(b::smallint))
    """,
    """
create or replace function indexer.number_batch(segment smallint, batch bigint, size integer) returns void
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    first bigint;
    first_time bigint;
begin
    first := nextval('indexer.change_seq');
    perform setval('indexer.change_seq', first + number_batch.size - 1);
    first_time := greatest(
        nextval('indexer.change_time'), (extract(epoch from clock_timestamp()) * 1000000)::bigint
    );
    perform setval('indexer.change_time', first_time + number_batch.size - 1);
    update indexer.change_batch b
    set first_seq = first, time = timestamptz 'epoch' + first_time * interval '1 microsecond'
    where b.id = number_batch.batch and b.segment = number_batch.segment;
    if pg_notification_queue_usage() < 0.75 then
        perform pg_notify('atproto_changes', '');
    end if;
end $$
    """,
    """
    alter function atproto.changes_after(bigint, integer) reset all
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set enable_hashjoin = off set enable_mergejoin = off
    set enable_material = off set enable_bitmapscan = off set enable_sort = off set jit = off
    """,
    """
    create view indexer.caught_up as
    select case when not exists (select from indexer.gap where closed_at is null) and count(reached) = 256
        then min(reached) end as at
    from (
        select max(c.caught_up_at) as reached
        from indexer.cursor c cross join generate_series(
            split_part(shard, '/', 1)::int * 256 / split_part(shard, '/', 2)::int,
            (split_part(shard, '/', 1)::int + 1) * 256 / split_part(shard, '/', 2)::int - 1
        ) position
        where c.relay not like 'http%'
        group by position
    ) positions
    """,
    """
create or replace function indexer.adapt_public_schema() returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    distributed constant boolean := indexer.is_distributed('indexer.record');
    visible constant text :=
        'select from indexer.repo r where r.did = c.did and r.bucket = c.bucket and r.visible';
    joined constant text :=
        case when distributed then '' else format('cross join lateral (%s limit 1) shown', visible) end;
    condition constant text := case when distributed then format('exists (%s)', visible) else 'true' end;
begin
    execute $view$
        create or replace view atproto.repos as
        select r.did, i.handle, i.pds, r.sync_status, r.sync_reason, r.rev, atproto.cid_text(r.data) as data,
            coalesce(r.hosting_status, case when r.active then 'active' else 'inactive' end) as hosting_status,
            r.takedown, r.visible,
            r.attempts as resync_attempts, r.next_attempt_at, r.last_error, r.synchronized_at, r.updated_at,
            r.bucket, r.withheld_since, r.last_failure,
            case when r.sync_status = 'synchronized' and r.active and r.withheld_since is null then caught_up.at end
                as complete_at
        from indexer.repo r left join indexer.identity i using (did, bucket) left join indexer.caught_up on true
        where r.tracked
    $view$;
    execute format($view$
        create or replace view atproto.records as
        select c.did, c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri,
            atproto.cid_text(c.cid) as cid, c.rev, c.value,
            coalesce(c.value_problem, case when c.value is null then 'not-stored' end) as value_problem,
            c.indexed_at, c.bucket,
            case c.proof when 'c' then 'commit' when 'e' then 'export' when 'r' then 'range' end as proof
        from indexer.record c %s where %s
    $view$, joined, condition);
    execute format($view$
        create or replace view atproto.blobs as
        select c.did, blob.object #>> '{ref,$link}' as cid,
            jsonb_path_query_first(blob.object, 'strict $.mimeType ? (@.type() == "string")', '{}', true) #>> '{}'
                as mime_type,
            (
                jsonb_path_query_first(
                    blob.object, 'strict $.size ? (@ >= 0 && @ <= 9223372036854775807 && @ == @.floor())', '{}', true
                ) #>> '{}'
            )::numeric::bigint as size,
            c.collection, c.rkey, 'at://' || c.did || '/' || c.collection || '/' || c.rkey as uri, c.bucket
        from indexer.record c %s
        cross join lateral jsonb_path_query(c.value, 'strict $.** ? (@."$type" == "blob")') as blob(object)
        where jsonb_typeof(blob.object #> '{ref,$link}') = 'string' and %s
    $view$, joined, condition);
    execute format($view$
        create or replace view atproto.links as
        select c.target, c.kind as target_kind, c.did, c.collection, c.rkey, c.path, c.bucket
        from indexer.record_link c %s where %s
    $view$, joined, condition);
    if distributed then
        perform create_distributed_function(f.oid::regprocedure) from pg_proc f
        where (
            f.pronamespace = 'lexicon'::regnamespace
            or f.oid in ('atproto.cid_text(bytea)'::regprocedure, 'atproto.bucket_of(text)'::regprocedure,
                'indexer.bucket_of(text)'::regprocedure)
        ) and not exists (
            select from pg_dist_object o where o.classid = 'pg_proc'::regclass and o.objid = f.oid
        );
        perform indexer.grant_shards_to_readers();
    end if;
end $$
    """,
    "select indexer.adapt_public_schema()",
    """
    create or replace view atproto.hosts as
    select host, coalesce(requests, 0) as requests, coalesce(h.failures, 0) as failures,
        coalesce(consecutive_failures, 0) as failures_in_a_row,
        case when paused_until > now() then paused_until end as paused_until,
        case when paused_until > now() then pause_reason end as pause_reason,
        h.last_error, last_success as last_success_at, updated_at,
        (counts->>'accounts')::bigint as accounts, (counts->>'inactive')::bigint as inactive_accounts,
        (counts->>'unproven')::bigint as unproven_accounts, (counts->>'repos')::bigint as repos,
        (counts->>'synchronized')::bigint as synchronized_repos, case when finished_at is not null then lacking end
            as accounts_not_passed_on,
        to_timestamp((counts->>'last_commit')::float8) as last_commit_at, began_at as list_began_at,
        finished_at as list_ended_at,
        l.last_error as list_error
    from indexer.host h full join indexer.host_list l using (host)
    """,
    """
    create view atproto.relay_hosts as
    select relay, r.host, accounts, status,
        case when counts is not null then (
            select coalesce(sum(number::bigint), 0)::bigint
            from jsonb_each_text(counts->'withheld'->relay) w(status, number)
        ) end as withheld_accounts,
        counts->'withheld'->relay as withheld_by_status, listed_at
    from indexer.relay_host r left join indexer.host_list l on l.host = r.host
    """,
)
COMMENTS = {
    "column atproto.gaps.closed_by": (
        "The host whose repo list closed the gap, or the URL of the relay whose stream covered it."
    ),
    "column atproto.repos.withheld_since": (
        "Since when the relay does not pass on the account, for a reason of its own; null if it does. Records may be "
        "outdated, unless sync_status is synchronized: then the stream of the host is read."
    ),
    "column atproto.repos.complete_at": (
        "All writes before this time are stored (docs/protocol.md#firehose-and-jetstream-compared). Null: it is not "
        "known, or the repo is not synchronized."
    ),
    "column atproto.records.rev": "The rev of the commit or export that it came with.",
    "column atproto.records.indexed_at": "When it was last written here, by the clock of the server.",
    "column atproto.records.proof": (
        "The proof with which it was written: commit, export or range (docs/protocol.md#sparse-resync). Null: unknown."
    ),
    "view atproto.hosts": (
        "Hosts that relays list, or that were asked for exports, identities and handles. Requests to them, and what "
        "their own repo lists showed when they were last read to the end."
    ),
    "column atproto.hosts.updated_at": "When the request statistics were last updated; null without requests.",
    "column atproto.hosts.accounts": "Accounts that the host lists as active; null if its list was never read.",
    "column atproto.hosts.inactive_accounts": "Accounts that the host lists as inactive.",
    "column atproto.hosts.unproven_accounts": (
        "Listed active accounts without a known identity that names this host. The list does not add them."
    ),
    "column atproto.hosts.repos": "Listed active accounts that are tracked, and whose identities name this host.",
    "column atproto.hosts.synchronized_repos": "Accounts of repos that were synchronized.",
    "column atproto.hosts.accounts_not_passed_on": (
        "Accounts of repos that relays withhold, omit (more repos than accounts at any relay), or bring late."
    ),
    "column atproto.hosts.last_commit_at": "The time in the newest stored rev of repos, by the clocks of accounts.",
    "column atproto.hosts.list_began_at": "When the last complete reading of the list began.",
    "column atproto.hosts.list_ended_at": "When it ended.",
    "column atproto.hosts.list_error": "Why the last reading of the list failed; null if it did not.",
    "view atproto.relay_hosts": "The hosts that each relay consumes, and the accounts of them that it withholds.",
    "column atproto.relay_hosts.relay": "The URL of the relay.",
    "column atproto.relay_hosts.host": "The host name, as in atproto.hosts.",
    "column atproto.relay_hosts.accounts": (
        "Accounts of the host at the relay by its own word, those included that it withholds; null if it does not say."
    ),
    "column atproto.relay_hosts.status": (
        "The status of the host at the relay: active, idle, offline, throttled, banned, or as sent; null if none."
    ),
    "column atproto.relay_hosts.withheld_accounts": (
        "Tracked accounts that the relay withheld when the list of the host was last read; null if it never was."
    ),
    "column atproto.relay_hosts.withheld_by_status": (
        "The same by the status that the relay gives as its reason: a JSON object; null if there are none."
    ),
    "column atproto.relay_hosts.listed_at": "When the relay last listed the host.",
}
GRANT = """
    do $$ declare
        role name;
    begin
        for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
            execute format('grant select on all tables in schema atproto, lexicon to %I', role);
        end loop;
    end $$
    """


def upgrade() -> None:
    """Execute the statements one by one, because Citus sends the text of some of them to other nodes."""
    comments = [f"comment on {name} is '{text}'" for name, text in COMMENTS.items()]
    for statement in (*STATEMENTS, *comments, GRANT):
        op.execute(statement)
