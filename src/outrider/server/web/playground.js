// @ts-check
/* The playground: a conversation with the model, and the laboratory, which has a prompt on one side and
   on the other what speculation did to it. */
import { Conversation, escape } from "./conversation.js";
import { Header, Tabs, html, render, useEffect, useRef, useState } from "./html.js";
import { AskForm, Problem, ReplayForm, open } from "./form.js";
import { KeyForm } from "./key.js";
import { AcceptancePanel, ControllerPanel, ForcedPanel, LanesPanel } from "./panels.js";
import { PromisePanel } from "./promise.js";
import { RacePanel } from "./race.js";
import { roundView } from "./rounds/rounds.js";
import { FORMAT as CONVERSATION, readConversation } from "./saved.js";
import { SharePanel } from "./share.js";
import { FORMAT, tellingRound } from "./run.js";
import {
  card, isBusy, isLab, isReplay, look, meet, remember, run, shownRound, tab,
} from "./state.js";
import { attach, load, openFile } from "./talk.js";

// Of a frame: what is left is the browser's, to lay out and to paint.
const FRAME_MS = 5;

/** The rounds of a run, shown as they come, a frame's worth at a time. */
function TokensPanel({ run: made }) {
  const place = useRef(null);
  const [hasRounds, setHasRounds] = useState(made.rounds.length > 0);
  useEffect(() => {
    const root = document.createElement("section");
    place.current.replaceChildren(root);
    const view = roundView(root, made, {
      follows: !made.result, told: (number) => { shownRound.value = number; },
    });
    let seen = 0;
    let hasEnded = false;
    let waiting = 0;
    const show = () => {
      waiting = 0;
      const until = performance.now() + FRAME_MS;
      while (seen < made.rounds.length && performance.now() < until) view.add(made.rounds[seen++]);
      if (seen) setHasRounds(true);
      if (seen < made.rounds.length) waiting = requestAnimationFrame(show);
      else if (made.result && !hasEnded) {
        hasEnded = true;
        view.end(made.result, tellingRound(made.rounds));
      }
    };
    made.listeners.add(show);
    show();
    return () => {
      made.listeners.delete(show);
      cancelAnimationFrame(waiting);
    };
  }, [made]);
  const untold = !hasRounds && made.result && made.text;
  return html`
    ${untold ? html`<p class="place">The server sent no rounds of this text.</p>
      <pre class="text" tabindex="0">${made.text}</pre>` : null}
    <div class="rounds" ref=${place} hidden=${untold}></div>`;
}

/** Draws `panel` of the run anew some times a second while it grows. */
function Live({ run: made, panel }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    let timer = 0;
    const later = () => {
      timer ||= setTimeout(() => {
        timer = 0;
        redraw((count) => count + 1);
      }, 250);
    };
    made.listeners.add(later);
    return () => {
      made.listeners.delete(later);
      clearTimeout(timer);
    };
  }, [made]);
  return html`<${panel} run=${made} />`;
}

const Empty = () => html`
  <div class="empty welcome">
    <p>A large model, the <em>target</em>, writes one token a pass. With speculation a
      quick <em>drafter</em> guesses the next few; the target checks all of them in one pass, keeps
      those that it agrees with, and adds one of its own. So a pass brings several tokens, and the
      text is the target's own.</p>
    <p>Write something, or choose the line below an answer of the conversation: every token is then
      coloured by where it came from, and each round shows what was guessed, with which probabilities,
      and what was refused. <em>Race on against off</em> times the same request with and without
      drafts, and compares the texts.</p>
    <p>Ctrl-Enter begins. Arrow keys move through tokens, rounds and tabs.</p>
  </div>`;

function tabs() {
  const made = run.value;
  const of = (panel) => () => (made
    ? html`<${Live} key=${made.title + made.prompt} run=${made} panel=${panel} />`
    : html`<${Empty} />`);
  return [
    ["tokens", "Tokens and drafts", () => (made
      ? html`<${TokensPanel} run=${made} />` : html`<${Empty} />`)],
    ["race", "Race", () => html`<${RacePanel} />`],
    ["controller", "Draft length", of(ControllerPanel)],
    ["acceptance", "Acceptance", of(AcceptancePanel)],
    ["lanes", "Lanes", of(LanesPanel)],
    ["promise", "Promise", () => html`<${PromisePanel} />`],
    ["forced", "Forced", of(ForcedPanel)],
    ["share", "Share", () => html`<${SharePanel} run=${made} />`],
  ];
}

/** The beginning of a file of `/save`. */
const TERMINAL = /^\{\n "model": "[^\n]*\n "messages": \[/;

/** A saved run or conversation is opened; any other text goes with the next message. */
async function dropped(event) {
  event.preventDefault();
  const found = [...event.dataTransfer?.files ?? []];
  if (!found.length) return;
  const start = await found[0].slice(0, 200).text();
  if (isLab.value || start.includes(`"format":"${FORMAT}"`)) open(found[0]);
  else if (start.includes(CONVERSATION) || TERMINAL.test(start)) openFile(found[0], readConversation);
  else attach(found);
}

function Laboratory() {
  // Where the form is above the answer, the answer is what was asked for.
  useEffect(() => {
    if (run.value && innerWidth < 960) document.querySelector(".main").scrollIntoView();
    else scrollTo(0, 0);
  }, []);
  return html`
    <div class="side">
      <${Problem} />
      ${isReplay.value ? null : html`<${AskForm} />`}
      <${ReplayForm} />
    </div>
    <div class="main" aria-busy=${isBusy.value}>
      <${Tabs} label="What to look at" tabs=${tabs()} chosen=${tab} />
    </div>`;
}

function App() {
  useEffect(() => {
    const forgetting = remember();
    const over = (event) => event.preventDefault();
    const pressed = (event) => { if (event.key === "Escape" && !isLab.value) escape(); };
    const heard = { dragover: over, drop: dropped, hashchange: look, keydown: pressed };
    for (const [name, act] of Object.entries(heard)) addEventListener(name, act);
    if (!isReplay.value) {
      meet();
      load();
    }
    return () => {
      forgetting();
      for (const [name, act] of Object.entries(heard)) removeEventListener(name, act);
    };
  }, []);
  const here = isLab.value ? "laboratory" : "conversation";
  const kind = isReplay.value ? "replay" : isLab.value ? "" : "talk";
  return html`
    <${Header} here=${here} model=${isReplay.value ? "a saved run" : card.value?.id ?? ""} />
    <main id="main" class=${kind}>
      <h1 class="hidden">${isLab.value ? "Laboratory" : "Conversation"}</h1>
      <${KeyForm} used=${meet} />
      ${isLab.value ? html`<${Laboratory} />` : html`<${Conversation} />`}
    </main>`;
}

render(html`<${App} />`, document.getElementById("app"));
