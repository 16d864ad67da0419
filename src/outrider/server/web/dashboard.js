// @ts-check
/* The dashboard: how the machine fares, over the last hour at most. It asks the server every two
   seconds for the steps that are new. */
import { KeyForm } from "./key.js";
import { get, needsKey } from "./api.js";
import { Chart } from "./chart.js";
import { Header, Table, html, percent, render, signal, useEffect } from "./html.js";

const STEPS = 1800;
const SPANS = { "5 minutes": 300, "15 minutes": 900, "an hour": 3600 };
const COLORS_MOST = 4;

/** Columns of the last hour, joined from what the server told. */
export class History {
  constructor() {
    this.first = 0;
    this.next = 0;
    this.columns = {};
    this.drafters = {};
    this.latest = null;
  }

  /** Takes an answer; what is older than an hour is dropped. A restarted server begins again. */
  take(answer) {
    if (this.latest && answer.began !== this.latest.began) Object.assign(this, new History());
    const count = answer.next - answer.first;
    if (answer.first !== this.next) Object.assign(this, { columns: {}, drafters: {}, first: answer.first });
    const had = answer.first - this.first;
    const join = (into, name, values, none) => {
      into[name] ??= Array(had).fill(none);
      into[name].push(...(values ?? Array(count).fill(none)));
    };
    for (const name of new Set([...Object.keys(this.columns), ...Object.keys(answer.columns)])) {
      join(this.columns, name, answer.columns[name], null);
    }
    for (const name of new Set([...Object.keys(this.drafters), ...Object.keys(answer.drafters)])) {
      const told = answer.drafters[name];
      this.drafters[name] ??= {};
      join(this.drafters[name], "drafted", told?.drafted, 0);
      join(this.drafters[name], "accepted", told?.accepted, 0);
    }
    this.next = answer.next;
    const over = this.next - this.first - STEPS;
    if (over > 0) {
      const all = [...Object.values(this.columns), ...Object.values(this.drafters).flatMap(Object.values)];
      for (const values of all) values.splice(0, over);
      this.first += over;
    }
    this.latest = answer;
    return this;
  }
}

const history = new History();
const stale = signal(0);
const span = signal("15 minutes");
const problem = signal("");

async function ask() {
  try {
    history.take(await get(`outrider/v1/history?since=${history.next}`));
    problem.value = "";
    stale.value += 1;
  } catch (error) {
    if (!needsKey.value) problem.value = `The server does not answer: ${error.message}`;
  }
}

const seconds = (value) => {
  if (value === null || value === undefined) return "–";
  return value < 1 ? `${(1000 * value).toPrecision(3)} ms` : `${value.toPrecision(3)} s`;
};
const short = (value) => (value >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(3))));
const last = (values) => values?.findLast((value) => value !== null);

/** Accepted of drafted tokens over the steps around each, so that a quiet step says something. */
function shares({ drafted, accepted }, width = 15) {
  let [sum, kept] = [0, 0];
  return drafted.map((count, i) => {
    sum += count - (i >= width ? drafted[i - width] : 0);
    kept += accepted[i] - (i >= width ? accepted[i - width] : 0);
    return sum ? kept / sum : null;
  });
}

function charts(from) {
  const { columns, drafters, latest } = history;
  const count = history.next - history.first - from;
  const x = Array.from({ length: count }, (_, i) => (
    latest.began + (history.first + from + i) * latest.step_seconds));
  const of = (...names) => [x, ...names.map((name) => (columns[name] ?? []).slice(from))];
  const lines = (...labels) => labels.map((label) => ({ label }));
  const names = Object.keys(drafters).sort().slice(0, COLORS_MOST);
  return html`
    <div class="charts">
      <${Chart} title="Tokens a second" words="written, and read of prompts" format=${short}
        data=${of("tokens_per_second", "prompt_tokens_per_second")}
        series=${lines("written", "of prompts")} />
      <${Chart} title="Requests a second" words="ended, and refused" format=${short}
        data=${of("requests_per_second", "refusals_per_second")} series=${lines("ended", "refused")} />
      <${Chart} title="Time to the first token" words="of requests that ended" format=${seconds}
        least=${0.1}
        data=${of("first_token_p50", "first_token_p95", "first_token_p99")}
        series=${lines("p50", "p95", "p99")} />
      <${Chart} title="Between tokens" words="each token's share of its round" format=${seconds} least=${0.1}
        data=${of("inter_token_p50", "inter_token_p95", "inter_token_p99")}
        series=${lines("p50", "p95", "p99")} />
      <${Chart} title="Requests in flight" words="running, and waiting" format=${short}
        data=${of("running", "waiting")} series=${lines("running", "waiting")} />
      <${Chart} title="KV cache in use" words="of what was set aside for it" format=${percent}
        least=${0.01}
        data=${of("kv_usage")} series=${lines("in use")} />
      ${names.length ? html`<${Chart} title="Acceptance by drafter" format=${percent} most=${1}
        words="accepted of drafted tokens, over half a minute"
        data=${[x, ...names.map((name) => shares(drafters[name]).slice(from))]}
        series=${lines(...names)} />` : null}
    </div>`;
}

