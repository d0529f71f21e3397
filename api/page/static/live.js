// @ts-check
// The live state of topics, as the browser's one stream tells it; views are woken once a frame.

/** @typedef {{tables: Record<string, Record<string, any>>, lines: any[]}} Shown */

/** @type {Map<string, Shown>} */
const boards = new Map();
/** @type {Set<string>} */
const changed = new Set();
/** @type {(topics: Set<string>) => void} */
let wake = () => {};
/** @type {(state: string) => void} */
let tell = () => {};
let planned = false;
const MOST_LINES = 1000;
const policy = /** @type {any} */ (window).trustedTypes?.createPolicy("rt", { createScriptURL: (/** @type {string} */ url) => url });
const address = "/static/live-worker.js";
const worker = new SharedWorker(policy ? policy.createScriptURL(address) : address, { name: "roundtable" });
const port = worker.port;

port.onmessage = (/** @type {MessageEvent} */ event) => {
  const message = event.data;
  if (message.state) return tell(message.state);
  let board = boards.get(message.topic);
  if (!board) return;
  if (message.whole) {
    board.tables = message.set ?? {};
    board.lines = message.lines ?? [];
  } else {
    for (const [table, rows] of Object.entries(message.set ?? {})) Object.assign((board.tables[table] ??= {}), rows);
    for (const [table, keys] of Object.entries(message.gone ?? {})) for (const key of keys) delete board.tables[table]?.[key];
    board.lines = [...board.lines, ...(message.lines ?? [])].slice(-MOST_LINES);
  }
  changed.add(message.topic);
  if (!planned) {
    planned = true;
    requestAnimationFrame(() => {
      planned = false;
      const topics = new Set(changed);
      changed.clear();
      wake(topics);
    });
  }
};
port.start();
addEventListener("pagehide", () => port.postMessage({ bye: true }));
addEventListener("pageshow", (event) => {
  if (event.persisted) port.postMessage({ topics: [...boards.keys()] });
});

/**
 * Follows these topics from now on, and no others.
 * @param {string[]} topics
 * @param {(topics: Set<string>) => void} woken
 */
export function follow(topics, woken) {
  for (const topic of [...boards.keys()]) if (!topics.includes(topic)) boards.delete(topic);
  for (const topic of topics) if (!boards.has(topic)) boards.set(topic, { tables: {}, lines: [] });
  wake = woken;
  port.postMessage({ topics });
}

/** @param {(state: string) => void} listener */
export function onState(listener) {
  tell = listener;
}

/** Rows of a table by key; empty before anything was heard. @param {string} topic @param {string} table */
export function rows(topic, table) {
  return boards.get(topic)?.tables[table] ?? {};
}

/** @param {string} topic @returns {any[]} */
export function lines(topic) {
  return boards.get(topic)?.lines ?? [];
}

/** Whether anything was heard of a topic. @param {string} topic */
export function heard(topic) {
  return Object.keys(boards.get(topic)?.tables ?? {}).length > 0;
}
