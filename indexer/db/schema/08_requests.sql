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
    'Hide a repo, or a record by its AT-URI, locally, or show it again. False if the repo is unknown. Needs '
    'atproto_operator.';

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
