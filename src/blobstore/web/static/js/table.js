/** Plain tables, for few rows: the text of a plot. */

import { el } from "./dom.js";

/** Return a table; the first cell of each row is its heading. */
export function table(caption, heads, rows) {
  const head = heads.map(({ title, number }) => el("th", { scope: "col", class: number && "number" }, title));
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      cells.map((cell, i) =>
        i
          ? el("td", { class: heads[i].number && "number" }, cell)
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
