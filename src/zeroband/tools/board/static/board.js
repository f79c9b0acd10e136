// The page of a run: fetches documents from the board, draws them, and shows their age.

import { drawCharts } from "./charts.js";
import { byId, setData, setHidden, setText } from "./dom.js";
import * as format from "./format.js";
import { listenOrders, updateOrders } from "./orders.js";
import * as panels from "./panels.js";
import { drawRounds, listenRounds, redrawRounds, showRounds } from "./rounds.js";
import { chosen, drawMarks, drawTime, listenTime } from "./timebar.js";

const ANSWER_WITHIN_MS = 10_000;
const STREAM_AGAIN_MS = 10_000;
const ASK_AGAIN_MS = 5_000; // without a stream, and to check that the board still answers
const SERIES_EVERY_MS = 4_000;
const RETRY_MS = [500, 1_000, 2_000, 5_000, 10_000];
const OLD_S = 30; // a run that is silent for longer is shown as silent

// A page saved with its data (saved.py) asks no server: it has one state, the series of each axis, and extra sections.
const saved = JSON.parse(byId("saved")?.textContent ?? "null");
const shown = { state: null, newest: null, received_ms: 0, made_ms: 0, series: null, series_ms: 0, by: "tokens" };
const link = { source: null, opened_ms: 0, failures: 0, isLost: false, isAsking: false, isDue: false, timer: null };

