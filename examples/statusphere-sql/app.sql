-- Statusphere in SQL: the latest status of each account, newest first, and how often each status was chosen.
--
-- Needs the typed view of lexicons/xyz.statusphere.status.json (`indexer lexicon add lexicons`). Execute this file as the
-- owner of the database; it may be executed again. Nothing is stored: the views show the records of the indexer as they
-- are now, and hide those of accounts that are not active.
begin;

create schema if not exists statusphere;

-- Records that fit the lexicon: a value that does not fit is null. The minimum length of a text is not checked there.
create or replace view statusphere.status as
select did, rkey, uri, status, created_at from lexicon."xyz.statusphere.status"
where status <> '' and created_at is not null;

create or replace view statusphere.latest as
select distinct on (s.did) s.did, r.handle, s.status, s.created_at, s.uri
from statusphere.status s join atproto.repos r using (did)
order by s.did, s.created_at desc, s.rkey desc;

create or replace view statusphere.counts as
select status, count(*) as count from statusphere.status group by status;

create or replace function statusphere.page(max_statuses integer default 100) returns json
language sql stable as $$
    select json_build_object(
        'statuses', (
            select coalesce(json_agg(json_build_object(
                'did', l.did,
                'handle', l.handle,
                'status', l.status,
                'createdAt', to_char(l.created_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
                'uri', l.uri
            )), '[]')
            from (select * from statusphere.latest order by created_at desc, did limit max_statuses) l
        ),
        'counts', (
            select coalesce(json_agg(json_build_object('status', c.status, 'count', c.count)), '[]')
            from (select * from statusphere.counts order by count desc, status) c
        )
    )
$$;
comment on function statusphere.page(integer) is
    'Return the latest status of each account, newest first, and how often each status was chosen.';

-- The role of the web server. It reads these views and nothing else. On a database server of your own, give it a
-- password: alter role statusphere password '…'.
do $$ begin
    if to_regrole('statusphere') is null then
        create role statusphere login;
    end if;
end $$;
alter role statusphere set statement_timeout = '5s';
revoke execute on function statusphere.page(integer) from public;
grant usage on schema statusphere to statusphere;
grant usage on schema lexicon to statusphere; -- for the functions of the typed view, not for the view itself
grant select on all tables in schema statusphere to statusphere;
grant execute on function statusphere.page(integer) to statusphere;

notify pgrst, 'reload schema'; -- PostgREST reads the schema again
commit;
