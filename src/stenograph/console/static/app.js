// The page: which view the address names, the key that a server asks for, and the keyboard.

import { KeyWanted, fileSession, isFile, setKey } from "./data.js";
import { AccountsView } from "./accounts.js";
import { GroupView } from "./group.js";
import { GroupsView } from "./groups.js";
import { NowView } from "./now.js";
import { SessionView } from "./session.js";
import { SessionsView } from "./sessions.js";
import { COLOURS } from "./tokens.js";
import { TABS } from "./drawer.js";
import { html, placeOf, render, sessionPlace, useEffect, useState } from "./ui.js";

const HELP = [
  ["1, 2, 3, 4", "now, sessions, groups, accounts"],
  ["/", "filter the sessions"],
  ["j, k", "next turn, turn before"],
  ["c", "colour by the next thing"],
  ["[, ]", "tab before, next tab"],
  ["← →", "in the tokens: token before, next token; Page Up and Down, Home, End"],
  ["r", "ask the server again"],
  ["?", "this list"],
];

function whereOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [view, ...rest] = path.split("/");
  return { view: view || (isFile ? "session" : "now"), rest: rest.join("/"), query: new URLSearchParams(query) };
}

function clickNext(selector, step) {
  const all = [...document.querySelectorAll(selector)];
  const at = all.findIndex((one) => one.getAttribute("aria-checked") === "true" || one.getAttribute("aria-selected") === "true");
  all[(at + step + all.length) % all.length]?.click();
}

// The next turn in the order of their commits; their buttons in view are what can be stepped through.
function stepTurn(step) {
  const all = [...document.querySelectorAll(".graph-row:not(.off)")].sort((one, other) => Number(one.parentElement.dataset.row) - Number(other.parentElement.dataset.row));
  const at = all.findIndex((one) => one.classList.contains("current"));
  all[Math.max(0, Math.min(all.length - 1, at + step))]?.click();
}

const KEYS = {
  1: () => { location.hash = placeOf("now"); },
  2: () => { location.hash = placeOf("sessions"); },
  3: () => { location.hash = placeOf("groups"); },
  4: () => { location.hash = placeOf("accounts"); },
  "/": () => document.querySelector("[data-filter]")?.focus(),
  j: () => stepTurn(1),
  k: () => stepTurn(-1),
  c: () => clickNext("[data-colour]", 1),
  "]": () => clickNext("[data-tab]", 1),
  "[": () => clickNext("[data-tab]", -1),
  r: () => document.querySelector("[data-again]")?.click(),
};

function KeyForm({ onKey }) {
  const [key, setTyped] = useState("");
  const send = (event) => {
    event.preventDefault();
    setKey(key);
    onKey();
  };
  return html`<main class="page"><form class="key" onSubmit=${send}><label>This server asks for a key.
    <input type="password" autocomplete="off" value=${key} onInput=${(event) => setTyped(event.target.value)} /></label>
    <button>look</button><p class="dim">It is kept in this tab alone, and sent to this server alone.</p></form></main>`;
}

function App() {
  const [where, setWhere] = useState(whereOf(location.hash));
  const [needsKey, setNeedsKey] = useState(false);
  const [hasHelp, setHasHelp] = useState(false);
  const [tries, setTries] = useState(0);
  useEffect(() => {
    const moved = () => setWhere(whereOf(location.hash));
    const pressed = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || /^(input|select|textarea)$/i.test(event.target.tagName)) {
        if (event.key === "Escape") event.target.blur();
        return;
      }
      if (event.key === "?") setHasHelp((shown) => !shown);
      else if (event.key === "Escape") setHasHelp(false);
      else if (event.key in KEYS) {
        event.preventDefault();
        KEYS[event.key]();
      }
    };
    addEventListener("hashchange", moved);
    addEventListener("keydown", pressed);
    return () => {
      removeEventListener("hashchange", moved);
      removeEventListener("keydown", pressed);
    };
  }, []);
  const onError = (error) => { if (error instanceof KeyWanted) setNeedsKey(true); };
  const tab = (view, text) => html`<a href=${placeOf(view)} aria-current=${where.view === view ? "page" : null}>${text}</a>`;
  const id = where.view === "session" ? where.rest || fileSession : null;
  return html`
    <nav class="top" aria-label="views"><b>stenograph</b>${!isFile && tab("now", "now")}${!isFile && tab("sessions", "sessions")}${!isFile && tab("groups", "groups")}${!isFile && tab("accounts", "accounts")}
      ${id !== null && html`<a href=${sessionPlace(id)} aria-current="page">session</a>`}${where.view === "group" && html`<a aria-current="page">group</a>`}
      <span class="gap"></span><button onClick=${() => setHasHelp(!hasHelp)} aria-expanded=${hasHelp}>keys ?</button></nav>
    ${hasHelp && html`<aside class="help" role="dialog" aria-label="keys"><dl>${HELP.map(([key, text]) => html`<dt>${key}</dt><dd>${text}</dd>`)}</dl>
      <p class="dim">Colours: ${COLOURS.join(", ")}. Tabs: ${TABS.join(", ")}.</p></aside>`}
    ${needsKey ? html`<${KeyForm} onKey=${() => { setNeedsKey(false); setTries(tries + 1); }} />` : html`<${ViewOf} key=${`${where.view} ${tries}`} where=${where} id=${id} onError=${onError} />`}`;
}

function ViewOf({ where, id, onError }) {
  if (id !== null) return html`<${SessionView} key=${id} id=${id} query=${where.query} onError=${onError} />`;
  if (where.view === "group") return html`<${GroupView} name=${decodeURIComponent(where.rest)} onError=${onError} />`;
  if (where.view === "groups") return html`<${GroupsView} query=${where.query} onError=${onError} />`;
  if (where.view === "accounts") return html`<${AccountsView} query=${where.query} onError=${onError} />`;
  if (where.view === "sessions") return html`<${SessionsView} query=${where.query} onError=${onError} />`;
  return html`<${NowView} onError=${onError} />`;
}

render(html`<${App} />`, document.getElementById("app"));
