// @ts-check
// Every silo that the coordinator knows: whether it is here, what it can do, and how it has kept its word.
import { fill, h, Table } from "/static/dom.js";
import { bytes, number, when } from "/static/format.js";
import { lines, rows } from "/static/live.js";
import { ask, badge, detailOf, problemOf } from "/static/parts.js";
import { may } from "/static/session.js";

const TOPIC = "overview";

export function silos() {
  const problem = h("div");
  /** By silo: what it has refused last, of the newest events of jobs that are not over. @type {Map<string, string>} */
  let refusals = new Map();
  const word = /** @type {HTMLInputElement} */ (h("input", { id: "silo-filter", type: "search", placeholder: "name, state, task or device" }));
  const table = new Table(
    "Silos",
    [
      { title: "Silo", cell: (silo) => silo.name },
      { title: "State", cell: (silo) => badge(silo.state) },
      { title: "Last heard of", cell: (silo) => (silo.online ? "now" : when(silo.last_seen)) },
      { title: "Updates that counted", number: true, cell: (silo) => (silo.selected ? `${silo.completed} of ${silo.selected}` : "–") },
      { title: "Refused last", cell: (silo) => refusals.has(silo.name) && h("span", { class: "told" }, refusals.get(silo.name)) },
      { title: "Line, up and down", cell: (silo) => lineOf(silo.link) },
      { title: "Tasks", cell: (silo) => silo.tasks.join(", ") },
      { title: "Devices", cell: (silo) => silo.devices.join(", ") },
      { title: "Held back", cell: (silo) => [silo.drained && `drained: ${silo.drained}`, silo.disabled && `disabled: ${silo.disabled}`].filter(Boolean).join("; ") },
      { title: "Version", cell: (silo) => silo.version },
      { title: "Certificate ends", cell: (silo) => h("span", { class: "nowrap" }, silo.certificate_ends ? when(silo.certificate_ends) : "–") },
      { title: "Says of itself", cell: (silo) => Object.entries(silo.metadata).map(([key, value]) => `${key}=${value}`).join(", ") },
      { title: "Change", cell: action },
    ],
    "No silo has ever connected. `roundtable invite SILO` invites one.",
  );
  // Rows keep their elements, and cells what they were made of: listeners sit on the table.
  table.body.addEventListener("click", (event) => {
    const button = event.target instanceof HTMLElement ? event.target.closest("button") : null;
    const name = button?.dataset.silo;
    if (!name) return;
    if (button.dataset.does === "enable") ask(`Enable ${name}?`, "Jobs may ask it again.", "Enable", "enable", { name });
    else ask(`Disable ${name}?`, "No job asks it for anything new. Its people see your reason.", "Disable", "disable", { name }, "reason");
  });
  const update = () => {
    fill(problem, problemOf(TOPIC));
    const wanted = word.value.toLowerCase();
    const found = Object.values(rows(TOPIC, "silos")).filter((silo) => [silo.name, silo.state, ...silo.tasks, ...silo.devices].some((text) => text.toLowerCase().includes(wanted)));
    refusals = refusalsIn(lines(TOPIC), rows(TOPIC, "jobs"));
    table.show(found.sort((one, other) => one.name.localeCompare(other.name)).map((silo) => [silo.name, silo]));
  };
  word.addEventListener("input", update);
  const bar = h("div", { class: "bar" }, h("label", { for: "silo-filter" }, "Show"), word);
  return { title: "Silos", node: h("div", {}, h("h1", {}, "Silos"), problem, bar, table.node), topics: [TOPIC], update };
}

/** What was measured of a silo's line over its rounds. @param {any} link */
function lineOf(link) {
  if (!link?.up && !link?.down) return "–";
  const rate = (/** @type {number} */ value) => (value ? `${bytes(value)}/s` : "–");
  return `${rate(link.up)}, ${rate(link.down)}${link.round_trip ? `; ${number(1000 * link.round_trip)} ms` : ""}`;
}

/** @param {any[]} events oldest first @param {Record<string, any>} jobs */
function refusalsIn(events, jobs) {
  const refused = events.filter((event) => event.kind === "client_failed" && detailOf(event).kind === "refused");
  return new Map(refused.map((event) => [event.client, `${jobs[event.job]?.name ?? event.job}, ${when(event.time)}: ${event.message}`]));
}

/** @param {any} silo */
function action(silo) {
  if (silo.disabled) return may("Operators/EnableClient") && h("button", { type: "button", "data-silo": silo.name, "data-does": "enable" }, "Enable");
  return may("Operators/DisableClient") && h("button", { type: "button", "data-silo": silo.name, "data-does": "disable" }, "Disable");
}
