"""``python -m pytest_nsa``: the command `pytest-nsa`."""

import sys

from pytest_nsa.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
