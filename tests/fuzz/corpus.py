"""The directory of a target with the inputs that it starts from, and where libFuzzer writes those with new coverage."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_BYTES = 16_384
"""The size of the largest input."""
KEPT = Path(__file__).parents[2] / ".fuzz-corpus"
"""The corpus of runs without an end: each round continues with the inputs of those before."""


@contextmanager
def open_corpus(corpus: Path | None, seconds: int) -> Iterator[Path]:
    """Yield the directory that has a directory for each target.

    It is `corpus` if that is given. Otherwise, a run without an end (`seconds` is 0) uses the one that is kept, and a
    run of so many seconds a temporary one, so that it starts from the same inputs each time.
    """
    if corpus is not None or not seconds:
        yield corpus or KEPT
        return
    with tempfile.TemporaryDirectory(prefix="indexer-fuzz-") as directory:
        yield Path(directory)


def open_folder(corpus: Path, target: str) -> Path:
    """Return the directory of a target, which is created if it is missing."""
    folder = corpus / target
    folder.mkdir(parents=True, exist_ok=True)
    return folder
