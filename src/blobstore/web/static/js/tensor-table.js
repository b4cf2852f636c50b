/** The table of tensors: search, types, a place of the model, order. */

import { changed, choose, query } from "./address.js";
import { byId, choiceLink, el, isolated, visible } from "./dom.js";
import { Grid } from "./grid.js";
import { matcher, Ordered, orderOf, orderText } from "./ordering.js";
import { namesIn } from "./place.js";
import { searchBox, slashFocuses } from "./search.js";
import { ORDERS, shares } from "./tensors.js";
import { kind, typed } from "./types.js";
import { count, counted, size, whole } from "./units.js";

const KEYS = ["", ...Object.keys(ORDERS)]; // "": as they are stored
const AS_STORED = { key: "", descending: false };

export class TensorTable {
  #box = byId("search");
  #inPlace;
  #nothing = el("p", { class: "nothing", hidden: true }, "No tensor matches this search.");

  constructor(place, tensors, { isChosen, onChoose }) {
    this.tensors = tensors;
    this.ordered = new Ordered(tensors, { ...ORDERS, "": () => 0 });
    this.grid = new Grid(place, {
      label: "Tensors",
      className: "tensors-grid",
      columns: columns(onChoose),
      onSort: (key) => this.#sort(key),
      isChosen,
    });
    place.append(this.#nothing);
    this.#typeButtons();
    this.#inPlace = namesIn(tensors);
    searchBox(this.#box, "search", () => this.#draw());
    slashFocuses(this.#box);
    this.#draw();
  }

  /** Show what the address says: the back button has changed it. */
  follow() {
    this.#box.value = query().get("search") ?? "";
    this.#draw();
  }

  #order() {
    return orderOf(query().get("sort"), AS_STORED, KEYS);
  }

  #sort(key) {
    const now = this.#order();
    const isNumber = key === "size" || key === "parameters";
    const descending = now.key === key ? !now.descending : isNumber;
    choose({ sort: orderText({ key, descending }) });
    this.#draw();
  }

  #typeButtons() {
    const kinds = shares(this.tensors);
    byId("types").replaceChildren(
      ...kinds.map(({ type, tensors }) => {
        const number = el("span", { class: "number" }, whole(tensors));
        const button = el("button", { type: "button", "data-type": type }, typed(type), number);
        button.addEventListener("click", () => {
          choose({ type: query().get("type") === type ? null : type });
          this.#draw();
        });
        return button;
      }),
    );
    byId("types").hidden = kinds.length < 2;
  }

  #draw() {
    const type = query().get("type");
    const place = query().get("place");
    const isInPlace = this.#inPlace(place);
    const matches = matcher(this.#box.value);
    const order = this.#order();
    const found = this.ordered
      .by(order)
      .filter((tensor) => !type || kind(tensor.type) === type)
      .filter((tensor) => isInPlace(tensor) && matches(tensor.searched));
    this.grid.sorted(order.key, order.descending);
    this.grid.show(found);
    this.#nothing.hidden = found.length > 0;
    byId("found").textContent = this.#tally(found);
    this.#showPlace(place);
    for (const button of byId("types").children) {
      button.setAttribute("aria-pressed", String(button.getAttribute("data-type") === type));
    }
  }

  /** Name the place whose tensors are shown, and let all be shown again. */
  #showPlace(place) {
    byId("place").hidden = !place;
    if (!place) return;
    const all = () => {
      choose({ place: null });
      this.#draw();
      this.#box.focus();
    };
    const button = el("button", { type: "button", class: "quiet", "aria-label": "Show all modules", onclick: all }, "✕");
    byId("place").replaceChildren(el("span", {}, "in ", isolated(place, "module")), button);
  }

  #tally(found) {
    const all = this.tensors.length;
    const nbytes = found.reduce((sum, tensor) => sum + tensor.size, 0);
    const number = found.length < all ? `${whole(found.length)} of ` : "";
    return `${number}${counted(all, "tensor")}, ${size(nbytes)}`;
  }
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
