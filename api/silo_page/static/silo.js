// @ts-check
// The silo's page: what was asked, what left, by which rules. One answer holds all of it, asked for every second.
import { fill, h, say, Table } from "/static/dom.js";
import { bytes, duration, number, when } from "/static/format.js";
import { call, change, keepToken, Stranger, takeToken } from "/static/silo-calls.js";

const LOOK_MILLISECONDS = 1000;
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const state = /** @type {HTMLElement} */ (document.getElementById("state"));
const pause = /** @type {HTMLButtonElement} */ (document.getElementById("pause"));
/** @type {any} */
let told = null;
let digest = "";
/** @typedef {{title: string, node: Node, update: () => void}} View */
/** @type {View} */
let view = { title: "", node: h("p"), update: () => {} };

/** @param {unknown} error */
function words(error) {
  return error instanceof Error ? error.message : String(error);
}

/** A state in words, with a mark that needs no colour. @param {string} name */
function badge(name) {
  /** @type {Record<string, [string, string]>} */
  const marks = { approved: ["✓", "done"], allowed: ["●", "available"], refused: ["✗", "failed"], "waits for you": ["…", "waiting"], "against the policy": ["✗", "failed"] };
  const [mark, look] = marks[name] ?? ["·", ""];
  return h("span", { class: `badge ${look}` }, `${mark} ${name}`);
}

/**
 * Asks before something is changed, and says what the answer is.
 * @param {string} title @param {string} text @param {string} yes @param {string} name @param {Record<string, string>} values
 * @param {string} [label] of a line that is asked for
 */
function ask(title, text, yes, name, values, label) {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("ask"));
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const input = /** @type {HTMLInputElement} */ (h("input", { id: "ask-field", maxlength: 200 }));
  const form = h(
    "form",
    {
      method: "dialog",
      onsubmit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        try {
          await change(name, label ? { ...values, reason: input.value } : values);
          dialog.close();
          await look();
          show();
        } catch (error) {
          problem.hidden = false;
          problem.textContent = words(error);
        }
      },
    },
    h("h2", { id: "ask-title" }, title),
    h("p", {}, text),
    label ? [h("label", { for: "ask-field" }, label), input] : null,
    problem,
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "yes" }, yes), h("button", { type: "button", onclick: () => dialog.close() }, "Leave it as it is")),
  );
  fill(dialog, form);
  dialog.showModal();
}

/** @param {string} label @param {any} value @param {string} [note] */
function tile(label, value, note) {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), note && h("div", { class: "note" }, note));
}

/** @param {any} job */
function jobLink(job) {
  return h("a", { href: `/jobs/${encodeURIComponent(job.id)}` }, job.name || job.id);
}

