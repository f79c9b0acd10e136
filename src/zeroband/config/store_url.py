"""Parses and checks the addresses of a run's stores. Pure text: no files and no name servers."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

EXAMPLES = {
    "redis": "redis://USER:PASSWORD@HOST:6379/0",
    "rediss": "rediss://USER:PASSWORD@HOST:6379/0?ssl_ca_certs=/PATH/ca.pem",
    "unix": "unix:///PATH/OF/SOCKET",
    "redis+sentinel": "redis+sentinel://USER:PASSWORD@HOST:26379,HOST2:26379/SERVICE/0",
    "rediss+sentinel": "rediss+sentinel://USER:PASSWORD@HOST:26379,HOST2:26379/SERVICE/0?ssl_ca_certs=/PATH/ca.pem",
}
"""Example per scheme."""

NODES = "nodes"
"""Address of stores that the run's members hold."""

NODE = "node"
"""Scheme of one such store, reached through its node's port."""

NODE_PORT = 29600
"""Default port of a node that holds a store."""

_OF_NODES = f"{NODES}://"
_REDIS_PORT, _SENTINEL_PORT = 6379, 26379
SOCKET_PATH_BYTES = 107
"""Most bytes of a path in sockaddr_un, without the final zero."""
_BASIC_OPTIONS = ("db", "username", "password")
_TLS_OPTIONS = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_password", "ssl_check_hostname", "ssl_cert_reqs")
_SENTINEL_OPTIONS = ("sentinel_username", "sentinel_password")
_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")

_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+(?:%\w+)?)\]|([^\[\]:@%]+))(?::([0-9]{1,5}))?")
_SERVICE = re.compile(r"[A-Za-z0-9._-]+")
_OPTION_NAME = re.compile(r"[a-z0-9_]{1,40}")


@dataclass(frozen=True)
class TlsOptions:
    """TLS options; paths are as the user wrote them and may not exist."""

    ca_certs: str | None = None
    """PEM file of trusted authorities. None: the system's."""
    certfile: str | None = None
    """PEM file of the client certificate, for servers that require one."""
    keyfile: str | None = None
    """PEM file of its key. None: it is in `certfile`."""
    key_password: str | None = field(default=None, repr=False)
    check_hostname: bool = True
    """Whether the certificate must match the host name."""
    verifies: bool = True
    """Whether to verify the server's certificate at all."""


@dataclass(frozen=True)
class StoreUrl:
    """Address and login of the run's Redis. Neither `repr` nor `shown` has secrets."""

    scheme: str
    hosts: tuple[tuple[str, int], ...]
    """Host and port of the Redis, or of each Sentinel in order. Empty for a Unix socket."""
    socket_path: str | None = None
    service: str | None = None
    """Name of the master in Sentinel. None: no Sentinel."""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    tls: TlsOptions | None = None
    """TLS options of Redis and its Sentinels. None: plain text."""

    @property
    def shown(self) -> str:
        """The address without user, password and options, for messages."""
        place = self.socket_path or ",".join(place_of(host, port) for host, port in self.hosts)
        return f"{self.scheme}://{place}{f'/{self.service}' if self.service else ''}"


def addresses_in(text: str) -> tuple[str, ...]:
    """Split the addresses of a run's stores, which are separated by blanks."""
    if not are_of_nodes(text):
        return tuple(text.split())
    return tuple(address_of_node(place) for place in text.removeprefix(_OF_NODES).split(","))


def address_of_node(place: str) -> str:
    """Return the address of the store of one member. `place`: `HOST` or `HOST:PORT`."""
    return f"{NODE}://{place}"


def are_of_nodes(text: str) -> bool:
    """Whether the run's members hold its stores."""
    return text.startswith(_OF_NODES)


def address_of_nodes(places: Sequence[str]) -> str:
    """Return the address of stores that members hold. `places`: `HOST` or `HOST:PORT` of some."""
    return _OF_NODES + ",".join(dict.fromkeys(places))


