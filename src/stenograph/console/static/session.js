// One session: its turns as a graph, its conversation beside its tokens, and below them what is known of it.

import { askDrift, askSession, askVocabulary, askWhy, isFile } from "./data.js";
import { number, rewardText, visible } from "./text.js";
import { coloursOf, scoresOf, LEGENDS, TokenPane, lineOf, versionClass } from "./tokens.js";
import { ConversationPane, TurnStore } from "./turns.js";
import { TurnGraph } from "./graph.js";
import { DriftTab, FactsTab, LedgerTab, RewritesTab, StagesTab, TABS, WhyTab, isForbidden } from "./drawer.js";
import { Chip, Note, groupPlace, html, sessionPlace, useAsked, useEffect, useMemo, useRef, useState } from "./ui.js";

export function SessionView({ id, query, onError }) {
  const [asked, setAsked] = useState(0);
  const shape = useAsked(() => askSession(id), [id, asked]);
  useEffect(() => { if (shape.error !== null) onError(shape.error); }, [shape.error]);
  return html`<${Note} asked=${shape}>${shape.value !== null
    && html`<${SessionPage} key=${`${id} ${asked}`} id=${id} shape=${shape.value} query=${query} onAgain=${() => setAsked(asked + 1)} />`}<//>`;
}

const numberOf = (query, name) => (query.has(name) ? Number(query.get(name)) : null);

// The last turn of the line that a place names: its own, that of its turn or strand, or the session's.
function leafOf(shape, query) {
  const given = numberOf(query, "leaf");
  const leaves = shape.lines.map((line) => line.leaf);
  if (leaves.includes(given)) return given;
  const node = numberOf(query, "turn") ?? given;
  if (node !== null) {
    const found = [shape.main, ...leaves].find((leaf) => leaf !== null && lineOf(shape, leaf).some((turn) => turn.node === node));
    if (found !== undefined) return found;
  }
  const strand = numberOf(query, "strand");
  if (strand !== null) return shape.strands[strand]?.leaf ?? shape.main;
  return shape.main ?? leaves[leaves.length - 1] ?? null;
}

function SessionPage({ id, shape, query, onAgain }) {
  const leaf = leafOf(shape, query);
  const line = useMemo(() => (leaf === null ? [] : lineOf(shape, leaf)), [shape, leaf]);
  const store = useMemo(() => new TurnStore(id, leaf, line.length), [id, leaf, line]);
  const why = useAsked(() => askWhy(id), [id]);
  // After the findings, which need it too: a long line is compared for seconds.
  const isTold = why.value !== null || why.error !== null;
  const drift = useAsked(() => (isTold ? askDrift(id) : new Promise(() => {})), [id, isTold]);
  const node = numberOf(query, "turn");
  const token = numberOf(query, "token");
  const tab = TABS.includes(query.get("tab")) ? query.get("tab") : "why";
  const colour = coloursOf(shape).includes(query.get("colour")) ? query.get("colour") : "logprob";
  const go = (more) => {
    const now = Object.fromEntries(new URLSearchParams(location.hash.split("?")[1] ?? "")); // it may be newer than `query`
    location.replace(sessionPlace(id, { ...now, ...more }));
  };
  const pick = (picked) => {
    const isHere = line.some((turn) => turn.node === picked);
    go(isHere ? { turn: picked, token: null } : { turn: picked, token: null, leaf: null, strand: null });
  };
  return html`
    <main class="session-page" data-view="session">
      <${SessionHead} id=${id} shape=${shape} leaf=${leaf} drift=${drift} onLeaf=${(wanted) => go({ leaf: wanted, turn: null, token: null, strand: null })} onAgain=${onAgain} />
      <nav class="graph" aria-label="turns">${shape.num_turns === 0 ? html`<p class="note">No turn.</p>` : html`<${TurnGraph} shape=${shape} leaf=${leaf} line=${line} node=${node} onPick=${pick} />`}</nav>
      <${Panes} id=${id} shape=${shape} leaf=${leaf} line=${line} store=${store} drift=${drift} node=${node} token=${token} colour=${colour} onPick=${pick} onColour=${(wanted) => go({ colour: wanted })} />
      <section class="drawer" aria-label="what is known">
        <div class="tabs" role="tablist">${TABS.map((name) => html`<button role="tab" data-tab=${name} aria-selected=${name === tab} onClick=${() => go({ tab: name })}>${name}${name === "why" && why.value !== null ? ` ${why.value.findings.length}` : ""}</button>`)}</div>
        <div class="tab" data-shown=${tab}>
          ${tab === "why" && html`<${WhyTab} why=${why} />`}
          ${tab === "stages" && html`<${StagesTab} store=${store} node=${node} onPick=${pick} />`}
          ${tab === "drift" && html`<${DriftTab} drift=${drift} onToken=${(wanted, at) => go({ leaf: wanted, token: at, turn: null, strand: null })} />`}
          ${tab === "ledger" && html`<${LedgerTab} id=${id} request=${numberOf(query, "request")} created=${shape.created_at} onPick=${pick} />`}
          ${tab === "rewrites" && html`<${RewritesTab} store=${store} onPick=${pick} />`}
          ${tab === "facts" && html`<${FactsTab} shape=${shape} />`}
        </div>
      </section>
    </main>`;
}

