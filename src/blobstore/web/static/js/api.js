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

/** Return the document at an address of `/api/`. */
export async function ask(path, parameters = {}, signal) {
  const answer = await reached(address(`/api/${path}`, parameters), signal);
  const document = await json(answer);
  if (answer.ok) return document;
  throw new ApiError(
    answer.status,
    document?.error ?? `the server answered ${answer.status}`,
    document?.hint ?? "",
  );
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
