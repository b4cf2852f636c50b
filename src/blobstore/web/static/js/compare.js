/** The page that compares models: what differs between two, and what several cost and lose. */

import { choose, query } from "./address.js";
import { ApiError, ask } from "./api.js";
import { difference } from "./difference.js";
import { byId, el, isolated, modelLink, section, visible, when } from "./dom.js";
import { commandLine, fill, missing } from "./loading.js";
import { onBack, titled } from "./page.js";
import { showPlot } from "./plot.js";
import { number, table } from "./table.js";
import { typed } from "./tensors.js";
import { counted, percent, size } from "./units.js";

const chosen = () => [...new Set(query().getAll("model"))];

function show(models) {
  const draw = () => {
    const names = chosen();
    showChooser(byId("chooser"), models, names, (next) => {
      choose({ model: next });
      draw();
    });
    byId("count").textContent = names.length ? counted(names.length, "model") : "";
    titled(names.length ? `Compare ${names.join(", ")}` : "Compare");
    showComparison(names, models);
  };
  onBack(draw);
  draw();
}

function showComparison(names, models) {
  const place = byId("comparison");
  place.replaceChildren();
  if (names.length < 2) {
    const text = models.length < 2 ? "Two models are needed to compare." : "Choose two models or more.";
    place.append(el("p", { class: "waiting" }, text));
    return;
  }
  if (names.length === 2) {
    const part = section("What differs");
    place.append(part.section);
    fill(part.body, () => ask("diff", { a: names[0], b: names[1] }), (found) =>
      part.body.append(...difference(found)),
    );
  }
  const part = section("Error against size");
  place.append(part.section);
  showFrontier(part.body, names, models);
}

const BOX = { type: "search", placeholder: "Add a model", autocomplete: "off", spellcheck: "false" };

/** Show which models are chosen, and let others be added. */
function showChooser(place, models, chosen, onChoose) {
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

const NOT_FOUND = 404;

const MOST_DRAWN = 60; // models that the server takes at once (web/api.py)
const MOST_COMMANDS = 5; // the number of the others is said
const HEADS = ["Name", "Type", number("Size"), number("Error"), "Measured", ""];

/** Show the error against the size of models whose error was measured; commands for the others. */
function showFrontier(place, names, models) {
  fill(
    place,
    () => Promise.all(names.map((name) => measured(name, models))),
    async (found) => {
      const known = found.filter((one) => one.isMeasured);
      const drawn = known.slice(0, MOST_DRAWN);
      if (drawn.length > 1) {
        const spec = await ask("plots/frontier", { model: drawn.map((one) => one.model.name) });
        await showPlot(place, spec, { hasText: true });
      }
      if (drawn.length < known.length) {
        const text = `The first ${drawn.length} of ${counted(known.length, "model")} are drawn.`;
        place.append(el("p", { class: "soft" }, text));
      }
      place.append(table("Error against size", HEADS, rows(found)));
      const others = found.filter((one) => one.isThere && !one.isMeasured);
      if (others.length) place.append(el("p", { class: "waiting" }, "Measure the error of the others:"));
      const named = others.slice(0, MOST_COMMANDS);
      place.append(...named.map((one) => commandLine(`blobstore quality ${one.model.name} --against SOURCE`)));
      const more = others.length - named.length;
      if (more) place.append(el("p", { class: "waiting" }, `and ${counted(more, "more model")}`));
    },
  );
}

async function measured(name, models) {
  const model = models.find((one) => one.name === name) ?? { name, size: null, quant_type: null };
  try {
    const { result, measured: at } = await ask("quality", { model: name });
    const error = result?.model.relative_rmse ?? null;
    return { model, error, at, isMeasured: Boolean(result), isThere: true };
  } catch (error) {
    // A link may name a model that was removed: the others are shown.
    if (!(error instanceof ApiError) || error.status !== NOT_FOUND) throw error;
    return { model, error: null, isMeasured: false, isThere: false };
  }
}

function rows(found) {
  const sorted = [...found].sort((a, b) => (a.model.size ?? 0) - (b.model.size ?? 0));
  return sorted.map(({ model, error, at, isMeasured, isThere }) => [
    isThere ? modelLink(model.name) : isolated(model.name),
    model.quant_type ? typed(model.quant_type) : "",
    model.size === null ? "" : size(model.size),
    !isThere ? "not found" : isMeasured ? percent(error) : "not measured",
    at ? when(at) : "",
    isFront(model, error, found) ? el("span", { class: "badge" }, "Pareto front") : "",
  ]);
}

/** Return whether no other model is smaller and better. */
function isFront(model, error, found) {
  const isBetter = (other) =>
    other.error !== null &&
    other.model.size <= model.size &&
    other.error <= error &&
    (other.model.size < model.size || other.error < error);
  return error !== null && !found.some(isBetter);
}

fill(byId("comparison"), () => ask("models"), (models) => {
  if (models.length) show(models);
  else byId("comparison").append(missing("This store has no models yet. Import one:", "blobstore import FOLDER"));
});
