"use strict";
// A table that is wider than its place says so. The theme puts tables into boxes that scroll, after this script has run.
const cues = new Map();
const observer = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    const box = target.closest(".gallery .table") ?? target.closest(".md-typeset__scrollwrap");
    if (!box) continue;
    if (!cues.has(box)) {
      const cue = document.createElement("p");
      cue.className = "cue";
      cue.textContent = "More columns: scroll the table sideways";
      box.before(cue);
      cues.set(box, cue);
      observer.observe(box);
    }
    const boxes = [box, ...box.querySelectorAll(".md-typeset__scrollwrap")];
    cues.get(box).hidden = boxes.every((each) => each.scrollWidth - each.clientWidth <= 1);
  }
});
for (const each of document.querySelectorAll(".md-typeset table:not([class]), .gallery .table")) observer.observe(each);
