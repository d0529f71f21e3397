// @ts-check
// Analyses: which there are, and the answers of one as tables and pictures.
import { fill, h, Table, scrolled } from "/static/dom.js";
import { figureOf } from "/static/figures.js";
import { download, number, when } from "/static/format.js";
import { rows } from "/static/live.js";
import { badge, problemOf, progress } from "/static/parts.js";
import { may, read } from "/static/session.js";

const TOPIC = "overview";

export function analyses() {
  const problem = h("div");
  const table = new Table(
    "Analyses",
    [
      { title: "Analysis", cell: (job) => h("a", { href: `/analyses/${encodeURIComponent(job.id)}`, "data-link": true }, job.name) },
      { title: "State", cell: (job) => badge(job.status) },
      { title: "Rounds", cell: (job) => progress(job.rounds_done, job.rounds) },
      { title: "Submitted", cell: (job) => h("span", { class: "nowrap" }, when(job.submitted)) },
      { title: "By", cell: (job) => job.submitter },
      { title: "Why", cell: (job) => job.reason },
    ],
    "No analysis was asked for yet. `roundtable analyse survey.toml --coordinator HOST:PORT` asks the silos.",
  );
  const update = () => {
    fill(problem, problemOf(TOPIC));
    const found = Object.values(rows(TOPIC, "jobs")).filter((job) => job.algorithm === "analysis");
    table.show(found.sort((one, other) => other.submitted - one.submitted).map((job) => [job.id, job]));
  };
  return { title: "Analyses", node: h("div", {}, h("h1", {}, "Analyses"), problem, table.node), topics: [TOPIC], update };
}

/** @param {string} id */
export function analysis(id) {
  const topic = `job:${id}`;
  const title = h("h1", {}, id);
  const answers = h("div", {}, h("p", { class: "empty" }, "Looking…"));
  let shown = "";

  async function load() {
    if (!may("Operators/GetArtifact")) return fill(answers, h("p", { class: "empty" }, "Answers are for data scientists, operators and administrators."));
    try {
      const found = await read(`/api/analysis/${encodeURIComponent(id)}`);
      fill(answers,
        h("p", {}, `${found.silos} silos answered in ${found.rounds} ${found.rounds === 1 ? "round" : "rounds"}; ${howSeen(found)}`),
        found.answers.map((/** @type {any} */ answer) => answerOf(answer)),
        h("div", { class: "bar" }, h("button", { type: "button", onclick: () => download(`${found.name}.csv`, tableOf(found.answers)) }, "CSV"), h("button", { type: "button", onclick: () => print() }, "Print")));
    } catch (error) {
      fill(answers, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  }

  const update = () => {
    const job = rows(topic, "job")[""];
    if (!job || job.status === shown) return;
    shown = job.status;
    fill(title, job.name, " ", badge(job.status));
    if (job.status === "finished") load();
    else fill(answers, h("p", { class: "empty" }, `Its answers come at its end. ${job.reason}`));
  };
  const work = h("p", {}, h("a", { href: `/jobs/${encodeURIComponent(id)}`, "data-link": true }, "The job's rounds, silos and events"));
  return { title: "Analysis", node: h("div", {}, title, work, answers), topics: [topic], update };
}

/** @param {any} found */
function howSeen(found) {
  const spent = found.privacy;
  if (spent) return `each hid its rows by noise (ε = ${number(spent.epsilon)} at δ = ${spent.delta}, a row is there or not).`;
  return `${found.secure_aggregation ? "their sums were masked" : "each one's sums were seen"}. Cells of fewer than ${found.least_count} rows are hidden.`;
}

/** @param {any} answer */
function answerOf(answer) {
  const shown = (/** @type {any} */ value) => (typeof value === "number" ? h("td", { class: "number" }, number(value)) : h("td", {}, value === null ? "–" : String(value)));
  return h("section", {}, h("h2", {}, answer.title),
    answer.answered
      ? [
          figureOf(answer),
          scrolled(answer.title,
            h("table", {}, h("caption", {}, answer.title),
              h("thead", {}, h("tr", {}, answer.header.map((/** @type {string} */ name, /** @type {number} */ at) => h("th", { scope: "col", class: answer.rows.some((/** @type {any[]} */ row) => typeof row[at] === "number") && "number" }, name)))),
              h("tbody", {}, answer.rows.map((/** @type {any[]} */ row) => h("tr", {}, row.map(shown)))))),
          answer.hidden_cells ? h("p", { class: "words" }, `${answer.hidden_cells} cells are hidden: they hold too few rows, or would tell of one that does.`) : null,
          answer.notes.map((/** @type {string} */ note) => h("p", { class: "words" }, note)),
        ]
      : h("p", { class: "empty" }, `Not answered: ${answer.why}.`));
}

/** @param {any[]} answers */
function tableOf(answers) {
  return answers.flatMap((answer, at) => [...(at ? [[]] : []), [answer.title], ...(answer.answered ? [answer.header, ...answer.rows] : [["not answered", answer.why]])]);
}
