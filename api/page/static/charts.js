// @ts-check
// Curves by uPlot, in colours that colour-blind people tell apart (Okabe and Ito), with a table beside each.
import { fill, h } from "/static/dom.js";
import { number } from "/static/format.js";

export const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#666666"];
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];

/**
 * A chart of series over rounds.
 * @typedef {{label: string, points: [number, number][], low?: Map<number, number>, high?: Map<number, number>, bounds?: [string, string]}} Series
 */
export class Chart {
  /**
   * @param {string} title @param {string} unit of the values, or ""
   * @param {(first: number, last: number) => void} [look] a stretch that is drawn over with the mouse; 0, 0 at a double click
   */
  constructor(title, unit = "", look) {
    this.look = look;
    this.title = title;
    this.unit = unit;
    this.place = h("div", { class: "plot", "aria-hidden": "true" });
    this.words = h("p", { class: "words" });
    this.node = h("figure", { class: "chart" }, h("figcaption", {}, title), this.place, this.words);
    /** @type {any} */
    this.plot = null;
    this.form = "";
    this.watch = new ResizeObserver(() => this.plot?.setSize(this.size()));
    this.watch.observe(this.place);
  }

  size() {
    return { width: Math.max(240, this.place.clientWidth), height: 220 };
  }

  /** @param {Series[]} series */
  show(series) {
    const rounds = [...new Set(series.flatMap((each) => each.points.map(([round]) => round)))].sort((one, other) => one - other);
    /** @type {any[]} */
    const data = [rounds];
    /** @type {any[]} */
    const bands = [];
    /** @type {any[]} */
    const shape = [{ label: "round" }];
    series.forEach((each, index) => {
      const values = new Map(each.points);
      const colour = COLOURS[index % COLOURS.length];
      data.push(rounds.map((round) => values.get(round) ?? null));
      shape.push({ label: each.label, stroke: colour, width: 2, dash: DASHES[Math.floor(index / COLOURS.length) % DASHES.length], spanGaps: true, points: { show: rounds.length < 40 } });
      if (each.low && each.high) {
        const at = data.length;
        data.push(rounds.map((round) => each.high?.get(round) ?? null), rounds.map((round) => each.low?.get(round) ?? null));
        for (const word of each.bounds ?? ["highest silo", "lowest silo"]) shape.push({ label: word, stroke: colour, width: 0.5, alpha: 0.5, points: { show: false } });
        bands.push({ series: [at, at + 1], fill: `${colour}22` });
      }
    });
    const form = JSON.stringify(shape.map((each) => each.label));
    if (!rounds.length) {
      this.words.textContent = "No values yet.";
      return;
    }
    const Plot = /** @type {any} */ (window).uPlot;
    if (!this.plot || form !== this.form) {
      this.plot?.destroy();
      this.form = form;
      const style = getComputedStyle(document.body);
      const ink = style.color;
      const line = style.getPropertyValue("--line") || "#ccc";
      const axis = { stroke: ink, grid: { stroke: line, width: 1 }, ticks: { stroke: line } };
      const whole = (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map((tick) => (Number.isInteger(tick) ? String(tick) : ""));
      const options = { ...this.size(), series: shape, bands, scales: { x: { time: false } }, axes: [{ ...axis, values: whole, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] }, { ...axis, size: 60, values: (/** @type {any} */ _, /** @type {number[]} */ ticks) => ticks.map(number) }], legend: { live: false } };
      const { look } = this;
      if (look) {
        const chosen = (/** @type {any} */ plot) => plot.select.width > 5 && look(Math.max(1, Math.floor(plot.posToVal(plot.select.left, "x"))), Math.ceil(plot.posToVal(plot.select.left + plot.select.width, "x")));
        Object.assign(options, { cursor: { drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => look(0, 0) } }, hooks: { setSelect: [(/** @type {any} */ plot) => { if (plot.select.width > 0) { chosen(plot); plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); } }] } });
      }
      fill(this.place);
      this.plot = new Plot(options, data, this.place);
    } else this.plot.setData(data);
    this.words.textContent = series
      .filter((each) => each.points.length)
      .map((each) => {
        const [round, value] = each.points[each.points.length - 1];
        const best = each.points.map(([, point]) => point);
        return `${each.label}: ${number(value)}${this.unit} at round ${round}; between ${number(Math.min(...best))} and ${number(Math.max(...best))} so far.`;
      })
      .join(" ");
  }

  close() {
    this.watch.disconnect();
    this.plot?.destroy();
  }
}
