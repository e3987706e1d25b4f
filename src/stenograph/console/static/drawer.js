// What is known of a session beside its texts and tokens: findings, stages, drift, ledger, rewrites, facts.

import { askLedger, isFile } from "./data.js";
import { number, rewardText, seconds, timeOf, visible } from "./text.js";
import { Chip, Note, Rows, groupPlace, html, useAsked, useEffect, useState } from "./ui.js";

export const TABS = ["why", "stages", "drift", "ledger", "rewrites", "facts"];
const FORBIDDEN = ["special_token_count", "special_token_type", "non_assistant_text"];

export const isForbidden = (type) => FORBIDDEN.includes(type);

// A finding's own link is for other pages; here it is a place of this one.
const hereOf = (link) => link.slice(link.indexOf("#"));

export function WhyTab({ why }) {
  return html`<${Note} asked=${why}>${why.value !== null && (why.value.findings.length === 0
    ? html`<p class="note">Nothing is out of the ordinary.</p>`
    : html`<ol class="findings">${why.value.findings.map((finding) => html`<li>
        <a class="finding" href=${hereOf(finding.link)}><${Chip} kind="gravity-${finding.gravity}">${finding.gravity}<//>
        <b>${finding.kind.replaceAll("_", " ")}</b> <span>${visible(finding.told)}</span></a></li>`)}</ol>`)}<//>`;
}

export function StagesTab({ store, node, onPick }) {
  const [turns, setTurns] = useState([]);
  useEffect(() => {
    let gone = false;
    store.all().then((found) => gone || setTurns(found), () => gone || setTurns([]));
    return () => { gone = true; };
  }, [store]);
  if (turns.length === 0) return html`<p class="note">${store.num === 0 ? "No turn." : "…"}</p>`;
  const totals = turns.map((turn) => Object.values(turn.stages_s).reduce((sum, one) => sum + one, 0));
  const most = Math.max(...totals);
  const names = [...new Set(turns.flatMap((turn) => Object.keys(turn.stages_s)))];
  return html`
    <div class="legend">${names.map((name) => html`<span><i class="swatch stage-${name}"></i>${name}</span>`)}<span class="dim">0 to ${seconds(most)}</span></div>
    <${Rows} num=${turns.length} height=${20} keys=${[turns, node]} label="stages" draw=${(place) => {
      const turn = turns[place];
      if (turn === undefined) return "";
      return html`<button class="grid stages ${turn.node === node ? "current" : ""}" onClick=${() => onPick(turn.node)}>
        <span class="mono">turn ${place}</span><span class="num">${seconds(totals[place])}</span>
        <${StageBars} stages=${turn.stages_s} most=${most} /></button>`;
    }} />`;
}

function StageBars({ stages, most }) {
  let at = 0;
  const bars = Object.entries(stages).map(([name, took]) => {
    const x = (100 * at) / most;
    at += took;
    return html`<rect x="${x}%" y="3" width="${Math.max((100 * took) / most, 0.08)}%" height="12" class="stage-${name}"><title>${name} ${seconds(took)}</title></rect>`;
  });
  const told = Object.entries(stages).map(([name, took]) => `${name} ${seconds(took)}`).join(", ");
  return html`<svg class="bars" height="18" width="100%" role="img" aria-label=${told}>${bars}</svg>`;
}

export function DriftTab({ drift, onToken }) {
  return html`<${Note} asked=${drift}>${drift.value !== null && html`<div class="scroller drift" tabindex="0">
    ${drift.value.lines.map((line) => html`
      <h3>line to node ${line.leaf} <small>${number(line.num_tokens)} tokens${line.unrenderable !== null ? "" : line.mismatches.length === 0 ? ", as the template writes it" : ""}</small></h3>
      ${line.unrenderable !== null && html`<p class="note">Not compared: ${visible(line.unrenderable)}</p>`}
      ${(line.mismatches ?? []).map((one) => html`<${Mismatch} one=${one} onToken=${() => onToken(line.leaf, one.start)} />`)}`)}
  </div>`}<//>`;
}

// The texts of both sides, with what differs marked: what they begin and end with in common is not.
function Mismatch({ one, onToken }) {
  const [line, template] = [one.actual_text, one.expected_text].map((text) => visible(text).replace(/\n/g, "⏎\n"));
  let head = 0;
  while (head < Math.min(line.length, template.length) && line[head] === template[head]) head += 1;
  let tail = 0;
  while (tail < Math.min(line.length, template.length) - head && line[line.length - 1 - tail] === template[template.length - 1 - tail]) tail += 1;
  const marked = (text) => html`<pre class="text">${text.slice(0, head)}<mark>${text.slice(head, text.length - tail)}</mark>${text.slice(text.length - tail)}</pre>`;
  return html`<div class="mismatch ${isForbidden(one.type) ? "forbidden" : ""}">
    <button class="pick" onClick=${onToken}>token ${number(one.start)}${one.end > one.start + 1 ? ` to ${number(one.end)}` : ""}</button>
    <${Chip} kind=${isForbidden(one.type) ? "bad" : ""}>${one.type.replaceAll("_", " ")}<//> <span class="dim">${visible(one.detail)}</span>
    <div class="sides"><div><h4>the line has</h4>${marked(line)}</div><div><h4>the template writes</h4>${marked(template)}</div></div></div>`;
}

