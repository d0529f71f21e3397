// @ts-check
// What has been spent on the privacy of populations, against what budget, and what single jobs promise.
import { fill, h } from "/static/dom.js";
import { number, when } from "/static/format.js";
import { rows } from "/static/live.js";
import { privacyOf } from "/static/job.js";
import { jobLink } from "/static/parts.js";
import { may, read } from "/static/session.js";

const TOPIC = "overview";

export function privacy() {
  const accounts = h("div", {}, h("p", { class: "empty" }, "Looking…"));
  const choice = /** @type {HTMLSelectElement} */ (h("select", { id: "privacy-job" }));
  const one = h("div");
  const node = h("div", {}, h("h1", {}, "Privacy"), h("section", {}, h("h2", {}, "Accounts"), accounts), h("section", {}, h("h2", {}, "What a job promises"), h("div", { class: "bar" }, h("label", { for: "privacy-job" }, "Job"), choice), one));

  async function load() {
    if (!may("Operators/ShowPrivacy")) return fill(accounts, h("p", {}, "Your role may not see this."));
    try {
      const told = await read("/api/read/privacy");
      const budgets = new Map(told.budgets.map((/** @type {any} */ each) => [each.population, each]));
      fill(accounts, told.accounts.length ? told.accounts.map((/** @type {any} */ each) => accountOf(each, budgets.get(each.population))) : h("p", { class: "empty" }, "Nothing has been spent on anybody's privacy."),
        told.kept_by_silos.length ? h("p", {}, `Only the silos themselves keep the accounts of these jobs: ${told.kept_by_silos.join(", ")}.`) : null);
    } catch (error) {
      fill(accounts, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  }
  async function job() {
    if (!choice.value) return fill(one);
    try {
      const told = await read(`/api/read/job-privacy?job=${encodeURIComponent(choice.value)}`);
      fill(one, h("p", {}, jobLink(choice.value, choice.selectedOptions[0].textContent ?? "")), privacyOf(told));
    } catch (error) {
      fill(one, h("p", { class: "problem", role: "alert" }, error instanceof Error ? error.message : String(error)));
    }
  }
  choice.addEventListener("change", job);
  load();
  let shown = "";
  const update = () => {
    const all = Object.values(rows(TOPIC, "jobs")).sort((first, other) => other.submitted - first.submitted);
    const form = all.map((each) => each.id).join();
    if (form === shown) return;
    shown = form;
    const before = choice.value;
    fill(choice, h("option", { value: "" }, "choose one"), all.map((each) => h("option", { value: each.id }, `${each.name} (${each.status})`)));
    choice.value = all.some((each) => each.id === before) ? before : "";
  };
  return { title: "Privacy", node, topics: [TOPIC], update };
}

/** @param {any} account @param {any} budget */
function accountOf(account, budget) {
  const most = budget?.epsilon;
  return h("article", { class: "account" },
    h("h3", {}, account.population, account.silo ? ` · ${account.silo}` : " · every silo"),
    h("p", {}, `ε ${number(account.epsilon)} at δ ${number(account.delta)} after ${account.releases} releases (${account.accountant.toUpperCase()}, ${account.relation.replace("_", " ")}).`),
    most ? [h("meter", { min: 0, max: most, high: most * 0.8, value: account.epsilon, "aria-label": `epsilon ${number(account.epsilon)} of ${number(most)}` }), h("p", {}, `Budget ε ${number(most)} at δ ${number(budget.delta)}, set by ${budget.author} on ${when(budget.time)}.`)] : h("p", {}, "No budget is set: `roundtable privacy budget POPULATION --epsilon …` sets one."),
    account.reserved_epsilon > account.epsilon ? h("p", {}, `With what rounds in flight have reserved: ε ${number(account.reserved_epsilon)}.`) : null,
    h("p", { class: "words" }, account.statement));
}
