// @ts-check
// Elements from values. Every text of another party goes through textContent: nothing here makes markup of it.

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * Makes an element. Keys of `props`: `class`, `on…` for listeners, anything else is an attribute.
 * @param {string} tag
 * @param {Record<string, any>} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export function h(tag, props = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  add(made, children);
  return made;
}

/** @param {Node} parent @param {any[]} children */
export function add(parent, children) {
  for (const child of children.flat(3)) {
    if (child === null || child === undefined || child === false) continue;
    parent.appendChild(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Puts children in the place of what an element holds. @param {Element} parent @param {...any} children */
export function fill(parent, ...children) {
  const made = document.createDocumentFragment();
  add(made, children);
  parent.replaceChildren(made);
}

/** Writes a text only where it has changed. @param {Element} element @param {string} text */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** What may be wider than the page, such as a table: it scrolls by itself. @param {string} label @param {...(Child | Child[])} children */
export function scrolled(label, ...children) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, ...children);
}

/**
 * A table that keeps its rows' elements, and writes the cells that have changed.
 * @template Row
 */
export class Table {
  /**
   * @param {string} caption for screen readers
   * @param {{title: string, number?: boolean, cell: (row: Row, key: string) => Child | Child[]}[]} columns
   * @param {string} empty what is shown where there are no rows
   */
  constructor(caption, columns, empty) {
    this.columns = columns;
    this.body = h("tbody");
    /** @type {Map<string, {element: HTMLElement, shown: string[]}>} */
    this.rows = new Map();
    this.empty = h("p", { class: "empty" }, empty);
    const head = columns.map((column) => h("th", { scope: "col", class: column.number && "number" }, column.title));
    this.table = h("table", {}, h("caption", {}, caption), h("thead", {}, h("tr", {}, head)), this.body);
    this.node = scrolled(caption, this.table, this.empty);
  }

  /** @param {[string, Row][]} rows by key, in their order */
  show(rows) {
    const kept = new Set(rows.map(([key]) => key));
    for (const [key, row] of this.rows) {
      if (!kept.has(key)) {
        row.element.remove();
        this.rows.delete(key);
      }
    }
    let place = this.body.firstElementChild;
    for (const [key, value] of rows) {
      let row = this.rows.get(key);
      if (!row) {
        row = { element: h("tr", {}, this.columns.map((column) => h("td", { class: column.number && "number" }))), shown: [] };
        this.rows.set(key, row);
      }
      this.columns.forEach((column, index) => {
        const cell = [column.cell(value, key)].flat(3).filter((child) => child !== null && child !== undefined && child !== false);
        const text = cell.map((child) => (child instanceof Element ? child.outerHTML : String(child))).join("\u0000");
        if (row && row.shown[index] !== text) {
          row.shown[index] = text;
          fill(row.element.children[index], cell);
        }
      });
      if (place === row.element) place = place.nextElementSibling;
      else this.body.insertBefore(row.element, place);
    }
    this.empty.hidden = rows.length > 0;
    this.table.hidden = rows.length === 0;
  }
}
