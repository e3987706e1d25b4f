// The small view library, and the pieces that all views are made of.

import { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/preact-htm.js";
import { number, seconds } from "./text.js";
import { VirtualRows } from "./rows.js";

export { html, render, useEffect, useLayoutEffect, useMemo, useRef, useState };

export const placeOf = (path, query = {}) => {
  const given = Object.entries(query).filter(([, value]) => value !== null && value !== undefined);
  return `#/${path}${given.length === 0 ? "" : `?${new URLSearchParams(given)}`}`;
};
export const sessionPlace = (id, query) => placeOf(`session/${id}`, query);
export const groupPlace = (name) => placeOf(`group/${encodeURIComponent(name)}`);

// Ask for something when the keys change: `{ value, error }`, both null while it is on its way.
export function useAsked(ask, keys) {
  const [state, setState] = useState({ value: null, error: null });
  useEffect(() => {
    let gone = false;
    setState({ value: null, error: null });
    ask().then(
      (value) => gone || setState({ value, error: null }),
      (error) => gone || setState({ value: null, error }),
    );
    return () => { gone = true; };
  }, keys);
  return state;
}

export function Note({ asked, children }) {
  if (asked.error !== null) return html`<p class="note error" role="alert">${asked.error.message}</p>`;
  return asked.value === null ? html`<p class="note">…</p>` : children;
}

export function Figure({ name, value, unit = "", hint = "" }) {
  return html`<div class="figure" title=${hint}><b>${value}</b>${unit && html`<i>${unit}</i>`}<span>${name}</span></div>`;
}

export const Chip = ({ kind = "", children }) => html`<span class="chip ${kind}">${children}</span>`;

// A list whose rows are made by the view library, those in view alone. `draw(index)` gives a row's content.
export function Rows({ num, height, draw, keys, shown = null, label, list = "div" }) {
  const scroller = useRef(null);
  const rows = useRef(null);
  const drawn = useRef(draw);
  drawn.current = draw;
  useLayoutEffect(() => {
    rows.current = new VirtualRows(scroller.current, (index) => {
      const element = document.createElement(list);
      render(drawn.current(index), element);
      return element;
    });
    return () => rows.current.close();
  }, []);
  useLayoutEffect(() => {
    rows.current.reset(num, () => height);
    rows.current.update();
  }, [num, height]);
  useLayoutEffect(() => {
    for (const [index, element] of rows.current.rows) render(drawn.current(index), element);
    rows.current.soon();
  }, keys);
  useEffect(() => {
    if (shown !== null) rows.current.show(shown);
  }, [shown, num]);
  return html`<div class="scroller" ref=${scroller} tabindex="0" aria-label=${label}></div>`;
}

export function Quantile({ name, of, hint }) {
  const told = of.num === 0 ? "–" : `${seconds(of.p50)} · ${seconds(of.p99)}`;
  return html`<${Figure} name="${name} p50 · p99" value=${told} hint="${hint}; ${number(of.num)} in the last minute" />`;
}

// A chart of uPlot's in an element of its own; `data` may change, `options` are read once.
export function Chart({ data, options, label }) {
  const place = useRef(null);
  const plot = useRef(null);
  useEffect(() => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    plot.current = new uPlot({ ...options(colour), width: place.current.clientWidth || 300 }, data, place.current);
    const resized = new ResizeObserver(() => {
      plot.current.setSize({ width: place.current.clientWidth, height: plot.current.height });
    });
    resized.observe(place.current);
    return () => {
      resized.disconnect();
      plot.current.destroy();
    };
  }, []);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<figure class="chart"><figcaption>${label}</figcaption><div ref=${place}></div></figure>`;
}

export const axisOf = (colour, more = {}) => ({
  stroke: colour("--dim"),
  grid: { stroke: colour("--line"), width: 1 },
  ticks: { show: false },
  font: "11px system-ui",
  size: 44,
  ...more,
});
