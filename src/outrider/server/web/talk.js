// @ts-check
/* Conversations: what was said, the answers as they come, and what this browser keeps of them. */
import { signal } from "./html.js";
import { lanes, runPairs } from "./race.js";
import { Run, acceptance, readRun } from "./run.js";
import { asked, busily, card, facts, finish, form, isBusy, problem, replay } from "./state.js";
import { all, get, put, remove } from "./store.js";

const TIED_TO_SEED = ["match", "coupled"];

/** Conversations, the newest first: {id, title, changed, messages}. A message has `role` and `text`; one
    of the user's may have `files`, and an answer has `id`, `thought`, `end` and `facts`. */
export const conversations = signal([]);
export const current = signal(fresh());
export const draft = signal("");
/** Files that go with the next message: {name, text}. */
export const files = signal([]);
export const live = signal(null);
/** The conversation that was deleted last, until another one is opened. */
export const deleted = signal(null);
export const isKept = signal(true);
export const comparing = signal("");
const runs = new Map();

export function newId() {
  return crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
}

function fresh() {
  return { id: newId(), title: "", changed: 0, messages: [] };
}

/** Changes the conversation that is shown, and keeps it. */
function change(messages) {
  const before = current.value.messages;
  const title = current.value.title || (messages[0]?.text || messages[0]?.files?.[0]?.name || "").slice(0, 60);
  current.value = { ...current.value, messages, title, changed: Date.now() };
  for (const id of answers(before)) if (!answers(messages).includes(id)) drop("runs", id);
  const others = conversations.value.filter(({ id }) => id !== current.value.id);
  conversations.value = [current.value, ...others];
  keep("conversations", current.value);
}

const answers = (messages) => messages.map(({ id }) => id).filter(Boolean);

function drop(kind, id) {
  remove(kind, id).catch(() => {});
}

function keep(kind, record) {
  put(kind, record).catch(() => { isKept.value = false; });
}

function keepRun(id) {
  keep("runs", { id, written: JSON.stringify(runs.get(id).record()) });
}

export async function load() {
  try {
    const found = (await all("conversations")).filter((one) => Array.isArray(one.messages));
    conversations.value = found.sort((a, b) => b.changed - a.changed);
  } catch { isKept.value = false; }
}

export function open(one) {
  current.value = one ?? fresh();
  deleted.value = null;
  problem.value = "";
}

export function forget(one) {
  conversations.value = conversations.value.filter(({ id }) => id !== one.id);
  open(null);
  deleted.value = one;
  drop("conversations", one.id);
  for (const id of answers(one.messages)) drop("runs", id);
}

/** Brings back what was deleted last, with the rounds of this visit. */
export function undo() {
  const one = deleted.value;
  open(one);
  change(one.messages);
  for (const id of answers(one.messages)) if (runs.has(id)) keepRun(id);
}

/** Gives `use` the text of `file`; one that is no text, or that `use` refuses, is refused by name. */
async function withText(file, { mebibytes, done }, use) {
  try {
    if (file.size > mebibytes << 20) throw new Error(`it is larger than ${mebibytes} MiB`);
    const bytes = await file.arrayBuffer();
    let text;
    try { text = new TextDecoder("utf-8", { fatal: true }).decode(bytes); } catch { throw new Error("it is no text in UTF-8"); }
    if (text.includes("\0")) throw new Error("it is no text");
    use(text);
  } catch (error) {
    problem.value = `${file.name} cannot be ${done}: ${error.message}.`;
  }
}

/** Reads files as text, which goes with the next message. */
export async function attach(chosen) {
  for (const file of chosen) {
    await withText(file, { mebibytes: 1, done: "attached" }, (text) => {
      files.value = [...files.value, { name: file.name, text }];
    });
  }
}

/** Opens the conversation that `read` finds in a file, and keeps it. */
export const openFile = (file, read) => withText(file, { mebibytes: 16, done: "opened" }, (text) => {
  const { system, ...one } = read(text);
  if (isBusy.value) throw new Error("an answer is being written");
  if (system) form.system.value = system;
  open(one);
  change(one.messages);
});

