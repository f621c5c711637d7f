"""Settings files, and the text of log lines, which may quote a message of another program."""

import os
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from indexer.errors import SettingsError
from indexer.redaction import without_secrets
from indexer.settings import PREFIX, Settings, load_settings
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts

EXAMPLE = Path(__file__).parents[2] / "config" / "indexer.example.toml"
SECRET = "hunter2-Canary"
SECRET_SETTINGS = ("database_url", "webhook_url", "admin_password")
"""Settings whose values are not shown. A message may quote the name and the value of any other one."""
LINES = (
    'database_url = "postgresql://me:hunter2-Canary@db.test/mine"',
    'webhook_url = "https://a.test/hook?token=hunter2-Canary"',
    'admin_password = "hunter2-Canary"',
    'relays = "wss://a.test, ws://b.test"',
    'dns_servers = ["1.1.1.1", "[::1]:53"]',
    'http_bind = "[::1]:8080"',
    'shard = "1/4"',
    'collections = ["app.bsky.*"]',
    "links = true",
    "unknown = 1",
    'resync_buffer_bytes = "5 MB"',
)


class SettingsFiles(TextTarget):
    """Settings files: settings, or one line that says what is wrong and shows no secret."""

    def __init__(self) -> None:
        self._directory = TemporaryDirectory(prefix="indexer-fuzz-")
        self._file = Path(self._directory.name) / "indexer.toml"
        self._environment = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith(PREFIX)}
        self.counts = OutcomeCounts("settings", "refused")

    def close(self) -> None:
        """Remove the directory, and set the variables of the environment again that would replace the file."""
        self._directory.cleanup()
        os.environ.update(self._environment)

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return files with up to five settings, some of them those of the example."""
        examples = [line[2:] for line in EXAMPLE.read_text().splitlines() if line.startswith("# ") and " = " in line]
        lines = [*LINES, *(line for line in examples if line.partition(" ")[0] in Settings.model_fields)]
        return ["\n".join(random.sample(lines, random.randrange(6))).encode() for _ in range(count)]

    def compare(self, data: bytes) -> None:
        """Load a file. Raises `DifferenceError`."""
        self.counts.executions += 1
        self._file.write_bytes(data)
        try:
            settings = load_settings(self._file)
        except SettingsError as error:
            message = f"{error}"
            if not message.isprintable() or len(message) > 1_000 or _shows_secret(message):
                raise DifferenceError(f"a message of {len(message)} characters: {message!r}") from error
            self.counts.add("refused")
            return
        others = [getattr(settings, name) for name in Settings.model_fields if name not in SECRET_SETTINGS]
        if SECRET in f"{settings!r}" and SECRET not in f"{others}":
            raise DifferenceError("the settings show a secret")
        for name in ("http_bind", "dns_servers"):
            value = getattr(settings, name)
            text = ",".join(map(str, value)) if name == "dns_servers" else f"{value}"
            if text and getattr(Settings.model_validate({name: text}), name) != value:
                raise DifferenceError(f"{name} {text} is not the text of {value!r}")
        self.counts.add("settings")


def _shows_secret(message: str) -> bool:
    """Return True if a message about a setting that has a secret, or about no setting, shows a secret."""
    quote, about = message[:1], message[1:].partition(message[:1])[0]
    return SECRET in message and (quote not in "'\"" or about in SECRET_SETTINGS)


class LogTexts(TextTarget):
    """Texts of log lines: after any text, no secret in one of its usual forms is shown."""

    def __init__(self) -> None:
        self.counts = OutcomeCounts("with secrets", "without")

    def seeds(self, random: Random, count: int) -> list[bytes]:
        """Return texts with secrets in several forms, and without."""
        texts = [
            f"connect to postgresql://me:{SECRET}@db.test failed",
            f"Authorization: Bearer {SECRET}",
            f'{{"password": "{SECRET}", "x": 1}}',
            f"?access_token={SECRET}&a=b",
            f"api-key = '{SECRET}",
            "unexpected token: x",
            "401 from https://a.test/xrpc",
        ]
        return [" ".join(random.choices(texts, k=random.randrange(1, 4))).encode() for _ in range(count)]

    def compare(self, data: bytes) -> None:
        """Remove the secrets of a text. Raises `DifferenceError`."""
        self.counts.executions += 1
        text = text_of(data).replace(SECRET, "x")  # no other text: the rest could be the secret
        forms = f"\npostgresql://me:{SECRET}@db.test/mine\npassword={SECRET}\nAuthorization: Bearer {SECRET}\n"
        shown = without_secrets(text + forms)
        if SECRET in shown:
            raise DifferenceError(f"a secret is shown in {shown!r}")
        self.counts.add("without" if without_secrets(text) == text else "with secrets")
