// @ts-check
// One job: where it stands, who does what, its curves, its privacy, what has happened, and what can be done.
import { fill, h, Table, scrolled } from "/static/dom.js";
import { Chart } from "/static/charts.js";
import { bytes, download, duration, moment, number, when } from "/static/format.js";
import { heard, lines, rows } from "/static/live.js";
import { bestOf, measuredOf, modelsOf } from "/static/measured.js";
import { ask, badge, eventLine, problemOf, progress, tile } from "/static/parts.js";
import { provenance } from "/static/provenance.js";
import { may, read, session } from "/static/session.js";
import { Timeline } from "/static/timeline.js";

const OVER = ["finished", "cancelled", "failed"];
/** Rounds that are added to one by one; then the whole is read thinned out again. */
const MOST_KEPT = 4000;

/** @param {string} id */
export function job(id) {
  const topic = `job:${id}`;
  const title = h("h1", {}, id);
  const problem = h("div");
  const actions = h("div", { class: "bar" });
  const tiles = h("section", { class: "tiles", "aria-label": "Where it stands" });
  const timeline = new Timeline();
  const charts = h("div", { class: "charts" }, h("p", { class: "empty" }, "Looking…"));
  const stretch = stretchForm((first, last) => look(first, last));
  const protection = h("div");
  const contributions = h("div");
  const measured = h("div");
  const settings = h("div");
  const sent = h("div");
  const setups = h("div");
  const artifacts = h("div");
  const events = h("ul", { class: "events long", tabindex: "0", "aria-label": "Events" });
  const word = /** @type {HTMLInputElement} */ (h("input", { id: "event-filter", type: "search", placeholder: "kind, silo or words" }));
  word.addEventListener("input", () => update());
  const cohort = new Table(
    "What each silo does in the round that runs",
    [
      { title: "Silo", cell: (each) => each.client },
      { title: "State", cell: (each) => badge(each.state) },
      { title: "Since", cell: (each) => moment(each.since) },
      { title: "Examples", number: true, cell: (each) => (each.total ? `${each.done} / ${each.total}` : "") },
      { title: "Loss", number: true, cell: (each) => (each.loss ? number(each.loss) : "") },
      { title: "Step", cell: stepOf },
      { title: "Note", cell: (each) => each.note },
    ],
    "No silo is asked at this moment, or the job's level of privacy keeps secret who is.",
  );
  const node = h(
    "div",
    {},
    title,
    problem,
    actions,
    tiles,
    h("section", {}, h("h2", {}, "Timeline"), timeline.node),
    h("section", {}, h("h2", {}, "Curves"), stretch.node, charts),
    h("section", {}, h("h2", {}, "Silos at work"), cohort.node),
    h("section", {}, h("h2", {}, "Who contributed"), contributions),
    h("section", {}, h("h2", {}, "What each silo measured"), measured),
    h("section", {}, h("h2", {}, "Updates and models on the way"), sent),
    h("section", {}, h("h2", {}, "What silos train on"), setups),
    h("section", {}, h("h2", {}, "Privacy"), protection),
    h("section", {}, h("h2", {}, "Events"), h("div", { class: "bar" }, h("label", { for: "event-filter" }, "Show"), word), events),
    h("section", {}, h("h2", {}, "Models"), artifacts),
    h("section", {}, h("h2", {}, "Configuration"), settings),
  );
  /** @type {any} */
  let kept = null;
  /** @type {Map<string, Chart>} */
  const drawn = new Map();
  let asking = false;
  let newest = 0;
  /** Rounds of a stretch that is looked at more closely. @type {any[] | null} */
  let closer = null;

  /** The whole at first, then what has come since. */
  async function load() {
    if (asking) return;
    asking = true;
    try {
      const last = kept?.rounds.at(-1)?.round;
      if (last && kept.rounds.length < MOST_KEPT) {
        const more = await read(`/api/job/${encodeURIComponent(id)}/rounds?first=${last + 1}`);
        if (more.rounds.length) kept = { ...kept, rounds: [...kept.rounds, ...more.rounds], newest: more.newest };
      } else {
        kept = await read(`/api/job/${encodeURIComponent(id)}`);
        configuration();
      }
      fill(sent, transfersOf(kept.rounds.at(-1)));
      fill(setups, setupsOf(kept.setups ?? []));
      fill(measured, measuredOf(kept.newest.measured));
      kept.job = rows(topic, "job")[""] ?? kept.job;
      models();
      newest = kept.rounds.at(-1)?.round ?? 0;
      curves();
      heat();
    } catch (error) {
      fill(problem, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    } finally {
      asking = false;
    }
  }

  async function guard() {
    if (!may("Operators/ShowJobPrivacy")) return;
    try {
      const told = await read(`/api/read/job-privacy?job=${encodeURIComponent(id)}`);
      fill(protection, privacyOf(told));
    } catch (error) {
      fill(protection, h("p", { class: "empty" }, error instanceof Error ? error.message : String(error)));
    }
  }

  /** A stretch of rounds in all detail that there is; 0 for no bound. @param {number} first @param {number} last */
  async function look(first, last) {
    stretch.from.value = first ? String(first) : "";
    stretch.to.value = last ? String(last) : "";
    try {
      closer = first || last ? (await read(`/api/job/${encodeURIComponent(id)}/rounds?first=${first}&last=${last}`)).rounds : null;
      curves();
    } catch (error) {
      fill(problem, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  }

  function curves() {
    const wanted = seriesOf(closer ?? kept.rounds);
    for (const [name, chart] of drawn) if (!wanted.has(name)) { chart.close(); drawn.delete(name); }
    if (!wanted.size) return fill(charts, h("p", { class: "empty" }, "No round has told any figures yet, or the job's level of privacy withholds them."));
    for (const [name, series] of wanted) {
      let chart = drawn.get(name);
      if (!chart) {
        chart = new Chart(name, "", look);
        drawn.set(name, chart);
        if (drawn.size === 1) fill(charts);
        charts.append(chart.node);
      }
      chart.show(series);
    }
  }

  function heat() {
    const { silos, rounds, more } = kept.newest;
    if (!silos.length) return fill(contributions, h("p", { class: "empty" }, "Nothing is told of single silos yet."));
    const heaviest = Math.max(...rounds.flatMap((/** @type {any} */ round) => Object.values(round.silos).map((/** @type {any} */ each) => each[2] ?? 0)));
    const cell = (/** @type {any} */ round, /** @type {string} */ silo) => {
      const [outcome, why, weight] = round.silos[silo] ?? ["", "", null];
      if (outcome === "excluded") return ["late", "–", `left out: ${why}`];
      if (outcome === "failed") return ["failed", "✗", `failed: ${why}`];
      // The share of the heaviest weight in fifths: what a rule trusts little is pale.
      if (outcome === "counted") return [`counted${weight === null || !heaviest ? "" : ` share${Math.ceil((5 * weight) / heaviest)}`}`, "•", `counted${weight === null ? "" : `, weight ${number(weight)}`}`];
      return ["", "", "was not asked"];
    };
    const rules = [...new Set(rounds.flatMap((/** @type {any} */ round) => Object.keys(round.rules)))].sort();
    const most = Math.max(...rounds.flatMap((/** @type {any} */ round) => /** @type {number[]} */ (Object.values(round.rules))));
    fill(
      contributions,
      byRound("By silo and round: • counted, the darker the more it weighed, – left out by the rule, ✗ failed", "Silo", rounds, silos, (round, silo) => {
        const [look, sign, why] = cell(round, silo);
        return h("td", { class: look, title: `${silo}, round ${round.round}: ${why}` }, sign);
      }),
      more ? h("p", { class: "words" }, `${more} more silos, which failed less often, are not shown.`) : null,
      rules.length ? byRound("Updates left out, by reason and round", "Reason", rounds, rules, (round, rule) => {
        const count = round.rules[rule] ?? 0;
        return h("td", { class: count ? `late share${Math.ceil((5 * count) / most)}` : "", title: `${rule.replaceAll("_", " ")}, round ${round.round}: ${count}` }, count || "");
      }) : null,
    );
  }

  function configuration() {
    fill(settings, h("details", {}, h("summary", {}, "All settings; those that are as by default are greyed"),
      scrolled("Settings of the job", h("table", { class: "settings" }, h("caption", {}, "Settings of the job"), h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "Key"), h("th", { scope: "col" }, "Value"))),
        h("tbody", {}, kept.settings.map((/** @type {any} */ each) => h("tr", { class: each.default && "default" }, h("th", { scope: "row" }, each.key), h("td", {}, each.value))))))));
  }

  function models() {
    fill(artifacts, modelsOf(kept), kept.rounds.length ? provenance(kept.job.id, kept.job.name) : null,
      h("button", { type: "button", onclick: () => download(`${kept.job.name}-rounds.csv`, tableOf(kept.rounds)) }, "Rounds as CSV"));
  }

  function update() {
    const told = rows(topic, "job")[""] ?? kept?.job;
    const detail = rows(topic, "detail")[""] ?? kept ?? {};
    fill(problem, problemOf(topic));
    if (told) {
      fill(title, told.name, " ", badge(told.status));
      fill(tiles,
        tile("Rounds", progress(told.rounds_done, told.rounds), bestOf(told, kept?.settings)),
        tile("Now", detail.phase ? `${detail.phase}, round ${detail.round}${detail.attempt > 1 ? `.${detail.attempt}` : ""}` : "–", detail.waiting_for || told.reason),
        tile("Deadline", detail.deadline ? moment(detail.deadline) : "–", detail.deadline ? `in ${duration(detail.deadline - Date.now() / 1000)}` : "none"),
        tile("Submitted", when(told.submitted), `by ${told.submitter}`),
      );
      buttons(told);
      if (told.rounds_done > newest && kept) load();
    }
    const clients = rows(topic, "clients");
    cohort.show(Object.entries(clients).sort(([one], [other]) => one.localeCompare(other)));
    timeline.show(lines(topic), clients);
    const asked = word.value.toLowerCase();
    const found = lines(topic).filter((event) => !asked || `${event.kind} ${event.client} ${event.message}`.toLowerCase().includes(asked));
    fill(events, found.length ? found.slice(-200).reverse().map((event) => eventLine(event)) : h("li", { class: "empty" }, heard(topic) ? "Nothing fits." : "Looking…"));
  }

  let buttonsFor = "";
  /** @param {any} told */
  function buttons(told) {
    const form = `${told.status}/${told.own}`;
    if (form === buttonsFor) return;
    buttonsFor = form;
    const own = session.role !== "data-scientist" || told.own;
    const button = (/** @type {string} */ call, /** @type {string} */ name, /** @type {string} */ label, /** @type {string} */ text) =>
      may(call) && own && h("button", { type: "button", onclick: () => ask(`${label} ${told.name}?`, text, label, name, { job: told.id }) }, label);
    const over = OVER.includes(told.status);
    fill(actions,
      !over && told.status !== "paused" && button("Operators/PauseJob", "pause", "Pause", "The round that runs comes to its end or is given up; nothing that was committed is lost."),
      told.status === "paused" && button("Operators/ResumeJob", "resume", "Resume", "The job takes its place in the queue and goes on from its newest model."),
      !over && button("Operators/CancelJob", "cancel", "Cancel", "The job ends for good with the model that it has."),
      over && button("Operators/DeleteJob", "delete", "Delete", "Its models, updates, rounds and events go for good. What it has spent of privacy, and the audit log, stay."),
    );
  }

  load();
  guard();
  return { title: "Job", node, topics: [topic], update, close: () => drawn.forEach((chart) => chart.close()) };
}

