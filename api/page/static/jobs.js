// @ts-check
// All jobs, newest first.
import { fill, h, Table } from "/static/dom.js";
import { download, when } from "/static/format.js";
import { rows } from "/static/live.js";
import { badge, jobLink, problemOf, progress } from "/static/parts.js";

const TOPIC = "overview";

export function jobs() {
  const problem = h("div");
  const asked = new URLSearchParams(location.search);
  const filter = /** @type {HTMLInputElement} */ (h("input", { id: "filter", type: "search", placeholder: "name, state or submitter", value: asked.get("filter") ?? "" }));
  /** @type {Set<string>} */
  const chosen = new Set();
  const comparison = h("a", { href: "/compare", "data-link": true, class: "button" }, "Compare the chosen");
  const table = new Table(
    "All jobs",
    [
      { title: "Choose", cell: (job) => h("input", { type: "checkbox", "aria-label": `choose ${job.name}`, value: job.id }) },
      { title: "Job", cell: (job) => jobLink(job.id, job.name) },
      { title: "State", cell: (job) => badge(job.status) },
      { title: "Rounds", cell: (job) => progress(job.rounds_done, job.rounds) },
      { title: "Submitted", cell: (job) => h("span", { class: "nowrap" }, when(job.submitted)) },
      { title: "By", cell: (job) => job.submitter },
      { title: "Why", cell: (job) => job.reason },
    ],
    "No job fits.",
  );
  table.body.addEventListener("change", (event) => {
    const box = event.target;
    if (!(box instanceof HTMLInputElement)) return;
    if (box.checked) chosen.add(box.value);
    else chosen.delete(box.value);
    comparison.setAttribute("href", `/compare?jobs=${[...chosen].map(encodeURIComponent).join(",")}`);
  });
  const found = () => {
    const word = filter.value.toLowerCase();
    return Object.values(rows(TOPIC, "jobs"))
      .filter((job) => [job.name, job.id, job.status, job.submitter].some((text) => text.toLowerCase().includes(word)))
      .sort((one, other) => other.submitted - one.submitted);
  };
  const update = () => {
    fill(problem, problemOf(TOPIC));
    table.show(found().map((job) => [job.id, job]));
  };
  filter.addEventListener("input", () => {
    history.replaceState(null, "", filter.value ? `/jobs?filter=${encodeURIComponent(filter.value)}` : "/jobs");
    update();
  });
  const save = () =>
    download("jobs.csv", [["job", "name", "status", "rounds_done", "rounds", "submitted", "submitter", "reason"], ...found().map((job) => [job.id, job.name, job.status, job.rounds_done, job.rounds, job.submitted, job.submitter, job.reason])]);
  const bar = h("div", { class: "bar" }, h("label", { for: "filter" }, "Show"), filter, comparison, h("button", { type: "button", onclick: save }, "CSV"));
  return { title: "Jobs", node: h("div", {}, h("h1", {}, "Jobs"), problem, bar, table.node), topics: [TOPIC], update };
}
