// Rows of any height, of which only those in view are in the document.

const OVERSCAN = 400;

export class VirtualRows {
  // `make(index)` gives a row's element; `estimate(index)` its height until it has been seen.
  constructor(scroller, make) {
    this.scroller = scroller;
    this.make = make;
    this.inner = document.createElement("div");
    this.inner.className = "rows-inner";
    scroller.replaceChildren(this.inner);
    this.rows = new Map();
    this.unseen = new Set(); // rows whose height has to be looked at
    this.reset(0, () => 0);
    this.waiting = 0;
    this.onScroll = () => this.soon();
    scroller.addEventListener("scroll", this.onScroll, { passive: true });
    this.sizes = new ResizeObserver((entries) => {
      for (const { target } of entries) if (target !== scroller) this.unseen.add(target);
      this.soon();
    });
    this.sizes.observe(scroller);
  }

  close() {
    cancelAnimationFrame(this.waiting);
    this.scroller.removeEventListener("scroll", this.onScroll);
    this.sizes.disconnect();
  }

  reset(num, estimate) {
    this.num = num;
    this.heights = new Float64Array(num);
    this.tops = new Float64Array(num + 1);
    for (let index = 0; index < num; index += 1) this.heights[index] = estimate(index);
    for (const row of this.rows.values()) this.drop(row);
    this.rows.clear();
    this.sum();
  }

  drop(row) {
    this.sizes?.unobserve(row);
    this.unseen.delete(row);
    row.remove();
  }

  sum() {
    let top = 0;
    for (let index = 0; index < this.num; index += 1) {
      this.tops[index] = top;
      top += this.heights[index];
    }
    this.tops[this.num] = top;
    this.inner.style.height = `${top}px`;
  }

  soon() {
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => {
      this.waiting = 0;
      this.update();
    });
  }

  // The row at a height.
  at(top) {
    let low = 0;
    let high = this.num - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tops[middle] <= top) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  // Make the rows that are in view, and take their real heights; what is in view stays where it is.
  update(again = 3) {
    if (this.num === 0) return;
    const top = this.scroller.scrollTop;
    const bottom = top + this.scroller.clientHeight;
    const first = this.at(top - OVERSCAN);
    const last = this.at(bottom + OVERSCAN);
    for (const [index, row] of this.rows) {
      if (index < first || index > last) {
        this.rows.delete(index);
        this.drop(row);
      }
    }
    for (let index = first; index <= last; index += 1) {
      if (this.rows.has(index)) continue;
      const row = this.make(index);
      row.classList.add("row");
      row.dataset.row = index;
      this.rows.set(index, row);
      row.style.top = `${this.tops[index]}px`;
      this.inner.append(row);
      this.sizes.observe(row);
      this.unseen.add(row);
    }
    let shift = 0;
    let changed = false;
    for (const row of this.unseen) {
      const index = Number(row.dataset.row);
      const height = row.offsetHeight;
      const more = height - this.heights[index];
      if (Math.abs(more) < 0.5) continue;
      if (this.tops[index] + this.heights[index] <= top) shift += more;
      this.heights[index] = height;
      changed = true;
    }
    this.unseen.clear();
    if (changed) {
      this.sum();
      for (const [index, row] of this.rows) row.style.top = `${this.tops[index]}px`;
    }
    if (shift !== 0) this.scroller.scrollTop = top + shift;
    const isCovered = last === this.num - 1 || this.tops[last + 1] > bottom;
    if (changed && again > 0 && !isCovered) this.update(again - 1);
  }

  // Bring a row to the top, or where it is seen if it is near.
  show(index, gap = 8) {
    if (index < 0 || index >= this.num) return;
    for (let pass = 0; pass < 3; pass += 1) {
      this.scroller.scrollTop = Math.max(0, this.tops[index] - gap);
      this.update();
    }
  }
}
