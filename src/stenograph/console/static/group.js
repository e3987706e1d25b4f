// The rollouts of a group side by side: rewards, lengths, and where their tokens part.

import { askGroup } from "./data.js";
import { number, rewardNumber, rewardText, visible } from "./text.js";
import { Chart, Chip, Note, Rows, axisOf, html, sessionPlace, useAsked, useEffect, useMemo } from "./ui.js";

const BINS = 16;
const FEW = 3;

// Bars of equal width; rewards of few values have a bar for each, in its place.
function binsOf(rewards) {
  const values = [...new Set(rewards)].sort((one, other) => one - other);
  if (values.length <= FEW) return [values, values.map((value) => rewards.filter((one) => one === value).length)];
  const [low, high] = [values[0], values[values.length - 1]];
  const width = (high - low) / BINS;
  const counts = new Array(BINS).fill(0);
  for (const reward of rewards) counts[Math.min(Math.floor((reward - low) / width), counts.length - 1)] += 1;
  return [counts.map((_, index) => low + (index + 0.5) * width), counts];
}

function histogramOptions(colour) {
  return {
    height: 130,
    cursor: { y: false },
    legend: { show: false },
    scales: { x: { time: false, range: (_, low, high) => (high === low ? [low - 1, high + 1] : [low - (high - low) / BINS, high + (high - low) / BINS]) }, y: { range: (_, __, high) => [0, Math.max(1, high)] } },
    axes: [axisOf(colour, { size: 22, space: 50 }), axisOf(colour, { space: 26, incrs: [1, 2, 5, 10, 20, 50, 100] })],
    series: [{}, { label: "rollouts", stroke: colour("--accent"), fill: colour("--accent-faint"), width: 1.5, points: { show: false }, paths: uPlot.paths.bars({ size: [0.9, 60] }) }],
  };
}

export function GroupView({ name, onError }) {
  const asked = useAsked(() => askGroup(name), [name]);
  useEffect(() => { if (asked.error !== null) onError(asked.error); }, [asked.error]);
  return html`<${Note} asked=${asked}>${asked.value !== null && html`<${GroupPage} view=${asked.value} />`}<//>`;
}

function GroupPage({ view }) {
  const rollouts = view.rollouts;
  const rewards = rollouts.map((one) => rewardNumber(one.outcome)).filter((reward) => reward !== null);
  const bins = useMemo(() => binsOf(rewards), [view]);
  const longest = Math.max(1, ...rollouts.map((one) => one.num_tokens));
  const mean = rewards.length === 0 ? null : rewards.reduce((sum, one) => sum + one, 0) / rewards.length;
  const spread = mean === null ? null : Math.sqrt(rewards.reduce((sum, one) => sum + (one - mean) ** 2, 0) / rewards.length);
  return html`
    <main class="page group" data-view="group">
      <header class="bar"><h1>${visible(view.group)}</h1><span class="dim">${rollouts.length} rollouts${view.num_left_out > 0 ? `, ${view.num_left_out} more are not shown` : ""}</span>
        ${mean !== null && html`<span>reward ${mean.toFixed(4)} ± ${spread.toFixed(4)}</span>${spread === 0 && rewards.length > 1 && html`<${Chip} kind="bad">all rewards are equal: no advantage<//>`}`}</header>
      ${bins[0].length > 1 && html`<${Chart} label="rewards" data=${bins} options=${histogramOptions} />`}
      ${bins[0].length === 1 && html`<p class="note">${rewards.length === 1 ? "One rollout has a reward" : `All ${rewards.length} rewards are the same`}: ${bins[0][0]}.</p>`}
      <h2>Where their tokens part <small>each line up to ${number(longest)} tokens; those that go together for long stand together; the mark is where a line leaves the one above it</small></h2>
      <div class="legend"><span><i class="t s0"> </i>prompt</span><span><i class="t s1"> </i>bridge</span><span><i class="t s2"> </i>sampled</span></div>
      <div class="grid rollout head"><span>session</span><span class="num">reward</span><span>verdict</span><span class="num">turns</span><span class="num">tokens</span><span class="num">sampled</span><span class="num">parts at</span><span>line</span></div>
      ${rollouts.length === 0 ? html`<p class="note">No session has this group.</p>` : html`
      <${Rows} num=${rollouts.length} height=${26} keys=${[view]} label="rollouts" draw=${(index) => html`<${RolloutRow} one=${rollouts[index]} longest=${longest} compared=${view.compared_tokens} />`} />`}
    </main>`;
}

function RolloutRow({ one, longest, compared }) {
  if (one === undefined) return "";
  const share = (at) => `${(100 * at) / longest}%`;
  const verdict = one.outcome?.verdict ?? null;
  const parts = one.parts_at === null ? "–" : one.parts_at >= one.num_tokens ? "nowhere" : one.parts_at >= compared ? `≥ ${number(compared)}` : number(one.parts_at);
  const place = sessionPlace(one.session_id, { token: one.parts_at !== null && one.parts_at < one.num_tokens ? one.parts_at : null });
  return html`<div class="grid rollout">
    <span class="mono"><a href=${place}>${one.session_id.slice(0, 16)}</a></span><span class="num">${rewardText(one.outcome)}</span>
    <span>${verdict === null ? html`<span class="dim">–</span>` : html`<${Chip} kind=${verdict === "ok" ? "good" : "bad"}>${verdict}<//>`}</span>
    <span class="num" data-name="turns">${one.num_turns}</span><span class="num" data-name="tokens">${number(one.num_tokens)}</span><span class="num" data-name="sampled">${number(one.sampled_tokens)}</span><span class="num" data-name="parts at">${parts}</span>
    <svg class="strip" width="100%" height="18" role="img" aria-label="${one.num_tokens} tokens, parts at ${parts}">
      ${one.spans.map((span, index) => html`<rect class=${index === 0 ? "s0" : "s1"} x=${share(span.prompt_start)} width=${share(span.start - span.prompt_start)} y="3" height="12" /><rect class="s2" x=${share(span.start)} width=${share(span.end - span.start)} y="3" height="12" />`)}
      ${one.parts_at !== null && html`<line class="parts" x1=${share(one.parts_at)} x2=${share(one.parts_at)} y1="0" y2="18" />`}
    </svg></div>`;
}
