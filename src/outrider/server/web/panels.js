// @ts-check
/* What the rounds of a run say besides its text: the draft lengths and what they brought,
   acceptance by position, stages in time, and what a grammar forced. */
import { Table, html, percent } from "./html.js";
import { acceptance, expectedAndCame, expecting, lengths, stageSeconds } from "./run.js";
import { REASONS, visible } from "./rounds/kinds.js";
import { card, shownRound } from "./state.js";

const Nothing = () => html`<p class="empty">No round was told yet. A run with speculation and
  tracing fills this.</p>`;
const ms = (seconds) => `${(1000 * seconds).toFixed(2)} ms`;

/** The rounds of each reason for which a controller chose their length. */
function byReason(rounds) {
  const found = new Map();
  for (const one of rounds) {
    const choice = one.budget?.choice;
    if (!choice) continue;
    if (!found.has(choice.reason)) found.set(choice.reason, []);
    found.get(choice.reason).push(one);
  }
  return [...found].sort((a, b) => b[1].length - a[1].length);
}

/** Expected and came, in tokens a second, of rounds whose controller expected something. */
function expectations(rounds) {
  const { expected, came, gain } = expectedAndCame(rounds);
  const rate = ({ tokens, seconds }) => (seconds ? (tokens / seconds).toFixed(1) : "–");
  return rounds.length ? [rate(expected), rate(came), `${gain.toFixed(2)}×`] : ["–", "–", "–"];
}

function Choices({ rounds }) {
  const rows = byReason(rounds);
  if (!rows.length) return null;
  const isExpecting = expecting(rounds).length > 0;
  const heads = ["why", "rounds", "allowed", "drafted"];
  if (isExpecting) heads.push("expected tok/s", "came", "× plain");
  const mean = (row, of) => (row.reduce((sum, one) => sum + of(one), 0) / row.length).toFixed(1);
  const words = rows.map(([reason]) => REASONS[reason].join(": ")).join("; ");
  return html`
    <${Table} caption="What the controller chose, and why (tokens on a path, a round)"
      heads=${heads} rows=${rows.map(([reason, row]) => [
      REASONS[reason][0], row.length, mean(row, (one) => one.budget.depth),
      mean(row, (one) => one.draft_depth || one.num_drafted),
      ...(isExpecting ? expectations(expecting(row)) : [])])} />
    <p class="place">${words}.</p>`;
}

/** Sums over the rounds of each drafter. */
function byDrafter(rounds) {
  const found = new Map();
  for (const one of rounds) {
    const name = one.num_drafted ? one.drafter : "nothing drafted";
    const row = found.get(name) ?? { rounds: 0, drafted: 0, accepted: 0, emitted: 0 };
    row.rounds += 1;
    row.drafted += one.num_drafted;
    row.accepted += one.num_accepted;
    row.emitted += one.num_emitted ?? one.num_accepted + 1;
    found.set(name, row);
  }
  return [...found].sort((a, b) => b[1].rounds - a[1].rounds);
}

/** Sums over the parts of each member, where a drafter has several; empty otherwise. */
function byMember(rounds) {
  const found = new Map();
  for (const part of rounds.flatMap((one) => one.members ?? [])) {
    const row = found.get(part.name) ?? { rounds: 0, drafted: 0, accepted: 0, seconds: 0, trials: 0 };
    row.rounds += 1;
    row.drafted += part.num_drafted;
    row.accepted += part.num_accepted;
    row.seconds += part.seconds;
    row.trials += part.trial ? 1 : 0;
    found.set(part.name, row);
  }
  return [...found].sort((a, b) => b[1].rounds - a[1].rounds);
}

function reasons(run, found) {
  const about = card.value ?? {};
  const words = [];
  const asked = run.request?.speculative;
  if (asked === false || asked?.k === 0) words.push("The request asked for no speculation.");
  else if (asked?.k !== undefined) words.push(`The request asked for at most ${asked.k} tokens a draft.`);
  else if (about.fixed_k === false) words.push("A controller chooses the draft length each round.");
  else if (about.k !== undefined) {
    words.push(`The server drafts up to ${about.k} tokens each round: its controller is fixed. With `
      + "--controller goodput it chooses a length for each round.");
  }
  words.push(...(run.result?.notes ?? []));
  if (found) {
    const best = found.gains.indexOf(Math.max(...found.gains));
    words.push(`Of the drafted tokens that the target came to, ${percent(found.share)} were accepted; `
      + `drafting one took ${percent(found.cost)} of a target pass. By that, K = ${best} would have `
      + `been best: about ${found.gains[best].toFixed(2)} times plain decoding.`);
  }
  return words;
}

