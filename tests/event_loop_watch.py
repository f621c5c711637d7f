"""Measure for how long a part of the program blocks the event loop, in processor time, so that load does not matter."""

import asyncio
import gc
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from threading import get_ident
from time import thread_time
from types import TracebackType
from typing import ClassVar, Self

MAX_BLOCK = 0.25
"""Seconds of processor time for which the event loop may be blocked."""
TICK = 0.02
_WATCH: ContextVar["EventLoopWatch | None"] = ContextVar("_WATCH", default=None)


@dataclass
class Block:
    """The processor time between two timers of the event loop.

    Attributes:
        seconds: The time of all callbacks.
        longest: The time of the longest one.
        callback: Its description.
    """

    seconds: float = 0.0
    longest: float = 0.0
    callback: str = ""


@dataclass
class EventLoopWatch:
    """Measures the callbacks that belong to a context: tasks and connections that were created in it, and their own.

    Use it as a context manager around the work. Garbage collections do not count: they visit the objects of all tests.

    Attributes:
        context: Create the first task in it.
        worst: The longest block.
    """

    context: Context = field(default_factory=copy_context)
    worst: Block = field(default_factory=Block)
    _block: Block = field(default_factory=Block)
    _timer: asyncio.TimerHandle | None = None
    _collections: ClassVar["_Collections"]
    _active: ClassVar[int] = 0
    _run_unwatched: ClassVar[Callable[[asyncio.Handle], None]]

    def add(self, seconds: float, callback: asyncio.Handle) -> None:
        self._block.seconds += seconds
        if seconds > self._block.longest:
            self._block.longest = seconds
            self._block.callback = repr(callback) if seconds > TICK else ""

    def check(self) -> None:
        """Fail if the event loop was blocked for longer than `MAX_BLOCK`."""
        worst = self.worst
        assert worst.seconds < MAX_BLOCK, (
            f"the event loop was blocked for {worst.seconds:.2f} s, of which {worst.longest:.2f} s by {worst.callback}"
        )

    def __enter__(self) -> Self:
        self.context.run(_WATCH.set, self)
        if not EventLoopWatch._active:
            EventLoopWatch._run_unwatched = asyncio.Handle._run  # noqa: SLF001 - asyncio has no hook for callbacks
            asyncio.Handle._run = _run_watched  # type: ignore[assignment, method-assign] # noqa: SLF001
            EventLoopWatch._collections = _Collections()
            gc.callbacks.append(EventLoopWatch._collections.note)
        EventLoopWatch._active += 1
        self._tick()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tick()
        if self._timer is not None:
            self._timer.cancel()
        EventLoopWatch._active -= 1
        if not EventLoopWatch._active:
            asyncio.Handle._run = EventLoopWatch._run_unwatched  # type: ignore[assignment, method-assign] # noqa: SLF001
            gc.callbacks.remove(EventLoopWatch._collections.note)

    def _tick(self) -> None:
        """End a block and begin the next one: other timers that are due run now, too."""
        if self._block.seconds > self.worst.seconds:
            self.worst = self._block
        self._block = Block()
        self._timer = asyncio.get_running_loop().call_later(TICK, self._tick)


@dataclass
class _Collections:
    """The processor time of garbage collections in the thread of the event loop."""

    seconds: float = 0.0
    _thread: int = field(default_factory=get_ident)
    _began: float = 0.0

    def note(self, phase: str, _info: dict[str, int]) -> None:
        if get_ident() != self._thread:
            return
        if phase == "start":
            self._began = thread_time()
        else:
            self.seconds += thread_time() - self._began


def _run_watched(handle: asyncio.Handle) -> None:
    watch = handle._context.get(_WATCH)  # type: ignore[attr-defined] # noqa: SLF001
    if watch is None:
        EventLoopWatch._run_unwatched(handle)  # noqa: SLF001
        return
    collections = EventLoopWatch._collections  # noqa: SLF001
    began, collected = thread_time(), collections.seconds
    EventLoopWatch._run_unwatched(handle)  # noqa: SLF001
    watch.add(thread_time() - began - (collections.seconds - collected), handle)
