// Two evaluations beside each other, and what each device did in a step.

import {ask, choice, colourOf, h, number, pager, plain, plot, table, turns} from "./parts.js";
import {go} from "./view.js";

export async function evaluations(query, runs) {
  const run = query.get("run") ?? runs[0]?.run;
  const now = {run, ...Object.fromEntries(["step", "other_run", "other_step", "changed", "first"].map(name => [name, query.get(name) ?? ""]))};
  const to = changes => go("evaluations", {...now, first: "", ...changes}, {replace: true});
  const found = await ask("evaluations", new URLSearchParams(Object.entries(now).filter(([, value]) => value !== "")));
  const names = runs.map(one => one.run);
  const answer = one => one && h("td", {class: "text"}, h("b", {}, one.outcome === "scored" ? number(one.reward) : one.outcome),
    h("span", {class: "dim"}, ` ${one.tokens} tokens, ${one.finish_reason}`), turns(one.said));
  return {
    title: `Evaluations of ${run}`,
    nodes: [
      h("h1", {}, "Evaluations"),
      h("form", {class: "filters", onsubmit: event => event.preventDefault()},
        choice("left: run", names, now.other_run || run, value => to({other_run: value, other_step: ""})),
        choice("step", found.other_steps, found.other_step, value => to({other_step: value})),
        choice("right: run", names, run, value => go("evaluations", {...now, run: value, step: "", other_run: now.other_run || run, first: ""})),
        choice("step", found.steps, found.step, value => to({step: value})),
        h("label", {}, h("input", {type: "checkbox", checked: now.changed !== "", onchange: event => to({changed: event.target.checked ? "1" : ""})}),
          `only where the reward changed (${found.changed})`)),
      table(["prompt", `${now.other_run || run}, step ${found.other_step}`, `${run}, step ${found.step}`, "change"], found.pairs.map(([left, right]) => [
        h("td", {class: "text"}, (left ?? right).prompt), answer(left) ?? h("td", {}, "–"), answer(right) ?? h("td", {}, "–"),
        left && right && left.outcome === "scored" && right.outcome === "scored" ? number(right.reward - left.reward) : "–",
      ]), {numbers: [3]}),
      pager(Number(now.first || 0), found.page, found.total, first => to({first: first || ""})),
    ],
  };
}

export async function timeline(query, runs) {
  const run = query.get("run") ?? runs[0]?.run;
  const last = runs.find(one => one.run === run)?.step ?? 0;
  const step = Number(query.get("step") ?? last);
  const to = step => go("timeline", {run, step}, {replace: true});
  const node = h("div", {class: "chart", role: "img", "aria-label": `what each device did in step ${step}`});
  const bar = h("div", {class: "bar"}, choice("run", runs.map(one => one.run), run, name => go("timeline", {run: name})),
    h("button", {disabled: step <= 0, "data-key": "k", onclick: () => to(step - 1)}, "← step (k)"),
    h("input", {type: "number", value: step, min: 0, "aria-label": "step", onchange: event => to(Number(event.target.value))}),
    h("button", {disabled: step >= last, "data-key": "j", onclick: () => to(step + 1)}, "step → (j)"));
  const made = {title: `Timeline of ${run}`, nodes: [h("h1", {}, `Step ${step}: what each device did`), bar, h("p", {class: "dim"}, "Seconds since the first of it.")]};
  let found;
  try {
    found = await ask("timeline", new URLSearchParams({run, step}));
  } catch (error) {
    made.nodes.push(h("p", {class: "wrong", role: "alert"}, error.message));
    return made;
  }
  const names = [...new Set(found.spans.map(span => span.name))];
  const processes = [...new Set(found.spans.map(span => span.process))].sort().reverse();
  node.style.height = `${110 + 60 * processes.length}px`;
  const traces = names.map((name, at) => {
    const own = found.spans.filter(span => span.name === name);
    return {type: "bar", orientation: "h", name: plain(name), y: own.map(span => plain(span.process)), base: own.map(span => span.start),
      x: own.map(span => span.end - span.start), marker: {color: colourOf(at), opacity: 0.85},
      hovertemplate: `${plain(name)}: %{x:.4f} s, from %{base:.4f} s<extra></extra>`};
  });
  made.nodes.push(node, totals(found.spans));
  made.drawn = () => plot(node, traces, {barmode: "overlay", showlegend: true, legend: {orientation: "h", y: -0.15}, yaxis: {categoryorder: "array", categoryarray: processes.map(plain)}});
  return made;
}

function totals(spans) {
  const seconds = new Map();
  for (const {process, name, start, end} of spans) {
    const key = JSON.stringify([process, name]);
    const [all, calls] = seconds.get(key) ?? [0, 0];
    seconds.set(key, [all + end - start, calls + 1]);
  }
  const rows = [...seconds].sort((a, b) => b[1][0] - a[1][0]).map(([key, [all, calls]]) => [...JSON.parse(key), calls, all.toFixed(4)]);
  return table(["process", "what", "calls", "seconds"], rows, {numbers: [2, 3]});
}
