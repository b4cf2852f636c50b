/** Questions to the server. */

import { address } from "./address.js";

/** An answer that is an error: what happened, and a hint, which often is a command. */
export class ApiError extends Error {
  constructor(status, message, hint = "") {
    super(message);
    this.status = status;
    this.hint = hint;
  }
}

const block = document.getElementById("inlined");

/** What a page in one file contains, the server's answers among it; null on the server's pages. */
export const inlined = block && JSON.parse(block.textContent);

/** Return the document at an address of `/api/`. */
export async function ask(path, parameters = {}, signal) {
  if (inlined) return fromFile(parameters.tensor ? `${path} ${parameters.tensor}` : path);
  const answer = await reached(address(`/api/${path}`, parameters), signal);
  const document = await json(answer);
  if (answer.ok) return document;
  throw new ApiError(
    answer.status,
    document?.error ?? `the server answered ${answer.status}`,
    document?.hint ?? "",
  );
}

function fromFile(key) {
  if (Object.hasOwn(inlined.answers, key)) return inlined.answers[key];
  throw new ApiError(404, "this page does not contain it", "`blobstore serve` shows all of a store.");
}

async function reached(place, signal) {
  try {
    return await fetch(place, { signal, headers: { Accept: "application/json" } });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "the server can't be reached", "Is `blobstore serve` still running?");
  }
}

async function json(answer) {
  try {
    return await answer.json();
  } catch (error) {
    if (answer.ok) throw new ApiError(answer.status, "the server's answer is not JSON");
    return null;
  }
}