def place_of(host: str, port: int) -> str:
    """Join host and port as in an address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_store_urls(text: str) -> tuple[StoreUrl, ...]:
    """Parse the addresses of one or several stores; for those of members, of the named ones.

    Raises ValueError as `parse_store_url`, and for a duplicate.
    """
    found = tuple(parse_store_url(address) for address in addresses_in(text) or ("",))
    if len({*addresses_in(text)}) < len(found):
        raise ValueError("store.url names a store twice; each of several is another one")
    return found


def shown_stores(text: str) -> str:
    """Return the addresses without users, passwords and options, for messages."""
    return text if are_of_nodes(text) else " ".join(store.shown for store in parse_store_urls(text))


def with_login_of(address: str, shown: str) -> str:
    """Return the address of another store of the run, given as `StoreUrl.shown`, with this store's login."""
    scheme, _, place = shown.partition("://")
    own_scheme, _, rest = address.partition("://")
    login, at, _ = rest.partition("?")[0].partition("/")[0].rpartition("@")
    are_alike = {scheme, own_scheme} <= {"redis", "rediss"}  # else the path is no database
    path = re.search(r"(/[^?]*)?(\?.*)?$", rest) if are_alike else None
    return f"{scheme}://{login}{at}{place}{path[0] if path else ''}"


def parse_store_url(text: str) -> StoreUrl:
    """Parse the address of a Redis: `redis://`, `rediss://`, `unix://`, `redis+sentinel://`, `rediss+sentinel://`.

    User, password, service, socket path and option values may be percent-encoded; a `+` stays a `+`. Raises ValueError
    with the reason and an example, without anything that may be part of a password.
    """
    scheme, separator, rest = text.partition("://")
    if separator and scheme == NODE:
        return _node_at(rest)
    if not separator or scheme not in EXAMPLES:
        raise _wrong("redis", f"it begins with none of {', '.join(f'{known}://' for known in EXAMPLES)}")
    if " " in text or not text.isprintable():
        raise _wrong(scheme, "it holds a blank or a line break")
    location, _, query = rest.partition("?")
    authority, _, path = location.partition("/")
    is_cut = "@" not in authority and "@" in (query if scheme == "unix" else rest)
    if is_cut or "#" in rest:  # what follows may be the end of a password: never show it
        raise _wrong(
            scheme, "a user or password with one of / ? # @ % must have it percent-encoded: %2F %3F %23 %40 %25"
        )
    options = _options(scheme, query)
    username, password, place = _credentials(scheme, authority, options)
    socket_path, service, database = _path_parts(scheme, path, options)
    return StoreUrl(
        scheme=scheme,
        hosts=_hosts(scheme, place),
        socket_path=socket_path,
        service=service,
        database=database,
        username=username,
        password=password,
        sentinel_username=options.get("sentinel_username"),
        sentinel_password=options.get("sentinel_password"),
        tls=_tls(scheme, options) if scheme.startswith("rediss") else None,
    )


def _node_at(place: str) -> StoreUrl:
    """Parse the place of a member's store. Raises ValueError."""
    if not place.isprintable() or any(letter in place for letter in " @/?#"):
        raise ValueError(f"{_OF_NODES}HOST,HOST2:PORT takes no login and no database: run.token is what lets nodes in")
    try:
        return StoreUrl(NODE, (_host("redis", place, NODE_PORT),))
    except ValueError:
        raise ValueError(f"{_OF_NODES}{place}: each is HOST or HOST:PORT") from None


def _wrong(scheme: str, why: str) -> ValueError:
    return ValueError(f"store.url is no address of a Redis: {why}; it looks like {EXAMPLES[scheme]}")


def _options(scheme: str, query: str) -> dict[str, str]:
    """Parse the options; each must be known and fit the scheme."""
    options: dict[str, str] = {}
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        if name in options:
            raise _wrong(scheme, f"the option {name} stands there twice")
        if (why := _objection(scheme, name)) is not None:
            raise _wrong(scheme, why)
        if not value:
            raise _wrong(scheme, f"the option {name} is empty")
        options[name] = unquote(value)
    return options


def _objection(scheme: str, name: str) -> str | None:
    """Return why an option does not fit this scheme; None if it does."""
    if name in _TLS_OPTIONS:
        return None if scheme.startswith("rediss") else f"the option {name} needs TLS: rediss:// or rediss+sentinel://"
    if name in _SENTINEL_OPTIONS:
        return None if scheme.endswith("+sentinel") else f"the option {name} needs redis+sentinel://"
    if name in _BASIC_OPTIONS:
        return None
    known = (*_BASIC_OPTIONS, *_TLS_OPTIONS, *_SENTINEL_OPTIONS)
    if not _OPTION_NAME.fullmatch(name):  # perhaps the end of a password
        return f"what follows the question mark is not NAME=VALUE&NAME=VALUE...; options are {', '.join(known)}"
    near = difflib.get_close_matches(name, known, n=1)
    return f"the option {name} is unknown; " + (f"nearest: {near[0]}" if near else f"options are {', '.join(known)}")