function SessionHead({ id, shape, leaf, drift, onLeaf, onAgain }) {
  const outcome = shape.outcome;
  const kinds = new Map(shape.strands.map((one) => [one.strand, one.kind]));
  const mismatches = (drift.value?.lines ?? []).flatMap((line) => line.mismatches ?? []);
  const forbidden = mismatches.filter((one) => isForbidden(one.type)).length;
  return html`
    <header class="session-head">
      <h1 class="mono">${id}</h1>
      ${shape.group !== null && (isFile ? html`<span>group ${visible(shape.group)}</span>` : html`<a href=${groupPlace(shape.group)}>group ${visible(shape.group)}</a>`)}
      <${Chip} kind=${shape.busy ? "stage-busy" : ""}>${shape.busy ? "busy" : "idle"}<//>
      ${outcome === null ? html`<span class="dim">no outcome</span>` : html`<${Chip} kind=${outcome.verdict === "ok" ? "good" : "bad"}>${outcome.verdict}<//><span>reward ${rewardText(outcome)}</span>`}
      <span class="dim">${number(shape.num_turns)} turns, ${number(shape.sampled_tokens)} sampled, ${number(shape.trained_tokens)} trained</span>
      ${shape.discarded.turns > 0 && html`<span class="warn">${number(shape.discarded.sampled_tokens)} tokens discarded</span>`}
      ${drift.value !== null && html`<${Chip} kind=${forbidden > 0 ? "bad" : mismatches.length > 0 ? "" : "good"}>${forbidden > 0 ? `${forbidden} forbidden drift` : mismatches.length > 0 ? `${mismatches.length} tolerated drift` : "no drift"}<//>`}
      <span class="gap"></span>
      ${shape.lines.length > 1 && html`<select aria-label="line" value=${leaf} onChange=${(event) => onLeaf(Number(event.target.value))}>
        ${shape.lines.map((line) => html`<option value=${line.leaf} selected=${line.leaf === leaf}>${kinds.get(line.strand)} · to node ${line.leaf} · ${number(line.num_tokens)} tokens${line.kept ? "" : " · no sample"}</option>`)}</select>`}
      ${!isFile && html`<button onClick=${onAgain} title="ask the server again" data-again>reload</button>`}
    </header>`;
}

// The two panes draw themselves: the view library only says what is to be seen.
function Panes({ id, shape, leaf, line, store, drift, node, token, colour, onPick, onColour }) {
  const talkPlace = useRef(null);
  const tokenPlace = useRef(null);
  const panes = useRef(null);
  const [current, setCurrent] = useState(null);
  const [trouble, setTrouble] = useState(null);
  const [opened, setOpened] = useState(null);
  const onTurn = useRef(null);
  onTurn.current = (place) => onPick(line[place].node);
  useEffect(() => {
    panes.current = {
      talk: new ConversationPane(talkPlace.current, { onTurn: (place) => onTurn.current(place) }),
      tokens: new TokenPane(tokenPlace.current, { onCurrent: setCurrent }),
    };
    return () => { panes.current.talk.close(); panes.current.tokens.close(); };
  }, []);
  useEffect(() => {
    let gone = false;
    askVocabulary(shape.vocabulary).then((vocabulary) => {
      if (gone) return;
      panes.current.talk.open(store);
      panes.current.tokens.open(id, leaf, line, vocabulary, shape.versions, shape.images);
      setOpened(store);
    }, (error) => gone || setTrouble(error.message));
    return () => { gone = true; };
  }, [store]);
  useEffect(() => panes.current.tokens.colourBy(colour), [colour, opened]);
  useEffect(() => {
    const found = drift.value?.lines.find((one) => one.leaf === leaf)?.mismatches ?? [];
    if (opened === store) panes.current.tokens.setDrifts(found.map((one) => ({ start: one.start, end: one.end, forbidden: isForbidden(one.type) })));
  }, [drift.value, opened, leaf]);
  useEffect(() => {
    if (opened !== store || line.length === 0) return;
    const turn = line.find((one) => one.node === node) ?? line.find((one) => token !== null && token < one.end);
    if (turn === undefined) return;
    panes.current.talk.setCurrent(turn.place, true);
    panes.current.tokens.setCurrent(token ?? turn.start, { bring: true }).catch((error) => setTrouble(error.message));
  }, [opened, node, token, leaf]);
  const versions = shape.versions.slice(0, 8).map((name, index) => [versionClass(index + 1), visible(name)]);
  const legend = colour === "version" ? [["v0", "none"], ...versions] : (LEGENDS[colour] ?? LEGENDS.logprob);
  return html`
    <section class="talk-pane" aria-label="conversation"><h2>Conversation</h2><div class="scroller" ref=${talkPlace} tabindex="0" aria-label="conversation"></div></section>
    <section class="token-pane" aria-label="tokens">
      <h2>Tokens <span class="choice" role="radiogroup" aria-label="colour by">${coloursOf(shape).map((name) => html`<button role="radio" data-colour=${name} aria-checked=${name === colour} onClick=${() => onColour(name)}>${scoresOf(name) ?? name}</button>`)}</span>
        <span class="legend">${legend.map(([name, text]) => html`<span><i class="t ${name}"> </i>${text}</span>`)}</span></h2>
      ${trouble !== null && html`<p class="note error" role="alert">${trouble}</p>`}
      <div class="scroller" ref=${tokenPlace} tabindex="0" aria-label="tokens; arrow keys move"></div>
      <output class="facts-line" data-facts>${current === null ? html`<span class="dim">${number(line.length === 0 ? 0 : line[line.length - 1].end)} tokens. A token's facts stand here once it is current: click, or the arrow keys.</span>` : current.facts}</output>
    </section>`;
}
