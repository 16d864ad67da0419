// @ts-check
/* What is asked for: the prompt and the parameters, and what went wrong. */
import { html } from "./html.js";
import { readRun } from "./run.js";
import { race } from "./race.js";
import { Settings } from "./settings.js";
import { card, form, generate, isBusy, isReplay, problem, replay, stop } from "./state.js";

const EXAMPLES = [
  ["def quicksort(items):", "text"],
  ["Once upon a time", "text"],
  ["Write a haiku about rivers, and then say it again word for word.", "chat"],
];
export function Problem() {
  return html`<div aria-live="assertive">${problem.value
    ? html`<p class="alert card" role="alert">${problem.value}</p>` : null}</div>`;
}

export function AskForm() {
  const isChat = form.mode.value === "chat";
  const submit = (event) => {
    event.preventDefault();
    generate();
    // Where the answer is below the form.
    if (innerWidth < 960) document.querySelector(".main")?.scrollIntoView();
  };
  const keys = (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit(event);
  };
  const cannotChat = card.value?.has_chat_template === false;
  return html`
    <form class="ask" onSubmit=${submit} aria-label="What to write">
      <fieldset class="modes"><legend class="hidden">Kind of prompt</legend>
        ${[["chat", "Chat"], ["text", "Raw prompt"]].map(([id, words]) => html`
          <label class="check"><input type="radio" name="mode" checked=${form.mode.value === id}
            disabled=${id === "chat" && cannotChat}
            onChange=${() => { form.mode.value = id; }} /> ${words}</label>`)}
      </fieldset>
      ${cannotChat ? html`<p class="place">This model has no chat template: it goes on with a raw
        prompt.</p>` : null}
      <label for="prompt">${isChat ? "Your message" : "Prompt"}</label>
      <textarea id="prompt" rows="5" value=${form.prompt.value} onKeyDown=${keys}
        placeholder=${isChat ? "Ask something" : "def quicksort(items):"} spellcheck="false"
        onInput=${(event) => { form.prompt.value = event.currentTarget.value; }}></textarea>
      <p class="examples"><span>Try</span> ${EXAMPLES.filter(([, mode]) => mode === form.mode.value)
        .map(([words]) => html`<button type="button" class="quiet"
          onClick=${() => { form.prompt.value = words; }}>${words}</button>`)}</p>
      <div class="row actions">
        ${isBusy.value
          ? html`<button type="button" onClick=${stop}>Stop</button>`
          : html`<button type="submit" class="strong">Write</button>`}
        <button type="button" disabled=${isBusy.value} onClick=${race}>Race on against off</button>
      </div>
      <${Settings} />
    </form>`;
}

export async function open(file) {
  try {
    replay(readRun(await file.text()));
  } catch (error) {
    problem.value = error.message;
  }
}

/** Where a saved run is opened. */
export function ReplayForm() {
  return html`
    <div class=${isReplay.value ? "card drop" : "drop"}>
      <label for="file">${isReplay.value
        ? "Drop a saved run anywhere on this page, or choose its file."
        : "Open a saved run (or drop its file here)"}</label>
      <input id="file" type="file" accept=".json,application/json"
        onChange=${(event) => event.currentTarget.files[0] && open(event.currentTarget.files[0])} />
    </div>`;
}
