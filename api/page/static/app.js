// @ts-check
// Which view the address asks for; the views themselves are a file each.
import { fill, h, say } from "/static/dom.js";
import { follow, onState } from "/static/live.js";
import { begin, post, session, signIn } from "/static/session.js";
import { overview } from "/static/overview.js";
import { jobs } from "/static/jobs.js";
import { job } from "/static/job.js";
import { analyses, analysis } from "/static/analyses.js";
import { silos } from "/static/silos.js";
import { privacy } from "/static/privacy.js";
import { audit } from "/static/audit.js";
import { compare } from "/static/compare.js";

/**
 * A view: what it shows, which topics it follows, what it does when they change, and at its end.
 * @typedef {{title: string, node: Node, topics: string[], update: () => void, close?: () => void}} View
 */

/** @type {[RegExp, (...parts: string[]) => View][]} */
const routes = [
  [/^\/$/, overview],
  [/^\/jobs$/, jobs],
  [/^\/jobs\/([^/]+)$/, job],
  [/^\/analyses$/, analyses],
  [/^\/analyses\/([^/]+)$/, analysis],
  [/^\/silos$/, silos],
  [/^\/privacy$/, privacy],
  [/^\/audit$/, audit],
  [/^\/compare$/, compare],
];
const main = /** @type {HTMLElement} */ (document.getElementById("main"));
const state = /** @type {HTMLElement} */ (document.getElementById("state"));
/** @type {View | null} */
let shown = null;

function show() {
  shown?.close?.();
  const found = routes.map(([form, make]) => ({ parts: form.exec(location.pathname), make })).find(({ parts }) => parts);
  const view = found?.parts
    ? found.make(...found.parts.slice(1).map(decodeURIComponent))
    : { title: "Not found", node: h("p", {}, "There is no such page."), topics: [], update: () => {} };
  shown = view;
  document.title = `${view.title} · Roundtable`;
  for (const link of document.querySelectorAll("nav a")) {
    const target = link.getAttribute("href") ?? "";
    const here = target === "/" ? location.pathname === "/" : location.pathname.startsWith(target);
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  fill(main, view.node);
  follow(view.topics, () => view.update());
  view.update();
}

/** @param {string} address */
export function go(address) {
  history.pushState(null, "", address);
  show();
  main.focus();
  scrollTo(0, 0);
}

document.addEventListener("click", (event) => {
  const link = event.target instanceof Element ? event.target.closest("a[data-link]") : null;
  if (!link || event.defaultPrevented || event.button || event.metaKey || event.ctrlKey || event.shiftKey) return;
  event.preventDefault();
  go(link.getAttribute("href") ?? "/");
});
addEventListener("popstate", show);

const words = { live: "live", broken: "the coordinator does not answer; trying again", connecting: "connecting", ended: "signed out" };
onState((next) => {
  say(state, words[/** @type {keyof typeof words} */ (next)] ?? next);
  state.className = next;
  if (next === "ended") signIn("ended");
});

document.getElementById("sign-out")?.addEventListener("click", async () => {
  await post("/sign-out", {});
  location.assign("/sign-in");
});

try {
  await begin();
  say(/** @type {HTMLElement} */ (document.getElementById("who")), `${session.name} (${session.role})`);
  if (session.grafana) document.querySelector("nav")?.append(h("a", { href: session.grafana, target: "_blank", rel: "noreferrer" }, "Grafana ↗"));
  show();
} catch (error) {
  fill(main, h("p", { class: "problem", role: "alert" }, `The page could not begin: ${error instanceof Error ? error.message : error}`));
}
