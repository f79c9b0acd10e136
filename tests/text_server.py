"""A server of the files of a folder that fails as it is told, whatever it is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.unit.data.prepared import Fault, FileServer, FilesHandler, served


class _Handler(FilesHandler):
    def do_HEAD(self) -> None:  # noqa: N802 - as its base calls it
        if not self.server.fault(self):
            super().do_HEAD()


@contextmanager
def text_server(folder: Path) -> Iterator[FileServer]:
    """Run one; its `fault` is asked about sizes, too."""
    with served(folder) as server:
        server.RequestHandlerClass = _Handler
        yield server


def refusing(statuses: list[int]) -> Fault:
    """Answer the next requests with these, the last one first; 0 hangs up."""

    def fault(request: FilesHandler) -> bool:
        if not statuses:
            return False
        if status := statuses.pop():
            return request.refuse(status)
        request.close_connection = True
        return True

    return fault


def without_sizes(request: FilesHandler) -> bool:
    """Answer as servers do that make what they send on the way: nobody knows how long it is before its end."""
    request.send_response(200)
    request.send_header("Connection", "close")
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(request.content()[0])
    request.close_connection = True
    return True
