/** Plain tables, for few rows: the text of a plot. */

import { el } from "./dom.js";

/** Return the head of a column of numbers. */
export const number = (title) => ({ title, number: true });

/** Return a table of heads, texts or `number`s; the first cell of each row is its heading. */
export function table(caption, columns, rows) {
  const heads = columns.map((column) => column.title === undefined ? { title: column } : column);
  const head = heads.map((one) => el("th", { scope: "col", class: one.number && "number" }, one.title));
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      cells.map((cell, i) =>
        i
          ? el("td", { class: heads[i].number && "number", "data-title": heads[i].title }, cell)
          : el("th", { scope: "row" }, cell),
      ),
    ),
  );
  return el(
    "div",
    { class: "table", tabindex: 0, role: "region", "aria-label": caption },
    el(
      "table",
      {},
      el("caption", { class: "visually-hidden" }, caption),
      el("thead", {}, el("tr", {}, head)),
      el("tbody", {}, body),
    ),
  );
}

/** Return a table that is folded away until it is asked for: a plot's content as text. */
export function twin(summary, make) {
  const details = el("details", { class: "twin" }, el("summary", {}, summary));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(make());
  });
  return details;
}

/** Return a list of facts. */
export function facts(facts) {
  return el(
    "dl",
    { class: "facts" },
    facts
      .filter(([, value]) => value || value === 0)
      .map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}
