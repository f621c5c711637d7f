"""Counts of the inputs of a target by outcome."""


class OutcomeCounts:
    """Counts the inputs of a target: all of them, and those of each outcome.

    Attributes:
        executions: All inputs.
    """

    def __init__(self, *outcomes: str) -> None:
        """Begin with these outcomes at 0."""
        self.executions = 0
        self._counts = dict.fromkeys(outcomes, 0)

    def add(self, outcome: str, count: int = 1) -> None:
        """Count an outcome of an input, which may have several."""
        self._counts[outcome] += count

    @property
    def unused(self) -> list[str]:
        """The outcomes that never occurred: the target did not test what it is for."""
        return [outcome for outcome, count in self._counts.items() if count == 0]

    def report(self) -> str:
        """Return the counts except that of all inputs."""
        return ", ".join(f"{count:,} {outcome}" for outcome, count in self._counts.items())