/** Steps of two counts over the rounds, in one picture: the table below has their sums. */
function Steps({ rounds, drafted }) {
  const most = Math.max(1, ...rounds.map(drafted));
  const [x, y] = [1000 / rounds.length, 130 / most];
  const line = (of) => rounds.map((one, i) => (
    `${i ? "L" : "M"}${(i * x).toFixed(1)} ${(140 - of(one) * y).toFixed(1)}h${x.toFixed(2)}`)).join("");
  const kept = line((one) => one.num_accepted);
  const words = `Draft length in each of ${rounds.length} rounds, at most ${most}, and how many of the
    drafted tokens were accepted.`;
  return html`
    <figure class="chart"><figcaption><strong>Draft length by round</strong>${" "}
        <span><i class="swatch-line drafted"></i> drafted, up to ${most} on a path${" "}
        <i class="swatch-area"></i> accepted</span></figcaption>
      <svg class="steps" viewBox="0 0 1000 142" preserveAspectRatio="none" role="img"
        aria-label=${words}>
        <path class="kept" d=${`${kept}L1000 140L0 140Z`} />
        <path class="drafted" d=${line(drafted)} />
        <path class="rule" d="M0 141H1000" />
      </svg>
    </figure>`;
}

export function ControllerPanel({ run }) {
  const { rounds } = run;
  if (!rounds.length) return html`<${Nothing} />`;
  const found = lengths(rounds);
  const members = byMember(rounds);
  return html`
    <ul class="reasons">${reasons(run, found).map((words) => html`<li>${words}</li>`)}</ul>
    <${Steps} rounds=${rounds} drafted=${(one) => one.draft_depth || one.num_drafted} />
    <${Choices} rounds=${rounds} />
    <${Table} caption="By drafter" heads=${["drafter", "rounds", "drafted", "accepted", "share",
      "tokens a round"]} rows=${byDrafter(rounds).map(([name, row]) => [
        name, row.rounds, row.drafted, row.accepted,
        row.drafted ? percent(row.accepted / row.drafted) : "–",
        (row.emitted / row.rounds).toFixed(2)])} />
    ${members.length ? html`<${Table} caption="By member of the portfolio"
      heads=${["member", "rounds", "drafted", "accepted", "ms", "trials"]}
      rows=${members.map(([name, row]) => [name, row.rounds, row.drafted, row.accepted,
        (1e3 * row.seconds).toFixed(1), row.trials])} />` : null}
    ${found ? html`<${Table} caption="What each draft length would bring at this run's acceptance and
      costs (an estimate that takes every token to be accepted alike)"
      heads=${["K", "times plain"]}
      rows=${found.gains.map((gain, k) => [k, `${gain.toFixed(2)}×`])} />` : null}`;
}

/** Bars of shares, each with its words. */
function Bars({ caption, heads, rows }) {
  return html`
    <table class="bars"><caption>${caption}</caption>
      <thead><tr>${heads.map((text) => html`<th scope="col">${text}</th>`)}</tr></thead>
      <tbody>${rows.map(([name, share, words]) => html`
        <tr><th scope="row">${name}</th><td>
          <meter min="0" max="1" value=${share} aria-label=${words}></meter> ${words}</td></tr>`)}
      </tbody></table>`;
}

function invariants(run, { histogram, numDrafted, numAccepted }) {
  const sum = histogram.reduce((all, count) => all + count, 0);
  const weighted = histogram.reduce((all, count, j) => all + j * count, 0);
  const held = [
    [`the histogram adds up to ${sum} rounds that drafted`,
      sum === run.rounds.filter((one) => one.num_drafted).length],
    [`weighted by its index, to ${numAccepted} accepted tokens`, weighted === numAccepted],
    [`accepted ≤ drafted: ${numAccepted} ≤ ${numDrafted}`, numAccepted <= numDrafted],
  ];
  const told = run.metrics?.speculative_decoding;
  if (told) {
    held.push(["the answer's own figures say the same",
      told.num_accepted_draft_tokens === numAccepted && told.num_draft_tokens === numDrafted]);
  }
  return held;
}

