// @ts-check
/* A run: what was asked, its rounds as they come, and its end. Saved as one JSON object, which is
   read again as data of a stranger. docs/rounds.md has the shape of rounds. */

import { REASONS } from "./rounds/kinds.js";

export const FORMAT = "outrider-run-1";
const VERDICTS = ["accepted", "refused", "unused", "recovered", "bonus", "plain"];
const SOURCES = ["draft", "lookup", "forced"];
const MOST_ROUNDS = 200000;

export class Run {
  constructor({ title, prompt, facts = [], request = {}, path = "" }) {
    Object.assign(this, { title, prompt, facts, request, path });
    this.rounds = [];
    this.text = "";
    this.thought = "";
    this.usage = null;
    this.metrics = null;
    this.result = null;
    this.race = null;
    this.listeners = new Set();
    this.isScheduled = false;
  }

  /** Tells whoever looks, once a frame. */
  changed() {
    if (this.isScheduled) return;
    this.isScheduled = true;
    requestAnimationFrame(() => {
      this.isScheduled = false;
      for (const listener of [...this.listeners]) listener();
    });
  }

  add(text, rounds) {
    this.text += text;
    for (const round of rounds) {
      // What went by before its first round is none of this run's time.
      this.rounds.push(this.rounds.length ? round : { ...round, gap_seconds: 0 });
    }
    this.changed();
  }

  end(result) {
    this.result = result;
    this.changed();
  }

  record() {
    const { title, prompt, facts, request, path, rounds, text, thought, usage, metrics, result, race } = this;
    return {
      format: FORMAT, title, prompt, facts, request, path, rounds, text, thought, usage, metrics, result, race,
    };
  }
}

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
export const text = (value) => (typeof value === "string" ? value : "");
export const number = (value) => (Number.isFinite(value) ? value : 0);
const chance = (value) => (Number.isFinite(value) ? value : null);

function node(given, place) {
  if (!isObject(given) || !VERDICTS.includes(given.verdict)) throw new Error("a token is broken");
  const parent = Number.isInteger(given.parent) ? given.parent : -1;
  if (parent < -1 || parent >= place) throw new Error("a token comes before its parent");
  const made = {
    token_id: number(given.token_id), token: text(given.token), parent, verdict: given.verdict,
    p: number(given.p), q: chance(given.q),
  };
  if (typeof given.text === "string") made.text = given.text;
  for (const name of ["p_soft", "chance", "draw"]) {
    if (Number.isFinite(given[name])) made[name] = given[name];
  }
  return made;
}

/** What the draft of a round was allowed, if the file says so. */
function budget(given) {
  const found = isObject(given?.choice) ? given.choice : {};
  if (!Object.hasOwn(REASONS, found.reason)) return undefined;
  const { reason, tokens, seconds, gain } = found;
  const reckons = [tokens, seconds, gain].every(Number.isFinite);
  const choice = reckons ? { reason, tokens, seconds, gain } : { reason };
  return { depth: number(given.depth), why: text(given.why), choice };
}

function round(given) {
  if (!isObject(given) || !Array.isArray(given.nodes)) throw new Error("a round has no tokens");
  const made = {};
  for (const [name, value] of Object.entries(given)) {
    if (Number.isFinite(value) || typeof value === "boolean") made[name] = value;
  }
  for (const name of ["num_drafted", "num_accepted", "draft_seconds", "verify_seconds",
    "accept_seconds", "num_prompt_tokens", "batch_size"]) made[name] = number(given[name]);
  made.drafter = text(given.drafter);
  made.source = SOURCES.includes(given.source) ? given.source : "draft";
  made.nodes = given.nodes.map(node);
  made.budget = budget(given.budget);
  return made;
}

/** The run of a saved file. Raises an Error whose message says what is wrong. */
export function readRun(written) {
  let given;
  try { given = JSON.parse(written); } catch { throw new Error("The file is no JSON."); }
  if (!isObject(given) || !Array.isArray(given.rounds)) throw new Error("The file is no saved run.");
  if (given.rounds.length > MOST_ROUNDS) throw new Error("The run has too many rounds.");
  const facts = (Array.isArray(given.facts) ? given.facts : [])
    .filter((pair) => Array.isArray(pair) && pair.length === 2)
    .map(([name, value]) => [String(name), String(value)]);
  const request = isObject(given.request) ? given.request : {};
  const made = new Run({
    title: text(given.title) || "A saved run", prompt: text(given.prompt), facts, request,
    path: text(given.path),
  });
  try {
    made.rounds = given.rounds.map(round);
  } catch (error) {
    throw new Error(`The file is no saved run: ${error.message}.`);
  }
  made.text = text(given.text);
  made.thought = text(given.thought);
  made.usage = isObject(given.usage) ? given.usage : null;
  made.metrics = isObject(given.metrics) ? given.metrics : null;
  const result = isObject(given.result) ? given.result : {};
  made.result = {
    finish_reason: text(result.finish_reason),
    tokens_per_second: number(result.tokens_per_second),
    notes: (Array.isArray(result.notes) ? result.notes : []).map(String),
    ...(typeof result.speed_ratio === "string" && { speed_ratio: result.speed_ratio }),
  };
  return made;
}

