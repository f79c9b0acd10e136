"""`python -m zeroband.tools.report` is `zeroband report`."""

import sys

from zeroband.tools.report.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
