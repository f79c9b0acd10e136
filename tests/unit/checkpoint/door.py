"""A state server with a door of its own; in a run, the guardian has the port and hands connections over."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from zeroband.checkpoint.serving import StateServer


class OpenServer(StateServer):
    """Listens on a free port of loopback until `close()`."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = threading.Thread(target=self._accept)
        self._acceptor.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                with contextlib.suppress(OSError):  # gone already
                    self.take(connection)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # closed before
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        super().close()
