// @ts-check
// Pictures of answers, drawn as SVG: histograms, survival curves with their bands, estimates with their intervals.
import { COLOURS } from "/static/charts.js";
import { h, scrolled } from "/static/dom.js";
import { number } from "/static/format.js";

const WIDE = 560;
const HIGH = 240;
const LEFT = 56;
const BELOW = 36;
const DASHES = ["", "7 3", "2 3", "10 3 2 3"];

/** @param {string} tag @param {Record<string, any>} props @param {...any} children */
function svg(tag, props, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(props)) made.setAttribute(name, String(value));
  for (const child of children.flat(2)) if (child !== null) made.append(child);
  return made;
}

/** @param {number} low @param {number} high */
function scale(low, high, /** @type {number} */ from, /** @type {number} */ to) {
  const span = high - low || 1;
  return (/** @type {number} */ value) => from + ((value - low) / span) * (to - from);
}

/** Round numbers between two, about five. @param {number} low @param {number} high */
export function ticksOf(low, high) {
  const rough = (high - low || 1) / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= rough) ?? rough;
  const found = [];
  for (let at = Math.ceil(low / step); at * step <= high + step * 1e-9; at += 1) found.push(at * step);
  return found;
}

/**
 * A picture of what an answer's values hold; null where they are none that is drawn.
 * @param {any} answer
 */
export function figureOf(answer) {
  const { values } = answer;
  if (values.edges && values.counts) return histogram(answer);
  if (values.curves) return survival(answer);
  if (values.terms && values.intervals) return estimates(answer);
  return null;
}

/**
 * Parallel coordinates: a line for each job through its value on each axis, numbers by size, words in order.
 * @param {string} title @param {{name: string, values: (number | string | null)[]}[]} lanes a value for each job
 * @param {string[]} labels of the jobs
 */
export function parallel(title, lanes, labels) {
  const wide = Math.max(WIDE, 150 * lanes.length);
  const high = HIGH + 30;
  const x = (/** @type {number} */ lane) => 70 + (lane * (wide - 140)) / Math.max(1, lanes.length - 1);
  const placed = lanes.map((lane) => {
    const numbers = lane.values.map((value) => (value === null || value === "" ? NaN : Number(value)));
    const measured = lane.values.every((value, at) => value === null || Number.isFinite(numbers[at]));
    const words = [...new Set(lane.values.filter((value) => value !== null).map(String))].sort();
    const known = numbers.filter((value) => Number.isFinite(value));
    const ends = measured ? [Math.min(...known), Math.max(...known)] : [0, words.length - 1];
    const y = scale(ends[0], ends[1], high - 50, 30);
    return {
      name: lane.name,
      marks: measured ? [...new Set(ends)].map((value) => ({ at: y(value), text: number(value) })) : words.map((word, at) => ({ at: y(at), text: word })),
      at: lane.values.map((value, job) => (value === null ? null : y(measured ? numbers[job] : words.indexOf(String(value))))),
    };
  });
  const drawn = placed.flatMap((lane, at) => [
    svg("path", { d: `M${x(at)} 26V${high - 46}`, class: "grid" }),
    svg("text", { x: x(at), y: high - 22, "text-anchor": "middle" }, lane.name.length > 24 ? `…${lane.name.slice(-23)}` : lane.name),
    ...lane.marks.map((mark) => svg("text", { x: x(at) + 6, y: mark.at + 4 }, mark.text.length > 14 ? `${mark.text.slice(0, 13)}…` : mark.text)),
  ]);
  const lines = labels.map((label, job) => {
    const points = placed.map((lane, at) => [x(at), lane.at[job]]).filter(([, at]) => at !== null);
    return svg("path", { ...look(job), d: points.map(([across, up], at) => `${at ? "L" : "M"}${across} ${up}`).join("") }, svg("title", {}, label));
  });
  const picture = svg("svg", { viewBox: `0 0 ${wide} ${high}`, width: wide, height: high, role: "img", "aria-label": `${title}; the table below holds the numbers`, class: "drawn parallel" }, lines, drawn);
  return h("figure", { class: "chart" }, h("figcaption", {}, title), scrolled(title, picture), legendOf(labels));
}

/** @param {string[]} labels */
function legendOf(labels) {
  return h("p", { class: "words" }, labels.flatMap((label, at) => [svg("svg", { viewBox: "0 0 24 8", class: "swatch", "aria-hidden": "true" }, svg("path", { d: "M0 4H24", ...look(at) })), ` ${label}  `]));
}

/** @param {string} title @param {Node[]} drawn @param {string[]} legend @param {number} [high] */
function figure(title, drawn, legend, high = HIGH) {
  return h("figure", { class: "chart" },
    svg("svg", { viewBox: `0 0 ${WIDE} ${high}`, role: "img", "aria-label": `${title}; the table beside it holds the numbers`, class: "drawn" }, drawn),
    legend.length > 1 ? legendOf(legend) : null);
}

