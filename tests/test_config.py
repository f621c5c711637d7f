import json
import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from indexer.atproto.limits import DEFAULT_LIMITS, Limits
from indexer.config import OTHER_VARIABLES, Address, Settings, allowed, load_settings, variable
from indexer.errors import SettingsError
from indexer.sync.shard import Shard

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "settings.md"
EXAMPLE = ROOT / "config" / "indexer.example.toml"
BLOCK = re.compile(r"(<!-- settings:.*?-->\n).*?(<!-- /settings -->)", re.DOTALL)
UNSET = {
    "database_url": "unset",
    "data_dir": "the platform's user data directory",
    "dns_servers": "the system's",
    "contact": "unset",
}


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("INDEXER_"):
            monkeypatch.delenv(name)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "indexer.toml"


def refusal(file: Path | None = None) -> str:
    """The one line that the operator reads."""
    with pytest.raises(SettingsError) as raised:
        load_settings(file)
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_the_environment_goes_over_the_file_and_the_file_over_the_defaults(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text("resync_workers = 3\nplc_rate = 2.5\n")
    monkeypatch.setenv("INDEXER_RESYNC_WORKERS", "4")
    settings = load_settings(file)
    assert (settings.resync_workers, settings.plc_rate, settings.host_rate) == (4, 2.5, 10)


def test_the_file_may_be_named_by_the_environment(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("track = 'listed'\n")
    monkeypatch.setenv("INDEXER_CONFIG", str(file))
    assert load_settings().track == "listed"


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_DATABASE_URL", "")
    assert load_settings().database_url is None


def test_settings_made_in_the_program_ignore_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_RESYNC_WORKERS", "4")
    assert Settings(plc_rate=1).resync_workers == 8


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("relays", "wss://one.example, ws://127.0.0.1:80/", ("wss://one.example", "ws://127.0.0.1:80")),
        ("plc_url", "https://a.example,http://b.example/plc/", ("https://a.example", "http://b.example/plc")),
        ("start", "oldest", "oldest"),
        ("start", "12345", 12345),
        ("sweep_interval", "24h", 86_400),
        ("sweep_interval", "1.5m", 90),
        ("sweep_interval", "250ms", 0.25),
        ("sweep_interval", "90", 90),
        ("sweep_interval", "0", 0),
        ("frame_bytes", "5000001", 5_000_001),
        ("frame_bytes", "2.5 MiB", 2_621_440),
        ("shard", "3/16", Shard(3, 16)),
        ("roles", "resync", ("resync",)),
        ("resync_source", "pds, relay", ("pds", "relay")),
        ("dns_servers", "9.9.9.9, [::1]:5353, ::1", (Address("9.9.9.9", 53), Address("::1", 5353), Address("::1", 53))),
        ("http_bind", "0.0.0.0:0", Address("0.0.0.0", 0)),  # noqa: S104
        ("http_bind", "[::1]:2580", Address("::1", 2580)),
        ("contact", "https://example.com/indexer", "https://example.com/indexer"),
        ("contact", "mailto:someone@example.com", "mailto:someone@example.com"),
        ("contact", "some.one+indexer@example.com", "some.one+indexer@example.com"),
        ("export_time", "15m", 900),
        ("export_rate", "2KiB", 2_048),
        ("store_values", "no", False),
        ("allow_private_hosts", "true", True),
    ],
)
def test_a_good_value_is_understood(name: str, text: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), text)
    assert getattr(load_settings(), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("database_url", "mysql://localhost/x"),
        ("database_url", "postgresql://[/x"),
        ("database_url", "postgresql://localhost:port/x"),
        ("database_url", "localhost"),
        ("relays", "https://one.example"),
        ("relays", "wss://one.example,,wss://two.example"),
        ("relays", "wss://one.example,wss://one.example"),
        ("relays", "wss://user@one.example"),
        ("relays", "wss://one.example/?cursor=5"),
        ("relays", "wss://one.example:99999"),
        ("plc_url", "ftp://one.example"),
        ("plc_url", "https://one.example/\x1b[31m"),
        ("start", "now"),
        ("start", "-1"),
        ("track", "some"),
        ("collections", "app.bsky.feed.post, not an nsid"),
        ("collections", "*.post"),
        ("store_values", "perhaps"),
        ("inversion", "STRICT"),
        ("dns_servers", "dns.example"),
        ("dns_servers", "9.9.9.9:99999"),
        ("resync_workers", "0"),
        ("resync_workers", "1001"),
        ("resync_workers", "many"),
        ("resync_source", "relay,relay"),
        ("plc_rate", "0"),
        ("plc_rate", "inf"),
        ("contact", "me"),
        ("contact", "someone@example.com (me)"),
        ("contact", "https://example.com/\r\nCookie: x"),
        ("contact", "https://user:secret@example.com/"),
        ("contact", "s\u00f6meone@example.com"),
        ("contact", "@"),
        ("export_time", "0"),
        ("export_rate", "0"),
        ("outbound_rate", "0"),
        ("outbound_concurrency", "0"),
        ("sweep_interval", "-1"),
        ("sweep_interval", "1y"),
        ("sweep_interval", "nan"),
        ("shard", "4/4"),
        ("shard", "0/257"),
        ("shard", "-1/4"),
        ("roles", "live,sleep"),
        ("http_bind", "localhost"),
        ("http_bind", "::1:80"),
        ("http_bind", "[one]:80"),
        ("http_bind", "x:70000"),
        ("http_bind", "x:٣"),
        ("log_level", "loud"),
        ("frame_bytes", "0"),
        ("frame_bytes", "5 parsecs"),
        ("tree_depth", "129"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), text)
    message = refusal()
    assert message.startswith(f"{variable(name)}: ")
    assert message.endswith(allowed(name).replace("`", ""))


