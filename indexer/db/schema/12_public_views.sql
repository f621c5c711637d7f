-- The public views of repos, records, blobs, links and hosts.

-- Create the public views in the form that suits a plain or a distributed database. To be called again after a
-- database was distributed, and after a node was added.
-- Citus sends a query to a single shard only if the query compares the bucket of each table with a constant. It
-- derives no bucket for the inner query of a view if that has a LIMIT. Plain Postgres needs the LIMIT, because the
-- planner multiplies the selectivities of did and bucket, which depend on each other: without it, it expects a 256th
-- of the rows, and sorts whole repos and collections for their first page. Workers call the functions in the queries
-- on their shards. In the view of blobs, a filter of a path returns nothing where a member has another type, so no
-- cast fails. Without `strict`, a filter looks into arrays, and ** returns their members twice. `true` returns
-- nothing for a member that does not exist.
create function indexer.adapt_public_schema() returns void
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
            case lower(c.proof::text) when 'c' then 'commit' when 'e' then 'export' when 'r' then 'range' end as proof,
            coalesce(c.first_seen, c.indexed_at) as first_seen,
            case when c.first_seen is null then c.proof in ('c', 'E', 'R') else c.first_live end as first_seen_live,
            lexicon.sort_at(c.value, c.first_seen, c.indexed_at) as sort_at
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
end $$;

select indexer.adapt_public_schema();

comment on view atproto.repos is 'Every tracked repo. Indexed by did; other conditions scan the whole table.';
comment on column atproto.repos.did is 'The DID of the account.';
comment on column atproto.repos.handle is
    'The verified handle. handle.invalid if verification failed; null if not checked yet.';
comment on column atproto.repos.pds is 'The base URL of the PDS; null if it is not known.';
comment on column atproto.repos.sync_status is 'desynchronized, in-progress, or synchronized.';
comment on column atproto.repos.sync_reason is 'Why the repo is not synchronized (docs/reasons.md); null if it is.';
comment on column atproto.repos.rev is 'The rev of the stored records; null if none.';
comment on column atproto.repos.data is 'The CID of their MST root; null if none.';
comment on column atproto.repos.hosting_status is 'The hosting status as sent upstream, otherwise active or inactive.';
comment on column atproto.repos.takedown is 'True after a local takedown.';
comment on column atproto.repos.visible is 'True if active upstream and without local takedown.';
comment on column atproto.repos.resync_attempts is
    'Failed resyncs and repeated desynchronizations since the repo last settled.';
comment on column atproto.repos.next_attempt_at is
    'When the next resync may start; null: now; infinity: when an event unparks the repo.';
comment on column atproto.repos.last_error is 'last_failure, with details. Null if the last fetch did not fail.';
comment on column atproto.repos.last_failure is 'Why the last fetch failed (docs/reasons.md); null if it did not fail.';
comment on column atproto.repos.synchronized_at is 'When the repo last became synchronized; null if never.';
comment on column atproto.repos.updated_at is 'When this row was last updated.';
comment on column atproto.repos.bucket is
    'The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1).';
comment on column atproto.repos.withheld_since is
    'Since when the relay does not pass on the account, for a reason of its own; null if it does. Records may be '
    'outdated, unless sync_status is synchronized: then the stream of the host is read.';

comment on column atproto.repos.complete_at is
    'All writes before this time are stored (docs/protocol.md#firehose-and-jetstream-compared). Null: it is not known, or '
    'the repo is not synchronized.';

comment on view atproto.records is
    'The records of visible repos. Indexed by (did, collection, rkey) and by (collection, indexed_at).';
comment on column atproto.records.did is 'The DID of the repo.';
comment on column atproto.records.collection is 'The NSID of the collection.';
comment on column atproto.records.rkey is 'The record key.';
comment on column atproto.records.uri is 'The AT-URI of the record.';
comment on column atproto.records.cid is 'The CID of the DAG-CBOR encoding.';
comment on column atproto.records.rev is 'The rev of the commit or export that it came with.';
comment on column atproto.records.value is 'The record as AT Protocol JSON. Null if value_problem says why.';
comment on column atproto.records.value_problem is
    'Why value is null or differs from the original (docs/reasons.md); null: no problem.';
comment on column atproto.records.indexed_at is 'When it was last written here, by the clock of the server.';
comment on column atproto.records.bucket is
    'The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1).';
comment on column atproto.records.proof is
    'The proof with which it was written: commit, export or range (docs/protocol.md#sparse-resync). Null: unknown.';
comment on column atproto.records.first_seen is
    'When it was first stored here, or an earlier imported time; updates do not change it. Of a record that an earlier '
    'release stored: when that last wrote it.';
comment on column atproto.records.first_seen_live is
    'True if found live, false if by a resync, as in atproto.changes; null: unknown. What an earlier '
    'release stored: how that wrote it last.';
comment on column atproto.records.sort_at is
    'createdAt if it is a datetime before first_seen; otherwise first_seen.';

comment on view atproto.blobs is
    'A row for each reference to a blob in the value of a visible record. Indexed by did, and by (did, collection, '
    'rkey); without did, it reads all records. The PDS has the bytes.';
