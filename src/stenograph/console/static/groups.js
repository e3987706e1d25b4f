// Steps and groups in figures: what the policy earned, where its groups have no advantage, how long and how old they are.

import { askGroups } from "./data.js";
import { number, percent, timeOf, visible } from "./text.js";
import { Chart, Chip, Note, Rows, axisOf, groupPlace, html, placeOf, useAsked, useEffect, useMemo, useState } from "./ui.js";

const fewDigits = (value) => (value === null ? "–" : String(Number(value.toPrecision(4))));
const wholeNumber = (value) => number(Math.round(value));

// The k of pass@k that a cell has room for: one, and the most.
const rounded = (share) => `${Math.round(100 * share)} %`;
const passText = (passes) => {
  const ks = Object.keys(passes).map(Number).sort((one, other) => one - other);
  const told = ks.length > 1 ? [ks[0], ks[ks.length - 1]] : ks;
  return told.length === 0 ? "–" : told.map((k) => `@${k} ${rounded(passes[k])}`).join(" ");
};
const passHint = (passes) => Object.entries(passes).map(([k, chance]) => `pass@${k} ${percent(chance)}`).join(", ");
const cutText = (one) => (one.cut_share === null ? "–" : percent(one.cut_share));
const cutHint = (one) => (one.num_known === one.num_rollouts ? "" : `known of ${one.num_known} of ${one.num_rollouts} rollouts: the others are on disk alone, open the group`);
const behindText = (one) => (one.mean_behind === null ? "–" : one.most_behind === 0 ? "0" : `${fewDigits(one.mean_behind)} ≤ ${one.most_behind}`);
const rewardsText = (one) => (one.mean_reward === null ? "–" : `${fewDigits(one.mean_reward)} ± ${fewDigits(one.std_reward)}`);

// A cell says its name where there is no room for a head.
const FigureCell = ({ name, hint = "", kind = "", children }) => html`<span class="num ${kind}" data-name=${name} title=${hint}>${children}</span>`;

function FigureCells({ one }) {
  return html`
    <${FigureCell} name="reward" hint="mean ± deviation of ${one.num_rewarded} rewards">${rewardsText(one)}<//>
    <${FigureCell} name="pass@k" hint=${passHint(one.pass_at)}>${passText(one.pass_at)}<//>
    <${FigureCell} name="cut" hint=${cutHint(one)} kind=${one.cut_share > 0 ? "warn" : ""}>${cutText(one)}<//>
    <${FigureCell} name="tokens" hint="mean of ${one.num_rollouts} rollouts, ${fewDigits(one.mean_turns)} turns; the longest has ${number(one.most_tokens)}">${wholeNumber(one.mean_tokens)}<//>
    <${FigureCell} name="behind" hint="weight versions behind the newest: mean, and the most">${behindText(one)}<//>`;
}

const FIGURE_NAMES = ["reward", "pass@k", "cut", "tokens", "behind"];
const FiguresHead = ({ kind, first, second }) => html`<div class="grid ${kind} head"><span>${first}</span><span class="num">${second}</span>${FIGURE_NAMES.map((name) => html`<span class="num">${name}</span>`)}</div>`;

function StepRow({ one, isOn }) {
  if (one === undefined) return "";
  const alike = one.num_compared === 0 ? "–" : percent(one.num_alike / one.num_compared);
  return html`<div class="grid figures-row ${isOn ? "current" : ""}">
    <span><a href=${placeOf("groups", { step: one.step ?? "" })} title="opened ${timeOf(one.opened_at)}">${one.step === null ? "no step" : `step ${visible(one.step)}`}</a>
      <small> ${number(one.num_groups)} × ${fewDigits(one.num_rollouts / one.num_groups)}</small></span>
    <${FigureCell} name="no advantage" hint="${one.num_alike} of ${one.num_compared} groups have equal rewards" kind=${one.num_alike > 0 ? "warn" : ""}>${alike}<//>
    <${FigureCells} one=${one} /></div>`;
}

