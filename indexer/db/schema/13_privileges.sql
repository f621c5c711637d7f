-- Who may call which function, and read which view. It is also run for roles that are created later.
-- Limits for statements of consumers are in docs/operations.md.

revoke all on function
    indexer.publish(), indexer.log_repo_change(text, text, text), indexer.consumer_states(),
    indexer.change_scope(text, text[], text[]), indexer.change_visibility(text, boolean, text),
    indexer.start_tracking(text, bigint), indexer.stop_tracking(text), indexer.use_two_phases(),
    indexer.remove(text, text, text), indexer.take_down(text, boolean, text),
    indexer.number_batch(smallint, bigint, integer), indexer.queue_batch(), indexer.unnumbered_batches(bigint),
    indexer.number_changes(bigint[], integer[], integer[], text[]), indexer.grant_shards_to_readers(),
    indexer.adapt_public_schema(), atproto.changes_after(bigint, integer), atproto.register_reader(text, bigint),
    atproto.unregister_reader(text), atproto.next_changes(text, integer), atproto.did_of(text),
    atproto.link_count(text, text, text), atproto.request_resync(text), atproto.request_takedown(text, boolean),
    atproto.set_track(text), atproto.set_collections(text[]), atproto.set_signal_collections(text[]),
    atproto.track(text[]), atproto.untrack(text[]), atproto.request_record(text, text),
    atproto.wait_for(text, text, interval)
from public;

do $$ declare
    role name;
begin
    for role in select rolname from pg_roles where rolname in ('atproto_reader', 'atproto_operator') loop
        execute format('grant usage on schema atproto, lexicon to %I', role);
        execute format('grant select on all tables in schema atproto, lexicon to %I', role);
        execute format(
            'grant execute on function indexer.consumer_states(), atproto.changes_after(bigint, integer), '
                'atproto.register_reader(text, bigint), atproto.unregister_reader(text), '
                'atproto.next_changes(text, integer), atproto.did_of(text), atproto.link_count(text, text, text), '
                'atproto.bucket_of(text), atproto.wait_for(text, text, interval) to %I',
            role
        );
    end loop;
    if exists (select from pg_roles where rolname = 'atproto_operator') then
        grant execute on function
            atproto.request_resync(text), atproto.request_takedown(text, boolean), atproto.set_track(text),
            atproto.set_collections(text[]), atproto.set_signal_collections(text[]), atproto.track(text[]),
            atproto.untrack(text[]), atproto.request_record(text, text)
        to atproto_operator;
    end if;
end $$;
