// A run's trajectories: filters, how they are spread, a list, and files of what was chosen.

import {address, ask, bars, choice, h, number, pager, table} from "./parts.js";
import {go} from "./view.js";

const TYPED = ["text", "step", "least", "most", "shortest", "longest", "staleness", "from", "to", "prompt"];
const PICKED = ["source", "outcome", "finish", "tool"];
const ORDERS = ["newest", "oldest", "best", "worst", "longest", "shortest"];
const TITLES = {text: "text", step: "step", least: "reward ≥", most: "reward ≤", shortest: "tokens ≥", longest: "tokens ≤",
  staleness: "staleness ≥"};

export async function rollouts(query, runs) {
  const run = query.get("run") ?? runs[0]?.run;
  const now = Object.fromEntries([...TYPED, ...PICKED, "order", "first"].map(name => [name, query.get(name) ?? ""]));
  const results = h("div", {});
  let asked = 0;
  const to = changes => {
    Object.assign(now, {first: ""}, changes);
    history.replaceState(null, "", address("rollouts", {run, ...now}));
    return look();
  };

  async function look() {
    const turn = ++asked;
    try {
      const found = await ask("rollouts", new URLSearchParams([["run", run], ...Object.entries(now).filter(([, value]) => value !== "")]));
      if (turn === asked) draw(found);
    } catch (error) {
      if (turn === asked) results.replaceChildren(h("p", {class: "wrong", role: "alert"}, error.message));
    }
  }

  let lists = ""; // what can be chosen, as far as the steps have been read
  const picks = h("span", {});
  let read = -1, steps = -1;
  function draw(found) {
    ({read, steps} = found.state);
    const known = JSON.stringify(PICKED.map(name => found.state[name]));
    if (known !== lists) {
      lists = known;
      picks.replaceChildren(...PICKED.filter(name => found.state[name].length > 1 || now[name])
        .map(name => choice(name, found.state[name], now[name], value => to({[name]: value}), "any")));
    }
    const file = format => `export?${new URLSearchParams([["run", run], ["format", format], ...Object.entries(now).filter(([, value]) => value !== "")])}`;
    results.replaceChildren(
      h("div", {class: "bar", role: "status"}, h("b", {}, `${found.total} trajectories`),
        steps === 0 && h("span", {class: "dim"}, "this run has kept no rollouts (tracking.save_rollouts)"),
        read < steps && h("span", {class: "dim"}, `${read} of ${steps} steps have been read`),
        found.total > 0 && h("a", {href: file("jsonl"), download: ""}, "JSON lines"),
        found.total > 0 && h("a", {href: file("parquet"), download: ""}, "Parquet")),
      ...found.state.wrong.map(text => h("p", {class: "wrong"}, text)),
      h("div", {class: "charts row"}, [["reward", "reward"], ["tokens", "tokens"], ["staleness, versions", "staleness"]]
        .filter(([, name]) => found.spread[name].counts.length > 0).map(([title, name]) => bars(title, found.spread[name]))),
      table(["step", "reward", "tokens", "ended", "tools", "prompt", "answer"], found.rows.map(row => [
        row.step, number(row.reward), row.tokens,
        h("span", {class: row.outcome === "scored" ? "" : "wrong"}, row.outcome === "scored" ? row.finish : `${row.outcome} ${row.failure}`.slice(0, 80)),
        row.tools.join(", "),
        h("td", {class: "text wide"}, h("a", {href: address("group", {run, step: row.step, prompt: row.prompt_id})}, row.prompt || row.prompt_id)),
        h("td", {class: "text"}, h("a", {href: address("trajectory", {run, step: row.step, id: row.id})}, row.said.trim() || "(empty)")),
      ]), {numbers: [0, 1, 2], wide: [4, 5]}),
      pager(Number(now.first || 0), found.page, found.total, first => to({first: first || ""})),
    );
  }

  let waiting; // until nobody types any more, in whichever field
  const typing = {};
  const typed = name => {
    const input = h("input", {type: name === "text" ? "search" : "number", step: "any", value: now[name], name, oninput: () => {
      typing[name] = input.value;
      clearTimeout(waiting);
      waiting = setTimeout(() => to(typing), 150);
    }});
    return h("label", {}, TITLES[name], input);
  };
  const others = ["from", "to", "prompt"].filter(name => now[name]).map(name =>
    h("button", {type: "button", onclick: event => {
      event.target.remove();
      to({[name]: ""});
    }}, `${name} ${now[name]} ✕`));
  await look();
  const where = runs => JSON.stringify(runs.filter(one => one.run === run).map(one => [one.state, one.step]));
  let drawn = where(runs);
  return {
    title: `Rollouts of ${run}`,
    nodes: [
      h("div", {class: "bar"}, choice("run", runs.map(one => one.run), run, name => go("rollouts", {run: name}))),
      h("form", {class: "filters", onsubmit: event => event.preventDefault()},
        ["text", "step", "least", "most", "shortest", "longest", "staleness"].map(typed), picks, others,
        choice("order", ORDERS, now.order || "newest", order => to({order: order === "newest" ? "" : order}))),
      results,
    ],
    again: runs => {
      if ((read >= steps && where(runs) === drawn) || now.first || results.contains(document.activeElement)) return null;
      drawn = where(runs);
      return look();
    },
  };
}
