// @ts-check
/* A conversation as a file: written as Markdown or JSON, and the JSON read again as data of a stranger, as are
   files of `/save` in the terminal, which reads ours: it needs `role` and `content` alone. */
import { isObject, number, text } from "./run.js";
import { content, newId } from "./talk.js";

export const FORMAT = "outrider-conversation-1";
const FROM_FILE = "From a file: what the line above says was not checked here.";

/** A conversation as Markdown, or as JSON with the system prompt and all that is known of its answers. */
export function exported(one, kind, system = "") {
  if (kind === "json") {
    const messages = one.messages.map((message) => ({ ...message, content: content(message) }));
    if (system) messages.unshift({ role: "system", content: system });
    return JSON.stringify({ format: FORMAT, ...one, messages }, null, 1);
  }
  const parts = one.messages.map((message) => (
    `## ${message.role === "user" ? "You" : "Model"}\n\n${content(message)}\n`));
  return `# ${one.title}\n\n${parts.join("\n")}`;
}

const strings = (given) => (Array.isArray(given) ? given : []).map(String);

/** What is known of an answer. Its rounds are not in the file, so nothing can be compared. */
function facts(given) {
  const found = isObject(given) ? given : {};
  const { comparison } = found;
  return {
    ...Object.fromEntries(["drafted", "accepted", "rounds", "tokens", "speed"].map((name) => (
      [name, number(found[name])]))),
    off: found.off === true, guarantee: text(found.guarantee) || "how it was written is not known", comparable: false,
    notes: [...new Set([...strings(found.notes), FROM_FILE])],
    ...(isObject(comparison) && { comparison: { isSame: comparison.isSame === true, ratio: number(comparison.ratio) } }),
  };
}

function file(given) {
  if (typeof given?.name !== "string" || typeof given.text !== "string") throw new Error("has a broken file");
  return { name: given.name, text: given.text };
}

function message(given) {
  if (!["user", "assistant"].includes(given?.role)) throw new Error("is neither of the user nor of the assistant");
  const { role, content: plain } = given;
  const written = given.text ?? plain;
  if (typeof written !== "string") throw new Error("has no text");
  if (role === "user") {
    const files = (Array.isArray(given.files) ? given.files : []).map(file);
    return { role, text: written, ...(files.length && { files }) };
  }
  return {
    role, id: newId(), text: written, thought: text(given.thought), end: text(given.end),
    facts: facts(given.facts),
  };
}

/** True for what `/save` writes. */
const isOfTerminal = (given) => isObject(given) && typeof given.model === "string"
  && !("format" in given) && Array.isArray(given.messages);

/** The conversation of a file, as another one than that which was saved, with its system prompt. Raises an
    Error whose message says what is wrong. */
export function readConversation(written) {
  let given;
  try { given = JSON.parse(written); } catch { throw new Error("it is not JSON. \"Save as JSON\" writes a file that can be opened"); }
  const isOurs = given?.format === FORMAT || isOfTerminal(given);
  if (!isOurs) throw new Error(`it is no saved conversation: its format is not ${FORMAT}`);
  if (!Array.isArray(given.messages) || !given.messages.length) throw new Error("it has no messages");
  const [first] = given.messages;
  const system = first?.role === "system" && typeof first.content === "string" ? first.content : "";
  const said = system ? given.messages.slice(1) : given.messages;
  if (!said.length) throw new Error("it has no messages");
  const messages = said.map((one, at) => {
    try { return message(one); } catch (error) { throw new Error(`its message ${at + 1 + given.messages.length - said.length} ${error.message}`); }
  });
  return { id: newId(), title: text(given.title).slice(0, 60), changed: Date.now(), messages, system };
}
