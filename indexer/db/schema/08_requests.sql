-- Requests of operators in SQL.

-- Log that a repo was shown or hidden.
create function indexer.change_visibility(one text, visible boolean, rev text) returns void
language plpgsql set search_path = pg_catalog, pg_temp as $$
begin
    perform indexer.log_repo_change($1, case when $2 then 'visible' else 'hidden' end, $3);
end $$;

-- The trigger REQUESTED of indexer/sync/repo.py. A test runs it in every state and compares. A resync in
-- progress ends: it may have read the repo before the fault that the request is about.
create function atproto.request_resync(did text) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    update indexer.repo r
    set version = r.version + 1, sync_status = 'desynchronized', sync_reason = 'requested', attempts = 0,
        next_attempt_at = null, updated_at = now(), lease_until = null, buffered_events = 0, buffered_bytes = 0
    where r.did = $1 and r.bucket = indexer.bucket_of($1) and r.tracked;
    if not found then
        return false;
    end if;
    delete from indexer.buffered_event b where b.did = $1 and b.bucket = indexer.bucket_of($1);
    return true;
end $$;
comment on function atproto.request_resync(text) is
    'Request a resync of a repo. False if it is unknown. Needs atproto_operator.';

-- Hide an account or a record, or show it again; false if the account is unknown.
create function indexer.take_down(target text, takedown boolean, reason text) returns boolean
language plpgsql set search_path = pg_catalog, pg_temp as $$
declare
    before indexer.repo;
begin
    if starts_with($1, 'at://') then
        if not exists (
            select from indexer.repo r
            where r.did = split_part($1, '/', 3) and r.bucket = indexer.bucket_of(split_part($1, '/', 3))
        ) then
            return false;
        end if;
        perform indexer.remove($1, case when $2 then 'hide' else 'show' end, $3);
        return true;
    end if;
    select r.* into before from indexer.repo r
    where r.did = $1 and r.bucket = indexer.bucket_of($1) for update;
    if not found then
        return false;
    end if;
    if before.takedown <> $2 then
        insert into indexer.removal (target, action, role, reason)
        values ($1, case when $2 then 'hide' else 'show' end, indexer.calling_role(), $3);
        update indexer.repo r set version = r.version + 1, takedown = $2, updated_at = now()
        where r.did = $1 and r.bucket = before.bucket;
        if before.active then
            perform indexer.log_repo_change($1, case when $2 then 'hidden' else 'visible' end, before.rev);
        end if;
    end if;
    return true;
end $$;

create function atproto.request_takedown(did text, takedown boolean) returns boolean
language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
begin
    return indexer.take_down($1, $2, null);
end $$;
comment on function atproto.request_takedown(text,boolean) is
    'Hide a repo (by its DID) or a record (by its AT-URI) locally, or show it again. False if the DID is unknown. '
    'Needs atproto_operator.';

-- Seconds to wait after so many attempts, as backoff_seconds of indexer/sync/backoff.py computes them.
create function indexer.backoff(did text, attempts integer) returns double precision
language sql immutable strict parallel safe
return least(60 * 2.0 ^ least(greatest($2 - 1, 0), 32), 3600)::float8
    * (0.75 + get_byte(sha256(convert_to($1 || '/' || $2, 'UTF8')), 0) / 255.0::float8 / 2);

-- A hint of indexer/sync/hints.py, without a Jetstream: the trigger HINTED. The row keeps the request. The notification
-- only names the path and begins the resync at once. During a back-off, a synchronized repo stays as it is. A resync in
-- progress may have read the repo before the write: its end compares only a rev above those that were noted before. The
-- allowance for clocks is `clock_drift_seconds` of indexer/atproto/limits.py. The row is locked only to be written.
create function atproto.request_record(uri text, rev text default null) returns boolean
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
declare
    parts constant text[] := regexp_match($1, '^at://(did:[^/]+)/([^/*]+)/([a-zA-Z0-9._:~-]+)$');
    one constant text := (indexer.checked_dids(parts[1:1]))[1];
    collection constant text := (indexer.checked_patterns(parts[2:2]))[1];
    told constant text collate "C" := rev;
    micros constant bigint := extract(epoch from clock_timestamp() + interval '5 minutes') * 1000000;
    stored indexer.repo;
    settled boolean;
