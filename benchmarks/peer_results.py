"""Compare what two programs stored with the expected result, and print their figures side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.report import MIB, MICRO, Figures
from benchmarks.workload import Workload

TAP, TAP_SQLITE = "tap", "tap-sqlite"
ONE_PROCESS, TWO_SHARDS = "indexer", "indexer-2-shards"
SUBJECTS = (TAP, TAP_SQLITE, ONE_PROCESS, TWO_SHARDS)
RATIOS = {
    "indexer / tap": (ONE_PROCESS, TAP),
    "2 shards / tap": (TWO_SHARDS, TAP),
    "indexer / tap-sqlite": (ONE_PROCESS, TAP_SQLITE),
}
"""Columns of ratios: numerator and denominator."""
MAX_DIFFERENCES = 10
"""Maximum number of differences that are reported in full."""
MIN_WIDTH = 116
"""Of the tables on a terminal, in characters."""
_NONE = "-"


class RepoResult(NamedTuple):
    """The final state of a repo.

    Attributes:
        rev: The rev.
        data: The CID of the tree's root node, in hex; empty if it is unknown.
        records: The number of records.
        digest: The digest of paths and CIDs of all records (`benchmarks.workload.digest_of`).
    """

    rev: str
    data: str
    records: int
    digest: str


def truth_of(workload: Workload) -> dict[str, RepoResult]:
    """Return the expected state of every repo."""
    return {
        account.did: RepoResult(account.after.rev, account.after.data, account.records, account.digest)
        for account in workload.accounts
    }


def find_differences(truth: Mapping[str, RepoResult], found: Mapping[str, RepoResult], where: str) -> list[str]:
    """Return the differences as sentences. A tree that is unknown is not compared."""
    differences = [f"{where}: {did} does not exist in the workload" for did in sorted(found.keys() - truth.keys())]
    for did, expected in truth.items():
        result = found.get(did)
        if result is None:
            differences.append(f"{where}: {did} is missing")
        elif result != expected._replace(data=expected.data if result.data else ""):
            differences.append(f"{where}: {did} has {result} instead of {expected}")
    if len(differences) <= MAX_DIFFERENCES:
        return differences
    return [*differences[:MAX_DIFFERENCES], f"{where}: and {len(differences) - MAX_DIFFERENCES} more"]


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurement of one program.

    Attributes:
        count: Number of commits or records.
        seconds: Seconds until all of them were in the database.
        delivered: Seconds until the consumer had acknowledged all events; None without a consumer.
        cpu: CPU seconds of each part: `program`, and if they exist `Postgres`, `consumer` and `load`.
        peak: Peak resident set size of the program, in bytes; the sum over its processes.
        wal: Bytes of write-ahead log of Postgres; None without it.
        sizes: Bytes on disk with indexes for each `record`, `repo` and `change`, as far as the program stores them.
    """

    count: int
    seconds: float
    delivered: float | None
    cpu: Mapping[str, float]
    peak: int
    wal: float | None = None
    sizes: Mapping[str, float] = field(default_factory=dict)

    def figures(self, unit: str) -> dict[str, float]:
        """Return the figures by name."""
        rates = {f"{unit}s/s": self.count / self.seconds}
        if self.delivered is not None:
            rates[f"{unit}s/s, acknowledged"] = self.count / self.delivered
        cpu = {"CPU with Postgres": self.cpu["program"] + self.cpu.get("Postgres", 0.0)}
        cpu |= {f"{part} CPU": seconds for part, seconds in self.cpu.items()}
        costs = {f"{part}, µs per {unit}": seconds / self.count * MICRO for part, seconds in cpu.items()}
        if self.wal is not None:
            costs[f"WAL, bytes per {unit}"] = self.wal / self.count
        sizes = {f"bytes on disk per {row}": size for row, size in self.sizes.items()}
        return rates | costs | {"peak RSS, MiB": self.peak / MIB} | sizes


Section = dict[str, dict[str, float]]
"""Figures by name, then by program; and their ratios by the name of the column."""


def section_of(unit: str, measured: Mapping[str, Sequence[Measured]]) -> Section:
    """Return the medians of all rounds by program, and their ratios."""
    by_subject = {
        subject: {name: median(run.figures(unit)[name] for run in runs) for name in runs[0].figures(unit)}
        for subject, runs in measured.items()
    }
    names = list(dict.fromkeys(name for figures in by_subject.values() for name in figures))
    section: Section = {}
    for name in names:
        row = {subject: figures[name] for subject, figures in by_subject.items() if name in figures}
        section[name] = row | {
            column: row[over] / row[under]
            for column, (over, under) in RATIOS.items()
            if over in row and row.get(under, 0.0) > 0
        }
    return section


def _cells(section: Section, columns: Sequence[str]) -> list[list[str]]:
    return [[name, *(_ratio_or_number(column, row.get(column)) for column in columns)] for name, row in section.items()]


def _ratio_or_number(column: str, value: float | None) -> str:
    if value is None:
        return _NONE
    if column in RATIOS:
        return f"{value:.2f}"
    return f"{value:,.0f}"


def columns_of(sections: Mapping[str, Section]) -> list[str]:
    """Return the columns that have a value, in the usual order."""
    present = {column for section in sections.values() for row in section.values() for column in row}
    return [column for column in (*SUBJECTS, *RATIOS) if column in present]


def show_tables(sections: Mapping[str, Section], machine: Figures) -> None:
    """Print one table per section."""
    console = Console(width=max(MIN_WIDTH, Console().width))
    columns = columns_of(sections)
    for title, section in sections.items():
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right")
        for cells in _cells(section, columns):
            table.add_row(*cells)
        console.print(table)
    console.print(_machine_line(machine), highlight=False)


def markdown_of(sections: Mapping[str, Section], machine: Figures) -> str:
    """Return the tables in Markdown, for docs/performance.md."""
    columns = columns_of(sections)
    lines = [f"{_machine_line(machine)}\n"]
    for title, section in sections.items():
        lines.append(" | ".join(["", f"**{title}**", *columns, ""]).strip())
        lines.append("|" + "---|" * (len(columns) + 1))
        lines += ["| " + " | ".join(cells) + " |" for cells in _cells(section, columns)]
        lines.append("")
    return "\n".join(lines).rstrip()


def _machine_line(machine: Figures) -> str:
    return "; ".join(f"{name}: {value}" for name, value in machine.items())
