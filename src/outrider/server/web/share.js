// @ts-check
/* The request as commands, and the run as a file: JSON that this page replays, or a page by itself. */
import { address } from "./api.js";
import { html, signal } from "./html.js";
import { asked, problem } from "./state.js";

const copied = signal("");
// In the order in which each needs only those before it.
const MODULES = ["kinds.js", "tree.js", "rounds.js", "page.js"];

function quoted(text) {
  return `'${text.replaceAll("'", "'\\''")}'`;
}

export function curl(path, body) {
  const data = JSON.stringify({ ...body, stream: false, stream_options: undefined }, null, 1);
  return `curl ${quoted(address(path))} \\\n  -H 'Content-Type: application/json' \\\n`
    + `  -H "Authorization: Bearer $OPENAI_API_KEY" \\\n  -d ${quoted(data)}`;
}

/** A value as Python writes it. */
export function literal(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") {
    // What JSON escapes, Python reads alike; halves of pairs of UTF-16 cannot be in a text.
    return JSON.stringify(value);
  }
  if (typeof value !== "object") return String(value);
  const deeper = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((one) => literal(one, deeper))
    : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, deeper)}`);
  if (!parts.length) return open + close;
  return `${open}\n${parts.map((one) => `${deeper}${one},\n`).join("")}${indent}${close}`;
}

export function python(path, body) {
  const { model, messages, prompt, speculative, stream, stream_options: _, ...rest } = body;
  const isChat = path.includes("chat");
  const given = { model, ...(isChat ? { messages } : { prompt }), ...rest };
  const lines = Object.entries(given).map(([name, one]) => `    ${name}=${literal(one, "    ")},\n`);
  lines.push(`    extra_body=${literal({ speculative }, "    ")},\n`);
  const call = isChat ? "chat.completions" : "completions";
  const shown = isChat ? "answer.choices[0].message.content" : "answer.choices[0].text";
  return `from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(address("v1"))}, `
    + `api_key="unused")\nanswer = client.${call}.create(\n${lines.join("")})\nprint(${shown})\n`
    + "print(answer.metrics)  # what speculation brought\n";
}

async function copy(name, text) {
  try {
    await navigator.clipboard.writeText(text);
    copied.value = `${name} was copied.`;
  } catch {
    copied.value = "The browser does not let this page copy: select the text and copy it.";
  }
}

export function save(name, kind, text) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

export const saved = (made) => JSON.stringify({
  ...made.record(), result: made.result ?? { finish_reason: "", notes: [], tokens_per_second: 0 },
});

async function words(path) {
  return (await fetch(new URL(path, import.meta.url))).text();
}

/** The run as one page that asks for nothing: its policy names its one script by its hash. */
export async function page(made) {
  const parts = await Promise.all(MODULES.map((name) => words(`rounds/${name}`)));
  const script = parts.join("\n").replace(/^import [^;]*;\n/gm, "").replace(/^export /gm, "");
  const style = `${await words("style.css")}\n${await words("rounds/rounds.css")}`;
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(script)));
  const hash = btoa(String.fromCharCode(...bytes));
  const policy = `default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-${hash}'`;
  // Within a script nothing is markup but its end.
  const data = JSON.stringify([JSON.parse(saved(made))]).replaceAll("<", "\\u003c");
  return "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
    + "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
    + `<meta http-equiv="Content-Security-Policy" content="${policy}">\n`
    + `<title>Outrider: how this text was written</title>\n<style>\n${style}</style>\n</head>\n<body>\n`
    + "<header class=\"top\"><h1>How this text was written</h1></header>\n<main></main>\n"
    + `<script type="application/json" id="runs">${data}</script>\n<script>${script}</script>\n`
    + "</body>\n</html>\n";
}

function Code({ name, text }) {
  return html`
    <section class="code" aria-label=${name}>
      <div class="row"><h2>${name}</h2>
        <button type="button" onClick=${() => copy(name, text)}>Copy ${name}</button></div>
      <pre tabindex="0">${text}</pre>
    </section>`;
}

export function SharePanel({ run: made }) {
  let request = made?.path ? { path: made.path, body: made.request } : null;
  if (!made) {
    try { request = asked(); } catch (error) { problem.value = error.message; }
  }
  const file = "outrider-run";
  return html`
    <div class="row">
      <button type="button" disabled=${!made}
        onClick=${() => save(`${file}.json`, "application/json", saved(made))}>Save this run</button>
      <button type="button" disabled=${!made || !crypto.subtle}
        onClick=${async () => save(`${file}.html`, "text/html", await page(made))}>
        Save as a page</button>
    </div>
    <p class="place">The saved run has the prompt, the text and every round. Drop it on this page, or
      open <code>#replay</code>, to see it again; no server is asked. The saved page needs nothing at
      all.</p>
    <p aria-live="polite" class="place">${copied.value}</p>
    ${request ? html`
      <${Code} name="curl" text=${curl(request.path, request.body)} />
      <${Code} name="Python" text=${python(request.path, request.body)} />` : null}`;
}
