// @ts-check
/* Shows a run round by round, as rounds come: the token strip, the draft tree of a round, its
   times, and a summary. `docs/rounds.md` has the shape of a run. The script asks for nothing, so a
   page needs no network. */
import { KINDS, describe, el, isEmitted, isOwn, kindOf, refusedFor, visible } from "./kinds.js";
import {
  allowed, coins, drawTree, instead, nodeTable, sentence, timeBar, total,
} from "./tree.js";

const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
// How often a strip that grows is scrolled to its end.
const SCROLL_MS = 200;
// A block of the strip ends with a line after so many tokens, or at a thousand of them.
const LINES = 40;
const MOST_OF_BLOCK = 1000;
let numViews = 0;

/** A view of one run within `root`. `run` has a `title`, a `prompt` and `facts`; rounds are added
    as they come, and `end` takes the run's `result`. With `follows`, the last round is shown while
    rounds come, until the reader chooses one. `told` hears of the round that is shown. */
export function roundView(root, run, { follows = false, told = (number) => {} } = {}) {
  const id = `run${++numViews}`;
  const rounds = [];
  const tokens = [];
  const sums = { drafted: 0, accepted: 0, longest: 0, seconds: 0, drafting: 0 };
  const histogram = [];
  let result;
  let isStale = false;
  let isFollowing = follows;
  let hasChosen = false;
  let scrolling;
  let block;
  const shown = { round: -1, token: -1 };

  const figures = el("dl", { class: "figures" });
  const bars = el("tbody");
  const strip = el("div", {
    class: "strip", role: "listbox", tabindex: "0", "aria-label": "Tokens of the text",
  });
  const detail = el("p", { class: "detail" }, "Point at a token, or move with the arrow keys.");
  const slider = /** @type {HTMLInputElement} */ (el("input", {
    type: "range", min: "1", max: "1", value: "1", "aria-label": "Round",
  }));
  const previous = el("button", { type: "button", "aria-label": "Previous round" }, "←");
  const next = el("button", { type: "button", "aria-label": "Next round" }, "→");
  const panel = el("div", { class: "round" });
  const notes = el("div");
  build();

  function build() {
    const prompt = el("details", { class: "prompt" },
      el("summary", {}, "Prompt"), el("pre", {}, run.prompt));
    if (run.prompt.length < 400) prompt.setAttribute("open", "");
    const legend = el("ul", { class: "legend" });
    for (const [kind, [letter, name, words]] of Object.entries(KINDS)) {
      legend.append(el("li", { title: words },
        el("span", { class: `token ${kind}` }, letter), ` ${name}`, el("small", {}, ` ${words}`)));
    }
    legend.append(el("li", {}, el("del", {}, "x"), " refused draft",
      el("small", {}, " guessed, and not what the target writes")));
    const facts = el("dl");
    for (const [name, value] of run.facts ?? []) {
      facts.append(el("dt", {}, name), el("dd", {}, value));
    }
    root.append(
      el("h2", { id }, run.title), prompt, figures, notes,
      el("h3", {}, "Text, token by token"), strip, detail, legend,
      el("h3", {}, "Round by round"),
      el("div", { class: "controls" }, previous, slider, next), panel,
      el("h3", {}, "Accepted drafts a round"),
      el("table", { class: "histogram" },
        el("thead", {}, el("tr", {},
          el("th", { scope: "col" }, "accepted"), el("th", { scope: "col" }, "rounds"))), bars),
    );
    if (run.facts?.length) {
      root.append(el("details", {}, el("summary", {}, "How it was run"), facts));
    }
    root.setAttribute("aria-labelledby", id);
    slider.addEventListener("input", () => choose(Number(slider.value) - 1));
    previous.addEventListener("click", () => choose(shown.round - 1));
    next.addEventListener("click", () => choose(shown.round + 1));
    for (const button of [previous, next]) {
      button.addEventListener("keydown", (event) => step(event, choose, shown.round));
    }
    strip.addEventListener("keydown", moveInStrip);
    strip.addEventListener("focus", () => shown.token < 0 && tokens.length && showToken(0));
    strip.addEventListener("click", (event) => found(event, showToken));
    strip.addEventListener("mouseover", (event) => found(event, tell));
    strip.addEventListener("mouseleave", () => shown.token >= 0 && tell(shown.token));
  }

  function step(event, show, from) {
    const by = STEPS[event.key];
    if (by === undefined) return;
    event.preventDefault();
    show(from + by);
  }

  /** The reader's own choice of a round. */
  function choose(number) {
    isFollowing = false;
    hasChosen = true;
    showRound(number);
  }

  function moveInStrip(event) {
    const round = tokens[shown.token]?.round ?? 0;
    const starts = { ArrowUp: round - 1, ArrowDown: round + 1 };
    const ends = { Home: 0, End: tokens.length - 1 };
    if (event.key in starts) {
      event.preventDefault();
      const first = tokens.findIndex((token) => token.round === starts[event.key]);
      if (first >= 0) showToken(first);
    } else if (event.key in ends) {
      event.preventDefault();
      showToken(ends[event.key]);
    } else {
      step(event, showToken, shown.token);
    }
  }

  function found(event, act) {
    const token = event.target.closest?.(".token");
    if (token) act(Number(token.dataset.index));
  }

  function tell(index) {
    const token = tokens[index];
    detail.textContent = describe(rounds[token.round], token.round, token.node);
  }

  function showToken(index) {
    const token = tokens[index];
    if (!token) return;
    isFollowing = false;
    hasChosen = true;
    tokens[shown.token]?.element.setAttribute("aria-selected", "false");
    shown.token = index;
    tell(index);
    token.element.setAttribute("aria-selected", "true");
    token.element.setAttribute("aria-label", detail.textContent ?? "");
    strip.setAttribute("aria-activedescendant", token.element.id);
    token.element.scrollIntoView?.({ block: "nearest" });
    if (token.round !== shown.round) showRound(token.round);
  }

  function mark(number, on) {
    for (let i = rounds[number]?.start ?? 0; tokens[i]?.round === number; i += 1) {
      tokens[i].element.classList.toggle("of-round", on);
    }
  }

  function showRound(number) {
    const round = rounds[number];
    if (!round) return;
    mark(shown.round, false);
    shown.round = number;
    mark(number, true);
    told(number);
    slider.value = String(number + 1);
    const words = sentence(round, number, rounds.length);
    slider.setAttribute("aria-valuetext", words);
    const place = (said) => (said ? [el("p", { class: "place" }, said)] : []);
    const picked = instead(round);
    const wide = (label, inner) => el("div", {
      class: "wide", tabindex: "0", role: "region", "aria-label": label,
    }, inner);
    panel.replaceChildren(
      el("p", {}, words),
      ...place(allowed(round)),
      wide("Draft tree", drawTree(round)),
      ...(picked ? [el("p", { class: "instead" }, picked)] : []),
      wide("Tokens of this round", nodeTable(round)),
      ...place(coins(round)),
      ...timeBar(round, sums.longest),
    );
  }

  function addToken(round, number, node) {
    const kind = kindOf(round, node);
    const element = el("span", {
      class: `token ${kind}`, role: "option", "aria-selected": "false", id: `${id}t${tokens.length}`,
    });
    element.dataset.index = String(tokens.length);
    const refused = refusedFor(round, node);
    if (refused) element.append(el("del", {}, visible(refused.token)));
    if (!node.text) element.append(el("small", {}, node.token));
    if (!node.text?.trim()) element.setAttribute("aria-label", visible(node.token));
    (node.text ?? "").split(/(\n)/).forEach((part) => {
      if (part === "\n") element.append(el("span", { class: "end", "aria-hidden": "true" }, "⏎"));
      element.append(part);
    });
    tokens.push({ node, round: number, element });
    return element;
  }

  /** Tokens are in blocks of whole lines, so that only the last block is laid out as it grows. */
  function place(element, node) {
    if (!block || (block.count >= LINES && block.isWhole) || block.count >= MOST_OF_BLOCK) {
      block = { element: el("div"), count: 0, isWhole: false };
      strip.append(block.element);
    }
    block.element.append(element);
    block.count += 1;
    block.isWhole = (node.text ?? "").endsWith("\n");
  }

  function figure(name, value) {
    figures.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  }

  /** To the end of the text; not each time, for it makes the browser lay all of it out. */
  function scroll() {
    scrolling = undefined;
    if (isFollowing) strip.scrollTop = strip.scrollHeight;
  }

  /** The summary once for all rounds that come together. */
  function refresh() {
    if (isStale) return;
    isStale = true;
    queueMicrotask(() => {
      isStale = false;
      summarise();
    });
  }

  function summarise() {
    const count = rounds.length;
    if (isFollowing && !result) {
      showRound(count - 1);
      scrolling ||= setTimeout(scroll, SCROLL_MS);
    }
    const share = (part, whole) => `${Math.round((100 * part) / whole)} %`;
    figures.replaceChildren();
    figure("tokens", String(tokens.length));
    figure("rounds", String(count));
    if (sums.drafted) {
      const all = share(sums.accepted, sums.drafted);
      figure("drafts accepted", `${sums.accepted} of ${sums.drafted} (${all})`);
      figure("mean accepted length", (sums.accepted / count).toFixed(2));
    }
    if (count) figure("tokens a round", (tokens.length / count).toFixed(2));
    if (sums.drafting) figure("drafting", `${share(sums.drafting, sums.seconds)} of the time`);
    const speed = result?.tokens_per_second;
    if (speed) figure("tokens a second, watched", speed.toFixed(1));
    if (result?.finish_reason) figure("ended by", result.finish_reason);
    const counts = Array.from(histogram, (number) => number ?? 0);
    const most = Math.max(...counts, 1);
    bars.replaceChildren(...counts.map((number, accepted) => {
      const bar = el("span", { class: "bar", "aria-hidden": "true" });
      bar.style.width = `${(70 * number) / most}%`;
      return el("tr", {},
        el("th", { scope: "row" }, String(accepted)), el("td", {}, bar, ` ${number}`));
    }));
  }

  return {
    /** One more round. */
    add(round) {
      const number = rounds.length;
      const start = tokens.length;
      rounds.push({ ...round, start });
      for (const node of round.nodes.filter(isEmitted)) place(addToken(round, number, node), node);
      sums.drafted += round.num_drafted;
      sums.accepted += round.num_accepted;
      sums.seconds += total(round);
      sums.drafting += round.draft_seconds;
      sums.longest = Math.max(sums.longest, total(round));
      histogram[round.num_accepted] = (histogram[round.num_accepted] ?? 0) + 1;
      slider.max = String(rounds.length);
      if (shown.round < 0) showRound(0);
      refresh();
    },
    /** Shows a round, as the reader's own choice. */
    choose,
    /** No more rounds come. Shows round `best`, unless the reader chose one. */
    end(given, best = shown.round) {
      result = given;
      const words = (given.notes ?? []).map((text) => el("p", { class: "warnings" }, text));
      const ratio = given.speed_ratio;
      if (ratio) words.unshift(el("p", {}, `Measured against plain decoding: ${ratio}`));
      notes.replaceChildren(...words);
      isFollowing = false;
      if (shown.round >= 0) showRound(hasChosen ? shown.round : best);
      refresh();
    },
  };
}
