// The conversation of a line: its turns with their texts, asked for in pages as they come into view.

import { askImage, askTurns, askWholeTurn } from "./data.js";
import { number, seconds, visible } from "./text.js";
import { VirtualRows } from "./rows.js";
import { Chip, html, render, useEffect, useState } from "./ui.js";

const TURNS_AT_ONCE = 20;
const SHORT_CHARS = 1600;

// The turns of one line by their place, each asked for once.
export class TurnStore {
  constructor(id, leaf, num) {
    this.id = id;
    this.leaf = leaf;
    this.num = num;
    this.turns = new Map();
    this.waits = new Map();
  }

  async get(place) {
    const page = Math.floor(place / TURNS_AT_ONCE);
    if (!this.waits.has(page)) {
      const wait = askTurns(this.id, this.leaf, page * TURNS_AT_ONCE, TURNS_AT_ONCE).then(({ turns, start }) => {
        turns.forEach((turn, index) => this.turns.set(start + index, turn));
      });
      wait.catch(() => this.waits.delete(page));
      this.waits.set(page, wait);
    }
    await this.waits.get(page);
    return this.turns.get(place);
  }

  async all(most = 2000) {
    const num = Math.min(this.num, most);
    for (let place = 0; place < num; place += TURNS_AT_ONCE) await this.get(place);
    return Array.from({ length: num }, (_, place) => this.turns.get(place));
  }

  async whole(place) {
    const turn = await askWholeTurn(this.id, this.leaf, place);
    this.turns.set(place, turn);
    return turn;
  }
}

export class ConversationPane {
  constructor(scroller, { onTurn }) {
    this.onTurn = onTurn;
    this.rows = new VirtualRows(scroller, (index) => this.made(index));
    this.current = -1;
    this.closed = false;
  }

  close() {
    this.closed = true;
    this.rows.close();
  }

  open(store) {
    this.store = store;
    this.rows.reset(store.num, () => 160);
    this.rows.update();
  }

  made(place) {
    const element = document.createElement("article");
    element.className = "turn";
    this.draw(element, place);
    return element;
  }

  draw(element, place) {
    const turn = this.store.turns.get(place);
    element.classList.toggle("current", place === this.current);
    if (turn === undefined) {
      render(html`<p class="note waiting">turn ${place} …</p>`, element);
      this.store.get(place).then(
        () => this.closed || !element.isConnected || this.draw(element, place),
        (error) => render(html`<p class="note error">${error.message}</p>`, element),
      );
      return;
    }
    const whole = async () => {
      await this.store.whole(place);
      this.draw(element, place);
    };
    render(html`<${TurnCard} turn=${turn} session=${this.store.id} place=${place} onPick=${() => this.onTurn(place)} onWhole=${whole} />`, element);
  }

  setCurrent(place, bring) {
    this.current = place;
    if (bring) this.rows.show(place);
    for (const [index, element] of this.rows.rows) element.classList.toggle("current", index === place);
  }
}

function TurnCard({ turn, session, place, onPick, onWhole }) {
  const total = Object.values(turn.stages_s).reduce((sum, one) => sum + one, 0);
  const sampled = Object.entries(turn.params).map(([name, value]) => `${name} ${typeof value === "object" ? JSON.stringify(value) : value}`);
  const versions = turn.weights === null ? ["mixed"] : [...new Set(turn.weights.map((span) => span.version))];
  return html`
    <header><button class="pick" onClick=${onPick} title="show its tokens">turn ${place}</button>
      <span class="dim">node ${turn.node}</span>
      <${Chip} kind=${turn.status === "completed" ? "good" : "bad"}>${turn.status}<//>
      <span class="dim" title=${sampled.map(visible).join(", ")}>${turn.finish}${turn.matched === null ? "" : ` by ${typeof turn.matched === "number" ? "token " : ""}${visible(String(turn.matched))}`}</span>
      <span class="dim">prompt ${number(turn.prompt_tokens)}, cached ${number(turn.cached_tokens)}</span>
      ${turn.mean_logprob !== null && html`<span class="dim" title="mean ${turn.logprobs_kind} log-probability of its sampled tokens">ln p̄ ${turn.mean_logprob.toFixed(3)}</span>`}
      ${versions.length > 0 && html`<span class="dim">weights ${versions.map(visible).join(", ")}</span>`}
      <span class="dim">${seconds(total)}</span></header>
    ${turn.left_out > 0 && html`<button class="more" onClick=${onWhole}>${number(turn.left_out)} more messages</button>`}
    ${turn.messages.map((message) => html`<${MessageView} message=${message} session=${session} onWhole=${onWhole} />`)}
    ${turn.rewrites.length > 0 && html`<p class="marks">rewritten by ${[...new Set(turn.rewrites.map((one) => one.rule))].map(visible).join(", ")}</p>`}
    <${MessageView} message=${turn.reply} session=${session} own onWhole=${onWhole} />
    ${turn.faults.map((fault) => html`<p class="marks bad">${fault.problem}: ${visible(fault.seen)}</p>`)}`;
}

// An image of a message, asked for with the page's key; in a file its hash alone.
function Picture({ session, image }) {
  const [url, setUrl] = useState(null);
  useEffect(() => {
    let made = null;
    let isGone = false;
    askImage(session, image.sha256).then(
      (blob) => {
        if (blob === null || isGone) return;
        made = URL.createObjectURL(blob);
        setUrl(made);
      },
      () => undefined,
    );
    return () => {
      isGone = true;
      if (made !== null) URL.revokeObjectURL(made);
    };
  }, [session, image.sha256]);
  const said = `${image.media_type}, ${number(image.num_bytes)} bytes, before character ${number(image.at)}: ${image.sha256}`;
  return url === null ? html`<p class="note">${visible(said)}</p>` : html`<img class="picture" src=${url} alt=${visible(said)} title=${visible(said)} />`;
}

// A message, its long texts shortened; one button shows all of it, asking the server for what it has cut.
function MessageView({ message, session, own = false, onWhole }) {
  const [isOpen, setOpen] = useState(false);
  const texts = [message.reasoning, message.content, ...message.calls.map((call) => call.arguments)].filter((text) => text !== null);
  const hidden = (isOpen ? 0 : texts.reduce((sum, text) => sum + Math.max(0, text.length - SHORT_CHARS), 0)) + message.cut;
  const open = () => {
    setOpen(true);
    if (message.cut > 0) onWhole();
  };
  const shown = (text) => html`<pre class="text">${visible(isOpen ? text : text.slice(0, SHORT_CHARS))}</pre>`;
  return html`
    <section class="message ${message.role} ${own ? "own" : ""}">
      <h3>${own ? "sampled" : message.role}${message.answers === null ? "" : html` <small>answers ${visible(message.answers)}</small>`}</h3>
      ${message.reasoning !== null && html`<details class="reasoning" open=${own}><summary>reasoning</summary>${shown(message.reasoning)}</details>`}
      ${message.content !== null && shown(message.content)}
      ${message.media.map((image) => html`<${Picture} key=${image.sha256} session=${session} image=${image} />`)}
      ${message.calls.map((call) => html`<div class="call"><b>${visible(call.name)}</b>${shown(call.arguments)}</div>`)}
      ${hidden > 0 && html`<button class="more" onClick=${open}>${number(hidden)} more characters</button>`}
    </section>`;
}
