// @ts-check
/* What is asked for: the prompt and the parameters, and what went wrong. */
import { html } from "./html.js";
import { readRun } from "./run.js";
import {
  card, form, generate, isBusy, isReplay, problem, replay, restart, stop, turns, usualTemperature,
} from "./state.js";
import { race } from "./race.js";

const EXAMPLES = [
  ["def quicksort(items):", "text"],
  ["Once upon a time", "text"],
  ["Write a haiku about rivers, and then say it again word for word.", "chat"],
];
const SCHEMA = `{"type": "object", "properties": {
  "mathematician": {"const": "Ada Lovelace"}, "year_of_birth": {"type": "integer"}},
 "required": ["mathematician", "year_of_birth"], "additionalProperties": false}`;

export function Problem() {
  return html`<div aria-live="assertive">${problem.value
    ? html`<p class="alert card" role="alert">${problem.value}</p>` : null}</div>`;
}

function Field({ label, name, hint = "", ...more }) {
  const id = `f-${name}`;
  const value = form[name];
  return html`
    <div class="field">
      <label for=${id}>${label}</label>
      <input id=${id} value=${value.value} placeholder=${hint} autocomplete="off"
        onInput=${(event) => { value.value = event.currentTarget.value; }} ...${more} />
    </div>`;
}

function Speculation() {
  const about = card.value ?? {};
  return html`
    <fieldset class="group"><legend>Speculation</legend>
      <label class="check"><input type="checkbox" checked=${form.speculative.value}
        onChange=${(event) => { form.speculative.value = event.currentTarget.checked; }} />
        draft ahead</label>
      <div class="grid">
        <div class="field"><label for="f-drafter">drafter</label>
          <select id="f-drafter" disabled=${!form.speculative.value} value=${form.drafter.value}
            onChange=${(event) => { form.drafter.value = event.currentTarget.value; }}>
            <option value="">${about.drafter ?? "the server's"}</option>
            ${(about.drafters ?? []).filter((name) => name !== about.drafter)
              .map((name) => html`<option value=${name}>${name}</option>`)}
          </select></div>
        <${Field} label="K: tokens a draft" name="k" inputmode="numeric"
          hint=${about.k === undefined ? "as the server" : String(about.k)} />
      </div>
    </fieldset>`;
}

function Sampling() {
  const own = Object.entries(card.value?.sampling ?? {}).map((pair) => pair.join(" ")).join(", ");
  return html`
    <fieldset class="group"><legend>Sampling</legend>
      ${own ? html`<p class="place">Unless you say otherwise: ${own}.</p>` : null}
      <div class="grid three">
        <${Field} label="max tokens" name="maxTokens" inputmode="numeric"
          hint=${form.mode.value === "text" ? "128" : "to the end"} />
        <${Field} label="temperature" name="temperature" inputmode="decimal"
          hint=${String(usualTemperature())} />
        <${Field} label="seed" name="seed" inputmode="numeric" hint="drawn" />
      </div>
    </fieldset>`;
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
        ${turns.value.length ? html`<button type="button" disabled=${isBusy.value}
          onClick=${restart}>New conversation</button>` : null}
      </div>
      <${Speculation} /><${Sampling} />
      <details><summary>System prompt and structure</summary>
        ${isChat ? html`<label for="system">System prompt</label>
          <textarea id="system" rows="2" value=${form.system.value}
            onInput=${(event) => { form.system.value = event.currentTarget.value; }}></textarea>`
          : null}
        <label for="schema">JSON schema that the text must fit</label>
        <textarea id="schema" rows="4" value=${form.schema.value} spellcheck="false"
          onInput=${(event) => { form.schema.value = event.currentTarget.value; }}></textarea>
        <button type="button" class="quiet" onClick=${() => { form.schema.value = SCHEMA; }}>
          An example</button>
      </details>
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
