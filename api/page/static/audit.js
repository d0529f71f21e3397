// @ts-check
// The audit log, and whether its chain holds: each entry's hash is worked out here, from the exported text itself.
import { fill, h, Table } from "/static/dom.js";
import { when } from "/static/format.js";
import { may, read } from "/static/session.js";

export function audit() {
  const verdict = h("p", { role: "status" }, "Looking…");
  const word = /** @type {HTMLInputElement} */ (h("input", { id: "audit-filter", type: "search", placeholder: "who, what or which object" }));
  const table = new Table(
    "Newest entries",
    [
      { title: "No.", number: true, cell: (entry) => entry.sequence },
      { title: "Time", cell: (entry) => h("span", { class: "nowrap" }, when(entry.time)) },
      { title: "Who", cell: (entry) => entry.actor },
      { title: "Did what", cell: (entry) => entry.action.replaceAll("_", " ") },
      { title: "To what", cell: (entry) => entry.object },
      { title: "Detail", cell: (entry) => detail(entry.detail) },
      { title: "Hash", cell: (entry) => h("code", { title: entry.hash }, entry.hash.slice(0, 12)) },
    ],
    "No entry fits.",
  );
  /** @type {any[]} */
  let entries = [];
  const show = () => {
    const wanted = word.value.toLowerCase();
    const found = entries.filter((entry) => `${entry.actor} ${entry.action} ${entry.object}`.toLowerCase().includes(wanted));
    table.show(found.slice(-500).reverse().map((entry) => [String(entry.sequence), entry]));
  };
  word.addEventListener("input", show);

  async function load() {
    if (!may("Administration/ReadAudit")) return fill(verdict, "Only operators and administrators may read the audit log.");
    try {
      const told = await read("/api/audit");
      const checked = await verify(told.lines);
      entries = checked.entries;
      fill(verdict, checked.problem ? `✗ ${checked.problem}` : `✓ The chain of ${entries.length} entries holds: each hash was worked out in this browser. ${checked.sealed ? `A signature of the coordinator covers entries up to ${checked.sealed}; \`roundtable audit verify\` checks that.` : ""}`);
      verdict.className = checked.problem ? "problem" : "good";
      show();
    } catch (error) {
      fill(verdict, error instanceof Error ? error.message : String(error));
      verdict.className = "problem";
    }
  }
  load();
  const bar = h("div", { class: "bar" }, h("label", { for: "audit-filter" }, "Show"), word);
  return { title: "Audit", node: h("div", {}, h("h1", {}, "Audit log"), verdict, bar, table.node), topics: [], update: () => {} };
}

/** @param {any} values */
function detail(values) {
  const text = Object.entries(values ?? {}).map(([key, value]) => `${key}=${typeof value === "object" ? JSON.stringify(value) : value}`).join(", ");
  return text.length > 160 ? h("details", {}, h("summary", {}, `${text.slice(0, 150)}…`), text) : text;
}

/**
 * Whether each entry's hash is that of its text, and names the one before.
 * @param {string[]} lines of an export: canonical JSON, so that the text itself is what was hashed
 */
export async function verify(lines) {
  /** @type {any[]} */
  const entries = [];
  let problem = "";
  let sealed = 0;
  let expected = "";
  for (const line of lines) {
    const values = JSON.parse(line);
    if (values.seal) sealed = Math.max(sealed, JSON.parse(values.seal.payload ?? "{}").sequence ?? 0);
    if (!values.entry) continue;
    const entry = values.entry;
    entries.push(entry);
    if (problem) continue;
    const text = withoutHash(line.slice('{"entry":'.length, -1), entry.hash);
    const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
    const found = [...new Uint8Array(digest)].map((each) => each.toString(16).padStart(2, "0")).join("");
    if (found !== entry.hash) problem = `Entry ${entry.sequence} is not what its hash says: it was changed.`;
    else if (expected && entry.previous !== expected) problem = `Entry ${entry.sequence} does not follow the one before: something was taken out or moved.`;
    expected = entry.hash;
  }
  return { entries, problem, sealed };
}

/** The entry's own text without its key "hash", which is never inside another object. @param {string} text @param {string} hash */
export function withoutHash(text, hash) {
  const wanted = `"hash":"${hash}",`;
  let depth = 0;
  let quoted = false;
  for (let place = 0; place < text.length; place += 1) {
    const sign = text[place];
    if (quoted) {
      if (sign === "\\") place += 1;
      else if (sign === '"') quoted = false;
      continue;
    }
    if (depth === 1 && text.startsWith(wanted, place)) return text.slice(0, place) + text.slice(place + wanted.length);
    if (sign === '"') quoted = true;
    else if (sign === "{" || sign === "[") depth += 1;
    else if (sign === "}" || sign === "]") depth -= 1;
  }
  return text;
}
