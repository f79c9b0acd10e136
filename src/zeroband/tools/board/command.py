"""`zeroband board [RUN_DIR] [--store URL] [--run-id ID]`: a web page of a running or finished run.

It shows the nodes of a folder, of a store with --run-id, or, with RUN_DIR --store, of both. By default it shows the
newest run in ./runs, or waits for one. It listens only on this machine; from another one, use
`ssh -L 8420:localhost:8420 HOST`. It takes orders from holders of the run's token, with --store or --run-id, or if
ZERO_BAND_STORE__URL and the token are set.
Exit codes: 0 ended, 2 wrong arguments or the port is in use.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import webbrowser
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zeroband.config import RunConfig, load_config
from zeroband.elastic.store.facts import FolderAndStoreFacts, StoreFacts
from zeroband.errors import ConfigError, way_to_extra
from zeroband.observe.facts import FactSource, FolderFacts
from zeroband.tools.arguments import (
    TOKEN_VARIABLE,
    add_source,
    bounded,
    is_in_store,
    open_source,
    parser_of,
    price,
    run_command,
    run_id_of,
    store_of,
    token_of,
)
from zeroband.tools.board.document import RunContext
from zeroband.tools.board.orders import OrderDesk, give_through_store
from zeroband.tools.board.state import RunWatch, find_run

PORT = 8420
_NICE = 10
"""Lower priority than training."""
_ASKED = ("starlette", "uvicorn")


def main(argv: Sequence[str]) -> int:
    """Serve the page until Ctrl-C. Returns the exit code."""
    arguments = parser().parse_args(argv)

    def work() -> int:
        with suppress(KeyboardInterrupt):
            serve(arguments)
        return 0

    return run_command("board", work)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    asked = parser_of("board", __doc__)
    add_source(asked)
    asked.add_argument(
        "--port", type=bounded(int, ge=0, le=65535), default=PORT, help=f"default: {PORT}; 0: any free port"
    )
    asked.add_argument("--fd", type=int, help=argparse.SUPPRESS)  # of a listening socket
    asked.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine)")
    asked.add_argument("--price-per-hour", type=price, help="price of a node in US dollars, to show the run's cost")
    asked.add_argument("--open", action="store_true", help="open the page in a browser")
    return asked


def serve(arguments: argparse.Namespace) -> None:
    """Serve the page until this process is asked to end. Raises ConfigError."""
    require_installed()
    app_module: Any = import_module("zeroband.tools.board.app")  # starlette
    uvicorn: Any = import_module("uvicorn")
    connections: Any = import_module("zeroband.tools.board.connections")
    host: str = arguments.host
    listener = listen(host, arguments.port) if arguments.fd is None else socket.socket(fileno=arguments.fd)
    port: int = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{'localhost' if app_module.is_loopback(host) else shown}:{port}"
    find, desk, place = watched(arguments)
    setting = RunContext(
        place=place,
        price_per_hour=arguments.price_per_hour,
        orders_allowed=desk.is_open,
        orders_why=desk.why,
    )
    watch = RunWatch(find, setting=setting)
    app = app_module.build_app(watch, desk, host=host)
    print(f"zeroband: the page of {place} is at {address} ; stop with Ctrl-C", flush=True)
    if not app_module.is_loopback(host):
        print(f"zeroband: {exposure(takes_orders=desk.is_open)}", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        app, log_level="critical", access_log=False, server_header=False, lifespan="off", ws="none",
        http=connections.Connections, timeout_graceful_shutdown=1, timeout_keep_alive=round(connections.SILENT_S),
        forwarded_allow_ips="127.0.0.1,::1",  # trust only local proxies for client addresses
    )  # fmt: skip
    os.nice(_NICE)
    watch.start()
    try:
        if arguments.open:
            webbrowser.open(address)
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        watch.close()
        listener.close()


def require_installed() -> None:
    """Raise ConfigError if the page's server is not installed."""
    missing = [name for name in _ASKED if find_spec(name) is None]
    if missing:
        raise ConfigError(f"the page needs {', '.join(missing)}; {way_to_extra('board')}")


def listen(host: str, port: int) -> socket.socket:
    """Open a listening socket. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(64)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        another = port % 65535 + 1
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror}; give another one, for example --port {another}"
        ) from error
    return listener


def exposure(*, takes_orders: bool) -> str:
    """What listening for other machines means."""
    orders = "; the token of an order crosses the network in the clear: use an ssh tunnel, or put TLS in front"
    return f"everybody who reaches this address can read the run{orders if takes_orders else ''}"


def watched(arguments: argparse.Namespace) -> tuple[Callable[[], FactSource | None], OrderDesk, str]:
    """Return how to find the run, the desk for orders to it, and its place for display. Raises ConfigError."""
    run_dir: Path | None = arguments.run_dir
    if not is_in_store(arguments):
        folder = run_dir or Path("runs")
        found = find_run(folder)  # once, so that orders go to the run that is shown
        find = partial(find_run, folder) if found is None else lambda: found
        return find, order_desk(found), str(folder)
    if run_dir is None:
        facts = open_source(arguments)
        return lambda: facts, store_desk(arguments), facts.place
    far = StoreFacts(store_of(arguments), run_id_of(arguments), token_of(arguments))

    def find_both() -> FactSource | None:
        near = find_run(run_dir)
        return None if near is None else FolderAndStoreFacts(near, far)

    desk = order_desk(FolderFacts(run_dir))
    return find_both, desk if desk.is_open else store_desk(arguments), str(run_dir)


def store_desk(arguments: argparse.Namespace) -> OrderDesk:
    """Return the desk for a run with known store and token. Raises ConfigError."""
    token = token_of(arguments)
    if token is None:
        return OrderDesk(None, None)
    asked = [f"--store.url={store_of(arguments)}", f"--run.id={run_id_of(arguments)}"]
    config = load_config(asked, {TOKEN_VARIABLE: token}, defaults=["--outer.type=ddp"])  # as `zeroband ctl` does
    return OrderDesk(token, give_through_store(config))


def order_desk(run: FolderFacts | None) -> OrderDesk:
    """Return the desk with store and token from the environment and the settings of a node."""
    config = None if run is None else _config_of(run)
    if config is None or config.store.address is None or config.run.token is None:
        return OrderDesk(None, None)
    return OrderDesk(config.run.token.get_secret_value(), give_through_store(config))


def _config_of(run: FolderFacts) -> RunConfig | None:
    """Return a node's configuration under this environment; None if it does not suffice for orders."""
    if "ZERO_BAND_STORE__URL" not in os.environ:
        return None
    files = sorted(run.folder.glob("*/config.toml"))
    if not files:
        return None
    try:
        return load_config([f"@{files[0]}", f"--run.id={run.run_id}"])
    except ConfigError as error:
        print(f"zeroband board: this page takes no orders: {error}", file=sys.stderr)
        return None