/** @param {number} at */
function look(at) {
  return { stroke: COLOURS[at % COLOURS.length], "stroke-width": 2, fill: "none", "stroke-dasharray": DASHES[Math.floor(at / COLOURS.length) % DASHES.length] };
}

/** @param {(value: number) => number} x @param {(value: number) => number} y @param {number[]} across @param {number[]} up @param {string} name @param {number} high */
function axes(x, y, across, up, name, high) {
  return [
    ...across.map((value) => svg("text", { x: x(value), y: high - BELOW + 16, "text-anchor": "middle" }, number(value))),
    ...up.flatMap((value) => [svg("path", { d: `M${LEFT} ${y(value)}H${WIDE - 8}`, class: "grid" }), svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, number(value))]),
    svg("text", { x: (LEFT + WIDE) / 2, y: high - 4, "text-anchor": "middle" }, name),
  ];
}

/** @param {any} answer */
function histogram(answer) {
  // Noisy counts have intervals, and may be below 0.
  const { edges, counts, intervals = {} } = answer.values;
  const groups = Object.entries(counts);
  const spans = /** @type {[number, number][][]} */ (groups.map(([label]) => intervals[label] ?? []));
  const most = Math.max(1, ...groups.flatMap(([, each]) => each.map((/** @type {any} */ count) => count ?? 0)), ...spans.flat(2));
  const x = scale(edges[0], edges.at(-1), LEFT, WIDE - 12);
  const y = scale(0, most, HIGH - BELOW, 10);
  const bars = groups.map(([, each], at) => svg("path", { ...look(at), d: each.map((/** @type {any} */ count, /** @type {number} */ bin) => (count === null ? "" : `M${x(edges[bin])} ${y(0)}V${y(Math.max(0, count))}H${x(edges[bin + 1])}V${y(0)}`)).join("") }));
  const ends = spans.map((each, at) => svg("path", { ...look(at), d: each.map(([low, high], bin) => `M${x((edges[bin] + edges[bin + 1]) / 2)} ${y(low)}V${y(high)}`).join("") }));
  return figure(answer.title, [...axes(x, y, ticksOf(edges[0], edges.at(-1)), ticksOf(0, most), String(answer.header[0]).replace(/ from$/, ""), HIGH), ...bars, ...ends], groups.map(([label]) => label));
}

/** @param {any} answer */
function survival(answer) {
  const groups = /** @type {[string, any][]} */ (Object.entries(answer.values.curves));
  const last = Math.max(1e-9, ...groups.flatMap(([, curve]) => curve.times));
  const x = scale(0, last, LEFT, WIDE - 12);
  const y = scale(0, 1, HIGH - BELOW, 10);
  const steps = (/** @type {number[]} */ times, /** @type {(number | null)[]} */ values) => {
    let path = `M${x(0)} ${y(1)}`;
    times.forEach((time, at) => {
      path += `H${x(time)}`;
      const value = values[at];
      if (value !== null && value !== undefined) path += `V${y(value)}`;
    });
    return path;
  };
  const drawn = groups.flatMap(([, curve], at) => [
    ...["lower", "upper"].map((key) => svg("path", { ...look(at), d: steps(curve.times, curve[key]), "stroke-width": 0.7, opacity: 0.7 })),
    svg("path", { ...look(at), d: steps(curve.times, curve.survival) }),
  ]);
  return figure(answer.title, [...axes(x, y, ticksOf(0, last), [0, 0.25, 0.5, 0.75, 1], "time; share without the event, with its 95 % band", HIGH), ...drawn], groups.map(([label]) => label));
}

/** @param {any} answer */
function estimates(answer) {
  const { terms, coefficients, intervals } = answer.values;
  const shown = terms.map((/** @type {string} */ term, /** @type {number} */ at) => ({ term, value: coefficients[at], span: intervals[at] })).filter((/** @type {any} */ each) => each.term !== "intercept" && each.value !== null && each.span?.every((/** @type {any} */ end) => end !== null));
  if (!shown.length) return null;
  const high = BELOW + 20 + 24 * shown.length;
  const left = 160;
  const ends = [0, ...shown.flatMap((/** @type {any} */ each) => each.span)];
  const x = scale(Math.min(...ends), Math.max(...ends), left, WIDE - 20);
  const drawn = shown.flatMap((/** @type {any} */ each, /** @type {number} */ at) => {
    const y = 20 + 24 * at;
    return [svg("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, each.term), svg("path", { ...look(0), d: `M${x(each.span[0])} ${y}H${x(each.span[1])}` }), svg("circle", { cx: x(each.value), cy: y, r: 4, fill: COLOURS[0] })];
  });
  const across = ticksOf(Math.min(...ends), Math.max(...ends)).map((value) => svg("text", { x: x(value), y: high - BELOW + 16, "text-anchor": "middle" }, number(value)));
  return figure(answer.title, [svg("path", { d: `M${x(0)} 8V${high - BELOW}`, class: "grid zero" }), ...across, svg("text", { x: (left + WIDE) / 2, y: high - 4, "text-anchor": "middle" }, "coefficient, 95 % interval"), ...drawn], [], high);
}
