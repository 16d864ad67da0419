// @ts-check
/* The conversation: what was said, a line below each answer that opens the laboratory, and the box
   to write in. */
import { Problem } from "./form.js";
import { html, signal, useEffect, useRef, useState } from "./html.js";
import { CopyButton, Markdown } from "./markdown.js";
import { Settings } from "./settings.js";
import { exported, readConversation } from "./saved.js";
import { save } from "./share.js";
import { card, choose, form, isBusy, models, problem, sameAgain, stop } from "./state.js";
import {
  again, attach, compare, comparing, conversations, current, deleted, draft, edit, explain, files,
  forget, isKept, live, open, openFile, send, undo,
} from "./talk.js";

const EXAMPLES = [
  "Write a Python function that counts the words of a text, and explain it.",
  "Write a haiku about rivers, and then say it again word for word.",
  "List three uses of a paper clip in a table.",
];
// How often an answer that grows is drawn.
const DRAW_MS = 80;
const NEAR_END = 160;
const touches = () => matchMedia("(pointer: coarse)").matches;
const write = () => document.getElementById("message")?.focus();
const panel = signal("");
const editing = signal(-1);

/** What speculation did to an answer, in one line. */
export function line({ comparison, drafted, accepted, off, guarantee, rounds }) {
  const parts = [];
  if (comparison?.ratio) parts.push(`${comparison.ratio.toFixed(1)}×`);
  if (off) parts.push("written without drafts");
  else if (drafted) parts.push(`${accepted} of ${drafted} drafted tokens accepted`);
  else if (rounds) parts.push("nothing was drafted");
  if (comparison) parts.push(comparison.isSame ? "identical to plain" : "NOT identical to plain");
  else if (!off) parts.push(guarantee);
  return parts.join(", ");
}

function Facts({ message, at }) {
  const { facts, id } = message;
  const isWrong = facts.comparison && !facts.comparison.isSame;
  return html`
    <div class="facts">
      <button type="button" class=${isWrong ? "line fails" : "line"} disabled=${isBusy.value}
        title="Show how this answer was written" onClick=${() => explain(message)}>${line(facts)}</button>
      ${comparing.value === id ? html`<span role="status">comparing …</span>`
        : facts.comparable && !facts.comparison ? html`<button type="button" class="quiet"
          disabled=${isBusy.value} title="Writes it twice more, with drafts and without"
          onClick=${() => compare(at)}>Compare</button>` : null}
    </div>
    ${facts.notes.map((words) => html`<p class="place">${words}</p>`)}`;
}

const ENDS = { length: "The answer reached its limit of tokens.", stopped: "The answer was stopped." };

function Answer({ message, at, isLast }) {
  return html`
    <li class="answer" aria-label="Model">
      ${message.thought ? html`<details><summary>Thoughts</summary><${Markdown} text=${message.thought} /></details>` : null}
      <${Markdown} text=${message.text} />
      ${ENDS[message.end] ? html`<p class="place">${ENDS[message.end]}</p>` : null}
      <${Facts} message=${message} at=${at} />
      <div class="acts"><${CopyButton} text=${message.text} />
        ${isLast ? html`<button type="button" class="quiet" disabled=${isBusy.value}
          onClick=${() => again(at - 1)}>Regenerate</button> <small>${sameAgain()}</small>` : null}</div>
    </li>`;
}

/** The answer that is being written. */
function Growing({ run }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    let timer = 0;
    const later = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        const { scrollHeight } = document.documentElement;
        const isAtEnd = scrollHeight - innerHeight - scrollY < NEAR_END;
        redraw((count) => count + 1);
        if (isAtEnd) requestAnimationFrame(() => scrollTo(0, document.documentElement.scrollHeight));
      }, DRAW_MS);
    };
    run.listeners.add(later);
    return () => {
      run.listeners.delete(later);
      clearTimeout(timer);
    };
  }, [run]);
  return html`
    <li class="answer" aria-label="Model" aria-busy="true">
      ${run.thought ? html`<details open><summary>Thoughts</summary><${Markdown} text=${run.thought} /></details>` : null}
      <${Markdown} text=${run.text} /><p class="place">writing …</p>
    </li>`;
}

