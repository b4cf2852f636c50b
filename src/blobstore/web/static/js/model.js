/** The page of a model: what it is, where its bytes are, its tensors, what quantization changed. */

import { address, choose, query } from "./address.js";
import { ask, inlined } from "./api.js";
import { byId, el, fileLink, isolated, visible, when } from "./dom.js";
import { failure, fill, missing, once } from "./loading.js";
import { onBack, titled } from "./page.js";
import { showPlot } from "./plot.js";
import { summary, uses, weights } from "./summary.js";
import { number, table, twin } from "./table.js";
import { showTensor } from "./tensor.js";
import { tensorTable } from "./tensor-table.js";
import { tensorsOf, treeTable, typed } from "./tensors.js";
import { counted, figure, percent, shape } from "./units.js";

export const name = inlined?.name ?? query().get("name") ?? "";

if (name) show();
else byId("summary").append(missing("This address names no model.", "blobstore list"));

function show() {
  titled(name);
  byId("name").replaceChildren(isolated(name));
  const columns = once(() => ask("tensors", { model: name }));
  columns().catch(() => {}); // it is shown where the tensors would be
  fill(byId("summary"), () => ask("model", { name }), (model) => {
    byId("parts").hidden = false;
    byId("summary").append(summary(model));
    if (!inlined) showLinks(model);
    fill(byId("weights"), columns, (found) => byId("weights").append(weights(tensorsOf(found))));
    showParts(columns);
  });
}

function showLinks(model) {
  byId("crumbs").append(el("a", { href: "/" }, "Models"));
  const compare = address("/compare", { model: name });
  const cards = model.documents.filter((layer) => layer.name === "README.md");
  byId("others").append(
    ...cards.map((card) => fileLink(name, card.name, "Model card")),
    " ",
    el("a", { class: "button", href: compare }, "Compare with …"),
  );
  byId("uses").append(uses(model));
  byId("uses").parentElement.hidden = false;
}

async function showParts(columns) {
  const treemap = fill(byId("treemap"), () => ask("plots/treemap", { model: name }), (spec) =>
    showTreemap(spec),
  );
  showErrors(name);
  if (!inlined) byId("tree").append(tree());
  await fill(byId("tensors"), columns, (found) => showTensors(tensorsOf(found)));
  await treemap;
  const isShared = ["tensor", "place", "search", "type", "tree"].some((one) => query().get(one));
  if (isShared && !query().has("at")) byId("tensors-title").scrollIntoView();
}

let followPlace = () => {}; // shows the tensors of the place in the address, as soon as they are known

/** Show the treemap, zoomed to the module of the place in the address. */
async function showTreemap(spec) {
  let shown = query().get("place");
  const onPick = ({ place }) => choosePlace(place);
  const focus = (whole) => zoomed(whole, shown);
  const draw = await showPlot(byId("treemap"), spec, { onPick, focus });
  const whole = byId("whole");
  const follow = () => {
    const place = query().get("place");
    whole.hidden = !place;
    if (place === shown) return;
    shown = place;
    draw();
  };
  whole.addEventListener("click", () => choosePlace(null));
  for (const change of ["chosen", "popstate"]) addEventListener(change, follow);
  follow();
}

/** Return a treemap of the module of a place, or of a larger part; its rectangle is marked. */
function zoomed(spec, place) {
  if (!place || !spec.data) return spec;
  const [tree, ...others] = spec.data;
  const isIn = (row) => row.place === place || row.place?.startsWith(`${place}.`);
  const modules = new Set(tree.values.filter(isIn).map((row) => row.parent));
  if (!modules.size) return spec;
  const isDrawn = (row) => !row.id || modules.has(row.id) || modules.has(row.parent);
  const signals = spec.signals.map((one) => (one.name === "place" ? { ...one, value: place } : one));
  return { ...spec, signals, data: [{ ...tree, values: tree.values.filter(isDrawn) }, ...others] };
}

/** Show the tensors of a place of the model; of null, all. Small modules drawn together have none. */
function choosePlace(place) {
  if (place === undefined) return;
  choose({ place, row: null });
  followPlace();
  if (place) byId("tensors").scrollIntoView({ block: "nearest" });
}

function showTensors(tensors) {
  const place = byId("tensor");
  let request = null;

  const choice = () => query().get("tensor");
  const open = (focus) => {
    request?.abort();
    const chosen = tensors.find((tensor) => tensor.name === choice());
    place.hidden = !choice();
    list.grid.refresh();
    if (!choice()) return;
    if (!chosen) {
      place.replaceChildren(failure(new Error(`${name} has no tensor ${choice()}`)));
      return;
    }
    request = new AbortController();
    showTensor(place, name, chosen, { close, signal: request.signal });
    if (focus) place.focus({ preventScroll: innerWidth > 1000 });
  };
  const close = () => {
    const before = tensors.find((tensor) => tensor.name === choice());
    choose({ tensor: null });
    open(false);
    if (before) list.grid.reveal(before, { focus: true });
  };
  const reveal = (isWanted) => {
    const wanted = tensors.find(isWanted);
    if (wanted) list.grid.reveal(wanted);
  };
  const list = tensorTable(byId("tensors"), tensors, {
    isChosen: (tensor) => tensor.name === choice(),
    onChoose: (tensor) => {
      choose({ tensor: tensor.name });
      open(true);
    },
  });
  followPlace = () => {
    list.follow();
    reveal(list.options.isMarked);
  };
  place.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  onBack(() => open(false));
  if (!query().has("row")) reveal(choice() ? list.options.isChosen : list.options.isMarked);
  open(false);
}

/** Return the modules as a tree, those that are alike on one line; the address says if it is open. */
function tree() {
  const folded = twin("Modules as a tree", () => {
    const place = el("div");
    fill(place, () => ask("tree", { model: name }), (rows) => place.append(treeTable(rows)));
    return place;
  });
  folded.open = query().has("tree");
  folded.addEventListener("toggle", () => choose({ tree: folded.open && "open" }, { replace: true }));
  return folded;
}

const FIGURES = ["Shape", "RMSE", "Relative", "Largest", "Cosine", "Saturated"];

/** Show the heat map of errors, or the command that measures them. */
function showErrors(name) {
  const place = byId("errors");
  fill(place, () => ask("quality", { model: name }), async ({ result, measured, against }) => {
    if (!result) {
      const command = `blobstore quality ${name} --against SOURCE`;
      place.append(missing("The error of this model has not been measured yet.", command));
      return;
    }
    byId("errors-count").append(tally(result, against), ...(measured ? [", measured ", when(measured)] : []));
    const picture = el("div");
    place.append(picture, twin("As a table", () => errorsTable(result.tensors)));
    await fill(picture, () => ask("plots/errors", { model: name }), (spec) =>
      showPlot(picture, spec, { hasText: true }),
    );
  });
}

function tally({ model, tensors }, against) {
  const changed = tensors.filter((tensor) => !tensor.kept).length;
  const error = `${percent(model.relative_rmse)} relative error in ${counted(changed, "tensor")}`;
  return `${error}${against ? ` against ${visible(against)}` : ""}`;
}

function errorsTable(tensors) {
  const rows = tensors.map((tensor) => [
    el("span", { class: "module" }, isolated(tensor.name)),
    typed(tensor.quant_type ?? tensor.dtype),
    shape(tensor.shape),
    figure(tensor.rmse),
    percent(tensor.relative_rmse),
    figure(tensor.max_error),
    figure(tensor.cosine),
    percent(tensor.saturated),
  ]);
  return table("Error of each tensor", ["Tensor", "Type", ...FIGURES.map(number)], rows);
}
