// A line's tokens: blocks of them in a scroller, coloured by what is asked, one of them current.

import { TOKENS_AT_ONCE, TokenLine, askImage } from "./data.js";
import { hex, number, percent, tokenTexts, turnsAround, visible } from "./text.js";
import { VirtualRows } from "./rows.js";

const BLOCK_TOKENS = 128;
const LEVELS = [0.05, 0.2, 0.7, 1.6, 3, 5, 8];
export const SOURCES = ["prompt", "bridge", "sampled", "forced"];
export const COLOURS = ["logprob", "mask", "source", "version"];
const SCORES = "scores:";
export const coloursOf = (shape) => [...COLOURS, ...(shape.scores ?? []).map((name) => SCORES + name)];
// The annotation that stands in place of the log-probabilities, if a colour names one.
export const scoresOf = (colour) => (colour.startsWith(SCORES) ? colour.slice(SCORES.length) : null);
export const LEGENDS = {
  logprob: ["p > 95 %", "82 %", "50 %", "20 %", "5 %", "0.7 %", "0.03 %", "less"].map((text, index) => [`l${index}`, text]),
  mask: [["m1", "trained"], ["m0", "not trained"]],
  source: SOURCES.map((text, index) => [`s${index}`, text]),
};

function levelOf(logprob) {
  if (Number.isNaN(logprob)) return "n";
  let level = 0;
  while (level < LEVELS.length && -logprob > LEVELS[level]) level += 1;
  return level;
}

export const versionClass = (index) => (index === 0 ? "v0" : `v${1 + ((index - 1) % 8)}`);

// Of a drift its first tokens are marked: one of a whole line would hide all others.
const endOf = (drift) => Math.max(Math.min(drift.end, drift.start + 64), drift.start + 1);

// The turns of a line, by the columns of its session: where each begins and ends in the line.
export function lineOf(shape, leaf) {
  const columns = shape.turns;
  const at = new Map(columns.id.map((id, index) => [id, index]));
  const path = [];
  for (let id = leaf; id !== -1 && at.has(id); id = columns.parent[at.get(id)]) path.push(at.get(id));
  path.reverse();
  return path.map((index, place) => {
    const end = columns.num_tokens[index];
    const start = end - columns.num_sampled[index];
    const trimmed = place + 1 < path.length ? columns.num_trimmed[path[place + 1]] : 0;
    return {
      node: columns.id[index],
      place,
      promptStart: start - columns.num_prompt[index],
      start,
      end: end - trimmed,
      status: columns.statuses[columns.status[index]],
      trained: columns.num_trained[index],
    };
  });
}

function blocksOf(line) {
  const blocks = [];
  for (const turn of line) {
    for (const [from, to, sampled] of [[turn.promptStart, turn.start, false], [turn.start, turn.end, true]]) {
      for (let start = from; start < to; start += BLOCK_TOKENS) {
        blocks.push({ turn, sampled, start, end: Math.min(start + BLOCK_TOKENS, to), heads: start === from, num: to - from });
      }
    }
  }
  return blocks;
}

export class TokenPane {
  // `onCurrent` hears of the current token, with all that is known of it.
  constructor(scroller, { onCurrent }) {
    this.scroller = scroller;
    this.onCurrent = onCurrent;
    this.rows = new VirtualRows(scroller, (index) => this.made(index));
    this.blocks = [];
    this.current = -1;
    this.drifts = [];
    this.closed = false;
    scroller.addEventListener("click", (event) => {
      const token = event.target.closest("[data-at]");
      if (token !== null) this.setCurrent(Number(token.dataset.at));
    });
    scroller.addEventListener("keydown", (event) => this.key(event));
  }

  close() {
    this.closed = true;
    this.rows.close();
  }