/** What the updates of a round took, and how they were encoded. @param {any} round */
function transfersOf(round) {
  const told = round?.transfers;
  if (!told) return h("p", { class: "empty" }, "No round has told it yet, or the job's level of privacy withholds it.");
  const line = (/** @type {string} */ name, /** @type {number} */ size, /** @type {number} */ plain) => h("tr", {}, h("th", { scope: "row" }, name), h("td", { class: "number" }, bytes(size)), h("td", { class: "number" }, bytes(plain)), h("td", { class: "number" }, size ? `${number(plain / size)} ×` : "–"));
  const encodings = Object.entries(told.encodings).map(([name, count]) => `${name} (${count})`).join(", ");
  return [
    scrolled("Updates and models on the way", h("table", {}, h("caption", {}, `Round ${round.round}, all silos together`), h("thead", {}, h("tr", {}, ["Way", "Bytes", "Without encoding", "Smaller by"].map((text, at) => h("th", { scope: "col", class: at ? "number" : "" }, text)))), h("tbody", {}, line("updates, up", told.up, told.up_plain), told.down ? line("models, down", told.down, told.down_plain) : null))),
    h("p", {}, encodings ? `Encodings that were chosen: ${encodings}. ` : "", told.error === null ? "" : `Relative error of encoding: ${number(told.error)}.`),
  ];
}

