// Where every sampled token went: fates by group, session, step or cause, and the reasons of a group.

import { askAccounts, askGroupFates } from "./data.js";
import { number, visible } from "./text.js";
import { Figure, Note, Rows, html, placeOf, sessionPlace, useAsked, useEffect, useState } from "./ui.js";

const BY = ["group", "session", "step", "cause"];
const share = (part, whole) => (whole === 0 ? "" : `${((100 * part) / whole).toFixed(1)} %`);
const named = (key) => (key === null ? "–" : visible(String(key)));

function Key({ by, one }) {
  if (by === "group" && one.key !== null) return html`<a href=${placeOf("accounts", { group: one.key })}>${named(one.key)}</a>`;
  if (by === "session" && one.key !== null) return html`<a href=${sessionPlace(one.key)}>${one.key}</a>`;
  return named(one.key);
}

function Fates({ view }) {
  const fates = Object.entries(view.whole.tokens).filter(([, num]) => num > 0).map(([fate]) => fate);
  const cost = (row) => (row.cost === null ? "" : ` · ${row.cost.toFixed(2)}`);
  return html`
    <section class="figures">${fates.map((fate) => html`<${Figure} name=${fate} value=${number(view.whole.tokens[fate])} hint=${share(view.whole.tokens[fate], view.whole.sampled)} />`)}</section>
    <h2>By ${view.by} <small>${number(view.whole.sampled)} tokens${cost(view.whole)}, ${number(view.live_sessions)} sessions and ${number(view.ended_sessions)} that ended${view.left_out > 0 ? `, ${number(view.left_out)} rows are not shown` : ""}</small></h2>
    <${Rows} num=${view.rows.length} height=${24} keys=${[view]} label="accounts" draw=${(index) => {
      const one = view.rows[index];
      return html`<span><${Key} by=${view.by} one=${one} /> <b>${number(one.sampled)}</b>${cost(one)} <span class="dim">${fates.filter((fate) => one.tokens[fate] > 0).map((fate) => `${fate} ${share(one.tokens[fate], one.sampled)}`).join(", ")}</span></span>`;
    }} />`;
}

function Why({ group, onError }) {
  const asked = useAsked(() => askGroupFates(group), [group]);
  useEffect(() => { if (asked.error !== null) onError(asked.error); }, [asked.error]);
  return html`<h2>Why, in ${visible(group)} <small><a href=${placeOf("accounts")}>all groups</a></small></h2>
    <${Note} asked=${asked}>${asked.value !== null && html`<${Rows} num=${asked.value.rows.length} height=${24} keys=${[asked.value]} label="fates" draw=${(index) => {
      const row = asked.value.rows[index];
      return html`<span>${row.session === null ? "ended" : html`<a href=${sessionPlace(row.session)}>${row.session.slice(0, 8)}</a>`} ${row.node === null ? "" : `turn ${row.node}`} <b>${number(row.tokens)}</b> ${row.fate} <span class="dim">${visible(row.cause)}</span></span>`;
    }} />`}<//>`;
}

export function AccountsView({ query, onError }) {
  const [by, setBy] = useState("group");
  const [tries, setTries] = useState(0);
  const group = query.get("group");
  const asked = useAsked(() => askAccounts(by, group), [by, group, tries]);
  useEffect(() => { if (asked.error !== null) onError(asked.error); }, [asked.error]);
  return html`
    <main class="page" data-view="accounts">
      <header class="bar"><h1>Accounts</h1>
        <label class="dim">by <select value=${by} onChange=${(event) => setBy(event.target.value)}>${BY.map((one) => html`<option>${one}</option>`)}</select></label>
        <button onClick=${() => setTries(tries + 1)} title="ask the server again" data-again>reload</button></header>
      <${Note} asked=${asked}>${asked.value !== null && html`<${Fates} view=${asked.value} />`}<//>
      ${group !== null && html`<${Why} key=${group} group=${group} onError=${onError} />`}
    </main>`;
}
