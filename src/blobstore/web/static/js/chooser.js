/** The chooser of models to compare. */

import { el, modelLink, visible } from "./dom.js";

const BOX = { type: "search", placeholder: "Add a model", autocomplete: "off", spellcheck: "false" };

/** Show which models are chosen, and let others be added. */
export function showChooser(place, models, chosen, onChoose) {
  const hadFocus = place.contains(document.activeElement);
  const picked = chosen.map((name) => pick(name, () => onChoose(chosen.filter((one) => one !== name))));
  const add = adder(
    models.filter((model) => !model.error && !chosen.includes(model.name)),
    (name) => onChoose([...chosen, name]),
  );
  const types = otherTypes(models, chosen);
  const all = types.length
    ? el("button", { type: "button", onclick: () => onChoose([...chosen, ...types]) }, `Add all types of ${visible(family(chosen[0]))}`)
    : null;
  place.replaceChildren(
    el("ul", { class: "picked", "aria-label": "Chosen models" }, picked),
    el("div", { class: "picker" }, add, all),
  );
  if (hadFocus) add.querySelector("input")?.focus();
}

function pick(name, onRemove) {
  const button = el("button", { type: "button", class: "quiet", "aria-label": `Remove ${visible(name)}`, onclick: onRemove }, "✕");
  return el("li", {}, modelLink(name), button);
}

/** Return a box that completes names of models, and the button that adds one. */
function adder(models, onAdd) {
  const options = models.map((model) => el("option", { value: model.name }));
  const box = el("input", { ...BOX, list: "addable", "aria-label": "Add a model" });
  const add = (event) => {
    event.preventDefault();
    const isKnown = models.some((model) => model.name === box.value);
    box.setCustomValidity(isKnown ? "" : "No other model has this name.");
    if (isKnown) onAdd(box.value);
    else box.reportValidity();
  };
  box.addEventListener("input", () => box.setCustomValidity(""));
  return el(
    "form",
    { class: "adder", novalidate: true, onsubmit: add },
    box,
    el("datalist", { id: "addable" }, options),
    el("button", { type: "submit" }, "Add"),
  );
}

/** Return a name without its tag. */
const family = (name) => name.replace(/:[^:/]*$/, "");

/** Return the other types of the chosen model, if all chosen ones are of one family. */
function otherTypes(models, chosen) {
  if (!chosen.length || chosen.some((name) => family(name) !== family(chosen[0]))) return [];
  return models
    .filter((model) => !model.error && family(model.name) === family(chosen[0]))
    .map((model) => model.name)
    .filter((name) => !chosen.includes(name));
}
