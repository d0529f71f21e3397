// @ts-check
// One stream of events for all tabs of a browser: HTTP/1.1 allows six connections, and each stream would be one.
// A tab says {topics: [...]}; it gets every message of those topics, and {state: "live" | "broken" | "ended"}.

/** @type {Map<MessagePort, Set<string>>} */
const tabs = new Map();
/** @type {Map<string, {tables: Record<string, Record<string, any>>, lines: any[]}>} */
const known = new Map();
/** @type {EventSource | null} */
let source = null;
let followed = "";
let state = "connecting";
let later = 0;
const MOST_LINES = 1000;

/** @param {string} next */
function become(next) {
  state = next;
  for (const port of tabs.keys()) port.postMessage({ state });
}

function listen() {
  const topics = [...new Set([...tabs.values()].flatMap((each) => [...each]))].sort();
  const wanted = topics.join(",");
  if (wanted === followed && source && source.readyState !== EventSource.CLOSED) return;
  source?.close();
  followed = wanted;
  for (const topic of known.keys()) if (!topics.includes(topic)) known.delete(topic);
  if (!wanted) return;
  source = new EventSource(`/api/live?topics=${encodeURIComponent(wanted)}`);
  source.onopen = () => become("live");
  source.onmessage = (event) => hear(JSON.parse(event.data));
  source.addEventListener("ended", () => {
    source?.close();
    become("ended");
  });
  source.onerror = () => {
    // An answer other than 200 ends an EventSource for good: the session may be over, or the service restarting.
    become("broken");
    if (source?.readyState === EventSource.CLOSED) {
      clearTimeout(later);
      later = setTimeout(again, 2000);
    }
  };
}

async function again() {
  try {
    const answer = await fetch("/api/session", { cache: "no-store" });
    if (answer.status === 401) return become("ended");
  } catch {
    // The coordinator is away; it is tried again.
  }
  followed = "";
  listen();
}

/** @param {any} message */
function hear(message) {
  let board = known.get(message.topic);
  if (!board || message.whole) {
    board = { tables: {}, lines: [] };
    known.set(message.topic, board);
  }
  for (const [table, rows] of Object.entries(message.set ?? {})) {
    board.tables[table] = message.whole ? rows : { ...board.tables[table], ...rows };
  }
  for (const [table, keys] of Object.entries(message.gone ?? {})) {
    for (const key of keys) delete board.tables[table]?.[key];
  }
  board.lines = [...board.lines, ...(message.lines ?? [])].slice(-MOST_LINES);
  for (const [port, topics] of tabs) if (topics.has(message.topic)) port.postMessage(message);
}

/** @param {MessagePort} port */
function connect(port) {
  port.onmessage = (event) => {
    if (event.data.bye) tabs.delete(port);
    else {
      tabs.set(port, new Set(event.data.topics));
      port.postMessage({ state });
      for (const topic of event.data.topics) {
        const board = known.get(topic);
        if (board) port.postMessage({ topic, whole: true, set: board.tables, lines: board.lines });
      }
    }
    listen();
  };
}

self.addEventListener("connect", (event) => connect(/** @type {any} */ (event).ports[0]));
