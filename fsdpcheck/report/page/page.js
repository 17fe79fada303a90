"use strict";
(() => {
  const all = (what, within = document) => [...within.querySelectorAll(what)];
  const one = (what) => document.querySelector(what);
  all("[hidden].copy, .tools[hidden], #theme[hidden]").forEach((found) => { found.hidden = false; });

  one("#theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = (root.style.colorScheme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
    root.style.colorScheme = dark ? "light" : "dark";
  });

  all(".copy").forEach((button) => button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
    } catch {  // a file may have no clipboard: then it is chosen, and a key copies it
      getSelection().selectAllChildren(code);
      button.textContent = "Selected";
    }
  }));

  const data = one("#data");
  if (!data) return;
  const chapters = JSON.parse(data.textContent);
  const details = all(".matrix .chapter");
  const cells = all(".matrix button.cell");
  const more = one("#more");
  let chosen = null;

  const seen = () => cells.filter((cell) => cell.closest("details").open && !cell.closest("tr").hidden && !cell.closest("details").hidden);
  const stop = (cell) => { cells.forEach((other) => { other.tabIndex = other === cell ? 0 : -1; }); };
  const restart = () => { const left = seen(); if (!left.includes(document.activeElement)) stop(left[0]); };

  function tell(cell) {
    const [chapter, row, column] = cell.dataset.more.split(".").map(Number);
    const law = chapters[chapter][row];
    const check = law.cells[column];
    more.querySelector("h3").textContent = check.told;
    more.querySelector("p").textContent = law.guarantee;
    more.querySelector("dl").replaceChildren(...check.more.map(([name, said]) => {
      const [line, term, value] = ["div", "dt", "dd"].map((tag) => document.createElement(tag));
      term.textContent = name;
      value.textContent = said;
      line.append(term, value);
      return line;
    }));
    if (chosen) chosen.removeAttribute("aria-pressed");
    chosen = cell;
    cell.setAttribute("aria-pressed", "true");
    more.hidden = false;
  }

  function leave() {
    if (more.hidden) return;
    more.hidden = true;
    chosen.removeAttribute("aria-pressed");
    chosen.focus();
  }

  function move(cell, key) {
    const row = all("button.cell", cell.closest("tr"));
    const column = row.indexOf(cell);
    if (key === "Home") return row[0];
    if (key === "End") return row.at(-1);
    if (key === "ArrowLeft" || key === "ArrowRight") return row[column + (key === "ArrowLeft" ? -1 : 1)];
    const same = seen().filter((other) => all("button.cell", other.closest("tr")).indexOf(other) === column);
    return same[same.indexOf(cell) + (key === "ArrowUp" ? -1 : 1)];
  }

  cells.forEach((cell) => {
    cell.addEventListener("click", () => tell(cell));
    cell.addEventListener("keydown", (event) => {
      if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End"].includes(event.key)) return;
      event.preventDefault();
      const next = move(cell, event.key);
      if (!next) return;
      stop(next);
      next.focus();
      if (!more.hidden) tell(next);
    });
  });
  one("#close").addEventListener("click", leave);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") leave(); });
  details.forEach((chapter) => chapter.addEventListener("toggle", restart));
  restart();

  const unfold = one("#unfold");
  unfold.addEventListener("click", () => {
    const open = !details.every((chapter) => chapter.open);
    details.forEach((chapter) => { chapter.open = open; });
    unfold.textContent = open ? "Close all" : "Open all";
  });

  const first = details.map((chapter) => chapter.open);
  one("#filter").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    let count = 0;
    details.forEach((chapter, number) => {
      const rows = all("tbody tr", chapter);
      rows.forEach((row) => { row.hidden = !row.querySelector("th").textContent.toLowerCase().includes(wanted); });
      const left = rows.filter((row) => !row.hidden).length;
      chapter.hidden = !left;
      chapter.open = wanted ? left > 0 : first[number];
      count += left;
    });
    one("#matches").textContent = wanted ? `${count} law${count === 1 ? "" : "s"}` : "";
    restart();
  });
})();
