/** The page of all models: filter, sort, choose some to compare. */

import { address, choose, query } from "./address.js";
import { ask } from "./api.js";
import { byId, el, isolated, modelLink, visible, when } from "./dom.js";
import { fill, missing } from "./loading.js";
import { SearchedGrid } from "./search.js";
import { typed } from "./tensors.js";
import { bits, count, counted, short, size, whole } from "./units.js";

const ORDERS = {
  name: (model) => model.name,
  size: (model) => model.size,
  type: (model) => model.quant_type,
  bits: (model) => model.bits_per_weight,
  parameters: (model) => model.parameters,
  modified: (model) => (model.modified === null ? null : Date.parse(model.modified)),
};

const chosen = new Set(query().getAll("chosen"));

function show(models) {
  if (!models.length) {
    byId("models").append(missing("This store has no models yet. Import one:", "blobstore import FOLDER"));
    return;
  }
  byId("tools").hidden = false;
  const table = new SearchedGrid(byId("models"), models, {
    ...TABLE,
    onDraw: (found) => {
      byId("count").textContent = tally(found, models);
    },
  });
  table.follow();
  showChosen();
}

const searched = (model) =>
  `${model.name} ${model.error ? "broken" : (model.quant_type ?? "")}`.toLowerCase();

function tally(found, all) {
  return found.length === all.length
    ? counted(all.length, "model")
    : `${whole(found.length)} of ${counted(all.length, "model")}`;
}

function nameCell(model) {
  const link = modelLink(model.name);
  const packed = model.packed ? el("span", { class: "badge" }, "packed") : null;
  const store = model.store ? el("span", { class: "soft" }, visible(model.store)) : null;
  if (!model.error) return el("span", { class: "name-cell" }, link, packed, store);
  const reason = el("span", { class: "reason", title: visible(model.error) }, isolated(model.error));
  return el("span", { class: "name-cell" }, link, reason);
}

function checkbox(model) {
  const box = el("input", { type: "checkbox", "aria-label": `Compare ${visible(model.name)}` });
  box.checked = chosen.has(model.name);
  box.disabled = Boolean(model.error);
  box.addEventListener("change", () => {
    if (box.checked) chosen.add(model.name);
    else chosen.delete(model.name);
    choose({ chosen: [...chosen] }, { replace: true });
    showChosen();
  });
  return box;
}

function showChosen() {
  const link = el("a", { class: "button", href: address("/compare", { model: [...chosen] }) }, "Compare");
  const text = chosen.size ? `${counted(chosen.size, "model")} chosen` : "";
  byId("chosen").replaceChildren(...(chosen.size ? [el("span", {}, text), link] : []));
}

const TABLE = {
  box: byId("filter"),
  parameter: "filter",
  nothing: "No model matches this filter.",
  label: "Models",
  className: "models-grid",
  orders: ORDERS,
  first: { key: "modified", descending: true },
  ascending: ["name", "type"],
  searched,
  columns: [
    { key: "pick", title: "Compare", fixed: true, cell: checkbox },
    { key: "name", title: "Name", cell: nameCell },
    {
      key: "id",
      title: "ID",
      fixed: true,
      cell: (model) => (model.id === null ? "" : el("code", { title: model.id }, short(model.id))),
    },
    { key: "size", title: "Size", cell: (model) => (model.size === null ? "" : size(model.size)) },
    {
      key: "type",
      title: "Type",
      cell: (model) =>
        model.error ? el("span", { class: "badge bad" }, "broken") : typed(model.quant_type ?? ""),
    },
    { key: "bits", title: "Bits", cell: (model) => bits(model.bits_per_weight) },
    {
      key: "parameters",
      title: "Parameters",
      cell: (model) => (model.parameters === null ? "" : count(model.parameters)),
    },
    {
      key: "modified",
      title: "Modified",
      cell: (model) => (model.modified ? when(model.modified) : ""),
    },
  ],
};

await fill(byId("models"), () => ask("models"), show);
