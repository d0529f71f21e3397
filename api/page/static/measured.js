// @ts-check
// What silos measured of the newest model, how evenly it serves them, and which models of a job there are.
import { h, scrolled } from "/static/dom.js";
import { bytes, number } from "/static/format.js";

/** @param {any} told of the newest round of which silos told figures, or null */
export function measuredOf(told) {
  if (!told?.columns.length) return h("p", { class: "empty" }, "No silo has told figures of its own yet, or the job's level of privacy withholds them.");
  const cells = (/** @type {(metric: string) => any} */ of) => told.columns.map((/** @type {string} */ metric) => h("td", { class: "number" }, of(metric) === undefined ? "" : number(of(metric))));
  const words = [["Mean", "mean"], ["Spread", "spread"], ["Worst tenth", "worst_tenth"]];
  const even = Object.keys(told.fairness).length ? words.map(([word, key]) => h("tr", {}, h("th", { scope: "row" }, word), cells((metric) => told.fairness[metric]?.[key]))) : null;
  return [
    scrolled("What each silo measured", h("table", {}, h("caption", {}, `After round ${told.round}; mean, standard deviation and worst tenth are over silos, each weighing alike`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Silo"), told.columns.map((/** @type {string} */ metric) => h("th", { scope: "col", class: "number" }, metric)))),
      h("tbody", {}, Object.entries(told.silos).map(([silo, values]) => h("tr", {}, h("td", {}, silo), cells((metric) => values[metric])))),
      h("tfoot", {}, even))),
    told.more ? h("p", { class: "words" }, `${told.more} more silos are not shown.`) : null,
  ];
}

/** The best model so far in words, where the job keeps it. @param {any} job @param {any[]} settings */
export function bestOf(job, settings) {
  const metric = settings?.find((each) => each.key === "stop.metric")?.value;
  return job.best ? `best: round ${job.best.round}, ${metric ?? "its metric"} ${number(job.best.value)}` : "";
}

/** @param {any} kept a job with its settings */
export function modelsOf(kept) {
  const { job } = kept;
  if (!job.model?.digest && !kept.initial_model?.digest) return [h("p", { class: "words" }, "A simulation keeps its models in the folder of --run-dir.")];
  const line = (/** @type {string} */ name, /** @type {any} */ artifact) => artifact?.digest && h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, h("code", {}, artifact.digest)), h("td", { class: "number" }, bytes(artifact.size)));
  return [
    scrolled("Models of the job", h("table", {}, h("caption", {}, "Models of the job, by digest"), h("thead", {}, h("tr", {}, ["Model", "Digest", "Size"].map((text, at) => h("th", { scope: "col", class: at === 2 && "number" }, text)))),
      h("tbody", {}, line("began with", kept.initial_model), line("newest", job.model), job.best && line(bestOf(job, kept.settings), job.best.model)))),
    h("p", {}, job.best ? "Download the best with " : "Download it with ", h("code", {}, `roundtable job model ${job.id}`), job.best ? [", the newest with ", h("code", {}, `roundtable job model ${job.id} --last`)] : null, "."),
  ];
}