/** Machines, devices and plans, as silos tell them; of each the newest. @param {any[]} told */
function setupsOf(told) {
  const newest = [...new Map(told.map((each) => [each.client, each])).values()];
  if (!newest.length) return h("p", { class: "empty" }, "No silo has told it yet, or the job's level of privacy withholds it.");
  return scrolled("What silos train on", h("table", {}, h("caption", {}, "The newest word of each silo"),
    h("thead", {}, h("tr", {}, ["Silo", "Since round", "Machines", "Ranks", "Device", "Memory of each", "Plan"].map((text, at) => h("th", { scope: "col", class: [1, 2, 3, 5].includes(at) && "number" }, text)))),
    h("tbody", {}, newest.map((each) => h("tr", {}, h("th", { scope: "row" }, each.client), h("td", { class: "number" }, each.round), h("td", { class: "number" }, each.machines), h("td", { class: "number" }, each.ranks), h("td", {}, each.device), h("td", { class: "number" }, Number(each.memory) ? bytes(each.memory) : "–"), h("td", {}, `${each.plan} ${each.factor_rank ? `factors of rank ${each.factor_rank}` : ""} ${Object.entries(each.degrees).map(([name, size]) => `${name} ${size}`).join(", ")}`))))));
}

/** Two fields for a stretch of rounds. @param {(first: number, last: number) => void} chosen */
function stretchForm(chosen) {
  const field = (/** @type {string} */ name) => /** @type {HTMLInputElement} */ (h("input", { id: `rounds-${name}`, type: "number", min: 1, step: 1, inputmode: "numeric" }));
  const from = field("from");
  const to = field("to");
  const node = h("form", { class: "bar stretch", onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); chosen(Number(from.value), Number(to.value)); } },
    h("label", { for: from.id }, "Rounds from"), from, h("label", { for: to.id }, "to"), to,
    h("button", { type: "submit" }, "Look closer"), h("button", { type: "button", onclick: () => chosen(0, 0) }, "All rounds"));
  return { node, from, to };
}

