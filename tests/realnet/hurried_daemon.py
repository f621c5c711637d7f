"""The command `indexer` with short waits: `python -m tests.realnet.hurried_daemon run`."""

import sys

from indexer.cli.main import main
from tests.simulation.quick_daemon import hurry

if __name__ == "__main__":
    hurry()
    sys.exit(main())
