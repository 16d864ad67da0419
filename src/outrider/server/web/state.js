// @ts-check
/* What the playground knows: the server's card, the form, the conversation, and the run shown. */
import { get, needsKey, stream } from "./api.js";
import { Run } from "./run.js";
import { signal } from "./html.js";

/** The server's card, with the name `id` that requests use; null until it answered. `isReplay` means that no server is asked. */
export const card = signal(null);
export const isReplay = signal(location.hash === "#replay");
export const problem = signal("");
export const isBusy = signal(false);
/** Turns of the conversation: {role, content, run?}. */
export const turns = signal([]);
export const run = signal(null);
export const shownRound = signal(0);
export const tab = signal("tokens");
export const form = {
  mode: signal("chat"), prompt: signal(""), system: signal(""), maxTokens: signal(""),
  temperature: signal(""), seed: signal(""), speculative: signal(true), drafter: signal(""),
  k: signal(""), schema: signal(""),
};
let abort = null;

/** Asks what the server is, again and again while its model loads. */
export async function meet() {
  problem.value = "";
  try {
    const listed = await get("v1/models");
    card.value = { id: listed.data[0].id, ...await get("outrider/v1/card") };
    if (!card.value.has_chat_template) form.mode.value = "text";
  } catch (error) {
    if (needsKey.value) return;
    problem.value = error.status === 503 ? "The model loads …" : `The server does not answer: ${error.message}`;
    setTimeout(meet, 2000);
  }
}

/** The number in a field of the form; undefined if it is empty. Raises an Error for anything else. */
function number(name, label, { isWhole = true } = {}) {
  const written = form[name].value.trim();
  if (!written) return undefined;
  if (!(isWhole ? /^\d+$/ : /^\d*\.?\d+$/).test(written)) {
    throw new Error(`${label} must be ${isWhole ? "a whole number" : "a number"} from 0 up, got “${
      written}”.`);
  }
  return Number(written);
}

/** The fields that have a value. */
const given = (fields) => Object.fromEntries(
  Object.entries(fields).filter(([, value]) => value !== undefined));

function speculation(trace) {
  if (!form.speculative.value) return trace ? { k: 0, trace } : false;
  return given({ trace, drafter: form.drafter.value || undefined, k: number("k", "K") });
}

/** What the server or the checkpoint chose, else greedy. */
export const usualTemperature = () => card.value?.sampling?.temperature ?? 0;

/** The path and the body of a request, as the form says. Raises an Error for a field that holds no
    number, and for a broken schema. */
export function asked({ trace = true, earlier = turns.value } = {}) {
  const body = given({
    model: card.value?.id ?? "", stream: true, stream_options: { include_usage: true },
    // A chat goes on until the model ends its turn; a text need never end.
    max_tokens: number("maxTokens", "max tokens") ?? (form.mode.value === "text" ? 128 : undefined),
    temperature: number("temperature", "temperature", { isWhole: false }) ?? usualTemperature(),
    seed: number("seed", "seed"),
    speculative: speculation(trace),
  });
  if (form.schema.value.trim()) {
    let schema;
    try { schema = JSON.parse(form.schema.value); } catch { throw new Error("The schema is no JSON."); }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (form.mode.value === "text") {
    return { path: "v1/completions", body: { ...body, prompt: form.prompt.value } };
  }
  const messages = earlier.map(({ role, content }) => ({ role, content }));
  if (form.system.value) messages.unshift({ role: "system", content: form.system.value });
  messages.push({ role: "user", content: form.prompt.value });
  return { path: "v1/chat/completions", body: { ...body, messages } };
}

/** The parts of a chunk that are ours to show. */
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

export async function generate() {
  if (isBusy.value || !form.prompt.value) return;
  problem.value = "";
  isBusy.value = true;
  abort = new AbortController();
  const prompt = form.prompt.value;
  const isChat = form.mode.value === "chat";
  let made = null;
  try {
    const request = asked();
    made = new Run({
      title: isChat ? "The answer" : "The text", prompt, facts: facts(request.body),
      request: request.body, path: request.path,
    });
    run.value = made;
    if (isChat) {
      turns.value = [...turns.value, { role: "user", content: prompt }];
      form.prompt.value = "";
    }
    await follow(made, request, abort.signal);
  } catch (error) {
    if (made && !made.result) made.end({ finish_reason: "", notes: [], tokens_per_second: 0 });
    if (error.name !== "AbortError") problem.value = error.message;
  }
  if (isChat && made) {
    turns.value = made.text
      ? [...turns.value, { role: "assistant", content: made.text, run: made }]
      : turns.value.slice(0, -1);
    if (!made.text) form.prompt.value = prompt;
  }
  isBusy.value = false;
}

/** Begins something that `stop` ends; gives its signal. */
export function begin() {
  abort = new AbortController();
  isBusy.value = true;
  return abort.signal;
}

export const stop = () => abort?.abort();

export function restart() {
  turns.value = [];
  run.value = null;
}

/** Shows a run of a file. */
export function replay(made) {
  problem.value = "";
  turns.value = [];
  tab.value = "tokens";
  run.value = made;
}