/** @param {any} each */
function stepOf(each) {
  const figures = each.figures;
  if (!figures?.steps) return "";
  const parts = [`${figures.step} / ${figures.steps}`];
  if (figures.flops_utilisation !== undefined) parts.push(`MFU ${(100 * figures.flops_utilisation).toFixed(0)} %`);
  if (figures.communication_seconds !== undefined && figures.seconds) parts.push(`communication ${Math.round((100 * figures.communication_seconds) / figures.seconds)} %`);
  if (figures.waiting_seconds !== undefined && figures.seconds) parts.push(`waiting ${Math.round((100 * figures.waiting_seconds) / figures.seconds)} %`);
  if (figures.memory_bytes !== undefined) parts.push(bytes(figures.memory_bytes));
  return parts.join(", ");
}

/**
 * A table with a column for each round.
 * @param {string} caption @param {string} corner @param {any[]} rounds @param {string[]} names
 * @param {(round: any, name: string) => Node} cell
 */
function byRound(caption, corner, rounds, names, cell) {
  return scrolled(caption,
    h("table", { class: "heat" }, h("caption", {}, caption),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, corner), rounds.map((round) => h("th", { scope: "col" }, round.round)))),
      h("tbody", {}, names.map((name) => h("tr", {}, h("th", { scope: "row" }, name), rounds.map((round) => cell(round, name)))))));
}