begin
    if parts is null or parts[3] in ('.', '..') or length(parts[3]) > 512 then
        raise exception '% is not the AT-URI of a record with a DID', coalesce(quote_literal(left($1, 100)), 'null')
            using errcode = 'invalid_parameter_value';
    elsif told !~ '^[2-7a-j][2-7a-z]{12}$' then
        raise exception '% is not a rev', quote_literal(left($2, 100)) using errcode = 'invalid_parameter_value';
    elsif told > (
        select string_agg(substr('234567abcdefghijklmnopqrstuvwxyz', (micros >> 5 * n & 31)::integer + 1, 1), ''
            order by n desc) || 'zz'
        from generate_series(0, 10) n
    ) then
        raise exception '% is in the future', told using errcode = 'invalid_parameter_value';
    elsif not exists (
        select from indexer.scope s, unnest(s.collections) pattern where indexer.pattern_covers(pattern, collection)
    ) then
        raise exception 'the collection % is not in scope', collection
            using errcode = 'object_not_in_prerequisite_state';
    elsif exists (select from indexer.removed m where m.target in ($1, collection)) then
        raise exception '% is redacted or hidden', $1 using errcode = 'object_not_in_prerequisite_state';
    end if;
    select r.* into stored from indexer.repo r where r.did = one and r.bucket = indexer.bucket_of(one);
    if stored.tracked is not true or not stored.visible then
        raise exception 'the repo of % is %', one, case when stored.tracked then 'hidden' else 'not tracked' end
            using errcode = 'object_not_in_prerequisite_state';
    end if;
    settled := stored.sync_status = 'synchronized'
        or (stored.sync_status = 'desynchronized' and stored.next_attempt_at is not distinct from 'infinity');
    if told <= stored.rev and coalesce(stored.sync_reason, 'hinted') in ('hinted', 'behind', 'withheld')
        or stored.sync_status = 'in-progress' and coalesce(told < stored.latest_unverified_rev, told is null)
        or not settled and stored.next_attempt_at > now()
        or settled and stored.attempts > 0
        and now() < stored.updated_at + indexer.backoff(one, stored.attempts) * interval '1 second' then
        return false;
    end if;
    if settled or told > coalesce(stored.latest_unverified_rev, '') then
        update indexer.repo r
        set version = r.version + 1, updated_at = now(), sync_reason = coalesce(r.sync_reason, 'hinted'),
            sync_status = case when settled then 'desynchronized' else r.sync_status end,
            latest_unverified_rev = greatest(r.latest_unverified_rev, told),
            attempts = case when not settled then r.attempts
                when r.updated_at < now() - interval '1 hour' then 1 else r.attempts + 1 end,
            next_attempt_at = case when not settled then r.next_attempt_at end
        where r.did = one and r.bucket = stored.bucket and r.version = stored.version;
        if not found then
            return false;
        end if;
    end if;
    if pg_notification_queue_usage() < 0.75 then
        perform pg_notify('indexer_requests', one || ' ' || collection || '/' || parts[3]);
    end if;
    return true;
end $$;
comment on function atproto.request_record(text,text) is
    'Fetch a record now, with proof. False if this rev is stored already, or if it is to be asked again later. An '
    'error if the repo is hidden or not tracked, or the record out of scope. Needs atproto_operator.';

-- Each read of the repo ends with an error that is caught: otherwise its locks would last until the transaction ends.
create function atproto.wait_for(
    did text, rev text, timeout interval default '10 seconds', out reached boolean, out stored_rev text
) language plpgsql strict security definer set search_path = pg_catalog, pg_temp as $$
declare
    began constant timestamptz := clock_timestamp();
    seconds constant double precision := extract(epoch from timeout);
    passed double precision;
begin
    if current_setting('transaction_isolation') <> 'read committed' then
        raise exception 'atproto.wait_for needs the isolation level read committed, to see what others commit'
            using errcode = 'invalid_transaction_state';
    elsif pg_current_xact_id_if_assigned() is not null then
        raise exception 'atproto.wait_for is not possible after a write in the same transaction: commit it first'
            using errcode = 'invalid_transaction_state';
    elsif seconds not between 0 and 30 then
        raise exception 'the timeout is not between 0 and 30 seconds' using errcode = 'invalid_parameter_value';
    end if;
    loop
        begin
            select r.rev, coalesce(r.sync_reason, 'hinted') in ('hinted', 'behind', 'withheld')
                and r.rev >= $2 collate "C"
            into stored_rev, reached from indexer.repo r
            where r.did = $1 and r.bucket = indexer.bucket_of($1) and r.visible;
            raise exception using errcode = 'IX001';
        exception when sqlstate 'IX001' then
            null;
        end;
        reached := coalesce(reached, false);
        passed := extract(epoch from clock_timestamp() - began);
        exit when reached or passed >= seconds;
        perform pg_sleep(least(greatest(passed / 10, 0.005), 0.25, seconds - passed));
    end loop;
end $$;
comment on function atproto.wait_for(text,text,interval) is
    'Wait until the views show this rev of a repo or a later one; at most 30 seconds. Needs the isolation level read '
    'committed, and no write before it in the transaction.';

-- Two accounts may have the handle until the earlier one is checked again. The collation "C" of lower(): in other locales it may change the letter I differently.
create function atproto.did_of(handle text) returns text
language plpgsql stable strict security definer set search_path = pg_catalog, pg_temp as $$
declare
    wanted constant text collate "C" := lower(ltrim($1, '@') collate "C");
begin
    return (
        select i.did from indexer.identity i where i.handle = wanted and i.handle <> 'handle.invalid'
        order by i.handle_due_at desc nulls last limit 1
    );
end $$;
comment on function atproto.did_of(text) is
    'Return the DID with this verified handle, in any case, with or without @; null if no account has it.';
