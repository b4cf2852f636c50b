/** What a person chose, in the address: links can be shared, and the back button works. */

/** @typedef {Record<string, string | string[] | null | undefined>} Choice */

/** Return the parameters of this page's address. */
export const query = () => new URLSearchParams(location.search);

/**
 * Return an address of a page with parameters; absent and empty ones are left out.
 *
 * @param {string} page
 * @param {Choice} parameters
 */
export function address(page, parameters) {
  const found = new URLSearchParams();
  put(found, parameters);
  const text = found.toString();
  return text ? `${page}?${text}` : page;
}

/**
 * Change parameters of this page's address.
 *
 * @param {Choice} changes parameters that change; null and "" remove one
 * @param {{replace?: boolean}} [how] replace: the back button skips the state before
 */
export function choose(changes, { replace = false } = {}) {
  const next = changed(changes);
  if (next === location.pathname + location.search) return;
  if (replace) history.replaceState(null, "", next);
  else history.pushState(null, "", next);
}

/**
 * Return this page's address with changed parameters.
 *
 * @param {Choice} changes
 */
export function changed(changes) {
  const found = query();
  put(found, changes);
  const text = found.toString();
  return text ? `${location.pathname}?${text}` : location.pathname;
}

/**
 * @param {URLSearchParams} found
 * @param {Choice} changes
 */
function put(found, changes) {
  for (const [name, value] of Object.entries(changes)) {
    found.delete(name);
    for (const one of Array.isArray(value) ? value : [value]) if (one) found.append(name, one);
  }
}

/**
 * Return the address of a model's page.
 *
 * @param {string} name
 * @param {Choice} [more]
 */
export const modelAddress = (name, more = {}) => address("/model", { name, ...more });
