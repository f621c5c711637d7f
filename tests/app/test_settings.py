import os
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from indexer.app.settings import OTHER_VARIABLES, Settings, allowed, load_settings, variable
from indexer.atproto.limits import DEFAULT_LIMITS
from indexer.atproto.syntax import CollectionFilter
from indexer.errors import SettingsError
from indexer.net.server.address import Address
from indexer.sync.hints import JETSTREAM
from indexer.sync.scope import Scope, Track
from indexer.sync.shard import Shard
from indexer.sync.stream import Cursor

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "config" / "indexer.example.toml"


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("INDEXER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "indexer.toml"


def settings_error(file: Path | None = None) -> str:
    """Return the message of the error, which is one line."""
    with pytest.raises(SettingsError) as raised:
        load_settings(file)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_environment_overrides_file_and_file_overrides_defaults(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("resync_workers = 3\nplc_rate = 2.5\n")
    monkeypatch.setenv("INDEXER_RESYNC_WORKERS", "4")
    settings = load_settings(file)
    assert (settings.resync_workers, settings.plc_rate, settings.host_rate) == (4, 2.5, 10)


def test_indexer_config_names_the_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("track = 'listed'\n")
    monkeypatch.setenv("INDEXER_CONFIG", str(file))
    assert load_settings().track == "listed"


def test_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_DATABASE_URL", "")
    assert load_settings().database_url is None


def test_settings_constructor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_RESYNC_WORKERS", "4")
    assert Settings(plc_rate=1).resync_workers == 32


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("relays", "wss://one.example, ws://127.0.0.1:80/", ("wss://one.example", "ws://127.0.0.1:80")),
        ("relays", "https://one.example/,http://127.0.0.1:80", ("wss://one.example", "ws://127.0.0.1:80")),
        ("relays", "wss://one.example/xrpc/com.atproto.sync.subscribeRepos", ("wss://one.example",)),
        ("relays", "https://http.example/xrpc/com.atproto.sync.subscribeRepos/", ("wss://http.example",)),
        ("plc_url", "https://a.example,http://b.example/plc/", ("https://a.example", "http://b.example/plc")),
        ("start", "oldest", "oldest"),
        ("start", "12345", 12345),
        ("sweep_interval", "24h", 86_400),
        ("sweep_interval", "1.5m", 90),
        ("sweep_interval", "250ms", 0.25),
        ("sweep_interval", "90", 90),
        ("sweep_interval", "0", 0),
        ("repo_bytes", "5000001", 5_000_001),
        ("repo_bytes", "2.5 MiB", 2_621_440),
        ("shard", "3/16", Shard(3, 16)),
        ("roles", "resync", ("resync",)),
        ("resync_source", "pds, relay", ("pds", "relay")),
        ("dns_servers", "9.9.9.9, [::1]:5353, ::1", (Address("9.9.9.9", 53), Address("::1", 5353), Address("::1", 53))),
        ("dns_servers", "[fe80::1%eth0]:5353, fe80::1%2", (Address("fe80::1%eth0", 5353), Address("fe80::1%2", 53))),
        ("http_bind", "0.0.0.0:0", Address("0.0.0.0", 0)),  # noqa: S104
        ("http_bind", "[::1]:2580", Address("::1", 2580)),
        ("contact", "https://example.com/indexer", "https://example.com/indexer"),
        ("contact", "mailto:someone@example.com", "mailto:someone@example.com"),
        ("contact", "some.one+indexer@example.com", "some.one+indexer@example.com"),
        ("export_time", "15m", 900),
        ("batch_window", "40ms", 0.04),
        ("store_values", "no", False),
        ("allow_private_hosts", "true", True),
    ],
)
def test_valid_value_is_converted(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), text)
    assert getattr(load_settings(), name) == value


