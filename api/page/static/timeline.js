// @ts-check
// A job's newest rounds in time: a row for each silo, a span for what it did in each attempt.
import { h, scrolled } from "/static/dom.js";
import { duration, moment } from "/static/format.js";
import { detailOf } from "/static/parts.js";

const ROW = 18;
const HEAD = 22;
const NAMES = 130;
const MOST_SILOS = 60;
const LOOKS = {
  counted: ["--ok", "update counted"],
  working: ["--work", "at work"],
  failed: ["--bad", "failed or dropped out"],
  late: ["--warn", "did not count"],
};

/** What a silo does at a step, in colours that colour-blind people tell apart (Okabe and Ito). @type {Record<string, [string, string]>} */
const PARTS = {
  available: ["#56b4e9", "gets the model"],
  queued: ["#8c8c8c", "waits for its turn at the silo"],
  training: ["#0072b2", "trains"],
  uploading: ["#009e73", "sends its update"],
  evaluating: ["#e69f00", "evaluates"],
  offline: ["transparent", "is away"],
};

/** @typedef {{state: string, from: number, to: number}} Part */
/** @typedef {{silo: string, round: number, attempt: number, from: number, to: number, look: keyof typeof LOOKS, why: string, parts: Part[]}} Span */

/**
 * The spans that events and the silos' present states tell of.
 * @param {any[]} events oldest first @param {Record<string, any>} clients @param {number} now
 * @returns {{spans: Span[], rounds: {round: number, attempt: number, from: number, to: number, outcome: string}[]}}
 */
export function spansOf(events, clients, now) {
  /** @type {Map<string, any>} */
  const attempts = new Map();
  /** @type {Span[]} */
  const spans = [];
  for (const event of events) {
    const key = `${event.round}/${event.attempt}`;
    if (event.kind === "round_started") attempts.set(key, { round: event.round, attempt: event.attempt, from: event.time, to: 0, outcome: "under way", seen: new Set() });
    const attempt = attempts.get(key);
    if (!attempt) continue;
    const span = (/** @type {keyof typeof LOOKS} */ look, why = "") => {
      attempt.seen.add(event.client);
      const parts = partsOf(detailOf(event).course ?? [], event.time);
      spans.push({ silo: event.client, round: event.round, attempt: event.attempt, from: parts[0]?.from ?? attempt.from, to: event.time, look, why, parts });
    };
    if (event.kind === "update_received") span("counted");
    else if (event.kind === "client_failed") span("failed", event.message);
    else if (event.kind === "update_excluded") {
      for (const each of spans) if (each.silo === event.client && each.round === event.round && each.attempt === event.attempt) Object.assign(each, { look: "late", why: event.message });
    } else if (event.kind === "round_committed" || event.kind === "attempt_failed" || event.kind === "round_closed") {
      attempt.to = event.time;
      for (const [silo, [began, ended]] of Object.entries(detailOf(event).measured ?? {})) {
        const part = { state: "evaluating", from: event.time - began, to: event.time - ended };
        spans.push({ silo, round: event.round, attempt: event.attempt, from: part.from, to: part.to, look: "counted", why: "", parts: [part] });
      }
      attempt.outcome = event.kind === "round_committed" ? `committed after ${duration(detailOf(event).seconds ?? event.time - attempt.from)}` : event.message;
    }
  }
  for (const attempt of attempts.values()) {
    if (attempt.to) continue;
    for (const client of Object.values(clients)) {
      if (["queued", "training", "uploading", "evaluating"].includes(client.state) && !attempt.seen.has(client.client)) {
        const from = Math.max(attempt.from, client.since || 0);
        spans.push({ silo: client.client, round: attempt.round, attempt: attempt.attempt, from, to: now, look: "working", why: client.state, parts: [{ state: client.state, from, to: now }] });
      }
    }
  }
  return { spans, rounds: [...attempts.values()].map(({ seen, ...rest }) => rest) };
}

/** A course, [state, seconds] one after the other until an event, in time. @param {[string, number][]} course @param {number} end @returns {Part[]} */
export function partsOf(course, end) {
  let from = end - course.reduce((sum, [, seconds]) => sum + seconds, 0);
  return course.map(([state, seconds]) => {
    const part = { state, from, to: from + seconds };
    from = part.to;
    return part;
  });
}

export class Timeline {
  constructor() {
    this.canvas = /** @type {HTMLCanvasElement} */ (h("canvas", { role: "img", "aria-label": "Timeline of the newest rounds; the list below says the same" }));
    this.note = h("p", { class: "words" });
    this.words = h("ol", { class: "rounds" });
    const mark = (/** @type {string} */ colour) => {
      const drawn = /** @type {HTMLCanvasElement} */ (h("canvas", { width: 12, height: 12, "aria-hidden": "true" }));
      const pen = drawn.getContext("2d");
      if (pen) pen.fillStyle = colour;
      pen?.fillRect(0, 0, 12, 12);
      return drawn;
    };
    this.keys = h("p", { class: "keys" }, Object.values(LOOKS).map(([colour, word]) => h("span", { class: `key ${colour.slice(2)}` }, word)), Object.values(PARTS).filter(([colour]) => colour !== "transparent").map(([colour, word]) => h("span", {}, mark(colour), ` ${word}  `)));
    this.node = h("div", { class: "timeline" }, this.keys, scrolled("Timeline", this.canvas), this.note, h("details", {}, h("summary", {}, "The rounds in words"), this.words));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    /** @type {Span[]} */
    this.spans = [];
    this.from = 0;
    this.to = 1;
    /** @type {string[]} */
    this.silos = [];
  }

