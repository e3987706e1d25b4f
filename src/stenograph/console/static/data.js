// The data that the page shows: asked of the server that sent it, or read from the file that it is.

const embeddedElement = document.getElementById("stenograph-data");
const embeddedData = embeddedElement === null ? null : JSON.parse(embeddedElement.textContent);
const KEY_NAME = "stenograph-key";

export const isFile = embeddedData !== null;
export const fileSession = isFile ? embeddedData.session : null;
export const TOKENS_AT_ONCE = 8192;

export class KeyWanted extends Error {}

export function setKey(key) {
  sessionStorage.setItem(KEY_NAME, key);
}

function headersOf(accept) {
  const key = sessionStorage.getItem(KEY_NAME);
  return key === null ? { accept } : { accept, authorization: `Bearer ${key}` };
}

async function asked(path, accept, signal) {
  const answer = await fetch(path, { headers: headersOf(accept), signal });
  if (answer.status === 401) throw new KeyWanted("This server asks for a key.");
  if (!answer.ok) {
    const told = await answer.json().catch(() => null);
    throw new Error(told?.error?.message ?? `The server answered ${answer.status}.`);
  }
  return answer;
}

async function json(path) {
  if (!isFile) return (await asked(path, "application/json")).json();
  if (!(path in embeddedData.json)) throw new Error("This is not in the file: it has one session.");
  return embeddedData.json[path];
}

async function bytes(path) {
  if (!isFile) return (await asked(path, "application/octet-stream")).arrayBuffer();
  const packed = Uint8Array.from(atob(embeddedData.bytes[path]), (char) => char.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).arrayBuffer();
}

const sessionPath = (id) => `console/api/sessions/${encodeURIComponent(id)}`;

export const askSession = (id) => json(sessionPath(id));
export const askWhy = (id) => json(`sessions/${encodeURIComponent(id)}/why`);
export const askDrift = (id) => json(`sessions/${encodeURIComponent(id)}/drift`);
export const askDriftCounts = (id, most) => json(`${sessionPath(id)}/drift?most_tokens=${most}`);
export const askGroup = (name) => json(`console/api/group?name=${encodeURIComponent(name)}`);
export const askGroups = (passesAt) => json(`console/api/groups?passes_at=${encodeURIComponent(passesAt)}`);
export const askAccounts = (by, group) => json(`accounts?by=${by}${group === null ? "" : `&group=${encodeURIComponent(group)}`}`);
export const askGroupFates = (group) => json(`accounts/why?group=${encodeURIComponent(group)}`);
export const askNow = () => json("console/api/now");

export function askSessions(after, limit) {
  return json(`sessions?limit=${limit}${after === null ? "" : `&after=${after}`}`);
}

export async function askLedger(id, after) {
  if (isFile) return json(`sessions/${id}/ledger`);
  return json(`sessions/${encodeURIComponent(id)}/ledger?limit=1000&after=${after}`);
}

// The bytes of an image; a file has none.
export async function askImage(id, sha256) {
  if (isFile) return null;
  return (await asked(`sessions/${encodeURIComponent(id)}/media/${sha256}`, "image/*")).blob();
}

export async function askTurns(id, leaf, start, limit) {
  if (isFile) {
    const page = await json(`${sessionPath(id)}/turns?leaf=${leaf}`);
    return { ...page, start, turns: page.turns.slice(start, start + limit) };
  }
  return json(`${sessionPath(id)}/turns?leaf=${leaf}&start=${start}&limit=${limit}`);
}

export async function askWholeTurn(id, leaf, index) {
  if (isFile) return (await askTurns(id, leaf, index, 1)).turns[0];
  return (await json(`${sessionPath(id)}/turns?leaf=${leaf}&start=${index}&limit=1&whole=true`)).turns[0];
}

// One line's tokens, in pages that are asked for when they come into view. A page is three arrays.
export class TokenLine {
  constructor(id, leaf, scores = null) {
    this.path = `${sessionPath(id)}/tokens?leaf=${leaf}${scores === null ? "" : `&scores=${encodeURIComponent(scores)}`}`;
    this.pages = new Map();
    this.waits = new Map();
    this.whole = null;
  }

  // The page that token `at` is in, if it is here.
  here(at) {
    return this.pages.get(Math.floor(at / TOKENS_AT_ONCE));
  }

  load(at) {
    const number = Math.floor(at / TOKENS_AT_ONCE);
    if (!this.waits.has(number)) {
      const wait = this.fetched(number).then(
        (page) => this.pages.set(number, page),
        (error) => { this.waits.delete(number); throw error; },
      );
      this.waits.set(number, wait);
    }
    return this.waits.get(number);
  }

  async fetched(number) {
    const start = number * TOKENS_AT_ONCE;
    if (isFile) {
      this.whole ??= bytes(this.path);
      const whole = tokenArrays(await this.whole, 0);
      const part = (array) => array.subarray(start, start + TOKENS_AT_ONCE);
      return { start, ids: part(whole.ids), logprobs: part(whole.logprobs), flags: part(whole.flags) };
    }
    return tokenArrays(await bytes(`${this.path}&start=${start}&limit=${TOKENS_AT_ONCE}`), start);
  }
}

// Nine bytes a token: ids, log-probabilities, flags (docs/console.md).
function tokenArrays(buffer, start) {
  const num = buffer.byteLength / 9;
  return {
    start,
    ids: new Uint32Array(buffer, 0, num),
    logprobs: new Float32Array(buffer, 4 * num, num),
    flags: new Uint8Array(buffer, 8 * num, num),
  };
}

export class Vocabulary {
  constructor(buffer) {
    const num = new DataView(buffer).getUint32(0, true);
    const endsAt = 4 + num + ((4 - (num % 4)) % 4);
    this.num = num;
    this.kinds = new Uint8Array(buffer, 4, num);
    this.ends = new Uint32Array(buffer, endsAt, num);
    this.text = new Uint8Array(buffer, endsAt + 4 * num);
  }

  bytesOf(id) {
    if (id >= this.num) return this.text.subarray(0, 0);
    return this.text.subarray(id === 0 ? 0 : this.ends[id - 1], this.ends[id]);
  }

  isSpecial(id) {
    return id < this.num && this.kinds[id] > 0;
  }
}

const vocabularies = new Map();

export function askVocabulary(ref) {
  if (ref === null) return Promise.resolve(null);
  if (!vocabularies.has(ref.hash)) {
    const wait = bytes(`console/api/vocabulary/${ref.hash}`).then((buffer) => new Vocabulary(buffer));
    wait.catch(() => vocabularies.delete(ref.hash));
    vocabularies.set(ref.hash, wait);
  }
  return vocabularies.get(ref.hash);
}

// Call `tell` with each moment until `signal` ends it; `failed` with each error, after which it is tried again.
export async function watchNow(tell, failed, signal) {
  while (!signal.aborted) {
    try {
      await readEvents(tell, signal);
    } catch (error) {
      if (signal.aborted) return;
      failed(error);
      if (error instanceof KeyWanted) return;
    }
    await new Promise((done) => setTimeout(done, 2000));
  }
}

// Server-sent events by `fetch`: EventSource sends no key.
async function readEvents(tell, signal) {
  const answer = await asked("console/api/now", "text/event-stream", signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let kept = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (kept + value).split("\n\n");
    kept = events.pop();
    for (const event of events) {
      const line = event.split("\n").find((one) => one.startsWith("data: "));
      if (line !== undefined) tell(JSON.parse(line.slice(6)));
    }
  }
}
