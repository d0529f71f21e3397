// @ts-check
// Where a job's newest model comes from: the coordinator's signed statement, asked for when somebody opens it.
import { fill, h, scrolled } from "/static/dom.js";
import { number, save, when } from "/static/format.js";
import { may, read } from "/static/session.js";

const MOST_ROUNDS = 50;

/** @param {string} id @param {string} name of the job */
export function provenance(id, name) {
  const told = h("div", {}, h("p", { class: "empty" }, "Looking…"));
  const node = h("details", { class: "provenance" }, h("summary", {}, "Where the newest model comes from, as the coordinator signs it"), told);
  node.addEventListener("toggle", async () => {
    if (!(/** @type {HTMLDetailsElement} */ (node).open)) return;
    try {
      const { statement: text } = await read(`/api/read/provenance?job=${encodeURIComponent(id)}`);
      fill(told, statementOf(JSON.parse(text).statement, text, name));
    } catch (error) {
      fill(told, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  });
  return may("Administration/GetProvenance") ? node : h("div");
}

/** @param {any} said @param {string} text the signed document @param {string} name */
function statementOf(said, text, name) {
  const facts = [
    ["Model", h("code", {}, said.model)],
    ["Began with", h("code", {}, said.initial_model)],
    ["Job's text", h("code", {}, said.config)],
    ["Submitted by", said.submitter],
    ["Level of privacy", said.privacy.level ?? "none"],
    ["Coordinator", `${said.coordinator}, version ${said.version}`],
    ["Signed", when(said.time)],
  ];
  const rounds = said.rounds.slice(-MOST_ROUNDS).reverse();
  const silos = (/** @type {any} */ round) => (round.withheld ? "secret" : `${round.participants.length} of ${round.cohort}`);
  return [
    scrolled("What is signed", h("table", { class: "settings" }, h("caption", {}, "What is signed"), h("tbody", {}, facts.map(([key, value]) => h("tr", {}, h("th", { scope: "row" }, key), h("td", {}, value)))))),
    scrolled("Its rounds", h(
      "table",
      {},
      h("caption", {}, said.rounds.length > MOST_ROUNDS ? `The newest ${MOST_ROUNDS} of ${said.rounds.length} rounds; the signed statement has all` : "Its rounds"),
      h("thead", {}, h("tr", {}, ["Round", "Committed", "Silos in it", "ε so far", "Model"].map((title) => h("th", { scope: "col" }, title)))),
      h("tbody", {}, rounds.map((/** @type {any} */ round) =>
        h("tr", {}, h("td", {}, `${round.round}${round.attempt > 1 ? `.${round.attempt}` : ""}`), h("td", {}, when(round.ended)), h("td", { title: (round.participants ?? []).join(", ") }, silos(round)), h("td", {}, "epsilon" in round.charge ? number(round.charge.epsilon) : "–"), h("td", {}, h("code", {}, round.model.slice(0, 12)))))),
    )),
    h("p", {}, "Silos have pseudonyms of this job. Keep the statement beside the model; ", h("code", {}, "roundtable model verify"), " checks both without a network."),
    h("button", { type: "button", onclick: () => save(`${name}-provenance.json`, text, "application/json") }, "Signed statement as JSON"),
  ];
}
