// What the views are made of. Text of others is only ever put in as text: nothing here takes HTML.

// h("a", {href: "#/"}, "text", node, …): an element. Attributes that begin with "on" are listeners.
export function h(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value != null) node.setAttribute(key, value);
  }
  node.append(...children.flat(9).filter(child => child != null && child !== false));
  return node;
}

// Answers of the server, below the secret of this page's own address.
export async function ask(view, query) {
  const response = await fetch(`${view}?${query}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export const number = value => {
  if (value == null) return "–";
  if (typeof value !== "number") return String(value);
  return Number.isInteger(value) ? String(value) : String(+value.toPrecision(4));
};

export function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

// An address of a view: pairs of a query; empty values are left out.
export function address(view, query) {
  const pairs = [];
  for (const [key, value] of Object.entries(query))
    for (const one of [value].flat()) if (one != null && one !== "") pairs.push([key, one]);
  return `#/${view}${pairs.length ? "?" : ""}${new URLSearchParams(pairs)}`;
}

export function table(heads, rows, {numbers = [], wide = []} = {}) {
  const kind = at => [numbers.includes(at) && "number", wide.includes(at) && "wide"].filter(Boolean).join(" ");
  return h("div", {class: "scroll"}, h("table", {},
    h("thead", {}, h("tr", {}, heads.map((head, at) => h("th", {class: kind(at), scope: "col"}, head)))),
    h("tbody", {}, rows.map(row => h("tr", {}, row.map((cell, at) =>
      cell instanceof Element && cell.tagName === "TD" ? cell : h("td", {class: kind(at)}, cell)))))));
}

export function facts(pairs) {
  return h("dl", {}, pairs.filter(([, value]) => value != null && value !== "")
    .map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value instanceof Node ? value : number(value)))));
}

// A select of plain values. chosen: calls with the new one.
export function choice(label, values, value, chosen, none) {
  const options = none == null ? values : ["", ...values];
  const select = h("select", {onchange: event => chosen(event.target.value), name: label},
    options.map(one => h("option", {value: one, selected: String(one) === String(value ?? "")}, one === "" ? none : String(one))));
  return h("label", {}, label, select);
}

export function pager(first, size, total, to) {
  const last = Math.min(first + size, total);
  return h("div", {class: "bar"},
    h("button", {disabled: first === 0, onclick: () => to(Math.max(0, first - size))}, "← previous"),
    h("span", {}, total ? `${first + 1}–${last} of ${total}` : "none"),
    h("button", {disabled: last >= total, onclick: () => to(first + size)}, "next →"));
}

const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
export const COLOURS = ["#2f6fc4", "#d06a1b", "#2e9362", "#a34cb5", "#c23b56", "#0f97a5", "#8a7a14", "#7468d8"];

export const colourOf = at => COLOURS[at] ?? `hsl(${Math.round(at * 137.5) % 360} 45% 50%)`;

// plotly reads a few tags in texts.
export const plain = text => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");

export function plot(node, traces, layout = {}) {
  const axis = {gridcolor: style("--line"), zerolinecolor: style("--line"), automargin: true, exponentformat: "e"};
  const {xaxis = {}, yaxis = {}, ...rest} = layout;
  return Plotly.react(node, traces, {
    margin: {l: 8, r: 8, t: 8, b: 8}, showlegend: false, uirevision: "kept", hovermode: "closest",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: {color: style("--text"), size: 11},
    xaxis: {...axis, ...xaxis}, yaxis: {...axis, ...yaxis}, ...rest,
  }, {responsive: true, displaylogo: false, displayModeBar: false});
}

// A histogram with edges and counts, drawn once it is part of the page.
export function bars(title, {edges, counts}) {
  const node = h("div", {class: "plot", role: "img", "aria-label": title});
  const box = h("div", {class: "chart small"}, h("div", {}, title), node);
  const middles = counts.map((_, at) => (edges[at] + edges[at + 1]) / 2);
  const widths = counts.map((_, at) => edges[at + 1] - edges[at]);
  requestAnimationFrame(() => plot(node, [{type: "bar", x: middles, y: counts, width: widths,
    marker: {color: COLOURS[0]}, hovertemplate: "%{x}: %{y}<extra></extra>"}],
    {bargap: 0.05, xaxis: edges.length <= 10 ? {tick0: 0, dtick: widths[0]} : {}}));
  return box;
}

// The turns of a transcript: lines of others that look like a head are in the text of the run, too.
export function turns(said) {
  const heads = [...said.matchAll(/^\[(policy|tool|environment|user|context)\] /gm)];
  if (!heads.length) return h("div", {class: "said"}, said);
  const before = said.slice(0, heads[0].index).trimEnd();
  return [before && h("div", {class: "said"}, before), ...heads.map((head, at) => h("div", {class: `turn ${head[1]}`}, h("b", {}, head[1]),
    h("div", {class: "said"}, said.slice(head.index + head[0].length, heads[at + 1]?.index).trimEnd())))].filter(Boolean);
}
