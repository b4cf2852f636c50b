/** A page in one file (report/frame.py): its plots, and the controls of a plan. */

import { provide, showPlot } from "./plot.js";

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const plots = read("plots");
const waiting = new Set(document.querySelectorAll("figure[data-plot]"));

/** Draw the plots that have become visible. */
function drawVisible() {
  for (const figure of waiting) {
    if (!figure.clientWidth) continue;
    waiting.delete(figure);
    showPlot(figure.querySelector(".place"), plots[figure.dataset.plot], { hasText: true });
  }
}

/** Let a form show one of the plans of the page, which the address names; else all are shown. */
function startPlans(form) {
  const { type, groups, target, size, answer } = form.elements;
  const plans = [...document.querySelectorAll("[data-plan]")];
  const show = () => {
    for (const plan of plans) {
      const { type: kind, groups: width, plan: key, said } = plan.dataset;
      plan.hidden = kind !== type.value || width !== groups.value;
      const row = document.querySelector(`tr[data-of="${key}"]`);
      row.toggleAttribute("aria-current", !plan.hidden);
      if (plan.hidden) continue;
      row.setAttribute("aria-current", "true");
      size.value = said;
    }
    drawVisible();
  };
  const choose = (key) => {
    const plan = plans.find((one) => one.dataset.plan === key);
    if (!plan) return;
    type.value = plan.dataset.type;
    fill(plan.dataset.groups);
  };
  const keep = () => {
    const shown = plans.find((plan) => !plan.hidden);
    history.replaceState(null, "", `#${shown.dataset.plan}`);
  };
  const fill = (wanted) => {
    const sizes = plans.filter((plan) => plan.dataset.type === type.value);
    groups.replaceChildren(...sizes.map((plan) => new Option(plan.dataset.groups || "none")));
    sizes.forEach((plan, index) => (groups.options[index].value = plan.dataset.groups));
    groups.disabled = sizes.length < 2;
    if (sizes.some((plan) => plan.dataset.groups === wanted)) groups.value = wanted;
    show();
  };
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  type.addEventListener("change", () => fill(groups.value));
  groups.addEventListener("change", show);
  form.addEventListener("change", keep);
  for (const link of document.querySelectorAll("tr[data-of] a")) {
    link.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault(); // the table stays in sight
      choose(link.closest("tr").dataset.of);
      keep();
    });
  }
  addEventListener("hashchange", () => choose(location.hash.slice(1)));
  target?.addEventListener("input", () => judge(target, answer));
  fill(form.dataset.groups);
  choose(location.hash.slice(1));
  judge(target, answer);
}

const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };

/** Say of a target what is known without reading weights, and of each plan whether it fits. */
function judge(target, answer) {
  for (const cell of document.querySelectorAll(".fits")) cell.hidden = !target?.value.trim();
  if (!target) return;
  const found = /^\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?b|)\s*$/i.exec(target.value);
  const wanted = found ? found[1] * UNITS[found[2].toLowerCase()] : 0;
  for (const row of document.querySelectorAll("tr[data-bytes]")) {
    const fits = Number(row.dataset.bytes) <= wanted;
    row.querySelector("[data-fits]").textContent = wanted ? (fits ? "yes" : "no") : "";
  }
  const { smallest, largest } = target.dataset;
  if (!target.value.trim()) answer.value = "";
  else if (!wanted) answer.value = "Write a size such as 3.5GB.";
  else if (wanted < Number(smallest)) answer.value = "Too small: no mixture of types reaches it.";
  else if (wanted >= Number(largest)) answer.value = "Everything fits as it is in the source.";
  else answer.value = "Possible. The import reads the weights to choose a type for each tensor.";
}

provide({ vega: window.vega, expr: window.expressionInterpreter, themes: read("themes") });
for (const form of document.querySelectorAll("form")) startPlans(form);
drawVisible();
