// The turns of a session as a graph in the order of their commits: a lane for each line.

import { html, Rows, useMemo } from "./ui.js";
import { number } from "./text.js";

const ROW = 20;
const LANE = 12;
const MOST_LANES = 10;

const laneX = (lane) => 9 + Math.min(lane, MOST_LANES) * LANE;

// For each turn its lane, and for each lane the rows that it spans and where it comes from.
function lanesOf(shape) {
  const { id, parent, strand } = shape.turns;
  const rowOf = new Map(id.map((node, row) => [node, row]));
  const lanes = [];
  const lastOf = [];
  const laneOf = [];
  const continues = new Map(shape.strands.map((one) => [one.strand, one.continues]));
  const lastOfStrand = new Map();
  id.forEach((node, row) => {
    const from = parent[row] === -1 ? null : rowOf.get(parent[row]);
    let lane = from === null ? -1 : laneOf[from];
    if (lane === -1 || lastOf[lane] !== from) {
      lane = lanes.length;
      const before = continues.get(strand[row]) ?? null;
      const origin = from ?? (before === null ? null : lastOfStrand.get(before) ?? null);
      lanes.push({ first: row, last: row, from: origin, dashed: from === null && origin !== null });
    }
    laneOf[row] = lane;
    lanes[lane].last = row;
    lastOf[lane] = row;
    lastOfStrand.set(strand[row], row);
  });
  return { laneOf, lanes };
}

export function TurnGraph({ shape, leaf, line, node, onPick }) {
  const { laneOf, lanes } = useMemo(() => lanesOf(shape), [shape]);
  const columns = shape.turns;
  const onLine = useMemo(() => new Set(line.map((turn) => turn.node)), [line]);
  const width = laneX(Math.min(lanes.length, MOST_LANES)) + 4;
  const kinds = new Map(shape.strands.map((one) => [one.strand, one.kind]));
  const shown = columns.id.indexOf(node);
  return html`<${Rows} num=${columns.id.length} height=${ROW} keys=${[shape, leaf, node]} shown=${shown < 0 ? null : shown} label="turns" draw=${(row) => {
    const id = columns.id[row];
    if (id === undefined) return "";
    const starts = lanes[laneOf[row]].first === row;
    const status = columns.statuses[columns.status[row]];
    return html`<button class="graph-row ${onLine.has(id) ? "" : "off"} ${id === node ? "current" : ""}" onClick=${() => onPick(id)}
        title="node ${id}, strand ${columns.strand[row]} ${kinds.get(columns.strand[row])}, ${status}">
      <svg width=${width} height=${ROW} aria-hidden="true">${strokesOf(row, laneOf, lanes)}
        <circle cx=${laneX(laneOf[row])} cy=${ROW / 2} r="4" class="lane-${laneOf[row] % 8} ${status}" /></svg>
      <span class="mono">${id}</span>${starts && html`<em>${kinds.get(columns.strand[row])}</em>`}
      <span class="dim num">+${number(columns.num_prompt[row])} / ${number(columns.num_sampled[row])}</span></button>`;
  }} />`;
}

// The strokes of the lanes that pass through a row, or come to it from another lane.
function strokesOf(row, laneOf, lanes) {
  const strokes = [];
  lanes.forEach((lane, index) => {
    const x = laneX(index);
    const name = `lane-${index % 8}${lane.dashed ? " dashed" : ""}`;
    const begin = lane.from === null ? lane.first : lane.from;
    if (row < begin || row > lane.last) return;
    if (lane.from === row) {
      strokes.push(html`<path class=${name} d="M${laneX(laneOf[row])} ${ROW / 2} L${x} ${ROW}" />`);
    } else if (row < lane.first) {
      strokes.push(html`<path class=${name} d="M${x} 0 V${ROW}" />`);
    } else {
      const top = row === lane.first && lane.from === null ? ROW / 2 : 0;
      const down = row === lane.last ? ROW / 2 : ROW;
      strokes.push(html`<path class="lane-${index % 8} ${row === lane.first && lane.dashed ? "dashed" : ""}" d="M${x} ${top} V${down}" />`);
    }
  });
  return strokes;
}
