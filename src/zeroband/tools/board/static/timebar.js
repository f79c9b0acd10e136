// The time shown: now, or an earlier time chosen with the slider.

import { byId, colour, setData, setText } from "./dom.js";
import * as format from "./format.js";

const STEPS = 1000;

let chosen_s = momentOf(location.hash);
let from_s = null;
let to_s = null;
let marks = [];

/** The time in an address, so that a link shows what its sender saw; null: none. */
function momentOf(hash) {
  const found = /^#at=(\d+(?:\.\d+)?)$/.exec(hash);
  return found ? Number(found[1]) : null;
}

function choose(at_s) {
  chosen_s = at_s;
  history.replaceState(null, "", at_s === null ? location.pathname : `#at=${at_s.toFixed(1)}`);
  if (from_s !== null) tell();
}

/** Wall-clock time shown, in seconds; null: now. */
export const chosen = () => chosen_s;

/** Call onChange whenever a time is chosen. */
export function listenTime(onChange) {
  const slider = byId("at");
  slider.addEventListener("input", () => {
    const value = Number(slider.value);
    if (from_s === null) return;
    choose(value >= STEPS ? null : from_s + ((to_s - from_s) * value) / STEPS);
    onChange();
  });
  byId("live").addEventListener("click", () => {
    choose(null);
    onChange();
  });
  window.addEventListener("hashchange", () => {
    chosen_s = momentOf(location.hash);
    onChange();
  });
}

/** Take over the time span of a state and mark its warnings on the track. */
export function drawTime(state) {
  byId("timebar").hidden = state.from_s === null;
  if (state.from_s === null) return;
  [from_s, to_s] = [state.from_s, Math.max(state.to_s, state.from_s + 1)];
  if (chosen_s === null) marks = state.events.filter((event) => event.level !== "info");
  tell();
  drawMarks();
}

function tell() {
  const slider = byId("at");
  const isLive = chosen_s === null;
  const at_s = chosen_s ?? to_s;
  setData(document.body, "moment", isLive ? "live" : "past");
  byId("live").setAttribute("aria-pressed", String(isLive));
  const value = isLive ? STEPS : Math.round((STEPS * (at_s - from_s)) / (to_s - from_s));
  if (document.activeElement !== slider || isLive) slider.value = String(value);
  const words = isLive ? format.clock(at_s) : `${format.moment(at_s, to_s)} · ${format.duration(to_s - at_s)} back`;
  slider.setAttribute("aria-valuetext", isLive ? "now" : words);
  setText(byId("at-words"), words);
}

export function drawMarks() {
  const canvas = byId("marks");
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || from_s === null) return;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  for (const event of marks) {
    const x = 8 + ((width - 16) * (event.at_s - from_s)) / (to_s - from_s);
    pen.fillStyle = colour(event.level === "error" ? "bad" : "warning");
    pen.fillRect(Math.round(x) - 1, event.level === "error" ? 1 : 4, 2, event.level === "error" ? 10 : 7);
  }
}
