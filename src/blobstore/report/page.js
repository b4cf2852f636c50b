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

// A choice shows one of several parts of the page. Without scripts all are shown.
function choose(select) {
  for (const option of select.options) {
    document.getElementById(option.value).hidden = option.value !== select.value;
  }
  drawAll();
}

// A size as people write it, such as 3.5 GB, in bytes; NaN for anything else.
function bytes(text) {
  const found = /^\s*([0-9]+(?:\.[0-9]+)?)\s*(|[kmgt]?b)\s*$/i.exec(text);
  return found ? found[1] * 1000 ** ["", "b", "kb", "mb", "gb", "tb"].indexOf(found[2].toLowerCase()) / (found[2] ? 1000 : 1) : NaN;
}

function judge(input) {
  const { smallest, largest } = input.dataset;
  const wanted = bytes(input.value);
  const answer = document.getElementById(input.getAttribute("aria-describedby"));
  const fits = [...document.querySelectorAll("[data-bytes]")].filter((row) => {
    row.querySelector(".fits").textContent = wanted ? (row.dataset.bytes <= wanted ? "yes" : "no") : "";
    return row.dataset.bytes <= wanted;
  });
  if (!input.value.trim()) answer.textContent = "";
  else if (!wanted) answer.textContent = "Write a size such as 3.5GB.";
  else if (wanted < smallest) answer.textContent = "No target of the import is that small.";
  else if (wanted >= largest) answer.textContent = "All weights fit in 8 bits.";
  else answer.textContent = `The import can reach it with a mixture of types. ${fits.length} plans below fit as they are.`;
}

for (const form of document.querySelectorAll("form")) {
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
}
for (const select of document.querySelectorAll("select[data-choice]")) {
  select.addEventListener("change", () => choose(select));
  choose(select);
}
for (const input of document.querySelectorAll("input[data-smallest]")) {
  input.addEventListener("input", () => judge(input));
  judge(input);
}
drawAll();
addEventListener("resize", () => drawAll());
dark.addEventListener("change", () => drawAll());
addEventListener("beforeprint", () => drawAll("light"));
addEventListener("afterprint", () => drawAll());
