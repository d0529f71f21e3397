// @ts-check
// Several jobs side by side: the same metric in one chart, what they set differently, how they ended.
import { fill, h, scrolled } from "/static/dom.js";
import { Chart } from "/static/charts.js";
import { download, number } from "/static/format.js";
import { parallel } from "/static/figures.js";
import { rows } from "/static/live.js";
import { bestOf } from "/static/measured.js";
import { seriesOf } from "/static/job.js";
import { jobLink } from "/static/parts.js";
import { read } from "/static/session.js";

const TOPIC = "overview";
const MOST = 32;
const MOST_LANES = 12;
const SEEDS = ["seed", "name"];

/**
 * Jobs that differ in seed and name alone as one: means over them, with the mean ± one deviation as a band.
 * @param {any[]} jobs @param {string[]} keys
 */
export function grouped(jobs, keys) {
  /** @type {Map<string, any[]>} */
  const groups = new Map();
  for (const job of jobs) {
    const form = JSON.stringify(keys.filter((key) => !SEEDS.includes(key)).map((key) => job.settings.get(key) ?? null));
    groups.set(form, [...(groups.get(form) ?? []), job]);
  }
  return [...groups.values()].map((members) => {
    if (members.length === 1) return members[0];
    const series = new Map([...members[0].series.keys()].map((metric) => [metric, [averaged(members.map((job) => job.series.get(metric)?.[0]).filter(Boolean))]]));
    const settings = new Map([...members[0].settings].filter(([key]) => !SEEDS.includes(key)));
    return { label: `${members[0].label} and ${members.length - 1} more seeds`, link: "", best: "", settings, series };
  });
}

/** @param {import("/static/charts.js").Series[]} several */
function averaged(several) {
  /** @type {Map<number, number[]>} */
  const found = new Map();
  for (const each of several) for (const [round, value] of each.points) found.set(round, [...(found.get(round) ?? []), value]);
  /** @type {import("/static/charts.js").Series} */
  const made = { label: "", points: [], low: new Map(), high: new Map(), bounds: ["mean + deviation", "mean − deviation"] };
  for (const [round, values] of [...found].sort(([one], [other]) => one - other)) {
    const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
    const spread = Math.sqrt(values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / Math.max(1, values.length - 1));
    made.points.push([round, mean]);
    made.low?.set(round, mean - spread);
    made.high?.set(round, mean + spread);
  }
  return made;
}