INVALID = {
    "database_url": (
        "mysql://localhost/x",
        "postgresql://[/x",
        "postgresql://localhost:port/x",
        "postgresql://localhost:65536/x",
        "postgresql://me:12/34@localhost/x",
        "localhost",
    ),
    "relays": (
        "one.example",
        "ftp://one.example",
        "wss://one.example/subscribe",
        "wss://one.example/xrpc",
        "wss://one.example,https://one.example/xrpc/com.atproto.sync.subscribeRepos",
        "wss://one.example,,wss://two.example",
        "wss://one.example,wss://one.example",
        "wss://user@one.example",
        "wss://one.example/?cursor=5",
        "wss://one.example:99999",
    ),
    "plc_url": (
        "plc.directory",
        "wss://plc.directory",
        "https://plc.directory/export",
        "https://plc.directory/did:plc:a",
        "ftp://one.example",
        "https://one.example/\x1b[31m",
    ),
    "plc_lookup": ("audit",),
    "start": ("now", "-1", str(2**63)),
    "track": ("some",),
    "collections": ("app.bsky.feed.post, not an nsid", "*.post"),
    "store_values": ("perhaps",),
    "inversion": ("STRICT",),
    "dns_servers": ("dns.example", "9.9.9.9:99999", "fe80::1%eth0:53"),
    "resync_workers": ("0", "1001", "many"),
    "verify_threads": ("0", "1001"),
    "resync_source": ("relay,relay",),
    "plc_rate": ("0", "inf"),
    "contact": (
        "me",
        "someone@example.com (me)",
        "https://example.com/\r\nCookie: x",
        "https://user:secret@example.com/",
        "s\u00f6meone@example.com",
        "@",
    ),
    "export_time": ("0",),
    "outbound_rate": ("0",),
    "sweep_interval": ("-1", "1y", "nan", "1e15"),
    "deletion_grace": ("36501d",),
    "stop_timeout": ("1e12",),
    "batch_window": ("2s", "-1"),
    "new_accounts_per_host": ("1" + 400 * "0",),
    "shard": ("4/4", "0/257", "-1/4"),
    "roles": ("live,sleep",),
    "webhook_url": ("localhost:3000", "ftp://localhost/x", "http://me:secret@localhost/x", "http://localhost/a b"),
    "admin_password": ("two\nlines",),
    "http_bind": ("localhost", "::1:80", "[one]:80", "x:70000", "x:٣"),
    "log_level": ("loud",),
    "repo_bytes": ("1000001GB",),
}
"""By setting: values that are rejected."""


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in INVALID.items() for text in texts])
def test_error_for_bad_value_names_the_variable_and_the_allowed_values(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable(name), text)
    message = settings_error()
    assert message.startswith(f"{variable(name)}: ")
    assert message.endswith(allowed(name).replace("`", ""))


@pytest.mark.parametrize(
    "line", ["resync_workers = true", "start = false", "relays = 3", "collections = [1]", "shard = 1", "http_bind = 80"]
)
def test_error_for_bad_value_in_the_file_names_key_and_file(line: str, file: Path) -> None:
    file.write_text(line)
    name = line.split(" ", maxsplit=1)[0]
    assert settings_error(file).startswith(f"'{name}' in {file}: ")


def test_error_for_unknown_variable_suggests_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_RELAY", "wss://one.example")
    assert settings_error() == "INDEXER_RELAY is not a setting; did you mean INDEXER_RELAYS?"


def test_error_for_unknown_key_suggests_the_right_one(file: Path) -> None:
    file.write_text("repo_byte = 5\n")
    assert settings_error(file) == f"'repo_byte' in {file} is not a setting; did you mean repo_bytes?"


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES - {"INDEXER_CONFIG"}))
def test_variables_of_tests_and_tools_are_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    load_settings()


def test_error_for_unreadable_file_names_the_file(file: Path) -> None:
    assert settings_error(file) == f"the settings file {file} cannot be read: No such file or directory"
    file.write_bytes(b"relays = \xff")
    assert settings_error(file).startswith(f"the settings file {file} is not TOML: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("database_url", "mysql://me:hunter2@localhost/x"),
        ("relays", "wss://me:hunter2@one.example"),
        ("webhook_url", "x://localhost/hunter2"),
        ("admin_password", "hunter2\n"),
    ],
)
def test_error_never_shows_a_password(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), text)
    assert "hunter2" not in settings_error()


@pytest.mark.parametrize(
    "url",
    [
        "postgres:///x?host=/run/postgresql",
        "postgresql://me:p%40ss@[::1]:5432/x",
        "postgresql://one:5432,two/x?target_session_attrs=primary",
    ],
)
def test_database_url_may_have_any_form_of_libpq(url: str) -> None:
    Settings.model_validate({"database_url": url})


def test_user_agent_contains_the_contact() -> None:
    assert Settings().user_agent.endswith(" (AT Protocol record-level sync; no contact given)")
    assert "; me@example.com)" in Settings(contact="me@example.com").user_agent


def test_text_of_settings_does_not_contain_secrets() -> None:
    settings = Settings.model_validate(
        {
            "database_url": "postgresql://me:hunter2@localhost/x",
            "webhook_url": "https://example.com/hunter2",
            "admin_password": "hunter2",
        }
    )
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value().endswith("hunter2@localhost/x")
    assert "hunter2" not in f"{settings!r} {settings}"


def test_limit_of_blocks_grows_with_the_size_of_exports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().limits == DEFAULT_LIMITS
    monkeypatch.setenv("INDEXER_REPO_BYTES", "1GiB")
    assert load_settings().limits == replace(DEFAULT_LIMITS, repo_bytes=2**30, repo_blocks=10_000_000)


