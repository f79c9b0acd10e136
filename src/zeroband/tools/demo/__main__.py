"""`python -m zeroband.tools.demo` is `zeroband demo`."""

import sys

from zeroband.tools.demo.story import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