comment on column atproto.blobs.did is 'The DID of the repo.';
comment on column atproto.blobs.cid is 'The CID of the blob.';
comment on column atproto.blobs.mime_type is 'The MIME type that the record states; null if none.';
comment on column atproto.blobs.size is 'The size in bytes that the record states; null if none.';
comment on column atproto.blobs.collection is 'The NSID of the collection.';
comment on column atproto.blobs.rkey is 'The record key.';
comment on column atproto.blobs.uri is 'The AT-URI of the record.';
comment on column atproto.blobs.bucket is
    'The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1).';

comment on view atproto.links is
    'A row for each visible record, path and target. Incomplete until link_progress says complete. Indexed by '
    '(target, collection, path, did, rkey) and by (did, collection, rkey).';
comment on column atproto.links.target is 'The AT-URI or the DID, as in the record.';
comment on column atproto.links.target_kind is
    'strong-ref: the member uri of an object with a text cid; at-uri: another AT-URI; did.';
comment on column atproto.links.did is 'The DID of the repo.';
comment on column atproto.links.collection is 'The NSID of the collection.';
comment on column atproto.links.rkey is 'The record key.';
comment on column atproto.links.path is
    'The place in the value: .name of a member, [] of an array element, [type] of an element with this $type.';
comment on column atproto.links.bucket is
    'The bucket of the DID. Queries on a cluster compare it with atproto.bucket_of($1).';

create view atproto.hosts as
select host, coalesce(requests, 0) as requests, coalesce(h.failures, 0) as failures,
    coalesce(consecutive_failures, 0) as failures_in_a_row,
    case when paused_until > now() then paused_until end as paused_until,
    case when paused_until > now() then pause_reason end as pause_reason,
    h.last_error, last_success as last_success_at, updated_at,
    (counts->>'accounts')::bigint as accounts, (counts->>'inactive')::bigint as inactive_accounts,
    (counts->>'unproven')::bigint as unproven_accounts, (counts->>'repos')::bigint as repos,
    (counts->>'synchronized')::bigint as synchronized_repos, case when finished_at is not null then lacking end
        as accounts_not_passed_on,
    to_timestamp((counts->>'last_commit')::float8) as last_commit_at, began_at as list_began_at, finished_at as list_ended_at,
    l.last_error as list_error
from indexer.host h full join indexer.host_list l using (host);
comment on view atproto.hosts is
    'Hosts that relays list, or that were asked for exports, identities and handles. Requests to them, and what their '
    'own repo lists showed when they were last read to the end.';
comment on column atproto.hosts.host is 'The host name, with a port other than the default one.';
comment on column atproto.hosts.requests is 'Requests sent.';
comment on column atproto.hosts.failures is 'Requests without response, or with a server error.';
comment on column atproto.hosts.failures_in_a_row is 'Failures since the last response.';
comment on column atproto.hosts.paused_until is 'No requests are sent until then; null if not paused.';
comment on column atproto.hosts.pause_reason is
    'throttled: the host asked for it; host-paused: too many failures. Null if not paused.';
comment on column atproto.hosts.last_error is
    'The latest failure, beginning with a reason of docs/reasons.md. Null if none.';
comment on column atproto.hosts.last_success_at is 'When a request last succeeded; null if never.';
comment on column atproto.hosts.updated_at is 'When the request statistics were last updated; null without requests.';
comment on column atproto.hosts.accounts is 'Accounts that the host lists as active; null if its list was never read.';
comment on column atproto.hosts.inactive_accounts is 'Accounts that the host lists as inactive.';
comment on column atproto.hosts.unproven_accounts is
    'Listed active accounts without a known identity that names this host. The list does not add them.';
comment on column atproto.hosts.repos is 'Listed active accounts that are tracked, and whose identities name this host.';
comment on column atproto.hosts.synchronized_repos is 'Accounts of repos that were synchronized.';
comment on column atproto.hosts.accounts_not_passed_on is
    'Accounts of repos that relays withhold, omit (more repos than accounts at any relay), or bring late.';
comment on column atproto.hosts.last_commit_at is 'The time in the newest stored rev of repos, by the clocks of accounts.';
comment on column atproto.hosts.list_began_at is 'When the last complete reading of the list began.';
comment on column atproto.hosts.list_ended_at is 'When it ended.';
comment on column atproto.hosts.list_error is 'Why the last reading of the list failed; null if it did not.';

create view atproto.relay_hosts as
select relay, r.host, accounts, status,
    case when counts is not null then (
        select coalesce(sum(number::bigint), 0)::bigint from jsonb_each_text(counts->'withheld'->relay) w(status, number)
    ) end as withheld_accounts,
    counts->'withheld'->relay as withheld_by_status, listed_at
from indexer.relay_host r left join indexer.host_list l on l.host = r.host;
comment on view atproto.relay_hosts is 'The hosts that each relay consumes, and the accounts of them that it withholds.';
comment on column atproto.relay_hosts.relay is 'The URL of the relay.';
comment on column atproto.relay_hosts.host is 'The host name, as in atproto.hosts.';
comment on column atproto.relay_hosts.accounts is
    'Accounts of the host at the relay by its own word, those included that it withholds; null if it does not say.';
comment on column atproto.relay_hosts.status is
    'The status of the host at the relay: active, idle, offline, throttled, banned, or as sent; null if none.';
comment on column atproto.relay_hosts.withheld_accounts is
    'Tracked accounts that the relay withheld when the list of the host was last read; null if it never was.';
comment on column atproto.relay_hosts.withheld_by_status is
    'The same by the status that the relay gives as its reason: a JSON object; null if there are none.';
comment on column atproto.relay_hosts.listed_at is 'When the relay last listed the host.';
