// @ts-check
/* Markdown as elements. marked splits the text into tokens, and each token becomes an element with
   text nodes: no markup is ever made of a text, so there is nothing to sanitise. HTML within the text
   is shown as it is written, a link leads to http, https or mail alone, and no picture is fetched. */
import { html, signal, useState } from "./html.js";
import highlight from "./vendor/highlight.js";
import { lexer } from "./vendor/marked.js";

/* Languages of code, each fetched with the first block of it, by the names that fences use. */
const NAMES = {
  bash: "bash sh zsh shell", cpp: "cpp c h hpp c++ cc cxx", go: "go golang",
  javascript: "javascript js mjs cjs ts typescript jsx tsx", json: "json jsonc", python: "python py gyp",
  rust: "rust rs", xml: "xml html svg xhtml rss",
};
const FILES = Object.fromEntries(Object.entries(NAMES).flatMap(([file, names]) => (
  names.split(" ").map((name) => [name, file]))));
const fetched = signal({});

/** The language of a fence, once its file is here. */
function known(name) {
  const file = Object.hasOwn(FILES, name) ? FILES[name] : null;
  if (file && !(file in fetched.value)) {
    fetched.peek()[file] = false;
    import(`./vendor/highlight-${file}.js`).then((found) => {
      highlight.registerLanguage(file, found.default);
      fetched.value = { ...fetched.value, [file]: true };
    }, () => { /* code without colours */ });
  }
  return file && fetched.value[file] ? file : null;
}

const MOST_HIGHLIGHTED = 20000;
const MOST_KEPT = 100;
const MOST_DEEP = 40;
const kept = new Map();

const ENTITIES = { amp: "&", lt: "<", gt: ">", quot: "\"", apos: "'", nbsp: "\u00a0" };

/** The text that a browser would show for `text` with entities. */
function decoded(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w{2,6}));/gi, (all, ten, sixteen, name) => {
    if (name) return ENTITIES[name] ?? all;
    const code = ten ? Number(ten) : parseInt(sixteen, 16);
    return code && code < 0x110000 ? String.fromCodePoint(code) : all;
  });
}

/** The address of a link if it is of a kind that may be followed, else null. */
export function followed(href) {
  try {
    const { protocol } = new URL(decoded(href));
    return ["http:", "https:", "mailto:"].includes(protocol) ? decoded(href) : null;
  } catch { return null; }
}

/** The elements of a tree of highlight.js. */
function coloured(node) {
  if (typeof node === "string") return node;
  const inner = node.children.map(coloured);
  const scope = node.scope ? /^[a-z_-]*/.exec(node.scope)[0] : "";
  return scope ? html`<span class=${`hl-${scope}`}>${inner}</span>` : inner;
}

function tree(code, language) {
  const name = `${language}\n${code}`;
  let found = kept.get(name);
  if (!found) {
    found = highlight.highlight(code, { language, ignoreIllegals: true })._emitter.rootNode;
    kept.set(name, found);
    if (kept.size > MOST_KEPT) kept.delete(kept.keys().next().value);
  }
  return found;
}

/** Copies `text`; its words say whether that was possible. */
export function CopyButton({ text, label = "Copy" }) {
  const [words, say] = useState("");
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
      say("Copied");
    } catch { say("The browser refuses: select the text"); }
    setTimeout(() => say(""), 2000);
  };
  return html`<button type="button" class="quiet" onClick=${copy}>${words || label}</button>`;
}

function Code({ text, lang }) {
  const language = /^[\w+#-]*/.exec(lang ?? "")[0].toLowerCase();
  const file = text.length < MOST_HIGHLIGHTED ? known(language) : null;
  return html`
    <div class="codeblock">
      <div class="row"><span>${language || "text"}</span><${CopyButton} text=${text} label="Copy code" /></div>
      <pre tabindex="0"><code>${file ? coloured(tree(text, file)) : text}</code></pre>
    </div>`;
}

let depth = 0;
/** The elements of tokens; deeper than anyone reads, their texts. */
function all(tokens = []) {
  if (depth > MOST_DEEP) return tokens.map((token) => token.raw);
  depth += 1;
  try { return tokens.map(shown); } finally { depth -= 1; }
}

const cell = (name, { tokens, align }) => html`<${name} class=${align ? `at-${align}` : ""}>${
  all(tokens)}<//>`;

/** The element of a token of marked, or its text. */
function shown(token) {
  switch (token.type) {
    case "space": case "def": case "checkbox": return null;
    case "paragraph": return html`<p>${all(token.tokens)}</p>`;
    // The headings of the page come before those of an answer.
    case "heading": return html`<p class=${`heading of-${token.depth}`} role="heading"
      aria-level=${Math.min(6, token.depth + 1)}>${all(token.tokens)}</p>`;
    case "code": return html`<${Code} text=${token.text} lang=${token.lang} />`;
    case "blockquote": return html`<blockquote>${all(token.tokens)}</blockquote>`;
    case "hr": return html`<hr />`;
    case "list": return html`<${token.ordered ? "ol" : "ul"} start=${token.ordered ? token.start : null}>${
      token.items.map((item) => html`<li>${item.task ? (item.checked ? "☑ " : "☐ ") : null}${
        all(item.tokens)}</li>`)}<//>`;
    case "table": return html`<div class="wide" tabindex="0" role="region" aria-label="Table"><table>
      <thead><tr>${token.header.map((one) => cell("th", one))}</tr></thead>
      <tbody>${token.rows.map((row) => html`<tr>${row.map((one) => cell("td", one))}</tr>`)}</tbody>
      </table></div>`;
    case "strong": return html`<strong>${all(token.tokens)}</strong>`;
    case "em": return html`<em>${all(token.tokens)}</em>`;
    case "del": return html`<del>${all(token.tokens)}</del>`;
    case "codespan": return html`<code>${token.text}</code>`;
    case "br": return html`<br />`;
    case "link": {
      const href = followed(token.href);
      if (!href) return token.raw;
      return html`<a href=${href} target="_blank" rel="noopener noreferrer nofollow">${
        all(token.tokens)}</a>`;
    }
    case "escape": return token.text;
    case "text": return token.tokens ? all(token.tokens) : decoded(token.text);
    // HTML and pictures, as they were written.
    case "html": return token.block ? html`<p class="said">${token.raw}</p>` : token.raw;
    default: return token.raw;
  }
}

function parsed(text) {
  // Thousands of nested quotes or lists are too deep for the parser: such a text is shown as it is.
  try { return all(lexer(text)); } catch { return html`<pre>${text}</pre>`; }
}

export function Markdown({ text }) {
  return html`<div class="md">${parsed(text)}</div>`;
}
