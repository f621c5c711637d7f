-- Records.

-- The current records of each repo, at the rev of its repo row.
create table indexer.record (
    did text collate "C" not null,
    collection text collate "C" not null,
    rkey text collate "C" not null,
    bucket smallint not null,
    cid bytea not null,
    rev text collate "C" not null,
    -- The first letter of commit, export or range; E or R if the resync followed a hint, so that the change was live.
    -- Here it takes a byte that is padding otherwise: rev ends at an odd offset, and a value of more than 126 bytes
    -- begins at a multiple of 4.
    proof "char",
    -- True if it was found live: by a commit or a hint. Null if proof says it, because first_seen is null.
    first_live boolean,
    value jsonb,
    value_problem text,
    -- The DAG-CBOR of the record, if value does not hold all of it.
    original bytea,
    indexed_at timestamptz not null default statement_timestamp(),
    -- When it was first stored. Null if that was indexed_at, so that only a record that was updated has more bytes.
    first_seen timestamptz,
    primary key (did, collection, rkey, bucket)
) with (
    autovacuum_vacuum_scale_factor = 0.02,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.02
);
create index record_collection on indexer.record (collection, indexed_at);
create index record_missing on indexer.record (did, bucket) where value_problem = 'missing';

create function atproto.record_bytes(did text, collection text, rkey text) returns bytea
language plpgsql stable strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return (
        select c.original from indexer.record c join indexer.repo r using (did, bucket)
        where c.did = $1 and c.collection = $2 and c.rkey = $3 and c.bucket = indexer.bucket_of($1)
            and r.visible
    );
end $$;
comment on function atproto.record_bytes(text,text,text) is
    'Return the DAG-CBOR of a visible record if value does not hold all of it; null otherwise.';
