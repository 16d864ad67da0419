// @ts-check
/* One round: its draft tree, the same as a table, and its times. */
import {
  REASONS, STAGES, VERDICTS, el, isEmitted, isOwn, kindOf, milliseconds, probability, refusedAll, shownP,
  svgEl, visible,
} from "./kinds.js";

const ROW = 46;

/** Depth of each node, and the row that it is drawn in: children below each other. */
export function placed(nodes) {
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

export const labelOf = (node) => {
  const text = visible(node.token);
  return text.length > 14 ? `${text.slice(0, 13)}…` : text;
};

/** The draft tree from left to right; the accepted path is bold. */
export function drawTree(round) {
  const { places, numRows } = placed(round.nodes);
  const widths = [];
  round.nodes.forEach((node, i) => {
    const depth = places[i].depth;
    const least = node.q === null ? 72 : 132;
    widths[depth] = Math.max(widths[depth] ?? least, least, 9 * labelOf(node).length + 38);
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
    const q = node.q === null ? "" : `  q ${probability(node.q)}`;
    write("small", 8, 13, `p ${probability(shownP(node))}${q}`);
  });
  drawing.append(svgEl("circle", { class: "root", cx: 5, cy: ROW / 2, r: 4 }), lines, boxes);
  return drawing;
}

/** The chance that a first child is accepted with, token by token. */
export function chance(node) {
  if (node.q === null || node.q === undefined) return undefined;
  return node.q > 0 ? Math.min(1, node.p / node.q) : 0;
}

/** What the rule's coin fell heads with. Runs of older versions do not say. */
const chanceOf = (round, node) => (
  round.nodes.some((one) => typeof one.chance === "number") ? node.chance : chance(node));

/** How the numbers of a round decided. */
export function coins(round) {
  const drafted = round.nodes.filter((node) => !isOwn(node));
  if (!drafted.length) return "";
  if (round.nodes.some((node) => typeof node.p_soft === "number")) {
    return "At temperature 0 nothing is drawn: a draft is kept where it is the target's likeliest "
      + "token. The p shown is that of temperature 1.";
  }
  if (drafted.some((node) => typeof node.draw === "number")) {
    const whole = drafted.some((node) => node.verdict === "accepted" && node.chance === undefined);
    return "u is a number drawn evenly from 0 to 1: a draft is kept where u is below its chance, and "
      + "a chance of 0 or 1 needs no u. "
      + (whole ? "One coin may decide on a whole beginning of the draft (block rule): it stands at "
        + "the last token of it." : "");
  }
  if (drafted.some((node) => typeof node.chance === "number")) return "Each chance was 0 or 1, so no number u was drawn.";
  return "This rule tosses no coin, so there is no u: the target draws its own token by the seed, and "
    + "a draft is kept where it is the same token.";
}

/** What the draft of a round was allowed, and why. */
export function allowed({ budget }) {
  const choice = budget?.choice;
  if (!choice) return "";
  const many = budget.depth === 1 ? "1 token" : `${budget.depth} tokens`;
  const length = budget.depth ? `Up to ${many} could be drafted` : "No draft was allowed";
  let words = `${length}: ${REASONS[choice.reason][1]}${budget.why ? `, since ${budget.why}` : ""}.`;
  if (typeof choice.gain === "number") {
    words += ` The controller expected ${choice.tokens.toFixed(1)} tokens in `
      + `${milliseconds(choice.seconds)}, ${choice.gain.toFixed(2)} times plain decoding.`;
  }
  return words;
}

/** The same as a table, a row a node; what hangs below a node is indented. */
export function nodeTable(round) {
  const { places, order } = placed(round.nodes);
  const isDrawn = round.nodes.some((node) => node.q !== null);
  const hasChances = isDrawn || round.nodes.some((node) => typeof node.chance === "number");
  const hasCoins = round.nodes.some((node) => typeof node.draw === "number");
  const heads = ["token", "verdict", "p (target)"];
  if (isDrawn) heads.push("q (draft)");
  if (hasChances) heads.push("chance");
  if (hasCoins) heads.push("u");
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
    const [sign, verdict] = VERDICTS[node.verdict];
    // Its coin was tossed, but a token before it was refused or the text had ended.
    const words = node.verdict === "unused" && typeof node.chance === "number" ? "not kept" : verdict;
    const cells = [probability(shownP(node))];
    if (isDrawn) cells.push(probability(node.q));
    if (hasChances) cells.push(probability(chanceOf(round, node)));
    if (hasCoins) cells.push(probability(node.draw));
    body.append(el("tr", { class: node.verdict }, name,
      el("td", {}, el("span", { "aria-hidden": "true" }, `${sign} `), words),
      ...cells.map((text) => el("td", { class: "n" }, text))));
  }
  return el("table", { class: "nodes" }, el("thead", {}, head), body);
}

/** What was picked where drafted tokens were refused; nothing where none was. */
export function instead(round) {
  const own = round.nodes.find((node) => node.verdict === "recovered");
  const refused = own ? refusedAll(round, own) : [];
  if (!refused.length) return "";
  const told = refused.map((node) => {
    const q = node.q === null ? "" : `, q ${probability(node.q)}`;
    return `“${visible(node.token)}” (p ${probability(shownP(node))}${q})`;
  });
  const picked = `“${visible(own.token)}” (p ${probability(shownP(own))})`;
  const of = own.p === 1 ? "the target's likeliest token" : "of what the draft left of p";
  return `Refused: ${told.join(", ")}. Picked instead: ${picked}, ${of}.`;
}

export function seconds(round) {
  return STAGES.map((stage) => round[`${stage}_seconds`]);
}
export const total = (round) => seconds(round).reduce((sum, value) => sum + value, 0);

/** Draft, verify and accept of a round, as long as the longest round allows. */
export function timeBar(round, longest) {
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

export function sentence(round, number, count) {
  const numRead = round.num_prompt_tokens;
  const read = numRead ? ` The pass also read ${numRead} tokens of the prompt.` : "";
  const where = `Round ${number + 1} of ${count}: `;
  if (!round.num_drafted) return `${where}nothing was drafted.${read}`;
  const counts = `${round.drafter} drafted ${round.num_drafted}, ${round.num_accepted} accepted.`;
  const end = " The text ended at a drafted token, which counts as the target's own.";
  return `${where}${counts}${read}${round.nodes.some(isOwn) ? "" : end}`;
}
