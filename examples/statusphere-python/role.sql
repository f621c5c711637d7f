-- The role of the AppView: it reads the public schema, follows the change log, and may create a schema of its own.
-- On a database server of your own, give it a password: alter role statusphere password '…'.
create role statusphere login in role atproto_reader;
do $$ begin execute format('grant create on database %I to statusphere', current_database()); end $$;
alter role statusphere set idle_in_transaction_session_timeout = '60s';