def _credentials(scheme: str, authority: str, options: Mapping[str, str]) -> tuple[str | None, str | None, str]:
    """Return user, password, and the part that names the hosts."""
    login, _, place = authority.rpartition("@")
    user_part, _, password_part = login.partition(":")
    chosen: list[str | None] = []
    for name, part in (("username", user_part), ("password", password_part)):
        if part and name in options:
            raise _wrong(scheme, f"the {name} stands before the host and in the options")
        chosen.append(unquote(part) or options.get(name))
    username, password = chosen
    if username and not password:
        raise _wrong(scheme, "there is a user but no password; a password alone is written :PASSWORD@")
    if options.get("sentinel_username") and not options.get("sentinel_password"):
        raise _wrong(scheme, "there is a sentinel_username but no sentinel_password")
    return username, password, place


def _path_parts(scheme: str, path: str, options: Mapping[str, str]) -> tuple[str | None, str | None, int]:
    """Return the Unix socket's path, Sentinel's service and the database, by default None, None, 0."""
    if scheme == "unix":
        if not path:
            raise _wrong(scheme, "the path of the socket is missing")
        if len(os.fsencode(f"/{unquote(path)}")) > SOCKET_PATH_BYTES or "\0" in unquote(path):
            raise _wrong(scheme, f"the path of a socket has at most {SOCKET_PATH_BYTES} bytes, none of which is 0")
        return f"/{unquote(path)}", None, _database(scheme, "", options)
    if not scheme.endswith("+sentinel"):
        return None, None, _database(scheme, path, options)
    service, _, database = path.partition("/")
    if not _SERVICE.fullmatch(service := unquote(service)):
        raise _wrong(scheme, "the service is missing or no name; SERVICE is what `sentinel monitor` calls the master")
    return None, service, _database(scheme, database, options)


def _database(scheme: str, part: str, options: Mapping[str, str]) -> int:
    if part and "db" in options:
        raise _wrong(scheme, "the database stands in the path and in the options")
    chosen = part or options.get("db", "0")
    if not re.fullmatch(r"[0-9]{1,6}", chosen):
        raise _wrong(scheme, "the database is no number")
    return int(chosen)


def _hosts(scheme: str, place: str) -> tuple[tuple[str, int], ...]:
    if scheme == "unix":
        if place:
            raise _wrong(scheme, "a Unix socket has no host: there are three slashes before the path")
        return ()
    if "," in place and not scheme.endswith("+sentinel"):
        raise _wrong(scheme, "only Sentinels can be several: redis+sentinel://HOST:26379,HOST2:26379/SERVICE")
    default_port = _SENTINEL_PORT if scheme.endswith("+sentinel") else _REDIS_PORT
    return tuple(_host(scheme, item, default_port) for item in place.split(","))


def _host(scheme: str, item: str, default_port: int) -> tuple[str, int]:
    if not item:
        raise _wrong(scheme, "a host is missing")
    match = _HOST.fullmatch(item)
    port = int(match[3] or default_port) if match else 0
    if match is None or not 0 < port <= 65535:
        raise _wrong(scheme, "a host or its port is wrong: a port is 1 to 65535, an IPv6 address stands in [ ]")
    host = match[1] or match[2]
    if not _is_name(host):
        raise _wrong(scheme, "a host is no name: each part between dots has 1 to 63 letters")
    return host, port


def _is_name(host: str) -> bool:
    """Whether a host can be looked up; libraries would raise other errors."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


def _tls(scheme: str, options: Mapping[str, str]) -> TlsOptions:
    if "ssl_certfile" not in options and ("ssl_keyfile" in options or "ssl_password" in options):
        raise _wrong(scheme, "ssl_keyfile and ssl_password need ssl_certfile")
    requirement = options.get("ssl_cert_reqs", "required")
    if requirement not in ("required", "none"):
        raise _wrong(scheme, "ssl_cert_reqs is required or none")
    check = options.get("ssl_check_hostname", "true").lower()
    if check not in (*_YES, *_NO):
        raise _wrong(scheme, "ssl_check_hostname is true or false")
    verifies = requirement == "required"
    if not verifies and "ssl_ca_certs" in options:
        raise _wrong(scheme, "ssl_ca_certs has no use with ssl_cert_reqs=none")
    return TlsOptions(
        ca_certs=options.get("ssl_ca_certs"),
        certfile=options.get("ssl_certfile"),
        keyfile=options.get("ssl_keyfile"),
        key_password=options.get("ssl_password"),
        check_hostname=verifies and check in _YES,
        verifies=verifies,
    )
