// @ts-check
"use strict";
/* Shows a run round by round, as rounds come: the token strip, the draft tree of a round, its
   times, and a summary. `docs/rounds.md` has the shape of a run and of a round. All text is put in
   as text nodes, never as markup. The script asks for nothing, so a page needs no network. */

/** Kinds of tokens: the letter in the legend, and what it means. */
const KINDS = {
  draft: ["d", "accepted draft"],
  lookup: ["n", "accepted look-up (n-gram, suffix, prediction)"],
  forced: ["f", "forced by the grammar"],
  recovered: ["r", "recovered after a refusal"],
  bonus: ["b", "bonus after a whole draft"],
  plain: ["p", "plain, nothing was drafted"],
};
const VERDICTS = {
  accepted: ["✓", "accepted"],
  refused: ["✗", "refused"],
  unused: ["·", "not looked at"],
  recovered: ["↳", "recovered"],
  bonus: ["↳", "bonus"],
  plain: ["↳", "plain"],
};
const STAGES = ["draft", "verify", "accept"];
const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
const ROW = 46;
const SVG = "http://www.w3.org/2000/svg";
let numViews = 0;

/** An element with attributes and children; a child that is no element becomes text. */
function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function svgEl(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}

/** Blanks at the ends and line breaks as signs, for labels. */
function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}

