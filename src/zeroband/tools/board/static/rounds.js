// Timeline of rounds on a canvas: each node's phases. Arrow keys and the pointer describe one round.

import { byId, colour, setText } from "./dom.js";
import * as format from "./format.js";

const PHASES = ["compute", "wait", "transfer", "apply"];
const ROW = 24;
const BAR = 16;
const FOOT = 22;

let rounds = [];
let many = 6;
let chosen = null;
let places = [];

export function drawRounds(all) {
  rounds = all;
  redrawRounds();
}

export function showRounds(number) {
  many = number;
  redrawRounds();
}

const phasesOf = (node) => PHASES.map((phase) => Math.max(0, node[`${phase}_s`] ?? 0));
const startOf = (node) => node.end_s - phasesOf(node).reduce((sum, length) => sum + length, 0);

export function redrawRounds() {
  const canvas = byId("rounds");
  const width = canvas.clientWidth;
  if (!width) return;
  const shown = rounds.slice(-many);
  const byName = (a, b) => a.localeCompare(b, "en", { numeric: true });
  const ids = [...new Set(shown.flatMap((round) => Object.keys(round.nodes)))].sort(byName);
  const height = Math.max(2, ids.length) * ROW + FOOT;
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${getComputedStyle(byId("run-id")).fontFamily}`;
  pen.textBaseline = "middle";
  places = [];
  const isTimed = (round) => Object.values(round.nodes).some((node) => startOf(node) < node.end_s);
  const timed = shown.filter(isTimed);
  if (!timed.length) {
    pen.fillStyle = colour("muted");
    pen.fillText("No committed round yet.", 0, ROW);
    setText(byId("rounds-words"), "");
    canvas.setAttribute("aria-label", "No committed round yet.");
    setText(byId("round-read"), "");
    return;
  }
  const nodes = timed.flatMap((round) => Object.values(round.nodes));
  const from = Math.min(...nodes.map(startOf));
  const to = Math.max(...nodes.map((node) => node.end_s));
  const gutter = Math.min(width * 0.28, Math.max(...ids.map((id) => pen.measureText(id).width)) + 14);
  const x = (at_s) => gutter + ((width - gutter - 1) * (at_s - from)) / Math.max(to - from, 1e-3);

  pen.fillStyle = colour("muted");
  ids.forEach((id, row) => pen.fillText(clipped(pen, id, gutter - 10), 0, row * ROW + ROW / 2));
  const paints = PHASES.map((phase) => colour(`phase-${phase}`));
  let free = gutter;
  for (const round of timed) {
    const own = Object.entries(round.nodes);
    const place = [x(Math.min(...own.map(([, node]) => startOf(node)))), x(Math.max(...own.map(([, node]) => node.end_s)))];
    places.push([...place, round]);
    for (const [id, node] of own) {
      const top = ids.indexOf(id) * ROW + (ROW - BAR) / 2;
      let at = startOf(node);
      phasesOf(node).forEach((length, phase) => {
        const left = x(at);
        at += length;
        pen.fillStyle = paints[phase];
        if (length) pen.fillRect(left, top, Math.max(x(at) - left - 0.5, 0.6), BAR);
      });
    }
    const end = Math.round(place[1]) - 0.5;
    pen.fillStyle = colour(round.retries ? "warning" : "line");
    pen.fillRect(end, 0, round.retries ? 2 : 1, ids.length * ROW);
    const label = `${round.retries ? "▲ " : ""}${round.round}`;
    const middle = (place[0] + place[1] - pen.measureText(label).width) / 2;
    if (middle >= free) {
      pen.fillStyle = colour(round.retries ? "warning" : "muted");
      pen.fillText(label, middle, height - FOOT / 2);
      free = middle + pen.measureText(label).width + 12;
    }
  }
  const mark = places.find(([, , round]) => round.round === chosen);
  if (mark) {
    pen.strokeStyle = colour("text");
    pen.strokeRect(mark[0] + 0.5, 0.5, Math.max(mark[1] - mark[0] - 1, 2), ids.length * ROW - 1);
  }
  const newest = timed[timed.length - 1];
  setText(byId("rounds-words"), `${timed[0].round} to ${newest.round}, ${format.duration(to - from)}`);
  canvas.setAttribute("aria-label", `Rounds ${timed[0].round} to ${newest.round} of ${ids.length} nodes. Arrow keys describe one round.`);
  setText(byId("round-read"), inWords(mark ? mark[2] : newest));
}

function inWords(round) {
  const nodes = Object.entries(round.nodes);
  const mean = (phase) => nodes.reduce((sum, [, node]) => sum + (node[`${phase}_s`] ?? 0), 0) / nodes.length;
  const [slowest] = nodes.reduce((most, one) => ((one[1].compute_s ?? 0) > (most[1].compute_s ?? 0) ? one : most));
  const retried = round.retries ? `, tried ${round.retries + 1} times` : "";
  const parts = PHASES.map((phase) => `${phase} ${format.duration(mean(phase))}`);
  return `Round ${round.round}${retried}: ${format.plural(round.members, "node")}, on average ${parts.join(", ")}. Longest compute: ${slowest}.`;
}

function clipped(pen, text, width) {
  if (pen.measureText(text).width <= width) return text;
  let end = text.length;
  while (end > 1 && pen.measureText(`${text.slice(0, end)}…`).width > width) end -= 1;
  return `${text.slice(0, end)}…`;
}

function choose(round) {
  if (round === chosen) return;
  chosen = round;
  redrawRounds();
}

export function listenRounds() {
  const canvas = byId("rounds");
  canvas.addEventListener("pointermove", (event) => {
    const found = places.find(([left, right]) => event.offsetX >= left && event.offsetX <= right);
    choose(found ? found[2].round : null);
  });
  canvas.addEventListener("pointerleave", () => choose(null));
  canvas.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") choose(null);
    if (!step || !places.length) return;
    event.preventDefault();
    const now = places.findIndex(([, , round]) => round.round === chosen);
    const next = now < 0 ? places.length - 1 : Math.min(places.length - 1, Math.max(0, now + step));
    choose(places[next][2].round);
  });
}
