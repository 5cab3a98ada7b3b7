// One trajectory, token by token; and the answers to its prompt side by side.

import {address, ask, choice, facts, h, number, turns} from "./parts.js";
import {go} from "./view.js";

// What tokens are coloured by: the title, and the value at which a colour is full.
const BY = {
  log_prob: ["log-prob of the sampler", 5], gap: ["gap: trainer − sampler", null], advantages: ["advantage", null],
  version: ["version of the weights", null], entropy: ["entropy", null], values: ["value", null],
  old_log_probs: ["log-prob of the trainer", 5], ref_log_probs: ["log-prob of the reference", 5],
};

export async function trajectory(query) {
  const at = Object.fromEntries(["run", "step", "id"].map(name => [name, query.get(name)]));
  const found = await ask("trajectory", new URLSearchParams(at));
  const group = await ask("group", new URLSearchParams({run: at.run, step: at.step, prompt: found.prompt_id}));
  const place = group.answers.findIndex(one => one.trajectory_id === at.id);
  const beside = (name, key, title) => group.answers[place + name] && h("a", {"data-key": key,
    href: address("trajectory", {...at, id: group.answers[place + name].trajectory_id, by: query.get("by")})}, title);
  const by = query.get("by") ?? "log_prob";
  const there = Object.keys(BY).filter(name => found.of_rows.some(row => row.tokens[name]));
  const kept = found.of_rows.every(row => row.kept);
  return {
    title: `Step ${at.step}, ${found.prompt_id}`,
    nodes: [
      h("h1", {}, `Step ${at.step} · ${found.prompt_id} · sample ${found.sample_index}`),
      h("div", {class: "bar"}, h("a", {href: address("rollouts", {run: at.run, step: at.step})}, at.run),
        h("a", {href: address("group", {run: at.run, step: at.step, prompt: found.prompt_id})}, `all ${group.total} answers`),
        beside(-1, "k", "← better (k)"), beside(1, "j", "worse (j) →")),
      facts([["reward", found.outcome === "scored" ? found.reward : null], ...Object.entries(found.scores), ["outcome", found.outcome],
        ["failure", found.failure], ["ended by", found.finish_reason], ["tokens", found.tokens], ["source", found.source],
        ["oldest version", found.oldest_version < 0 ? null : found.oldest_version], ["contexts", found.rows > 1 ? found.rows : null]]),
      h("h2", {}, "Prompt"), h("div", {class: "said"}, found.prompt), found.images.map((one, number) => image(at, one, number)),
      h("h2", {}, "What was said"), turns(found.said),
      h("h2", {}, "Tokens"),
      h("div", {class: "bar"}, choice("coloured by", there, by, name => go("trajectory", {...at, by: name}, {replace: true})),
        legend(by, found.of_rows),
        !kept && h("span", {class: "dim"}, "gap and advantages: not kept (tracking.token_columns keeps them)")),
      found.of_rows.map((row, number) => [found.of_rows.length > 1 && h("h2", {}, `Context ${number + 1}`), coloured(row, by, scale(by, found.of_rows)),
        h("details", {}, h("summary", {}, "columns of the row"), facts(Object.entries(row.about)))]),
    ],
  };
}

// The value at which a colour is full: of what has no natural one, the largest.
function scale(by, rows) {
  if (BY[by]?.[1]) return [0, BY[by][1]];
  const values = rows.flatMap(row => (row.tokens[by] ?? []).filter((value, at) => value != null && row.tokens.trained[at]));
  const least = values.reduce((a, b) => Math.min(a, b), Infinity), most = values.reduce((a, b) => Math.max(a, b), -Infinity);
  if (by === "version") return [least, Math.max(1, most - least)];
  return [0, Math.max(Math.abs(least), Math.abs(most)) || 1];
}

function colour(value, [zero, full]) {
  const share = Math.max(-1, Math.min(1, (value - zero) / full));
  return `rgba(var(${share < 0 ? "--bad" : "--good"}), ${(0.75 * Math.abs(share)).toFixed(3)})`;
}

