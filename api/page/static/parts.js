// @ts-check
// Pieces that several views show.
import { fill, h } from "/static/dom.js";
import { mark, moment, number, when } from "/static/format.js";
import { rows } from "/static/live.js";
import { change } from "/static/session.js";

/** @param {string} state */
export function badge(state) {
  return h("span", { class: `badge ${/^[a-z]+$/.test(state) ? state : ""}` }, `${mark(state)} ${state}`);
}

/** @param {number} done @param {number} all */
export function progress(done, all) {
  const shown = h("progress", { max: Math.max(1, all), value: done, "aria-label": `${done} of ${all} rounds` });
  return h("span", { class: "progress" }, shown, `${done} / ${all}`);
}

/** @param {string} label @param {import("/static/dom.js").Child} value @param {string} [note] */
export function tile(label, value, note) {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), note && h("div", { class: "note" }, note));
}

/** @param {string} id @param {string} name */
export function jobLink(id, name) {
  return h("a", { href: `/jobs/${encodeURIComponent(id)}`, "data-link": true }, name || id);
}

/** A sentence where a topic cannot be followed. @param {string} topic */
export function problemOf(topic) {
  const said = rows(topic, "problem")[""];
  return said ? h("p", { class: "problem", role: "alert" }, said) : null;
}

/** @param {any} event */
export function detailOf(event) {
  try {
    return event.detail ? JSON.parse(event.detail) : {};
  } catch {
    return {};
  }
}

/** How grave an event is: what an incident says of itself, else by its kind. @param {any} event */
export function gravity(event) {
  const incident = detailOf(event).incident;
  if (incident?.severity) return incident.severity;
  if (/failed|excluded|paused/.test(event.kind)) return "warning";
  return "";
}

/** @param {any} event @param {boolean} [withJob] */
export function eventLine(event, withJob) {
  const incident = detailOf(event).incident;
  return h(
    "li",
    { class: `event ${/^[a-z]+$/.test(gravity(event)) ? gravity(event) : ""}` },
    h("time", { datetime: new Date(event.time * 1000).toISOString(), title: when(event.time) }, moment(event.time)),
    withJob ? h("span", { class: "where" }, jobLink(event.job, rows("overview", "jobs")[event.job]?.name ?? event.job.slice(0, 8))) : null,
    h("span", { class: "kind" }, event.kind.replaceAll("_", " ")),
    h("span", { class: "message" }, event.message, incident?.advice ? h("em", {}, ` ${incident.advice}`) : null),
  );
}

/**
 * Asks before something is changed; says what the coordinator answers.
 * @param {string} title @param {string} text @param {string} yes
 * @param {string} name of the change @param {Record<string, any>} values
 * @param {string} [field] a value that is asked for, such as a reason
 */
export function ask(title, text, yes, name, values, field) {
  const dialog = /** @type {HTMLDialogElement} */ (document.getElementById("ask"));
  const problem = h("p", { class: "problem", role: "alert", hidden: true });
  const input = /** @type {HTMLInputElement} */ (h("input", { id: "ask-field", maxlength: 300, required: true }));
  const form = h(
    "form",
    {
      method: "dialog",
      onsubmit: async (/** @type {Event} */ event) => {
        event.preventDefault();
        try {
          await change(name, field ? { ...values, [field]: input.value } : values);
          dialog.close();
        } catch (error) {
          problem.hidden = false;
          problem.textContent = error instanceof Error ? error.message : String(error);
        }
      },
    },
    h("h2", { id: "ask-title" }, title),
    h("p", {}, text),
    field ? [h("label", { for: "ask-field" }, field), input] : null,
    problem,
    h("div", { class: "buttons" }, h("button", { type: "submit", class: "yes" }, yes), h("button", { type: "button", onclick: () => dialog.close() }, "Leave it as it is")),
  );
  fill(dialog, form);
  dialog.showModal();
}

/** @param {Record<string, number>} values */
export function figuresOf(values) {
  return Object.entries(values).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}
