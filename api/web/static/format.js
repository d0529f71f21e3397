// @ts-check
// Numbers, times and states in words. Times are in the viewer's own zone.

const clock = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
const short = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const figures = new Intl.NumberFormat(undefined, { maximumSignificantDigits: 4 });

/** @param {number} seconds Unix time */
export function when(seconds) {
  return seconds ? clock.format(new Date(seconds * 1000)) : "–";
}

/** The time of day, with the date where that is not today's. @param {number} seconds Unix time */
export function moment(seconds) {
  const told = new Date(seconds * 1000);
  return seconds && told.toDateString() === new Date().toDateString() ? short.format(told) : when(seconds);
}

/** @param {number | null | undefined} value */
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return value !== 0 && Math.abs(value) < 1e-4 ? value.toExponential(2) : figures.format(value);
}

/** @param {number | string | null | undefined} value */
export function bytes(value) {
  let rest = Number(value ?? NaN);
  if (!Number.isFinite(rest)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (rest >= 1024 && unit < units.length - 1) {
    rest /= 1024;
    unit += 1;
  }
  return `${figures.format(rest)} ${units[unit]}`;
}

/** @param {number} seconds */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return "–";
  const whole = Math.max(0, Math.round(seconds));
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.round(whole / 60)} min`;
  if (whole < 172800) return `${Math.round(whole / 3600)} h`;
  return `${Math.round(whole / 86400)} d`;
}

/** How a state looks: a word and a mark, so that nobody needs its colour. @param {string} state */
export function mark(state) {
  const marks = {
    running: "▶", finished: "✓", done: "✓", available: "●", training: "▶", uploading: "↑", evaluating: "◇",
    waiting: "…", paused: "❚❚", offline: "○", dropped: "✗", failed: "✗", cancelled: "✗", revoked: "✗",
  };
  return marks[/** @type {keyof typeof marks} */ (state)] ?? "·";
}

/** A cell of a CSV file that no spreadsheet takes for a formula. @param {unknown} value */
export function csvCell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (/^[=+\-@\t\r]/.test(text) && Number.isNaN(Number(text))) text = `'${text}`;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Offers a table to the viewer as CSV. @param {string} name @param {unknown[][]} rows */
export function download(name, rows) {
  save(name, rows.map((row) => row.map(csvCell).join(",")).join("\r\n"), "text/csv");
}

/** Offers a file to the viewer. @param {string} name @param {string} text @param {string} type */
export function save(name, text, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name.replace(/[^A-Za-z0-9._-]/g, "_");
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
