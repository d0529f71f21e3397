// @ts-check
// Several jobs side by side: the same metric in one chart, what they set differently, how they ended.
import { fill, h } from "/static/dom.js";
import { Chart } from "/static/charts.js";
import { download, number } from "/static/format.js";
import { rows } from "/static/live.js";
import { seriesOf } from "/static/job.js";
import { jobLink } from "/static/parts.js";
import { read } from "/static/session.js";

const TOPIC = "overview";
const MOST = 12;

export function compare() {
  const asked = new URLSearchParams(location.search).get("jobs")?.split(",").filter(Boolean) ?? [];
  const list = h("fieldset", { class: "choice" }, h("legend", {}, "Jobs"));
  const result = h("div");
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
    const named = found.map((each) => ({ label: `${each.job.name} ${each.job.id.slice(0, 6)}`, series: seriesOf(each.rounds), job: each }));
    const metrics = [...new Set(named.flatMap((each) => [...each.series.keys()]))];
    const last = (/** @type {any} */ each, /** @type {string} */ metric) => each.series.get(metric)?.[0]?.points.at(-1)?.[1];
    const keys = [...new Set(found.flatMap((each) => each.settings.map((/** @type {any} */ setting) => setting.key)))];
    const value = (/** @type {any} */ each, /** @type {string} */ key) => each.job.settings.find((/** @type {any} */ setting) => setting.key === key)?.value ?? "–";
    const differing = keys.filter((key) => new Set(named.map((each) => value(each, key))).size > 1);
    const table = [["", ...named.map((each) => each.label)], ...differing.map((key) => [key, ...named.map((each) => value(each, key))]), ...metrics.map((metric) => [metric, ...named.map((each) => last(each, metric))])];
    const places = metrics.map((metric) => {
      const chart = new Chart(metric);
      charts.push(chart);
      return { chart, series: named.flatMap((each) => (each.series.get(metric) ?? []).slice(0, 1).map((series) => ({ label: each.label, points: series.points }))) };
    });
    fill(result,
      h("div", { class: "charts" }, places.map(({ chart }) => chart.node)),
      h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Side by side" }, h("table", {}, h("caption", {}, "What is set differently, and each metric's last value"),
        h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Setting or metric"), named.map((each) => h("th", { scope: "col" }, jobLink(each.job.job.id, each.label))))),
        h("tbody", {}, differing.map((key) => h("tr", {}, h("th", { scope: "row" }, key), named.map((each) => h("td", {}, value(each, key))))), metrics.map((metric) => h("tr", { class: "metric" }, h("th", { scope: "row" }, metric), named.map((each) => h("td", { class: "number" }, number(last(each, metric))))))))),
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
  return { title: "Compare", node: h("div", {}, h("h1", {}, "Compare"), list, result), topics: [TOPIC], update, close: () => charts.forEach((chart) => chart.close()) };
}
