# Set PYTHON to an interpreter that has the indexer and the libraries of the examples. Sourced by the `run` scripts.
# Without PYTHON in the environment, `make venv` creates one, once.
if [ -z "${PYTHON:-}" ]; then
    make --silent --directory ../.. venv
    PYTHON=$(cd ../.. && pwd)/.venv/bin/python
fi
PYTHONPATH=$(cd ../public_schema && pwd)${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH
