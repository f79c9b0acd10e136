// Draws the parts of a state document that are HTML elements: figures, guarantees, nodes, membership, links, events, lists.

import { byId, keyed, make, setData, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

const RUN_STATES = {
  waiting: ["Waiting", "unknown", "○"],
  training: ["Training", "good", "●"],
  paused: ["Paused", "warning", "‖"],
  finished: ["Finished", "good", "✓"],
  failed: ["Failed", "bad", "✕"],
  stalled: ["Stalled", "bad", "!"],
};

// Word, level and sign of each node state: no state is shown by colour alone.
const NODE_STATES = {
  starting: ["Starting", "unknown", "○"],
  joining: ["Joining", "accent", "◔"],
  training: ["Training", "good", "●"],
  late: ["Late", "warning", "▲"],
  paused: ["Paused", "warning", "‖"],
  leaving: ["Leaving", "warning", "→"],
  left: ["Left", "unknown", "→"],
  lost: ["Lost", "bad", "✕"],
  failed: ["Failed", "bad", "✕"],
  finished: ["Finished", "good", "✓"],
};
const LIGHTS = { good: ["✓", "kept"], bad: ["✕", "broken"], unknown: ["?", "not known yet"] };
const DENSE_FROM = 17;

const ofRun = (state) => RUN_STATES[state] ?? [state, "unknown", "○"];
const ofNode = (state) => NODE_STATES[state] ?? [state, "unknown", "○"];
export const wordOfRun = (state) => ofRun(state)[0];

/** Show a figure with a small note below it. */
function setFigure(id, text, more = "") {
  const element = byId(id);
  if (!element.firstChild) element.append(document.createTextNode(""), make("small"));
  if (element.firstChild.data !== text) element.firstChild.data = text;
  setText(element.lastChild, more || "\u00a0");
}

export function drawFigures(state) {
  const run = state.run;
  const [word, level, sign] = ofRun(run.state);
  setText(byId("state"), `${sign} ${word}`);
  setData(byId("state"), "level", level);
  setText(byId("state-words"), run.words || word);
  const waits = state.waiting_for;
  setHidden(byId("waiting-for"), !waits);
  if (waits) setText(byId("waiting-for"), `▲ ${waits.words} (${format.duration(state.at_s - waits.since_s)})`);

  const done = run.total_steps ? Math.min(1, (run.step ?? 0) / run.total_steps) : null;
  setHidden(byId("progress"), done === null);
  byId("progress-bar").style.width = `${100 * (done ?? 0)}%`;
  byId("progress").setAttribute("aria-valuenow", String(Math.round(100 * (done ?? 0))));
  const steps = run.total_steps ? `Step ${format.whole(run.step)} of ${format.whole(run.total_steps)}` : `Step ${format.whole(run.step)}`;
  const inRound = run.round === null ? "" : `, round ${format.whole(run.round)}`;
  const atStore = run.store ? `, store ${run.store}` : "";
  setText(byId("progress-words"), steps + inRound + atStore);
  setText(byId("left-words"), done === null ? "" : format.percent(done, 0));

  setFigure("fig-loss", format.loss(run.loss), "nats/token");
  setFigure("fig-held_out", format.loss(run.held_out), "nats/token");
  const isOver = ["finished", "failed"].includes(run.state);
  setFigure("fig-tokens_per_s", format.count(run.tokens_per_s), isOver ? "tokens/s, mean" : "tokens/s");
  setFigure("fig-mfu", format.percent(run.mfu), "of peak FLOP/s");
  setFigure("fig-tokens", format.count(run.tokens), run.parameters ? `${format.count(run.parameters)} parameters` : "trained");
  const ends = run.left_s && run.state === "training" ? `until ${format.clock(state.at_s + run.left_s).slice(0, 5)}` : "";
  setFigure("fig-left_s", run.state === "finished" ? "done" : format.duration(run.left_s), ends);
  setHidden(byId("cost"), !run.cost);
  if (run.cost) {
    const { so_far, per_hour, currency } = run.cost;
    setFigure("fig-cost", format.money(so_far, currency), per_hour ? `${format.money(per_hour, currency)} an hour` : "");
  }
  drawTraffic(run);
  setText(byId("config-words"), run.config_words ?? "");
  setText(byId("place"), `${state.place} · zeroband ${state.version}`);
}

function drawTraffic(run) {
  const { sent_bytes: sent, ddp_bytes: ddp } = run;
  const parent = byId("traffic");
  if (!sent && !ddp) {
    parent.replaceChildren(make("p", "none", "No traffic between nodes yet."));
    return;
  }
  const times = sent && ddp ? ddp / sent : null;
  const factor = times === null ? format.UNKNOWN : times >= 10 ? `${Math.round(times)} ×` : `${times.toFixed(1)} ×`;
  const bar = (words, value, className) => {
    const inner = make("div");
    inner.style.width = `${(100 * (value ?? 0)) / Math.max(sent ?? 0, ddp ?? 0)}%`;
    return make("div", `bar-row ${className}`, null, [
      make("span", "", words), make("b", "", format.bytes(value)), make("div", "bar", null, [inner]),
    ]);
  };
  parent.replaceChildren(
    make("p", "factor", factor, [make("span", "", "fewer bytes than data parallel")]),
    bar("Sent by all nodes", sent, "own"),
    bar("Data parallel would have sent", ddp, ""),
  );
}

export function drawGuarantees(guarantees) {
  keyed(byId("guarantees"), guarantees, (guarantee) => guarantee.key, () => {
    const summary = make("summary", "", null, [
      make("span", "light"), make("strong"), make("span", "words"),
    ]);
    return make("li", "", null, [make("details", "guarantee", null, [summary, make("ul", "evidence")])]);
  }, (item, guarantee) => {
    const details = item.firstChild;
    const [light, title, words] = details.firstChild.children;
    const [sign, spoken] = LIGHTS[guarantee.state] ?? LIGHTS.unknown;
    setData(details, "state", guarantee.state);
    setText(light, sign);
    light.setAttribute("role", "img");
    light.setAttribute("aria-label", spoken);
    setText(title, guarantee.title);
    setText(words, guarantee.words);
    const evidence = guarantee.evidence.length ? guarantee.evidence : ["No evidence yet."];
    keyed(details.lastChild, evidence.map((text, at) => [at, text]), ([at]) => at, () => make("li"), (li, [, text]) => setText(li, text));
  });
}

export function drawNodes(nodes, now_s) {
  const parent = byId("nodes");
  const isDense = nodes.length >= DENSE_FROM;
  parent.classList.toggle("is-dense", isDense);
  const counts = new Map();
  for (const node of nodes) counts.set(node.state, (counts.get(node.state) ?? 0) + 1);
  const words = [...counts].map(([state, many]) => `${many} ${ofNode(state)[0].toLowerCase()}`);
  setText(byId("nodes-words"), nodes.length ? words.join(", ") : "No node has joined yet.");
  const urgency = (node) => ["bad", "warning", "accent", "unknown", "good"].indexOf(ofNode(node.state)[1]);
  const ordered = isDense ? nodes.toSorted((a, b) => urgency(a) - urgency(b)) : nodes;
  keyed(parent, ordered, (node) => node.id, createNode, (card, node) => updateNode(card, node, now_s));
}

function createNode() {
  const head = make("div", "node-head", null, [make("h3", "mono"), make("span", "badge")]);
  const join = make("div", "join", null, [
    make("div", "progress", null, [make("div")]), make("span", "join-words"),
  ]);
  join.firstChild.setAttribute("role", "progressbar");
  join.firstChild.setAttribute("aria-valuemin", "0");
  join.firstChild.setAttribute("aria-valuemax", "100");
  join.firstChild.setAttribute("aria-label", "State fetched");
  return make("li", "node", null, [head, make("p", "why"), join, make("dl")]);
}

function updateNode(card, node, now_s) {
  const [head, why, join, list] = card.children;
  const [word, level, sign] = ofNode(node.state);
  setData(card, "level", level);
  setData(card, "state", node.state);
  setText(head.firstChild, node.id);
  head.firstChild.title = node.id;
  setText(head.lastChild, `${sign} ${word}`);
  setText(why, node.why ?? "");
  setHidden(why, !node.why);
  setHidden(join, !node.join);
  if (node.join) {
    const known = node.join.percent !== null;
    setHidden(join.firstChild, !known);
    join.firstChild.firstChild.style.width = `${node.join.percent ?? 0}%`;
    join.firstChild.setAttribute("aria-valuenow", String(Math.round(node.join.percent ?? 0)));
    const parts = [node.join.state];
    if (known) parts.push(format.percent(node.join.percent / 100, 0));
    if (node.join.bytes_per_s !== null) parts.push(`${format.bytes(node.join.bytes_per_s)}/s`);
    setText(join.lastChild, parts.join(" · "));
  }
  const silent = node.last_at_s === null ? null : Math.max(0, now_s - node.last_at_s);
  const rows = [
    ["Loss", format.loss(node.loss)],
    ["Tokens/s", format.count(node.tokens_per_s)],
    ["Step", format.whole(node.step)],
    ["MFU", format.percent(node.mfu)],
    ["Sent", format.bytes(node.sent_bytes)],
    ["Received", format.bytes(node.received_bytes)],
    ["Memory", format.bytes(node.memory_bytes)],
    ["Digest", node.digest ? node.digest.slice(0, 8) : format.UNKNOWN],
    ["Key", node.key ?? format.UNKNOWN],
    ["Heard", silent === null ? format.UNKNOWN : format.age(silent)],
    ["Starts", format.whole(node.starts)],
  ];
  keyed(list, rows, ([name]) => name, ([name]) => make("div", "", null, [make("dt", "", name), make("dd")]),
    (row, [name, value]) => {
      setText(row.lastChild, value);
      row.lastChild.classList.toggle("mono", name === "Digest" || name === "Key");
    });
}

export function drawMembership(membership, from_s, to_s) {
  const parent = byId("membership");
  if (!membership.length || from_s === null) {
    byId("membership-legend").replaceChildren();
    parent.replaceChildren(make("p", "none", "No node has been a member yet."));
    return;
  }
  const length = Math.max(to_s - from_s, 1e-3);
  const share = (at) => Math.min(100, Math.max(0, (100 * (at - from_s)) / length));
  const seen = new Set();
  const rows = membership.flatMap(({ id, spans }) => {
    const lane = make("div", "lane");
    const words = [];
    for (const [start, end, state] of spans) {
      seen.add(state);
      const left = share(start);
      const span = make("div", "span");
      span.dataset.state = state;
      span.style.left = `${left}%`;
      span.style.width = `${share(end ?? to_s) - left}%`;
      span.title = `${ofNode(state)[0]} from ${format.moment(start, to_s)}, ${format.duration((end ?? to_s) - start)}`;
      words.push(span.title);
      lane.append(span);
    }
    lane.setAttribute("role", "img");
    lane.setAttribute("aria-label", `${id}: ${words.slice(-6).join("; ")}`);
    const name = make("span", "name mono", id);
    name.title = id;
    return [name, lane];
  });
  const many = parent.clientWidth < 480 ? 2 : 5;
  const axis = make("div", "axis");
  for (let tick = 0; tick <= many; tick += 1) {
    const label = make("span", "", format.moment(from_s + (length * tick) / many, to_s));
    label.style.left = `${(100 * tick) / many}%`;
    axis.append(label);
  }
  parent.replaceChildren(...rows, make("span"), axis);
  const legend = Object.keys(NODE_STATES).filter((state) => seen.has(state));
  byId("membership-legend").replaceChildren(...legend.map((state) => {
    const swatch = make("span", "swatch");
    swatch.dataset.state = state;
    return make("li", "", null, [swatch, document.createTextNode(ofNode(state)[0])]);
  }));
}

export function drawLinks(links) {
  const parent = byId("links");
  if (!links.length) {
    parent.replaceChildren(make("p", "none", "No link measured yet. The matrix appears after two nodes have exchanged data."));
    return;
  }
  const ids = [...new Set(links.flatMap((link) => [link.from, link.to]))].sort((a, b) => a.localeCompare(b, "en", { numeric: true }));
  const found = new Map(links.map((link) => [JSON.stringify([link.from, link.to]), link]));
  const rates = links.map((link) => link.mbit_s).filter((rate) => rate !== null).sort((a, b) => a - b);
  const middle = rates[Math.floor(rates.length / 2)];
  const heading = (text, scope) => {
    const th = make("th", "mono", text);
    th.scope = scope;
    th.title = text;
    return th;
  };
  const rows = ids.map((from) => make("tr", "", null, [
    heading(from, "row"), ...ids.map((to) => cell(from, to, found.get(JSON.stringify([from, to])), middle)),
  ]));
  const corner = make("td", "self", "from ╲ to");
  const table = make("table", `matrix${ids.length > 10 ? " is-dense" : ""}`, null, [
    make("thead", "", null, [make("tr", "", null, [corner, ...ids.map((to) => heading(to, "col"))])]),
    make("tbody", "", null, rows),
  ]);
  const left = parent.scrollLeft;
  parent.replaceChildren(table);
  parent.scrollLeft = left;
}

function cell(from, to, link, middle) {
  if (from === to) return make("td", "self", "·");
  if (link?.is_cut_off) return make("td", "is-cut", "✕ cut off");
  if (!link || (link.mbit_s === null && link.rtt_ms === null)) return make("td", "", format.UNKNOWN);
  const rtt = format.ms(link.rtt_ms);
  const td = make("td", "", null, [make("b", "", format.mbit(link.mbit_s)), make("small", "", rtt)]);
  if (link.mbit_s !== null) td.dataset.speed = link.mbit_s < 0.4 * middle ? "slow" : link.mbit_s >= middle ? "fast" : "";
  td.title = `${from} to ${to}: ${format.mbit(link.mbit_s)} Mbit/s${rtt && `, ${rtt} round trip`}`;
  return td;
}

export function drawEvents(events, onlyWarnings, now_s) {
  const parent = byId("events");
  const shown = events.filter((event) => !onlyWarnings || event.level !== "info").toReversed();
  if (!shown.length) {
    parent.replaceChildren(make("li", "none", onlyWarnings && events.length ? "No warnings." : "No events yet."));
    return;
  }
  const times = new Map();
  const keyOf = (event) => {
    const key = `${event.at_s} ${event.node_id} ${event.kind} ${event.words}`;
    times.set(key, (times.get(key) ?? 0) + 1);
    return `${key} ${times.get(key)}`;
  };
  keyed(parent, shown, keyOf, (event) => {
    const time = make("time", "", format.moment(event.at_s, now_s));
    time.dateTime = new Date(event.at_s * 1000).toISOString();
    time.title = format.clock(event.at_s, true);
    const isNamed = event.words.startsWith(event.node_id);
    const who = make("span", "who mono", isNamed ? "" : event.node_id);
    who.title = event.node_id;
    const sign = { warning: "▲ ", error: "✕ " }[event.level] ?? "";
    const item = make("li", "", null, [time, who, make("span", "what", sign + event.words)]);
    item.dataset.level = event.level;
    return item;
  }, () => {});
}

export function drawSample(sample, now_s) {
  setText(byId("sample"), sample?.text ?? "No sample generated yet.");
  byId("sample").classList.toggle("muted", !sample);
  setText(byId("sample-from"), sample ? `${sample.node_id}, ${format.moment(sample.at_s, now_s)}` : "");
}

export function drawCheckpoints(checkpoints, now_s) {
  const parent = byId("checkpoints");
  if (!checkpoints.length) {
    parent.replaceChildren(make("p", "none", "No checkpoint yet."));
    return;
  }
  const row = (tag, texts) => make("tr", "", null, texts.map((text) => make(tag, "", text)));
  const rows = checkpoints.toReversed().slice(0, 8).map((one) => row("td", [
    format.whole(one.step), format.whole(one.round), format.moment(one.at_s, now_s), format.bytes(one.bytes), format.duration(one.took_s),
  ]));
  parent.replaceChildren(make("table", "list", null, [
    make("thead", "", null, [row("th", ["Step", "Round", "Durable at", "Size", "Took"])]), make("tbody", "", null, rows),
  ]));
}

/** Draw the extra sections of a saved page: sentences and tables under titles. */
export function drawTold(parent, parts) {
  parent.replaceChildren(...parts.map(({ title, about, lines, tables }) => make("section", "card told", null, [
    make("div", "card-head", null, [make("h2", "", title)]),
    make("p", "muted", about),
    make("ul", "", null, lines.map((line) => make("li", "", line))),
    ...tables.map(toldTable),
  ])));
}

function toldTable({ title, columns, rows, is_folded, is_marked }) {
  const row = (tag, texts) => make("tr", "", null, texts.map((text) => make(tag, "", text)));
  const table = make("div", "scroll", null, [make("table", `list${is_marked ? " is-marked" : ""}`, null, [
    make("thead", "", null, [row("th", columns)]), make("tbody", "", null, rows.map((texts) => row("td", texts))),
  ])]);
  const parts = [...(title ? [make(is_folded ? "summary" : "h3", "", title)] : []), table];
  return make(is_folded ? "details" : "div", "", null, parts);
}
