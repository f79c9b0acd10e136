"""A browser watches a real run of four nodes: one is killed and comes back, and the page's orders reach the nodes.

One run of real processes with the real `zeroband board` beside it serves all tests; they read what the page showed and
what the nodes recorded. How long a record was shown after it was written is by this machine's one clock.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.browsers import open_browser

from zeroband.observe.view import node_id_of_member

pytestmark = [pytest.mark.faults, pytest.mark.soak, pytest.mark.timeout(600)]

Story = Any
RecordRun = Callable[..., Any]

NODES = ("node0", "node1", "node2", "node3")
VICTIM = "node2"
TOKEN = "sesame"
WAIT_MS = 180_000
SOON_S = 2.0

CALM = ("--fault.inject", "inner@+0=TAKES0.1")
"""Rounds of a second, most of it sleep: four nodes, a page and a browser share the cores."""

NOTE = """
() => {
  window.seen = [];
  const known = {};
  const note = () => {
    const states = [["run", document.querySelector("#state").textContent]];
    for (const card of document.querySelectorAll(".node")) {
      states.push([card.querySelector("h3").textContent, card.dataset.state]);
    }
    for (const [of, state] of states) {
      if (known[of] !== state) window.seen.push([Date.now() / 1000, of, state]);
      known[of] = state;
    }
  };
  note();
  const all = { subtree: true, childList: true, attributes: true, characterData: true };
  new MutationObserver(note).observe(document.body, all);
}
"""
"""Has the page note when a node, or the run, is shown in another state."""


@dataclass(frozen=True)
class Watched:
    """What the page showed, and what the nodes recorded."""

    seen: Sequence[tuple[float, str, str]]
    """When a node, or `run`, was shown in another state."""
    complaints: Sequence[str]
    """Of the browser."""
    said: Sequence[str]
    """The page's answers to orders."""
    links: Sequence[str]
    """Cells of the page's matrix: Mbit/s, and ms there and back."""
    divergence: str
    """The light of that guarantee, at last."""
    events: Mapping[str, Sequence[Mapping[str, Any]]]
    """By node."""
    codes: Sequence[int | None]

    def shown_s(self, whom: str, state: str, after_s: float = 0.0) -> float:
        """When this was first shown after a moment."""
        times = [at_s for at_s, one, shown in self.seen if one == whom and state in shown and at_s > after_s]
        assert times, f"{whom} was never {state!r} after {after_s}: {self.seen}"
        return times[0]

    @property
    def lost_s(self) -> float:
        """When somebody first recorded that the victim is lost."""
        told = [event for events in self.events.values() for event in events if event["kind"] == "peer_lost"]
        return min(event["at_s"] for event in told if VICTIM in map(node_id_of_member, event["member_ids"]))

    @property
    def back_s(self) -> float:
        """When the victim recorded that it is a member for the second time."""
        return [event["at_s"] for event in self.events[VICTIM] if event["kind"] == "joined"][1]

    def took_s(self) -> tuple[float, float]:
        """How long after their records the loss and the return were shown."""
        lost_s = self.shown_s(VICTIM, "lost")
        return lost_s - self.lost_s, self.shown_s(VICTIM, "training", after_s=lost_s) - self.back_s


