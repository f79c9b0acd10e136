// Loss and throughput as uPlot charts. Data after the time shown is veiled.

import { byId, colour, make, setHidden, setText } from "./dom.js";
import * as format from "./format.js";

// Per axis: its name, how to format a value, and the position of a time of the run.
const X = {
  tokens: ["Tokens", (value) => format.count(value), (run) => run.tokens],
  time: ["Time", (value, newest) => format.moment(value, newest), (run, at_s) => at_s],
  bytes: ["Bytes sent", (value) => format.bytes(value), (run) => run.sent_bytes],
  step: ["Steps", (value) => format.count(value), (run) => run.step],
};

/** Merge series with their own x into one x, as uPlot expects. */
function joined(series) {
  const xs = [...new Set(series.flatMap((one) => one.x))].filter((x) => x !== null).sort((a, b) => a - b);
  const at = new Map(xs.map((x, index) => [x, index]));
  const columns = series.map((one) => {
    const ys = new Array(xs.length).fill(null);
    one.x.forEach((x, index) => {
      if (x !== null) ys[at.get(x)] = one.y[index];
    });
    return ys;
  });
  return [xs, ...columns];
}

class Chart {
  constructor(id, { isDashed = () => false, value, tick, floor, legend }) {
    Object.assign(this, { parent: byId(id), isDashed, value, tick, floor, legend, plot: null, shape: "", limit: null });
    new ResizeObserver(() => this.#fit()).observe(this.parent);
  }

  draw(series, by, limit) {
    this.limit = limit;
    this.by = by;
    const drawn = series.filter((one) => one.x.length);
    if (!drawn.length) {
      this.#clear();
      this.parent.replaceChildren(make("p", "none", "No data yet. The curve starts with the first round."));
      this.legend?.replaceChildren();
      return;
    }
    const shape = JSON.stringify([by, drawn.map((one) => one.key), document.documentElement.dataset.theme]);
    const data = joined(drawn);
    this.newest = data[0][data[0].length - 1];
    if (this.plot && shape === this.shape) this.plot.setData(data);
    else this.#build(drawn, data, shape);
    this.series = drawn;
    this.#tellLegend(null);
    const newest = drawn[0].y[drawn[0].y.length - 1];
    this.parent.setAttribute("role", "img");
    this.parent.setAttribute("aria-label", `${drawn.map((one) => one.title).join(", ")} against ${X[by][0].toLowerCase()}; newest ${this.value(newest)}`);
  }

  #clear() {
    this.plot?.destroy();
    this.plot = null;
    this.shape = "";
  }

  #build(series, data, shape) {
    this.#clear();
    this.parent.replaceChildren();
    this.shape = shape;
    const axis = { stroke: colour("muted"), font: `12px ${getComputedStyle(document.body).fontFamily}`, ticks: { show: false } };
    const grid = { stroke: colour("line"), width: 1 };
    const isNarrow = this.parent.clientWidth < 480;
    this.plot = new uPlot({
      width: this.parent.clientWidth,
      height: this.parent.clientHeight,
      scales: { x: { time: false }, y: { range: (plot, low, high) => this.#range(low, high) } },
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: false, y: false } },
      axes: [
        { ...axis, grid: { show: false }, space: isNarrow ? 64 : 80, size: 28, values: (plot, values) => values.map((value) => format.tick(this.#atX(value))) },
        { ...axis, grid, size: 46, space: 34, values: (plot, values) => values.map(this.tick) },
      ],
      series: [{}, ...series.map((one, index) => ({
        stroke: colour(`series-${(index % 6) + 1}`),
        width: this.isDashed(one.key) ? 2 : 1.75,
        dash: this.isDashed(one.key) ? [6, 4] : undefined,
        spanGaps: true,
        points: { show: (plot, place) => plot.data[place].filter((y) => y !== null).length < 3 },
      }))],
      hooks: {
        draw: [(plot) => this.#veil(plot)],
        setCursor: [(plot) => this.#tellLegend(plot.cursor.idx)],
      },
    }, data, this.parent);
  }

  #atX(value) {
    return X[this.by][1](value, this.newest);
  }

  #range(low, high) {
    const from = this.floor === undefined ? low : Math.min(this.floor, low);
    const room = (high - from || Math.abs(high) || 1) * 0.06;
    return [this.floor === undefined ? from - room : from, high + room];
  }

  #veil(plot) {
    if (this.limit === null) return;
    const { left, top, width, height } = plot.bbox;
    const x = Math.min(left + width, Math.max(left, plot.valToPos(this.limit, "x", true)));
    plot.ctx.save();
    plot.ctx.fillStyle = colour("veil");
    plot.ctx.fillRect(x, top, left + width - x, height);
    plot.ctx.fillStyle = colour("warning");
    plot.ctx.fillRect(x - 1, top, 2, height);
    plot.ctx.restore();
  }

  #tellLegend(index) {
    if (!this.legend || !this.series) return;
    const x = index === null || index === undefined ? null : this.plot.data[0][index];
    const items = this.series.map((one, place) => {
      const values = this.plot.data[place + 1];
      let at = index ?? values.length - 1;
      while (at > 0 && (values[at] === null || (index === null && this.limit !== null && this.plot.data[0][at] > this.limit))) at -= 1;
      const stroke = make("span", `stroke${this.isDashed(one.key) ? " is-dashed" : ""}`);
      stroke.style.color = colour(`series-${(place % 6) + 1}`);
      return make("li", "", null, [stroke, document.createTextNode(one.title), make("b", "", this.value(values[at]))]);
    });
    if (x !== null) items.push(make("li", "", `at ${this.#atX(x)}`));
    this.legend.replaceChildren(...items);
  }

  #fit() {
    const { clientWidth: width, clientHeight: height } = this.parent;
    if (this.plot && width && (width !== this.plot.width || height !== this.plot.height)) this.plot.setSize({ width, height });
  }
}

let charts = null;

/** Draw all charts from a document of /api/series; `moment` is the state that is shown, if it is of the past. */
export function drawCharts({ by, series }, moment) {
  charts ??= {
    loss: new Chart("loss-chart", {
      isDashed: (key) => key === "held_out", value: format.loss, tick: (value) => String(Number(value.toFixed(4))), legend: byId("loss-legend"),
    }),
    rate: new Chart("rate-chart", { value: (value) => format.count(value), tick: (value) => format.tick(format.count(value)), floor: 0 }),
    nodes: new Chart("members-chart", { value: (value) => format.count(value), tick: (value) => format.tick(format.count(value)), floor: 0 }),
    mfu: new Chart("mfu-chart", { value: format.percent, tick: (value) => format.percent(value, 0), floor: 0 }),
  };
  setHidden(byId("mfu-chart").parentElement, !series.some((one) => one.key === "mfu" && one.x.length)); // of a GPU that is known
  const limit = moment ? X[by][2](moment.run, moment.at_s) : null;
  charts.loss.draw(series.filter((one) => one.key === "loss" || one.key === "held_out" || one.key.startsWith("loss/")), by, limit);
  for (const [name, key] of [["rate", "tokens_per_s"], ["nodes", "nodes"], ["mfu", "mfu"]]) {
    charts[name].draw(series.filter((one) => one.key === key), by, limit);
  }
  setText(byId("rate-title").lastElementChild, `tokens/s, against ${X[by][0].toLowerCase()}`);
}
