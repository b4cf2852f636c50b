/** What a person chose, in the address: links can be shared, and the back button works. */

/** Return the parameters of this page's address. */
export const query = () => new URLSearchParams(location.search);

/** Return an address of a page with parameters; absent and empty ones are left out. */
export function address(page, parameters) {
  const found = new URLSearchParams();
  put(found, parameters);
  const text = found.toString();
  return text ? `${page}?${text}` : page;
}

/** Change parameters of this page's address; the window gets an event `chosen`. */
export function choose(changes, { replace = false } = {}) {
  const next = changed(changes);
  if (next === location.pathname + location.search) return;
  if (replace) history.replaceState(null, "", next);
  else history.pushState(null, "", next);
  dispatchEvent(new Event("chosen"));
}

/** Return this page's address with changed parameters. */
export function changed(changes) {
  const found = query();
  put(found, changes);
  const text = found.toString();
  return text ? `${location.pathname}?${text}` : location.pathname;
}

const SETTLED_MS = 300; // browsers refuse addresses that change with every key stroke

/** Return a function that calls another one when it was not called for a moment. */
export function settled(act) {
  let timer = 0;
  return () => {
    clearTimeout(timer);
    timer = setTimeout(act, SETTLED_MS);
  };
}

function put(found, changes) {
  for (const [name, value] of Object.entries(changes)) {
    found.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one) found.append(name, one);
  }
}

