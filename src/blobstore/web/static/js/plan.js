/** The page of a plan: sizes by type and groups, what fits a target size, and one plan in full. */

import { ask } from "./api.js";
import { byId, choiceLink, el, isolated, section, visible } from "./dom.js";
import { fill, missing } from "./loading.js";
import { titled } from "./page.js";
import { showPlot } from "./plot.js";
import { facts, number, table, twin } from "./table.js";
import { treeTable, typeClass } from "./tensors.js";
import { counted, size, whole } from "./units.js";

const form = document.forms[0];
const { type, groups, size: said, target, answer } = form.elements;
const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };

const keyOf = (plan) => plan.label.replace("/", "-");

/** Show the plans of a source, and the one that the address names. */
function show(found) {
  const { plans, asked, reach } = found;
  const chosen = () => plans.find((plan) => plan.type === type.value && plan.groups === groups.value);
  const named = () => plans.find((plan) => keyOf(plan) === location.hash.slice(1));
  const tabulate = () => byId("plans").replaceChildren(plansTable(found, chosen(), chooseAndKeep));

  function choose(plan) {
    type.value = plan.type;
    const sizes = plans.filter((one) => one.type === plan.type);
    groups.replaceChildren(...sizes.map((one) => new Option(one.groups || "none", one.groups)));
    groups.value = plan.groups;
    groups.disabled = sizes.length < 2;
    said.value = `${size(plan.bytes)}, ${plan.bits} bits per weight`;
    byId("plan").replaceChildren(el("h2", {}, plan.label));
    showPlan(byId("plan"), plan);
    tabulate();
  }

  function chooseAndKeep(plan) {
    history.replaceState(null, "", `#${keyOf(plan)}`);
    choose(plan);
  }

  showTexts(found);
  type.append(...[...new Set(plans.map((plan) => plan.type))].map((kind) => new Option(kind)));
  target.parentElement.hidden = !reach;
  form.addEventListener("submit", (event) => event.preventDefault());
  groups.addEventListener("change", () => chooseAndKeep(chosen()));
  type.addEventListener("change", () => chooseAndKeep(chosen() ?? plans.find((one) => one.type === type.value)));
  target.addEventListener("input", () => {
    answer.value = judged(wantedBytes(), reach);
    tabulate();
  });
  addEventListener("hashchange", () => named() && choose(named()));
  choose(named() ?? plans.find((plan) => plan.label === asked) ?? plans[0]);
}

function showTexts(found) {
  titled(`Plan for ${found.source}`);
  byId("name").replaceChildren("Plan for ", isolated(found.source));
  byId("headline").append(found.headline);
  byId("notes").append(...notes(found));
  byId("choose").hidden = false;
  if (found.target) {
    const part = section("The plan as asked");
    byId("target").append(part.section);
    showPlan(part.body, found.target);
  }
  const origin = section("How this page was made");
  const nothing = "Sizes follow from headers; no weight was read, and nothing was stored.";
  origin.body.append(facts(Object.entries(found.made)), el("p", { class: "soft" }, nothing));
  byId("more").append(origin.section);
}

function showPlan(place, plan) {
  const known = [
    ["Size", `${size(plan.bytes)} (${whole(plan.bytes)} bytes)`],
    ["Bits per weight", plan.bits],
    ["Blobs", whole(plan.blobs)],
    ["Tensors", whole(plan.tensors)],
    ...plan.runs_in.map(([runtime, sentence]) => [visible(runtime), visible(sentence)]),
  ];
  const picture = el("div", { class: "listed" });
  place.append(facts(known), ...plan.notes.map((note) => el("p", {}, visible(note))), picture);
  place.append(twin(`The ${counted(plan.tensors, "tensor")} by module`, () => treeTable(plan.tree)));
  showPlot(picture, plan.treemap);
}

function plansTable({ plans, source_bytes: sourceBytes }, chosen, onChoose) {
  const wanted = wantedBytes();
  const fits = wanted ? ["Fits the target"] : [];
  const numbers = ["Of the source", "Bits per weight", "Quantized tensors"].map(number);
  const heads = ["Plan", number("Size"), ...fits, "", ...numbers];
  const largest = Math.max(...plans.map((plan) => plan.bytes));
  const rows = plans.map((plan) =>
    [
      choiceLink(`#${keyOf(plan)}`, () => onChoose(plan), {}, plan.label),
      size(plan.bytes),
      wanted && (plan.bytes <= wanted ? "yes" : "no"),
      bar(plan, largest),
      `${Math.round((100 * plan.bytes) / Math.max(1, sourceBytes))}%`,
      plan.bits,
      whole(plan.quantized),
    ].filter((cell) => cell !== 0),
  );
  const made = table("Plans", heads, rows);
  made.querySelectorAll("tbody tr")[plans.indexOf(chosen)].setAttribute("aria-current", "true");
  return made;
}

/** Return a picture of a plan's size, whose numbers the page says too. */
function bar(plan, largest) {
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
function judged(wanted, [least, most]) {
  if (!target.value.trim()) return "";
  if (!wanted) return "Write a size such as 3.5GB.";
  if (wanted < least) return "Too small: no mixture of types reaches it.";
  if (wanted >= most) return "Everything fits as it is in the source.";
  return "Possible. The import reads the weights to choose a type for each tensor.";
}

function notes({ refused, reach }) {
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

const NONE = "This server was started without a plan. To see what an import would write:";
fill(byId("target"), () => ask("plan"), (found) =>
  found ? show(found) : byId("target").append(missing(NONE, "blobstore serve --plan SOURCE")),
);
