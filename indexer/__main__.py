"""Run the command line as `python -m indexer`."""

import sys

from indexer.cli.main import main

sys.exit(main())
