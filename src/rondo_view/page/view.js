// The page: which view an address names, and looking again while a run goes on.
//
//   #/            runs, their curves and settings         ?run=…&run=…&metric=…
//   #/rollouts    a run's trajectories, filtered          ?run=…&step=…&least=…&text=…
//   #/trajectory  one of them, token by token             ?run=…&step=…&id=…&by=…
//   #/group       the answers to one prompt in a step     ?run=…&step=…&prompt=…
//   #/evaluations two evaluations beside each other       ?run=…&step=…&other_run=…&other_step=…
//   #/timeline    what each device did in a step          ?run=…&step=…

import {address, ask, h} from "./parts.js";
import {overview} from "./overview.js";
import {rollouts} from "./rollouts.js";
import {group, trajectory} from "./trajectory.js";
import {evaluations, timeline} from "./steps.js";

const VIEWS = {"": overview, rollouts, trajectory, group, evaluations, timeline};
const TABS = [["", "Runs"], ["rollouts", "Rollouts"], ["evaluations", "Evaluations"], ["timeline", "Timeline"]];
const EVERY = 3000; // milliseconds
const main = document.querySelector("main");
const live = document.querySelector("#live");
let runs = [];
let shown = 0; // counts what was asked for: an answer that comes late is not shown
let again = null; // how the view that is shown looks again

// Goes to another address; what only changes a view leaves one entry in the browser's history.
export function go(view, query, {replace = false} = {}) {
  const to = address(view, query);
  if (to === location.hash) return;
  if (!replace) location.hash = to;
  else {
    history.replaceState(null, "", to);
    show(false);
  }
}

async function show(moved = true) {
  const turn = ++shown;
  const [view, text = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const query = new URLSearchParams(text);
  try {
    if (!runs.length) runs = await ask("runs", "");
    const run = query.get("run") ?? runs[0]?.run;
    const tabs = TABS.map(([name, title]) => h("a", {href: address(name, name ? {run} : {run: query.getAll("run")}),
      "aria-current": (view === name || (name === "rollouts" && ["trajectory", "group"].includes(view))) && "page"}, title));
    document.querySelector("nav").replaceChildren(...tabs);
    if (!(view in VIEWS)) throw new Error(`${view}: there is no view of that name`);
    const made = await VIEWS[view](query, runs);
    if (turn !== shown) return;
    main.replaceChildren(...h("div", {}, made.nodes).childNodes);
    again = made.again ?? null;
    document.title = `${made.title} · rondo`;
    made.drawn?.();
  } catch (error) {
    if (turn !== shown) return;
    again = null;
    main.replaceChildren(h("p", {class: "wrong", role: "alert"}, String(error.message ?? error)));
  }
  if (moved) {
    scrollTo(0, 0);
    main.focus({preventScroll: true});
  }
}

async function lookAgain() {
  try {
    runs = await ask("runs", "");
    live.textContent = runs.some(run => run.state === "running") ? "● live" : "";
    if (!document.hidden) await again?.(runs);
  } catch (error) {
    live.textContent = error instanceof TypeError ? "the server has ended" : String(error.message);
  }
  setTimeout(lookAgain, EVERY);
}

// j and k: the next and the one before; /: the search for text.
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input, select, textarea")) return;
  const found = {j: "[data-key=j]", k: "[data-key=k]", "/": "input[type=search]"}[event.key];
  const node = found && main.querySelector(found);
  if (!node) return;
  event.preventDefault();
  if (event.key === "/") node.focus();
  else node.click();
});
addEventListener("hashchange", () => show());
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => show(false));
await show();
setTimeout(lookAgain, EVERY);
