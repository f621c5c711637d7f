"""Tables of benchmarks whose output is no terminal, for example a file."""

import pytest

from benchmarks import citus
from benchmarks.report import Report, machine, show

LONG = "Some Processor with a Long Name 9B45 @ 2.70 GHz, and more that no column is wide enough for, " * 2
FIGURES: Report = {
    "speed": {"floor CPU / daemon CPU, both with Postgres": 0.51, "daemon CPU, µs per commit": 12_345.0},
    "machine": {"cpu": LONG, "core threads": 2.0},
}


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rich assume its default of 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)


def text_of(output: str) -> str:
    """Return the text of a table without its frame and its line breaks."""
    return "".join("".join(character for character in output if not "─" <= character <= "╿").split())


@pytest.mark.parametrize("figures", [FIGURES, {"machine": machine()}], ids=["made up", "this machine"])
def test_names_and_long_values_of_a_table_are_complete(capsys: pytest.CaptureFixture[str], figures: Report) -> None:
    show(figures, as_json=False)
    output = capsys.readouterr().out
    assert "…" not in output
    for section in figures.values():
        assert [name for name in section if name not in output] == []
    if figures is FIGURES:
        assert "".join(LONG.split()) in text_of(output).replace("cpu", "", 1)


def test_table_of_both_sides_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    citus.print_tables({"live": {"one Postgres": FIGURES, "Citus, 2 workers, 4 shards": FIGURES}})
    output = capsys.readouterr().out
    assert "…" not in output
    assert all(line[-1] in "┓┃┩│┘" for line in output.splitlines() if line[0] in "┏┃┡│└")
    assert [name for name in FIGURES["speed"] if name not in output] == []
    assert "12,345" in output
    assert "1.00" in output
