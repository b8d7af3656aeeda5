// The attention of one token as a picture: a line a head, layer by layer, a column a token.

const LABEL = 58;

export class Picture {
  /// `name(token)` is a token's text; `told(text)` says what is pointed at.
  constructor(canvas, legend, name, told) {
    Object.assign(this, { canvas, legend, name, told, weights: null, cursor: null });
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerdown", (event) => this.point(event));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("focus", () => this.weights && this.moveTo(this.cursor ?? { line: 0, token: this.tokens - 1 }));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  /// `weights` is `[layers, heads, tokens]`.
  show(weights, layers, heads) {
    Object.assign(this, { weights, layers, heads, lines: layers * heads, tokens: weights.length / (layers * heads) });
    if (this.cursor) this.cursor.token = Math.min(this.cursor.token, this.tokens - 1);
    this.draw();
    if (this.cursor) this.tell();
    else this.told(`${this.lines} heads, ${this.tokens} tokens.`);
  }

  clear() {
    this.weights = this.cursor = null;
    this.draw();
    this.told("No token yet.");
  }

  draw() {
    const { canvas } = this;
    const scale = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (!width) return;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    const ramp = colors(color("--cold"), color("--hot"));
    this.drawLegend(ramp);
    if (!this.weights) return;
    const [cellWidth, cellHeight] = [(width - LABEL) / this.tokens, height / this.lines];
    // One pixel a cell, enlarged: as fast for a thousand tokens.
    const image = new ImageData(this.tokens, this.lines);
    this.weights.forEach((weight, at) => image.data.set(ramp(Math.sqrt(weight)), at * 4));
    const cells = new OffscreenCanvas(this.tokens, this.lines);
    cells.getContext("2d").putImageData(image, 0, 0);
    context.imageSmoothingEnabled = false;
    context.drawImage(cells, LABEL, 0, width - LABEL, height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    for (let layer = 0; layer < this.layers; layer++) {
      const top = layer * this.heads * cellHeight;
      context.fillStyle = color("--quiet");
      context.fillText(`layer ${layer + 1}`, 0, top + this.heads * cellHeight / 2);
      context.fillStyle = color("--line");
      context.fillRect(0, top, width, 1);
    }
    if (this.cursor) {
      context.strokeStyle = color("--warn");
      context.lineWidth = 2;
      const [x, y] = [LABEL + this.cursor.token * cellWidth, this.cursor.line * cellHeight];
      context.strokeRect(x - 1, y, Math.max(cellWidth, 3) + 2, cellHeight);
    }
  }

  drawLegend(ramp) {
    const { width, height } = this.legend;
    const image = new ImageData(width, height);
    for (let at = 0; at < width * height; at++) image.data.set(ramp(Math.sqrt((at % width) / (width - 1))), at * 4);
    this.legend.getContext("2d").putImageData(image, 0, 0);
  }

  point(event) {
    if (!this.weights) return;
    const box = this.canvas.getBoundingClientRect();
    const token = Math.floor((event.clientX - box.left - LABEL) / (box.width - LABEL) * this.tokens);
    const line = Math.floor((event.clientY - box.top) / box.height * this.lines);
    if (token >= 0 && line >= 0) this.moveTo({ line, token });
  }

  key(event) {
    if (!this.weights) return;
    const { line, token } = this.cursor ?? { line: 0, token: this.tokens - 1 };
    const moved = {
      ArrowLeft: { line, token: token - 1 }, ArrowRight: { line, token: token + 1 },
      ArrowUp: { line: line - 1, token }, ArrowDown: { line: line + 1, token },
      Home: { line, token: 0 }, End: { line, token: this.tokens - 1 },
      PageUp: { line: line - this.heads, token }, PageDown: { line: line + this.heads, token },
    }[event.key];
    if (!moved) return;
    event.preventDefault();
    this.moveTo(moved);
  }

  moveTo({ line, token }) {
    const within = (x, end) => Math.max(0, Math.min(x, end - 1));
    this.cursor = { line: within(line, this.lines), token: within(token, this.tokens) };
    this.draw();
    this.tell();
  }

  tell() {
    const { line, token } = this.cursor;
    const weight = this.weights[line * this.tokens + token];
    const [layer, head] = [Math.floor(line / this.heads) + 1, line % this.heads + 1];
    this.told(`Layer ${layer}, head ${head}: token ${token + 1} of ${this.tokens}, ${this.name(token)}, has weight ${weight.toFixed(4)}.`);
  }
}

/// From one color to another, `#rrggbb` both: 0 to 1 becomes a pixel.
function colors(from, to) {
  const parts = (color) => [1, 3, 5].map((at) => parseInt(color.slice(at, at + 2), 16));
  const [a, b] = [parts(from), parts(to)];
  return (x) => [...a.map((part, at) => part + (b[at] - part) * Math.min(1, x)), 255];
}
