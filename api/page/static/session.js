// @ts-check
// Who is signed in, and what the page asks of the coordinator.

/** @type {{role: string, name: string, may: string[], forgery_token: string, grafana: string}} */
export let session = { role: "", name: "", may: [], forgery_token: "", grafana: "" };

export async function begin() {
  session = await read("/api/session");
}

/** @param {string} call for example "Operators/PauseJob" */
export function may(call) {
  return session.may.includes(call);
}

/** What the coordinator answers, or an Error with its sentence. @param {string} path */
export async function read(path) {
  return answered(await fetch(path, { cache: "no-store", credentials: "same-origin" }));
}

/** @param {string} name @param {Record<string, any>} values */
export async function change(name, values) {
  return post(`/api/change/${name}`, values);
}

/** @param {string} path @param {Record<string, any>} values */
export async function post(path, values) {
  const headers = { "content-type": "application/json", "x-roundtable-token": session.forgery_token };
  return answered(await fetch(path, { method: "POST", headers, body: JSON.stringify(values), credentials: "same-origin" }));
}

/** @param {Response} answer */
async function answered(answer) {
  if (answer.status === 401) signIn("ended");
  const values = await answer.json().catch(() => ({ error: `the coordinator answers with ${answer.status}` }));
  if (!answer.ok) throw new Error(values.error ?? `the coordinator answers with ${answer.status}`);
  return values;
}

/** @param {string} why */
export function signIn(why) {
  location.assign(`/sign-in?why=${why}&next=${encodeURIComponent(location.pathname + location.search)}`);
}