async function ask(path) {
  if (saved) return path.startsWith("/api/state") ? saved.state : saved.series[shown.by];
  const answer = await fetch(path, { cache: "no-cache", signal: AbortSignal.timeout(ANSWER_WITHIN_MS) });
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

/** Fetch the documents shown; calls during a fetch are merged into one more fetch. */
async function refresh({ withSeries = false } = {}) {
  if (withSeries) shown.series_ms = 0;
  if (link.isAsking) {
    link.isDue = true;
    return;
  }
  link.isAsking = true;
  do {
    link.isDue = false;
    await fetchOnce();
  } while (link.isDue);
  link.isAsking = false;
  refreshIn(link.isLost ? RETRY_MS[Math.min(link.failures - 1, RETRY_MS.length - 1)] : ASK_AGAIN_MS);
}

function refreshIn(wait_ms) {
  clearTimeout(link.timer);
  if (saved) return;
  link.timer = setTimeout(refresh, wait_ms);
}

async function fetchOnce() {
  const at_s = chosen();
  try {
    const state = await ask(at_s === null ? "/api/state" : `/api/state?at=${at_s}`);
    shown.received_ms = Date.now();
    link.failures = 0;
    link.isLost = false;
    connect();
    if (at_s === chosen()) shown.state = state;
    if (at_s === null) {
      // The board may send the same document twice; then its facts are no newer.
      if (state.now_s !== shown.newest?.now_s) shown.made_ms = Date.now();
      shown.newest = state;
    }
    if (state.run_id !== null && Date.now() - shown.series_ms >= SERIES_EVERY_MS) {
      const by = shown.by;
      const series = await ask(`/api/series?by=${by}&points=400`);
      if (by === shown.by) [shown.series, shown.series_ms] = [series, Date.now()];
    }
    if (at_s === chosen()) draw();
  } catch (error) {
    // On any error the page keeps what it has, shows its age, and retries.
    link.failures += 1;
    link.isLost = true;
    if (!(error instanceof DOMException || error instanceof TypeError)) console.warn(String(error));
  }
  tellAge();
}

/** Follow the board's stream; a refused stream is retried with the next answer. */
function connect() {
  const isOpen = link.source && link.source.readyState !== EventSource.CLOSED;
  if (saved || isOpen || Date.now() - link.opened_ms < STREAM_AGAIN_MS) return;
  link.opened_ms = Date.now();
  link.source = new EventSource("/api/stream");
  link.source.addEventListener("state", () => document.hidden || refresh());
  link.source.addEventListener("error", () => link.isLost || refresh());
}

function draw() {
  const state = shown.state;
  if (state === null) return;
  setHidden(byId("waiting"), true);
  setHidden(byId("no-run"), state.run_id !== null);
  setHidden(byId("run"), state.run_id === null);
  setText(byId("run-id"), state.run_id ?? "");
  if (!saved) updateOrders(shown.newest ?? state);
  if (state.run_id === null) {
    setText(byId("no-run-place"), state.place);
    document.title = "zeroband: no run yet";
    return;
  }
  panels.drawFigures(state);
  panels.drawGuarantees(state.guarantees);
  const now_s = state.at_s + (chosen() === null ? (state.age_s ?? 0) : 0);
  panels.drawNodes(state.nodes, now_s);
  panels.drawMembership(state.membership, state.from_s, chosen() === null ? state.to_s : state.at_s);
  panels.drawLinks(state.links);
  panels.drawEvents(state.events, byId("only-warnings").checked, state.at_s);
  panels.drawSample(state.sample, state.at_s);
  panels.drawCheckpoints(state.checkpoints, state.at_s);
  drawRounds(state.rounds);
  if (!saved) drawTime(state);
  if (shown.series) drawCharts(shown.series, chosen() === null ? null : state);
  nameTab(state);
}

const troubledOf = (state) => state.nodes.filter((node) => ["late", "lost", "failed"].includes(node.state));

/** Tell a screen reader about changes of state, not about each figure every second. */
function speak(state) {
  const words = link.isLost ? ["The board does not answer"] : [];
  if (state?.run_id) words.push(state.run.words, ...troubledOf(state).map((node) => `${node.id} ${node.state}`));
  setText(byId("spoken"), words.filter(Boolean).join("; "));
}

function nameTab(state) {
  const sign = troubledOf(state).length || ["failed", "stalled"].includes(state.run.state) ? "▲ " : "";
  document.title = `${sign}${panels.wordOfRun(state.run.state)}, loss ${format.loss(state.run.loss)}: ${state.run_id}`;
}

/** Show the age of the data. Runs every second, with or without a board. */
function tellAge() {
  const past_s = shown.received_ms ? (Date.now() - shown.received_ms) / 1000 : null;
  const state = shown.state;
  const fact_s = shown.newest?.age_s == null ? null : shown.newest.age_s + (Date.now() - shown.made_ms) / 1000;
  const hasEnded = ["finished", "failed"].includes((shown.newest ?? state)?.run.state); // a past time may be before its end
  const notes = [];
  if (saved) {
    setLink("unknown", `saved ${format.clock(saved.state.now_s, true)}`);
  } else if (link.isLost) {
    setLink("bad", past_s === null ? "no answer yet" : `shown: ${format.age(past_s)}`);
    const old = past_s === null ? "No data yet." : `The data is from ${format.age(past_s)}.`;
    notes.push(`✕ The board does not answer. ${old} The page retries automatically.`);
  } else if (chosen() !== null) {
    setLink("warning", "past");
    notes.push(`▲ This is the run at ${format.clock(chosen(), true)}. “${hasEnded ? "End" : "Live"}” returns to the newest data.`);
  } else if (state === null) {
    setLink("unknown", "connecting");
  } else if (state.run_id === null) {
    setLink("unknown", "no run");
  } else if (hasEnded) {
    setLink("unknown", `ended ${format.age(fact_s)}`);
  } else if (fact_s !== null && fact_s > OLD_S) {
    setLink("warning", `newest fact ${format.age(fact_s)}`);
  } else {
    setLink("good", `live · ${format.age(fact_s)}`);
  }
  speak(state);
  setData(document.body, "link", link.isLost ? "lost" : "open");
  setData(document.body, "run", hasEnded ? "ended" : "open");
  setText(byId("live-words"), hasEnded ? "End" : "Live");
  if (state?.problem) notes.push(`▲ ${state.problem}`);
  setHidden(byId("notice"), !notes.length);
  setText(byId("notice"), notes.join(" "));
  setData(byId("notice"), "level", link.isLost ? "bad" : "warning");
}

function setLink(level, words) {
  setData(byId("link-state"), "level", level);
  setText(byId("link-words"), words);
}

// -- theme -------------------------------------------------------------------

const THEMES = { auto: "◐", light: "☀", dark: "☾" };
const prefersDark = window.matchMedia("(prefers-color-scheme: dark)");

function theme() {
  try {
    return localStorage.getItem("theme") ?? "auto";
  } catch {
    return "auto"; // storage is off
  }
}

function applyTheme(name) {
  const isDark = name === "dark" || (name === "auto" && prefersDark.matches);
  setData(document.documentElement, "theme", isDark ? "dark" : "light");
  setText(byId("theme-sign"), THEMES[name]);
  setText(byId("theme-words"), name);
  byId("theme").setAttribute("aria-label", `Theme: ${name}`);
  draw();
}

function listenTheme() {
  let name = theme();
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    name = names[(names.indexOf(name) + 1) % names.length];
    try {
      localStorage.setItem("theme", name);
    } catch {
      // Storage is off: the choice lasts until the page is closed.
    }
    applyTheme(name);
  });
  prefersDark.addEventListener("change", () => applyTheme(name));
  window.addEventListener("beforeprint", () => applyTheme("light"));
  window.addEventListener("afterprint", () => applyTheme(name));
  applyTheme(name in THEMES ? name : "auto");
}

// -- start -------------------------------------------------------------------

function chosenOf(id) {
  return byId(id).querySelector("input:checked").value;
}

if (saved) {
  panels.drawTold(byId("told-first"), saved.first);
  panels.drawTold(byId("told-last"), saved.last);
}
listenTheme();
listenTime(() => {
  if (chosen() === null) {
    shown.state = shown.newest ?? shown.state; // immediately, before any answer
    draw();
  }
  tellAge();
  refresh();
});
listenOrders();
listenRounds();
byId("by").addEventListener("change", () => {
  shown.by = chosenOf("by");
  refresh({ withSeries: true });
});
byId("rounds-many").addEventListener("change", () => showRounds(Number(chosenOf("rounds-many"))));
byId("only-warnings").addEventListener("change", draw);
let resized = null;
window.addEventListener("resize", () => {
  cancelAnimationFrame(resized);
  resized = requestAnimationFrame(() => {
    redrawRounds();
    drawMarks();
  });
});
// After sleep or a change of tab, ask immediately.
document.addEventListener("visibilitychange", () => document.hidden || refresh());
window.addEventListener("pageshow", () => refresh());
window.addEventListener("online", () => refresh());
setInterval(tellAge, 1000);
