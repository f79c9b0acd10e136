"""`python -m zeroband.tools.cluster` is `zeroband simulate`."""

import sys

from zeroband.tools.cluster.simulate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