/** What the model reads of a message: its files in fences, then what was typed. */
export function content({ text, files: own = [] }) {
  const parts = own.map((file) => {
    const longest = Math.max(2, ...[...file.text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${file.name}\n${fence}\n${file.text}${file.text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [...parts, text].filter(Boolean).join("\n\n");
}

/** What is known of an answer's text without a comparison. */
function guarantee(body) {
  const about = card.value ?? {};
  if (!about.exact) return `${about.sampler} may change the text`;
  if (!body.temperature) return "the rule gives the text of plain decoding, not compared here";
  if (body.seed !== undefined || TIED_TO_SEED.includes(about.sampler)) {
    return "the rule gives this seed's text of plain decoding, not compared here";
  }
  return "drawn from the target's own distribution, as without drafts";
}

function factsOf(made) {
  const { numDrafted, numAccepted } = acceptance(made.rounds);
  const { request: body, times, result } = made;
  return {
    drafted: numDrafted, accepted: numAccepted, rounds: made.rounds.length, tokens: times?.count ?? 0,
    speed: result.tokens_per_second, off: body.speculative === false || body.speculative?.k === 0,
    guarantee: guarantee(body), notes: result.notes,
    // Without a seed a second text is another one.
    comparable: Boolean(result.finish_reason && body.speculative?.k !== 0 && card.value?.exact && (!body.temperature || body.seed !== undefined)),
  };
}

const answer = () => busily(async (stopped) => {
  const { messages } = current.value;
  const request = asked({
    messages: messages.map((one) => ({ role: one.role, content: content(one) })),
  });
  const prompt = content(messages.at(-1));
  const made = new Run({
    title: "The answer", prompt, facts: facts(request.body), request: request.body, path: request.path,
  });
  live.value = made;
  try {
    await finish(made, request, stopped);
  } finally {
    live.value = null;
    if (made.text || made.thought) {
      const id = newId();
      runs.set(id, made);
      keepRun(id);
      change([...messages, {
        role: "assistant", id, text: made.text, thought: made.thought,
        end: made.result.finish_reason || "stopped", facts: factsOf(made),
      }]);
    }
  }
  if (form.compares.value && current.value.messages.at(-1).facts?.comparable) {
    await compared(current.value.messages.length - 1, stopped);
  }
});

export function send() {
  if (!draft.value.trim() && !files.value.length) return undefined;
  const own = files.value.length ? { files: files.value } : {};
  const message = { role: "user", text: draft.value, ...own };
  try { asked({ messages: [] }); } catch (error) {
    problem.value = error.message;
    return undefined;
  }
  change([...current.value.messages, message]);
  draft.value = "";
  files.value = [];
  return answer();
}

/** Writes the answer after message `at` again; what followed is dropped. */
export function again(at) {
  change(current.value.messages.slice(0, at + 1));
  return answer();
}

/** Another text for message `at`, and an answer to it. */
export function edit(at, text) {
  const { messages } = current.value;
  change([...messages.slice(0, at), { ...messages[at], text }]);
  return answer();
}

/** The same request twice more, with drafts and without: whether all three texts are one, and the
    speeds of the last two, which find the same prompt in the cache. */
async function compared(at, stopped) {
  const message = current.value.messages[at];
  const made = await runOf(message);
  if (!made) return;
  comparing.value = message.id;
  try {
    const { trace: _, ...speculative } = made.request.speculative || {};
    const body = { ...made.request, speculative: Object.keys(speculative).length ? speculative : undefined };
    const found = await runPairs({ path: made.path, body }, 1, made.prompt, stopped);
    const texts = [found.on, found.off].map((one) => one.thought + one.text);
    const isSame = texts.every((text) => text === made.thought + made.text);
    const comparison = { isSame, ratio: found.ratios[0] ?? 0 };
    change(current.value.messages.map((one) => (
      one.id === message.id ? { ...one, facts: { ...one.facts, comparison } } : one)));
  } finally {
    comparing.value = "";
  }
}

export const compare = (at) => busily((stopped) => compared(at, stopped));

async function runOf({ id }) {
  if (!runs.has(id)) {
    const kept = await get("runs", id).catch(() => null);
    if (kept) runs.set(id, readRun(kept.written));
  }
  return runs.get(id);
}

/** Opens the laboratory with the run of an answer; it shows the round that shows most. */
export async function explain(message) {
  const made = await runOf(message);
  if (!made) {
    problem.value = "This browser did not keep the rounds of this answer. Write it again to see them.";
    return;
  }
  lanes.value = lanes.value?.on?.prompt === made.prompt ? lanes.value : null;
  form.prompt.value = made.prompt;
  replay(made);
}
