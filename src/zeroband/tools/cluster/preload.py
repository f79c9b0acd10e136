"""Run by the server that forks nodes, before the first of them: loads what a trainer loads."""

from __future__ import annotations

import signal

from zeroband.node.process_start import load_uncollected
from zeroband.node.processes import end_with_parent

end_with_parent(signal.SIGTERM)  # `multiprocessing` would keep the server for as long as it has children
load_uncollected("zeroband.runtime.loop")
