from hypothesis import given
from hypothesis import strategies as st

from indexer.atproto.lexicon import UNLIMITED, FieldKind, RecordField
from indexer.db.lexicons import KEY_COLUMNS, column_name, fields_of_json, identifier, plan_columns


def field(name: str, kind: FieldKind = FieldKind.TEXT) -> RecordField:
    return RecordField(name, kind, required=False, nullable=False, max_bytes=UNLIMITED, description="")


def names(*fields: RecordField) -> list[str]:
    return [column for view in plan_columns(fields, {}) for column in view.columns]


def test_columns_are_in_snake_case() -> None:
    for name, expected in {
        "text": "text",
        "createdAt": "created_at",
        "pinnedPost2": "pinned_post2",
        "HTTPServer": "http_server",
        "viaURL": "via_url",
        "already_snake": "already_snake",
        "a.b c": "a_b_c",
        "Ünï": "_n_",
        "日本": "_",
    }.items():
        assert column_name(name) == expected


def test_columns_whose_name_is_taken_get_a_number() -> None:
    assert names(field("uri"), field("createdAt"), field("created_at")) == ["uri_2", "created_at", "created_at_2"]
    assert names(field("subject_uri"), field("subject", FieldKind.STRONG_REF)) == [
        "subject_uri",
        "subject_2_uri",
        "subject_2_cid",
    ]


def test_long_names_are_shortened_to_different_identifiers() -> None:
    long = [f"{'a' * 70}{letter}" for letter in "xy"]
    for shortened in (names(*map(field, long)), [identifier(name) for name in long]):
        assert len(set(shortened)) == 2
        assert {len(name) for name in shortened} == {63}
    assert identifier("a" * 63) == "a" * 63


def test_new_fields_follow_and_present_ones_keep_their_columns() -> None:
    before = {view.field.name: view for view in plan_columns([field("b"), field("uri")], {})}
    after = plan_columns([field("a"), field("uri_2"), field("uri"), field("b")], before)
    assert [(view.field.name, view.columns) for view in after] == [
        ("b", ("b",)),
        ("uri", ("uri_2",)),
        ("a", ("a",)),
        ("uri_2", ("uri_2_2",)),
    ]


fields = st.lists(
    st.builds(
        field, st.text(max_size=80) | st.sampled_from(["uri", "Uri", "uri_2", "a", "aUri"]), st.sampled_from(FieldKind)
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


@given(fields, fields)
def test_columns_are_unique_identifiers_and_stay(first: list[RecordField], second: list[RecordField]) -> None:
    before = {view.field.name: view for view in plan_columns(first, {})}
    after = plan_columns(second, fields_of_json(view.to_json() for view in before.values()))
    for planned in (before.values(), after):
        columns = [column for view in planned for column in view.columns]
        assert len({*columns, *KEY_COLUMNS}) == len(columns) + len(KEY_COLUMNS)
        assert all(0 < len(column.encode()) <= 63 for column in columns)
    for view in after:
        known = before.get(view.field.name)
        if known is not None and known.field.kind == view.field.kind:
            assert view.columns == known.columns