def test_example_file_contains_the_defaults(file: Path) -> None:
    uncommented = re.sub(r"^# (?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert tomllib.loads(uncommented).keys() == Settings.model_fields.keys()
    unset = "database_url|data_dir|track|contact|sweep_interval|verify_threads|webhook_url|admin_password"
    without_default = rf"^({unset}) .*$"
    file.write_text(re.sub(without_default, "", uncommented, flags=re.MULTILINE))
    assert differences(load_settings(file), Settings()) == []


def differences(one: Settings, other: Settings) -> list[str]:
    return [name for name in Settings.model_fields if str(getattr(one, name)) != str(getattr(other, name))]


def test_links_without_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_LINKS", "true")
    assert load_settings().links
    monkeypatch.setenv("INDEXER_STORE_VALUES", "false")
    with pytest.raises(SettingsError, match="INDEXER_LINKS needs INDEXER_STORE_VALUES"):
        load_settings()


def test_jetstream_needs_named_collections_and_the_hosts_of_accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_UPSTREAM", "jetstream")
    monkeypatch.setenv("INDEXER_JETSTREAMS", "wss://jetstream.example/subscribe,http://localhost:6008")
    load_settings()  # the stored scope, or `--lexicon`, names them
    for name, value in {"TRACK": "listed", "COLLECTIONS": "app.bsky.*,*"}.items():
        monkeypatch.setenv(f"INDEXER_{name}", value)
        with pytest.raises(SettingsError, match="'jetstream' needs named collections in INDEXER_COLLECTIONS"):
            load_settings()
    monkeypatch.setenv("INDEXER_COLLECTIONS", "app.bsky.*")
    assert load_settings().jetstreams == ("wss://jetstream.example", "ws://localhost:6008")
    refused = {
        "INDEXER_SPARSE_RESYNC": "never", "INDEXER_RESYNC_SOURCE": "relay", "INDEXER_SWEEP_INTERVAL": "59s",
        "INDEXER_START": "oldest",
    }  # fmt: skip
    for name, value in refused.items():
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=f"INDEXER_UPSTREAM: 'jetstream' needs .*{name}"):
            load_settings()
        monkeypatch.delenv(name)
    monkeypatch.setenv("INDEXER_SWEEP_INTERVAL", "60s")
    monkeypatch.delenv("INDEXER_JETSTREAMS")
    assert all("jetstream" in url for url in load_settings().jetstreams)


NSIDS = ["com.example.note", "app.bsky.feed.like"]
TYPES = CollectionFilter(NSIDS)
SIGNAL = Scope(track=Track.SIGNAL, collections=TYPES, signal_collections=TYPES)


def test_record_types_are_the_first_scope_beside_what_is_given() -> None:
    assert Settings().for_record_types(NSIDS, None).first_scope.same_choice(SIGNAL)
    more = Settings(collections="com.*", track="listed").for_record_types(NSIDS, None)
    given = replace(SIGNAL, track=Track.LISTED, collections=CollectionFilter(["com.*"]))
    assert more.first_scope.same_choice(given)
    for stored in (given, replace(given, track=Track.ALL)):  # only a given part that differs is ignored
        again = Settings(track="listed").for_record_types(NSIDS, stored)
        assert again.first_scope.same_choice(stored) == (stored is given)
    unchanged = Settings().for_record_types(NSIDS, given)
    assert [one.chooses_scope for one in (more, Settings(collections="*"), unchanged)] == [True, True, False]


def test_signal_collections_alone_choose_the_accounts() -> None:
    """Not all accounts, which these settings would then have no effect on."""
    assert Settings(signal_collections="com.example.note").first_scope.track is Track.SIGNAL
    assert Settings(signal_collections="com.example.note", track="all").first_scope.track is Track.ALL
    assert Settings(collections="com.example.note").first_scope.track is Track.ALL


def test_jetstream_is_the_upstream_of_a_scope_whose_repos_it_finds() -> None:
    for stored in (None, SIGNAL):
        assert Settings().for_record_types(NSIDS, stored).upstream == "jetstream"
        assert Settings(upstream="relay").for_record_types(NSIDS, stored).upstream == "relay"
        with pytest.raises(SettingsError, match="'jetstream' needs INDEXER_SPARSE_RESYNC other than 'never'"):
            Settings(sparse_resync="never").for_record_types(NSIDS, stored)
    assert Settings(track="listed").for_record_types(NSIDS, None).upstream == "relay"
    for other in (replace(SIGNAL, track=Track.LISTED), replace(SIGNAL, collections=CollectionFilter())):
        assert Settings().for_record_types(NSIDS, other).upstream == "relay"


def test_upstream_that_was_not_given_is_that_of_the_newest_cursor() -> None:
    relay = Cursor("wss://relay.example", "0/1", 9, updated_at=2.0)
    older, newer = (Cursor(JETSTREAM, "0/1", 9, updated_at=at) for at in (1.0, 3.0))
    for cursors, upstream in (([], "relay"), ([relay, older], "relay"), ([relay, newer], "jetstream")):
        assert Settings().continuing(cursors).upstream == upstream
        assert Settings(upstream="pds").continuing(cursors).upstream == "pds"
    assert Settings().continuing([relay]).for_record_types(NSIDS, SIGNAL).upstream == "relay"
    assert Settings(track="all").continuing([newer]).upstream == "jetstream", "the stored scope counts"
    with pytest.raises(SettingsError, match="'jetstream' needs INDEXER_SPARSE_RESYNC other than 'never'"):
        Settings(sparse_resync="never").continuing([newer])