export function AcceptancePanel({ run }) {
  const found = acceptance(run.rounds);
  if (!found.numDrafted) return html`<${Nothing} />`;
  const most = Math.max(...found.histogram, 1);
  return html`
    <${Bars} caption="By position in the draft: how many of those drafted there were accepted"
      heads=${["position", "accepted"]} rows=${found.drafted.map((count, i) => [
        i + 1, found.kept[i] / count, `${percent(found.kept[i] / count)} (${found.kept[i]} of ${count})`,
      ])} />
    <${Bars} caption="By round: how many rounds had so many tokens accepted"
      heads=${["accepted", "rounds"]}
      rows=${found.histogram.map((count, j) => [j, count / most, String(count)])} />
    <ul class="checks">${invariants(run, found).map(([words, holds]) => html`
      <li class=${holds ? "holds" : "fails"}>${holds ? "✓" : "✗ does not hold:"} ${words}</li>`)}
    </ul>`;
}

const LANES = ["draft", "verify", "accept", "between"];
const WIDTH = 40;

/** Rounds around the one that is shown, each stage in a lane of its own, to scale. */
function Timeline({ rounds }) {
  const from = Math.max(0, Math.min(shownRound.value - WIDTH / 2, rounds.length - WIDTH));
  const part = rounds.slice(from, from + WIDTH);
  const boxes = [];
  let now = 0;
  part.forEach((one, i) => {
    const times = [one.draft_seconds, one.verify_seconds, one.accept_seconds];
    if (i) {
      boxes.push({ lane: 3, start: now, length: one.gap_seconds ?? 0, number: from + i });
      now += one.gap_seconds ?? 0;
    }
    times.forEach((length, lane) => {
      boxes.push({ lane, start: now, length, number: from + i });
      now += length;
    });
  });
  const scale = now ? 1000 / now : 0;
  const words = `Rounds ${from + 1} to ${from + part.length}, ${ms(now)} in all; the table below has
    the sums.`;
  return html`
    <div class="wide" tabindex="0" role="region" aria-label="Lanes in time">
      <svg class="timeline" viewBox="0 0 1080 136" role="img" aria-label=${words}>
        ${LANES.map((name, i) => html`
          <text x="0" y=${i * 32 + 21}>${name}</text>
          <line x1="76" x2="1080" y1=${i * 32 + 30} y2=${i * 32 + 30} class="rule" />`)}
        ${boxes.filter((box) => box.length > 0).map((box) => html`
          <rect class=${`${LANES[box.lane]}${box.number === shownRound.value ? " chosen" : ""}`}
            x=${76 + box.start * scale} y=${box.lane * 32 + 6} height="22"
            width=${Math.max(0.75, box.length * scale)}>
            <title>round ${box.number + 1}: ${LANES[box.lane]} ${ms(box.length)}</title>
          </rect>`)}
      </svg>
    </div>
    <p class="place">${words}</p>`;
}

export function LanesPanel({ run }) {
  const { rounds } = run;
  if (!rounds.length) return html`<${Nothing} />`;
  const sums = stageSeconds(rounds);
  const all = Object.values(sums).reduce((a, b) => a + b, 0) || 1;
  return html`
    <${Timeline} rounds=${rounds} />
    <${Table} caption="Time by stage" heads=${["stage", "seconds", "share", "a round"]}
      rows=${LANES.map((name) => [
        name, sums[name].toFixed(4), percent(sums[name] / all), ms(sums[name] / rounds.length)])} />
    <p class="place">A pass that several requests share has one time, so other requests' work is in
      it. Between rounds the server does what no round counts: reading, sending, other requests.</p>`;
}

export function ForcedPanel({ run }) {
  const forced = [];
  run.rounds.forEach((one, number) => {
    if (one.source !== "forced") return;
    const tokens = one.nodes.filter((node) => node.verdict === "accepted");
    if (tokens.length) forced.push([number, tokens]);
  });
  const count = forced.reduce((sum, [, tokens]) => sum + tokens.length, 0);
  if (!count) {
    return html`<p class="empty">No token was forced. Where a schema leaves one choice (a brace, the
      name of a field), that token needs no draft model: ask with a JSON schema to see it.</p>`;
  }
  return html`
    <p>${count} tokens of this text had no alternative: the grammar left one choice, so they were
      drafted at no cost.</p>
    <${Table} caption="Forced tokens" heads=${["round", "tokens", "count"]}
      rows=${forced.map(([number, tokens]) => [
        number + 1, visible(tokens.map((node) => node.token).join("")), tokens.length])} />`;
}
