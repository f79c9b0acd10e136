"""The link between the launchers of one node's machines."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from zeroband.errors import ConfigError
from zeroband.node import machines
from zeroband.node.launch import free_port
from zeroband.node.machines import DONE, LEAVE, MachineLink, MachineLost, Place, Word

PORT = 4321
"""Of the ranks' store, as the first machine tells it."""
DEADLINE_S = 20.0


@pytest.fixture
def link() -> Iterator[Callable[..., MachineLink]]:
    """A launcher's link; all of a test meet at one port."""
    port = free_port()
    with ExitStack() as stack:

        def connect(number: int, count: int = 2, ranks: int = 4) -> MachineLink:
            made = MachineLink(Place(number, count, "127.0.0.1", port), ranks, lambda said: None)
            stack.callback(made.close)
            return made

        yield connect


def meet(*links: MachineLink) -> list[int]:
    """The port that each is told."""
    told = dict[int, int]()

    def one(number: int) -> None:
        end_s = time.monotonic() + DEADLINE_S
        told[number] = links[number].meet(PORT if number == 0 else 0, lambda: time.monotonic() > end_s)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(links))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return [told[number] for number in range(len(links))]


def heard(link: MachineLink, count: int = 1) -> list[Word]:
    words, end_s = list[Word](), time.monotonic() + DEADLINE_S
    while len(words) < count and time.monotonic() < end_s:
        words += link.poll()
    return words


def test_launchers_meet_and_hear_each_other_through_the_first(link: Callable[..., MachineLink]) -> None:
    first, second, third = links = [link(number, 3) for number in range(3)]
    assert meet(*links) == [PORT] * 3
    second.tell(LEAVE)
    assert heard(first) == heard(third) == [LEAVE]
    assert list(second.poll()) == []
    first.tell(2)
    assert heard(second) == heard(third) == [2]


def test_launcher_that_is_done_may_close_and_another_may_not(link: Callable[..., MachineLink]) -> None:
    first, second = link(0), link(1)
    meet(first, second)
    second.tell(DONE)
    second.close()
    assert heard(first) == [DONE]
    assert list(first.poll()) == []
    first.close()
    first, second = link(0), link(1)
    meet(first, second)
    second.close()
    with pytest.raises(MachineLost, match="machine 1 of this node is lost: its launcher ended"):
        heard(first)


def test_machine_that_says_nothing_is_lost(link: Callable[..., MachineLink], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "LOST_S", 0.3)
    monkeypatch.setattr(machines, "BEAT_S", 0.05)
    first, second = link(0), link(1)
    meet(first, second)
    end_s = time.monotonic() + 0.6
    while time.monotonic() < end_s:
        assert list(first.poll()) == list(second.poll()) == []
        time.sleep(0.01)
    with pytest.raises(MachineLost, match="machine 1 of this node is lost: it was silent"):
        heard(first)


@pytest.mark.parametrize("numbers", [(1, 2, 3), (1, 3, 4), (2, 2, 4)])
def test_launcher_with_other_numbers_is_refused(
    link: Callable[..., MachineLink], numbers: tuple[int, int, int]
) -> None:
    first, stranger, second = link(0), link(*numbers), link(1)
    refused = list[str]()

    def call() -> None:
        try:
            stranger.meet(0, lambda: False)
        except ConfigError as error:
            refused.append(str(error))

    thread = threading.Thread(target=call)
    waiting = threading.Thread(target=lambda: meet(first))
    for one in (thread, waiting):
        one.start()
    thread.join(DEADLINE_S)
    assert "was started with {'number': 0, 'machines': 2, 'ranks': 4}" in refused[0]
    assert second.meet(0, lambda: False) == PORT, "the right one is still admitted"
    waiting.join(DEADLINE_S)


def test_strangers_do_not_take_a_place(link: Callable[..., MachineLink]) -> None:
    first, second = link(0), link(1)
    port = first.place.port
    for said in (
        b"GET / HTTP/1.1\r\n\r\n",
        b'"hello"\n',
        b'{"number": "one"}\n',
        b'{"number": "1", "machines": 2, "ranks": 4}\n',
        b"x" * 9000,
        b"[]\n",
        b"",
    ):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(said)
    assert meet(first, second) == [PORT] * 2


def test_address_of_no_interface_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"--master-addr 192\.0\.2\.1: cannot listen on port"):
        MachineLink(Place(0, 2, "192.0.2.1", free_port()), 1, lambda said: None)
