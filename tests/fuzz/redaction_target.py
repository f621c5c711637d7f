"""The text of log lines, which may quote a message of another program."""

from random import Random

from indexer.redaction import without_secrets
from tests.fuzz.comparison import DifferenceError
from tests.fuzz.fuzz_target import TextTarget, text_of
from tests.fuzz.outcome_counts import OutcomeCounts

SECRET = "hunter2-Canary"


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