function Question({ message, at, isLast }) {
  const field = useRef(null);
  const isEdited = editing.value === at;
  useEffect(() => { if (isEdited) field.current?.focus(); }, [isEdited]);
  const save_ = (event) => {
    event.preventDefault();
    const text = field.current.value;
    editing.value = -1;
    edit(at, text);
  };
  return html`
    <li class="question" aria-label="You">
      ${(message.files ?? []).map((file) => html`
        <details><summary>${file.name}</summary><pre tabindex="0">${file.text}</pre></details>`)}
      ${isEdited ? html`
        <form onSubmit=${save_}>
          <label class="hidden" for="edited">Edit your message</label>
          <textarea id="edited" rows="3" ref=${field} defaultValue=${message.text}
            onKeyDown=${(event) => { if (event.key === "Escape") editing.value = -1; }}></textarea>
          <div class="row"><button type="submit" class="strong">Send again</button>
            <button type="button" onClick=${() => { editing.value = -1; }}>Cancel</button>
            ${isLast ? null : html`<small>What follows is replaced.</small>`}</div>
        </form>` : html`
        <div class="said">${message.text}</div>
        <div class="acts">
          <button type="button" class="quiet" disabled=${isBusy.value}
            onClick=${() => { editing.value = at; }}>Edit</button>
          ${isLast && !isBusy.value ? html`<button type="button" class="quiet"
            onClick=${() => again(at)}>Ask again</button>` : null}
        </div>`}
    </li>`;
}

function Messages() {
  const { messages } = current.value;
  // What was sent last, and the line below what came last, are in sight.
  useEffect(() => { scrollTo(0, document.documentElement.scrollHeight); }, [messages.length]);
  return html`
    <ol class="messages" aria-label="Conversation">
      ${messages.map((message, at) => {
        const given = { key: at, message, at, isLast: at === messages.length - 1 };
        return message.role === "user" ? html`<${Question} ...${given} />` : html`<${Answer} ...${given} />`;
      })}
      ${live.value ? html`<${Growing} key="live" run=${live.value} />` : null}
    </ol>`;
}

const Welcome = () => html`
  <div class="welcome">
    <h2>Ask the model something</h2>
    <p class="place">A drafter guesses ahead and the model accepts what it agrees with, so the
      answer comes sooner and is the model's own. A line below it says what the drafts did.</p>
    <p class="examples">${EXAMPLES.map((words) => html`<button type="button" class="quiet"
      onClick=${() => { draft.value = words; write(); }}>${words}</button>`)}</p>
  </div>`;

/** A button that asks for files. */
function FileButton({ id, label, use, ...given }) {
  const chosen = ({ currentTarget }) => {
    use([...currentTarget.files]);
    currentTarget.value = "";
  };
  return html`<input id=${id} class="hidden" type="file" ...${given} onChange=${chosen} />
    <label class="button" for=${id}>${label}</label>`;
}

