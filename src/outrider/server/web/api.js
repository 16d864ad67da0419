// @ts-check
/* The server's API, and nothing else: every address is below the one that this file came from. */
import { signal } from "./html.js";

const ROOT = new URL("../", import.meta.url);
const KEY = "outrider.key";
/** Whether the server asked for a key that it did not get. */
export const needsKey = signal(false);
let key = "";
try { key = sessionStorage.getItem(KEY) ?? ""; } catch { /* a private window */ }

export function setKey(given) {
  key = given;
  needsKey.value = false;
  try { sessionStorage.setItem(KEY, given); } catch { /* a private window */ }
}

/** What the server answered instead of what was asked for. */
export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const address = (path) => new URL(path, ROOT).href;

async function send(path, body, abort) {
  const headers = body ? { "content-type": "application/json" } : {};
  if (key) headers.authorization = `Bearer ${key}`;
  const given = { headers, signal: abort, ...(body && { method: "POST", body: JSON.stringify(body) }) };
  const answer = await fetch(address(path), given);
  if (answer.ok) return answer;
  if (answer.status === 401) needsKey.value = true;
  const said = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, said?.error?.message ?? `The server answered ${answer.status}.`);
}

export async function get(path) {
  return (await send(path)).json();
}

/** The JSON objects of a stream of server-sent events, as they come; several may come together. */
export async function* stream(path, body, abort) {
  const answer = await send(path, body, abort);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (left + value).split(/\r?\n\r?\n/);
    left = events.pop() ?? "";
    for (const event of events) {
      const data = event.split(/\r?\n/).filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trim()).join("\n");
      if (!data) continue;
      if (data === "[DONE]") return;
      const found = JSON.parse(data);
      if (found.error) throw new Refused(500, String(found.error.message ?? "The stream broke."));
      yield found;
    }
  }
}
