// @ts-check
/* The same request with speculation and without: the texts compared, and the speeds. Each pair is
   run one after the other, so that neither slows the other, and pairs take turns in who begins. */
import { Table, html, signal } from "./html.js";
import { asked, busily, follow, form, isBusy, tab } from "./state.js";
import { Run } from "./run.js";

const pairs = signal("3");
export const lanes = signal(null);

/** Where two texts part, in characters; -1 if they are one. */
export function firstDifference(first, second) {
  if (first === second) return -1;
  let at = 0;
  while (at < first.length && first[at] === second[at]) at += 1;
  return at;
}

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? sorted[middle] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** Tokens a second from asking to the last one. Not from the first one: a browser that is held up
    hears of many at once. */
function speed({ times }) {
  return times?.all > 0 ? times.count / times.all : 0;
}

/** Pairs of runs of a request, with speculation and without; `lanes` shows them as they come. Gives
    what it found, which ends with the first pair whose texts differ. */
export async function runPairs({ path, body }, count, prompt, stopped) {
  const bodies = { on: body, off: { ...body, speculative: false } };
  const state = { ratios: [], body, count, on: null, off: null, done: false };
  for (let i = 0; i < count; i += 1) {
    const both = {};
    for (const side of i % 2 ? ["off", "on"] : ["on", "off"]) {
      both[side] = new Run({ title: side, prompt });
      lanes.value = { ...state, ...both };
      const tell = () => { lanes.value = { ...lanes.value }; };
      both[side].listeners.add(tell);
      await follow(both[side], { path, body: bodies[side] }, stopped);
    }
    const [on, off] = [speed(both.on), speed(both.off)];
    if (on && off) state.ratios.push(on / off);
    Object.assign(state, both);
    state.differs = firstDifference(both.on.text, both.off.text);
    state.size = `${both.on.text.length} characters, ${both.on.times.count} tokens`;
    lanes.value = { ...state };
    if (state.differs >= 0) break;
  }
  lanes.value = { ...state, done: true };
  return state;
}

export const race = () => form.prompt.value && busily(async (stopped) => {
  tab.value = "race";
  const { path, body } = asked({ trace: false, drafts: true });
  if (body.temperature > 0 && body.seed === undefined) {
    body.seed = crypto.getRandomValues(new Uint32Array(1))[0];
  }
  await runPairs({ path, body }, Number(pairs.value), form.prompt.value, stopped);
});

function verdict({ differs, size, on, off, body }) {
  if (differs === undefined) return null;
  if (differs < 0) {
    const how = body.temperature > 0 ? `with seed ${body.seed}` : "at temperature 0";
    return html`<p class="verdict same" role="status">identical ✓ <small>${`${size}, ${how}`}</small>
      </p>`;
  }
  const around = (text) => text.slice(Math.max(0, differs - 20), differs + 20);
  return html`<p class="verdict differs" role="status">first difference at character ${differs}
    <small>${`on: “${around(on.text)}”, off: “${around(off.text)}”`}</small></p>`;
}

/** The ratio in words. */
function gained({ ratios }) {
  if (!ratios.length) return null;
  const ratio = median(ratios);
  const words = ratio >= 1.02 ? "as fast with speculation as without"
    : ratio > 0.98 ? "as fast: speculation neither won nor lost time here"
      : "as fast: speculation lost time here";
  return html`<p class="gain"><strong>${`${ratio.toFixed(2)}×`}</strong> ${words}
    <small>${`, median of ${ratios.length} ${ratios.length === 1 ? "pair" : "pairs"}; least ${Math.min(...ratios).toFixed(2)}×, most ${
      Math.max(...ratios).toFixed(2)}×`}</small></p>`;
}

function Lane({ title, made, differs }) {
  const at = differs >= 0 ? differs : made?.text.length;
  return html`
    <section class="lane" aria-label=${title}>
      <h2>${title}</h2>
      <p class="figure-line">${made?.result
        ? `${speed(made).toFixed(1)} tokens a second, first one after ${
          (1000 * made.times.first).toFixed(0)} ms` : made ? "writing …" : "waits"}</p>
      <pre tabindex="0">${made?.text.slice(0, at)}${differs >= 0 && made
        ? html`<mark>${made.text.slice(at)}</mark>` : null}</pre>
    </section>`;
}

export function RacePanel() {
  const state = lanes.value;
  return html`
    <div class="row">
      <label for="pairs">Pairs of runs</label>
      <select id="pairs" value=${pairs.value}
        onChange=${(event) => { pairs.value = event.currentTarget.value; }}>
        ${["1", "3", "5", "9"].map((count) => html`<option>${count}</option>`)}
      </select>
      <button type="button" disabled=${isBusy.value} onClick=${race}>Race on against off</button>
    </div>
    <p class="place">The same request with speculation and with <code>"speculative": false</code>,
      one after the other. The texts must be the same: at temperature 0 always, and above it by the
      seed, which the form or else this page chooses.</p>
    ${state ? html`
      ${verdict(state)}
      ${gained(state)}
      <div class="lanes-grid">
        <${Lane} title="Speculation on" made=${state.on} differs=${state.differs} />
        <${Lane} title="Speculation off" made=${state.off} differs=${state.differs} />
      </div>
      ${state.ratios.length ? html`<${Table} caption="Speed with speculation over speed without"
        heads=${["pair", "ratio"]}
        rows=${[...state.ratios.map((ratio, i) => [String(i + 1), `${ratio.toFixed(2)}×`]),
          ["median", `${median(state.ratios).toFixed(2)}×`]]} />` : null}`
      : html`<p class="empty">No race was run yet. It takes the prompt and the parameters of the
        form.</p>`}`;
}
