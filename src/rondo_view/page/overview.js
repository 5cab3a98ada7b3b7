// Runs: which there are, what stands out in them, their curves together, and in which settings they differ.

import {address, ask, choice, colourOf, duration, h, number, plot, table} from "./parts.js";
import {go} from "./view.js";

const FIRST = 4; // runs that are drawn where nobody chose any

export async function overview(query, runs) {
  const chosen = query.getAll("run").length ? query.getAll("run") : runs.slice(0, FIRST).map(run => run.run);
  const smooth = Number(query.get("smooth") ?? 0);
  const metrics = query.getAll("metric");
  const to = changes => go("", {run: chosen, metric: metrics, smooth: smooth || "", ...changes}, {replace: true});
  const asked = new URLSearchParams([...chosen.map(run => ["run", run]), ...metrics.map(one => ["metric", one])]);
  let found = await ask("curves", asked).catch(error => ({names: [], curves: {}, wrong: error.message}));
  const settings = await ask("settings", new URLSearchParams(chosen.map(run => ["run", run]))).catch(error => error);
  const colour = Object.fromEntries(chosen.map((run, at) => [run, colourOf(at)]));
  const names = Object.keys(found.curves);

  const list = h("div", {}, listed(runs));
  function listed(runs) {
    return table(["", "run", "by", "state", "steps", "reward", "time", "began"], runs.map(one => [
      h("input", {type: "checkbox", checked: chosen.includes(one.run), "aria-label": `draw ${one.run}`, onchange: event =>
        to({run: event.target.checked ? [...chosen, one.run] : chosen.filter(run => run !== one.run)})}),
      h("span", {}, h("span", {class: "dot", style: `background: ${colour[one.run] ?? "transparent"}`}),
        h("a", {href: address("rollouts", {run: one.run})}, one.run)),
      one.kind ?? "–",
      one.wrong ? h("span", {class: "wrong"}, one.wrong) : one.state,
      `${one.step ?? "–"}/${one.total_steps ?? "?"}`,
      number(one.metrics?.["reward/mean"] ?? one.metrics?.["sft/loss"] ?? one.metrics?.["pair/loss"]),
      duration(one.seconds ?? 0),
      one.began ? new Date(1000 * one.began).toLocaleString() : "–",
    ]), {numbers: [4, 5, 6], wide: [2, 7]});
  }

  const wrong = h("div", {}, told(runs));
  function told(runs) {
    const lines = runs.filter(one => chosen.includes(one.run)).flatMap(one => (one.checks ?? []).map(text =>
      h("li", {}, h("span", {class: "dot", style: `background: ${colour[one.run]}`}), `${one.run}: ${text}`)));
    return lines.length ? [h("h2", {}, "What stands out"), h("ul", {class: "wrong"}, lines)] : [];
  }

  const plots = Object.fromEntries(names.map(name => [name, h("div", {class: "plot", role: "img", "aria-label": `curve of ${name}`})]));
  const draw = () => names.forEach(name => plot(plots[name], chosen.filter(run => found.curves[name][run]).map(run => ({
    x: found.curves[name][run].steps, y: smoothed(found.curves[name][run].values, smooth), type: "scatter",
    mode: found.curves[name][run].steps.length < 20 ? "lines+markers" : "lines", line: {color: colour[run], width: 1.6},
    hovertemplate: `step %{x}: %{y}<extra>${run.replaceAll("<", "&lt;")}</extra>`,
  }))));
  const add = h("input", {list: "names", placeholder: "add a metric …", "aria-label": "add a metric", onchange: event => {
    const like = found.names.filter(name => name === event.target.value);
    const some = like.length ? like : found.names.filter(name => name.includes(event.target.value)).slice(0, 12);
    if (some.length) to({metric: [...new Set([...names, ...some])]});
  }});
  const where = runs => JSON.stringify(runs.filter(run => chosen.includes(run.run)).map(run => [run.state, run.step]));
  let drawn = where(runs);
  return {
    title: "Runs",
    nodes: [
      h("h1", {}, "Runs"), list, wrong, h("h2", {}, "Curves"), found.wrong && h("p", {class: "wrong", role: "alert"}, found.wrong),
      h("div", {class: "bar"}, add, h("datalist", {id: "names"}, found.names.map(name => h("option", {value: name}))),
        choice("mean over steps", [5, 20, 100], smooth || "", value => to({smooth: value}), "1"),
        metrics.length > 0 && h("button", {onclick: () => to({metric: []})}, "the usual ones")),
      h("div", {class: "charts"}, names.map(name => h("div", {class: "chart"}, h("div", {}, name,
        h("button", {"aria-label": `remove ${name}`, onclick: () => to({metric: names.filter(one => one !== name)})}, "✕")), plots[name]))),
      ...differences(chosen, settings),
    ],
    drawn: draw,
    async again(now) {
      if (!list.contains(document.activeElement)) list.replaceChildren(listed(now));
      wrong.replaceChildren(...told(now));
      if (where(now) === drawn) return;
      drawn = where(now);
      found = {...found, curves: (await ask("curves", new URLSearchParams([...chosen.map(run => ["run", run]), ...names.map(one => ["metric", one])]))).curves};
      draw();
    },
  };
}

function differences(chosen, settings) {
  if (settings instanceof Error) return [h("p", {class: "wrong"}, settings.message)];
  const rows = Object.entries(settings).map(([key, values]) => [key, ...values.map(value => {
    const text = value === null ? "null" : typeof value === "string" ? value : JSON.stringify(value);
    return h("td", {class: "text"}, text);
  })]);
  const several = chosen.length > 1;
  const title = several ? `Settings that differ (${rows.length})` : "Settings";
  return [h("h2", {}, title), rows.length === 0 ? h("p", {class: "dim"}, "none") :
    h("details", {open: several && rows.length <= 60}, h("summary", {}, `${rows.length} keys`), table(["key", ...chosen], rows))];
}

// The mean over so many steps, of those that are there.
function smoothed(values, width) {
  if (!width) return values;
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - width + 1), at + 1).filter(value => value != null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}