@pytest.mark.parametrize(
    "line", ["resync_workers = true", "start = false", "relays = 3", "collections = [1]", "shard = 1", "http_bind = 80"]
)
def test_a_bad_value_in_the_file_is_named_with_the_file(line: str, file: Path) -> None:
    file.write_text(line)
    name = line.split(" ", maxsplit=1)[0]
    assert refusal(file).startswith(f"'{name}' in {file}: ")


def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INDEXER_RELAY", "wss://one.example")
    assert refusal() == "INDEXER_RELAY is not a setting; did you mean INDEXER_RELAYS?"


def test_an_unknown_key_is_named(file: Path) -> None:
    file.write_text("frame_byte = 5\n")
    assert refusal(file) == f"'frame_byte' in {file} is not a setting; did you mean frame_bytes?"


@pytest.mark.parametrize("name", sorted(OTHER_VARIABLES - {"INDEXER_CONFIG"}))
def test_variables_of_tests_and_tools_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "x")
    load_settings()


def test_a_file_that_is_not_there_or_not_toml_is_named(file: Path) -> None:
    assert refusal(file) == f"the settings file {file} can't be read: No such file or directory"
    file.write_bytes(b"relays = \xff")
    assert refusal(file).startswith(f"the settings file {file} is not TOML: ")


@pytest.mark.parametrize(
    ("name", "text"),
    [("database_url", "mysql://me:hunter2@localhost/x"), ("relays", "wss://me:hunter2@one.example")],
)
def test_passwords_are_never_shown(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable(name), text)
    assert "hunter2" not in refusal()


@pytest.mark.parametrize(
    "url",
    [
        "postgres:///x?host=/run/postgresql",
        "postgresql://me:p%40ss@[::1]:5432/x",
        "postgresql://one:5432,two/x?target_session_attrs=primary",
    ],
)
def test_urls_of_databases_have_many_forms(url: str) -> None:
    Settings.model_validate({"database_url": url})


