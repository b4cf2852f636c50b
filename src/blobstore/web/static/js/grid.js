/** A table of many rows, of which only those in sight are elements. */

import { el } from "./dom.js";

const BEYOND = 8; // rows that are drawn beyond each end, so that scrolling shows no gaps
const STEPS = { ArrowDown: 1, ArrowUp: -1 };

/**
 * A grid: rows of one height, a head whose buttons sort, and one row that Tab reaches; the arrow
 * keys, Page Up, Page Down, Home and End go to others.
 */
export class Grid {
  #items = [];
  #drawn = new Map();
  #active = 0;
  #frame = 0;

  constructor(place, options) {
    this.options = options;
    this.head = el("div", { role: "row", class: "grid-head", "aria-rowindex": 1 });
    this.body = el("div", { role: "rowgroup", class: "grid-body" });
    const parts = [el("div", { role: "rowgroup", class: "grid-top" }, this.head), this.body];
    this.root = el(
      "div",
      { role: "grid", class: `grid ${options.className}`, "aria-label": options.label },
      ...parts,
    );
    this.head.append(...options.columns.map((column) => this.#heading(column)));
    this.root.addEventListener("scroll", () => this.#soon(), { passive: true });
    this.body.addEventListener("keydown", (event) => this.#key(event));
    this.body.addEventListener("focusin", (event) => this.#focused(event));
    new ResizeObserver(() => this.#soon()).observe(this.root);
    place.append(this.root);
  }

  /** Show other rows, from the first one on. */
  show(items) {
    this.#items = items;
    this.#active = 0;
    this.root.setAttribute("aria-rowcount", String(items.length + 1));
    this.body.style.height = `${items.length * this.#rowHeight()}px`;
    this.root.scrollTop = 0;
    for (const row of this.#drawn.values()) row.remove();
    this.#drawn.clear();
    this.#draw();
  }

  /** Draw again what depends on `isChosen`. */
  refresh() {
    for (const [item, row] of this.#drawn) this.#mark(item, row);
  }

  /** Say which column sorts, and how. */
  sorted(key, descending) {
    for (const heading of this.head.children) {
      const isThis = heading.getAttribute("data-key") === key;
      if (isThis) heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      else heading.removeAttribute("aria-sort");
    }
  }

  /** Return the first row in sight; undefined if that is the first of all. */
  first() {
    return this.#items[Math.round(this.root.scrollTop / this.#rowHeight()) || -1];
  }

  /** Scroll to a row of that name, if there is one. */
  startAt(name) {
    const index = this.#items.findIndex((item) => item.name === name);
    if (index < 0) return;
    this.root.scrollTop = index * this.#rowHeight();
    this.#draw();
  }

  /** Scroll a row into sight, and let Tab reach it. */
  reveal(item, { focus = false } = {}) {
    const index = this.#items.indexOf(item);
    if (index >= 0) this.#go(index, focus);
  }

  #heading(column) {
    const sort = () => this.options.onSort(column.key);
    const content = column.fixed
      ? el("span", {}, column.title)
      : el("button", { type: "button", onclick: sort }, column.title);
    const attributes = { role: "columnheader", class: `cell ${column.key}`, "data-key": column.key };
    return el("div", attributes, content);
  }

  #rowHeight() {
    return parseFloat(getComputedStyle(this.root).getPropertyValue("--row")) || 32;
  }

  #soon() {
    if (this.#frame) return;
    this.#frame = requestAnimationFrame(() => {
      this.#frame = 0;
      this.#draw();
    });
  }

  /** Draw the rows in sight, and the active one, which may have the focus. */
  #draw() {
    const height = this.#rowHeight();
    const top = Math.floor(this.root.scrollTop / height) - BEYOND;
    const first = Math.max(0, top);
    const last = top + Math.ceil(this.root.clientHeight / height) + 2 * BEYOND;
    const wanted = this.#items.slice(first, last).map((item, i) => ({ item, index: first + i }));
    const active = this.#items[this.#active];
    if (active !== undefined && (this.#active < first || this.#active >= last)) {
      wanted.push({ item: active, index: this.#active });
    }
    this.body.style.height = `${this.#items.length * height}px`;
    this.#forget(new Set(wanted.map(({ item }) => item)));
    for (const { item, index } of wanted) this.#place(item, index, index * height);
  }

  #forget(wanted) {
    for (const [item, row] of this.#drawn) {
      if (wanted.has(item)) continue;
      row.remove();
      this.#drawn.delete(item);
    }
  }

  #place(item, index, top) {
    const row = this.#drawn.get(item) ?? this.#row(item);
    row.setAttribute("aria-rowindex", String(index + 2));
    row.style.transform = `translateY(${top}px)`;
    row.dataset.index = String(index);
    this.#reachable(row, index === this.#active);
  }

  #row(item) {
    const cells = this.options.columns.map((column) =>
      el("div", { role: "gridcell", class: `cell ${column.key}` }, column.cell(item)),
    );
    const row = el("div", { role: "row", class: "grid-row" }, cells);
    this.#mark(item, row);
    this.#drawn.set(item, row);
    this.body.append(row);
    return row;
  }

  #mark(item, row) {
    if (this.options.isChosen) {
      row.setAttribute("aria-selected", String(this.options.isChosen(item)));
      row.setAttribute("aria-current", String(this.options.isMarked(item)));
    }
  }

  #reachable(row, isActive) {
    for (const one of row.querySelectorAll("a, button, input")) {
      one.tabIndex = isActive ? 0 : -1;
    }
  }

  #focused(event) {
    const row = event.target.closest(".grid-row");
    const index = Number(row?.dataset.index ?? this.#active);
    if (index !== this.#active) this.#activate(index);
  }

  #activate(index) {
    const before = this.#drawn.get(this.#items[this.#active]);
    if (before) this.#reachable(before, false);
    this.#active = index;
    const now = this.#drawn.get(this.#items[index]);
    if (now) this.#reachable(now, true);
  }

  #key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.#items.length) return;
    const page = Math.max(1, Math.floor(this.root.clientHeight / this.#rowHeight()) - 2);
    const last = this.#items.length - 1;
    const places = {
      ArrowDown: this.#active + STEPS.ArrowDown,
      ArrowUp: this.#active + STEPS.ArrowUp,
      PageDown: this.#active + page,
      PageUp: this.#active - page,
      Home: 0,
      End: last,
    };
    if (!(event.key in places)) return;
    event.preventDefault();
    this.#go(Math.max(0, Math.min(last, places[event.key])), true);
  }

  #go(index, focus) {
    this.#activate(index);
    const height = this.#rowHeight();
    const head = this.head.offsetHeight;
    const top = index * height;
    const sight = this.root.clientHeight - head;
    if (top < this.root.scrollTop) this.root.scrollTop = top;
    else if (top + height > this.root.scrollTop + sight) this.root.scrollTop = top + height - sight;
    this.#draw();
    const row = this.#drawn.get(this.#items[index]);
    if (focus) row?.querySelector("a")?.focus({ preventScroll: true });
  }
}
