"""The build of the interpreter, as far as its configuration says how it was built."""

import platform

import pytest

from indexer.app.interpreter import interpreter_build, optimizations


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("'--enable-optimizations' '--with-lto' '--enable-shared'", (True, True)),
        ("'--enable-optimizations'", (True, False)),
        ("'--prefix=/usr/local'", (False, False)),
    ],
)
def test_optimizations_are_those_of_the_configuration(arguments: str, expected: tuple[bool, bool]) -> None:
    for shared in (True, False):
        variables = {"CONFIG_ARGS": arguments, "Py_ENABLE_SHARED": int(shared)}
        assert optimizations(variables, shared=shared) == expected
        assert optimizations(variables, shared=None) == expected


def test_optimizations_are_unknown_without_a_configuration() -> None:
    assert optimizations({}, shared=False) == (None, None)


def test_optimizations_are_unknown_if_the_configuration_is_that_of_the_shared_library() -> None:
    variables = {"CONFIG_ARGS": "'--enable-shared'", "Py_ENABLE_SHARED": 1}
    assert optimizations(variables, shared=False) == (None, None)


def test_build_names_the_version_and_the_compiler() -> None:
    text = str(interpreter_build())
    assert text.startswith(f"CPython {platform.python_version()}, {platform.python_compiler()}, ")
    assert text.endswith(" link-time optimization")
