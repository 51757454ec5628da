"""`python -m marl`: the command line where `marl` is not on the path."""

import sys

from marl.cli import main

if __name__ == "__main__":
    sys.exit(main())
