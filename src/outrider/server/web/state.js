// @ts-check
/* What both views of the playground share: the server's card, the settings, and the run shown. */
import { get, needsKey, stream } from "./api.js";
import { Run } from "./run.js";
import { effect, signal } from "./html.js";

/** The server's card, with the name `id` that requests use; null until it answered. */
export const card = signal(null);
/** Whether a saved run alone is shown, and no server is asked. */
export const isReplay = signal(false);
/** Whether the laboratory is shown, and not the conversation. */
export const isLab = signal(false);
export const models = signal([]);
export const problem = signal("");
export const isBusy = signal(false);
export const run = signal(null);
export const shownRound = signal(0);
export const tab = signal("tokens");
const REMEMBERED = "outrider.settings";
const KEPT = ["system", "maxTokens", "temperature", "topP", "topK", "seed", "speculative", "drafter", "k", "compares"];
export const form = {
  mode: signal("chat"), prompt: signal(""), system: signal(""), maxTokens: signal(""),
  temperature: signal(""), topP: signal(""), topK: signal(""), seed: signal(""),
  speculative: signal(true), drafter: signal(""), k: signal(""), schema: signal(""),
  compares: signal(false),
};
let abort = null;

export function look() {
  isReplay.value = location.hash === "#replay";
  isLab.value = isReplay.value || location.hash === "#laboratory";
}
look();

/** The settings of the last visit, and from now on each change of them. */
export function remember() {
  try {
    const known = JSON.parse(localStorage.getItem(REMEMBERED) ?? "{}");
    for (const name of KEPT) if (typeof known[name] === typeof form[name].value) form[name].value = known[name];
  } catch { /* a private window, or what an older page kept */ }
  return effect(() => {
    const now = JSON.stringify(Object.fromEntries(KEPT.map((name) => [name, form[name].value])));
    try { localStorage.setItem(REMEMBERED, now); } catch { /* a private window */ }
  });
}

/** Asks for the card of the model `id`. One that is not loaded has none: its first request loads it. */
export async function choose(id) {
  let known = { has_chat_template: true };
  try {
    known = await get(`outrider/v1/card?model=${encodeURIComponent(id)}`);
  } catch (error) { if (error.status !== 503 || models.value.length < 2) throw error; }
  card.value = { ...known, id };
  form.mode.value = known.has_chat_template ? "chat" : "text";
  if (!known.drafters?.includes(form.drafter.value)) form.drafter.value = "";
}

/** Asks what the server is, again and again while its model loads. */
export async function meet() {
  problem.value = "";
  try {
    models.value = (await get("v1/models")).data.map((one) => one.id);
    await choose(models.value[0]);
  } catch (error) {
    if (needsKey.value) return;
    problem.value = error.status === 503 ? "The model loads …" : `The server does not answer: ${error.message}`;
    setTimeout(meet, 2000);
  }
}

/** What a field must hold, unless it is empty. */
const WHOLE = { pattern: /^\d+$/, words: "a whole number from 0 up" };
const ANY = { pattern: /^\d*\.?\d+$/, words: "a number from 0 up" };
const SHARE = { pattern: /^(0|1|0?\.\d+|1\.0*|0\.)$/, words: "a number from 0 to 1" };
const NUMBERS = {
  maxTokens: ["max tokens", WHOLE], temperature: ["temperature", ANY], topP: ["top p", SHARE],
  topK: ["top k", WHOLE], seed: ["seed", WHOLE], k: ["K", WHOLE],
};

/** What is wrong with a field of the form; empty if nothing is. */
export function wrong(name) {
  const written = form[name].value.trim();
  const [label, { pattern, words }] = NUMBERS[name] ?? ["", { pattern: /^/, words: "" }];
  return !written || pattern.test(written) ? "" : `${label} must be ${words}, got “${written}”.`;
}

/** The number in a field of the form; undefined if it is empty. Raises an Error for anything else. */
function number(name) {
  const said = wrong(name);
  if (said) throw new Error(said);
  return form[name].value.trim() ? Number(form[name].value) : undefined;
}

const given = (fields) => Object.fromEntries(
  Object.entries(fields).filter(([, value]) => value !== undefined));

function speculation(trace, drafts) {
  if (!drafts) return trace ? { k: 0, trace } : false;
  return given({ trace, drafter: form.drafter.value || undefined, k: number("k") });
}

/** What the server or the checkpoint chose, else greedy: answers can then be compared. */
export const usualTemperature = () => card.value?.sampling?.temperature ?? 0;
const temperature = () => number("temperature") ?? usualTemperature();

