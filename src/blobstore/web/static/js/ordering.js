/** The order and the search of a table's rows. */

/** Return names in the order in which people count: layers.2 before layers.10. */
export const counting = (name) => name.replace(/\d+/g, (digits) => digits.padStart(9, "0"));

/** Return the order that an address names: `size`, or `-size` for the largest first. */
export function orderOf(text, otherwise, keys) {
  const descending = text?.startsWith("-") ?? false;
  const key = text?.replace(/^-/, "") ?? "";
  return keys.includes(key) ? { key, descending } : otherwise;
}

/** Return the text that an address has for an order. */
export const orderText = ({ key, descending }) => `${descending ? "-" : ""}${key}`;

/** Items with the texts that are searched, in an order; each order is made once. */
export class Ordered {
  #made = new Map();

  constructor(items, orders) {
    this.items = items;
    this.orders = orders;
  }

  /** Return all items in an order. Equal ones stay as they came, in both directions. */
  by(order) {
    const text = orderText(order);
    const made = this.#made.get(text) ?? this.#sorted(order);
    this.#made.set(text, made);
    return made;
  }

  #sorted({ key, descending }) {
    const of = this.orders[key];
    const sign = descending ? -1 : 1;
    const known = [];
    const unknown = [];
    for (const item of this.items) {
      const value = of(item);
      if (value === null) unknown.push(item);
      else known.push({ item, key: value });
    }
    known.sort((a, b) => (a.key < b.key ? -sign : a.key > b.key ? sign : 0));
    return [...known.map(({ item }) => item), ...unknown];
  }
}

/** Return a function that says whether a text in lower case has all words of a search. */
export function matcher(search) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  if (words.length === 1) return (text) => text.includes(words[0]);
  return (text) => words.every((word) => text.includes(word));
}
