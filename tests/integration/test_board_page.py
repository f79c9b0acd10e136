"""The board's page in a real browser."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from tests.board_run import END_S, LATE_S, LOST_S, NODES, STALLED_S, TOKEN, VICTIM, Board, served
from tests.browsers import open_browser
from tests.made_runs import event, member, run_of, write

from zeroband.errors import StoreLost
from zeroband.tools.board import app as app_module
from zeroband.tools.board.app import build_app
from zeroband.tools.board.orders import OrderDesk
from zeroband.tools.board.saved import STATIC, static_files
from zeroband.tools.board.state import RunWatch, find_run
from zeroband.tools.ctl import Order
from zeroband.tools.report.command import write_report

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def complaints() -> list[str]:
    """What the browser complained of; has to be empty at the end, unless the test expects it and empties it."""
    return []


@pytest.fixture
def board(request: pytest.FixtureRequest) -> Iterator[Board]:
    """A board; the parameter, if there is one, says how it differs."""
    with Board(**getattr(request, "param", {})) as board:
        yield board


def of_board(**how: object) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("board", [how], indirect=True, ids=["board"])


@pytest.fixture
def open_page(browser: Browser, board: Board, complaints: list[str]) -> Iterator[Open]:
    with ExitStack() as stack:

        def open_one(width: int = 1280, height: int = 900, scheme: str = "light", *, is_calm: bool = False) -> Page:
            motion = "reduce" if is_calm else "no-preference"
            context = browser.new_context(
                viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion=motion
            )
            stack.callback(context.close)
            page = context.new_page()
            page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("requestfailed", lambda request: complaints.append(f"failed: {request.url}"))
            page.on("request", lambda one: None if one.url.startswith(board.url) else complaints.append(one.url))
            page.clock.install()
            page.goto(board.url)
            return page

        yield open_one
        seen = list(complaints)  # closing breaks the streams off, which is no complaint
    assert seen == []


def figure(page: Page, name: str) -> str:
    return page.locator(f"#fig-{name}").inner_text().replace("\u00a0", " ")


def node(page: Page, name: str) -> str:
    """State of a node as its card says it."""
    return page.locator(".node", has=page.get_by_role("heading", name=name, exact=True)).locator(".badge").inner_text()


def shows(page: Page, words: Mapping[str, str]) -> None:
    """Wait until each node's card says this."""
    for name, said in words.items():
        card = page.locator(".node", has=page.get_by_role("heading", name=name, exact=True))
        expect(card.locator(".badge")).to_contain_text(said)


def stop_clock(page: Page) -> None:
    """No timer of the page fires from now on, so that only the stream brings news.

    The moment is well ahead: on a busy machine one of 100 ms was past before the browser heard of it, and refused.
    """
    page.clock.pause_at(page.evaluate("Date.now() + 3000"))


def is_wider(page: Page) -> bool:
    """Whether the page scrolls sideways."""
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


# -- files, without a browser ---------------------------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    """Custom properties of both themes that are plain colours."""
    css = (STATIC / "board.css").read_text(encoding="utf-8")
    blocks = re.findall(r"^:root(\[data-theme=\"dark\"\])? \{(.*?)^\}", css, re.DOTALL | re.MULTILINE)
    found = {
        "dark" if dark else "light": dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", body)) for dark, body in blocks
    }
    assert found["light"].keys() == found["dark"].keys()
    return found


def rgb(colour: str) -> str:
    """A colour as browsers compute it."""
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