export function LedgerTab({ id, request, created, onPick }) {
  const [rows, setRows] = useState([]);
  const [next, setNext] = useState(0);
  const first = useAsked(() => askLedger(id, 0), [id]);
  const keep = (page) => { setRows((before) => [...before, ...page.requests]); setNext(page.next); };
  useEffect(() => { if (first.value !== null) { setRows(first.value.requests); setNext(first.value.next); } }, [first.value]);
  const at = rows.findIndex((row) => row.number === request);
  return html`<${Note} asked=${first}>
    <div class="grid ledger head"><span class="num">#</span><span class="num">after</span><span class="num">took</span><span>status</span><span>path</span><span>kind</span><span>client</span><span>turn</span><span class="num">prompt</span><span class="num">cached</span><span class="num">sampled</span><span>beside</span><span>rewrites</span></div>
    ${rows.length === 0 ? html`<p class="note">No request.</p>` : html`
    <${Rows} num=${rows.length} height=${22} keys=${[rows, request]} shown=${at < 0 ? null : at} label="requests" draw=${(index) => html`<${LedgerRow} row=${rows[index]} created=${created} current=${request} onPick=${onPick} />`} />`}
    ${next !== null && next > 0 && html`<button class="more" onClick=${() => askLedger(id, next).then(keep)}>more requests</button>`}<//>`;
}

function LedgerRow({ row, created, current, onPick }) {
  if (row === undefined) return "";
  const took = row.ended === null ? "runs" : seconds(row.ended - row.received);
  const status = row.status ?? (row.ended === null ? "…" : "client left");
  const isBad = row.error !== null || (row.status === null && row.ended !== null);
  return html`<div class="grid ledger ${isBad ? "failed" : ""} ${row.number === current ? "current" : ""}">
    <span class="num">${row.number}</span><span class="num">${seconds(Math.max(0, row.received - created))}</span><span class="num">${took}</span>
    <span class=${isBad ? "warn" : ""}>${status}${row.error === null ? "" : ` ${row.error}`}</span>
    <span class="mono cut">${visible(row.path)}</span><span>${row.kind}${row.rule === null ? "" : html` <small class="dim">${visible(row.rule)}</small>`}</span>
    <span class="cut">${visible(row.known_as ?? row.client)}</span>
    <span>${row.turn === null ? html`<span class="dim">none</span>` : html`<button class="pick" onClick=${() => onPick(row.turn)}>node ${row.turn}</button>`}</span>
    <span class="num">${number(row.prompt_tokens)}</span><span class="num">${number(row.cached_tokens)}</span><span class="num">${number(row.sampled_tokens)}</span>
    <span class="dim cut">${row.overlaps.join(", ")}</span><span class="cut">${row.rewrites.map(visible).join(", ")}</span></div>`;
}

export function RewritesTab({ store, onPick }) {
  const asked = useAsked(() => store.all(), [store]);
  const found = (asked.value ?? []).flatMap((turn) => turn.rewrites.map((one) => [turn.node, one]));
  return html`<${Note} asked=${asked}>${found.length === 0
    ? html`<p class="note">No rule changed what the client sent on this line.</p>`
    : html`<div class="scroller drift" tabindex="0">${found.map(([node, one]) => html`<div class="mismatch">
        <button class="pick" onClick=${() => onPick(node)}>node ${node}</button> <${Chip}>${visible(one.rule)}<//> <span class="mono dim">${visible(one.where)}</span>
        <div class="sides"><div><h4>the client sent</h4><pre class="text">${visible(one.from)}</pre></div><div><h4>the model saw</h4><pre class="text">${visible(one.to)}</pre></div></div></div>`)}</div>`}<//>`;
}

export function FactsTab({ shape }) {
  const outcome = shape.outcome;
  const facts = [
    ["session", html`<span class="mono">${shape.session_id}</span>`],
    ["opened (UTC)", timeOf(shape.created_at)],
    ["history", shape.history],
    ["group", shape.group === null ? "–" : isFile ? visible(shape.group) : html`<a href=${groupPlace(shape.group)}>${visible(shape.group)}</a>`],
    ["verdict", outcome?.verdict ?? "nobody has said it"],
    ["reward", rewardText(outcome)],
    ["detail", outcome?.detail ? visible(outcome.detail) : "–"],
    ["turns, requests", `${number(shape.num_turns)}, ${number(shape.num_requests)}`],
    ["sampled, trained", `${number(shape.sampled_tokens)}, ${number(shape.trained_tokens)}`],
    ["discarded", `${shape.discarded.turns} turns, ${number(shape.discarded.sampled_tokens)} tokens`],
    ["weights", shape.versions.length === 0 ? "–" : shape.versions.map(visible).join(", ")],
    ["metadata", html`<pre class="text">${visible(JSON.stringify(shape.metadata, null, 1))}</pre>`],
  ];
  return html`<div class="scroller" tabindex="0"><dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl>
    <table><thead><tr><th>strand</th><th>kind</th><th>rule</th><th>client</th><th>agent</th><th>goes on with</th><th class="num">turns</th><th class="num">tokens</th></tr></thead>
    <tbody>${shape.strands.map((one) => html`<tr><td>${one.strand}</td><td>${one.kind}</td><td>${visible(one.rule ?? "–")}</td><td>${visible(one.client ?? "–")}</td>
      <td class="mono">${visible(one.agent_id)}</td><td>${one.continues === null ? "–" : `strand ${one.continues}, chapter ${one.chapter}`}</td><td class="num">${one.num_turns}</td><td class="num">${number(one.num_tokens)}</td></tr>`)}</tbody></table></div>`;
}