@contextmanager
def open_board(story: Story) -> Iterator[str]:
    """`zeroband board` of the run, with what it needs to give orders; its address."""
    env = {**os.environ, "ZERO_BAND_STORE__URL": story.cluster.store_url, "ZERO_BAND_RUN__TOKEN": TOKEN}
    command = [sys.executable, "-m", "zeroband.cli", "board", str(story.cluster.run_dir), "--port", "0"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as board:
        try:
            assert board.stdout is not None
            yield board.stdout.readline().split(" is at ")[1].split()[0]
        finally:
            board.terminate()


def shows(page: Page, states: Mapping[str, str]) -> None:
    """Wait until each node's card says this."""
    for name, state in states.items():
        card = page.locator(".node", has=page.get_by_role("heading", name=name, exact=True))
        expect(card).to_have_attribute("data-state", state, timeout=WAIT_MS)


def order(page: Page, name: str) -> str:
    """Give an order on the page; what it answers."""
    page.locator(f"input[value={name}]").check(timeout=WAIT_MS)
    page.locator("#send-order").click()
    said = page.locator("#orders-result")
    expect(said).to_contain_text(re.compile(f"Sent: {name}|Refused"), timeout=WAIT_MS)
    assert "Sent" in said.inner_text(), said.inner_text()
    return said.inner_text()


def tell(story: Story, page: Page) -> list[str]:
    """All train; one is killed and comes back; an operator pauses the run and lets it go on. The page's answers."""
    shows(page, dict.fromkeys(NODES, "training"))
    story.node(VICTIM).kill()
    shows(page, {VICTIM: "lost"})
    story.cluster.restart(VICTIM)
    shows(page, dict.fromkeys(NODES, "training"))
    story.until_contributing(*NODES)
    page.locator("#open-orders").click()
    page.get_by_label("Run token").fill(TOKEN)
    said = [order(page, "pause")]
    shows(page, dict.fromkeys(NODES, "paused"))
    paused = max(story.history)
    said.append(order(page, "resume"))
    shows(page, dict.fromkeys(NODES, "training"))
    story.until(lambda: max(story.history) > paused, "the run goes on")
    return said


@pytest.fixture(scope="module")
def watched(record_run: RecordRun) -> Watched:
    found: dict[str, Any] = {"complaints": []}

    def watch(browser: Browser, story: Story) -> None:
        story.until_contributing(*NODES)
        with open_board(story) as address:
            page = browser.new_page()
            complain = found["complaints"].append
            page.on("console", lambda said: complain(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complain(str(error)))
            page.goto(address)
            page.evaluate(NOTE)
            found["said"] = tell(story, page)
            found["seen"] = page.evaluate("window.seen")
            links = page.locator("#links tbody td:has(b)")  # a node that came back takes its turns at measuring
            story.until(lambda: all(cell[:1].isdigit() for cell in links.all_inner_texts()), "all links are measured")
            found["links"] = links.all_inner_texts()
            found["divergence"] = page.locator(".guarantee").first.get_attribute("data-state")
            page.close()
        story.end()
        found["codes"] = [node.exit_code for node in story.cluster.nodes.values()]

    outer = ("diloco", "--outer.inner-steps", "10", *CALM)
    with open_browser() as browser:
        recorded = record_run(partial(watch, browser), outer=outer, ranks=(1,) * len(NODES), faults={}, token=TOKEN)
    return Watched(**found, events=recorded.events)


def test_browser_has_nothing_to_complain_of(watched: Watched) -> None:
    assert watched.complaints == []


def test_kill_and_healing_are_shown_once_they_are_recorded(watched: Watched) -> None:
    assert watched.lost_s < watched.shown_s(VICTIM, "lost") < watched.back_s
    assert all(took_s > 0 for took_s in watched.took_s())
    print("shown after their records: the loss {:.2f} s, the return {:.2f} s".format(*watched.took_s()))


@pytest.mark.soak
def test_kill_and_healing_are_shown_within_two_seconds_of_their_records(watched: Watched) -> None:
    assert max(watched.took_s()) < SOON_S


def test_healed_run_has_one_state_and_the_page_says_so(watched: Watched) -> None:
    digests: dict[int, dict[str, str]] = {}
    for node_id in NODES:
        for event in watched.events[node_id]:
            if event["kind"] == "round_committed" and event["at_s"] > watched.back_s:
                digests.setdefault(event["round"], {})[node_id] = event["digest"]
    assert {len({*held.values()}) for held in digests.values()} == {1}
    assert any(held.keys() == {*NODES} for held in digests.values())
    assert watched.divergence == "good"


def test_orders_from_the_page_pause_the_run_and_let_it_go_on(watched: Watched) -> None:
    assert [said.partition(".")[0] for said in watched.said] == ["✓ Sent: pause", "✓ Sent: resume"]
    for node_id in NODES:
        kinds = [event["kind"] for event in watched.events[node_id]]
        told = [kind for kind in kinds if kind in ("paused", "resumed", "round_committed")]
        assert told[told.index("paused") + 1] == "resumed"
        assert "round_committed" in told[told.index("resumed") :]
    assert watched.shown_s("run", "Paused") < watched.shown_s("run", "Training", watched.shown_s("run", "Paused"))
    assert set(watched.codes) == {0}


def test_every_link_is_measured_and_shown(watched: Watched) -> None:
    for node_id in NODES:
        newest = [event["links"] for event in watched.events[node_id] if event["kind"] == "links"][-1]
        rates = {node_id_of_member(link["to"]): link["mbit_s"] for link in newest}
        assert rates.keys() == {*NODES} - {node_id}
        assert all(rate > 0 for rate in rates.values()), rates
    shown = [re.fullmatch(r"([\d.]+)\s+([\d.]+)\sms", cell) for cell in watched.links]
    assert len(shown) == len(NODES) * (len(NODES) - 1)
    assert all(cell and float(cell[1]) > 0 and float(cell[2]) > 0 for cell in shown), watched.links
