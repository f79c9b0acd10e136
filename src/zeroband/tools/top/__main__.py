"""`python -m zeroband.tools.top` is `zeroband top`."""

import sys

from zeroband.tools.top.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