export function compare() {
  const asked = new URLSearchParams(location.search).get("jobs")?.split(",").filter(Boolean) ?? [];
  const list = h("fieldset", { class: "choice" }, h("legend", {}, "Jobs"));
  const result = h("div");
  const together = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", id: "together" }));
  together.addEventListener("change", () => load());
  const chosen = new Set(asked.slice(0, MOST));
  /** @type {Chart[]} */
  let charts = [];
  let turn = 0;

  async function load() {
    const mine = ++turn;
    history.replaceState(null, "", chosen.size ? `/compare?jobs=${[...chosen].map(encodeURIComponent).join(",")}` : "/compare");
    if (chosen.size < 2) return fill(result, h("p", { class: "empty" }, "Choose two jobs or more."));
    try {
      const found = await Promise.all([...chosen].map((id) => read(`/api/job/${encodeURIComponent(id)}`)));
      if (mine === turn) show(found);
    } catch (error) {
      fill(result, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  }

  /** @param {any[]} found */
  function show(found) {
    charts.forEach((chart) => chart.close());
    charts = [];
    const keys = [...new Set(found.flatMap((each) => each.settings.map((/** @type {any} */ setting) => setting.key)))];
    const jobs = found.map((each) => ({ label: `${each.job.name} ${each.job.id.slice(0, 6)}`, link: each.job.id, best: bestOf(each.job, each.settings), settings: new Map(each.settings.map((/** @type {any} */ setting) => [setting.key, setting.value])), series: seriesOf(each.rounds) }));
    const named = together.checked ? grouped(jobs, keys) : jobs;
    const metrics = [...new Set(named.flatMap((each) => [...each.series.keys()]))];
    const last = (/** @type {any} */ each, /** @type {string} */ metric) => each.series.get(metric)?.[0]?.points.at(-1)?.[1];
    const value = (/** @type {any} */ each, /** @type {string} */ key) => each.settings.get(key) ?? "–";
    const kept = named.some((each) => each.best);
    const differing = keys.filter((key) => new Set(named.map((each) => value(each, key))).size > 1);
    const table = [["", ...named.map((each) => each.label)], ...differing.map((key) => [key, ...named.map((each) => value(each, key))]), ...metrics.map((metric) => [metric, ...named.map((each) => last(each, metric))]), ...(kept ? [["best model", ...named.map((each) => each.best)]] : [])];
    const places = metrics.map((metric) => {
      const chart = new Chart(metric);
      charts.push(chart);
      return { chart, series: named.flatMap((each) => (each.series.get(metric) ?? []).slice(0, 1).map((/** @type {any} */ series) => ({ ...series, label: each.label, ...(series.bounds ? {} : { low: undefined, high: undefined }) }))) };
    });
    const lanes = [
      ...differing.filter((key) => key !== "name").map((key) => ({ name: key, values: named.map((each) => each.settings.get(key) ?? null) })),
      ...metrics.map((metric) => ({ name: metric, values: named.map((each) => last(each, metric) ?? null) })),
    ].filter((lane) => lane.values.some((each) => each !== null));
    fill(result,
      lanes.length > 1 ? parallel("Settings that differ, and what came of them", lanes.slice(0, MOST_LANES), named.map((each) => each.label)) : null,
      h("div", { class: "charts" }, places.map(({ chart }) => chart.node)),
      scrolled("Side by side", h("table", {}, h("caption", {}, "What is set differently, and each metric's last value"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting or metric"), named.map((each) => h("th", { scope: "col" }, each.link ? jobLink(each.link, each.label) : each.label)))),
        h("tbody", {}, differing.map((key) => h("tr", {}, h("th", { scope: "row" }, key), named.map((each) => h("td", {}, value(each, key))))), metrics.map((metric) => h("tr", { class: "metric" }, h("th", { scope: "row" }, metric), named.map((each) => h("td", { class: "number" }, number(last(each, metric)))))),
          kept ? h("tr", { class: "metric" }, h("th", { scope: "row" }, "best model"), named.map((each) => h("td", {}, each.best || "–"))) : null))),
      h("button", { type: "button", onclick: () => download("compare.csv", table) }, "CSV"));
    for (const { chart, series } of places) chart.show(series);
  }

  let shown = "";
  const update = () => {
    const all = Object.values(rows(TOPIC, "jobs")).sort((one, other) => other.submitted - one.submitted).slice(0, 100);
    const form = all.map((each) => `${each.id}${each.status}`).join();
    if (form === shown) return;
    shown = form;
    fill(list, h("legend", {}, "Jobs"), all.map((each) => h("label", {}, h("input", { type: "checkbox", value: each.id, checked: chosen.has(each.id) }), ` ${each.name} (${each.status})`)));
  };
  list.addEventListener("change", (event) => {
    const box = event.target;
    if (!(box instanceof HTMLInputElement)) return;
    if (box.checked && chosen.size < MOST) chosen.add(box.value);
    else {
      chosen.delete(box.value);
      box.checked = false;
    }
    load();
  });
  load();
  return { title: "Compare", node: h("div", {}, h("h1", {}, "Compare"), list, h("p", {}, together, h("label", { for: "together" }, " Jobs that differ in their seed alone as one: mean, and one deviation as a band")), result), topics: [TOPIC], update, close: () => charts.forEach((chart) => chart.close()) };
}
