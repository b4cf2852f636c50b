/** The chosen tensor: what it is, and how its values and codes are distributed. */

import { ask } from "./api.js";
import { el, isolated } from "./dom.js";
import { fill } from "./loading.js";
import { showPlot } from "./plot.js";
import { facts } from "./table.js";
import { typed, withoutHistogram } from "./tensors.js";
import { size, whole } from "./units.js";

/** Show a tensor in a place. */
export function showTensor(place, model, tensor, { close, signal }) {
  const asked = { model, tensor: tensor.name };
  const pictures = el("div");
  const button = el("button", { type: "button", class: "icon", "aria-label": "Close", onclick: close }, "✕");
  const known = facts([
    ["Type", typed(tensor.type)],
    ["Shape", el("span", { class: "mono" }, tensor.shape)],
    ["Parameters", whole(tensor.parameters)],
    ["Size", size(tensor.size)],
  ]);
  place.replaceChildren(
    el(
      "div",
      { class: "panel" },
      el("div", { class: "title" }, el("h3", {}, isolated(tensor.name)), button),
      known,
      pictures,
    ),
  );
  const reason = withoutHistogram(tensor.type);
  if (reason) {
    pictures.append(el("p", { class: "soft" }, reason));
    return;
  }
  fill(pictures, () => ask("plots/distribution", asked, signal), (spec) => showPlot(pictures, spec));
}