/** One word for all engines of a model: how many of them are ready, where not all are. */
function stateOf({ state, engines }) {
  const ready = engines.filter((one) => one.state === "ready").length;
  return ready < engines.length ? `${ready} of ${engines.length} ready` : state;
}

function Tiles() {
  const { columns, latest } = history;
  const engines = Object.values(latest.engines);
  const sum = (name) => engines.reduce((all, one) => all + one[name], 0);
  const drafters = Object.values(latest.totals.drafters);
  const drafted = drafters.reduce((all, one) => all + (one.draft_tokens ?? 0), 0);
  const accepted = drafters.reduce((all, one) => all + (one.accepted_tokens ?? 0), 0);
  const steps = drafters.reduce((all, one) => all + (one.drafts ?? 0), 0);
  const tile = (name, value, more) => html`<div><dt>${name}</dt><dd>${value} <small>${more}</small></dd></div>`;
  return html`
    <dl class="tiles">
      ${tile("Tokens a second", short(columns.tokens_per_second?.at(-1) ?? 0),
        `${latest.totals.generation_tokens.toLocaleString("en")} in all`)}
      ${tile("Requests", `${sum("num_running")} + ${sum("num_waiting")}`, "running + waiting")}
      ${tile("First token", seconds(last(columns.first_token_p50)), `p99 ${seconds(last(columns.first_token_p99))}`)}
      ${tile("Between tokens", seconds(last(columns.inter_token_p50)), `p99 ${seconds(last(columns.inter_token_p99))}`)}
      ${tile("Drafts accepted", drafted ? percent(accepted / drafted) : "–",
        steps ? `${(1 + accepted / steps).toFixed(2)} tokens a round` : "nothing drafted yet")}
      ${tile("KV cache", percent(Math.max(0, ...engines.map((one) => one.kv_usage))), "in use")}
      ${tile("Engine", engines.map(stateOf).join(", "), `${sum("num_restarts")} restarts`)}
    </dl>`;
}

function Tables() {
  const { engines, totals } = history.latest;
  const lanes = Object.entries(engines).flatMap(([model, one]) => (
    Object.entries(one.lanes).map(([name, does]) => [name, does, model])));
  // Of several engines of a model a line each.
  const each = Object.entries(engines).flatMap(([model, one]) => (
    (one.engines.length ? one.engines : [one]).map((engine, i) => [
      one.engines.length ? `${model}, ${i}` : model, engine, totals.engines[model]?.[i] ?? 0])));
  const drafters = Object.entries(totals.drafters);
  const places = Math.max(0, ...drafters.map(([, one]) => one.per_pos.length));
  return html`
    <${Table} caption="Engines" heads=${["model", "state", "running", "waiting", "KV cache", "tokens written", "set back", "restarts"]}
      rows=${each.map(([name, one, tokens]) => [name, one.state, one.num_running, one.num_waiting,
        percent(one.kv_usage), tokens.toLocaleString("en"), one.num_preempted, one.num_restarts])} />
    ${lanes.length ? html`<${Table} caption="Lanes" heads=${["lane", "over 4 seconds", "model"]} rows=${lanes} />` : null}
    ${drafters.length ? html`<${Table} caption="Acceptance by drafter and position, since the start: of
      all drafts, those whose token there was accepted"
      heads=${["drafter", "drafts", "tokens", "accepted",
        ...Array.from({ length: places }, (_, i) => String(i + 1))]}
      rows=${drafters.map(([name, one]) => [name, one.drafts ?? 0, one.draft_tokens ?? 0,
        percent((one.accepted_tokens ?? 0) / Math.max(1, one.draft_tokens ?? 0)),
        ...Array.from({ length: places }, (_, i) => (
          one.per_pos[i] === undefined || !one.drafts ? "–" : percent(one.per_pos[i] / one.drafts)))])} />` : null}`;
}

function App() {
  useEffect(() => {
    ask();
    const timer = setInterval(() => { if (!document.hidden && !needsKey.value) ask(); }, 2000);
    return () => clearInterval(timer);
  }, []);
  const hasData = stale.value > 0;
  const steps = hasData ? SPANS[span.value] / history.latest.step_seconds : 0;
  const from = Math.max(0, history.next - history.first - steps);
  return html`
    <${Header} here="dashboard"
      model=${hasData ? Object.keys(history.latest.engines).join(", ") : ""} />
    <main id="main">
      <h1 class="hidden">Dashboard</h1>
      <div>
        <${KeyForm} used=${ask} />
        ${problem.value ? html`<p class="alert card" role="alert">${problem.value}</p>` : null}
        ${hasData && history.latest.totals.audits.different ? html`<p class="alert card" role="alert">
          ${history.latest.totals.audits.different} audited requests had another text without
          speculation. The server's log says which.</p>` : null}
        ${hasData ? html`
          <${Tiles} />
          <div class="row"><label for="span">Show the last</label>
            <select id="span" value=${span.value}
              onChange=${(event) => { span.value = event.currentTarget.value; }}>
              ${Object.keys(SPANS).map((name) => html`<option>${name}</option>`)}</select></div>
          ${history.next > history.first ? charts(from) : html`<p class="empty">The first figures come
            in a moment.</p>`}
          <${Tables} />` : html`<p class="empty">Asking the server …</p>`}
      </div>
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
