// All sessions, the newest first, with what makes one worth opening.

import { askDriftCounts, askNow, askSessions } from "./data.js";
import { number, rewardNumber, rewardText, timeOf, visible } from "./text.js";
import { Chip, Rows, groupPlace, html, sessionPlace, useEffect, useMemo, useRef, useState } from "./ui.js";

const PAGE = 1000;
const MOST = 20000;
const EVERY_MS = 3000;
const MANY = 2000;
const EVERY_MS_OF_MANY = 15000;
const COMPARED_TOKENS = 65536; // longer ones are compared when somebody clicks: it takes seconds of a core
const ANY = 1e9;
const MOST_WANTED = 60;

const SORTS = {
  created: (row) => row.created_at,
  turns: (row) => row.num_turns,
  tokens: (row) => row.num_tokens,
  discarded: (row) => row.discarded.sampled_tokens,
  reward: (row) => rewardNumber(row.outcome) ?? -Infinity,
};

async function allSessions(tell, gone) {
  let after = null;
  let rows = [];
  while (rows.length < MOST) {
    const page = await askSessions(after, PAGE);
    if (gone()) return;
    rows = [...rows, ...page.sessions];
    after = page.next;
    tell(rows, after !== null);
    if (after === null) return;
  }
}

// The drift of the sessions that are looked at: asked for one at a time, what came into view last first.
class DriftBoard {
  constructor(tell) {
    this.tell = tell;
    this.known = new Map();
    this.wanted = new Map();
    this.isAsking = false;
  }

  // What is known of a session; what is not is asked for, unless it is at work or long.
  of(row) {
    const found = this.known.get(row.session_id);
    const isNew = found === undefined || found.revision !== `${row.num_turns} ${row.num_tokens}`;
    if (isNew && !row.busy && row.num_turns > 0 && row.num_tokens <= COMPARED_TOKENS) this.want(row, COMPARED_TOKENS);
    return found?.counts ?? null;
  }

