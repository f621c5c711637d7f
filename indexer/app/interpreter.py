"""The build of the Python interpreter, which is up to 1.9 times slower without profile-guided optimization."""

import platform
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

SLOWDOWN = 1.9
"""Maximum factor by which an interpreter without profile-guided optimization is slower (docs/performance.md)."""
_MAPPED_FILES = Path("/proc/self/maps")


class InterpreterBuild(NamedTuple):
    """The build of an interpreter.

    Attributes:
        version: Its implementation and version, such as `CPython 3.11.9`.
        compiler: The compiler, such as `GCC 12.2.0`.
        profile_guided: True if it was built with profile-guided optimization; None if its configuration does not say.
        link_time: True if it was built with link-time optimization; None if its configuration does not say.
    """

    version: str
    compiler: str
    profile_guided: bool | None
    link_time: bool | None

    def __str__(self) -> str:
        known = {True: "with", False: "without", None: "unknown if with"}
        return (
            f"{self.version}, {self.compiler}, {known[self.profile_guided]} profile-guided and "
            f"{known[self.link_time]} link-time optimization"
        )


def interpreter_build() -> InterpreterBuild:
    """Return the build of the interpreter that runs this process."""
    version = f"{platform.python_implementation()} {platform.python_version()}"
    shared = "/libpython" in _MAPPED_FILES.read_text() if _MAPPED_FILES.exists() else None
    profile_guided, link_time = optimizations(sysconfig.get_config_vars(), shared=shared)
    return InterpreterBuild(version, platform.python_compiler(), profile_guided, link_time)


def optimizations(variables: Mapping[str, Any], *, shared: bool | None) -> tuple[bool | None, bool | None]:
    """Return whether the interpreter was built with profile-guided, and with link-time optimization.

    Args:
        variables: The variables of `sysconfig`.
        shared: True if the code of the interpreter is in a shared library; None if that is not known.

    Returns:
        None for each one that is not known: Debian builds the interpreter and the shared library separately, and
        `sysconfig` has the configuration of the library, also for the interpreter, which does not load the library.
    """
    arguments = variables.get("CONFIG_ARGS")
    if arguments is None or (shared is not None and bool(variables.get("Py_ENABLE_SHARED")) is not shared):
        return None, None
    return "--enable-optimizations" in arguments, "--with-lto" in arguments