function legend(by, rows) {
  const [zero, full] = scale(by, rows);
  if (!rows.some(row => row.tokens[by]) || !Number.isFinite(full)) return h("span", {class: "dim"}, "not kept");
  const below = by.endsWith("log_prob") || by.endsWith("log_probs") || by === "gap" || by === "advantages" || by === "values";
  const above = !by.includes("log_prob");
  const left = below ? zero - full : zero, right = above ? zero + full : zero;
  const ramp = [left, zero, right].map(value => colour(value, [zero, full])).join(", ");
  return h("span", {}, `${BY[by][0]}: ${number(left)} `, h("span", {class: "scale", style: `background: linear-gradient(to right, ${ramp})`}), ` ${number(right)}`);
}

function coloured(row, by, full) {
  const {id, text, trained, turn} = row.tokens;
  const values = row.tokens[by];
  const said = ["log_prob", "gap", "advantages", "version", "entropy", "values"].filter(name => row.tokens[name]);
  const spans = id.map((one, at) => {
    const told = trained[at] ? said.map(name => `${name} ${number(row.tokens[name][at])}`) : [`not the policy's: ${turn[at] || "given"}`];
    const shown = text ? text[at].replaceAll("\n", "⏎\n") : `${one} `;
    const value = values?.[at];
    return h("span", {class: trained[at] ? null : "given", title: [`token ${one}`, ...told].join("\n"),
      style: trained[at] && value != null ? `background: ${colour(value, full)}` : null}, shown);
  });
  return h("div", {}, row.no_texts && h("p", {class: "dim"}, `The tokens' numbers: ${row.no_texts}.`), h("div", {class: "said tokens"}, spans));
}

// An image as a blob, or why it is not shown.
function image(at, one, number) {
  const caption = h("figcaption", {class: "dim"}, `image ${number + 1} · ${one.tokens} tokens · message ${one.turn} · ${one.path}`);
  const figure = h("figure", {}, caption);
  fetch(`image?${new URLSearchParams({...at, number})}`).then(async answer => {
    if (!answer.ok) return caption.append(` · not shown: ${(await answer.json()).error}`);
    const address = URL.createObjectURL(await answer.blob());
    const shown = h("img", {src: address, alt: `image ${number + 1}`, onload: () => URL.revokeObjectURL(address)});
    figure.prepend(shown);
  });
  return figure;
}

export async function group(query) {
  const at = Object.fromEntries(["run", "step", "prompt"].map(name => [name, query.get(name)]));
  const found = await ask("group", new URLSearchParams(at));
  if (!found.total) throw new Error(`step ${at.step} has no prompt ${at.prompt}`);
  const marks = query.get("marks") !== "no";
  const words = found.answers.map(one => one.said.split(/(\s+)/));
  const pairs = words.map(list => new Set(neighbours(list)));
  const cards = found.answers.map((one, number) => h("article", {class: "card"},
    h("a", {href: address("trajectory", {run: at.run, step: at.step, id: one.trajectory_id}), "data-key": number === 0 && "j"}, `sample ${one.sample_index}`),
    facts([["reward", one.outcome === "scored" ? one.reward : one.outcome], ["tokens", one.tokens], ["ended by", one.finish_reason], ["failure", one.failure]]),
    h("div", {class: "said"}, marks ? marked(words[number], pairs.filter((_, other) => other !== number)) : one.said)));
  return {
    title: `Answers to ${at.prompt}`,
    nodes: [
      h("h1", {}, `Step ${at.step} · ${at.prompt}`),
      h("div", {class: "bar"}, h("a", {href: address("rollouts", {run: at.run, step: at.step})}, at.run), h("span", {}, `${found.total} answers, the best first`),
        h("label", {}, h("input", {type: "checkbox", checked: marks, onchange: event => go("group", {...at, marks: event.target.checked ? "" : "no"}, {replace: true})}),
          "mark what no other answer says")),
      h("div", {class: "said"}, found.answers[0].prompt), h("div", {class: "side"}, cards),
    ],
  };
}

// Each word with the one before it, as a text; the blanks between them do not count.
function neighbours(list) {
  const words = list.filter(word => word.trim());
  return [`\n${words[0] ?? ""}`, ...words.slice(1).map((word, at) => `${words[at]}\n${word}`), `${words.at(-1) ?? ""}\n`];
}

// A word is marked where it stands in no other answer behind the word before it, nor before the next one.
function marked(list, others) {
  if (!others.length) return list.join("");
  const own = neighbours(list);
  const alone = pair => !others.some(set => set.has(pair));
  let at = 0;
  return list.map(word => {
    if (!word.trim()) return word;
    at += 1;
    return alone(own[at - 1]) && alone(own[at]) ? h("mark", {}, word) : word;
  });
}