/** @returns {View} */
function jobs() {
  const tiles = h("div", { class: "tiles" });
  const requests = h("section");
  const table = new Table(
    "Jobs that asked for this silo",
    [
      { title: "Job", cell: (job) => jobLink(job) },
      { title: "Here", cell: (job) => [badge(job.state), job.objections.length ? h("div", { class: "words" }, job.objections[0]) : null, job.reason ? h("div", { class: "words" }, job.reason) : null] },
      { title: "Task", cell: (job) => job.task },
      { title: "Submitted by", cell: (job) => job.submitter },
      { title: "What its updates show", cell: (job) => job.privacy },
      { title: "Rounds", number: true, cell: (job) => number(job.rounds) },
      { title: "First asked", cell: (job) => h("span", { class: "nowrap" }, when(job.first)) },
      { title: "Answer", cell: (job) => answers(job) },
    ],
    "The coordinator has not asked for anything yet.",
  );
  const update = () => {
    const waiting = told.jobs.filter((/** @type {any} */ job) => job.state === "waits for you").length;
    const left = told.totals.reduce((/** @type {number} */ sum, /** @type {any} */ row) => sum + row.bytes, 0);
    const days = (told.expires - Date.now() / 1000) / 86400;
    fill(
      tiles,
      tile("Waits for you", `${waiting + told.requests.filter((/** @type {any} */ each) => !each.answer).length}`, "jobs and reports without your answer"),
      tile("Has left", bytes(left), `${told.totals.reduce((/** @type {number} */ sum, /** @type {any} */ row) => sum + row.updates, 0)} updates`),
      tile("Coordinator", told.coordinator, told.heard ? `last heard ${duration(Date.now() / 1000 - told.heard)} ago` : "has asked for nothing yet"),
      tile("Certificate", days > 0 ? `${Math.floor(days)} days` : "has expired", "until it ends; the agent renews it"),
      ...told.budgets.map((/** @type {any} */ each) => tile(`ε of ${each.account === "stated" ? "what jobs state" : `the silo's account, by ${each.account}`}`, `${number(each.spent)} of ${number(each.epsilon)}`, "spent")),
    );
    table.show(told.jobs.map((/** @type {any} */ job) => [job.id, job]));
    fill(requests, ...told.requests.map(request));
  };
  return { title: "Jobs", node: h("div", {}, h("h1", {}, "What is asked of this silo"), tiles, requests, h("h2", {}, "Jobs"), table.node), update };
}

/** @param {any} one */
function request(one) {
  const what = `${one.author} asks for a report of this silo${one.reason ? `: ${one.reason}` : ""}. It has ${bytes(one.bytes)} and is kept for an answer until ${when(one.expires)}.`;
  if (one.answer) return h("p", {}, `${what} You have ${one.answer} it.`);
  const text = h("pre", { hidden: true, tabindex: "0", "aria-label": "The report" });
  const buttons = h("div", { class: "buttons bar" });
  const look = async () => {
    try {
      const { values } = await call(`/api/reports/${encodeURIComponent(one.request)}`);
      text.hidden = false;
      say(text, values.text);
      const shown = { request: one.request, report: values.report };
      fill(
        buttons,
        h("button", { class: "yes", onclick: () => ask("Send this report?", `Exactly what is shown leaves for ${one.author}, by way of the coordinator, and nothing else.`, "Send it", "send-report", shown) }, "Send it"),
        h("button", { onclick: () => ask("Send nothing?", `${one.author} is told that you have denied it.`, "Deny it", "deny-report", shown, "Reason, for who asks") }, "Deny it"),
      );
    } catch (error) {
      fill(buttons, h("p", { class: "problem" }, words(error)));
    }
  };
  fill(buttons, h("button", { onclick: look }, "Show what would be sent"));
  return h("div", { class: "account" }, h("p", {}, what), text, buttons);
}

/** @param {any} job */
function answers(job) {
  const shown = { job: job.id, digest: job.digest };
  const no = () => ask("Take no further part?", `This silo takes no further part in ${job.name || job.id}, from its next step on. What has left before cannot be taken back.`, "Refuse it", "refuse", shown, "Reason, for the coordinator's operators; no data");
  return h(
    "span",
    { class: "nowrap" },
    job.state === "refused" || job.state === "waits for you" ? h("a", { class: "button", href: `/jobs/${encodeURIComponent(job.id)}` }, "Read and approve") : null,
    " ",
    job.state === "refused" ? null : h("button", { onclick: no }, "Refuse"),
  );
}

/** @param {string} id @returns {View} */
function job(id) {
  const node = h("div", {}, h("h1", {}, "Job"), h("p", { class: "empty" }, "Reading…"));
  let shownDigest = "";
  const load = async () => {
    try {
      const { values } = await call(`/api/jobs/${encodeURIComponent(id)}`);
      shownDigest = `${values.digest} ${values.state}`;
      fill(node, ...detail(values));
    } catch (error) {
      fill(node, h("h1", {}, "Job"), h("p", { class: "problem", role: "alert" }, words(error)));
    }
  };
  const update = () => {
    const row = told.jobs.find((/** @type {any} */ each) => each.id === id);
    if (row && `${row.digest} ${row.state}` !== shownDigest) load();
    else if (!row) load();
  };
  return { title: "Job", node, update };
}

/** @param {any} one */
function detail(one) {
  const shown = { job: one.id, digest: one.digest };
  const settings = new Table(
    one.before ? `Settings, beside those of ${one.before}, the newest like it that was allowed here` : "Settings; nothing like this job was allowed here before",
    [
      { title: "Setting", cell: (row) => h("code", {}, row.key) },
      { title: "Value", cell: (row) => h("span", { class: row.default ? "default" : "" }, row.value ?? "not set any more", row.default ? " (as by default)" : "") },
      ...(one.before ? [{ title: "Before", cell: (/** @type {any} */ row) => (row.changed ? h("strong", {}, `changed, was ${row.before ?? "not set"}`) : h("span", { class: "default" }, "the same")) }] : []),
    ],
    "",
  );
  settings.node.classList.add("settings");
  const rank = (/** @type {any} */ row) => (row.changed ? 0 : row.default ? 2 : 1);
  settings.show([...one.settings].sort((a, b) => rank(a) - rank(b)).map((row) => [row.key, row]));
  const yes = () => ask("Take part in this job?", `This silo takes part in ${one.name || one.id} exactly as it is shown here (hash ${one.digest.slice(0, 12)}), from the next round on. A job that changes is shown to you again.`, "Approve it", "approve", shown);
  const no = () => ask("Take no further part?", "From the job's next step on. What has left before cannot be taken back.", "Refuse it", "refuse", shown, "Reason, for the coordinator's operators; no data");
  return [
    h("h1", {}, `${one.name || one.id} `, badge(one.state)),
    h("p", {}, `Task ${one.task}, submitted by ${one.submitter}; ${one.rounds} rounds; first asked ${when(one.first)}. ${one.privacy ? `Its updates: ${one.privacy}.` : ""}`),
    one.by ? h("p", {}, `${one.state === "refused" ? "Refused" : "Approved"} by ${one.by}, ${when(one.decided)}${one.reason ? `: ${one.reason}` : ""}.`) : null,
    one.objections.length ? h("div", { class: "problem" }, "The policy refuses it:", h("ul", {}, one.objections.map((/** @type {string} */ each) => h("li", {}, each)))) : null,
    h("div", { class: "bar" }, one.state === "approved" ? null : h("button", { class: "yes", onclick: yes }, "Approve exactly this"), one.state === "refused" ? null : h("button", { onclick: no }, "Refuse")),
    h("h2", {}, "Who can learn what"),
    protection(one.protection),
    h("h2", {}, "All of it"),
    h("p", { class: "words" }, `Hash ${one.digest}`),
    settings.node,
  ];
}

/** @param {any[]} lines */
function protection(lines) {
  const table = new Table(
    "Against whom the job's ε holds",
    [
      { title: "Against", cell: (row) => row.party },
      { title: "Holds", cell: (row) => (row.holds ? "✓ yes" : "✗ no") },
      { title: "It rests on, or: what is seen", cell: (row) => row.assumption },
    ],
    "",
  );
  table.show(lines.map((row) => [row.party, row]));
  return table.node;
}

/** @returns {View} */
function left() {
  const totals = new Table(
    "By job",
    [
      { title: "Job", cell: (row) => jobLink({ id: row.job, name: told.jobs.find((/** @type {any} */ each) => each.id === row.job)?.name }) },
      { title: "Updates", number: true, cell: (row) => number(row.updates) },
      { title: "Answers of analyses", number: true, cell: (row) => number(row.answers) },
      { title: "Without a receipt", number: true, cell: (row) => number(row.unproven) },
      { title: "Bytes", number: true, cell: (row) => bytes(row.bytes) },
      { title: "Figures of evaluations", number: true, cell: (row) => number(row.figures) },
      { title: "Lines of the log", number: true, cell: (row) => number(row.lines) },
      { title: "Reports", number: true, cell: (row) => number(row.reports) },
      { title: "How it is protected", cell: (row) => told.jobs.find((/** @type {any} */ each) => each.id === row.job)?.privacy ?? "" },
      { title: "Last", cell: (row) => h("span", { class: "nowrap" }, when(row.last)) },
    ],
    "Nothing has left yet.",
  );
  const list = new Table(
    "One by one, the newest first",
    [
      { title: "No.", number: true, cell: (row) => row.sequence },
      { title: "When", cell: (row) => h("span", { class: "nowrap" }, when(row.time)) },
      { title: "What", cell: (row) => row.what },
      { title: "For", cell: (row) => told.jobs.find((/** @type {any} */ each) => each.id === row.job)?.name ?? row.job },
      { title: "Round", number: true, cell: (row) => (row.round === null ? "" : `${row.round}${row.attempt > 1 ? `, attempt ${row.attempt}` : ""}`) },
      { title: "Bytes", number: true, cell: (row) => (row.bytes === null ? "" : number(row.bytes)) },
      { title: "With it", cell: (row) => row.figures },
      { title: "Receipt", cell: (row) => (["update", "answers of an analysis"].includes(row.what) ? row.proof || "none yet" : "") },
      { title: "BLAKE3", cell: (row) => h("code", { title: row.digest }, row.digest.slice(0, 12)) },
    ],
    "Nothing has left yet.",
  );
  const verdict = h("p", { role: "status" }, "Verifying the silo's own log…");
  const more = h("button", {}, "Show older ones");
  /** @type {any[]} */
  let rows = [];
  let seen = -1;
  const put = () => list.show(rows.map((row) => [String(row.sequence), row]));
  more.addEventListener("click", async () => {
    const { values } = await call(`/api/left?before=${rows.at(-1)?.sequence ?? 0}`);
    rows = [...rows, ...values.departures];
    more.hidden = values.departures.length === 0;
    put();
  });
  const verify = async () => {
    try {
      const { values } = await call("/api/verified");
      fill(verdict, `✓ The silo's log holds together: ${values.entries} entries, signed up to ${values.signed}; ${values.receipts} receipts, each signed by the coordinator.${values.absent ? ` ${values.absent} archives are not at hand.` : ""}`);
      verdict.className = "good";
      if (values.unsound.length) fill(verdict, `✗ ${values.unsound.join("; ")}`);
      if (values.unsound.length) verdict.className = "problem";
    } catch (error) {
      fill(verdict, `✗ ${words(error)}`);
      verdict.className = "problem";
    }
  };
  const update = async () => {
    totals.show(told.totals.map((/** @type {any} */ row) => [row.job, row]));
    const counted = told.totals.reduce((/** @type {number} */ sum, /** @type {any} */ row) => sum + row.updates + row.answers + row.figures + row.lines + row.reports - row.unproven / 1e6, 0);
    if (counted === seen) return;
    seen = counted;
    const { values } = await call("/api/left");
    const oldest = values.departures.at(-1)?.sequence ?? 0;
    rows = [...values.departures, ...rows.filter((row) => row.sequence < oldest)];
    more.hidden = rows.length === 0;
    put();
  };
  verify();
  const archived = told.archived ? h("p", { class: "words" }, `Entries up to ${told.archived} are archived: \`roundtable audit\` reads them.`) : null;
  const words_ = "Everything that left this house as the agent wrote it down before it sent it. Not listed: that the agent is connected, its tasks, devices and declared metadata, and while it trains how far it is and the loss, where the job lets a silo tell that.";
  return { title: "What left", node: h("div", {}, h("h1", {}, "What left this house"), h("p", { class: "words" }, words_), verdict, archived, totals.node, list.node, h("div", { class: "bar" }, more)), update };
}

/** @returns {View} */
function policy() {
  const table = new Table(
    "Rules of agent.toml",
    [
      { title: "Rule", cell: (row) => h("span", {}, row.sentence) },
      { title: "What it guarantees", cell: (row) => row.guarantee },
      { title: "What it lacks for that", cell: (row) => row.gap },
      { title: "Key", cell: (row) => h("code", { class: "nowrap" }, row.key) },
    ],
    "",
  );
  return { title: "Policy", node: h("div", {}, h("h1", {}, "By which rules"), h("p", { class: "words" }, "They are in agent.toml; what is changed there holds once the agent is started again."), table.node), update: () => table.show(told.policy.map((/** @type {any} */ row) => [row.key, row])) };
}

/** @returns {View} */
function attempt() {
  const text = /** @type {HTMLTextAreaElement} */ (h("textarea", { id: "job-text", rows: 16, spellcheck: "false" }));
  const who = /** @type {HTMLInputElement} */ (h("input", { id: "job-submitter", maxlength: 200 }));
  const file = /** @type {HTMLInputElement} */ (h("input", { id: "job-file", type: "file", accept: ".toml,text/plain" }));
  const answer = h("div", { role: "status" });
  file.addEventListener("change", async () => {
    text.value = (await file.files?.[0]?.text()) ?? "";
  });
  const form = h(
    "form",
    {
      class: "try",
      onsubmit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        try {
          const found = await change("try", { text: text.value, submitter: who.value });
          const no = found.objections.map((/** @type {string} */ each) => h("li", {}, each));
          fill(
            answer,
            no.length ? h("div", { class: "problem" }, "No. This silo would not take part:", h("ul", {}, no)) : h("p", { class: "good" }, `✓ Yes: this silo would take part${found.approval ? ", once a person here has approved it" : ""}.`),
            h("h2", {}, "Who could learn what"),
            protection(found.protection),
          );
        } catch (error) {
          fill(answer, h("p", { class: "problem" }, words(error)));
        }
      },
    },
    h("label", { for: "job-file" }, "A job file"),
    file,
    h("label", { for: "job-text" }, "or its text"),
    text,
    h("label", { for: "job-submitter" }, "As if this operator had signed it"),
    who,
    h("button", { type: "submit", class: "yes" }, "Would this silo take part?"),
  );
  return { title: "Try a job", node: h("div", {}, h("h1", {}, "Try a job"), h("p", { class: "words" }, "Nothing is run, and nothing leaves."), form, answer), update: () => {} };
}

function signIn() {
  const input = /** @type {HTMLInputElement} */ (h("input", { id: "token", type: "password", autocomplete: "off", required: true }));
  const form = h(
    "form",
    {
      onsubmit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        keepToken(input.value);
        digest = "";
        await look();
        if (told) show();
      },
    },
    h("label", { for: "token" }, "Token"),
    input,
    h("button", { type: "submit" }, "Open"),
  );
  pause.hidden = true;
  fill(main, h("h1", {}, "The silo's page"), h("p", {}, "It is for this silo's people. ", h("code", {}, "roundtable client page"), " prints an address that opens it."), h("div", { class: "sign-in" }, form));
}

