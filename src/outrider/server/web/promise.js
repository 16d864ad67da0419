// @ts-check
/* What was expected of speculation, and what came: the planner's estimate for texts in general, the
   controller's for the run that is shown, and a race of one text. They are about different texts, so
   none is the verdict on another. */
import { Table, html } from "./html.js";
import { lanes, median, race } from "./race.js";
import { expectedAndCame, expecting } from "./run.js";
import { card, isBusy, run } from "./state.js";

const times = (value) => `${value.toFixed(2)}×`;

/** {name, low, middle, high} of each estimate and of what was measured, and a sentence if need be. */
function figures() {
  const promise = card.value?.promise;
  const found = [];
  if (promise) {
    found.push({
      name: "planner's estimate, texts in general", low: promise.low, middle: promise.speed_up, high: promise.high,
    });
  }
  const rounds = expecting(run.value?.rounds ?? []);
  if (rounds.length) {
    const { gain, expected, came } = expectedAndCame(rounds);
    const rate = ({ tokens, seconds }) => (tokens / seconds).toFixed(0);
    found.push({
      name: "controller's estimate, the run shown", low: gain, middle: gain, high: gain,
      words: `In the run shown the controller expected ${rate(expected)} tokens a second, and ${
        rate(came)} came.`,
    });
  }
  const ratios = lanes.value?.ratios ?? [];
  if (ratios.length) {
    found.push({
      name: `measured, this text, ${ratios.length} ${ratios.length === 1 ? "pair" : "pairs"}`,
      low: Math.min(...ratios), middle: median(ratios), high: Math.max(...ratios),
    });
  }
  return found;
}

/** Intervals below each other; the table beside says the same. */
function Intervals({ rows }) {
  const most = Math.min(8, Math.max(2, ...rows.map((row) => row.high)) * 1.05);
  const x = (value) => 12 + (576 * Math.min(value, most)) / most;
  const steps = Array.from({ length: Math.floor(most) + 1 }, (_, i) => i);
  const bottom = 44 * rows.length + 4;
  return html`
    <svg class="intervals" viewBox=${`0 0 600 ${bottom + 20}`} role="img"
      aria-label="Estimates and measurements on one axis; the table below says the same.">
      ${steps.map((step) => html`
        <line class=${step === 1 ? "one" : "rule"} x1=${x(step)} x2=${x(step)} y1="0" y2=${bottom} />
        <text x=${x(step)} y=${bottom + 15}>${step === 1 ? "1× plain" : `${step}×`}</text>`)}
      ${rows.map((row, i) => html`
        <g class=${i === rows.length - 1 && row.name.startsWith("measured") ? "measured" : "promised"}>
          <text class=${x(row.low) < 360 ? "name" : "name left"} y=${44 * i + 14}
            x=${x(x(row.low) < 360 ? row.low : row.high)}>${row.name}</text>
          <rect x=${x(row.low)} width=${Math.max(1, x(row.high) - x(row.low))} y=${44 * i + 22}
            height="12" rx="3" />
          <circle cx=${x(row.middle)} cy=${44 * i + 28} r="7" />
        </g>`)}
    </svg>`;
}

export function PromisePanel() {
  const rows = figures();
  const hasRace = Boolean(lanes.value?.ratios?.length);
  return html`
    ${rows.length ? html`
      <${Intervals} rows=${rows} />
      <${Table} caption="Decoding speed with speculation over without: estimated, and measured"
        heads=${["who says", "speed-up", "least", "most"]} rows=${rows.map((row) => [
          row.name, times(row.middle), row.low === row.high ? "–" : times(row.low),
          row.low === row.high ? "–" : times(row.high)])} />
      ${rows.map((row) => (row.words ? html`<p>${row.words}</p>` : null))}` : html`
      <p class="empty">There is no estimate: this server drafts nothing, or the planner has no figures of
        its device.</p>`}
    ${hasRace ? null : html`<p class="empty">Nothing was measured yet. A race measures it.</p>
      <button type="button" disabled=${isBusy.value} onClick=${race}>Race on against off</button>`}
    <p class="place">The planner reckoned before anything ran, for texts in general and one at a time:
      from the sizes of both models, the kind of machine, and how often such drafters are right. A
      race measures the one text of the form. A text that repeats itself gains more, one that nothing
      foretells gains less, so a race may well lie outside the planner's interval, and neither is
      the verdict on the other. <code>outrider plan --prompts FILE</code> counts on your own
      prompts, and measures. The controller, where it chooses lengths, reckons from rounds that this
      server ran.</p>`;
}