/** Series of each metric, with the spread over silos where it is told. @param {any[]} rounds */
export function seriesOf(rounds) {
  /** @type {Map<string, import("/static/charts.js").Series[]>} */
  const found = new Map();
  const put = (/** @type {string} */ chart, /** @type {string} */ label, /** @type {number} */ round, /** @type {number} */ value) => {
    const series = found.get(chart) ?? [];
    found.set(chart, series);
    let one = series.find((each) => each.label === label);
    if (!one) series.push((one = { label, points: [] }));
    one.points.push([round, value]);
    return one;
  };
  for (const round of rounds) {
    for (const [name, value] of Object.entries(round.evaluation)) {
      const one = put(name, "evaluation", round.round, /** @type {number} */ (value));
      const [low, high] = round.spread[name] ?? [];
      if (low !== undefined) {
        (one.low ??= new Map()).set(round.round, low);
        (one.high ??= new Map()).set(round.round, high);
      }
    }
    for (const [name, value] of Object.entries(round.training)) put(name, "training", round.round, /** @type {number} */ (value));
    for (const [name, value] of Object.entries(round.central)) put(name, "central test data", round.round, /** @type {number} */ (value));
    for (const [name, value] of Object.entries(round.before)) put(name, "before the round", round.round, /** @type {number} */ (value));
    if (round.epsilon !== null && round.epsilon !== undefined) put("ε spent", "epsilon", round.round, round.epsilon);
    if (round.transfers) {
      put("MB of updates and models", "updates, up", round.round, round.transfers.up / 1e6);
      if (round.transfers.down) put("MB of updates and models", "models, down", round.round, round.transfers.down / 1e6);
      if (round.transfers.error) put("relative error of encoding", "updates", round.round, round.transfers.error);
    }
    const { tokens_per_second: speed, bytes_per_token: size, communication } = round.throughput ?? {};
    if (speed !== undefined) put("tokens a second", "all silos", round.round, speed);
    if (size !== undefined) put("bytes a token", "updates and models", round.round, size);
    if (communication !== undefined) put("share of time in transfers", "mean of silos", round.round, communication);
  }
  return found;
}

/** @param {any[]} rounds */
export function tableOf(rounds) {
  const kinds = [["evaluation", ""], ["training", "training "], ["central", "central "], ["before", "before "]];
  const columns = kinds.flatMap(([kind, word]) => [...new Set(rounds.flatMap((round) => Object.keys(round[kind])))].map((name) => ({ kind, name, title: `${word}${name}` })));
  return [["round", "attempt", "started", "ended", "cohort", "contributors", "epsilon", ...columns.map((each) => each.title)],
    ...rounds.map((round) => [round.round, round.attempt, round.started, round.ended, round.cohort, round.contributors, round.epsilon, ...columns.map((each) => round[each.kind][each.name])])];
}

/** @param {any} told */
export function privacyOf(told) {
  const parts = told.protections.map((/** @type {any} */ each) => h("tr", {}, h("th", { scope: "row" }, each.party), h("td", {}, each.holds ? "✓ protected" : "✗ not protected"), h("td", {}, each.assumption)));
  return [
    h("p", {}, h("strong", {}, told.level === "none" ? "Differential privacy hides: " : `Level ${told.level} hides: `), `${told.hides}. `, told.statement),
    told.epsilon === undefined ? null : h("p", {}, `Spent so far by all jobs on ${told.population}: ε ${number(told.epsilon)}; at this job's end ε ${number(told.forecast)}`, told.budget === undefined ? "." : `, of a budget of ${number(told.budget)}.`, told.budget === undefined ? null : h("meter", { min: 0, max: told.budget, value: told.epsilon, "aria-label": `epsilon ${number(told.epsilon)} of ${number(told.budget)}` })),
    told.people ? h("p", {}, told.people) : null,
    scrolled("Who is protected against whom", h("table", {}, h("caption", {}, "Who is protected against whom"), h("thead", {}, h("tr", {}, ["Against", "Verdict", "What that rests on, or what the party sees"].map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, parts))),
  ];
}

