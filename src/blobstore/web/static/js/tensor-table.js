/** The table of tensors: of a search, a type, a place of the model. */

import { changed, choose, query } from "./address.js";
import { byId, choiceLink, el, isolated, visible } from "./dom.js";
import { SearchedGrid } from "./search.js";
import { kind, ORDERS, shares, typed } from "./tensors.js";
import { count, counted, size, whole } from "./units.js";

/** Return the table of tensors, a `SearchedGrid`. */
export function tensorTable(place, tensors, { isChosen, onChoose }) {
  const inModule = namesIn(tensors);
  const inPlace = namesIn(tensors);
  const table = new SearchedGrid(place, tensors, {
    box: byId("search"),
    parameter: "search",
    nothing: "No tensor matches this search.",
    label: "Tensors",
    className: "tensors-grid",
    columns: columns(onChoose),
    orders: ORDERS,
    first: { key: "name", descending: false },
    ascending: ["name", "type"],
    searched: (tensor) => tensor.searched,
    isShown: (tensor) => {
      const type = query().get("type");
      return (!type || kind(tensor.type) === type) && inModule(moduleOf(query().get("place")))(tensor);
    },
    isMarked: (tensor) => isPart(query().get("place")) && inPlace(query().get("place"))(tensor),
    isChosen,
    onDraw: (found) => {
      byId("found").textContent = tally(found, tensors.length);
      for (const button of byId("types").children) {
        button.setAttribute("aria-pressed", String(button.getAttribute("data-type") === query().get("type")));
      }
      showPlace(table);
    },
  });
  showTypes(tensors, () => table.draw());
  table.follow();
  return table;
}

function showTypes(tensors, draw) {
  const kinds = shares(tensors);
  byId("types").replaceChildren(
    ...kinds.map(({ type, tensors: number }) => {
      const onclick = () => {
        choose({ type: query().get("type") === type ? null : type });
        draw();
      };
      const button = { type: "button", "data-type": type, onclick };
      return el("button", button, typed(type), el("span", { class: "number" }, whole(number)));
    }),
  );
  byId("types").hidden = kinds.length < 2;
}

/** Return the module of a place, whose tensors are shown: it ends at the first number. */
const moduleOf = (place) => /^(?:.*?\.)?\d{1,9}(?=\.|$)/.exec(place ?? "")?.[0] ?? place;

const isPart = (place) => Boolean(place) && moduleOf(place) !== place;

/** Name the place whose tensors are shown, and let all be shown again. */
function showPlace(table) {
  const place = query().get("place");
  byId("place").hidden = !place;
  if (!place) return;
  const all = () => {
    choose({ place: null });
    table.draw();
    table.box.focus();
  };
  const button = el("button", { type: "button", class: "quiet", "aria-label": "Show all modules", onclick: all }, "✕");
  byId("place").replaceChildren(el("span", {}, "in ", isolated(moduleOf(place), "module")), button);
}

function tally(found, all) {
  const nbytes = found.reduce((sum, tensor) => sum + tensor.size, 0);
  const number = found.length < all ? `${whole(found.length)} of ` : "";
  return `${number}${counted(all, "tensor")}, ${size(nbytes)}`;
}

function columns(onChoose) {
  const link = (tensor) =>
    choiceLink(
      changed({ tensor: tensor.name }),
      () => onChoose(tensor),
      { title: visible(tensor.name) },
      isolated(tensor.name),
    );
  return [
    { key: "name", title: "Name", cell: link },
    { key: "type", title: "Type", cell: (tensor) => typed(tensor.type) },
    { key: "shape", title: "Shape", fixed: true, cell: (tensor) => tensor.shape },
    { key: "parameters", title: "Parameters", cell: (tensor) => count(tensor.parameters) },
    { key: "size", title: "Size", cell: (tensor) => size(tensor.size) },
  ];
}

/**
 * Return a function that says which items are in a place: each place is looked up once.
 *
 * A place is the beginning of a name, as pages show it: whole parts of it, of which `*` is any
 * number. Everything is in no place.
 */
function namesIn(items) {
  let last = null;
  let found = new Set();
  return (place) => {
    if (!place) return () => true;
    if (place !== last) {
      const wanted = place.split(".");
      const isIn = (parts) => wanted.every((one, i) => one === parts[i] || (one === "*" && /^\d{1,9}$/.test(parts[i])));
      found = new Set(items.filter((item) => isIn(visible(item.name).split("."))));
      last = place;
    }
    return (item) => found.has(item);
  };
}