/** @type {[RegExp, (...parts: string[]) => View][]} */
const routes = [[/^\/$/, jobs], [/^\/left$/, left], [/^\/policy$/, policy], [/^\/try$/, attempt], [/^\/jobs\/([^/]+)$/, job]];

function show() {
  for (const link of document.querySelectorAll("nav a")) {
    if (link.getAttribute("href") === location.pathname) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  for (const [form, make] of routes) {
    const parts = form.exec(location.pathname);
    if (parts) view = make(...parts.slice(1).map(decodeURIComponent));
  }
  document.title = `${view.title} · ${told.silo} · Roundtable`;
  fill(main, told.drained ? h("p", { class: "problem", role: "alert" }, `Everything is paused by ${told.drained.by}, since ${when(told.drained.since)}${told.drained.reason ? `: ${told.drained.reason}` : ""}. What was under way is finished; nothing new begins.`) : null, view.node);
  view.update();
}

/** Asks what there is; a view is made anew where everything was paused or goes on. */
async function look() {
  try {
    const answer = await call(`/api/overview?known=${digest}`);
    say(state, "live");
    state.className = "live";
    if (!answer.values) return;
    const before = told?.drained?.since;
    const first = told === null;
    told = answer.values;
    digest = answer.digest;
    say(/** @type {HTMLElement} */ (document.getElementById("who")), told.silo);
    pause.hidden = false;
    say(pause, told.drained ? "Take part again" : "Pause everything");
    if (!first && before !== told.drained?.since) show();
    else if (!first) view.update();
  } catch (error) {
    if (error instanceof Stranger) {
      told = null;
      say(state, "signed out");
      state.className = "broken";
      if (!document.getElementById("token")) signIn();
      return;
    }
    say(state, `the agent does not answer; trying again (${words(error)})`);
    state.className = "broken";
  }
}

pause.addEventListener("click", () => {
  if (told.drained) ask("Take part again?", "The coordinator is told at once, and may ask for rounds again.", "Take part again", "resume", {});
  else ask("Pause everything?", "The agent finishes what it was asked for and begins nothing new, for any job, until somebody here says so; also after a restart.", "Pause everything", "drain", {}, "Reason, for the coordinator's operators; no data");
});
document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a[href^='/']") : null;
  if (!link || !told || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  history.pushState(null, "", link.getAttribute("href") ?? "/");
  show();
  main.focus();
  scrollTo(0, 0);
});
addEventListener("popstate", () => told && show());
addEventListener("hashchange", async () => {
  takeToken();
  digest = "";
  await look();
  if (told) show();
});

takeToken();
await look();
if (told) show();
/** @returns {Promise<void>} */
async function goOn() {
  if (document.visibilityState === "visible" && sessionStorage.length) {
    const was = told === null;
    if (!was) await look();
  }
  setTimeout(goOn, LOOK_MILLISECONDS);
}
setTimeout(goOn, LOOK_MILLISECONDS);
