"""Several processes of pytest that share the files of one run: each takes another one when it has done its last.

    folder=$(mktemp -d)
    pytest --turns "$folder" tests/faults tests/unit & pytest --turns "$folder" tests/unit tests/faults

A process imports the files that it runs and no others; with pytest-xdist each worker imports them all. Whoever is done
with what it was given first goes on with what the others have left.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest


class Turns:
    """The plugin of one process. `folder`: of this run alone, and empty at first."""

    def __init__(self, config: pytest.Config, folder: Path) -> None:
        given = [config.invocation_params.dir / arg for arg in config.args]
        files = [file for path in given for file in (sorted(path.rglob("test_*.py")) if path.is_dir() else [path])]
        config.args = [str(file) for file in files]
        self._folder = folder
        self._files: Sequence[pytest.Item | pytest.Collector] = ()

    def pytest_collection(self, session: pytest.Session) -> bool:
        """Import no file yet."""
        self._files = session.perform_collect(genitems=False)
        return True

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run the tests of each file that this process takes, as pytest's own loop runs those of all."""
        tests = self._tests(session)
        session.testscollected, test = 0, next(tests, None)
        while test is not None:
            following = next(tests, None)  # what both need, such as a server for the session, outlives this one
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                raise session.Interrupted(session.shouldfail or session.shouldstop)
            test = following
        return True

    def _tests(self, session: pytest.Session) -> Iterator[pytest.Item]:
        for file in filter(self._takes, self._files):
            gc.disable()  # as in the conftest of all tests
            tests = list(session.genitems(file))
            gc.enable()
            session.config.hook.pytest_collection_modifyitems(session=session, config=session.config, items=tests)
            session.testscollected += len(tests)
            yield from tests

    def _takes(self, file: pytest.Item | pytest.Collector) -> bool:
        """Mark the file as taken, unless another process has."""
        try:
            (self._folder / str(file.path).replace("/", "|")).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True
