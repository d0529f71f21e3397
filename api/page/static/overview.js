// @ts-check
// What goes on at this moment, over all jobs and silos.
import { fill, h, Table } from "/static/dom.js";
import { bytes, duration, moment, number } from "/static/format.js";
import { heard, lines, rows } from "/static/live.js";
import { badge, eventLine, gravity, jobLink, problemOf, progress, tile } from "/static/parts.js";
import { may, read } from "/static/session.js";

const TOPIC = "overview";
const LIVING = ["running", "waiting", "paused"];

export function overview() {
  const problem = h("div");
  const tiles = h("section", { class: "tiles", "aria-label": "At a glance" });
  const table = new Table(
    "Jobs that are not over",
    [
      { title: "Job", cell: (job) => jobLink(job.id, job.name) },
      { title: "State", cell: (job) => badge(job.status) },
      { title: "Rounds", cell: (job) => progress(job.rounds_done, job.rounds) },
      { title: "Phase", cell: (job) => rows(TOPIC, "details")[job.id]?.phase ?? "" },
      { title: "What it waits for", cell: waitsFor },
      { title: "Until", cell: until },
    ],
    "No job is under way. `roundtable job submit job.toml` starts one.",
  );
  const incidents = h("ul", { class: "events" });
  const changes = h("ul", { class: "events long", tabindex: "0", "aria-label": "What has happened in the last hour" });
  const budgets = h("div", {}, h("p", { class: "empty" }, "Looking…"));
  const node = h(
    "div",
    {},
    h("h1", {}, "Overview"),
    problem,
    tiles,
    h("section", {}, h("h2", {}, "Jobs"), table.node),
    h("div", { class: "columns" }, h("section", {}, h("h2", {}, "Incidents"), incidents), h("section", {}, h("h2", {}, "Privacy budgets"), budgets)),
    h("section", {}, h("h2", {}, "The last hour"), changes),
  );
  let closed = false;

  async function account() {
    if (closed || !may("Operators/ShowPrivacy")) return;
    try {
      const told = await read("/api/read/privacy");
      fill(budgets, told.accounts.length ? told.accounts.filter((/** @type {any} */ each) => !each.silo).map(budgetLine) : h("p", { class: "empty" }, "Nothing has been spent on anybody's privacy."));
    } catch (error) {
      fill(budgets, h("p", { class: "problem" }, error instanceof Error ? error.message : String(error)));
    }
    setTimeout(account, 60000);
  }
  account();

  return {
    title: "Overview",
    node,
    topics: [TOPIC],
    close: () => {
      closed = true;
    },
    update: () => {
      fill(problem, problemOf(TOPIC));
      const all = Object.values(rows(TOPIC, "jobs"));
      const silos = Object.values(rows(TOPIC, "silos"));
      const status = rows(TOPIC, "status")[""];
      const count = (/** @type {string} */ state) => all.filter((job) => job.status === state).length;
      fill(
        tiles,
        tile("Running", count("running"), "jobs"),
        tile("Waiting", count("waiting"), "for their turn or for silos"),
        tile("Paused", count("paused"), "until somebody resumes them"),
        tile("Silos", `${silos.filter((silo) => silo.online).length} / ${silos.length}`, "connected, of all known"),
        tile("Disk", bytes(status?.disk_free), "free for models and updates"),
        tile("Coordinator", status?.coordinator?.slice(0, 12) ?? "–", status?.version),
      );
      const living = all.filter((job) => LIVING.includes(job.status)).sort((one, other) => LIVING.indexOf(one.status) - LIVING.indexOf(other.status) || placeOf(one) - placeOf(other) || other.submitted - one.submitted);
      table.show(living.map((job) => [job.id, job]));
      const now = Date.now() / 1000;
      const told = lines(TOPIC).filter((event) => now - event.time < 3600).sort((one, other) => other.time - one.time);
      const grave = told.filter((event) => gravity(event));
      fill(incidents, grave.length ? grave.slice(0, 12).map((event) => eventLine(event, true)) : h("li", { class: "empty" }, heard(TOPIC) ? "None in the last hour, of jobs that are not over." : "Looking…"));
      fill(changes, told.length ? told.slice(0, 60).map((event) => eventLine(event, true)) : h("li", { class: "empty" }, "Nothing has happened to the jobs that are not over."));
    },
  };
}

/** Where it stands in the queue; those that stand in none come last. @param {any} job */
function placeOf(job) {
  return rows(TOPIC, "queue")[job.id]?.place || Number.MAX_SAFE_INTEGER;
}

/** @param {any} job */
function waitsFor(job) {
  const turn = rows(TOPIC, "queue")[job.id];
  if (turn?.place) return `${turn.place}. in the queue: ${turn.reason}`;
  return rows(TOPIC, "details")[job.id]?.waiting_for || job.reason || "";
}

/** @param {any} job */
function until(job) {
  const turn = rows(TOPIC, "queue")[job.id];
  if (turn?.place && turn.expected) return `turn about ${moment(turn.expected)}`;
  const deadline = rows(TOPIC, "details")[job.id]?.deadline;
  return deadline ? `${moment(deadline)} (${duration(deadline - Date.now() / 1000)})` : "";
}

/** @param {any} account */
function budgetLine(account) {
  return h(
    "p",
    { class: "budget" },
    h("strong", {}, account.population),
    ` ε ${number(account.epsilon)} at δ ${number(account.delta)}`,
    account.reserved_epsilon > account.epsilon ? `, ${number(account.reserved_epsilon)} with rounds in flight` : "",
  );
}
