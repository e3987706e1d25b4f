// What runs now: figures, charts, requests in flight, engines.

import { watchNow } from "./data.js";
import { number, percent, seconds, timeOf, visible } from "./text.js";
import { Chart, Chip, Figure, Quantile, Rows, axisOf, html, sessionPlace, useEffect, useState } from "./ui.js";

const KEPT = 600;
const SHOWN_S = 60; // at least, so that few moments are not spread over years

const spanOf = (low, high) => [Math.min(low, high - SHOWN_S), high];
const clock = (epoch) => timeOf(epoch).slice(11);

function chartOptions(colour, name, unit, least) {
  return {
    height: 120,
    cursor: { y: false },
    legend: { show: false },
    scales: { x: { range: (_, low, high) => spanOf(low, high) }, y: { range: (_, __, high) => [0, Math.max(high, least) * 1.1] } },
    axes: [axisOf(colour, { size: 22, space: 70, values: (_, ticks) => ticks.map(clock) }), axisOf(colour, { values: (_, ticks) => ticks.map(unit), space: 26 })],
    series: [{}, { label: name, stroke: colour("--accent"), fill: colour("--accent-faint"), width: 1.5, points: { show: (plot) => plot.data[0].length === 1 } }],
  };
}

const CHARTS = [
  ["sampled tokens per second", (now) => now.sampled_per_s, (value) => number(Math.round(value * 10) / 10), 1],
  ["turns in flight", (now) => now.num_in_flight, (value) => number(value), 1],
  ["event-loop lag, p99", (now) => now.loop_lag.p99, seconds, 0.001],
  ["time to first token, p50", (now) => now.ttft.p50, seconds, 0.001],
];

export function NowView({ onError }) {
  const [moments, setMoments] = useState([]);
  const [trouble, setTrouble] = useState(null);
  useEffect(() => {
    const ending = new AbortController();
    watchNow(
      (now) => {
        setTrouble(null);
        setMoments((before) => [...before.slice(-KEPT), now]);
      },
      (error) => {
        setTrouble(error.message);
        onError(error);
      },
      ending.signal,
    );
    return () => ending.abort();
  }, []);
  if (moments.length === 0) return html`<p class="note ${trouble === null ? "" : "error"}">${trouble ?? "…"}</p>`;
  const now = moments[moments.length - 1];
  const times = moments.map((one) => one.at);
  return html`
    <main class="page now" data-view="now" data-moments=${moments.length}>
      ${trouble !== null && html`<p class="note error" role="alert">${trouble}</p>`}
      ${now.workers_away > 0 && html`<p class="note error" role="alert">${now.workers_away} of ${now.workers + now.workers_away} workers do not answer: what they do is missing here.</p>`}
      <section class="figures" aria-label="figures">
        <${Figure} name="turns in flight" value=${number(now.num_in_flight)} />
        <${Figure} name="sessions in memory" value=${number(now.num_sessions)} />
        <${Figure} name="tokens held" value=${number(now.num_held_tokens)} />
        <${Figure} name="sampled / s" value=${now.sampled_per_s.toFixed(1)} hint="of the last ten seconds" />
        <${Figure} name="turns / s" value=${now.turns_per_s.toFixed(2)} hint="of the last ten seconds" />
        <${Quantile} name="first token" of=${now.ttft} hint="from a request's first byte to its first token" />
        <${Quantile} name="loop lag" of=${now.loop_lag} hint="how late the event loop was" />
        <${Figure} name="turns since start" value=${number(now.turns)} />
        <${Figure} name="errors since start" value=${number(now.errors)} />
        <${Figure} name="wasted tokens" value=${number(now.wasted_tokens)} hint="sampled for turns that failed or were abandoned" />
        <${Figure} name="weights" value=${now.weights.version === null ? "–" : visible(now.weights.version)}
          unit=${now.weights.changing ? "changing" : now.weights.paused ? "paused" : ""} />
      </section>
      <section class="charts" aria-label="charts">
        ${CHARTS.map(([name, read, unit, least]) => html`<${Chart} key=${name} label=${name}
          data=${[times, moments.map(read)]} options=${(colour) => chartOptions(colour, name, unit, least)} />`)}
      </section>
      <section class="half">
        <h2>Engines${now.workers > 1 ? html` <small>of ${now.workers} workers together</small>` : ""}</h2>
        <table><thead><tr><th>engine</th><th>address</th><th>state</th><th class="num">running</th><th class="num">queue</th><th class="num">memory</th><th>note</th></tr></thead>
          <tbody>${now.engines.map((engine) => html`<tr key=${engine.name}>
            <td>${engine.engine}</td><td class="mono">${visible(engine.name)}</td>
            <td><${Chip} kind=${engine.state === "ready" ? "good" : "bad"}>${engine.state}<//></td>
            <td class="num">${engine.num_running ?? "–"}</td><td class="num">${engine.num_waiting ?? "–"}</td>
            <td class="num">${engine.kv_usage === null ? "–" : percent(engine.kv_usage)}</td><td class="dim">${visible(engine.detail)}</td></tr>`)}
          </tbody></table>
      </section>
      <section class="half">
        <h2>In flight <small>${now.running.length < now.num_in_flight ? `the oldest ${now.running.length} of ` : ""}${now.num_in_flight}</small></h2>
        <${RunningTable} rows=${now.running} />
      </section>
    </main>`;
}

function RunningTable({ rows }) {
  if (rows.length === 0) return html`<p class="note">No turn runs.</p>`;
  return html`
    <div class="grid running head"><span>session</span><span>stage</span><span>kind</span><span class="num">prompt</span><span class="num">sampled</span><span class="num">age</span></div>
    <${Rows} num=${rows.length} height=${22} keys=${[rows]} label="requests in flight" draw=${(index) => {
      const row = rows[index];
      if (row === undefined) return "";
      return html`<div class="grid running">
        <span class="mono">${row.session === null ? html`<span class="dim">stateless</span>` : html`<a href=${sessionPlace(row.session)}>${row.session.slice(0, 12)}</a>`}</span>
        <span><${Chip} kind="stage-${row.stage}">${row.stage}<//></span><span>${row.kind ?? ""}</span>
        <span class="num">${number(row.prompt_tokens)}</span><span class="num">${number(row.sampled_tokens)}</span>
        <span class="num">${seconds(row.age_s)}</span></div>`;
    }} />`;
}