  colourBy(colour) {
    const scores = scoresOf(colour);
    for (const one of COLOURS) this.scroller.classList.toggle(`by-${one}`, one === (scores === null ? colour : "logprob"));
    if (scores === this.scores || this.tokens === undefined) return;
    this.scores = scores;
    this.tokens = new TokenLine(this.id, this.leaf, scores);
    this.redraw();
    if (this.current >= 0) this.setCurrent(this.current);
  }

  open(id, leaf, line, vocabulary, versions, images) {
    this.id = id;
    this.images = images.filter((one) => line.some((turn) => turn.node === one.node));
    this.leaf = leaf;
    this.scores = null;
    this.tokens = new TokenLine(id, leaf);
    this.vocabulary = vocabulary;
    this.versions = versions;
    this.line = line;
    this.blocks = blocksOf(line);
    this.current = -1;
    const wide = Math.max(20, Math.floor((this.scroller.clientWidth - 24) / 7.3));
    this.rows.reset(this.blocks.length, (index) => {
      const block = this.blocks[index];
      return Math.ceil(((block.end - block.start) * 4.6) / wide) * 20 + (block.heads ? 24 : 0);
    });
    this.rows.update();
  }

  setDrifts(drifts) {
    this.drifts = drifts;
    this.redraw();
  }

  redraw() {
    for (const row of this.rows.rows.values()) this.rows.drop(row);
    this.rows.rows.clear();
    this.rows.update();
  }

  blockAt(at) {
    let low = 0;
    let high = this.blocks.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.blocks[middle].start <= at) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // A block's element; its tokens come when their page is here.
  made(index) {
    const block = this.blocks[index];
    const element = document.createElement("div");
    element.className = `block ${block.sampled ? "sampled" : "prompt"}${block.heads ? "" : " goes-on"}`;
    if (block.heads) {
      const head = document.createElement("div");
      head.className = "block-head";
      const what = block.sampled ? `sampled ${number(block.num)}` : `prompt +${number(block.num)}`;
      head.textContent = `turn ${block.turn.place} · ${what}${block.sampled ? ` · ${block.turn.status}` : ""}`;
      element.append(head);
    }
    const place = document.createElement("div");
    place.className = "tokens";
    element.append(place);
    const tokens = this.tokens;
    const missing = [block.start, block.end - 1].filter((at) => tokens.here(at) === undefined);
    if (missing.length === 0) {
      this.fill(place, block);
      return element;
    }
    place.style.height = `${this.rows.heights[index] - (block.heads ? 24 : 0)}px`;
    place.classList.add("loading");
    Promise.all(missing.map((at) => tokens.load(at))).then(
      () => {
        if (this.closed || tokens !== this.tokens) return;
        place.style.height = "";
        place.classList.remove("loading");
        this.fill(place, block);
        this.rows.soon();
      },
      (error) => { place.textContent = error.message; },
    );
    return element;
  }

  read(at) {
    const page = this.tokens.here(at);
    const index = at - page.start;
    return { id: page.ids[index], logprob: page.logprobs[index], flags: page.flags[index] };
  }

  fill(place, block) {
    const num = block.end - block.start;
    const ids = new Uint32Array(num);
    for (let index = 0; index < num; index += 1) ids[index] = this.read(block.start + index).id;
    const texts = this.vocabulary === null ? Array.from(ids, (id) => `[${id}]`) : tokenTexts(this.vocabulary, ids);
    const made = document.createDocumentFragment();
    const drifts = this.drifts.filter((drift) => drift.start < block.end && endOf(drift) > block.start);
    for (let index = 0; index < num; index += 1) {
      const at = block.start + index;
      const { id, logprob, flags } = this.read(at);
      const token = document.createElement("span");
      let names = `t l${levelOf(logprob)} m${flags & 1} s${(flags >> 1) & 3} ${versionClass(flags >> 3)}`;
      if (this.vocabulary?.isSpecial(id)) names += " sp";
      for (const drift of drifts) {
        if (at >= drift.start && at < endOf(drift)) names += drift.forbidden ? " bad" : " odd";
      }
      if (turnsAround(texts[index])) names += " rtl";
      if (at === this.current) names += " current";
      token.className = names;
      token.dataset.at = at;
      token.textContent = texts[index] === "" ? "∅" : texts[index];
      for (const image of this.images) if (image.at === at) this.picture(token, image);
      made.append(token);
    }
    place.replaceChildren(made);
  }

