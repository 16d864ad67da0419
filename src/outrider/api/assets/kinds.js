// @ts-check
"use strict";
/* What tokens of a round are called, and the words and elements that say it. `docs/rounds.md` has
   the shape of a round. All text is put in as text nodes, never as markup. */

/** Kinds of tokens: the letter in the legend, what it is called, and what that means. */
export const KINDS = {
  draft: ["d", "accepted draft", "guessed by the drafter, kept by the target"],
  lookup: ["n", "accepted look-up", "copied from earlier text, kept by the target"],
  forced: ["f", "forced", "the grammar left no choice"],
  recovered: ["r", "recovered", "the target's own, in place of a refused draft"],
  bonus: ["b", "bonus", "the target's own, after a draft kept whole"],
  plain: ["p", "plain", "the target's own, nothing was drafted"],
};
/** Why a draft may be so long (`choice` of a round's budget): in short, and in words. */
export const REASONS = {
  fixed: ["fixed", "the draft length is fixed"],
  trial: ["first trials", "this length is tried, to learn what it costs"],
  look: ["another look", "a look at whether another length became better"],
  gain: ["most gain", "the length expected to bring most tokens a second"],
  acceptance: ["acceptance", "so that the wanted share of drafts is accepted"],
  latency: ["latency", "so that tokens come within the wanted time"],
  rest: ["rest", "drafting rests"],
};
export const VERDICTS = {
  accepted: ["✓", "accepted"],
  refused: ["✗", "refused"],
  unused: ["·", "not looked at"],
  recovered: ["↳", "recovered"],
  bonus: ["↳", "bonus"],
  plain: ["↳", "plain"],
};
export const STAGES = ["draft", "verify", "accept"];
export const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a child that is no element becomes text. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

export function svgEl(name, attributes = {}, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, String(value));
  made.textContent = text;
  return made;
}

/** Blanks at the ends and line breaks as signs, for labels. */
export function visible(text) {
  return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣");
}

export function probability(value) {
  if (value === null || value === undefined) return "–";
  return value > 0 && value < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

export function milliseconds(seconds) {
  return `${(1000 * seconds).toFixed(2)} ms`;
}

export const isEmitted = (node) => node.verdict !== "refused" && node.verdict !== "unused";
export const isOwn = (node) => ["recovered", "bonus", "plain"].includes(node.verdict);
export const kindOf = (round, node) => (node.verdict === "accepted" ? round.source : node.verdict);
/** Greedy decoding gives its choice all of the mass, which says little: then p at temperature 1. */
export const shownP = (node) => node.p_soft ?? node.p;

/** What was refused where the target's own token stands, in the order of trying. */
export function refusedAll(round, node) {
  if (node.verdict !== "recovered") return [];
  return round.nodes.filter((other) => other.parent === node.parent && other.verdict === "refused");
}

export const refusedFor = (round, node) => refusedAll(round, node)[0];

/** One node in words, for the line below the strip and for screen readers. */
export function describe(round, number, node) {
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
