"""`python -m zeroband.cluster` is `zeroband simulate`."""

import sys

from zeroband.cluster.simulate import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
