"""Addresses of the store: each form that is understood, and that a refusal shows no part of a password."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroband.config import store_url
from zeroband.config.schema import StoreConfig
from zeroband.config.store_url import StoreUrl, TlsOptions, parse_store_url, parse_store_urls

PASSWORD = "s3cret"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("redis://h", StoreUrl("redis", (("h", 6379),))),
        ("redis://h/", StoreUrl("redis", (("h", 6379),))),
        ("redis://h:1/3", StoreUrl("redis", (("h", 1),), database=3)),
        ("redis://h?db=3", StoreUrl("redis", (("h", 6379),), database=3)),
        ("redis://:p@h", StoreUrl("redis", (("h", 6379),), password="p")),
        ("redis://:@h", StoreUrl("redis", (("h", 6379),))),
        ("redis://u:p%40%2F%3a@h", StoreUrl("redis", (("h", 6379),), username="u", password="p@/:")),
        ("redis://u:p@q@h", StoreUrl("redis", (("h", 6379),), username="u", password="p@q")),
        ("redis://u:a:b@[::1]:7", StoreUrl("redis", (("::1", 7),), username="u", password="a:b")),
        ("redis://h?username=u&password=a+b", StoreUrl("redis", (("h", 6379),), username="u", password="a+b")),
        ("rediss://h", StoreUrl("rediss", (("h", 6379),), tls=TlsOptions())),
        ("unix:///run/r.sock", StoreUrl("unix", (), socket_path="/run/r.sock")),
        ("unix://u:p@/run/a%20@b?db=2", StoreUrl("unix", (), "/run/a @b", None, 2, "u", "p")),
        ("unix://u@/s?password=p", StoreUrl("unix", (), "/s", None, 0, "u", "p")),
        ("redis+sentinel://h/main", StoreUrl("redis+sentinel", (("h", 26379),), service="main")),
        (
            "rediss+sentinel://u:p@a:1,[::2],c:3/my.main-1/4?sentinel_username=su&sentinel_password=sp",
            StoreUrl(
                "rediss+sentinel",
                (("a", 1), ("::2", 26379), ("c", 3)),
                service="my.main-1",
                database=4,
                username="u",
                password="p",
                sentinel_username="su",
                sentinel_password="sp",
                tls=TlsOptions(),
            ),
        ),
    ],
)
def test_parse_store_url_understands_each_form(text: str, expected: StoreUrl) -> None:
    assert parse_store_url(text) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("ssl_ca_certs=/a%26b+c.pem", TlsOptions(ca_certs="/a&b+c.pem")),
        ("ssl_certfile=c&ssl_keyfile=k&ssl_password=p", TlsOptions(certfile="c", keyfile="k", key_password="p")),
        ("ssl_check_hostname=False", TlsOptions(check_hostname=False)),
        ("ssl_check_hostname=yes", TlsOptions()),
        ("ssl_cert_reqs=none", TlsOptions(check_hostname=False, verifies=False)),
    ],
)
def test_options_of_tls_are_taken(options: str, expected: TlsOptions) -> None:
    assert parse_store_url(f"rediss://h?{options}").tls == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it begins with none of redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://"),
        (f"u:{PASSWORD}@h", "it begins with none of"),
        (f"http://:{PASSWORD}@h", "it begins with none of"),
        (f"redis://:{PASSWORD}@h\n", "a blank or a line break"),
        (f" redis://:{PASSWORD}@h", "it begins with none of"),
        (f"redis://:{PASSWORD} @h", "a blank or a line break"),
        (f"redis://:x/{PASSWORD}@h", "percent-encoded: %2F"),
        (f"redis://u:1?{PASSWORD}@h", "percent-encoded: %2F"),
        (f"redis://u:1?db=0&{PASSWORD}@h", "percent-encoded: %2F"),
        (f"redis://:x#{PASSWORD}@h", "percent-encoded: %2F"),
        (f"redis://:x@y/{PASSWORD}@h", "the database is no number"),
        (f"redis+sentinel://:x@y/{PASSWORD}@h/main", "the service is missing or no name"),
        (f"redis://:x@y?{PASSWORD}@h", "not NAME=VALUE"),
        (f"unix://:x/{PASSWORD}@/run/sock", "three slashes"),
        (f"redis://:{PASSWORD}", "a host or its port is wrong"),
        ("redis://", "a host is missing"),
        ("redis:///0", "a host is missing"),
        (f"redis://:{PASSWORD}@[::1", "a host or its port is wrong"),
        ("redis://::1", "a host or its port is wrong"),
        ("redis://h:0", "a host or its port is wrong"),
        ("redis://h:65536", "a host or its port is wrong"),
        ("redis://h:six", "a host or its port is wrong"),
        ("redis://a,b", "redis+sentinel://HOST:26379,HOST2:26379/SERVICE"),
        ("redis://a..b", "a host is no name"),
        (f"redis+sentinel://a,{64 * 'b'}/main", "a host is no name"),
        ("redis://h/database", "the database is no number"),
        ("redis://h/-1", "the database is no number"),
        ("redis://h/1?db=1", "the database stands in the path and in the options"),
        (f"redis://{PASSWORD}@h", "a password alone is written :PASSWORD@"),
        (f"redis://:{PASSWORD}@h?password=x", "the password stands before the host and in the options"),
        ("unix://", "the path of the socket is missing"),
        ("unix:///", "the path of the socket is missing"),
        ("unix://run/redis.sock", "three slashes"),
        (f"unix:///{107 * 'a'}", "at most 107 bytes"),
        ("unix:///a%00b", "none of which is 0"),
        ("redis+sentinel://h", "the service is missing"),
        ("redis+sentinel://a,,b/main", "a host is missing"),
        ("redis+sentinel://a/main/x", "the database is no number"),
        ("redis+sentinel://a/main?sentinel_username=u", "no sentinel_password"),
        ("redis://h?ssl_ca_certs=/ca", "the option ssl_ca_certs needs TLS: rediss://"),
        ("redis://h?sentinel_password=x", "the option sentinel_password needs redis+sentinel://"),
        ("rediss://h?ssl_ca_cert=/ca", "the option ssl_ca_cert is unknown; nearest: ssl_ca_certs"),
        ("redis://h?socket_timeout=3", "the option socket_timeout is unknown"),
        ("redis://h?protocol=3", "the option protocol is unknown; options are db, username"),
        ("redis://h?db=1&db=2", "the option db stands there twice"),
        ("redis://h?db=", "the option db is empty"),
        ("redis://h?db", "the option db is empty"),
        ("rediss://h?ssl_check_hostname=perhaps", "ssl_check_hostname is true or false"),
        ("rediss://h?ssl_cert_reqs=optional", "ssl_cert_reqs is required or none"),
        ("rediss://h?ssl_cert_reqs=none&ssl_ca_certs=/ca", "ssl_ca_certs has no use"),
        ("rediss://h?ssl_keyfile=/k", "need ssl_certfile"),
    ],
)
def test_wrong_address_is_refused_with_the_reason_an_example_and_no_password(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=r"^store\.url is no address of a Redis: ") as caught:
        parse_store_url(text)
    message = str(caught.value)
    assert why in message and PASSWORD not in message
    assert any(f"it looks like {scheme}:" in message for scheme in ("redis", "rediss", "unix", "redis+sentinel"))
    assert "rediss://" in message or not text.startswith("rediss://")


@pytest.mark.parametrize("scheme", list(store_url.EXAMPLES))
def test_example_in_a_refusal_is_itself_right(scheme: str) -> None:
    assert parse_store_url(store_url.EXAMPLES[scheme]).scheme == scheme


@given(
    st.text(min_size=1, max_size=12), st.sampled_from(["redis://u:{}@host/0", "{}@h", "redis+sentinel://:{}@h/main"])
)
def test_any_password_is_either_understood_or_never_shown(tail: str, form: str) -> None:
    secret = f"Zq7{tail}Zq7"  # in no word of a message
    try:
        url = parse_store_url(form.format(secret))
        shown = repr(url) + url.shown
    except ValueError as error:
        shown = str(error)
    assert "Zq7" not in shown


def test_shown_address_holds_no_login() -> None:
    text = (
        "rediss+sentinel://user:s3cret@a:1,[::2]:3/main/4?sentinel_password=s3cret&ssl_certfile=c&ssl_password=s3cret"
    )
    url = parse_store_url(text)
    assert url.shown == "rediss+sentinel://a:1,[::2]:3/main"
    assert "s3cret" not in repr(url)
    assert parse_store_url("unix://u:p@/run/sock").shown == "unix:///run/sock"


def test_several_stores_stand_with_blanks_between_them_or_in_a_list() -> None:
    text = "redis://:p@a:1 unix:///b.sock"
    assert [store.shown for store in parse_store_urls(text)] == ["redis://a:1", "unix:///b.sock"]
    given = StoreConfig.model_validate({"url": text.split()})
    assert given == StoreConfig.model_validate({"url": text}) and given.are_several
    assert not StoreConfig.model_validate({"url": "redis://a:1"}).are_several


def test_a_store_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="names a store twice"):
        parse_store_urls("redis://a:1 redis://a:1")


@pytest.mark.parametrize(
    ("address", "shown", "expected"),
    [
        ("redis://:p%40@a:1/2", "redis://b:2", "redis://:p%40@b:2/2"),
        ("redis://a", "redis://[::1]:3", "redis://[::1]:3"),
        ("rediss://u:p@a:1?ssl_ca_certs=/x", "rediss://c:3", "rediss://u:p@c:3?ssl_ca_certs=/x"),
        ("unix://:p@/tmp/x", "unix:///tmp/y", "unix://:p@/tmp/y"),
        ("unix://:p@/tmp/x", "redis://b:2", "redis://:p@b:2"),
        ("redis+sentinel://:p@s:1/main/2", "redis://b:2", "redis://:p@b:2"),
    ],
)
def test_store_beside_another_is_reached_with_the_login_of_that(address: str, shown: str, expected: str) -> None:
    assert store_url.with_login_of(address, shown) == expected
    assert parse_store_url(expected).shown == shown


def test_stores_of_nodes_have_no_secret_in_their_address() -> None:
    assert store_url.shown_stores("nodes://a,b:6380") == "nodes://a,b:6380"
    assert store_url.addresses_in("nodes://a,b:6380") == ("node://a", "node://b:6380")
    assert parse_store_url("node://a").hosts == (("a", store_url.NODE_PORT),)