  want(row, most) {
    this.wanted.delete(row.session_id);
    this.wanted.set(row.session_id, [row, most]);
    if (this.wanted.size > MOST_WANTED) this.wanted.delete(this.wanted.keys().next().value);
    if (!this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    while (this.wanted.size > 0) {
      const [row, most] = [...this.wanted.values()].pop();
      this.wanted.delete(row.session_id);
      const counts = await askDriftCounts(row.session_id, most).catch(() => null);
      this.known.set(row.session_id, { revision: `${row.num_turns} ${row.num_tokens}`, counts });
      this.tell(this.known.size);
    }
    this.isAsking = false;
  }

  close() {
    this.wanted.clear();
    this.tell = () => {};
  }
}

const stagesOf = (now) => new Map(now.running.filter((row) => row.session !== null).map((row) => [row.session, row.stage]));

export function SessionsView({ query, onError }) {
  const [rows, setRows] = useState(null);
  const [hasMore, setHasMore] = useState(false);
  const [stages, setStages] = useState(new Map());
  const [filter, setFilter] = useState(query.get("filter") ?? "");
  const [sort, setSort] = useState({ by: "created", down: true });
  const input = useRef(null);
  const [told, setTold] = useState({});
  const drifts = useMemo(() => new DriftBoard(() => setTold({})), []);
  useEffect(() => () => drifts.close(), []);
  useEffect(() => {
    let gone = false;
    let timer = 0;
    let num = 0;
    const look = async () => {
      try {
        const [now] = await Promise.all([askNow(), allSessions((found, more) => { num = found.length; setRows(found); setHasMore(more); }, () => gone)]);
        if (!gone) setStages(stagesOf(now));
      } catch (error) {
        if (!gone) onError(error);
      }
      if (!gone) timer = setTimeout(look, num > MANY ? EVERY_MS_OF_MANY : EVERY_MS);
    };
    look();
    return () => { gone = true; clearTimeout(timer); };
  }, []);
  const shown = useMemo(() => {
    const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
    const found = (rows ?? []).filter((row) => {
      const text = `${row.session_id} ${row.group ?? ""} ${row.outcome?.verdict ?? ""} ${row.busy ? "busy" : "idle"} ${JSON.stringify(row.metadata)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const read = SORTS[sort.by];
    return found.sort((one, other) => (sort.down ? read(other) - read(one) : read(one) - read(other)));
  }, [rows, filter, sort]);
  if (rows === null) return html`<p class="note">…</p>`;
  const head = (by, text) => html`<button class="sort num ${sort.by === by ? "on" : ""}"
    onClick=${() => setSort({ by, down: sort.by === by ? !sort.down : true })}>${text}${sort.by === by ? (sort.down ? " ↓" : " ↑") : ""}</button>`;
  return html`
    <main class="page sessions" data-view="sessions">
      <div class="bar"><input ref=${input} type="search" data-filter aria-label="filter" placeholder="filter by id, group, verdict, metadata   ( / )"
          value=${filter} onInput=${(event) => setFilter(event.target.value)} />
        <span class="dim">${number(shown.length)} of ${number(rows.length)}${hasMore ? " and more" : ""}</span></div>
      <div class="grid session head"><span>session</span><span>group</span><span>state</span>${head("turns", "turns")}<span class="num">strands</span>${head("tokens", "tokens")}${head("discarded", "discarded")}<span class="num">drift</span>${head("reward", "reward")}<span>verdict</span>${head("created", "opened (UTC)")}<span>metadata</span></div>
      ${shown.length === 0 ? html`<p class="note">No session${filter ? " matches" : ""}.</p>` : html`
      <${Rows} num=${shown.length} height=${24} keys=${[shown, stages, told]} label="sessions" draw=${(index) => html`<${SessionRow} row=${shown[index]} stage=${stages.get(shown[index]?.session_id)} drifts=${drifts} />`} />`}
    </main>`;
}

function DriftCell({ row, drifts }) {
  const counts = drifts.of(row);
  if (row.num_turns === 0) return html`<span class="num dim">–</span>`;
  if (counts === null || !counts.known) {
    return html`<span class="num"><button class="pick" title="nobody has compared its lines with the template yet: compare them" onClick=${() => drifts.want(row, ANY)}>?</button></span>`;
  }
  if (counts.forbidden > 0) return html`<span class="num warn">${number(counts.forbidden)} forbidden</span>`;
  const text = counts.tolerated > 0 ? number(counts.tolerated) : counts.unrenderable === counts.lines ? "n/a" : "none";
  return html`<span class="num dim" title="${number(counts.tolerated)} tolerated, ${counts.unrenderable} of ${counts.lines} lines cannot be compared">${text}</span>`;
}

function SessionRow({ row, stage, drifts }) {
  if (row === undefined) return "";
  const verdict = row.outcome?.verdict ?? null;
  return html`<div class="grid session">
    <span class="mono"><a href=${sessionPlace(row.session_id)}>${row.session_id}</a></span>
    <span>${row.group === null ? "" : html`<a href=${groupPlace(row.group)}>${visible(row.group)}</a>`}</span>
    <span>${row.busy ? html`<${Chip} kind="stage-${stage ?? "busy"}">${stage ?? "busy"}<//>` : html`<span class="dim">${row.busy === null ? "not known here" : "idle"}</span>`}</span>
    <span class="num">${number(row.num_turns)}</span><span class="num">${row.num_strands}</span><span class="num">${number(row.num_tokens)}</span>
    <span class="num ${row.discarded.turns ? "warn" : "dim"}">${row.discarded.turns ? number(row.discarded.sampled_tokens) : "–"}</span>
    <${DriftCell} row=${row} drifts=${drifts} />
    <span class="num">${rewardText(row.outcome)}</span>
    <span>${verdict === null ? html`<span class="dim">–</span>` : html`<${Chip} kind=${verdict === "ok" ? "good" : "bad"}>${verdict}<//>`}</span>
    <span class="num dim">${timeOf(row.created_at)}</span>
    <span class="dim cut">${Object.keys(row.metadata).length === 0 ? "" : visible(JSON.stringify(row.metadata))}</span></div>`;
}
