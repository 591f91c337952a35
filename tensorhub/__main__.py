"""`python -m tensorhub`: the same command line as `tensorhub`. Decides nothing itself."""

import sys

from tensorhub.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
