const seen = {errors: [], out: [], over: [], tiles: {}, tables: {}};
addEventListener("error", (event) => seen.errors.push(String(event.message)), true);
addEventListener("securitypolicyviolation", (event) => seen.errors.push("policy: " + event.violatedDirective));
console.error = console.warn = (...words) => seen.errors.push(words.join(" "));
addEventListener("load", () => {
  const wide = document.documentElement.clientWidth;
  seen.wide = wide;
  seen.scrolls = document.documentElement.scrollWidth - wide;
  for (const one of document.querySelectorAll("body *")) {
    if (one.closest(".scroll") && !one.matches(".scroll")) continue;
    const box = one.getBoundingClientRect();
    if (box.right > wide + 1 || box.left < -1) seen.out.push(one.tagName + " " + one.className + " " + one.textContent.slice(0, 40));
  }
  for (const drawing of document.querySelectorAll("svg")) {
    const texts = [...drawing.querySelectorAll(":scope text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([a, x], i) => texts.slice(i + 1).forEach(([b, y]) => {
      if (x.left < y.right && y.left < x.right && x.top < y.bottom - 2 && y.top < x.bottom - 2) seen.over.push(a + " / " + b);
    }));
  }
  for (const tile of document.querySelectorAll("[data-tile]")) seen.tiles[tile.dataset.tile] = tile.textContent;
  for (const table of document.querySelectorAll("table"))
    seen.tables[table.id] = [...table.tBodies[0].rows].map((row) => [...row.cells].map((cell) => cell.dataset.v ?? cell.textContent));
  const heads = [...document.querySelectorAll("#programs-table th")];
  heads.find((head) => head.textContent === "program")?.click();
  seen.sorted = [...document.querySelectorAll("#programs-table tbody tr")].map((row) => row.cells[0].textContent);
  seen.taken = window.taken ?? null;
  seen.scripts = document.scripts.length;
  seen.images = document.images.length;
  seen.loaded = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.documentElement.setAttribute("data-seen", encodeURIComponent(JSON.stringify(seen)));
});