/** The number of the round that shows most: many drafts kept, and a refused one as well. */
export function tellingRound(rounds) {
  const worth = (one) => 2 * one.num_accepted + Number(one.num_drafted > one.num_accepted);
  return rounds.reduce((best, one, i) => (worth(one) > worth(rounds[best]) ? i : best), 0);
}

/** How often the i-th token of a draft was drafted and kept, and how many rounds kept j tokens. */
export function acceptance(rounds) {
  const drafted = [];
  const kept = [];
  const histogram = [];
  let numDrafted = 0;
  let numAccepted = 0;
  for (const one of rounds) {
    if (!one.num_drafted) continue;
    const depth = one.draft_depth || one.num_drafted;
    for (let i = 0; i < depth; i += 1) {
      drafted[i] = (drafted[i] ?? 0) + 1;
      kept[i] = (kept[i] ?? 0) + (one.num_accepted > i ? 1 : 0);
    }
    histogram[one.num_accepted] = (histogram[one.num_accepted] ?? 0) + 1;
    numDrafted += one.num_drafted;
    numAccepted += one.num_accepted;
  }
  const counts = Array.from(histogram, (count) => count ?? 0);
  return { drafted, kept, histogram: counts, numDrafted, numAccepted };
}

/** Rounds of which a controller expected something; that is of a whole pass, so of one alone in it. */
export const expecting = (rounds) => rounds.filter(({ budget, batch_size, num_prompt_tokens }) => (
  Number.isFinite(budget?.choice?.gain) && batch_size === 1 && !num_prompt_tokens));

/** Sums of what a controller expected of rounds, and of what came; `gain` is over plain decoding. */
export function expectedAndCame(rounds) {
  const expected = { tokens: 0, seconds: 0 };
  const came = { tokens: 0, seconds: 0 };
  let plain = 0;
  for (const one of rounds) {
    const { tokens, seconds, gain } = one.budget.choice;
    expected.tokens += tokens;
    expected.seconds += seconds;
    plain += gain * seconds;
    came.tokens += one.num_emitted ?? one.num_accepted + 1;
    came.seconds += one.draft_seconds + one.verify_seconds + one.accept_seconds
      + (one.gap_seconds ?? 0);
  }
  return { expected, came, gain: expected.seconds ? plain / expected.seconds : 0 };
}

/** Seconds of each stage, and of what lay between rounds. */
export function stageSeconds(rounds) {
  const sums = { draft: 0, verify: 0, accept: 0, between: 0 };
  for (const one of rounds) {
    sums.draft += one.draft_seconds;
    sums.verify += one.verify_seconds;
    sums.accept += one.accept_seconds;
    sums.between += one.gap_seconds ?? 0;
  }
  return sums;
}

/** What each draft length would have brought, were every drafted token accepted with the share that
    the first ones were here, at this run's seconds a drafted token and a pass. */
export function lengths(rounds, most = 8) {
  const writing = rounds.filter((one) => one.num_drafted && !one.num_prompt_tokens);
  if (!writing.length) return null;
  const { drafted, kept } = acceptance(writing);
  const tried = drafted.map((count, i) => (i ? kept[i - 1] : count));
  const share = kept.reduce((a, b) => a + b, 0) / Math.max(1, tried.reduce((a, b) => a + b, 0));
  const sums = stageSeconds(writing);
  const numDrafted = writing.reduce((sum, one) => sum + (one.draft_depth || one.num_drafted), 0);
  const cost = (sums.draft / Math.max(1, numDrafted)) / Math.max(1e-9, sums.verify / writing.length);
  const gains = Array.from({ length: most + 1 }, (_, k) => {
    const tokens = share < 1 ? (1 - share ** (k + 1)) / (1 - share) : k + 1;
    return tokens / (1 + k * cost);
  });
  return { share, cost, gains };
}
