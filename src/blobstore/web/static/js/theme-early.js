// Not a module, so that it runs before the page is drawn: a chosen theme appears without a flash.
try {
  const chosen = localStorage.getItem("theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
} catch {
  // Storage is blocked: the theme is the system's.
}