/** Why the same request would have the same answer again; empty if another one may come. */
export function sameAgain() {
  if (wrong("temperature") || wrong("seed")) return "";
  if (!temperature()) return "At temperature 0 it writes the same text again.";
  return form.seed.value.trim() ? "With this seed it writes the same text again." : "";
}

/** The path and the body of a request for `messages`, or of the laboratory's prompt. Raises an Error
    for a field that holds no number, and for a broken schema. */
export function asked({ trace = true, messages = null, drafts = form.speculative.value } = {}) {
  const isText = !messages && form.mode.value === "text";
  const body = given({
    model: card.value?.id ?? "", stream: true, stream_options: { include_usage: true },
    // A chat goes on until the model ends its turn; a text need never end.
    max_tokens: number("maxTokens") ?? (isText ? 128 : undefined),
    temperature: temperature(),
    top_p: number("topP"), top_k: number("topK"), seed: number("seed"),
    speculative: speculation(trace, drafts),
  });
  if (form.schema.value.trim()) {
    let schema;
    try { schema = JSON.parse(form.schema.value); } catch { throw new Error("The schema is no JSON."); }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (isText) return { path: "v1/completions", body: { ...body, prompt: form.prompt.value } };
  const all = messages ?? [{ role: "user", content: form.prompt.value }];
  const system = form.system.value ? [{ role: "system", content: form.system.value }] : [];
  return { path: "v1/chat/completions", body: { ...body, messages: [...system, ...all] } };
}

function parts(chunk) {
  const choice = chunk.choices?.[0] ?? {};
  const rounds = choice["outrider.round"] ?? chunk["outrider.round"] ?? [];
  return {
    text: choice.delta?.content ?? choice.text ?? "",
    thought: choice.delta?.reasoning_content ?? "",
    rounds: Array.isArray(rounds) ? rounds : [rounds],
    reason: choice.finish_reason,
  };
}

/** One request; `made` hears of each piece. Gives the run, ended. */
export async function follow(made, { path, body }, signal_) {
  const began = performance.now();
  const notes = [];
  let first = 0;
  let last = 0;
  let reason = "";
  for await (const chunk of stream(path, body, signal_)) {
    const found = parts(chunk);
    if (found.text || found.rounds.length || found.thought) {
      last = performance.now();
      first ||= last;
    }
    made.thought += found.thought;
    made.add(found.text, found.rounds);
    reason = found.reason ?? reason;
    if (chunk.usage) made.usage = chunk.usage;
    if (chunk.metrics) made.metrics = chunk.metrics;
    if (chunk.seed !== undefined) made.facts.push(["seed", String(chunk.seed)]);
    for (const words of chunk.warnings ?? []) notes.push(String(words.message ?? words));
  }
  const count = made.usage?.completion_tokens ?? 0;
  made.times = { first: (first - began) / 1000, all: (last - began) / 1000, count };
  made.end({
    finish_reason: reason, notes,
    tokens_per_second: last > began ? (1000 * count) / (last - began) : 0,
  });
  return made;
}

export function facts(body) {
  const about = card.value ?? {};
  const spec = body.speculative;
  const found = [["model", about.model || about.id || ""]];
  if (about.sampler) found.push(["rule", about.sampler]);
  found.push(["temperature", String(body.temperature)], ["speculation", spec ? "on" : "off"]);
  if (spec) found.push(["drafter", spec.drafter ?? about.drafter ?? "the server's"]);
  if (spec && spec.k !== undefined) found.push(["k", String(spec.k)]);
  return found;
}

/** Runs `work`, which `stop` ends by its signal; says what went wrong. */
export async function busily(work) {
  if (isBusy.value) return;
  problem.value = "";
  isBusy.value = true;
  abort = new AbortController();
  try {
    await work(abort.signal);
  } catch (error) {
    if (error.name !== "AbortError") problem.value = error.message;
  }
  isBusy.value = false;
}

export const stop = () => abort?.abort();

/** Follows the run of a request to its end, whatever that is. */
export async function finish(made, request, signal_) {
  try {
    await follow(made, request, signal_);
  } finally {
    if (!made.result) made.end({ finish_reason: "", notes: [], tokens_per_second: 0 });
  }
}

export const generate = () => form.prompt.value && busily(async (stopped) => {
  const request = asked();
  const made = new Run({
    title: form.mode.value === "chat" ? "The answer" : "The text", prompt: form.prompt.value,
    facts: facts(request.body), request: request.body, path: request.path,
  });
  run.value = made;
  await finish(made, request, stopped);
});

/** Shows a run in the laboratory: that of a file, or that of an answer. */
export function replay(made, on = "tokens") {
  problem.value = "";
  tab.value = on;
  run.value = made;
  if (!isLab.value) location.hash = "#laboratory";
}
