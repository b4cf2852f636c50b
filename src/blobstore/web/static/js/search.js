/** Tables of many rows that are searched and sorted; the address says how. */

import { choose, query, settled } from "./address.js";
import { el } from "./dom.js";
import { Grid } from "./grid.js";
import { onBack } from "./page.js";

/** Return names in the order in which people count: layers.2 before layers.10. */
export const counting = (name) => name.replace(/\d+/g, (digits) => digits.padStart(9, "0"));

/** A grid of items with a search box, and heads that sort; each order is made once. */
export class SearchedGrid {
  #made = new Map();

  /**
   * `orders`: what each column sorts by; null is last. `first`: the order without one in the address.
   * `ascending`: columns that sort upwards first. `searched`: the text of an item, in lower case.
   * `onDraw` is called with the items that are shown.
   */
  constructor(place, items, { box, parameter, nothing, onDraw, isShown = () => true, ...options }) {
    Object.assign(this, { items, box, parameter, onDraw, isShown, options });
    this.grid = new Grid(place, { ...options, onSort: (key) => this.#sort(key) });
    this.nothing = el("p", { class: "nothing", hidden: true }, nothing);
    place.append(this.nothing);
    this.#connect();
    onBack(() => this.follow());
  }

  /** Show what the address says: the back button or another control has changed it. */
  follow() {
    this.box.value = query().get(this.parameter) ?? "";
    this.draw();
    this.grid.startAt(query().get("row"));
  }

  draw() {
    const order = this.#order();
    const matches = matcher(this.box.value);
    const isFound = (item) => this.isShown(item) && matches(this.options.searched(item));
    const found = this.#sorted(order).filter(isFound);
    this.grid.sorted(order.key, order.descending);
    this.grid.show(found);
    this.nothing.hidden = found.length > 0;
    this.onDraw(found);
  }

  /** Return the order that the address names: `size`, or `-size` for the largest first. */
  #order() {
    const text = query().get("sort");
    const key = text?.replace(/^-/, "");
    if (text === null || !Object.hasOwn(this.options.orders, key)) return this.options.first;
    return { key, descending: text.startsWith("-") };
  }

  #sort(key) {
    const now = this.#order();
    const descending = now.key === key ? !now.descending : !this.options.ascending.includes(key);
    choose({ sort: `${descending ? "-" : ""}${key}` });
    this.draw();
  }

  /** Return all items in an order. Equal ones keep their order, in both directions. */
  #sorted({ key, descending }) {
    const made = this.#made.get(`${key} ${descending}`);
    if (made) return made;
    const sign = descending ? -1 : 1;
    const keyed = this.items.map((item) => ({ item, value: this.options.orders[key](item) }));
    keyed.sort(({ value: a }, { value: b }) => {
      if (a === null || b === null) return (a === null) - (b === null);
      return a < b ? -sign : a > b ? sign : 0;
    });
    const found = keyed.map(({ item }) => item);
    this.#made.set(`${key} ${descending}`, found);
    return found;
  }

  /** Connect the box with its parameter: `/` goes to it from anywhere, Escape empties it. */
  #connect() {
    const { box, parameter } = this;
    const settle = () => {
      if ((query().get(parameter) ?? "") !== box.value) choose({ [parameter]: box.value }, { replace: true });
    };
    const soon = settled(settle);
    box.addEventListener("input", () => {
      this.draw();
      soon();
    });
    const keepRow = settled(() => choose({ row: this.grid.first()?.name }, { replace: true }));
    this.grid.root.addEventListener("scroll", keepRow, { passive: true });
    box.addEventListener("change", settle);
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !box.value) return;
      event.preventDefault();
      box.value = "";
      this.draw();
      settle();
    });
    addEventListener("pagehide", settle);
    addEventListener("keydown", (event) => {
      const isElsewhere = !event.target.closest("input:not([type=checkbox]), select, textarea");
      if (event.key !== "/" || event.ctrlKey || event.metaKey || event.altKey || !isElsewhere) return;
      event.preventDefault();
      box.focus();
      box.select();
    });
  }
}

/** Return a function that says whether a text in lower case has all words of a search. */
function matcher(search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 1) return (text) => text.includes(words[0]);
  return (text) => words.every((word) => text.includes(word));
}
