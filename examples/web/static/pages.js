// The cache's pages as a grid.

export class Pages {
  /// `words(first, last)` is the text of these tokens; `told(text)` says what is pointed at.
  constructor(grid, words, told) {
    Object.assign(this, { grid, words, told, at: null, table: [], tokens: 0, size: 16 });
    grid.addEventListener("pointerover", (event) => this.moveTo([...grid.children].indexOf(event.target)));
    grid.addEventListener("focus", () => this.moveTo(this.at ?? 0));
    grid.addEventListener("keydown", (event) => {
      const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
      const by = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -Infinity, End: Infinity }[event.key];
      if (!by) return;
      event.preventDefault();
      this.moveTo(Math.max(0, Math.min((this.at ?? 0) + by, grid.children.length - 1)));
    });
  }

  /// `table` has the sequence's pages in its order, `tokens` are in the cache.
  show(all, size, table, tokens) {
    Object.assign(this, { size, table, tokens });
    while (this.grid.children.length > all) this.grid.lastChild.remove();
    while (this.grid.children.length < all) {
      const page = document.createElement("span");
      page.textContent = this.grid.children.length;
      this.grid.append(page);
    }
    for (const page of this.grid.children) {
      page.classList.remove("used");
      page.style.removeProperty("--fill");
    }
    table.forEach((id, place) => {
      this.grid.children[id].classList.add("used");
      this.grid.children[id].style.setProperty("--fill", this.filled(place) / size);
    });
    this.tell();
  }

  filled(place) {
    return Math.min(this.size, this.tokens - place * this.size);
  }

  moveTo(at) {
    if (at < 0) return;
    this.grid.children[this.at]?.classList.remove("at");
    this.at = at;
    this.grid.children[at]?.classList.add("at");
    this.tell();
  }

  tell() {
    const place = this.table.indexOf(this.at);
    if (this.at === null) {
      this.told(`${this.table.length} of ${this.grid.children.length} pages are in use. Point at one, or focus the grid and use the arrow keys.`);
    } else if (place < 0) {
      this.told(`Page ${this.at} is free.`);
    } else {
      const [first, last] = [place * this.size, place * this.size + this.filled(place)];
      this.told(`Page ${this.at} holds tokens ${first + 1} to ${last}, ${last - first} of ${this.size}: ${this.words(first, last)}`);
    }
  }
}