def test_the_user_agent_says_whom_to_write_to() -> None:
    assert Settings().user_agent.endswith(" (AT Protocol record-level sync; no contact given)")
    assert "; me@example.com)" in Settings(contact="me@example.com").user_agent


def test_the_database_url_is_not_in_the_settings_as_printed() -> None:
    settings = Settings.model_validate({"database_url": "postgresql://me:hunter2@localhost/x"})
    assert settings.database_url is not None
    assert settings.database_url.get_secret_value().endswith("hunter2@localhost/x")
    assert "hunter2" not in f"{settings!r} {settings}"


def test_every_limit_is_a_setting_with_the_limits_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Settings().limits == DEFAULT_LIMITS
    for limit in fields(Limits):
        monkeypatch.setenv(variable(limit.name), "7")
    assert load_settings().limits == Limits(**{limit.name: 7 for limit in fields(Limits)})


def shown(name: str) -> str:
    """A default as an operator would write it."""
    match getattr(Settings(), name):
        case _ if name in UNSET:
            return UNSET[name]
        case bool(value):
            return f"`{value}`".lower()
        case float(value) if value and value % 3_600 == 0:
            return f"`{value / 3_600:g}h`"
        case float(value):
            return f"`{value:g}`"
        case Address() as address:
            return f"`{address}`"
        case tuple(items):
            return f"`{','.join(items)}`"
        case value:
            return f"`{value}`"


def table() -> str:
    """All settings as the documentation shows them; the limits apart."""
    limits = {limit.name for limit in fields(Limits)}
    head = "| variable | default | meaning | allowed |\n|---|---|---|---|\n"
    rows = {
        name: f"| `{variable(name)}` | {shown(name)} | {field.description} | {allowed(name)} |\n"
        for name, field in Settings.model_fields.items()
    }
    return (
        head
        + "".join(row for name, row in rows.items() if name not in limits)
        + "\nLimits on everything from outside; what goes beyond them is refused with a reason:\n\n"
        + head
        + "".join(row for name, row in rows.items() if name in limits)
    )


def example() -> str:
    """The example file: every setting at its default, switched off."""
    return "# Every setting at its default. docs/settings.md says what each means.\n\n" + "".join(
        f"# {field.description}\n# {name} = {in_toml(name)}\n\n" for name, field in Settings.model_fields.items()
    )


def in_toml(name: str) -> str:
    """TOML writes texts, numbers, truth values and lists of them as JSON does."""
    unset = {
        "database_url": "postgresql://localhost/indexer",
        "data_dir": "/var/lib/indexer",
        "contact": "https://example.com/indexer",
    }
    value = unset.get(name) or getattr(Settings(), name)
    if isinstance(value, tuple) and not isinstance(value, Address):
        return json.dumps([str(item) for item in value])
    return json.dumps(value if isinstance(value, bool | int | float) else str(value))


def test_every_setting_is_documented_as_it_is() -> None:
    text = PAGE.read_text()
    assert BLOCK.sub(lambda match: match[1] + table() + match[2], text) == text, "python -m tests.test_config"
    assert all(f"`{name}`" in text for name in OTHER_VARIABLES)


def test_the_example_file_is_complete_and_says_the_defaults(file: Path) -> None:
    assert EXAMPLE.read_text() == example(), "python -m tests.test_config"
    switched_on = re.sub(r"^# (?=\w+ = )", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert tomllib.loads(switched_on).keys() == Settings.model_fields.keys()
    file.write_text(re.sub(r"^(database_url|data_dir|contact) .*$", "", switched_on, flags=re.MULTILINE))
    assert differences(load_settings(file), Settings()) == []


def differences(one: Settings, other: Settings) -> list[str]:
    return [name for name in Settings.model_fields if str(getattr(one, name)) != str(getattr(other, name))]


if __name__ == "__main__":
    page = PAGE.read_text()
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + table() + match[2], page))
    EXAMPLE.write_text(example())
