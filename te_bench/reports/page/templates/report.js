"use strict";
// A click on a heading sorts its table by that column, a second click the other way; what was not measured stays last.
for (const table of document.querySelectorAll("table")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const descending = heading.getAttribute("aria-sort") === "ascending";
      headings.forEach((other) => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", descending ? "descending" : "ascending");
      const numeric = heading.classList.contains("number");
      const value = (row) => row.cells[column].dataset.value;
      const compare = (a, b) => (numeric ? Number(a) - Number(b) : a.localeCompare(b, "en", { numeric: true }));
      const rows = [...table.tBodies[0].rows].sort((first, second) => {
        const a = value(first), b = value(second);
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        return descending ? compare(b, a) : compare(a, b);
      });
      table.tBodies[0].append(...rows);
    });
  });
}
// A table that is wider than the page says so, and its edge is shaded until its last column is in sight.
for (const table of document.querySelectorAll(".table")) {
  const cue = document.createElement("p");
  cue.className = "cue";
  cue.textContent = "More columns: scroll the table sideways";
  table.before(cue);
  const look = () => {
    const hidden = table.scrollWidth - table.clientWidth;
    cue.hidden = hidden <= 1;
    table.classList.toggle("cut", hidden - table.scrollLeft > 1);
  };
  table.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(table);
  look();
}
