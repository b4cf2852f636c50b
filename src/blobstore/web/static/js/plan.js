/** The page of a plan: sizes by type and groups, what fits a target size, and one plan in full. */

import { inlined } from "./api.js";
import { byId, choiceLink, el, isolated, section, visible } from "./dom.js";
import { titled } from "./page.js";
import { showPlot } from "./plot.js";
import { facts, number, table, twin } from "./table.js";
import { typeClass } from "./tensors.js";
import { counted, size, whole } from "./units.js";

const { source, headline, source_bytes: sourceBytes, plans, asked, refused, reach, made } = inlined;
const largest = Math.max(...plans.map((plan) => plan.bytes));
const form = document.forms[0];
const { type, groups, size: said, target, answer } = form.elements;
const TENSORS = ["Tensor", "Type", "Shape", number("Size")];
const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };

const keyOf = (plan) => plan.label.replace("/", "-");
const chosen = () => plans.find((plan) => plan.type === type.value && plan.groups === groups.value);

/** Show a plan of the page, and name it in the address. */
function choose(plan) {
  type.value = plan.type;
  const sizes = plans.filter((one) => one.type === plan.type);
  groups.replaceChildren(...sizes.map((one) => new Option(one.groups || "none", one.groups)));
  groups.value = plan.groups;
  groups.disabled = sizes.length < 2;
  said.value = `${size(plan.bytes)}, ${plan.bits} bits per weight`;
  byId("plan").replaceChildren(el("h2", {}, plan.label));
  showPlan(byId("plan"), plan);
  showTable();
}

function chooseAndKeep(plan) {
  history.replaceState(null, "", `#${keyOf(plan)}`);
  choose(plan);
}

function showPlan(place, plan) {
  const known = [
    ["Size", `${size(plan.bytes)} (${whole(plan.bytes)} bytes)`],
    ["Bits per weight", plan.bits],
    ["Blobs", whole(plan.blobs)],
    ["Tensors", whole(plan.tensors)],
    ...plan.runs_in.map(([runtime, sentence]) => [visible(runtime), visible(sentence)]),
  ];
  const rows = () =>
    plan.largest.map(([name, ...cells]) => [el("span", { class: "module" }, isolated(name)), ...cells]);
  const picture = el("div", { class: "listed" });
  place.append(
    facts(known),
    ...plan.notes.map((note) => el("p", {}, visible(note))),
    picture,
    twin(`The largest of ${counted(plan.tensors, "tensor")}`, () => table("Largest tensors", TENSORS, rows())),
  );
  showPlot(picture, plan.treemap);
}

function showTable() {
  const wanted = wantedBytes();
  const fits = wanted ? ["Fits the target"] : [];
  const numbers = ["Of the source", "Bits per weight", "Quantized tensors"].map(number);
  const heads = ["Plan", number("Size"), ...fits, "", ...numbers];
  const rows = plans.map((plan) =>
    [
      choiceLink(`#${keyOf(plan)}`, () => chooseAndKeep(plan), {}, plan.label),
      size(plan.bytes),
      wanted && (plan.bytes <= wanted ? "yes" : "no"),
      bar(plan),
      `${Math.round((100 * plan.bytes) / Math.max(1, sourceBytes))}%`,
      plan.bits,
      whole(plan.quantized),
    ].filter((cell) => cell !== 0),
  );
  const made = table("Plans", heads, rows);
  const row = made.querySelectorAll("tbody tr")[plans.indexOf(chosen())];
  row.setAttribute("aria-current", "true");
  byId("plans").replaceChildren(made);
}

/** Return a picture of a plan's size, whose numbers the page says too. */
function bar(plan) {
  const filled = el("span", { class: typeClass(plan.label) });
  filled.style.width = `${(100 * plan.bytes) / largest}%`;
  return el("div", { class: "bar", "aria-hidden": "true" }, filled);
}

/** Return the bytes of the target size; 0 if none is written. */
function wantedBytes() {
  const found = /^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?b|)\s*$/i.exec(target.value);
  return found ? found[1] * UNITS[found[2].toLowerCase()] : 0;
}

/** Return what is known of a target without reading weights. */
function judged(wanted) {
  if (!target.value.trim()) return "";
  if (!wanted) return "Write a size such as 3.5GB.";
  if (wanted < reach[0]) return "Too small: no mixture of types reaches it.";
  if (wanted >= reach[1]) return "Everything fits as it is in the source.";
  return "Possible. The import reads the weights to choose a type for each tensor.";
}

function notes() {
  const reasons = Object.entries(refused).map(([label, why]) => `${label} is refused: ${visible(why)}`);
  if (reach) {
    reasons.push(
      `A target between ${size(reach[0])} and ${size(reach[1])} can be reached with a mixture of types.` +
        " Which tensor gets which type, and the error, is only known when the weights are read:" +
        " blobstore plan SOURCE --target-size SIZE.",
    );
  }
  return reasons.map((reason) => el("p", { class: "soft" }, reason));
}

titled(`Plan for ${source}`);
byId("name").append("Plan for ", isolated(source));
byId("headline").append(headline);
byId("notes").append(...notes());
if (inlined.target) {
  const part = section("The plan as asked");
  byId("target").append(part.section);
  showPlan(part.body, inlined.target);
}
const origin = section("How this page was made");
const nothing = "Sizes follow from headers; no weight was read, and nothing was stored.";
origin.body.append(facts(Object.entries(made)), el("p", { class: "soft" }, nothing));
byId("more").append(origin.section);

type.append(...[...new Set(plans.map((plan) => plan.type))].map((kind) => new Option(kind)));
target.parentElement.hidden = !reach;
form.addEventListener("submit", (event) => event.preventDefault());
groups.addEventListener("change", () => chooseAndKeep(chosen()));
type.addEventListener("change", () => {
  const plan = chosen() ?? plans.find((one) => one.type === type.value);
  chooseAndKeep(plan);
});
target.addEventListener("input", () => {
  answer.value = judged(wantedBytes());
  showTable();
});
const named = () => plans.find((plan) => keyOf(plan) === location.hash.slice(1));
addEventListener("hashchange", () => named() && choose(named()));
choose(named() ?? plans.find((plan) => plan.label === asked) ?? plans[0]);
