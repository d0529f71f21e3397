// @ts-check
// The page's token, which this tab keeps, and what is asked with it.

const KEY = "roundtable-silo-token";

/** Takes the token from behind the address's #, where it is never sent, and out of the address. */
export function takeToken() {
  const shown = location.hash.slice(1);
  if (/^[A-Za-z0-9_-]{32,}$/.test(shown)) {
    sessionStorage.setItem(KEY, shown);
    history.replaceState(null, "", location.pathname + location.search);
  }
}

/** @param {string} token */
export function keepToken(token) {
  sessionStorage.setItem(KEY, token.trim().replace(/^.*#/, ""));
}

export class Stranger extends Error {}

/** What the silo answers, or an Error with its sentence. @param {string} path @param {Record<string, string>} [values] */
export async function call(path, values) {
  const headers = { authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}`, "content-type": "application/json" };
  const answer = await fetch(path, values ? { method: "POST", headers, body: JSON.stringify(values) } : { headers, cache: "no-store" });
  if (answer.status === 204) return { digest: "", values: null };
  const told = await answer.json().catch(() => ({ error: `the page answers with ${answer.status}` }));
  if (answer.status === 401) throw new Stranger(told.error);
  if (!answer.ok) throw new Error(told.error ?? `the page answers with ${answer.status}`);
  return { digest: answer.headers.get("x-roundtable-digest") ?? "", values: told };
}

/** @param {string} name @param {Record<string, string>} values */
export async function change(name, values) {
  return (await call(`/api/change/${name}`, values)).values;
}
