"""The demo: four nodes on this machine train a small model together; one is killed and comes back.

Owns the story and how it is shown; all that it shows is read from the files that any run writes.
"""

from zeroband.tools.demo.story import main

__all__ = ["main"]