def luminance(colour: str) -> float:
    """Relative luminance of sRGB, 0 to 1 (WCAG 2.2)."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    """Contrast of two colours, 1 to 21 (WCAG 2.2)."""
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


LEVELS = ("good", "warning", "bad", "unknown", "accent")
WRITTEN = [
    *((text, ground) for text in ("text", "muted") for ground in ("page", "card", "sunk")),
    *((text, f"{level}-tint") for text in ("text", "muted") for level in ("accent", "warning")),
    *((level, ground) for level in LEVELS for ground in ("card", f"{level}-tint")),
    ("on-accent", "accent"),
]
DRAWN = [
    *((f"phase-{phase}", "card") for phase in ("compute", "wait", "transfer", "apply")),
    *((f"series-{number}", "card") for number in range(1, 7)),
]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_a_contrast_of_4_5_and_drawings_of_3_in_both_themes(theme: str) -> None:
    colours = themes()[theme]
    pairs = [(*pair, 4.5) for pair in WRITTEN] + [(*pair, 3.0) for pair in DRAWN]
    low = {
        f"{a} on {b}": contrast(colours[a], colours[b])
        for a, b, least in pairs
        if contrast(colours[a], colours[b]) < least
    }
    assert low == {}


def test_files_hold_no_markup_from_data_and_name_no_other_host() -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in STATIC.iterdir()}
    assert {"index.html", "board.css", "board.js"} <= files.keys()
    html = files["index.html"]
    assert re.findall(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=\"/static/)", html) == []
    for name, text in files.items():
        assert (
            re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text) == []
        ), name
        assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == [], name


def test_first_load_is_below_200_kb() -> None:
    assert sum(path.stat().st_size for path in static_files().values()) < 200_000


# -- the board itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """The folder of a run of four nodes and five rounds."""
    write(tmp_path / "recorded", chain(*run_of(NODES, 5)))
    return tmp_path / "recorded"


@pytest.mark.slow
def test_board_and_page_show_a_recorded_run_and_what_is_recorded_next(browser: Browser, recorded: Path) -> None:
    complaints: list[str] = []
    with ExitStack() as stack:
        watch = RunWatch(partial(find_run, recorded))
        stack.callback(watch.close)
        watch.start()
        _, port = stack.enter_context(served(build_app(watch, OrderDesk(None, None))))  # which takes no orders
        page = stack.enter_context(browser.new_context()).new_page()
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#run-id")).to_have_text("recorded")
        shows(page, dict.fromkeys(NODES, "Training"))
        expect(page.locator(".chart canvas").first).to_be_visible()
        expect(page.locator("#rounds")).to_have_attribute("aria-label", re.compile("of 4 nodes"))
        write(recorded, [event("node0", 11.0, "peer_lost", round=6, member_ids=[member(VICTIM)])])
        shows(page, {VICTIM: "Lost", "node0": "Training"})
        with page.expect_response("**/api/series**", timeout=20_000) as answer:
            pass
        assert answer.value.request.all_headers()["if-none-match"]  # what did not change is not sent again
        page.locator("#open-orders").click()
        expect(page.locator("#orders-why")).to_have_text("This board takes no orders.")
        assert complaints == []


# -- the page -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_saved_page_shows_the_run_without_a_board(browser: Browser, recorded: Path) -> None:
    write_report(recorded, recorded / "report.html", price_per_hour=1.0)
    with closing(browser.new_context(viewport={"width": 1280, "height": 900}, offline=True)) as context:
        page, complaints = context.new_page(), list[str]()
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda one: None if one.url.startswith(("file:", "data:")) else complaints.append(one.url))
        page.goto((recorded / "report.html").as_uri())
        expect(page.locator(".node")).to_have_count(len(NODES))
        expect(page.locator("#link-words")).to_contain_text("saved ")
        expect(page.locator("#loss-chart canvas")).to_be_visible()
        for axis in ("Time", "Bytes", "Steps"):
            page.locator("#by").get_by_text(axis, exact=True).click()
            expect(page.locator("#loss-chart")).to_have_attribute("aria-label", re.compile(f"against {axis.lower()}"))
        for part in ("What to do next", "Phases", "Data audit", "Cost", "Configuration", "Remarks"):
            expect(page.get_by_role("heading", name=part)).to_be_visible()
        expect(page.locator("#timebar")).to_be_hidden()
        expect(page.locator("#open-orders")).to_be_hidden()
        assert not is_wider(page) and complaints == []


def test_page_shows_every_part_of_a_run(open_page: Open) -> None:
    page = open_page()
    expect(page.locator("#state-words")).to_have_text("4 nodes in, 4 nodes seen.")
    assert figure(page, "loss").startswith("3.0")
    assert figure(page, "tokens") == "107 M\n14.7 M parameters"
    assert figure(page, "mfu").startswith("40.7 %")
    assert figure(page, "left_s").startswith("3 min")
    assert figure(page, "cost").startswith("$1.33")
    assert {name: node(page, name) for name in NODES} == dict.fromkeys(NODES, "● Training")
    assert page.locator(".guarantee[data-state=good]").count() == 4
    page.locator(".guarantee summary").first.click()
    expect(page.locator(".evidence").first).to_contain_text("42 rounds recorded by two or more nodes")
    expect(page.locator(".chart canvas")).to_have_count(4)
    expect(page.locator("#rounds")).to_have_attribute("aria-label", re.compile("Rounds 36 to 41 of 4 nodes"))
    expect(page.locator("#traffic")).to_contain_text(re.compile("^40 .*fewer bytes"))
    expect(page.locator(".span[data-state=lost]")).to_have_attribute("title", re.compile("^Lost from .*, 18"))
    assert page.locator("#links tbody td").count() == 16
    expect(page.locator("#events li").first).to_contain_text("The checkpoint of step 400 is complete")
    page.locator("#only-warnings").check()
    expect(page.locator("#events li")).to_have_count(3)
    expect(page.locator("#sample")).to_contain_text("The harbour was quiet")
    assert page.locator("#checkpoints tbody tr").count() == 4
    for by in ("Time", "Bytes", "Steps"):
        page.get_by_text(by, exact=True).click()
        expect(page.locator("#rate-title")).to_contain_text(by.lower())
    assert page.locator("#rounds").evaluate(
        "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, c.height).data.buffer)).size > 4"
    )


@pytest.mark.slow
@of_board(now_s=295.0)
def test_kill_and_healing_are_shown_as_the_facts_change(open_page: Open, board: Board) -> None:
    page = open_page()
    shows(page, dict.fromkeys(NODES, "Training"))
    stop_clock(page)
    board.tell(STALLED_S)
    board.wait(6.0)
    expect(page.locator("#waiting-for")).to_contain_text("node2 sent no data for this round")
    board.tell(LATE_S)
    shows(page, {VICTIM: "▲ Late"})
    board.tell(LOST_S)
    shows(page, {VICTIM: "✕ Lost", "node0": "Training"})
    expect(page.locator("#waiting-for")).to_be_hidden()
    expect(page.locator("#links .is-cut").first).to_have_text("✕ cut off")
    expect(page.locator("#spoken")).to_have_text("3 nodes in, 4 nodes seen.; node2 lost")
    expect(page).to_have_title(re.compile("^▲ Training, loss 3"))
    board.tell(340.0)
    shows(page, {VICTIM: "Joining"})
    join = page.locator(".node .join-words", has_text="fetching")
    expect(join).to_have_text("fetching the state from members · 50\u00a0% · 4.90\u00a0MB/s")
    board.tell(360.0)
    shows(page, dict.fromkeys(NODES, "Training"))
    expect(page.locator("#state-words")).to_have_text("4 nodes in, 4 nodes seen.")


@pytest.mark.slow
def test_slider_shows_the_past_and_live_the_present(open_page: Open, board: Board) -> None:
    page = open_page()
    shows(page, dict.fromkeys(NODES, "Training"))
    page.locator("#at").fill("750")  # second 315 of 420
    shows(page, {VICTIM: "Lost"})
    expect(page.locator("#notice")).to_contain_text("This is the run at")
    expect(page.locator("#at")).to_have_attribute("aria-valuetext", re.compile("2.min back"))
    board.tell(430.0)
    page.locator("#at").press("ArrowLeft")
    shows(page, {VICTIM: "Lost"})
    sent = page.context.new_page()
    sent.goto(page.url)  # which names the moment
    shows(sent, {VICTIM: "Lost"})
    page.locator("#live").click()
    shows(page, {VICTIM: "Training"})
    expect(page.locator("#notice")).to_be_hidden()


@pytest.mark.slow
def test_run_that_has_ended_is_not_called_live_and_keeps_its_mean_rate(open_page: Open, board: Board) -> None:
    page = open_page()
    live, colours = page.locator("#live"), themes()["light"]
    expect(live).to_have_text("Live")
    expect(live).to_have_css("color", rgb(colours["good"]))
    expect(page.locator("#link-state")).to_have_attribute("data-level", "good")
    board.tell(END_S + 20)
    expect(live).to_have_text("End")
    expect(live).to_have_css("color", rgb(colours["muted"]))
    expect(page.locator("#link-state")).to_have_attribute("data-level", "unknown")
    expect(page.locator("#link-words")).to_contain_text("ended")
    expect(page.locator("#fig-tokens_per_s")).to_contain_text("tokens/s, mean")
    expect(page.locator("#fig-tokens_per_s")).to_have_text(re.compile(r"^\s*\d"))
    page.locator("#at").press("ArrowLeft")
    expect(page.locator("#notice")).to_contain_text("“End” returns to the newest")


@pytest.mark.slow
@of_board(now_s=295.0)
def test_lost_board_is_told_with_the_age_of_what_is_shown_until_it_is_back(
    open_page: Open, board: Board, complaints: list[str]
) -> None:
    page = open_page()
    expect(page.locator("#link-words")).to_contain_text("live")
    board.stop()
    expect(page.locator("#notice")).to_contain_text("The board does not answer. The data is from")
    page.clock.fast_forward("02:00:00")  # a browser that slept
    expect(page.locator("#link-words")).to_contain_text("shown: 2\u00a0h\u00a000\u00a0min ago")
    expect(page.locator("#state-words")).to_have_text("4 nodes in, 4 nodes seen.")
    board.start()
    board.tell(298.0)
    page.clock.fast_forward("00:11")
    expect(page.locator("#link-words")).to_contain_text("live")  # how young it is depends on which retry found it
    expect(page.locator("#notice")).to_be_hidden()
    board.tell(300.0)
    page.clock.fast_forward("00:11")
    expect(page.locator("#link-words")).to_contain_text("live")
    stop_clock(page)
    board.tell(LOST_S)
    shows(page, {VICTIM: "Lost"})  # the stream is back, too
    assert all("Failed to load resource" in one or "failed: " in one for one in complaints), complaints
    complaints.clear()


@pytest.mark.slow
@of_board(now_s=295.0)
def test_page_without_a_stream_asks_now_and_then(
    open_page: Open, board: Board, complaints: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app_module, "STREAMS_OF_ADDRESS", 0)
    page = open_page()
    expect(page.locator("#link-words")).to_contain_text("live")
    for now_s, said in ((LOST_S, "Lost"), (360.0, "Training")):
        board.tell(now_s)
        page.clock.fast_forward("00:06")
        shows(page, {VICTIM: said})
    assert all("503" in one or "failed: " in one for one in complaints), complaints
    complaints.clear()


@pytest.mark.slow
def test_run_that_says_nothing_is_told_by_the_age_of_its_newest_fact(
    open_page: Open, board: Board, complaints: list[str]
) -> None:
    board.source.problem = StoreLost("the store is away for 200 s")
    board.wait(200.0)
    page = open_page()
    expect(page.locator("#link-words")).to_have_text("newest fact 3\u00a0min ago")
    expect(page.locator("#notice")).to_have_text("▲ the store is away for 200 s")
    page.clock.fast_forward("10:00")
    expect(page.locator("#link-words")).to_have_text("newest fact 13\u00a0min ago")  # the documents say 200 s each time
    # A request that was under way then took ten minutes for the page: it is broken off and sent again.
    assert all(one.startswith(f"failed: {board.url}api/") for one in complaints), complaints
    complaints.clear()


@pytest.mark.slow
@of_board(
    now_s=LOST_S + 3,
    run_id="a-run-of-a-very-long-name" * 4,
    names={VICTIM: "a-node-of-a-very-long-name" * 4},
    extra_nodes=60,
    sample="w" * 500,
    problem="p" * 300,
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_shows_64_nodes_with_long_names_without_scrolling_sideways(
    open_page: Open, board: Board, scheme: str
) -> None:
    page = open_page(360, 740, scheme)
    expect(page.locator("#nodes > li")).to_have_count(64)
    expect(page.locator("#nodes > li").first).to_contain_text("Lost")  # trouble first
    assert not is_wider(page)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    page.locator("#open-orders").click()
    assert page.locator("#orders").evaluate("d => d.getBoundingClientRect().right <= innerWidth")


@pytest.mark.slow
@of_board(now_s=LOST_S + 3, run_id=HOSTILE, names={VICTIM: HOSTILE}, sample=HOSTILE, problem=HOSTILE)
def test_names_and_samples_are_shown_as_text(open_page: Open, board: Board) -> None:
    page = open_page()
    shows(page, {HOSTILE: "Lost"})
    for place in ("#run-id", "#sample"):
        expect(page.locator(place)).to_have_text(HOSTILE)
    for place in ("#links", "#membership", "#events", "#notice"):
        expect(page.locator(place)).to_contain_text(HOSTILE)
    assert page.locator("main script, main img").count() == 0
    assert "owned" not in page.title().split(HOSTILE)[0]
    assert page.title().endswith(HOSTILE)


@pytest.mark.slow
def test_orders_are_sent_with_the_token_and_refusals_are_shown(
    open_page: Open, board: Board, complaints: list[str]
) -> None:
    page = open_page()
    page.locator("#open-orders").click()
    expect(page.get_by_label("Resume")).to_be_disabled()
    expect(page.locator(".order", has_text="Resume")).to_contain_text("The run is not paused.")
    expect(page.locator("#send-order")).to_be_disabled()
    page.get_by_label("Drain a node").check()
    page.locator("#drain-node").select_option("node3")
    page.locator("#send-order").click()
    expect(page.locator("#orders-result")).to_have_text("An order needs the run's token.")
    page.get_by_label("Run token").fill("another")
    page.locator("#send-order").click()
    expect(page.locator("#orders-result")).to_have_text("✕ Refused: this is not the run's token")
    assert board.orders == []
    page.get_by_label("Run token").fill(TOKEN)
    page.keyboard.press("Enter")
    expect(page.locator("#orders-result")).to_contain_text("✓ Sent: drain")
    page.get_by_label("Roll back").check()
    page.locator("#rollback-step").select_option("300")
    page.locator("#send-order").click()
    expect(page.locator("#orders-result")).to_contain_text("✓ Sent: rollback")
    page.locator("input[value=pause]").check()
    board.refusal = "the run is paused already"
    page.locator("#send-order").click()
    expect(page.locator("#orders-result")).to_have_text("✕ Refused: the run is paused already")
    assert board.orders == [Order("drain", node="node3"), Order("rollback", step=300)]
    assert TOKEN not in page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])")
    assert all("Failed to load resource" in one for one in complaints), complaints
    complaints.clear()


@pytest.mark.slow
@of_board(takes_orders=False)
def test_orders_that_are_not_allowed_say_why(open_page: Open, board: Board) -> None:
    page = open_page()
    page.locator("#open-orders").click()
    expect(page.locator("#orders-why")).to_contain_text("this page is read-only; for orders, start it with the run's")
    assert page.locator("#orders-form").locator("input:enabled").count() == 0
    page.keyboard.press("Escape")
    expect(page.locator("#orders")).to_be_hidden()


@pytest.mark.slow
@of_board(now_s=0.0, has_run=False)
def test_without_a_run_the_page_says_how_to_start_one_and_shows_it_then(open_page: Open, board: Board) -> None:
    page = open_page()
    expect(page.locator("#no-run")).to_contain_text("./scripts/demo.sh")
    expect(page.locator("#run")).to_be_hidden()
    board.has_run = True
    board.tell(1.0)
    expect(page.locator("#state-words")).to_have_text("Nodes are joining; none trains yet.")
    expect(page.locator("#no-run")).to_be_hidden()
    expect(page.locator("#loss-chart")).to_contain_text("No data yet")
    assert figure(page, "loss").startswith("\u2013")


@pytest.mark.slow
def test_keyboard_reaches_everything_and_the_theme_is_kept(
    open_page: Open, board: Board, complaints: list[str]
) -> None:
    page = open_page(is_calm=True)
    expect(page.locator("#run")).to_be_visible()
    assert page.locator("#link-state .dot").evaluate("d => getComputedStyle(d).animationName") == "none"
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the run")).to_be_focused()
    page.locator("#rounds").focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#round-read")).to_contain_text("Round 40: 4 nodes, on average compute")
    page.locator("#theme").focus()
    page.keyboard.press("Enter")
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    page.reload()
    assert complaints in ([], [f"failed: {board.url}api/stream"])  # broken off by the reload
    complaints.clear()
    expect(page.locator("#run")).to_be_visible()
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input, select')].filter("
        "e => !(e.textContent.trim() || e.ariaLabel || e.labels?.length)).map(e => e.id)"
    )
    assert unnamed == []
