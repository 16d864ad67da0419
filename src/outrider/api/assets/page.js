// @ts-check
/* The last part of a page of its own, which has its runs in it. */
import { roundView } from "./rounds.js";

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
