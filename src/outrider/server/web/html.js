// @ts-check
/* What every module of the pages draws with. Text of prompts, models and files is only ever a child
   of a template, which makes text nodes of it. */
import htm from "./vendor/htm.js";
import { h } from "./vendor/preact.js";

export { render } from "./vendor/preact.js";
export { useEffect, useRef, useState } from "./vendor/hooks.js";
export { batch, computed, effect, signal } from "./vendor/signals.js";
export const html = htm.bind(h);

/** Tabs by the arrow keys. `tabs` are [id, words, panel] and `chosen` a signal of an id. */
export function Tabs({ label, tabs, chosen }) {
  const at = Math.max(0, tabs.findIndex(([id]) => id === chosen.value));
  const move = (event) => {
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    const [id] = tabs[(to + tabs.length) % tabs.length];
    chosen.value = id;
    document.getElementById(`tab-${id}`)?.focus();
  };
  return html`
    <div class="tabs" role="tablist" aria-label=${label} onKeyDown=${move}>
      ${tabs.map(([id, words], i) => html`
        <button key=${id} type="button" role="tab" id=${`tab-${id}`} aria-selected=${i === at}
          aria-controls=${`panel-${id}`} tabindex=${i === at ? 0 : -1}
          onClick=${() => { chosen.value = id; }}>${words}</button>`)}
    </div>
    ${tabs.map(([id, , panel], i) => html`
      <div key=${id} role="tabpanel" id=${`panel-${id}`} aria-labelledby=${`tab-${id}`}
        tabindex="0" hidden=${i !== at}>${i === at || id === "tokens" ? panel() : null}</div>`)}`;
}

/** Whether a cell is a figure, which stands at the right. */
const isFigure = (cell) => typeof cell !== "string" || /^[–\d]/.test(cell);

/** A table; `rows` have a first cell that names the row. */
export function Table({ caption, heads, rows }) {
  const side = (cell) => (isFigure(cell) ? "n" : "");
  return html`
    <div class="wide" tabindex="0" role="region" aria-label=${caption}>
      <p class="caption" aria-hidden="true">${caption}</p>
      <table aria-label=${caption}>
        <thead><tr>${heads.map((text, i) => html`
          <th scope="col" class=${i && rows.length ? side(rows[0][i]) : ""}>${text}</th>`)}</tr></thead>
        <tbody>${rows.map(([first, ...cells]) => html`
          <tr><th scope="row">${first}</th>${cells.map((text) => html`<td class=${side(text)}>${text}</td>`)}
          </tr>`)}</tbody>
      </table>
    </div>`;
}

export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

const THEMES = { auto: "as the system", light: "light", dark: "dark" };
function remembered() {
  try { return localStorage.getItem("outrider.theme") ?? "auto"; } catch { return "auto"; }
}

const PAGES = [["conversation", "./#", "Conversation"], ["laboratory", "./#laboratory", "Laboratory"],
  ["dashboard", "./dashboard", "Dashboard"]];

/** The head that both pages share. */
export function Header({ here, model, children }) {
  const choose = (name) => {
    try { localStorage.setItem("outrider.theme", name); } catch { /* a private window */ }
  };
  const known = remembered();
  return html`
    <header class="top">
      <p class="brand"><span aria-hidden="true" class="mark">↠</span> Outrider</p>
      <nav aria-label="Pages">
        ${PAGES.map(([name, href, words]) => html`
          <a href=${href} aria-current=${here === name ? "page" : null}>${words}</a>`)}
      </nav>
      <p class="model">${model}</p>
      ${children}
      <fieldset class="theme"><legend>Page</legend>
        ${Object.entries(THEMES).map(([name, words]) => html`
          <label><input type="radio" name="theme" id=${`theme-${name}`}
            defaultChecked=${name === known} onChange=${() => choose(name)} /> ${words}</label>`)}
      </fieldset>
    </header>`;
}