  picture(token, { sha256, length }) {
    token.textContent += `×${length}`;
    askImage(this.id, sha256).then((blob) => {
      if (blob === null || this.closed) return;
      const shown = new Image();
      shown.onload = () => { URL.revokeObjectURL(shown.src); this.rows.soon(); };
      shown.src = URL.createObjectURL(blob);
      token.prepend(shown);
    }, () => undefined);
  }

  factsOf(at) {
    const { id, logprob, flags } = this.read(at);
    const block = this.blocks[this.blockAt(at)];
    const bytes = this.vocabulary?.bytesOf(id) ?? new Uint8Array();
    const version = flags >> 3;
    const facts = [
      `#${number(at)}`,
      `id ${id}`,
      this.vocabulary === null ? "text unknown" : JSON.stringify(visible(new TextDecoder().decode(bytes))),
      `bytes ${hex(bytes)}`,
      Number.isNaN(logprob) ? (this.scores === null ? "not sampled" : "not scored") : `ln p ${this.scores === null ? "" : `by ${this.scores} `}${logprob.toFixed(4)} (${percent(Math.exp(logprob))})`,
      SOURCES[(flags >> 1) & 3],
      flags & 1 ? "trained" : "not trained",
      version === 0 ? "no version" : `version ${version === 31 ? "31st or later" : visible(this.versions[version - 1])}`,
      `turn ${block.turn.place} (node ${block.turn.node})`,
    ];
    if (this.images.length > 0) facts.push(this.inSamples(at));
    return facts.join("  ");
  }

  // The tokens that samples have in the place of one: an engine ran many for an image.
  inSamples(at) {
    const first = this.images.reduce((sum, one) => sum + (one.at < at ? one.length - 1 : 0), at);
    const image = this.images.find((one) => one.at === at);
    if (image === undefined) return `in samples #${number(first)}`;
    return `in samples #${number(first)} to #${number(first + image.length - 1)}, image ${image.sha256.slice(0, 12)}`;
  }

  async setCurrent(at, { bring = false } = {}) {
    if (this.blocks.length === 0) return;
    const wanted = Math.max(0, Math.min(at, this.blocks[this.blocks.length - 1].end - 1));
    this.current = wanted;
    if (bring) this.rows.show(this.blockAt(wanted), 40);
    const tokens = this.tokens;
    await tokens.load(wanted);
    if (this.closed || tokens !== this.tokens || this.current !== wanted) return;
    this.scroller.querySelector(".t.current")?.classList.remove("current");
    let token = this.scroller.querySelector(`[data-at="${wanted}"]`);
    if (token === null) {
      this.rows.show(this.blockAt(wanted), 40);
      token = this.scroller.querySelector(`[data-at="${wanted}"]`);
    }
    token?.classList.add("current");
    if (bring) token?.scrollIntoView({ block: "center" });
    else token?.scrollIntoView({ block: "nearest" });
    this.onCurrent({ at: wanted, turn: this.blocks[this.blockAt(wanted)].turn, facts: this.factsOf(wanted) });
  }

  key(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1, PageDown: TOKENS_AT_ONCE / 16, PageUp: -TOKENS_AT_ONCE / 16 };
    let to = null;
    if (event.key in steps) to = Math.max(this.current, 0) + steps[event.key];
    else if (event.key === "Home") to = 0;
    else if (event.key === "End" && this.blocks.length > 0) to = this.blocks[this.blocks.length - 1].end - 1;
    if (to === null || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.setCurrent(to, { bring: Math.abs(to - this.current) > 1 });
  }
}
