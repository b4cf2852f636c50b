/** The page of a model: what it is, where its bytes are, its tensors, what quantization changed. */

import { address, choose, query } from "./address.js";
import { ask, inlined } from "./api.js";
import { byId, el, fileLink, isolated, visible } from "./dom.js";
import { failure, fill, missing, once } from "./loading.js";
import { onBack, titled } from "./page.js";
import { showPlot } from "./plot.js";
import { summary, weights } from "./summary.js";
import { table, twin } from "./table.js";
import { showTensor } from "./tensor.js";
import { tensorTable } from "./tensor-table.js";
import { tensorsOf, typed } from "./tensors.js";
import { age, counted, figure, percent, shape } from "./units.js";

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

function showLinks({ documents }) {
  byId("crumbs").append(el("a", { href: "/" }, "Models"));
  const compare = address("/compare", { model: name });
  const cards = documents.filter((layer) => layer.name === "README.md");
  byId("others").append(
    ...cards.map((card) => fileLink(name, card.name, "Model card")),
    " ",
    el("a", { class: "button", href: compare }, "Compare with …"),
  );
}

function showParts(columns) {
  fill(byId("treemap"), () => ask("plots/treemap", { model: name }), (spec) =>
    showPlot(byId("treemap"), spec, { onPick: ({ place }) => choosePlace(place) }),
  );
  fill(byId("tensors"), columns, (found) => showTensors(tensorsOf(found)));
  showErrors(name);
}

let followPlace = () => {}; // shows the tensors of the place in the address, as soon as they are known

/** Show the tensors of a place of the model. */
function choosePlace(place) {
  if (!place) return; // small modules that are drawn together
  choose({ place });
  followPlace();
  byId("tensors-title").scrollIntoView({ block: "nearest" });
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
  const list = tensorTable(byId("tensors"), tensors, {
    isChosen: (tensor) => tensor.name === choice(),
    onChoose: (tensor) => {
      choose({ tensor: tensor.name });
      open(true);
    },
  });
  followPlace = () => list.follow();
  place.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
  onBack(() => open(false));
  const chosen = tensors.find((tensor) => tensor.name === choice());
  if (chosen) list.grid.reveal(chosen);
  open(false);
}

const HEADS = [
  { title: "Tensor" },
  { title: "Type" },
  { title: "Shape", number: true },
  { title: "RMSE", number: true },
  { title: "Relative", number: true },
  { title: "Largest", number: true },
  { title: "Cosine", number: true },
  { title: "Saturated", number: true },
];

/** Show the heat map of errors, or the command that measures them. */
function showErrors(name) {
  const place = byId("errors");
  fill(place, () => ask("quality", { model: name }), async ({ result, measured, against }) => {
    if (!result) {
      const command = `blobstore quality ${name} --against SOURCE`;
      place.append(missing("The error of this model has not been measured yet.", command));
      return;
    }
    byId("errors-count").textContent = tally(result, measured, against);
    const picture = el("div");
    place.append(picture, twin("As a table", () => errorsTable(result.tensors)));
    await fill(picture, () => ask("plots/errors", { model: name }), (spec) =>
      showPlot(picture, spec, { hasText: true }),
    );
  });
}

function tally({ model, tensors }, measured, against) {
  const changed = tensors.filter((tensor) => !tensor.kept).length;
  const error = `${percent(model.relative_rmse)} relative error in ${counted(changed, "tensor")}`;
  return `${error}${against ? ` against ${visible(against)}` : ""}${measured ? `, measured ${age(measured)}` : ""}`;
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
  return table("Error of each tensor", HEADS, rows);
}
