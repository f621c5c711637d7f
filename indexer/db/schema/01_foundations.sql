-- Schemas, roles, stored settings, and the functions that the other files use. Names of objects use the collation "C"
-- in every locale of the database. DIDs are text and CIDs are binary. Each table with a DID has a column `bucket`,
-- which comes last in the keys that the public views use. So `where did = …` is an index scan, and the same
-- statements run on tables that are distributed by bucket (docs/decisions/0001-table-layout-and-statements.md).

-- The roles that read the public schema. They belong to the whole server. If the role of the migration may not create
-- them, an administrator does so later (docs/operations.md).
do $$ declare
    role name;
    setting record;
begin
    foreach role in array array['atproto_reader', 'atproto_operator'] loop
        begin
            execute format('create role %I nologin', role);
        exception when duplicate_object or unique_violation or insufficient_privilege then
            raise notice 'role %: %', role, sqlerrm;
        end;
        -- Limits for statements and open transactions of consumers, because an open snapshot prevents vacuum.
        for setting in select * from (values
            ('statement_timeout', '60s'), ('idle_in_transaction_session_timeout', '60s'), ('lock_timeout', '10s')
        ) limits(name, value) loop
            begin
                -- If another database has set it, do not wait for the transaction of a third one that sets it again.
                if not exists (
                    select from pg_db_role_setting s join pg_roles r on r.oid = s.setrole
                    where r.rolname = role and s.setdatabase = 0
                        and format('%s=%s', setting.name, setting.value) = any(s.setconfig)
                ) then
                    execute format('alter role %I set %s = %L', role, setting.name, setting.value);
                end if;
            exception when undefined_object or insufficient_privilege then
                raise notice 'role %: %', role, sqlerrm;
            end;
        end loop;
    end loop;
end $$;

-- `migrate` creates the schema indexer before it runs these files.
comment on schema indexer is
    'Private tables of the daemon. They may change with any release. Use schema atproto.';
create schema atproto;
comment on schema atproto is 'Public views and functions. Columns are added, never removed or redefined.';
create schema lexicon;
comment on schema lexicon is 'A typed view for each record type whose lexicon was added, and the functions that '
    'the views use. Columns are those of the lexicon.';

-- Settings that decide what is stored, as the last started daemon had them.
create table indexer.stored_setting (
    name text not null,
    value text not null,
    primary key (name)
);

-- The bucket of a DID: the first byte of its SHA-256 hash.
create function indexer.bucket_of(did text) returns smallint
language sql immutable strict parallel safe
return get_byte(sha256(convert_to(did, 'UTF8')), 0)::smallint;

create function atproto.bucket_of(did text) returns smallint
language sql immutable strict parallel safe
return get_byte(sha256(convert_to(did, 'UTF8')), 0)::smallint;
comment on function atproto.bucket_of(text) is 'Return the bucket of a DID, 0 to 255: the first byte of its SHA-256.';

-- One expression for the 58 digits of base32 (RFC 4648), which is five times as fast as a concatenation of digits.
do $do$ declare
    digits constant text := format('%L::bytea', convert_to('abcdefghijklmnopqrstuvwxyz234567', 'UTF8'));
    expression text := format('%L::bytea', decode(repeat('00', 58), 'hex'));
begin
    for digit in 0..57 loop
        expression := format(
            'set_byte(%s, %s, get_byte(%s, (((get_byte($1, %s) << 8) | %s) >> %s) & 31))',
            expression, digit, digits, digit * 5 / 8,
            case when digit < 56 then format('get_byte($1, %s)', digit * 5 / 8 + 1) else '0' end, 11 - digit * 5 % 8
        );
    end loop;
    execute format(
        'create function atproto.cid_text(cid bytea) returns text language sql immutable strict parallel safe '
            'return ''b'' || encode(%s, ''escape'')',
        expression
    );
end $do$;
comment on function atproto.cid_text(bytea) is 'Return the string form of a binary CID of 36 bytes.';

-- True if the rows of the table are on several nodes.
create function indexer.is_distributed(relation regclass) returns boolean
language plpgsql stable strict set search_path = pg_catalog, pg_temp as $$
begin
    if to_regclass('pg_catalog.pg_dist_partition') is null then
        return false;
    end if;
    return exists (select from pg_dist_partition p where p.logicalrelid = relation and p.partmethod = 'h');
end $$;

-- The buckets in the order of their hashes in Citus, which uses the hash function of Postgres for smallint. On a
-- distributed database, shards are ranges of this order.
create function indexer.hash_order() returns smallint[]
language sql immutable parallel safe
return array(select b::smallint from generate_series(0, 255) b order by hashint2(b::smallint));

-- The role of the caller of a function of schema atproto, as set by SET ROLE.
-- `current_user` is the owner of the calling function. SET ROLE is visible only in the setting.
create function indexer.calling_role() returns text
language sql stable set search_path = pg_catalog, pg_temp
begin atomic
    select case current_setting('role') when 'none' then session_user::text else current_setting('role') end;
end;