function History() {
  const name = (one) => one.title.replace(/[^\w -]+/g, "").trim().slice(0, 40) || "conversation";
  const one = current.value;
  const download = (kind, type) => save(`${name(one)}.${kind}`, type, exported(one, kind, form.system.value));
  return html`
    <nav class=${panel.value === "history" ? "history shown" : "history"} aria-label="Conversations">
      <button type="button" disabled=${isBusy.value} onClick=${() => { open(null); panel.value = ""; }}>
        New conversation</button>
      <${FileButton} id="saved" label="Open a saved one" accept=".json,application/json" disabled=${isBusy.value}
        use=${async ([file]) => { await openFile(file, readConversation); if (!problem.value) panel.value = ""; }} />
      <ul>${conversations.value.map((each) => html`
        <li key=${each.id}><button type="button" class="quiet" disabled=${isBusy.value}
          aria-current=${each.id === one.id ? "true" : null}
          onClick=${() => { open(each); panel.value = ""; }}>${each.title || "Untitled"}</button></li>`)}</ul>
      ${one.messages.length ? html`
        <p class="acts">This one:
          <button type="button" class="quiet" onClick=${() => download("md", "text/markdown")}>Save as Markdown</button>
          <button type="button" class="quiet" onClick=${() => download("json", "application/json")}>Save as JSON</button>
          <button type="button" class="quiet" disabled=${isBusy.value} onClick=${() => forget(one)}>Delete</button></p>` : null}
      ${deleted.value ? html`<p role="status">Deleted. <button type="button" class="quiet"
        onClick=${undo}>Undo</button></p>` : null}
      <p class="place">${isKept.value ? "Conversations stay in this browser." : "This browser keeps no conversations."}</p>
    </nav>`;
}

function ModelPicker() {
  if (models.value.length < 2) return null;
  return html`<label class="hidden" for="model">Model</label>
    <select id="model" value=${card.value?.id} disabled=${isBusy.value} onChange=${(event) => (
      choose(event.currentTarget.value).catch((error) => { problem.value = error.message; }))}>
      ${models.value.map((id) => html`<option value=${id}>${id}</option>`)}</select>`;
}

function Composer() {
  useEffect(() => { if (document.activeElement === document.body && !touches()) write(); }, []);
  const canChat = card.value?.has_chat_template !== false;
  const submit = (event) => {
    event.preventDefault();
    if (!isBusy.value && canChat) send();
  };
  const keys = (event) => {
    // Enter on a screen keyboard ends a line; within an input method it chooses a word.
    const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing && !touches();
    if (sends) submit(event);
  };
  return html`
    <form class="composer" onSubmit=${submit} aria-label="Write to the model">
      <${Problem} />
      ${canChat ? null : html`<p class="card alert">This model has no chat template: it only goes on with
        a text. <a href="#laboratory">The laboratory</a> takes raw prompts.</p>`}
      ${files.value.length ? html`<ul class="chips">${files.value.map((file) => html`<li>${file.name}
        <button type="button" class="quiet" aria-label=${`Remove ${file.name}`}
          onClick=${() => { files.value = files.value.filter((one) => one !== file); }}>×</button></li>`)}</ul>` : null}
      <label class="hidden" for="message">Your message</label>
      <textarea id="message" rows="2" value=${draft.value} placeholder="Ask something" onKeyDown=${keys}
        onInput=${(event) => { draft.value = event.currentTarget.value; }}></textarea>
      <div class="row">
        <${FileButton} id="attach" label="Attach text" multiple use=${attach} />
        ${[["settings", "Settings"], ["history", "Conversations"]].map(([name, words]) => html`
          <button type="button" class=${name} aria-expanded=${panel.value === name}
            onClick=${() => { panel.value = panel.value === name ? "" : name; }}>${words}</button>`)}
        <${ModelPicker} />
        ${isBusy.value ? html`<button type="button" class="last" onClick=${stop}>Stop</button>`
          : html`<button type="submit" class="strong last" disabled=${!canChat}>Send</button>`}
      </div>
    </form>`;
}

export function Conversation() {
  return html`
    <${History} />
    <div class="chat">
      ${current.value.messages.length ? html`<${Messages} />` : html`<${Welcome} />`}
      <p class="hidden" role="status">${live.value ? "" : current.value.messages.at(-1)?.role === "assistant" ? "The answer is complete." : ""}</p>
      <${Composer} />
    </div>
    ${panel.value === "settings" ? html`<section class="side settings" aria-label="Settings">
      <h2>Settings</h2><${Settings} compares /></section>` : null}`;
}

/** Ends an answer, closes a panel: what the escape key does. */
export function escape() {
  if (isBusy.value) stop();
  else panel.value = "";
}
