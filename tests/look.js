// What is wrong with the page as it is seen: see Browser.look in browser.py. Each list names its elements.
() => {
  const root = document.documentElement, SEVERAL = 12;
  const box = (element) => element.getBoundingClientRect();
  const style = (element) => getComputedStyle(element);
  const called = (element) => {
    const text = (element.textContent || element.getAttribute("src") || "").trim().replace(/\s+/g, " ").slice(0, 60);
    return `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""}: ${text}`;
  };
  const colour = (said) => {
    const numbers = (said.match(/[\d.]+/g) || []).map(Number);
    if (said.startsWith("color(srgb")) numbers.splice(0, 3, ...numbers.slice(0, 3).map((c) => 255 * c));
    return numbers.length < 3 ? [0, 0, 0, 0] : [...numbers.slice(0, 3), numbers.length > 3 ? numbers[3] : 1];
  };
  const over = (top, below, alpha = top[3]) => [0, 1, 2].map((i) => alpha * top[i] + (1 - alpha) * below[i]).concat(1);
  const luminance = (c) => {
    const [r, g, b] = c.slice(0, 3).map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => {
    const [dark, light] = [luminance(a), luminance(b)].sort((x, y) => x - y);
    return (light + 0.05) / (dark + 0.05);
  };
  const parents = function* (element) { for (let e = element; e; e = e.parentElement) yield e; };
  // The ground of a text: the colours of its ancestors, from the canvas up; of a text in a figure what is painted at its middle.
  const canvas = style(root).colorScheme.includes("dark") && matchMedia("(prefers-color-scheme: dark)").matches ? [18, 18, 18, 1] : [255, 255, 255, 1];
  const ground = (element) => {
    let found = canvas;
    for (const e of [...parents(element)].reverse()) if (!(e instanceof SVGElement)) found = over(colour(style(e).backgroundColor), found);
    if (!(element instanceof SVGElement)) return found;
    const svg = element.ownerSVGElement, middle = box(element), x = middle.x + middle.width / 2, y = middle.y + middle.height / 2;
    for (const shape of svg.querySelectorAll("path, rect")) {
      if (shape.closest("defs") || shape.compareDocumentPosition(element) & Node.DOCUMENT_POSITION_PRECEDING) continue;
      const fill = style(shape).fill, area = box(shape);
      if (!fill.startsWith("rgb") || x < area.left || x > area.right || y < area.top || y > area.bottom) continue;
      found = over(colour(fill), found, colour(fill)[3] * Number(style(shape).fillOpacity) * Number(style(shape).opacity));
    }
    return found;
  };
  const seen = (element) => element.checkVisibility({ opacityProperty: true, visibilityProperty: true, contentVisibilityAuto: true });
  const scrolls = (element) => /auto|scroll/.test(style(element).overflowX);
  // Every piece of text that can be seen: its element, and its boxes line by line, without what a scrolling box keeps out of sight.
  const pieces = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || /^(SCRIPT|STYLE|NOSCRIPT|TITLE|OPTION|TEMPLATE)$/i.test(element.tagName) || !seen(element)) continue;
    if (element.closest("metadata, defs, [aria-hidden=true], .md-clipboard, .md-search, .md-top, .md-header__topic, .headerlink")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    const frames = [...parents(element)].filter((e) => e !== root && e !== document.body && style(e).overflowX !== "visible" && !(e instanceof SVGElement)).map(box);
    const boxes = [...range.getClientRects()].filter((r) => r.width > 1 && r.height > 1)
      .filter((r) => frames.every((f) => r.right > f.left + 1 && r.left < f.right - 1 && r.bottom > f.top + 1 && r.top < f.bottom - 1));
    if (boxes.length) pieces.push({ element, boxes, text: node.data.trim().replace(/\s+/g, " ").slice(0, 50) });
  }
  const found = { sideways: [], wide: [], cut: [], alike: [], overlap: [], faint: [], small: [], images: [], title: [], axes: [] };
  if (root.scrollWidth > innerWidth) found.sideways.push(`${root.scrollWidth} pixels on a screen of ${innerWidth}`);
  const loud = new Map();
  for (const { element, boxes, text } of pieces) {
    const svg = element.ownerSVGElement, held = [...parents(element)].some((e) => scrolls(e) || style(e).position === "fixed");  // a drawer waits beside the screen
    // wide: beyond the screen where nothing scrolls to it.
    if (!held && boxes.some((b) => b.right > innerWidth + 1 || b.left < -1)) found.wide.push(`${called(element)} [${text}]`);
    // cut: by a box that hides what is too long for it, or by the edge of a figure.
    const hider = [...parents(element)].find((e) => !(e instanceof SVGElement) && /hidden|clip/.test(style(e).overflowX) && e !== root && e !== document.body);
    if (hider && boxes.some((b) => b.right > box(hider).right + 1) && !scrolls(hider) && box(hider).width > 2) found.cut.push(`${called(hider)} [${text}]`);
    if (svg) {
      const frame = box(svg);
      if (boxes.some((b) => b.left < frame.left - 1 || b.right > frame.right + 1 || b.top < frame.top - 1 || b.bottom > frame.bottom + 1)) found.cut.push(`figure: ${text}`);
      if (Math.min(...boxes.map((b) => b.height)) < 6) found.small.push(text);
    }
    // faint: below WCAG 2.1's level AA, 4.5, or 3 where letters are large.
    const looks = style(element), under = ground(element), size = parseFloat(looks.fontSize);
    let ink = colour(svg ? looks.fill : looks.color);
    const dimmed = [...parents(element)].reduce((opacity, e) => opacity * Number(style(e).opacity), 1);
    ink = over(ink, under, ink[3] * dimmed);
    const least = !svg && (size >= 24 || (size >= 18.66 && Number(looks.fontWeight) >= 700)) ? 3 : 4.5;
    const ratio = contrast(ink, under);
    const key = `${ink.map(Math.round)} on ${under.map(Math.round)}`;
    if (ratio < least && !loud.has(key)) loud.set(key, `${ratio.toFixed(2)}, ${key}: ${element.tagName.toLowerCase()}.${element.className?.baseVal ?? element.className} [${text}]`);
  }
  found.faint = [...loud.values()];
  // overlap: two texts that share much of a line, of one figure or of one flow.
  const lines = pieces.flatMap(({ element, boxes, text }) => boxes.map((b) => ({ element, b, text }))).sort((p, q) => p.b.top - q.b.top);
  for (let i = 0; i < lines.length; i++) {
    for (let j = i + 1; j < lines.length && lines[j].b.top < lines[i].b.bottom; j++) {
      const [p, q] = [lines[i].b, lines[j].b];
      const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left), high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
      const fixed = [lines[i], lines[j]].some(({ element }) => [...parents(element)].some((e) => /fixed|sticky/.test(style(e).position)));
      if (wide > 2 && high > 0.45 * Math.min(p.height, q.height) && !fixed) found.overlap.push(`[${lines[i].text}] and [${lines[j].text}]`);
    }
  }
  // alike: texts of one figure or table that were shortened until they say the same.
  for (const whole of document.querySelectorAll("svg, table")) {
    const short = pieces.filter(({ element, text }) => whole.contains(element) && text.endsWith("\u2026")).map(({ text }) => text);
    found.alike.push(...short.filter((text, place) => short.indexOf(text) < place));
  }
  // axes: a line or a mark that ends beyond the axes that it is drawn in, by more than half a mark, unless the figure says so.
  for (const drawn of document.querySelectorAll("svg [clip-path]")) {
    const edge = document.querySelector(`${drawn.getAttribute("clip-path").slice(4, -1)} rect`), line = drawn.getBBox?.();
    if (!edge || !line || !seen(drawn) || !(line.width + line.height) || /patch|image|Collection|Mesh/.test(drawn.closest("g[id]")?.id)) continue;
    const [left, top, width, height] = ["x", "y", "width", "height"].map((name) => Number(edge.getAttribute(name)));
    const said = /above the frame/.test(drawn.ownerSVGElement.textContent) ? -Infinity : 0;
    const out = Math.max(left - line.x, line.x + line.width - left - width, top - line.y + said, line.y + line.height - top - height);
    const heading = drawn.closest("figure")?.textContent.trim().slice(0, 40) || drawn.ownerSVGElement.ariaLabel || "";
    if (out > 5) found.axes.push(`${drawn.closest("g[id]")?.id}: ${out.toFixed(1)} beyond its axes, ${heading}`);
  }
  for (const image of document.images) if (seen(image) && !(image.complete && image.naturalWidth > 0)) found.images.push(called(image));
  const heading = document.querySelector("h1");
  if (heading && innerWidth <= 400 && seen(heading)) {
    const lines = Math.round(heading.clientHeight / parseFloat(style(heading).lineHeight));
    if (lines > 2) found.title.push(`${lines} lines: ${called(heading)}`);
  }
  return Object.fromEntries(Object.entries(found).map(([what, list]) => [what, [...new Set(list)].slice(0, SEVERAL)]));
}
