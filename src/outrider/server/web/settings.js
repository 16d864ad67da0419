// @ts-check
/* The settings of a request, each with what it does. */
import { html } from "./html.js";
import { card, form, usualTemperature, wrong } from "./state.js";

const SCHEMA = `{"type": "object", "properties": {
  "mathematician": {"const": "Ada Lovelace"}, "year_of_birth": {"type": "integer"}},
 "required": ["mathematician", "year_of_birth"], "additionalProperties": false}`;

const write = (name) => (event) => { form[name].value = event.currentTarget.value; };

function Field({ label, name, hint = "", words, ...more }) {
  const id = `f-${name}`;
  const said = wrong(name);
  return html`
    <div class="field">
      <label for=${id}>${label}</label>
      <input id=${id} value=${form[name].value} placeholder=${hint} autocomplete="off"
        aria-describedby=${`${id}-words`} aria-invalid=${said ? "true" : null} onInput=${write(name)} ...${more} />
      <small id=${`${id}-words`} class=${said ? "fails" : ""}>${said || words}</small>
    </div>`;
}

function Check({ name, label, words }) {
  return html`
    <label class="check"><input type="checkbox" checked=${form[name].value} aria-describedby=${`f-${name}-words`}
      onChange=${(event) => { form[name].value = event.currentTarget.checked; }} /> ${label}</label>
    <small id=${`f-${name}-words`}>${words}</small>`;
}

function Drafting({ compares }) {
  const about = card.value ?? {};
  return html`
    <fieldset class="group"><legend>Speculation</legend>
      <${Check} name="speculative" label="draft ahead"
        words="Off writes one token a pass of the model." />
      <div class="field"><label for="f-drafter">drafter</label>
        <select id="f-drafter" disabled=${!form.speculative.value} value=${form.drafter.value}
          aria-describedby="f-drafter-words" onChange=${write("drafter")}>
          <option value="">${about.drafter ?? "the server's"}</option>
          ${(about.drafters ?? []).filter((name) => name !== about.drafter)
            .map((name) => html`<option value=${name}>${name}</option>`)}
        </select>
        <small id="f-drafter-words">What guesses the next tokens. The model checks every guess.</small></div>
      <${Field} label="K: tokens a draft" name="k" inputmode="numeric"
        hint=${about.k === undefined ? "as the server" : String(about.k)}
        words="The longest draft. Long ones gain where guesses are right, and cost where they are wrong." />
      ${compares ? html`<${Check} name="compares" label="compare each answer"
        words="Writes every answer twice more, with and without drafts: are the texts identical, and how much faster was it?" />`
        : null}
    </fieldset>`;
}

function Sampling() {
  const own = Object.entries(card.value?.sampling ?? {}).map((pair) => pair.join(" ")).join(", ");
  const about = card.value?.sampling ?? {};
  const others = about.temperature === undefined ? "; 1 for requests to the API" : "";
  return html`
    <fieldset class="group"><legend>Sampling</legend>
      ${own ? html`<p class="place">This model advises: ${own}.</p>` : null}
      <${Field} label="max tokens" name="maxTokens" inputmode="numeric"
        hint=${form.mode.value === "text" ? "128" : "to the end"}
        words="The longest answer. Empty: until the model ends its turn." />
      <${Field} label="temperature" name="temperature" inputmode="decimal"
        hint=${String(usualTemperature())}
        words=${`Empty: ${usualTemperature()}${others}. 0 takes the likeliest token: one question has one answer. 1 draws as the model was trained.`} />
      <${Field} label="top p" name="topP" inputmode="decimal" hint=${String(about.top_p ?? 1)}
        words="Draws among the likeliest tokens that have this share together." />
      <${Field} label="top k" name="topK" inputmode="numeric" hint=${String(about.top_k || "all")}
        words="Draws among so many of the likeliest tokens." />
      <${Field} label="seed" name="seed" inputmode="numeric" hint="drawn"
        words="The same seed draws the same answer." />
    </fieldset>`;
}

export function Settings({ compares = false }) {
  const area = (name, label, rows, words) => html`
    <label for=${`f-${name}`}>${label}</label>
    <textarea id=${`f-${name}`} rows=${rows} value=${form[name].value} spellcheck="false"
      aria-describedby=${`f-${name}-words`} onInput=${write(name)}></textarea>
    <small id=${`f-${name}-words`}>${words}</small>`;
  return html`
    ${compares ? area("system", "System prompt", 3, "What the model reads before every conversation.") : null}
    <${Drafting} compares=${compares} /><${Sampling} />
    <details><summary>${compares ? "Structure" : "System prompt and structure"}</summary>
      ${compares || form.mode.value === "text" ? null
        : area("system", "System prompt", 2, "What the model reads before the message.")}
      ${area("schema", "JSON schema that the text must fit", 4, "Empty: any text.")}
      <button type="button" class="quiet" onClick=${() => { form.schema.value = SCHEMA; }}>
        An example</button>
    </details>`;
}