function GroupRow({ one }) {
  if (one === undefined) return "";
  const isAlike = one.num_alike > 0;
  return html`<div class="grid figures-row">
    <span><a href=${groupPlace(one.group)} title="opened ${timeOf(one.opened_at)}">${visible(one.group)}</a>
      ${isAlike && html` <${Chip} kind="bad">no advantage<//>`}${one.num_busy > 0 && html` <${Chip} kind="stage-busy">${one.num_busy} at work<//>`}</span>
    <${FigureCell} name="rewarded" hint="${one.num_failed} failed">${one.num_rewarded} of ${one.num_rollouts}<//>
    <${FigureCells} one=${one} /></div>`;
}

function stepChartOptions(colour, name, value) {
  return {
    height: 110,
    cursor: { y: false },
    legend: { show: false },
    scales: { x: { time: false, range: (_, low, high) => [low - 0.5, high + 0.5] } },
    axes: [axisOf(colour, { size: 22, space: 40, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }), axisOf(colour, { size: 40, space: 26, values: (_, ticks) => ticks.map(value) })],
    series: [{}, { label: name, stroke: colour("--accent"), width: 1.5, points: { size: 5, fill: colour("--accent") } }],
  };
}

const STEP_CHARTS = [
  ["reward, mean", (one) => one.mean_reward, fewDigits],
  ["groups without an advantage", (one) => (one.num_compared === 0 ? null : one.num_alike / one.num_compared), rounded],
  ["pass@1", (one) => one.pass_at["1"] ?? null, rounded],
  ["tokens, mean", (one) => one.mean_tokens, wholeNumber],
];

function StepCharts({ steps }) {
  const numbered = useMemo(() => steps.filter((one) => one.step !== null && Number.isFinite(Number(one.step))).sort((one, other) => one.step - other.step), [steps]);
  if (numbered.length < 2) return "";
  const at = numbered.map((one) => Number(one.step));
  return html`<section class="charts" aria-label="charts">${STEP_CHARTS.map(([name, read, value]) => html`<${Chart} key=${name} label="${name}, by step"
    data=${[at, numbered.map(read)]} options=${(colour) => stepChartOptions(colour, name, value)} />`)}</section>`;
}

export function GroupsView({ query, onError }) {
  const [passesAt, setPassesAt] = useState("1");
  const [tries, setTries] = useState(0);
  const asked = useAsked(() => askGroups(passesAt), [passesAt, tries]);
  useEffect(() => { if (asked.error !== null) onError(asked.error); }, [asked.error]);
  const changed = (event) => { if (Number.isFinite(event.target.valueAsNumber)) setPassesAt(event.target.value); };
  return html`
    <main class="page groups" data-view="groups">
      <header class="bar"><h1>Groups and steps</h1>
        <label class="dim">passes at a reward of <input type="number" step="any" value=${passesAt} onChange=${changed} /></label>
        <button onClick=${() => setTries(tries + 1)} title="ask the server again" data-again>reload</button></header>
      <${Note} asked=${asked}>${asked.value !== null && html`<${GroupsPage} view=${asked.value} step=${query.get("step")} />`}<//>
    </main>`;
}

function GroupsPage({ view, step }) {
  const [steps, groups] = [view.steps, view.groups.filter((one) => step === null || (one.step ?? "") === step)];
  const known = steps.find((one) => (one.step ?? "") === step);
  if (view.num_groups === 0) return html`<p class="note">No session has a group${view.num_ungrouped > 0 ? `: ${number(view.num_ungrouped)} sessions have none` : ""}. Open them with <code>group</code>, and with <code>metadata.step</code> where a trainer counts its steps.</p>`;
  const left = view.num_left_out > 0 ? `, ${number(view.num_left_out)} older rollouts are not counted` : "";
  return html`
    <${StepCharts} steps=${steps} />
    <h2>Steps <small>${number(view.num_groups)} groups${left}${view.weights_version === null ? "" : `; the weights are at version ${visible(view.weights_version)}`}</small></h2>
    <${FiguresHead} kind="figures-row" first="step" second="no advantage" />
    <${Rows} num=${steps.length} height=${24} keys=${[steps, step]} label="steps" draw=${(index) => html`<${StepRow} one=${steps[index]} isOn=${steps[index] === known} />`} />
    <h2>Groups <small>${step === null ? (view.groups.length < view.num_groups ? `the newest ${view.groups.length}` : "the newest first") : html`of ${step === "" ? "no step" : `step ${visible(step)}`} · <a href=${placeOf("groups")}>all</a>`}</small></h2>
    <${FiguresHead} kind="figures-row" first="group" second="rewarded" />
    <${Rows} num=${groups.length} height=${24} keys=${[groups]} label="groups" draw=${(index) => html`<${GroupRow} one=${groups[index]} />`} />`;
}
