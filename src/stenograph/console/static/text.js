// Texts of agents, models and tools, made safe to look at: they become text nodes, and nothing in them stays unseen.

const BIDI_NAMES = {
  0x061c: "ALM", 0x200e: "LRM", 0x200f: "RLM", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO",
  0x202e: "RLO", 0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0x200b: "ZWSP", 0xfeff: "BOM",
};
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2066-\u2069\ufeff]/g;

function shownChar(char) {
  const code = char.charCodeAt(0);
  if (code in BIDI_NAMES) return `⟨${BIDI_NAMES[code]}⟩`;
  return code < 0x20 ? String.fromCharCode(0x2400 + code) : `⟨${code.toString(16)}⟩`;
}

// Control and bidirectional characters as marks that one can see; line breaks and tabs stay.
export function visible(text) {
  return text.replace(UNSEEN, shownChar);
}

const RIGHT_TO_LEFT = /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/;

// Whether a text would change the order of what stands around it.
export const turnsAround = (text) => RIGHT_TO_LEFT.test(text);

export function hex(bytes) {
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join(" ");
}

const tokenDecoder = () => new TextDecoder("utf-8", { fatal: false });

// The texts of tokens in a row. A piece of a character is "·"; the token that completes it has the character.
export function tokenTexts(vocabulary, ids) {
  const texts = new Array(ids.length);
  let decoder = tokenDecoder();
  for (let index = 0; index < ids.length; index += 1) {
    const bytes = vocabulary.bytesOf(ids[index]);
    const text = decoder.decode(bytes, { stream: true });
    texts[index] = text === "" && bytes.length > 0 ? "·" : visible(text).replace(/\n/g, "⏎\n").replace(/\t/g, "⇥\t");
    if (vocabulary.isSpecial(ids[index])) decoder = tokenDecoder();
  }
  return texts;
}

export const number = (value) => value.toLocaleString("en-US");
export const percent = (share) => `${(100 * share).toFixed(share > 0.0995 ? 1 : 2)} %`;

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1e3).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 120) return `${value.toFixed(1)} s`;
  if (value < 7200) return `${(value / 60).toFixed(0)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(0)} d`;
}

export function timeOf(epoch) {
  return new Date(epoch * 1000).toISOString().replace("T", " ").slice(0, 19);
}

// A reward as one number: of several by name their mean is no reward, so the names are told.
export function rewardText(outcome) {
  if (!outcome || outcome.reward === null) return "–";
  if (typeof outcome.reward === "number") return String(Number(outcome.reward.toPrecision(6)));
  return Object.entries(outcome.reward).map(([name, value]) => `${visible(name)} ${Number(value.toPrecision(4))}`).join(", ");
}

export function rewardNumber(outcome) {
  if (!outcome || outcome.reward === null) return null;
  return typeof outcome.reward === "number" ? outcome.reward : Object.values(outcome.reward)[0] ?? null;
}
