"""Let odd values hide nothing: datetimes with large offsets, lists with an odd item, sizes of blobs.

- The syntax of datetimes allows offsets up to 23:59, and any fraction within 64 characters (`@atproto/syntax` 0.7.7).
  Postgres reads offsets below 16 hours.
- An item of a list of strings that is no string, or is too long, is null. Before, the whole list was null.
- `atproto.blobs` rounded the size of a blob. Typed views showed negative ones, and named no reason for a missing one.

An index keeps the values that the functions gave before; docs/sql.md#typed-views says how to build it again.
"""

from alembic import op

revision = "0036"
down_revision = "0035"
branch_labels = None
depends_on = None

DATE = (
    "([0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    "|([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)-02-29)"
)
TIME = "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]+)?"
OFFSET = "(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"

STATEMENTS = (
    # As in 0024, where the reasons are. Of a large offset, 12 hours are subtracted after the cast.
    f"""
    create or replace function lexicon.to_timestamp(value jsonb) returns timestamptz
    language plpgsql immutable strict parallel safe as $$
    declare
        text_value pg_catalog.text := value operator(pg_catalog.#>>) '{{}}';
        rest pg_catalog.interval := '0';
        found timestamptz;
    begin
        if pg_catalog.jsonb_typeof(value) operator(pg_catalog.=) 'string'
            and pg_catalog.octet_length(text_value) operator(pg_catalog.<=) 64
            and text_value operator(pg_catalog.~) '^{DATE}T{TIME}{OFFSET}$'
            and pg_catalog.left(text_value, 4) operator(pg_catalog.<>) '0000'
            and pg_catalog.right(text_value, 6) operator(pg_catalog.<>) '-00:00'
        then
            if text_value operator(pg_catalog.~) '[+-](1[6-9]|2[0-3]):[0-9]{{2}}$' then
                rest := (pg_catalog.left(pg_catalog.right(text_value, 6), 1) operator(pg_catalog.||) '12:00')
                    ::pg_catalog.interval;
                text_value := pg_catalog.left(text_value, -5) operator(pg_catalog.||) pg_catalog.to_char(
                    pg_catalog.right(text_value, 5)::pg_catalog.interval operator(pg_catalog.-) '12:00', 'HH24:MI'
                );
            end if;
            found := pg_catalog.replace(text_value, 'Z', '+00:00')::pg_catalog.timestamptz
                operator(pg_catalog.-) rest;
            if found operator(pg_catalog.>=) pg_catalog.to_timestamp(-62135596800)
                and found operator(pg_catalog.<) pg_catalog.to_timestamp(253402300800)
            then
                return found;
            end if;
        end if;
        return null;
    end $$
    """,
    """
    create or replace function lexicon.to_text_array(value jsonb, max_bytes integer) returns text[]
    language sql immutable strict parallel safe
    return case jsonb_typeof(value) when 'array' then array(
        select lexicon.to_text(item, max_bytes)
        from jsonb_array_elements(case jsonb_typeof(value) when 'array' then value else '[]' end) item
    ) end
    """,
    """
    create or replace function lexicon.field_problem(
        value jsonb, kind text, max_bytes integer, required boolean, nullable boolean
    ) returns text
    language plpgsql immutable parallel safe as $$
    declare
        found constant text := pg_catalog.jsonb_typeof(value);
        expected constant text := case kind
            when 'text' then 'string' when 'timestamp' then 'string' when 'bigint' then 'number'
            when 'boolean' then 'boolean' when 'array' then 'array' when 'text_array' then 'array'
            when 'any' then found else 'object'
        end;
    begin
        if found is null then
            return case when required then 'missing' end;
        elsif found = 'null' then
            return case when not nullable then 'null' end;
        elsif found <> expected then
            return pg_catalog.format('expected %s, found %s', expected, found);
        end if;
        return case
            when kind = 'text' and lexicon.to_text(value, max_bytes) is null then
                pg_catalog.format('longer than %s bytes', max_bytes)
            when kind = 'bigint' and lexicon.to_bigint(value) is null then 'not a 64-bit integer'
            when kind = 'timestamp' and lexicon.to_timestamp(value) is null then 'not a datetime'
            when kind = 'text_array' then case
                when pg_catalog.array_position(lexicon.to_text_array(value, 2147483647), null) is not null then
                    'an item is not a string'
                when pg_catalog.array_position(lexicon.to_text_array(value, max_bytes), null) is not null then
                    pg_catalog.format('an item is longer than %s bytes', max_bytes)
            end
            when kind = 'link' and lexicon.to_text(value -> '$link', 256) is null then 'not a link'
            when kind = 'blob' then case
                when lexicon.to_text(coalesce(value -> 'ref' -> '$link', value -> 'cid'), 256) is null
                    or lexicon.to_text(value -> 'mimeType', 256) is null
                then 'not a blob'
                when value -> 'size' is not null and coalesce(lexicon.to_bigint(value -> 'size'), -1) < 0 then
                    'its size is not a number of bytes'
            end
            when kind = 'strong_ref' and (
                lexicon.to_text(value -> 'uri', 2048) is null or lexicon.to_text(value -> 'cid', 256) is null
            ) then 'not a strong reference'
        end;
    end $$
    """,
    """
    create or replace function indexer.lexicon_expressions(field jsonb) returns text[]
    language plpgsql immutable strict set search_path = pg_catalog, pg_temp as $$
    declare
        member constant text := format('(value -> %L)', field ->> 'field');
        max_bytes constant text := field ->> 'max_bytes';
    begin
        return case field ->> 'kind'
            when 'text' then array[format('lexicon.to_text(%s, %s)', member, max_bytes)]
            when 'text_array' then array[format('lexicon.to_text_array(%s, %s)', member, max_bytes)]
            when 'link' then array[format('lexicon.to_text(%s -> ''$link'', 256)', member)]
            when 'strong_ref' then array[
                format('lexicon.to_text(%s -> ''uri'', 2048)', member),
                format('lexicon.to_text(%s -> ''cid'', 256)', member)
            ]
            when 'blob' then array[
                format('lexicon.to_text(coalesce(%s -> ''ref'' -> ''$link'', %1$s -> ''cid''), 256)', member),
                format('lexicon.to_text(%s -> ''mimeType'', 256)', member),
                format('nullif(greatest(lexicon.to_bigint(%s -> ''size''), -1), -1)', member)
            ]
            else array[format('lexicon.to_%s(%s)', field ->> 'kind', member)]
        end;
    end $$
    """,
    """
    create or replace function indexer.lexicon_condition(field jsonb) returns text
    language sql immutable strict set search_path = pg_catalog, pg_temp
    return (
        select format('(%s%s%s)',
            case when not (field ->> 'required')::boolean then
                format('(value -> %L) is null or ', field ->> 'field')
            end,
            case when (field ->> 'nullable')::boolean then
                format('(value -> %L) is not distinct from ''null''::jsonb or ', field ->> 'field')
            end,
            string_agg(
                case
                    when field ->> 'kind' = 'text_array' then
                        format('array_position(coalesce(%s, array[null::text]), null) is null', e.expression)
                    when e.n = 3 then  -- a blob of an early release has no size
                        format('((value -> %L -> ''size'') is null or %s is not null)', field ->> 'field', e.expression)
                    else format('%s is not null', e.expression)
                end,
                ' and ' order by e.n
            )
        )
        from unnest(indexer.lexicon_expressions(field)) with ordinality as e(expression, n)
    )
    """,
    # Only the condition of the sizes changes, whatever else another migration has changed.
    """
    do $$ declare
        before constant text := '$.size ? (@ >= 0 && @ <= 9223372036854775807)';
        function constant text := pg_get_functiondef('indexer.adapt_public_schema()'::regprocedure);
    begin
        if position(before in function) = 0 then
            raise exception 'the view atproto.blobs has another definition than expected';
        end if;
        execute replace(function, before, '$.size ? (@ >= 0 && @ <= 9223372036854775807 && @ == @.floor())');
    end $$
    """,
    "select indexer.adapt_public_schema()",
    """
    comment on function lexicon.to_text_array(jsonb, integer) is
        'The strings of an array, null for an item that is no string or is longer; null for another type.'
    """,
    """
    comment on column atproto.records.value_problem is
        'Why value is null or differs from the original, from a closed set (docs/reasons.md). Null value: missing, '
        'not-stored, not-dag-cbor, too-large, omitted, too-many-items, too-deep. Nearest JSON value: number, '
        'nul-character, reserved-key; null in rows of earlier releases. Unchanged value that does not fit its '
        'collection: not-a-map, no-type, other-type. Null: no problem.'
    """,
    """
    comment on column atproto.blobs.size is
        'The size in bytes that the record states; null if it states no number of bytes.'
    """,
)


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
