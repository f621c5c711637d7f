"""A daemon with short intervals: `python -m tests.realnet.hurried_daemon`."""

import sys

from tests.daemon_forks import run_tuned
from tests.simulation.quick_daemon import TUNING

if __name__ == "__main__":
    sys.exit(run_tuned(TUNING))
