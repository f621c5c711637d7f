"""Let `atproto.link_count` find the buckets of each process on a distributed database, and while a feed is served.

A row of `shard_owner` has the positions of a process. On a plain database, these are its buckets. On a distributed one,
they are places in the order of the hashes of the buckets (`indexer.sync.shard`). The row of the feed has a number after
all positions, and no bucket.
"""

from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None

STATEMENTS = (
    """
    create function indexer.hash_order() returns smallint[]
    language sql immutable parallel safe
    return array[
        60, 146, 139, 8, 132, 138, 20, 230, 218, 82, 118, 248, 220, 205, 210, 63,
        1, 15, 25, 155, 145, 31, 255, 119, 137, 88, 148, 216, 79, 87, 201, 94,
        26, 33, 176, 231, 24, 35, 157, 245, 10, 115, 129, 223, 92, 151, 104, 105,
        198, 48, 183, 109, 234, 5, 163, 53, 208, 112, 211, 196, 50, 77, 200, 166,
        178, 244, 120, 247, 61, 93, 214, 14, 54, 212, 4, 130, 209, 141, 7, 182,
        215, 228, 250, 17, 51, 236, 172, 133, 162, 16, 187, 189, 111, 96, 143, 170,
        229, 217, 85, 98, 171, 164, 84, 36, 202, 191, 246, 89, 110, 226, 174, 19,
        106, 55, 64, 0, 37, 213, 147, 74, 40, 175, 123, 65, 127, 45, 103, 181,
        158, 101, 156, 117, 188, 121, 91, 3, 142, 161, 232, 113, 108, 57, 100, 52,
        160, 62, 99, 252, 165, 241, 136, 168, 102, 97, 46, 253, 140, 197, 180, 28,
        186, 243, 154, 86, 150, 221, 38, 122, 6, 239, 237, 254, 73, 192, 225, 144,
        66, 71, 70, 184, 21, 125, 34, 83, 194, 124, 153, 49, 39, 43, 56, 235,
        242, 167, 249, 126, 251, 13, 47, 159, 227, 32, 2, 27, 199, 95, 114, 134,
        58, 152, 149, 41, 42, 219, 224, 179, 185, 173, 131, 76, 30, 23, 9, 177,
        116, 80, 81, 207, 90, 135, 204, 59, 238, 72, 128, 190, 22, 233, 69, 203,
        29, 12, 193, 78, 195, 11, 68, 67, 206, 169, 44, 240, 107, 222, 75, 18
    ]::smallint[]
    """,
    # Every statement of the function reads the same snapshot, because the function is stable.
    """
    create or replace function atproto.link_count(target text, collection text, path text) returns bigint
    language plpgsql stable strict security definer
    set search_path = pg_catalog, pg_temp set enable_seqscan = off set jit = off as $$
    declare
        target_bucket smallint := indexer.bucket_of($1);
        total bigint;
        changed record;
    begin
        if (select bool_and(b.done_at is not null and b.off_at is null) from indexer.link_bucket b) is not true then
            return null;
        end if;
        if exists (
            select from indexer.shard_owner o left join indexer.link_bucket b on b.bucket = case
                when exists (select from indexer.distribution) then (indexer.hash_order())[o.first_bucket + 1]
                else o.first_bucket
            end
            where o.first_bucket < 256 and b.bucket is null
        ) then
            return null;
        end if;
        total := coalesce((
            select c.count from indexer.link_count c
            where c.target = $1 and c.collection = $2 and c.path = $3 and c.bucket = target_bucket
        ), 0);
        total := total + coalesce((
            select sum(d.delta) from indexer.link_delta d
            where d.bucket = target_bucket and d.target = $1 and d.collection = $2 and d.path = $3
        ), 0);
        for changed in
            select w.did, w.bucket, r.active and not r.takedown as visible
            from (select did, bucket from indexer.link_recount group by did, bucket) w
            join indexer.repo r on r.did = w.did and r.bucket = w.bucket
        loop
            total := total + (
                select count(*) * case when changed.visible then 1 else -1 end from indexer.link l
                where l.target = $1 and l.collection = $2 and l.path = $3
                    and l.did = changed.did and l.bucket = changed.bucket and l.counted <> changed.visible
            );
        end loop;
        return total;
    end $$
    """,
)

COMMENTS = {
    "function indexer.hash_order()": (
        "The buckets in the order of their hashes in Citus. On a distributed database, shards are ranges of this order."
    ),
    "column indexer.shard_owner.first_bucket": (
        "The first position of the shard. On a plain database, this is a bucket; on a distributed one, a place in "
        "indexer.hash_order(), counted from 0. 256: the feed for clients of tap."
    ),
    "column indexer.shard_owner.last_bucket": "The last position of the shard.",
}


def upgrade() -> None:
    """Apply the migration."""
    for statement in STATEMENTS:
        op.execute(statement)
    for thing, comment in COMMENTS.items():
        op.execute(f"comment on {thing} is '{comment}'")
