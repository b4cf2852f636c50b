// Draws the page's plots: again when the window or the system's theme changes, light on paper.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const plots = read("plots");
const configurations = read("configurations");
const dark = matchMedia("(prefers-color-scheme: dark)");
const views = new Map();

function draw(figure, theme) {
  const place = figure.querySelector(".plot");
  views.get(figure)?.view.finalize();
  const width = Math.floor(place.clientWidth);
  const program = vega.parse(plots[figure.dataset.plot], configurations[theme], { ast: true });
  const view = new vega.View(program, {
    expr: expression,
    renderer: "svg",
    container: place,
    logLevel: vega.Warn,
  });
  views.set(figure, { view, width, theme });
  view.width(width).run();
}

function drawAll(theme = dark.matches ? "dark" : "light") {
  for (const figure of document.querySelectorAll("figure[data-plot]")) {
    const place = figure.querySelector(".plot");
    const drawn = views.get(figure);
    const is_current = drawn?.width === Math.floor(place.clientWidth) && drawn.theme === theme;
    if (place.clientWidth && !is_current) draw(figure, theme);
  }
}

// A form shows one of the plans of the page. Without scripts all are shown.
function startPlans(form) {
  const { type, groups, target } = form.elements;
  const plans = [...document.querySelectorAll("[data-plan]")];
  const show = () => {
    for (const plan of plans) {
      const { type: kind, groups: size } = plan.dataset;
      plan.hidden = kind !== type.value || size !== groups.value;
    }
    drawAll();
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
  target?.addEventListener("input", () => judge(target, form.querySelector("output")));
  fill(form.dataset.groups);
  if (target?.value) judge(target, form.querySelector("output"));
}

const UNITS = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, tb: 1e12 };

// Say of a target what is known without reading weights, and of each plan whether it fits.
function judge(target, answer) {
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

for (const form of document.querySelectorAll("form")) startPlans(form);
drawAll();
addEventListener("resize", () => drawAll());
dark.addEventListener("change", () => drawAll());
addEventListener("beforeprint", () => drawAll("light"));
addEventListener("afterprint", () => drawAll());
