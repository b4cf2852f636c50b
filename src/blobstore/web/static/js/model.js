/** The page of a model: what it is, where its bytes are, its tensors, what quantization changed. */

import { address, choose, query } from "./address.js";
import { ask, inlined } from "./api.js";
import { byId, el, isolated } from "./dom.js";
import { showErrors } from "./errors.js";
import { failure, fill, missing, once } from "./loading.js";
import { modulesTable } from "./module-table.js";
import { onBack, titled } from "./page.js";
import { showPlot } from "./plot.js";
import { summary, weights } from "./summary.js";
import { twin } from "./table.js";
import { showTensor } from "./tensor.js";
import { TensorTable } from "./tensor-table.js";
import { tensorsOf } from "./tensors.js";

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
    if (!inlined) showLinks();
    fill(byId("weights"), columns, (found) => byId("weights").append(weights(tensorsOf(found))));
    showParts(columns);
  });
}

function showLinks() {
  byId("crumbs").append(el("a", { href: "/" }, "Models"));
  const compare = address("/compare", { model: name });
  byId("others").append(el("a", { class: "button", href: compare }, "Compare with …"));
}

function showParts(columns) {
  fill(byId("treemap"), () => ask("plots/treemap", { model: name }), (spec) =>
    showPlot(byId("treemap"), spec, { hasText: true, onPick: ({ place }) => choosePlace(place) }),
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
  byId("modules").replaceChildren(twin("As a table", () => modulesTable(tensors, choosePlace)));
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
  const list = new TensorTable(byId("tensors"), tensors, {
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
  onBack(() => {
    list.follow();
    open(false);
  });
  const chosen = tensors.find((tensor) => tensor.name === choice());
  if (chosen) list.grid.reveal(chosen);
  open(false);
}