  /** @param {any[]} events @param {Record<string, any>} clients */
  show(events, clients) {
    const now = Date.now() / 1000;
    const { spans, rounds } = spansOf(events, clients, now);
    const newest = rounds.slice(-12);
    this.from = newest.length ? newest[0].from : now - 1;
    this.to = newest.length && newest[newest.length - 1].to ? newest[newest.length - 1].to : now;
    if (this.to <= this.from) this.to = this.from + 1;
    this.spans = spans.filter((span) => span.to >= this.from);
    const all = [...new Set(this.spans.map((span) => span.silo))].filter(Boolean).sort();
    this.silos = all.slice(0, MOST_SILOS);
    this.draw(newest);
    this.note.textContent = all.length > MOST_SILOS ? `${all.length - MOST_SILOS} more silos are not drawn.` : all.length ? "" : "This job's level of privacy tells nothing of single silos, or no round has begun.";
    const said = newest.map((round) => `Round ${round.round}${round.attempt > 1 ? `, attempt ${round.attempt}` : ""}: ${moment(round.from)}, ${round.outcome}.${slowest(this.spans, round)}`);
    if (said.join() !== this.said) {
      this.said = said.join();
      this.words.replaceChildren(...said.map((text) => h("li", {}, text)));
    }
  }

  /** @param {{round: number, attempt: number, from: number, to: number}[]} rounds */
  draw(rounds) {
    const width = Math.max(600, this.canvas.parentElement?.clientWidth ?? 600);
    const height = HEAD + ROW * Math.max(1, this.silos.length) + 4;
    const ratio = devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const pen = this.canvas.getContext("2d");
    if (!pen) return;
    const style = getComputedStyle(document.body);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const x = (/** @type {number} */ time) => NAMES + ((time - this.from) / (this.to - this.from)) * (width - NAMES - 8);
    this.x = x;
    for (const round of rounds) {
      pen.fillStyle = colour("--line");
      pen.fillRect(x(round.from), 0, 1, height);
      pen.fillStyle = colour("--soft");
      pen.fillText(`${round.round}${round.attempt > 1 ? `.${round.attempt}` : ""}`, x(round.from) + 4, HEAD / 2);
    }
    this.silos.forEach((silo, index) => {
      pen.fillStyle = style.color;
      pen.fillText(silo.length > 18 ? `${silo.slice(0, 17)}…` : silo, 4, HEAD + index * ROW + ROW / 2);
    });
    for (const span of this.spans) {
      const row = this.silos.indexOf(span.silo);
      if (row < 0) continue;
      const left = Math.max(NAMES, x(span.from));
      const top = HEAD + row * ROW;
      for (const part of span.parts) {
        pen.fillStyle = PARTS[part.state]?.[0] ?? "transparent";
        pen.fillRect(Math.max(NAMES, x(part.from)), top + 3, Math.max(1, x(part.to) - Math.max(NAMES, x(part.from))), ROW - 9);
      }
      // What came of it lies below what was done; without a course it is all that is known.
      pen.fillStyle = colour(LOOKS[span.look][0]);
      pen.fillRect(left, top + (span.parts.length ? ROW - 6 : 3), Math.max(2, x(span.to) - left), span.parts.length ? 3 : ROW - 6);
      if (span.look === "failed" || span.look === "late") {
        pen.fillStyle = colour("--back");
        pen.fillText("✗", Math.max(left, x(span.to) - 12), HEAD + row * ROW + ROW / 2);
      }
    }
  }

  /** @param {PointerEvent} event */
  point(event) {
    const silo = this.silos[Math.floor((event.offsetY - HEAD) / ROW)];
    const found = this.spans.find((span) => span.silo === silo && this.x && this.x(span.from) <= event.offsetX && event.offsetX <= this.x(span.to) + 2);
    this.canvas.title = found ? `${found.silo}, round ${found.round}.${found.attempt}: ${LOOKS[found.look][1]} after ${duration(found.to - found.from)}. ${courseIn(found.parts)} ${found.why}` : "";
  }
}

/** @param {Part[]} parts */
function courseIn(parts) {
  return parts.filter((part) => part.to - part.from >= 0.05).map((part) => `${PARTS[part.state]?.[1] ?? part.state} ${duration(part.to - part.from)}`).join(", ");
}

/** Whom a round waited for longest, and what that cost. @param {Span[]} spans @param {{round: number, attempt: number, from: number}} round */
function slowest(spans, round) {
  const own = spans.filter((span) => span.round === round.round && span.attempt === round.attempt && span.look === "counted").sort((one, other) => other.to - one.to);
  if (own.length < 2) return "";
  return ` The last update came from ${own[0].silo}, ${duration(own[0].to - own[1].to)} after the one before.`;
}