function probability(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

function milliseconds(seconds) {
  return `${(1000 * seconds).toFixed(2)} ms`;
}

const isEmitted = (node) => node.verdict !== "refused" && node.verdict !== "unused";
const isOwn = (node) => ["recovered", "bonus", "plain"].includes(node.verdict);
const kindOf = (round, node) => (node.verdict === "accepted" ? round.source : node.verdict);
/** Greedy decoding gives its choice all of the mass, which says little: then p at temperature 1. */
const shownP = (node) => node.p_soft ?? node.p;

/** What was refused where the target's own token stands: the first one that was tried. */
function refusedFor(round, node) {
  if (node.verdict !== "recovered") return undefined;
  return round.nodes.find((other) => other.parent === node.parent && other.verdict === "refused");
}

/** One node in words, for the line below the strip and for screen readers. */
function describe(round, number, node) {
  const words = [
    `“${visible(node.text || node.token)}”`,
    KINDS[kindOf(round, node)][1],
    `round ${number + 1}`,
    `p ${probability(shownP(node))}`,
  ];
  if (node.q !== null) words.push(`q ${probability(node.q)}`);
  const refused = refusedFor(round, node);
  if (refused) {
    const q = refused.q === null ? "" : `, q ${probability(refused.q)}`;
    words.push(`instead of “${visible(refused.token)}” (p ${probability(shownP(refused))}${q})`);
  }
  return words.join(" · ");
}

/** Depth of each node, and the row that it is drawn in: children below each other. */
function placed(nodes) {
  const children = new Map();
  nodes.forEach((node, i) => {
    if (!children.has(node.parent)) children.set(node.parent, []);
    children.get(node.parent).push(i);
  });
  const places = nodes.map(() => ({ depth: 0, row: 0 }));
  const order = [];
  const waiting = [...(children.get(-1) ?? [])].reverse();
  let row = -1;
  while (waiting.length) {
    const i = waiting.pop();
    const parent = nodes[i].parent;
    const isFirst = children.get(parent)[0] === i;
    places[i].depth = parent < 0 ? 0 : places[parent].depth + 1;
    if (!isFirst || row < 0) row += 1;
    places[i].row = row;
    order.push(i);
    waiting.push(...[...(children.get(i) ?? [])].reverse());
  }
  return { places, order, numRows: row + 1 };
}

const labelOf = (node) => {
  const text = visible(node.token);
  return text.length > 14 ? `${text.slice(0, 13)}…` : text;
};

/** The draft tree from left to right; the accepted path is bold. */
function drawTree(round) {
  const { places, numRows } = placed(round.nodes);
  const widths = [];
  round.nodes.forEach((node, i) => {
    const depth = places[i].depth;
    widths[depth] = Math.max(widths[depth] ?? 72, 9 * labelOf(node).length + 38);
  });
  const starts = [22];
  widths.forEach((width, depth) => starts.push(starts[depth] + width + 22));
  const box = { width: starts[starts.length - 1], height: numRows * ROW + 4 };
  const title = "The draft tree; the table below says the same.";
  const drawing = svgEl("svg", { ...box, role: "img", "aria-label": title });
  const lines = svgEl("g");
  const boxes = svgEl("g");
  round.nodes.forEach((node, i) => {
    const { depth, row } = places[i];
    const from = { x: 4, y: ROW / 2 };
    if (node.parent >= 0) {
      from.x = starts[depth - 1] + widths[depth - 1];
      from.y += places[node.parent].row * ROW;
    }
    const [x, y] = [starts[depth], row * ROW + ROW / 2];
    const middle = (from.x + x) / 2;
    lines.append(svgEl("path", {
      class: `edge ${node.verdict}`,
      d: `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${y} ${x} ${y}`,
    }));
    const kind = isEmitted(node) ? kindOf(round, node) : node.verdict;
    boxes.append(svgEl("rect", {
      class: `node ${node.verdict} ${kind}`, x, y: y - 19, width: widths[depth], height: 38, rx: 5,
    }));
    const write = (kind, dx, dy, text) => {
      boxes.append(svgEl("text", { class: `${kind} ${node.verdict}`, x: x + dx, y: y + dy }, text));
    };
    write("sign", 8, -3, VERDICTS[node.verdict][0]);
    write("label", 26, -3, labelOf(node));
    write("small", 8, 13, `p ${probability(shownP(node))}`);
  });
  drawing.append(svgEl("circle", { class: "root", cx: 5, cy: ROW / 2, r: 4 }), lines, boxes);
  return drawing;
}

/** The same as a table, a row a node; what hangs below a node is indented. */
function nodeTable(round) {
  const { places, order } = placed(round.nodes);
  const isDrawn = round.nodes.some((node) => node.q !== null);
  const heads = ["token", "verdict", "p (target)", ...(isDrawn ? ["q (draft)", "p / q"] : [])];
  const head = el("tr");
  heads.forEach((text, i) => {
    head.append(el("th", { scope: "col", class: i > 1 ? "n" : "" }, text));
  });
  const body = el("tbody");
  for (const i of order) {
    const node = round.nodes[i];
    const name = el("th", { scope: "row" });
    name.style.paddingLeft = `${0.4 + 0.5 * Math.min(places[i].depth, 12)}rem`;
    name.append(el(node.verdict === "refused" ? "del" : "span", {}, visible(node.token)));
    const [sign, words] = VERDICTS[node.verdict];
    const ratio = node.q ? (node.p / node.q).toFixed(2) : "–";
    const cells = [probability(shownP(node)), ...(isDrawn ? [probability(node.q), ratio] : [])];
    body.append(el("tr", { class: node.verdict }, name,
      el("td", {}, el("span", { "aria-hidden": "true" }, `${sign} `), words),
      ...cells.map((text) => el("td", { class: "n" }, text))));
  }
  return el("table", { class: "nodes" }, el("thead", {}, head), body);
}

function seconds(round) {
  return STAGES.map((stage) => round[`${stage}_seconds`]);
}
const total = (round) => seconds(round).reduce((sum, value) => sum + value, 0);

/** Draft, verify and accept of a round, as long as the longest round allows. */
function timeBar(round, longest) {
  const whole = total(round);
  const bar = el("div", { class: "times", "aria-hidden": "true" });
  bar.style.width = `${longest ? (100 * whole) / longest : 0}%`;
  const words = el("p", { class: "stages" });
  seconds(round).forEach((value, i) => {
    const part = el("span", { class: STAGES[i] });
    part.style.width = `${whole ? (100 * value) / whole : 0}%`;
    bar.append(part);
    words.append(el("span", { class: "stage" },
      el("span", { class: `swatch ${STAGES[i]}`, "aria-hidden": "true" }),
      ` ${STAGES[i]} ${milliseconds(value)}`), " ");
  });
  words.append(el("span", { class: "stage" }, `together ${milliseconds(whole)}`));
  if (round.batch_size > 1) words.append(`, a pass of ${round.batch_size} sequences`);
  return [el("div", { class: "track" }, bar), words];
}

function sentence(round, number, count) {
  const numRead = round.num_prompt_tokens;
  const read = numRead ? ` The pass also read ${numRead} tokens of the prompt.` : "";
  const where = `Round ${number + 1} of ${count}: `;
  if (!round.num_drafted) return `${where}nothing was drafted.${read}`;
  const counts = `${round.drafter} drafted ${round.num_drafted}, ${round.num_accepted} accepted.`;
  const end = " The text ended at a drafted token, which counts as the target's own.";
  return `${where}${counts}${read}${round.nodes.some(isOwn) ? "" : end}`;
}

/** A view of one run within `root`. `run` has a `title`, a `prompt` and `facts`; rounds are added
    as they come, and `end` takes the run's `result`. */
function roundView(root, run) {
  const id = `run${++numViews}`;
  const rounds = [];
  const tokens = [];
  const sums = { drafted: 0, accepted: 0, longest: 0, seconds: 0, drafting: 0 };
  const histogram = [];
  let result;
  let isStale = false;
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
    for (const [kind, [letter, words]] of Object.entries(KINDS)) {
      legend.append(el("li", {}, el("span", { class: `token ${kind}` }, letter), ` ${words}`));
    }
    legend.append(el("li", {}, el("del", {}, "x"), " refused draft"));
    const facts = el("dl");
    for (const [name, value] of run.facts ?? []) {
      facts.append(el("dt", {}, name), el("dd", {}, value));
    }
    root.append(
      el("h2", { id }, run.title), prompt, figures, notes,
      el("h3", {}, "Text, token by token"), legend, strip, detail,
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
    slider.addEventListener("input", () => showRound(Number(slider.value) - 1));
    previous.addEventListener("click", () => showRound(shown.round - 1));
    next.addEventListener("click", () => showRound(shown.round + 1));
    for (const button of [previous, next]) {
      button.addEventListener("keydown", (event) => step(event, showRound, shown.round));
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
    slider.value = String(number + 1);
    const words = sentence(round, number, rounds.length);
    slider.setAttribute("aria-valuetext", words);
    const greedy = round.nodes.some((node) => typeof node.p_soft === "number");
    const note = "At temperature 0 the likeliest token is taken; p is that of temperature 1.";
    const scrolling = (label, inner) => el("div", {
      class: "wide", tabindex: "0", role: "region", "aria-label": label,
    }, inner);
    panel.replaceChildren(
      el("p", {}, words),
      scrolling("Draft tree", drawTree(round)),
      scrolling("Tokens of this round", nodeTable(round)),
      ...(greedy ? [el("p", { class: "place" }, note)] : []),
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

  function figure(name, value) {
    figures.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
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
      strip.append(...round.nodes.filter(isEmitted).map((node) => addToken(round, number, node)));
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
    /** No more rounds come. */
    end(given) {
      result = given;
      const words = (given.notes ?? []).map((text) => el("p", { class: "warnings" }, text));
      const ratio = given.speed_ratio;
      if (ratio) words.unshift(el("p", {}, `Measured against plain decoding: ${ratio}`));
      notes.replaceChildren(...words);
      if (shown.round >= 0) showRound(shown.round);
      refresh();
    },
  };
}

/** Shows the runs that a page of its own has in it. */
function showRuns(runs) {
  const main = document.querySelector("main");
  for (const run of runs) {
    const section = el("section");
    main.append(section);
    const view = roundView(section, run);
    run.rounds.forEach(view.add);
    view.end(run.result);
  }
}

const written = document.getElementById("runs");
if (written) showRuns(JSON.parse(written.textContent ?? "[]"));
