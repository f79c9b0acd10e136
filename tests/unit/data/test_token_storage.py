"""Files of this machine that many read at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from zeroband.data.token_storage import TokenStorage


def test_file_that_is_read_stays_open_whatever_others_open_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 8)
    storage = TokenStorage(str(tmp_path), 1.0)
    pread = os.pread
    for number in range(1, 80):
        storage.read(str(tmp_path / str(number)), 0, 8)
    others = range(80, 100)

    def read_beside(descriptor: int, size: int, start: int) -> bytes:
        """Have another thread read more files than stay open before this one reads its own."""
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: [storage.read(str(tmp_path / str(n)), 0, 8) for n in others])
            thread.start()
            thread.join()
        return pread(descriptor, size, start)

    monkeypatch.setattr(os, "pread", read_beside)
    try:
        assert storage.read(str(tmp_path / "0"), 0, 8) == bytes(8)
    finally:
        storage.close()
