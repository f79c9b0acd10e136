"""`python -m zeroband.tools.board` is `zeroband board`."""

import sys

from zeroband.tools.board.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
