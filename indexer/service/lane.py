"""The lane of large repos: places of their own, so that they keep no small one waiting."""

from collections import OrderedDict

from indexer.service.rota import Rota

MOST_PLACES = 8  # one thread proves all of them, and each has a connection for as long as it is written
MOST_KNOWN = 50_000  # one repo in a thousand is large, and there are forty million
ALL = ""  # they wait in one line, whatever their hosts


def places_of_large(workers: int) -> int:
    """How many large repos are resynced at once, beside so many small ones."""
    return max(1, min(workers // 4, MOST_PLACES))


class Lane:
    """Which repos are large, as far as their exports have shown, and whose turn it is among them.

    One that is known to be large gets its place before it is fetched, or is put off behind those that wait already:
    only the first time is the beginning of an export fetched in vain. A process that starts anew knows none.
    Times are Unix seconds.
    """

    def __init__(self, places: int) -> None:
        self._rota = Rota(places)
        self._known: OrderedDict[str, None] = OrderedDict()

    def knows(self, did: str) -> bool:
        return did in self._known

    def enter(self, did: str, began: float, now: float) -> bool:
        """Whether there is a place: then the repo has it, whose resync began then. It is known from now on."""
        self._known[did] = None
        self._known.move_to_end(did)
        if len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        if admitted := self._rota.admits(ALL, now):
            self._rota.begin(ALL, began)
        return admitted

    def leave(self, began: float, now: float) -> None:
        self._rota.end(ALL, began, now)

    def later(self, now: float) -> float:
        """When the next one that finds no place now is to come up again."""
        return self._rota.later(ALL, now)
